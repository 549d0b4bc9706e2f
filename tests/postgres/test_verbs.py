"""The verbs that start and stop a PostgreSQL of one's own."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cli.terminal import kilburn


def test_a_server_is_started_and_stopped() -> None:
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as short:
        # Whoever runs the server enters it.
        Path(short).chmod(0o711)
        folder = Path(short) / "my server"
        begun = kilburn("postgres", "start", "--dir", folder)
        try:
            # Nothing but the URL, for `KILBURN_DB=$(kilburn postgres start)`.
            assert (begun.status, begun.out.startswith("postgresql://"), begun.out.count("\n")) == (0, True, 1), begun.err
            assert "`kilburn copy` makes one" in kilburn("ps", "--db", begun.out.strip()).err
        finally:
            ended = kilburn("postgres", "stop", "--dir", folder, "--delete")
        assert (ended.status, ended.out) == (0, f"stopped: {folder}, and removed\n")
        assert not folder.exists()

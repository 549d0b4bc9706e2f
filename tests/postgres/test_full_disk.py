"""A server whose disk is full: an append fails as a whole, and goes on when there is space again."""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random

import psycopg
import pytest

import kilburn
from cli.terminal import kilburn as run
from kilburn.backends.postgres.connection import translate_errors
from kilburn.backends.postgres.server import OwnServer
from kilburn.errors import StoreError, StoreFull, StoreUnavailable
from kilburn.testing import check_laws

pytestmark = pytest.mark.slow


@contextmanager
def small(megabytes: int) -> Iterator[Path]:
    """A folder in which only so much fits."""
    with tempfile.TemporaryDirectory(prefix="pgf", dir="/tmp") as folder:
        Path(folder).chmod(0o711)
        place = Path(folder) / "small"
        place.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=777", "tmpfs", str(place)]
        if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no small disk here: only root may mount one")
        try:
            yield place
        finally:
            subprocess.run(["umount", "-l", str(place)], check=True)


def fill(session: kilburn.Session) -> tuple[list[str], StoreError]:
    """Append until something fails; returns what was acknowledged, and the error."""
    random, said = Random(1), []
    while True:
        text = f"{len(said)} {random.randbytes(40_000).hex()}"
        try:
            session.append({"role": "user", "content": text})
        except StoreError as error:
            return said, error
        said.append(text)


def check_continues(url: str, said: list[str]) -> None:
    """All that was acknowledged is there and nothing else, whole; and it goes on."""
    with kilburn.open(url, window=200_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        assert [message["content"] for message in session.contents.messages()] == said
        session.append({"role": "user", "content": "there is space again"})
        check_laws(session)
        assert store.search("space again")[0].address == f"p{len(said) + 1}"
    assert "all is well" in run("fsck", "--db", url).out


def test_a_disk_for_tables_that_is_full(server: OwnServer) -> None:
    admin = server.url.replace("/kilburn?", "/postgres?")
    url = server.url.replace("/kilburn?", "/tiny?")
    with small(16) as place, psycopg.connect(admin, autocommit=True) as connection:
        (tables := place / "tables").mkdir()
        if server._user is not None:
            os.chown(tables, server._user.pw_uid, server._user.pw_gid)
        ballast = place / "ballast"
        ballast.write_bytes(bytes(2 << 20))
        connection.execute(f"CREATE TABLESPACE small LOCATION '{tables}'")
        try:
            connection.execute("CREATE DATABASE tiny TABLESPACE small STRATEGY file_copy")
            with kilburn.open(url, window=200_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
                session = store.session("s")
                said, error = fill(session)
                assert said
                assert isinstance(error, StoreFull)
                assert "free some space on the server; nothing of this write was kept" in str(error)
                assert [message["content"] for message in session.contents.messages()] == said
                store.search("nothing")
                # A verb says so, too; a little may still fit, and a busy server may ask to try again.
                random, told, tries = Random(2), None, 0
                while told is None or told.status == 0 or ("try again" in told.err and (tries := tries + 1) < 5):
                    told = run("remember", "--db", url, "--user", "ana", "--secrets", "off", random.randbytes(4900).hex())
                assert (told.status, "Traceback" in told.err, "free some space" in told.err) == (1, False, True), told.err
                ballast.unlink()
                session.append({"role": "user", "content": "and on"})
            check_continues(url, [*said, "and on"])
        finally:
            connection.execute("DROP DATABASE IF EXISTS tiny WITH (FORCE)")
            connection.execute("DROP TABLESPACE small")


def test_a_disk_for_the_log_that_is_full(server: OwnServer) -> None:
    """The server stops itself; what it has acknowledged is there when it is started again."""
    running = server
    with small(160) as place:
        server = OwnServer(place / "s", ("fsync=off", "max_wal_size=32MB", "min_wal_size=32MB", "shared_buffers=16MB"))
        server.programs = running.programs
        url = server.start()
        try:
            with kilburn.open(url, window=200_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
                session = store.session("s")
                session.append({"role": "user", "content": "first"})
                room = os.statvfs(place)
                ballast = place / "ballast"
                ballast.write_bytes(bytes(room.f_bavail * room.f_frsize - (2 << 20)))
                said, error = fill(session)
                assert isinstance(error, StoreFull | StoreUnavailable)
            ballast.unlink()
            server.stop("immediate")
            server.start()
            with kilburn.open(url, window=200_000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
                found = [message["content"] for message in store.session("s").contents.messages()]
            # One whose commit was not answered may be there.
            assert found[: len(said) + 1] == ["first", *said]
            assert len(found) <= len(said) + 2
            check_continues(url, found)
        finally:
            server.stop("immediate")


def test_a_server_that_lets_nobody_in_because_its_disk_is_full_is_told_as_such() -> None:
    said = "connection failed: FATAL:  could not write init file: No space left on device"
    with pytest.raises(StoreFull, match="free some space"), translate_errors("postgresql://here/db", "opening"):
        raise psycopg.OperationalError(said)

"""Through pgbouncer in transaction mode: each transaction may go to another connection, and leaves nothing on it."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
import pytest

import kilburn
from kilburn.backend import Batch
from kilburn.backends.postgres.connection import connected, is_pooled
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import KilburnError, StoreBusy, StoreError, StoreUnavailable
from kilburn.testing import check_laws
from kilburn.testing.stores import CHECKS, batch_of, start

PROGRAM = shutil.which("pgbouncer", path=f"{os.environ.get('PATH', '')}:/usr/sbin")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(PROGRAM is None, reason="no pgbouncer here (apt-get install pgbouncer)"),
]

SETTINGS = """
[databases]
* = host={server} port=5432
[pgbouncer]
pool_mode = transaction
unix_socket_dir = {folder}
listen_port = 5432
auth_type = trust
auth_file = {folder}/users
default_pool_size = {size}
{more}
"""


@contextmanager
def pooler(server: OwnServer, url: str, *, size: int = 4, more: str = "") -> Iterator[str]:
    """A pgbouncer before a server; gives the URL of a database through it."""
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(prefix="pgb", dir="/tmp") as folder:
        settings = Path(folder) / "settings.ini"
        settings.write_text(SETTINGS.format(server=server.folder, folder=folder, size=size, more=more))
        (Path(folder) / "users").write_text('"postgres" ""\n')
        # It refuses to run as root, and the server's socket is for its own user.
        user = pwd.getpwnam("nobody") if os.geteuid() == 0 else None
        if user is not None:
            for path in (Path(folder), *Path(folder).iterdir()):
                os.chown(path, user.pw_uid, user.pw_gid)
        with subprocess.Popen(
            [PROGRAM, str(settings)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            encoding="utf-8",
            user=user.pw_uid if user else None,
            group=user.pw_gid if user else None,
            extra_groups=[] if user else None,
        ) as program:
            assert program.stderr is not None
            for line in program.stderr:
                if "process up" in line:
                    break
            # What it says later is not waited for by anybody.
            threading.Thread(target=program.stderr.read, daemon=True).start()
            try:
                yield url.replace(str(server.folder), folder)
            finally:
                program.kill()


@pytest.fixture
def pooled(server: OwnServer, url: str) -> Iterator[str]:
    with pooler(server, url) as made:
        yield made


def test_the_whole_kit(pooled: str) -> None:
    with connected(pooled, "opening") as connection:
        assert is_pooled(connection)
    for check in CHECKS:
        with Postgres(pooled, tenant=check.__name__) as backend:
            check(backend)


def test_a_session_lives_there(pooled: str) -> None:
    with kilburn.open(pooled, window=500, policy="summarize", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        for number in range(30):
            session.append({"role": "user", "content": f"message {number}, about nothing in particular"})
        branch = session.fork("look around")
        branch.append({"role": "user", "content": "only on the branch"})
        store.memory("ana").remember("Ana lives in Porto")
        check_laws(session)
        store.forget(session="s", address="p1")
        assert not store.search('"message 0,"', limit=1) or store.search("message 0")[0].address != "p1"
        assert [hit.text for hit in store.memory("ana").search("Porto")] == ["Ana lives in Porto"]


def left_behind(url: str) -> tuple[object, ...]:
    """What the next one finds on a connection to the server."""
    with psycopg.connect(url, autocommit=True, prepare_threshold=None) as connection:
        found = connection.execute(
            "SELECT current_user, coalesce(current_setting('kilburn.tenant', true), ''), current_setting('lock_timeout'),"
            " current_setting('statement_timeout'), current_setting('row_security'), current_setting('synchronous_commit'),"
            " (SELECT count(*) FROM pg_prepared_statements), (SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'),"
            " (SELECT count(*) FROM pg_listening_channels())"
        ).fetchone()
        assert found is not None
        return found


def test_two_tenants_on_one_connection_of_the_server_never_see_each_other(server: OwnServer, url: str) -> None:
    wrong: list[object] = []
    with pooler(server, url, size=1) as through:
        with Postgres(url, tenant="nobody"):
            fresh = left_behind(through)
        backends = [Postgres(through, tenant=name) for name in ("one", "two")]
        segments = [start(backend) for backend in backends]

        def work(backend: Postgres, segment: int) -> None:
            own, other = backend.tenant, "two" if backend.tenant == "one" else "one"
            try:
                for number in range(25):
                    backend.commit(segment, batch_of(number, {number + 1: f"word {own} {number}"}))
                    if backend.words.search(other) or len(backend.words.search(own, limit=50)) != number + 1:
                        wrong.append((own, number))
            except KilburnError as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=pair) for pair in zip(backends, segments, strict=True)]
        for thread in threads:
            thread.start()
        strangers = [left_behind(through) for _ in range(10)]
        for thread in threads:
            thread.join()
        strangers.append(left_behind(through))
        for backend in backends:
            backend.close()
    assert wrong == []
    assert set(strangers) == {fresh}


def test_a_transaction_that_fails_in_the_middle_leaves_nothing_to_the_next(server: OwnServer, url: str) -> None:
    with pooler(server, url, size=1) as through, Postgres(through, tenant="one") as backend:
        fresh = left_behind(through)
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "word"}))

        def fail() -> None:
            with backend.together():
                backend.commit(segment, batch_of(1, {2: "word"}))
                raise KeyError

        for do in (fail, lambda: backend.commit(segment, batch_of(7, {8: "word"}))):
            with pytest.raises((KeyError, StoreError)):
                do()
            assert left_behind(through) == fresh
        with Postgres(through, tenant="two") as other:
            assert other.segments() == other.words.search("word") == []


def test_forgetting_writes_the_tables_anew(server: OwnServer, pooled: str, url: str) -> None:
    with Postgres(pooled) as backend:
        segment = start(backend)
        fresh = left_behind(pooled)
        backend.commit(segment, batch_of(0, {1: "heliotrope"}))
        backend.commit(segment, erased())
        with psycopg.connect(url) as connection:
            assert connection.execute("SELECT count(*) FROM kilburn.erasure").fetchone() == (0,)
        assert left_behind(pooled) == fresh


def erased() -> Batch:
    """A batch that erases the first page."""
    return Batch(head=1, erase=[1])


def test_who_uses_the_tables_is_not_waited_for_for_ever(pooled: str, url: str, caplog: pytest.LogCaptureFixture) -> None:
    with Postgres(pooled, busy_timeout=0.1) as backend, psycopg.connect(url) as other:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "heliotrope"}))
        other.execute("LOCK TABLE kilburn.vector IN ACCESS SHARE MODE")
        backend.commit(segment, erased())
        assert "others use the tables" in caplog.text
        other.rollback()
        assert backend.wipe()


def test_what_a_pooler_refuses(server: OwnServer, url: str) -> None:
    with (
        pooler(server, url, more="max_client_conn = 1") as through,
        psycopg.connect(through, prepare_threshold=None),
        pytest.raises(StoreBusy, match="no more connections allowed"),
    ):
        Postgres(through)
    with (
        pooler(server, url, size=1, more="query_wait_timeout = 1") as through,
        psycopg.connect(through, prepare_threshold=None) as held,
    ):
        held.execute("SELECT 1")
        with pytest.raises(StoreBusy, match="query_wait_timeout"):
            Postgres(through)
    with pooler(server, url.replace("/test", "/nowhere")) as through, pytest.raises(StoreUnavailable):
        Postgres(through)


def test_a_pooler_that_is_killed(server: OwnServer, url: str) -> None:
    with pooler(server, url) as through:
        backend = Postgres(through, busy_timeout=0.1)
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "first"}))
    with pytest.raises(StoreUnavailable, match="check that the server runs"):
        backend.commit(segment, batch_of(1, {2: "second"}))
    backend.close()
    with Postgres(url) as again:
        assert [page.id for page, _ in again.pages(segment)] == [1]

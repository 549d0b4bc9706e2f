"""What cannot work says what to do, within a bounded time, and changes nothing."""

from __future__ import annotations

import socket
import struct
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import msgspec
import psycopg
import pytest

import kilburn
from cli.terminal import kilburn as run
from kilburn.backends.postgres.connection import CONNECTIONS
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import (
    KilburnError,
    StoreBusy,
    StoreError,
    StoreReadOnly,
    StoreStale,
    StoreUnavailable,
    StoreVersion,
)
from kilburn.testing.stores import CHECKS, batch_of, start
from ways import Link, way_to

pytestmark = pytest.mark.slow


@contextmanager
def replica_of(server: OwnServer) -> Iterator[OwnServer]:
    """A server that follows another."""
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o777)
        made = OwnServer(Path(folder) / "s", ("fsync=off", "max_connections=60"))
        made.programs = server.programs
        made.do("pg_basebackup", "-h", str(server.folder), "-U", "postgres", "-D", str(made.data), "-R", "-c", "fast")
        made.start()
        try:
            yield made
        finally:
            made.stop("immediate")


def test_nobody_listens() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(StoreUnavailable, match="check that the server runs"):
        kilburn.open(f"postgresql://user@127.0.0.1:{port}/x")


def test_no_such_database_or_user(server: OwnServer, url: str) -> None:
    with pytest.raises(StoreUnavailable, match="make the database or the user first"):
        Postgres(server.url.replace("/kilburn?", "/nowhere?"))
    with pytest.raises(StoreUnavailable, match="make the database or the user first"):
        Postgres(url.replace("postgres@", "nobody-of-that-name@"))


def test_a_password_is_not_repeated(url: str) -> None:
    with pytest.raises(StoreUnavailable) as caught:
        Postgres(url.replace("postgres@", "stranger:hunter2@"))
    assert "hunter2" not in str(caught.value)
    with Postgres(url.replace("postgres@", "postgres:hunter2@")) as backend:
        assert "hunter2" not in repr(backend)


def test_for_reading_there_must_be_a_store(server: OwnServer, url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP SCHEMA kilburn CASCADE")
    with pytest.raises(StoreError, match="there is no store"):
        Postgres(url, readonly=True)


def test_a_store_for_reading_is_not_written(url: str) -> None:
    with Postgres(url) as backend:
        start(backend)
    with Postgres(url, readonly=True) as backend:
        assert len(backend.segments()) == 1
        with pytest.raises(StoreReadOnly):
            backend.commit(1, batch_of(0, {1: "a"}))
    with Postgres(url, tenant="nobody", readonly=True) as backend:
        assert backend.segments() == backend.words.search("a") == []


def test_a_read_only_server_can_be_read(url: str) -> None:
    with Postgres(url) as backend:
        backend.commit(start(backend), batch_of(0, {1: "needle"}))
        with psycopg.connect(url, autocommit=True) as connection:
            name = connection.info.dbname
            connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(StoreReadOnly, match="replica"):
        Postgres(url, tenant="new")
    with Postgres(url, readonly=True) as backend:
        assert backend.words.search("needle")


def test_no_connection_is_left(server: OwnServer, url: str) -> None:
    with Postgres(url) as backend, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} CONNECTION LIMIT 1")
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
        connection.execute("GRANT kilburn_rows TO guest")
        with pytest.raises(StoreBusy, match="max_connections"):
            Postgres(url.replace("postgres@", "guest@"))
        assert backend.segments() == []


def administer(url: str, *statements: str) -> None:
    """Do this in the database of the URL, as its owner."""
    with psycopg.connect(url, autocommit=True) as connection:
        for statement in statements:
            connection.execute(statement.replace("DB", connection.info.dbname))


@pytest.fixture
def visitor(server: OwnServer, url: str) -> Iterator[str]:
    """The URL of a user of one's own, who has to say a password."""
    rules = server.data / "pg_hba.conf"
    before = rules.read_text()
    rules.write_text(f"local all visitor scram-sha-256\n{before}")
    administer(url, "SELECT pg_reload_conf()", "CREATE ROLE visitor LOGIN PASSWORD 'hunter2'")
    try:
        yield url.replace("postgres@", "visitor:hunter2@")
    finally:
        rules.write_text(before)
        administer(url, "SELECT pg_reload_conf()", "DROP OWNED BY visitor", "DROP ROLE visitor")


def test_a_password_is_checked(visitor: str, caplog: pytest.LogCaptureFixture) -> None:
    for url in (visitor.replace("hunter2", "hunter3"), visitor.replace(":hunter2", "")):
        with pytest.raises(StoreUnavailable, match="PGPASSWORD"):
            Postgres(url)
        done = run("ps", "--db", url)
        assert (done.status, done.out, "Traceback" in done.err, "check the user and the password" in done.err) == (
            1,
            "",
            False,
            True,
        )
        assert "hunter3" not in done.err + caplog.text


def test_a_password_that_changes_while_a_store_is_open(visitor: str, url: str, caplog: pytest.LogCaptureFixture) -> None:
    administer(url, "GRANT kilburn_rows TO visitor")
    with Postgres(visitor, busy_timeout=0.1) as backend:
        assert backend.segments() == []
        ended = "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = 'visitor'"
        administer(url, "ALTER ROLE visitor PASSWORD 'other'", ended)
        with pytest.raises(StoreUnavailable, match="PGPASSWORD"):
            backend.segments()
    assert "hunter2" not in caplog.text


def test_who_lacks_a_right_is_told_which(visitor: str, server: OwnServer, url: str) -> None:
    administer(url, "DROP SCHEMA kilburn CASCADE")
    with pytest.raises(StoreReadOnly, match=r"permission denied for database.*docs/howto/postgres.md"):
        Postgres(visitor)
    administer(url, "GRANT CREATE ON DATABASE DB TO visitor")
    # The role is there, for the whole server; this user may not enter it.
    with pytest.raises(StoreReadOnly, match="GRANT kilburn_rows TO visitor"):
        Postgres(visitor)
    administer(url, "GRANT kilburn_rows TO visitor")
    with Postgres(visitor) as backend:
        check_commit(backend)


def check_all(url: str) -> None:
    """The whole conformance kit, each part as a tenant of its own."""
    for check in CHECKS:
        with Postgres(url, tenant=check.__name__) as backend:
            check(backend)


def check_commit(backend: Postgres) -> None:
    """What is written is there and is found."""
    backend.commit(start(backend), batch_of(0, {1: "a needle"}))
    assert [hit.page for hit in backend.words.search("needle")] == [1]


def test_a_role_that_somebody_has_removed(server: OwnServer, url: str) -> None:
    """As after a dump was restored on another server."""
    administer(url, "ALTER ROLE kilburn_rows RENAME TO another")
    try:
        with pytest.raises(StoreError, match="kilburn_rows"):
            Postgres(url, readonly=True)
    finally:
        administer(url, "ALTER ROLE another RENAME TO kilburn_rows")


def test_a_server_that_is_too_old(server: OwnServer, url: str) -> None:
    """One that says so, in the words in which an old one says it."""
    with way_to(str(server.folder / ".s.PGSQL.5432"), url) as way:

        def answered(link: Link, message: bytes) -> bytes:
            name = b"server_version\0"
            body = name + b"14.23\0"
            return b"S" + struct.pack("!i", 4 + len(body)) + body if message[5:].startswith(name) else message

        way.answered = answered
        with pytest.raises(StoreVersion, match=r"is PostgreSQL 14.*use PostgreSQL 15 or newer"):
            Postgres(way.url)


@pytest.mark.parametrize("encoding", ["SQL_ASCII", "LATIN1"])
def test_a_database_in_another_encoding(server: OwnServer, encoding: str) -> None:
    """Names and words are kept as bytes."""
    name = f"in_{encoding.lower()}"
    admin = server.url.replace("/kilburn?", "/postgres?")
    administer(admin, f"CREATE DATABASE {name} ENCODING '{encoding}' TEMPLATE template0")
    url = server.url.replace("/kilburn?", f"/{name}?")
    try:
        with Postgres(url, tenant="Zo\u00eb") as backend:
            info = backend.segment("\u65e5\u672c", time=1.0)
            assert info is not None
            backend.commit(info.number, batch_of(0, {1: "a caf\u00e9 in \u65e5\u672c"}))
            assert backend.words.search("caf\u00e9")
            assert list(backend.contents.texts([page.digest for page, _ in backend.pages(info.number)]).values()) == [
                "a caf\u00e9 in \u65e5\u672c"
            ]
        if encoding == "SQL_ASCII":
            Postgres(url, tenant="\u65e5\u672c").close()
        else:
            with pytest.raises(StoreError, match="createdb --encoding=UTF8"):
                Postgres(url, tenant="\u65e5\u672c")
    finally:
        administer(admin, f"DROP DATABASE {name}")


ODDITIES = (
    "default_transaction_isolation = 'serializable'",
    "default_transaction_deferrable = on",
    "statement_timeout = '1s'",
    "lock_timeout = '1ms'",
    "idle_in_transaction_session_timeout = '1ms'",
    "standard_conforming_strings = off",
    "search_path = 'nowhere, \"$user\"'",
    "row_security = off",
    "bytea_output = 'escape'",
    "client_encoding = 'LATIN1'",
    "array_nulls = off",
    "datestyle = 'SQL, DMY'",
    "extra_float_digits = 0",
    "transform_null_equals = on",
    "enable_indexscan = off",
    "plan_cache_mode = 'force_generic_plan'",
)
"""What the owner of a database, or of a role, may have set."""


def test_what_an_owner_has_set_changes_nothing(odd: str) -> None:
    check_all(odd)


@pytest.fixture
def odd(url: str) -> Iterator[str]:
    """The URL of a database with every oddity."""
    administer(url, *(f"ALTER DATABASE DB SET {oddity}" for oddity in ODDITIES))
    return url


def test_a_store_is_made_whatever_an_owner_has_set(odd: str) -> None:
    administer(odd, "DROP SCHEMA kilburn CASCADE")
    with Postgres(odd) as backend:
        check_commit(backend)


def test_no_isolation_that_an_owner_prefers_makes_two_that_open_a_store_fail(url: str) -> None:
    administer(url, "ALTER DATABASE DB SET default_transaction_isolation = 'serializable'", "DROP SCHEMA kilburn CASCADE")
    failed: list[KilburnError] = []

    def opened() -> None:
        try:
            Postgres(url, tenant="same").close()
        except KilburnError as error:
            failed.append(error)

    threads = [threading.Thread(target=opened) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []


def test_a_database_that_its_owner_has_frozen(url: str) -> None:
    with Postgres(url) as backend:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "needle"}))
    administer(url, "ALTER DATABASE DB SET default_transaction_read_only = on")
    with Postgres(url) as backend:
        with pytest.raises(StoreReadOnly, match="replica, or read-only"):
            backend.commit(segment, batch_of(1, {2: "more"}))
        assert backend.words.search("needle")


def test_who_waits_for_somebody_who_holds_all_of_it(url: str) -> None:
    with Postgres(url, busy_timeout=0.1) as backend, psycopg.connect(url) as other:
        segment = start(backend)
        other.execute("LOCK TABLE kilburn.segment, kilburn.content")
        with pytest.raises(StoreBusy, match="another writer holds it"):
            backend.commit(segment, batch_of(0, {1: "a"}))
        with pytest.raises(StoreBusy):
            backend.segments()
        other.rollback()
        backend.commit(segment, batch_of(0, {1: "a"}))


def test_a_deadlock_is_done_again(url: str) -> None:
    """Somebody has the second row that is locked and wants the first: the writer is whom the server chooses."""
    administer(url, "ALTER DATABASE DB SET deadlock_timeout = '20ms'")
    lock = "SELECT FROM kilburn.segment WHERE id = %s FOR UPDATE"
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    with (
        Postgres(url) as backend,
        psycopg.connect(url) as holder,
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as watcher,
    ):
        first, second = start(backend, "first"), start(backend, "second")
        backend.commit(first, batch_of(0, {1: "cited"}))
        batch = batch_of(0, {-1: "a fact"})
        batch.pages = [msgspec.structs.replace(batch.pages[0], cites=((first, 1),))]
        other.execute("SET LOCAL deadlock_timeout = '1h'")
        other.execute(lock, (second,))
        holder.execute(lock, (first,))
        threads = [
            threading.Thread(target=backend.commit, args=(second, batch)),
            threading.Thread(target=other.execute, args=(lock, (first,))),
        ]
        for number, thread in enumerate(threads, 1):
            thread.start()
            while watcher.execute(waits).fetchone() != (number,):
                pass
        # Now the writer gets the first, and waits for the second.
        holder.rollback()
        threads[1].join()
        other.rollback()
        threads[0].join()
        assert backend.citing(first, [1]) == [(second, -1)]


def test_a_transaction_of_several_steps_says_that_another_was_in_the_way(url: str) -> None:
    """What it did in between cannot be done again here; whoever did it can, as nothing was written."""
    administer(url, "ALTER DATABASE DB SET deadlock_timeout = '20ms'")
    lock = "SELECT FROM kilburn.segment WHERE id = %s FOR UPDATE"
    waits = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
    refused: list[KilburnError] = []
    with (
        Postgres(url, busy_timeout=60.0) as backend,
        psycopg.connect(url) as other,
        psycopg.connect(url, autocommit=True) as watcher,
    ):
        first, second = start(backend, "first"), start(backend, "second")
        other.execute("SET LOCAL deadlock_timeout = '1h'")
        other.execute(lock, (first,))

        def write() -> None:
            try:
                with backend.together([second]):
                    backend.commit(second, batch_of(0, {1: "in time"}))
                    backend.commit(first, batch_of(0, {1: "in time"}))
            except KilburnError as error:
                refused.append(error)

        # Nobody waits for the other until `other` wants the second.
        threads = [threading.Thread(target=write), threading.Thread(target=other.execute, args=(lock, (second,)))]
        for number, thread in enumerate(threads, 1):
            thread.start()
            while not refused and watcher.execute(waits).fetchone() != (number,):
                pass
        for thread in threads:
            thread.join()
        other.rollback()
        assert [type(error) for error in refused] == [StoreStale]
        assert list(backend.pages(first)) == list(backend.pages(second)) == []
        with backend.together([first, second]):
            backend.commit(second, batch_of(0, {1: "again"}))
            backend.commit(first, batch_of(0, {1: "again"}))


def test_a_role_has_no_connection_left(visitor: str, url: str) -> None:
    administer(url, "GRANT kilburn_rows TO visitor")
    with Postgres(visitor, busy_timeout=0.1) as backend:
        segment = start(backend)
        administer(url, "ALTER ROLE visitor CONNECTION LIMIT 0")
        # It has one, and goes on with it.
        backend.commit(segment, batch_of(0, {1: "a"}))
        administer(url, "SELECT pg_terminate_backend(pid, 60000) FROM pg_stat_activity WHERE usename = 'visitor'")
        with pytest.raises(StoreBusy, match=r"too many connections for role.*max_connections"):
            backend.commit(segment, batch_of(1, {2: "b"}))
        administer(url, "ALTER ROLE visitor CONNECTION LIMIT -1")
        backend.commit(segment, batch_of(1, {2: "b"}))


def test_more_threads_than_connections(url: str) -> None:
    """Who gets none in time is told; the others go on."""
    held = threading.Barrier(CONNECTIONS + 1)
    done = threading.Event()
    with Postgres(url, busy_timeout=0.1) as backend:

        def hold() -> None:
            with backend.together():
                held.wait()
                done.wait()

        threads = [threading.Thread(target=hold) for _ in range(CONNECTIONS)]
        for thread in threads:
            thread.start()
        held.wait()
        with pytest.raises(StoreBusy, match="all 8 connections of this program to it are in use"):
            backend.segments()
        done.set()
        for thread in threads:
            thread.join()
        assert backend.segments() == []


def test_a_replica_is_read_and_not_written(server: OwnServer, url: str) -> None:
    with Postgres(url) as backend:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "needle"}))
    with replica_of(server) as other:
        there = url.replace(str(server.folder), str(other.folder))
        with Postgres(there, readonly=True) as backend:
            assert [hit.page for hit in backend.words.search("needle")] == [1]
            assert [page.id for page, _ in backend.pages(segment)] == [1]
        with Postgres(there) as backend, pytest.raises(StoreReadOnly, match="write to the primary"):
            backend.commit(segment, batch_of(1, {2: "more"}))
        done = run("remember", "--db", there, "Ana lives in Porto", "--user", "ana")
        assert "Traceback" not in done.err
        assert done.status == 1
        assert "write to the primary" in done.err


@pytest.mark.parametrize("verb", [("dashboard", "--port", "0"), ("serve", "--model", "echo", "--port", "0")])
def test_a_server_does_not_say_the_password_of_its_store(verb: tuple[str, ...], url: str) -> None:
    command = [sys.executable, "-m", "kilburn", *verb, "--db", url.replace("postgres@", "postgres:hunter2@")]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, encoding="utf-8") as program:
        assert program.stderr is not None
        said = program.stderr.readline()
        program.terminate()
        said += program.stderr.read()
    assert "postgresql:///" in said
    assert "hunter2" not in said

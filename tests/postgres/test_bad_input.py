"""What cannot work says what to do, within a bounded time, and changes nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, suppress

import psycopg
import pytest

import kilburn
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import (
    SpecError,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreReadOnly,
    StoreUnavailable,
    StoreVersion,
)
from kilburn.testing.stores import batch_of, start


@pytest.mark.parametrize("url", ["postgresql://[", "postgresql://host/x?nonsense=1"])
def test_no_url_is_no_url(url: str) -> None:
    with pytest.raises(SpecError, match="write postgresql://"):
        kilburn.open(url)


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
        assert backend.segments() == backend.search("a") == []


def test_a_newer_store_and_another_schema_are_refused(url: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE kilburn.version SET number = 99")
        with pytest.raises(StoreVersion, match="format 99"):
            Postgres(url)
        connection.execute("DROP TABLE kilburn.version")
        with pytest.raises(StoreCorrupt, match="not Kilburn's"):
            Postgres(url)


def test_a_read_only_server_can_be_read(url: str) -> None:
    with Postgres(url) as backend:
        backend.commit(start(backend), batch_of(0, {1: "needle"}))
        with psycopg.connect(url, autocommit=True) as connection:
            name = connection.info.dbname
            connection.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    with pytest.raises(StoreReadOnly, match="replica"):
        Postgres(url, tenant="new")
    with Postgres(url, readonly=True) as backend:
        assert backend.search("needle")


def test_no_connection_is_left(server: OwnServer, url: str) -> None:
    with Postgres(url) as backend, psycopg.connect(url, autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE {connection.info.dbname} CONNECTION LIMIT 1")
        connection.execute("DROP ROLE IF EXISTS guest")
        connection.execute("CREATE ROLE guest LOGIN")
        connection.execute("GRANT kilburn_rows TO guest")
        with pytest.raises(StoreBusy, match="max_connections"):
            Postgres(url.replace("postgres@", "guest@"))
        assert backend.segments() == []


class Stopping:
    """A way to a server that stops passing anything on, and does not say so."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.stopped = threading.Event()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                own = socket.socket(socket.AF_UNIX)
                own.connect(self._path)
                for one, other in ((client, own), (own, client)):
                    threading.Thread(target=self._pass, args=(one, other), daemon=True).start()

    def _pass(self, one: socket.socket, other: socket.socket) -> None:
        with suppress(OSError):
            while data := one.recv(65536):
                if self.stopped.is_set():
                    threading.Event().wait()
                other.sendall(data)
            other.close()

    def close(self) -> None:
        self._listener.close()


@pytest.fixture
def way(server: OwnServer) -> Iterator[Stopping]:
    with closing(Stopping(str(server.folder / ".s.PGSQL.5432"))) as made:
        yield made


def test_a_network_that_hangs_is_not_waited_for_for_ever(way: Stopping, url: str) -> None:
    name = url.partition("@/")[2].partition("?")[0]
    with Postgres(
        f"postgresql://postgres@127.0.0.1:{way.port}/{name}?sslmode=disable&gssencmode=disable", busy_timeout=0.5
    ) as backend:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "first"}))
        way.stopped.set()
        with pytest.raises(StoreUnavailable):
            backend.commit(segment, batch_of(1, {2: "second"}))
    with Postgres(url) as backend:
        assert [page.id for page, _ in backend.pages(segment)] == [1]

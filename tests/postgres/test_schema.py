"""The number of the schema: a database that this Kilburn cannot use is refused, and stays as it is."""

from __future__ import annotations

from typing import Any

import psycopg
import pytest

from kilburn.backends.postgres.schema import SCHEMA
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreCorrupt, StoreVersion
from kilburn.gateway.keys import Keys

DEVELOPMENT = """
DROP SCHEMA kilburn CASCADE;
CREATE SCHEMA kilburn;
CREATE TABLE kilburn.version(number bigint NOT NULL);
INSERT INTO kilburn.version VALUES({number});
CREATE TABLE kilburn.process(tenant bigint NOT NULL, id bigint NOT NULL, name bytea NOT NULL);
"""
"""Makes what the development versions are known by: five numbers, and a table `process`."""

_RELATIONS = "SELECT relname, relkind, relnatts FROM pg_class WHERE relnamespace = 'kilburn'::regnamespace ORDER BY relname"


def contents(url: str) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """The relations of the schema, and its number."""
    with psycopg.connect(url) as connection:
        return connection.execute(_RELATIONS).fetchall(), connection.execute("SELECT number FROM kilburn.version").fetchall()


@pytest.mark.parametrize("number", [1, 5])
def test_a_database_of_a_development_version_is_refused_and_not_changed(url: str, number: int) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(DEVELOPMENT.format(number=number))
    before = contents(url)
    for readonly in (False, True):
        with pytest.raises(StoreVersion, match=r"development version .*`kilburn export .*into a new database \(`kilburn import "):
            Postgres(url, readonly=readonly)
    with pytest.raises(StoreVersion, match="development version"):
        Keys(url)
    assert contents(url) == before


def test_a_newer_number_is_refused_and_not_changed(url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute("UPDATE kilburn.version SET number = 77")
    before = contents(url)
    for readonly in (False, True):
        with pytest.raises(StoreVersion, match=f"schema 77, and this Kilburn supports schema {SCHEMA}"):
            Postgres(url, readonly=readonly)
    assert contents(url) == before


@pytest.mark.parametrize(
    "statement", ["DROP TABLE kilburn.version", "DELETE FROM kilburn.version", "UPDATE kilburn.version SET number = 0"]
)
def test_a_schema_without_a_number_is_not_kilburns(url: str, statement: str) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(statement)
    for readonly in (False, True):
        with pytest.raises(StoreCorrupt, match="not Kilburn's"):
            Postgres(url, readonly=readonly)

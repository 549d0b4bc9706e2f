"""Tenants are apart, and the database itself holds them apart: row-level security with a role that owns nothing."""

from __future__ import annotations

from collections.abc import Iterator

import psycopg
import pytest
from psycopg import sql

from kilburn.backend import Batch
from kilburn.backends.postgres.connection import ROLE
from kilburn.backends.postgres.schema import OF_TENANTS, SHARED
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreReadOnly
from kilburn.testing.stores import batch_of


@pytest.fixture
def two(url: str) -> Iterator[tuple[Postgres, Postgres]]:
    """Two tenants with the same session in it."""
    with Postgres(url, tenant="one") as one, Postgres(url, tenant="two") as other:
        for backend in (one, other):
            info = backend.segment("s", time=1.0)
            assert info is not None
            backend.commit(info.number, batch_of(0, {1: f"the word {backend.tenant}", 2: "shared"}))
            backend.vectors.add("hash", [(entry, b"data") for entry, _ in backend.vectors.unembedded("hash", 9)])
        yield one, other


def seen(url: str, tenant: str | None) -> dict[str, int]:
    """How many rows of each table the role sees."""
    with psycopg.connect(url) as connection:
        connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(ROLE)))
        if tenant is not None:
            connection.execute("SELECT set_config('kilburn.tenant', %s, true)", (tenant,))
        counts = {}
        for name in (*OF_TENANTS, "tenant"):
            found = connection.execute(sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier("kilburn", name))).fetchone()
            assert found is not None
            counts[name] = found[0]
        return counts


def test_each_finds_its_own(two: tuple[Postgres, Postgres]) -> None:
    for backend, word, other in zip(two, ("one", "two"), ("two", "one"), strict=True):
        assert [hit.page for hit in backend.words.search(word)] == [1]
        assert backend.words.search(f"word {other}", limit=9)[0].page == 1
        assert not backend.words.search(other)


def test_a_query_without_the_tenant_sees_nothing(two: tuple[Postgres, Postgres], url: str) -> None:
    assert set(seen(url, None).values()) == {0}
    assert set(seen(url, "").values()) == {0}
    assert set(seen(url, "999").values()) == {0}
    own = seen(url, "2")
    assert own["page"] == own["content"] == 2
    assert own["posting"] == 5


FORBIDDEN = (
    "INSERT INTO kilburn.content(tenant, digest, size, codec, data) VALUES(3, 'x', 1, 0, 'x')",
    "UPDATE kilburn.content SET tenant = 3",
    "DELETE FROM kilburn.version",
    "CREATE TABLE kilburn.mine(id int)",
    "ALTER TABLE kilburn.page DISABLE ROW LEVEL SECURITY",
)


def test_the_role_may_write_its_own_rows_and_nothing_else(two: tuple[Postgres, Postgres], url: str) -> None:
    with psycopg.connect(url) as connection:
        connection.execute(sql.SQL("SET LOCAL ROLE {}").format(sql.Identifier(ROLE)))
        connection.execute("SELECT set_config('kilburn.tenant', '2', true)")
        for statement in FORBIDDEN:
            with pytest.raises(psycopg.errors.InsufficientPrivilege), connection.transaction():
                connection.execute(statement)


def test_the_role_owns_nothing(url: str) -> None:
    with psycopg.connect(url) as connection:
        owned = "SELECT count(*) FROM pg_class WHERE relowner = (SELECT oid FROM pg_roles WHERE rolname = %s)"
        assert connection.execute(owned, (ROLE,)).fetchone() == (0,)
        may = "SELECT rolsuper, rolbypassrls, rolcanlogin, rolcreaterole FROM pg_roles WHERE rolname = %s"
        assert connection.execute(may, (ROLE,)).fetchone() == (False, False, False, False)
        forced = "SELECT bool_and(relrowsecurity AND relforcerowsecurity) FROM pg_class WHERE relname = ANY(%s) AND relkind = 'r'"
        assert connection.execute(forced, ([*OF_TENANTS, "tenant"],)).fetchone() == (True,)


@pytest.fixture
def program(url: str) -> str:
    """The URL of a user that may log in and is nothing else."""
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS program")
        connection.execute("CREATE ROLE program LOGIN")
    return url.replace("postgres@", "program@")


def test_a_user_needs_the_role_and_nothing_else(program: str, url: str) -> None:
    with pytest.raises(StoreReadOnly, match="lacks a right"):
        Postgres(program)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("GRANT kilburn_rows TO program")
    with Postgres(program, tenant="theirs") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: "a needle"}))
        assert backend.words.search("needle")
        backend.commit(info.number, Batch(head=1, erase=[1]))
        assert not backend.words.search("needle")
    left = {"segment": 1, "page": 1, "event": 1, "mention": 1, "counter": 1}
    assert {name: count for name, count in seen(url, "2").items() if count} == left


def test_every_key_and_every_reference_begins_with_the_tenant(url: str) -> None:
    """So the tables can be laid on several servers by the tenant, and what belongs together stays together."""
    keys = """
        SELECT relation.relname, index.relname, (
            SELECT attname FROM pg_attribute WHERE attrelid = indrelid AND attnum = indkey[0])
        FROM pg_index JOIN pg_class AS relation ON relation.oid = indrelid JOIN pg_class AS index ON index.oid = indexrelid
        WHERE relation.relnamespace = 'kilburn'::regnamespace AND indisunique
    """
    references = """
        SELECT conrelid::regclass::text, confrelid::regclass::text, (
            SELECT attname FROM pg_attribute WHERE attrelid = conrelid AND attnum = conkey[1]), (
            SELECT attname FROM pg_attribute WHERE attrelid = confrelid AND attnum = confkey[1])
        FROM pg_constraint WHERE connamespace = 'kilburn'::regnamespace AND contype = 'f'
    """
    with psycopg.connect(url) as connection:
        found = connection.execute(keys).fetchall()
        assert {table for table, _, _ in found} == {*OF_TENANTS, *SHARED, "tenant"}
        # That of names and numbers has a copy on each server; what gateways share stays on one.
        assert [row for row in found if row[2] != "tenant" and row[0] not in (*SHARED, "tenant")] == []
        referring = connection.execute(references).fetchall()
        assert len(referring) >= 5
        assert [row for row in referring if row[2:] != ("tenant", "tenant")] == []
        # No table is made for a tenant.
        count = "SELECT count(*) FROM pg_class WHERE relnamespace = 'kilburn'::regnamespace AND relkind IN ('r', 'p')"
        before = connection.execute(count).fetchone()
    with Postgres(url, tenant="another"), psycopg.connect(url) as connection:
        assert connection.execute(count).fetchone() == before

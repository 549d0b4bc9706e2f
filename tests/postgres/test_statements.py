"""Statements: what goes out and when, values on their way there and back, and what is prepared."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from decimal import Decimal
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg.sql import SQL, Literal

from kilburn.backend import Digests
from kilburn.backends.postgres import statements as module
from kilburn.backends.postgres.connection import Database, checked_url
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.statements import Statements
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreError
from kilburn.testing.stores import batch_of, start
from ways import Link, way_to

PREPARED = "SELECT count(*) FROM pg_prepared_statements WHERE name LIKE 'kilburn%%'"


@pytest.fixture
def store(shared_url: str) -> Iterator[Database]:
    made = Database(checked_url(shared_url), patience=1.0, durable=False, connections=1)
    yield made
    made.close()


@pytest.fixture
def sent(shared_url: str) -> Iterator[Statements]:
    """Within a transaction."""
    made = Database(checked_url(shared_url), patience=1.0, durable=False, connections=1)
    with made.connection("trying") as connection, connection.statements as statements:
        yield statements
    made.close()


def test_statements_wait_until_an_answer_is_asked_for(server: OwnServer, url: str) -> None:
    asked = []
    with way_to(str(server.folder / ".s.PGSQL.5432"), url) as way:
        store = Database(checked_url(way.url), patience=1.0, durable=False)

        def do(statements: Statements) -> None:
            way.count()
            answers = [statements.send("SELECT %s", number) for number in range(20)]
            before = len(asked)
            assert [answer.fetchall() for answer in answers] == [[(number,)] for number in range(20)]
            assert (before, len(asked) > 20) == (0, True)

        way.asked = lambda link, number: asked.append(number)
        store.read("trying", lambda statements: asked.clear())
        asked.clear()
        store.read("trying", do)
        store.close()


NUMBERS = st.integers(-(1 << 63), (1 << 63) - 1)
TEXTS = st.text(st.characters(codec="utf-8", exclude_characters="\0"))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    values=st.tuples(NUMBERS, st.floats(), st.binary(), TEXTS, st.booleans(), st.none()),
    numbers=st.lists(NUMBERS | st.none()),
    floats=st.lists(st.floats() | st.none()),
    data=st.lists(st.binary() | st.none()),
    texts=st.lists(TEXTS | st.none()),
)
def test_values_come_back_as_they_went(
    sent: Statements,
    values: tuple[object, ...],
    numbers: list[int | None],
    floats: list[float | None],
    data: list[bytes | None],
    texts: list[str | None],
) -> None:
    one = sent.row("SELECT %s, %s, %s, %s::text, %s, %s::bigint", *values)
    lists = sent.row("SELECT %s::bigint[], %s::float8[], %s::bytea[], %s::text[]", numbers, floats, data, texts)
    assert repr(one) == repr(values)
    assert repr(lists) == repr((numbers, floats, data, texts))


def test_other_values_go_as_psycopg_has_them(sent: Statements) -> None:
    given = [True, False], [1, 2.5, None], Decimal("1.5"), bytearray(b"ab")
    found = sent.row("SELECT %s, %s::float8[], %s, %s", *given)
    assert found == ([True, False], [1.0, 2.5, None], Decimal("1.5"), b"ab")
    with pytest.raises(psycopg.Error):
        sent.send("SELECT %s", object())
    assert math.isnan(sent.rows("SELECT %s::float8", math.nan)[0][0])


def test_a_percent_sign_stands_for_itself_when_there_are_two(sent: Statements) -> None:
    assert sent.row("SELECT format('%%s-%%s', %s::text, 5 %% 3)", "a") == ("a-2",)
    assert sent.row(SQL("SELECT {}, %s").format(Literal("50%")), 1) == ("50%", 1)


def test_a_text_with_a_nul_is_refused_and_nothing_is_cut_off(store: Database) -> None:
    with pytest.raises(StoreError, match="NUL"):
        store.read("trying", lambda statements: statements.rows("SELECT %s::text", "a\0b"))
    assert store.read("trying", lambda statements: statements.rows("SELECT %s::text", "ab")) == [("ab",)]


def test_the_first_error_is_raised_and_the_connection_goes_on(store: Database) -> None:
    def fail(statements: Statements) -> Any:
        statements.send("SELECT 1")
        statements.send("SELECT 1 / %s", 0)
        return statements.rows("SELECT nowhere")

    for _ in range(5):
        with pytest.raises(StoreError, match="division by zero"):
            store.read("trying", fail)
        with pytest.raises(StoreError, match="division by zero"):
            # Nobody asks for the answer.
            store.read("trying", lambda statements: statements.send("SELECT 1 / %s", 0))
        assert store.read("trying", lambda statements: statements.rows("SELECT %s", 1)) == [(1,)]


def test_an_answer_is_there_when_the_transaction_is_over(store: Database) -> None:
    answer = store.read("trying", lambda statements: statements.send("SELECT %s", 7))
    with pytest.raises(StoreError):
        store.read("trying", lambda statements: statements.send("SELECT 1 / %s", 0))
    assert answer.fetchall() == [(7,)]
    assert answer.fetchone() == (7,)


def test_what_comes_again_is_prepared_but_not_without_end(store: Database) -> None:
    def prepared() -> int:
        return int(store.read("counting", lambda statements: statements.rows(PREPARED))[0][0])

    def some(statements: Statements) -> None:
        for number in range(module.PREPARED + 10):
            assert statements.rows(f"SELECT %s, {number}", 1) == [(1, number)]

    counts = []
    for _ in range(module.OFTEN + 3):
        store.read("trying", some)
        counts.append(prepared())
    # What a transaction begins and ends with is among them.
    assert counts[0] < 5
    assert counts[-1] == module.PREPARED


def test_a_statement_that_cannot_be_prepared_is_tried_again(store: Database, shared_url: str) -> None:
    def ask(statements: Statements) -> Any:
        return statements.rows("SELECT number FROM later.one WHERE number > %s", 0)

    for _ in range(module.OFTEN + 2):
        with pytest.raises(StoreError):
            store.read("trying", ask)
    with psycopg.connect(shared_url, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA later CREATE TABLE one(number bigint)")
        connection.execute("INSERT INTO later.one VALUES(1)")
        connection.execute("GRANT USAGE ON SCHEMA later TO kilburn_rows")
        connection.execute("GRANT SELECT ON later.one TO kilburn_rows")
    assert [store.read("trying", ask) for _ in range(3)] == [[(1,)]] * 3


def test_more_than_a_socket_holds_goes_both_ways(store: Database) -> None:
    data = bytes(range(256)) * 4000

    def both(statements: Statements) -> list[Any]:
        answers = [statements.send("SELECT %s", data) for _ in range(20)]
        return [answer.fetchone() for answer in answers]

    assert store.read("trying", both) == [(data,)] * 20


def test_an_append_waits_for_the_server_twice(server: OwnServer, url: str) -> None:
    """For what it has to know, and for all that it writes: after each it sends nothing until it is answered."""
    told: list[str] = []

    def answered(link: Link, message: bytes) -> bytes:
        told.append("<")
        return message

    with way_to(str(server.folder / ".s.PGSQL.5432"), url) as way, Postgres(way.url) as backend:
        segment = start(backend)
        for head in range(5):
            if head == 4:
                way.asked, way.answered = (lambda link, number: told.append(">")), answered
            batch = batch_of(head, {head + 1: f"text {head}"})
            backend.commit(segment, msgspec.structs.replace(batch, digests=Digests(head, (bytes([head]),))))
        assert re.fullmatch("(>+<+){2}", "".join(told))
    with Postgres(url) as backend:
        assert [(owner.at, owner.count) for owner in backend.histories.owners(bytes([4]), 2)] == [(5, 5)]

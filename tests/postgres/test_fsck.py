"""`kilburn fsck URL`: damage that somebody did by SQL is found and named, and nothing is repaired."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psycopg
import pytest
from psycopg import sql

import kilburn
from cli.terminal import kilburn as run
from kilburn.backends.postgres.schema import OF_TENANTS
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.sealed import seal_of_state
from kilburn.event import Act
from kilburn.move import Evict, Fold

TABLES = (*OF_TENANTS, "tenant")


@pytest.fixture(scope="module")
def place(server: OwnServer) -> Iterator[str]:
    """A database that these tests share: each puts back what it damages."""
    admin = server.url.replace("/kilburn?", "/postgres?")
    url = server.url.replace("/kilburn?", "/checked?")
    with psycopg.connect(admin, autocommit=True) as connection:
        connection.execute("CREATE DATABASE checked")
        fill(url)
        yield url
        connection.execute("DROP DATABASE checked WITH (FORCE)")


def fill(url: str) -> None:
    """Sessions with folds, a branch, facts, notes, a forgotten page, checkpoints, vectors and a setting; and another tenant."""
    with kilburn.open(url, window=700, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        session.append({"role": "user", "content": "The pump in hall seven leaks."})
        call = {"id": "call-1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
        session.append({"role": "assistant", "content": None, "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": "call-1", "content": "valve " * 40})
        for number in range(40):
            session.append({"role": "assistant", "content": f"step {number}: pressure is {number * 7}, marker{number}"})
            session.append({"role": "user", "content": f"go on, number {number}"})
        session.edits.apply(Fold((83,), keep=((0, 6),)), Evict((82,)))
        told = session.append({"role": "user", "content": "This is to be forgotten."})
        session.forget(told)
        session.ledger.record(Act.NOTE, policy="gateway", reply="0123456789abcdef01234567", turn=1, calls=())
        session.fork("look around").append({"role": "user", "content": "only on the branch"})
        memory = store.memory("ana")
        memory.remember("Ana lives in Porto")
    with Postgres(url) as backend:
        backend.vectors.add("hash", [(entry, b"12345678") for entry, _ in backend.vectors.unembedded("hash", 1000)])
        backend.settings.put("one", "1")
    with kilburn.open(url, tenant="other", window=700, tokenizer="chars/4", embedder=None) as store:
        store.session("theirs").append({"role": "user", "content": "theirs"})


def checked(url: str, *more: str) -> dict[str, Any]:
    """What `fsck` says."""
    done = run("fsck", "--db", url, "--json", *more)
    assert done.status == bool(done.json["findings"]), done.err
    return done.json  # type: ignore[no-any-return]


def said(url: str, *more: str) -> list[tuple[str, str]]:
    return [(finding["kind"], finding["what"]) for finding in checked(url, *more)["findings"]]


def contents(connection: psycopg.Connection[Any], tables: Sequence[str]) -> list[object]:
    """All rows of these tables."""
    select = sql.SQL("SELECT md5(string_agg(md5(one::text), '' ORDER BY one::text)) FROM {} AS one")
    return [connection.execute(select.format(sql.Identifier("kilburn", name))).fetchone() for name in tables]


@contextmanager
def damaged(url: str, *statements: str, undo: str = "") -> Iterator[None]:
    """Do this to the database as its owner, whatever watches over it, and put all rows back afterwards."""
    tables = sorted({name for statement in statements for name in re.findall(r"kilburn\.(\w+)", statement) if name in TABLES})
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("SET session_replication_role = replica")
        before = contents(connection, tables)
        for name in tables:
            table = sql.Identifier("kilburn", name)
            connection.execute(sql.SQL("CREATE TEMPORARY TABLE {} AS TABLE {}").format(sql.Identifier(name), table))
        for statement in statements:
            assert connection.execute(statement).rowcount != 0
        after = contents(connection, tables)
        try:
            yield
            assert contents(connection, tables) == after, "it was not repaired"
        finally:
            if undo:
                connection.execute(undo)
            for name in tables if before != after else ():
                put_back(connection, name)
            assert contents(connection, tables) == before


def put_back(connection: psycopg.Connection[Any], name: str) -> None:
    """Give a table the rows that it had."""
    table = sql.Identifier("kilburn", name)
    columns = connection.execute(
        "SELECT string_agg(quote_ident(attname), ', ' ORDER BY attnum) FROM pg_attribute"
        " WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped AND attgenerated = ''",
        (f"kilburn.{name}",),
    ).fetchone()
    assert columns is not None
    connection.execute(sql.SQL("DELETE FROM {}").format(table))
    insert = sql.SQL("INSERT INTO {}({}) OVERRIDING SYSTEM VALUE SELECT {} FROM {}")
    connection.execute(insert.format(table, sql.SQL(columns[0]), sql.SQL(columns[0]), sql.Identifier("pg_temp", name)))


def test_a_store_that_is_well(place: str) -> None:
    for tenant in ("default", "other", "nobody"):
        found = checked(place, "--tenant", tenant)
        assert found["findings"] == []
        assert "checked" in found["db"]
    assert "all is well" in run("fsck", place).out


def test_nothing_is_repaired(place: str) -> None:
    done = run("fsck", "--db", place, "--repair")
    assert done.status == 2
    assert "a database is checked, but not repaired" in done.err


OF_S = "segment = (SELECT id FROM kilburn.segment WHERE tenant = 1 AND name = 's')"
PUMP = f"(SELECT content FROM kilburn.page WHERE tenant = 1 AND {OF_S} AND id = 1)"
FLIP = "set_byte({0}, length({0}) - 1, get_byte({0}, length({0}) - 1) # 1)"

DAMAGE = {
    "a byte of a text": (
        f"UPDATE kilburn.content SET data = {FLIP.format('data')} WHERE tenant = 1 AND digest = {PUMP}",
        ("content", "its SHA-256 differs"),
    ),
    "the length of a text": (
        f"UPDATE kilburn.content SET size = size + 1 WHERE tenant = 1 AND digest = {PUMP}",
        ("content", "its length is not the recorded"),
    ),
    "a text is gone": (f"DELETE FROM kilburn.content WHERE tenant = 1 AND digest = {PUMP}", ("page", "the store has none")),
    "a text of nobody": (
        "INSERT INTO kilburn.content VALUES(1, sha256('x'), 1, 0, 'x')",
        ("orphan", "belongs to no page"),
    ),
    "a byte of a page": (
        f"UPDATE kilburn.page SET record = {FLIP.format('record')} WHERE tenant = 1 AND {OF_S} AND id = 1",
        ("page", "p1: its record is not what was written"),
    ),
    "the text of a page": (
        f"UPDATE kilburn.page SET content = (SELECT content FROM kilburn.page WHERE tenant = 1 AND {OF_S} AND id = 5)"
        f" WHERE tenant = 1 AND {OF_S} AND id = 1",
        ("page", "p1: it names content"),
    ),
    "where a page is": (
        f"UPDATE kilburn.page SET place = 'retired' WHERE tenant = 1 AND {OF_S} AND id = 1",
        ("state", "p1: its state is not what was written"),
    ),
    "a page is gone": (
        f"DELETE FROM kilburn.page WHERE tenant = 1 AND {OF_S} AND id = 5",
        ("page", "pages are here where"),
    ),
    "a page of another session": (
        f"UPDATE kilburn.page SET segment = 2, id = 900 WHERE tenant = 1 AND {OF_S} AND id = 5",
        ("page", "p900: its record is not what was written"),
    ),
    "a row of the ledger is gone": (
        f"DELETE FROM kilburn.event WHERE tenant = 1 AND {OF_S} AND number = 3",
        ("ledger", "event 3 is missing"),
    ),
    "the end of the ledger is gone": (
        f"DELETE FROM kilburn.event WHERE tenant = 1 AND {OF_S}"
        f" AND number = (SELECT max(number) FROM kilburn.event WHERE tenant = 1 AND {OF_S})",
        ("ledger", "are missing"),
    ),
    "a byte of the ledger": (
        f"UPDATE kilburn.event SET body = {FLIP.format('body')} WHERE tenant = 1 AND {OF_S} AND number = 3",
        ("ledger", "event 3 (pin): it is not what was written"),
    ),
    "the act of an event": (
        f"UPDATE kilburn.event SET act = 'note' WHERE tenant = 1 AND {OF_S} AND number = 3",
        ("ledger", "event 3 (note): it is not what was written"),
    ),
    "an event that nobody wrote": (
        f"INSERT INTO kilburn.event SELECT tenant, segment, 9999, act, body, seal FROM kilburn.event WHERE tenant = 1 AND {OF_S}"
        " AND number = 3",
        ("ledger", "event 9999 is behind the last one"),
    ),
    "the name of a session": (
        "UPDATE kilburn.segment SET name = 't' WHERE tenant = 1 AND name = 's'",
        ("session", "session 't': its row is not what was written"),
    ),
    "the head of a session": (
        "UPDATE kilburn.segment SET head = head - 1 WHERE tenant = 1 AND name = 's'",
        ("session", "its counters are not what was written"),
    ),
    "a session is gone": (
        "DELETE FROM kilburn.segment WHERE tenant = 1 AND id = 2",
        ("session", "sessions are here where 3 were made; number 2 is missing"),
    ),
    "what is left of a session": (
        "DELETE FROM kilburn.segment WHERE tenant = 1 AND id = 2",
        ("orphan", "rows of page whose session is not there: 2"),
    ),
    "how many sessions there were": (
        "UPDATE kilburn.counter SET segments = 9 WHERE tenant = 1",
        ("session", "3 sessions are here where 9 were made"),
    ),
    "the text index": ("DELETE FROM kilburn.posting WHERE tenant = 1", ("index", "the text index and the pages disagree")),
    "a word too many": (
        "INSERT INTO kilburn.posting SELECT 1, 'word', min(id) >> 12, '\\001\\200' FROM kilburn.passage WHERE tenant = 1",
        ("index", "the text index and the pages disagree"),
    ),
    "a passage is gone": (
        "DELETE FROM kilburn.passage WHERE tenant = 1 AND page = 1 AND id < 2::bigint << 32",
        ("index", "p1 does not have its passages"),
    ),
    "where a passage begins": (
        "UPDATE kilburn.passage SET start = start + 1 WHERE tenant = 1 AND page = 1 AND id < 2::bigint << 32",
        ("index", "p1 does not have its passages"),
    ),
    "a page that no search finds": (
        f"UPDATE kilburn.page SET first_passage = NULL, last_passage = NULL WHERE tenant = 1 AND {OF_S} AND id = 1",
        ("index", "belongs to no page"),
    ),
    "the index of mentions": (
        f"DELETE FROM kilburn.mention WHERE tenant = 1 AND {OF_S} AND event = 3",
        ("index", "the index of mentions and event 3 disagree"),
    ),
    "a reply is not found": (
        f"DELETE FROM kilburn.history WHERE tenant = 1 AND {OF_S} AND message < 0",
        ("index", "the index of replies and event"),
    ),
    "a reply is found in the place of another": (
        f"UPDATE kilburn.history SET digest = '012345678901234567890123' WHERE tenant = 1 AND {OF_S} AND message < 0",
        ("index", "the index of replies and event"),
    ),
    "a reply that nobody gave": (
        "INSERT INTO kilburn.history SELECT tenant, segment, -2, digest, is_last, last_page FROM kilburn.history"
        " WHERE tenant = 1 AND message < 0",
        ("index", "the index of replies and event 2 disagree"),
    ),
    "the index of calls": (
        f"UPDATE kilburn.page SET call = 'other' WHERE tenant = 1 AND {OF_S} AND call IS NOT NULL",
        ("index", "the index of calls differs from it"),
    ),
    "a citation that nobody wrote": (
        "INSERT INTO kilburn.citation VALUES(1, 1, 1, 3, 1)",
        ("index", "the index of citations and p1 disagree about p1 of segment 1"),
    ),
    "a byte of a checkpoint": (
        f"UPDATE kilburn.checkpoint SET data = {FLIP.format('data')} WHERE tenant = 1",
        ("checkpoint", "is not what was written"),
    ),
    "a byte of a vector": (
        f"UPDATE kilburn.vector SET data = {FLIP.format('data')} WHERE tenant = 1 AND id = 1",
        ("vector", "vector 1 of 'hash' is not what was written"),
    ),
    "a vector of another passage": (
        "UPDATE kilburn.vector SET entry = 99 WHERE tenant = 1 AND id = 1",
        ("vector", "vector 1 of 'hash' is not what was written, or its passage is not there"),
    ),
    "a vector is gone": (
        "DELETE FROM kilburn.vector WHERE tenant = 1 AND id = 1",
        ("vector", "passages wait for a vector of 'hash', and nobody knows"),
    ),
    "how many vectors there were": (
        "UPDATE kilburn.embedder SET vectors = 1 WHERE tenant = 1",
        ("vector", "1 vectors of 'hash' were counted"),
    ),
    "a setting": (
        "UPDATE kilburn.setting SET value = '2' WHERE tenant = 1",
        ("session", "the setting b'one' is not what was written"),
    ),
    "a page of a tenant that is not there": (
        f"UPDATE kilburn.page SET tenant = 77 WHERE tenant = 1 AND {OF_S} AND id = 5",
        ("orphan", "rows of page whose tenant is not there: 77"),
    ),
    "a page that another tenant has now": (
        f"UPDATE kilburn.page SET tenant = 2 WHERE tenant = 1 AND {OF_S} AND id = 5",
        ("page", "pages are here where"),
    ),
    "a text that another tenant has now": (
        f"UPDATE kilburn.content SET tenant = 2 WHERE tenant = 1 AND digest = {PUMP}",
        ("page", "the store has none"),
    ),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_named(place: str, name: str) -> None:
    statement, (kind, what) = DAMAGE[name]
    with damaged(place, statement):
        found = said(place)
        assert any(one == kind and what in words for one, words in found), found


def test_a_copy_makes_what_is_derived_anew(place: str, tmp_path: Path) -> None:
    with damaged(place, DAMAGE["the text index"][0], DAMAGE["the index of mentions"][0]):
        kilburn.copy(place, str(tmp_path / "copy.db"), note=False)
    assert said(str(tmp_path / "copy.db")) == []
    with kilburn.open(str(tmp_path / "copy.db"), window=700, tokenizer="chars/4", embedder=None) as store:
        assert store.search("pump leaks")[0].address == "p1"


def test_the_other_tenant_sees_what_it_did_not_write(place: str) -> None:
    session = "UPDATE kilburn.segment SET tenant = 2, id = 2 WHERE tenant = 1 AND name = 's'"
    with damaged(place, session):
        assert ("session", "session 's': its row is not what was written") in said(place, "--tenant", "other")
        assert any(what.startswith("2 sessions are here where 3") for _, what in said(place))
    page = f"UPDATE kilburn.page SET tenant = 2 WHERE tenant = 1 AND {OF_S} AND id = 5"
    with damaged(place, page):
        assert ("page", "2 pages are here where 1 were written") in said(place, "--tenant", "other")


def test_a_state_that_was_altered_with_its_seal_is_not_what_the_ledger_says(place: str) -> None:
    with psycopg.connect(place) as connection:
        ((segment,),) = connection.execute("SELECT id FROM kilburn.segment WHERE tenant = 1 AND name = 's'").fetchall()
    seal = seal_of_state(segment, 5, b"retired", 0, 0.0, None).hex()
    forge = (
        f"UPDATE kilburn.page SET place = 'retired', pinned = 0, importance = 0, valid_until = NULL,"
        f" state_seal = decode('{seal}', 'hex')"
        f" WHERE tenant = 1 AND segment = {segment} AND id = 5"
    )
    with damaged(place, forge):
        assert any(kind == "state" and "stored as retired, the ledger says" in what for kind, what in said(place))


WALLS = {
    "ALTER TABLE kilburn.page DISABLE ROW LEVEL SECURITY": (
        "ALTER TABLE kilburn.page ENABLE ROW LEVEL SECURITY",
        "table page may show rows of other tenants",
    ),
    "ALTER TABLE kilburn.tenant NO FORCE ROW LEVEL SECURITY": (
        "ALTER TABLE kilburn.tenant FORCE ROW LEVEL SECURITY",
        "table tenant may show rows of other tenants",
    ),
    "CREATE POLICY open ON kilburn.event USING (true)": (
        "DROP POLICY open ON kilburn.event",
        "table event may show rows of other tenants",
    ),
    "ALTER TABLE kilburn.segment DISABLE TRIGGER segment_fenced": (
        "ALTER TABLE kilburn.segment ENABLE TRIGGER segment_fenced",
        "trigger segment_fenced is off",
    ),
    "ALTER TRIGGER segment_fenced ON kilburn.segment RENAME TO odd": (
        "ALTER TRIGGER odd ON kilburn.segment RENAME TO segment_fenced",
        "trigger segment_fenced is missing",
    ),
    "ALTER TABLE kilburn.page DISABLE TRIGGER ALL": (
        "ALTER TABLE kilburn.page ENABLE TRIGGER ALL",
        "a foreign key of table page is off",
    ),
    "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'kilburn.page_content'::regclass": (
        "UPDATE pg_index SET indisvalid = true WHERE indexrelid = 'kilburn.page_content'::regclass",
        "index page_content is not complete",
    ),
    "ALTER ROLE kilburn_rows BYPASSRLS": (
        "ALTER ROLE kilburn_rows NOBYPASSRLS",
        "the role of a program may see rows of other tenants",
    ),
}


@pytest.mark.parametrize("statement", WALLS)
def test_walls_that_somebody_took_down(place: str, statement: str) -> None:
    undo, what = WALLS[statement]
    with damaged(place, statement, undo=undo):
        assert any(kind == "schema" and words.startswith(what) for kind, words in said(place)), said(place)


def test_a_person_reads_what_is_wrong(place: str) -> None:
    with damaged(place, DAMAGE["a byte of a text"][0]):
        done = run("fsck", "--db", place.replace("postgres@", "postgres:hunter2@"))
    assert done.status == 1
    assert "content: " in done.out
    assert "1 finding" in done.out
    assert "--repair" not in done.out
    assert "hunter2" not in done.out + done.err
    assert "Traceback" not in done.err


def test_who_sees_only_their_own_can_check_it(place: str) -> None:
    """A user with the role and nothing else, and beside a writer that goes on."""
    with psycopg.connect(place, autocommit=True) as connection:
        connection.execute("DROP ROLE IF EXISTS checker")
        connection.execute("CREATE ROLE checker LOGIN")
        connection.execute("GRANT kilburn_rows TO checker")
        own = place.replace("postgres@", "checker@")
        try:
            assert said(own) == []
            with damaged(place, DAMAGE["a row of the ledger is gone"][0]):
                assert ("ledger", "event 3 is missing") in said(own)
        finally:
            connection.execute("DROP ROLE checker")

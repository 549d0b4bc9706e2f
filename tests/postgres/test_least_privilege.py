"""Forgetting by a user who owns neither the tables nor the database, judged by the raw files of the server."""

from __future__ import annotations

import re
from typing import LiteralString

import psycopg
import pytest
from psycopg import sql

import kilburn
from backends.server_files import files_with, files_with_bytes
from cli.terminal import kilburn as command
from kilburn.backend import Batch
from kilburn.backends.postgres.erasing import WORDS
from kilburn.backends.postgres.schema import MAINTAINS
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreReadOnly
from kilburn.testing.stores import batch_of, start

CANARY = "heliotrope4711"

Operator = psycopg.Connection[tuple[object, ...]]


def table_files(server: OwnServer, data: bytes | str) -> list[str]:
    """The files with these bytes that are none of the write-ahead log."""
    files = files_with_bytes(server, data) if isinstance(data, bytes) else files_with(server, data)
    return [file for file in files if "pg_wal" not in file]


def open_erasures(operator: Operator) -> object:
    return operator.execute("SELECT count(*) FROM kilburn.erasure").fetchall()[0][0]


def grant(operator: Operator, give_tables: LiteralString, message: str) -> None:
    """Do what an error or a receipt tells the administrator to run."""
    if operator.info.server_version >= MAINTAINS:
        statements = re.findall(r"GRANT MAINTAIN ON .*? TO \w+", message)
        assert statements, message
        operator.execute(statements[0])
    else:
        assert "ALTER TABLE ... OWNER TO gateway" in message
        operator.execute(give_tables)


def test_a_forgetting_that_the_server_skips_stays_open_until_it_is_granted(
    server: OwnServer,
    gateway: str,
    operator: Operator,
    caplog: pytest.LogCaptureFixture,
    give_tables: LiteralString,
) -> None:
    with kilburn.open(gateway, window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        page = session.append({"role": "user", "content": f"the password is {CANARY} and nothing else"})
        long = session.append({"role": "user", "content": " ".join(f"word{n * n}" for n in range(3000))})
        # What is long is compressed, and lies in pieces.
        longest = "SELECT substr(data, 100, 200) FROM kilburn.content ORDER BY length(data) DESC LIMIT 1"
        ((stored,),) = operator.execute(longest).fetchall()
        assert isinstance(stored, bytes)
        receipt = store.forget(session="s", address=f"{page}-{long}")
        (place,) = [place for place in receipt.unreached if "files of the server" in place]
        assert "the user gateway may not write kilburn.content, kilburn.page, " in place
        assert table_files(server, CANARY), "it is found where it is"
        assert table_files(server, stored)
        assert open_erasures(operator) == 1
        # Who could not do it is not asked to at every write.
        caplog.clear()
        session.append({"role": "user", "content": "something else"})
        assert not caplog.records
    done = command("postgres", "wipe", gateway)
    assert (done.status, done.out) == (1, "")
    what, _, advice = place.removeprefix("files of the server: ").removesuffix(")").partition(" (")
    assert what in done.err
    assert advice in done.err
    assert open_erasures(operator) == 1

    grant(operator, give_tables, place)
    with Postgres(gateway) as backend:
        assert open_erasures(operator) == 0
        assert not [place for place in backend.contents.unreached() if "files of the server" in place]
    assert table_files(server, CANARY) == []
    assert table_files(server, stored) == []


def test_an_operators_wipe_is_enough_for_a_user_without_the_right(
    server: OwnServer, url: str, gateway: str, operator: Operator
) -> None:
    with Postgres(gateway, tenant="t") as backend:
        backend.commit(start(backend), batch_of(0, {1: f"so {CANARY}"}))
        backend.commit(backend.segments()[0].number, Batch(head=1, erase=[1]))
        with pytest.raises(StoreReadOnly, match="may not write"):
            backend.wipe()
        assert table_files(server, CANARY)
        done = command("postgres", "wipe", url)
        assert (done.status, done.out.splitlines()[0]) == (0, "no forgotten text is left in the tables' files")
        assert files_with(server, CANARY) == []
        assert not [place for place in backend.contents.unreached() if "files of the server" in place]
    # The tenant's own program closes what it had opened.
    Postgres(gateway, tenant="t").close()
    assert open_erasures(operator) == 0


@pytest.mark.slow
def test_no_right_to_a_single_table_is_enough_to_keep_it_open(
    server: OwnServer, gateway: str, operator: Operator, give_tables: LiteralString
) -> None:
    tables = {name: sql.Identifier("kilburn", name) for name in WORDS}
    for name in WORDS:
        for owned in WORDS:
            owner = sql.Identifier("postgres" if owned == name else "gateway")
            operator.execute(sql.SQL("ALTER TABLE {} OWNER TO {}").format(tables[owned], owner))
        with Postgres(gateway) as backend:
            segment = start(backend, name)
            backend.commit(segment, batch_of(0, {1: f"so {CANARY}"}))
            backend.commit(segment, Batch(head=1, erase=[1]))
            with pytest.raises(StoreReadOnly, match=f"may not write kilburn.{name} anew"):
                backend.wipe()
            assert any(f"kilburn.{name} anew" in place for place in backend.contents.unreached())
    assert open_erasures(operator) == 1
    operator.execute(give_tables)
    Postgres(gateway).close()
    assert open_erasures(operator) == 0
    assert table_files(server, CANARY) == []


@pytest.mark.slow
def test_an_owner_of_the_database_may(server: OwnServer, gateway: str, operator: Operator) -> None:
    operator.execute(sql.SQL("ALTER DATABASE {} OWNER TO gateway").format(sql.Identifier(operator.info.dbname)))
    with Postgres(gateway) as backend:
        backend.commit(start(backend), batch_of(0, {1: f"so {CANARY}"}))
        backend.commit(backend.segments()[0].number, Batch(head=1, erase=[1]))
        assert table_files(server, CANARY) == []
        assert open_erasures(operator) == 0


@pytest.mark.slow
@pytest.mark.parametrize("recycle", ["on", "off"])
def test_the_write_ahead_log_holds_it_for_as_long_as_the_receipt_says(
    server: OwnServer,
    url: str,
    gateway: str,
    operator: Operator,
    recycle: str,
    give_tables: LiteralString,
) -> None:
    def size(text: str) -> int:
        ((number,),) = operator.execute("SELECT pg_size_bytes(%s)", (text,)).fetchall()
        assert isinstance(number, int)
        return number

    operator.execute("ALTER SYSTEM SET max_wal_size = '64MB'")
    operator.execute("ALTER SYSTEM SET min_wal_size = '32MB'")
    operator.execute(sql.SQL("ALTER SYSTEM SET wal_recycle = {}").format(recycle))
    operator.execute("SELECT pg_reload_conf()")
    try:
        operator.execute(give_tables)
        with Postgres(gateway) as backend:
            backend.commit(start(backend), batch_of(0, {1: f"so {CANARY}"}))
            backend.commit(backend.segments()[0].number, Batch(head=1, erase=[1]))
            assert table_files(server, CANARY) == []
            (place,) = [place for place in backend.contents.unreached() if "write-ahead log" in place]
        assert "which the user gateway may not switch" in place
        assert files_with(server, CANARY), "the log has it"
        amount = size(re.findall(r"until (\d+ \w+) more", place)[0])
        with psycopg.connect(gateway, autocommit=True) as writer:
            begun = writer.execute("SELECT pg_current_wal_lsn()").fetchall()[0][0]
            written = 0
            while written < amount:
                writer.execute("SELECT pg_logical_emit_message(false, 'noise', repeat('x', 1000000))")
                ((written,),) = writer.execute("SELECT pg_wal_lsn_diff(pg_current_wal_lsn(), %s)", (begun,)).fetchall()
        # `files_with` makes a checkpoint.
        assert files_with(server, CANARY) == []
    finally:
        for name in ("max_wal_size", "min_wal_size", "wal_recycle"):
            operator.execute(sql.SQL("ALTER SYSTEM RESET {}").format(sql.Identifier(name)))
        operator.execute("SELECT pg_reload_conf()")

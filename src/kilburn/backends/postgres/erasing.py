"""What happens to the bytes of what was forgotten: a deleted row lies in its file until the file is written anew.

A plain VACUUM takes dead rows off the pages of a table and leaves their bytes in the room that becomes free. So the tables that
hold words are written anew (`VACUUM FULL`), and the write-ahead log goes on in a new file, where the user may say so; the older
files go with the next checkpoint. A row in `kilburn.erasure` says that this is still to be done, and goes last: a program that is
killed, or a reader that still needs the old rows, only puts it off.

Out of reach are: an archive of the log, replicas that are behind, backups, and blocks that the disk has freed.
"""

from __future__ import annotations

import logging
import time

import psycopg
from psycopg import errors, sql

from kilburn.backends.postgres.connection import LONG, Connection, Database, Statements, connected, is_pooled
from kilburn.errors import StoreError

log = logging.getLogger("kilburn")

WORDS = ("content", "page", "event", "posting", "history", "process", "vector", "stray")
"""The tables that hold what somebody said, or what was made from it."""

LARGEST = 1 << 30
"""Bytes of these tables together: larger ones are not written anew while others wait, but by `kilburn postgres wipe`."""

PAUSE = 0.02
"""Seconds between two looks at whether readers of older rows have ended."""

_FLAG = "SELECT number, at::text FROM kilburn.erasure WHERE tenant = %s"

_READERS = (
    "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()"
    " AND backend_type = 'client backend' AND age(backend_xmin) >= age(%s::xid8::xid)"
)


def flag(statements: Statements, tenant: int) -> None:
    """Say, in the transaction that erases, that erased bytes lie in the server's files."""
    statements.send(
        "INSERT INTO kilburn.erasure(tenant, number, at) VALUES(%s, 1, pg_current_xact_id())"
        " ON CONFLICT(tenant) DO UPDATE SET number = erasure.number + 1, at = pg_current_xact_id()",
        tenant,
    )


def wipe(database: Database, patience: float, *, largest: int = LARGEST) -> bool:
    """Remove the bytes of what this tenant has erased from the server's files, if there are any. What hinders it is logged, and
    it is tried again with the next erasure, and when the store is opened or closed.

    Args:
        patience: seconds to wait for others that use the tables, or older rows.
        largest: bytes of the tables that are written anew at most.

    Returns:
        Whether nothing is left to do.
    """
    try:
        flagged = database.read("erasing", lambda statements: statements.row(_FLAG, database.tenant))
        if flagged is None:
            return True
        number, at = flagged
        with connected(database.url, "erasing", silence=LONG) as connection:
            hindered = _rewrite(connection, at, patience, largest)
        if not hindered:
            done = "DELETE FROM kilburn.erasure WHERE tenant = %s AND number = %s"
            database.write("erasing", lambda statements: statements.send(done, database.tenant, number))
            return True
    except StoreError as error:
        hindered = str(error)
    log.warning("%s: erased bytes may still lie in the files of the server: %s", database.shown, hindered)
    return False


def _rewrite(connection: Connection, at: str, patience: float, largest: int) -> str:
    """Write the tables anew, without what was erased up to a transaction; returns what hinders it."""
    ((size,),) = connection.execute(
        "SELECT sum(pg_total_relation_size(to_regclass('kilburn.' || name))) FROM unnest(%s::text[]) AS own(name)", (list(WORDS),)
    ).fetchall()
    full = size <= largest
    deadline = time.monotonic() + patience
    while full and connection.execute(_READERS, (at,)).fetchall() != [(0,)]:
        if time.monotonic() >= deadline:
            return "a transaction that began before still reads it"
        time.sleep(PAUSE)
    pooled = is_pooled(connection)
    for name in WORDS:
        while not _vacuum(connection, name, full=full, pooled=pooled, patience=patience):
            if time.monotonic() >= deadline:
                return "others use the tables"
            time.sleep(PAUSE)
    _new_log(connection)
    return "" if full else f"the tables have {size:,} bytes; run `kilburn postgres wipe` when few use them"


def _vacuum(connection: Connection, name: str, *, full: bool, pooled: bool, patience: float) -> bool:
    """Write a table anew, or clear it; returns whether nobody was in the way."""
    options = [sql.SQL(name) for name, wanted in (("FULL", full), ("SKIP_LOCKED", pooled)) if wanted]
    kind = sql.SQL("({}) ").format(sql.SQL(", ").join(options)) if options else sql.SQL("")
    vacuum = sql.SQL("VACUUM {kind}{table}").format(kind=kind, table=sql.Identifier("kilburn", name))
    if pooled:
        # What is set on a connection would stay for whoever has it next. So this does not queue for the table.
        skipped: list[str | None] = []

        def hear(said: psycopg.errors.Diagnostic) -> None:
            skipped.append(said.sqlstate)

        connection.add_notice_handler(hear)
        try:
            connection.execute(vacuum)
        finally:
            connection.remove_notice_handler(hear)
        return errors.LockNotAvailable.sqlstate not in skipped
    try:
        wait = f"{max(1, round(patience * 1000))}ms"
        connection.execute("SELECT set_config('lock_timeout', %s, false), set_config('statement_timeout', '0', false)", (wait,))
        connection.execute(vacuum)
    except errors.LockNotAvailable:
        return False
    finally:
        if not connection.closed:
            connection.execute("RESET lock_timeout")
            connection.execute("RESET statement_timeout")
    return True


def _new_log(connection: Connection) -> None:
    """Go on in a new file of the write-ahead log, and do not keep the older ones, where the user may say so."""
    try:
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
    except (errors.InsufficientPrivilege, psycopg.errors.ObjectNotInPrerequisiteState):
        # The server does so by itself in its time: docs/howto/postgres.md.
        return

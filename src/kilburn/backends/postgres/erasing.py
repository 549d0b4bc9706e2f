"""What happens to the bytes of what was forgotten: a deleted row lies in its file until the file is written anew.

A plain VACUUM takes dead rows off the pages of a table and leaves their bytes in the room that becomes free. So the tables that
hold words are written anew (`VACUUM FULL`), and the write-ahead log goes on in a new file, where the user may say so; the older
files go with the next checkpoint. An index of vectors is not built anew, see `kilburn.backends.postgres.halves`. A row in
`kilburn.erasure` says that this is still to be done, and goes last: a program that is killed, or a reader that still needs the
old rows, only puts it off.

Out of reach are: an archive of the log, replicas that are behind, backups, and blocks that the disk has freed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import psycopg
from psycopg import errors, sql

from kilburn.backends.postgres import halves
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
        graphs = database.read("erasing", lambda statements: halves.indexed(statements, database.tenant))
        if graphs:
            database.write("erasing", lambda statements: halves.leave(statements, database.tenant))
        with connected(database.url, "erasing", silence=LONG) as connection:
            hindered = _rewrite(connection, at, patience, largest, [halves.near_table(*own) for own in graphs])
        if not hindered:
            done = "DELETE FROM kilburn.erasure WHERE tenant = %s AND number = %s"
            database.write("erasing", lambda statements: statements.send(done, database.tenant, number))
            return True
    except StoreError as error:
        hindered = str(error)
    log.warning("%s: erased bytes may still lie in the files of the server: %s", database.shown, hindered)
    return False


def _rewrite(connection: Connection, at: str, patience: float, largest: int, graphs: Sequence[sql.Identifier]) -> str:
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
    kind = ["FULL"] if full else []
    # A vector that left the graph is overwritten, and the graph around it mended; a few would otherwise be put off.
    tables = [(sql.Identifier("kilburn", name), kind) for name in WORDS] + [(table, ["INDEX_CLEANUP ON"]) for table in graphs]
    for table, options in tables:
        while not _vacuum(connection, table, options, pooled=pooled, patience=patience):
            if time.monotonic() >= deadline:
                return "others use the tables"
            time.sleep(PAUSE)
    _new_log(connection)
    return "" if full else f"the tables have {size:,} bytes; run `kilburn postgres wipe` when few use them"


def _vacuum(connection: Connection, table: sql.Identifier, options: Sequence[str], *, pooled: bool, patience: float) -> bool:
    """Write a table anew, or clear it; returns whether nobody was in the way."""
    given = [sql.SQL(option) for option in (*options, *(["SKIP_LOCKED"] if pooled else []))]
    kind = sql.SQL("({}) ").format(sql.SQL(", ").join(given)) if given else sql.SQL("")
    vacuum = sql.SQL("VACUUM {kind}{table}").format(kind=kind, table=table)
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


_HELD = """
SELECT (SELECT count(*) FROM kilburn.erasure WHERE tenant = %s),
    current_setting('archive_mode') <> 'off',
    (SELECT count(*) FROM pg_stat_replication),
    (SELECT count(*) FROM pg_replication_slots),
    current_setting('wal_recycle')::bool,
    current_setting('log_parameter_max_length') <> '0'
        AND (current_setting('log_statement') IN ('mod', 'all') OR current_setting('log_min_duration_statement') <> '-1')
"""


def held(statements: Statements, tenant: int) -> tuple[str, ...]:
    """Where the server, by its own account, may still hold what is erased."""
    ((waits, archived, replicas, slots, recycled, logged),) = statements.rows(_HELD, tenant)
    places = (
        (waits, "files of the server, until `kilburn postgres wipe` has written the tables anew"),
        (archived, "the archive of the write-ahead log (archive_mode is on), as long as it is kept"),
        (replicas, f"{replicas} connected for replication, until what they keep is written over"),
        (slots, f"older write-ahead log that is kept for {slots} replication slots"),
        (recycled, "older files of the write-ahead log until they are written over (wal_recycle is on)"),
        (logged, "the server's log, which has statements with their parameters"),
    )
    return tuple(what for there, what in places if there)

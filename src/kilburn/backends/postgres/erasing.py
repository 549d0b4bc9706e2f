"""What happens to the bytes of what was forgotten: a deleted row lies in its file until the file is written anew.

A plain VACUUM takes dead rows off the pages of a table and leaves their bytes in the room that becomes free. So the tables that
hold words are written anew (`VACUUM FULL`), and the write-ahead log goes on in a new file, where the user may say so; the older
files go with the next checkpoint. An index of vectors is not built anew, see `kilburn.backends.postgres.halves`. A row in
`kilburn.erasure` says that this is still to be done, and goes last: a program that is killed, or a reader that still needs the
old rows, only puts it off. The tables are those of all tenants, so what one tenant's program does is done for all that had erased
by then: `kilburn.wiped` says up to which transaction.

Out of reach are: an archive of the log, replicas that are behind, backups, and blocks that the disk has freed.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence

import psycopg
from psycopg import errors, sql

from kilburn.backends.postgres import halves
from kilburn.backends.postgres.connection import LONG, Connection, Database, connected, is_pooled
from kilburn.backends.postgres.statements import Statements
from kilburn.errors import StoreError

log = logging.getLogger("kilburn")

WORDS = ("content", "page", "event", "posting", "history", "segment", "vector", "cold_object")
"""The tables that hold what somebody said, or what was made from it."""

LARGEST = 1 << 30
"""Bytes of these tables together: larger ones are not written anew while others wait, but by `kilburn postgres wipe`."""

PAUSE = 0.02
"""Seconds between two looks at whether readers of older rows have ended."""

_FLAG = "SELECT number, xid::text FROM kilburn.erasure WHERE tenant = %s"

_NOW = "SELECT pg_current_xact_id()::text"

_WIPED = "SELECT before > %s::xid8 FROM kilburn.wiped"

_BEFORE = "SELECT first::text, greatest(first, %s::xid8)::text FROM (SELECT pg_snapshot_xmin(pg_current_snapshot())) AS n(first)"
"""The first transaction that may still go on, so that all before it have ended; and the later one of this and another."""

# A transaction keeps rows that were deleted after it began, also where it only writes and reads nothing at the moment. Vacuuming
# alone keeps none.
_READERS = """
SELECT EXISTS(SELECT FROM pg_stat_activity WHERE datname = current_database() AND pid <> pg_backend_pid()
        AND backend_type IS DISTINCT FROM 'autovacuum worker' AND greatest(age(backend_xmin), age(backend_xid)) >= given.age)
    OR EXISTS(SELECT FROM pg_prepared_xacts WHERE database = current_database() AND age(transaction) >= given.age)
    OR EXISTS(SELECT FROM pg_replication_slots WHERE age(xmin) >= given.age)
    OR EXISTS(SELECT FROM pg_stat_replication WHERE age(backend_xmin) >= given.age)
    FROM (SELECT age(%s::xid8::xid)) AS given(age)
"""


def flag(statements: Statements, tenant: int) -> None:
    """Say, in the transaction that erases, that erased bytes lie in the server's files."""
    statements.send(
        "INSERT INTO kilburn.erasure(tenant, number, xid) VALUES(%s, 1, pg_current_xact_id())"
        " ON CONFLICT(tenant) DO UPDATE SET number = erasure.number + 1, xid = pg_current_xact_id()",
        tenant,
    )


def wipe(database: Database, patience: float, *, largest: int = LARGEST) -> bool:
    """Remove the bytes of what this tenant has erased from the server's files, if there are any. What hinders it is logged, and
    it is tried again with the next erasure, and when the store is opened or closed.

    Args:
        patience: seconds to wait for others that use the tables, or older rows.
        largest: bytes of the tables that are written anew at most. With more than `LARGEST` they are, whatever this tenant has
            erased: nobody sees what others have.

    Returns:
        Whether nothing is left to do.
    """
    try:
        flagged = database.read("erasing", lambda statements: statements.row(_FLAG, database.tenant))
        if flagged is None and largest <= LARGEST:
            return True
        number, at = flagged or (0, database.write("erasing", lambda statements: statements.rows(_NOW))[0][0])
        graphs = database.read("erasing", lambda statements: halves.indexed(statements, database.tenant))
        if graphs:
            database.write("erasing", lambda statements: halves.leave(statements, database.tenant))
        with connected(database.url, "erasing", silence=LONG) as connection:
            hindered = _rewrite(connection, at, patience, largest) or _mend(connection, patience, graphs)
        if not hindered:
            done = "DELETE FROM kilburn.erasure WHERE tenant = %s AND number = %s"
            database.write("erasing", lambda statements: statements.send(done, database.tenant, number))
            return True
    except StoreError as error:
        hindered = str(error)
    log.warning("%s: erased bytes may still lie in the files of the server: %s", database.shown, hindered)
    return False


def _rewrite(connection: Connection, at: str, patience: float, largest: int) -> str:
    """Write the tables anew, without what was erased up to a transaction, if nobody else does; returns what hinders it."""
    ((size,),) = connection.execute(
        "SELECT sum(pg_total_relation_size(to_regclass('kilburn.' || name))) FROM unnest(%s::text[]) AS own(name)", (list(WORDS),)
    ).fetchall()
    full = size <= largest
    ((before, last),) = connection.execute(_BEFORE, (at,)).fetchall()
    deadline = time.monotonic() + patience
    while full and not _is_wiped(connection, at) and connection.execute(_READERS, (last,)).fetchall() != [(False,)]:
        if time.monotonic() >= deadline:
            return "a transaction that began before still reads it"
        time.sleep(PAUSE)
    pooled = is_pooled(connection)
    for name in WORDS:
        table = sql.Identifier("kilburn", name)
        while not _is_wiped(connection, at) and not _vacuum(connection, table, ["FULL"] * full, pooled=pooled, patience=patience):
            if time.monotonic() >= deadline:
                return "others use the tables"
            time.sleep(PAUSE)
    _new_log(connection)
    if full and not _is_wiped(connection, at):
        connection.execute("UPDATE kilburn.wiped SET before = greatest(before, %s::xid8)", (before,))
    elif not full and not _is_wiped(connection, at):
        return f"the tables have {size:,} bytes; run `kilburn postgres wipe` when few use them"
    return ""


def _is_wiped(connection: Connection, at: str) -> bool:
    """Whether the tables were written anew without what was erased up to a transaction."""
    return connection.execute(_WIPED, (at,)).fetchall() == [(True,)]


def _mend(connection: Connection, patience: float, graphs: Iterable[tuple[int, int]]) -> str:
    """Overwrite the vectors that have left the graphs of a tenant, and mend the graphs around them; returns what hinders it."""
    pooled, deadline = is_pooled(connection), time.monotonic() + patience
    for own in graphs:
        # A few would otherwise be put off.
        while not _vacuum(connection, halves.near_table(*own), ["INDEX_CLEANUP ON"], pooled=pooled, patience=patience):
            if time.monotonic() >= deadline:
                return "others use the tables"
            time.sleep(PAUSE)
    return ""


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

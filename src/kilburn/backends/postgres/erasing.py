"""What happens to the bytes of what was forgotten: a deleted row lies in its file until the file is written anew.

A plain VACUUM takes dead rows off the pages of a table and leaves their bytes in the room that becomes free. So the tables that
hold words are written anew (`VACUUM FULL`), and the write-ahead log goes on in a new file, where the user may say so; the older
files go with the next checkpoint. An index of vectors is not built anew, see `kilburn.backends.postgres.halves`. A row in
`kilburn.erasure` says that this is still to be done, and goes last: a program that is killed, or a reader that still needs the
old rows, only puts it off. The tables are those of all tenants, so what one tenant's program does is done for all that had erased
by then: `kilburn.wiped` says up to which transaction.

PostgreSQL skips a table that its user may not vacuum, and only warns. So the rights are checked before, and after it whether the
table has a new file.

Out of reach are: an archive of the log, replicas that are behind, backups, and blocks that the disk has freed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import psycopg
from psycopg import errors, sql

from kilburn.backends.postgres import halves
from kilburn.backends.postgres.connection import LONG, Connection, Database, connected, is_pooled
from kilburn.backends.postgres.schema import MAINTAINS
from kilburn.backends.postgres.statements import Statements
from kilburn.errors import StoreBusy, StoreError, StoreReadOnly

WORDS = ("content", "page", "event", "posting", "history", "segment", "vector", "cold_object")
"""The tables that hold what somebody said, or what was made from it."""

MAX_REWRITE_BYTES = 1 << 30
"""Bytes of these tables together: larger ones are not written anew while others wait, but by `kilburn postgres wipe`."""

PAUSE = 0.02
"""Seconds between two looks at whether readers of older rows have ended."""

_FLAG = "SELECT number, xid::text FROM kilburn.erasure WHERE tenant = %s"

_SELECT_XID = "SELECT pg_current_xact_id()::text"

_WIPED = "SELECT before > %s::xid8 FROM kilburn.wiped"

_SELECT_OLDEST_XID = (
    "SELECT first::text, greatest(first, %s::xid8)::text FROM (SELECT pg_snapshot_xmin(pg_current_snapshot())) AS n(first)"
)
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


# What VACUUM asks: the owner of the table or of the database, or from PostgreSQL 17 on the right MAINTAIN.
_DENIED = """
SELECT pg_class.oid::regclass::text FROM unnest(%s::text[]) WITH ORDINALITY AS own(name, place)
    JOIN pg_class ON pg_class.oid = to_regclass(name)
    WHERE NOT pg_has_role(relowner, 'USAGE')
    AND NOT (SELECT pg_has_role(datdba, 'USAGE') FROM pg_database WHERE datname = current_database())
    AND NOT CASE WHEN current_setting('server_version_num')::int < 170000 THEN false
        ELSE has_table_privilege(pg_class.oid, 'MAINTAIN') END
    ORDER BY place
"""

_FILES = "SELECT name, pg_relation_filenode(name::regclass) FROM unnest(%s::text[]) AS own(name)"


def wipe(database: Database, patience: float, *, largest: int = MAX_REWRITE_BYTES) -> None:
    """Remove the bytes of what this tenant has erased from the server's files, if there are any. After an error the store still
    knows that they are to be removed.

    Args:
        patience: seconds to wait for others that use the tables, or older rows.
        largest: maximum size in bytes of the tables that are rewritten. With more than `MAX_REWRITE_BYTES` they are rewritten
            whatever this tenant has erased, because nobody sees what others have erased.

    Raises:
        StoreReadOnly: the user of the URL may not vacuum a table; the advice says what has to be granted.
        StoreBusy: others use the tables, or older rows. StoreError: the tables are larger; the server did not do it.
    """
    flagged = database.read("erasing", lambda statements: statements.row(_FLAG, database.tenant))
    if flagged is None and largest <= MAX_REWRITE_BYTES:
        return
    number, xid = flagged or (0, database.write("erasing", lambda statements: statements.rows(_SELECT_XID))[0][0])
    graphs = database.read("erasing", lambda statements: halves.indexed(statements, database.tenant))
    if graphs:
        database.write("erasing", lambda statements: halves.leave(statements, database.tenant))
    with connected(database.url, "erasing", silence=LONG) as connection:
        vacuum = _Vacuum(connection, patience)
        tables = [] if _is_wiped(connection, xid) else [sql.Identifier("kilburn", name) for name in WORDS]
        near = [halves.near_table(*graph) for graph in graphs]
        vacuum.check_rights([*tables, *near])
        if tables:
            _rewrite(connection, vacuum, tables, xid, largest)
        for table in near:
            # VACUUM would put off a few dead rows.
            vacuum.run(table, "INDEX_CLEANUP ON")
    delete = "DELETE FROM kilburn.erasure WHERE tenant = %s AND number = %s"
    database.write("erasing", lambda statements: statements.send(delete, database.tenant, number))


class _Vacuum:
    """Vacuums tables on a connection of its own.

    Args:
        patience: seconds to wait for others, for all tables together.
    """

    def __init__(self, connection: Connection, patience: float) -> None:
        self._connection, self._deadline = connection, time.monotonic() + patience
        self._notices: list[psycopg.errors.Diagnostic] = []
        connection.add_notice_handler(self._notices.append)
        # What is set on a pooler's connection stays for whoever has it next. So there VACUUM does not queue for a table.
        self._is_pooled = is_pooled(connection)
        if not self._is_pooled:
            settings = (
                "SELECT set_config('lock_timeout', %s, false), set_config('statement_timeout', '0', false),"
                " set_config('client_min_messages', 'warning', false)"
            )
            connection.execute(settings, (f"{max(1, round(patience * 1000))}ms",))

    def check_rights(self, tables: Sequence[sql.Identifier]) -> None:
        """Check that this user may vacuum these tables.

        Raises:
            StoreReadOnly.
        """
        names = [table.as_string(self._connection) for table in tables]
        denied = [name for (name,) in self._connection.execute(_DENIED, (names,)).fetchall()]
        if denied:
            ((user,),) = self._connection.execute("SELECT quote_ident(current_user)").fetchall()
            table_names, grant = ", ".join(denied), f"for each of these tables ALTER TABLE ... OWNER TO {user}"
            if self._connection.info.server_version >= MAINTAINS:
                grant = f"GRANT MAINTAIN ON {table_names} TO {user}"
            raise StoreReadOnly(
                f"the user {user} may not write {table_names} anew",
                advice="`kilburn postgres wipe` with the URL of their owner, or of the database's, does it now; for the future an"
                f" administrator has to run {grant}",
            )

    def wait(self, problem: str) -> None:
        """Wait a moment for others.

        Raises:
            StoreBusy: it took too long.
        """
        if time.monotonic() >= self._deadline:
            raise StoreBusy(problem, advice="it is tried again later; `kilburn postgres wipe` waits for a minute")
        time.sleep(PAUSE)

    def run(self, table: sql.Identifier, option: str = "") -> None:
        """Vacuum a table. Whether it was written anew by "FULL" is for the caller to check.

        Raises:
            StoreBusy: others use it. StoreError: the server warns of something.
        """
        options = [sql.SQL(word) for word in (option, "SKIP_LOCKED" * self._is_pooled) if word]
        vacuum = sql.SQL("VACUUM ({options}) {table}") if options else sql.SQL("VACUUM {table}")
        statement = vacuum.format(options=sql.SQL(", ").join(options), table=table)
        while True:
            self._notices.clear()
            try:
                self._connection.execute(statement)
                warnings = {notice.sqlstate: notice.message_primary for notice in self._notices}
            except errors.LockNotAvailable as error:
                warnings = {error.sqlstate: None}
            if errors.LockNotAvailable.sqlstate in warnings:
                self.wait("others use the tables")
            elif warnings and option != "FULL":
                problem = f"the server warns of a vacuum: {'; '.join(map(str, warnings.values()))}"
                raise StoreError(problem, advice="see the server's log")
            else:
                return


def _rewrite(connection: Connection, vacuum: _Vacuum, tables: Sequence[sql.Identifier], xid: str, largest: int) -> None:
    """Write tables anew, without what was erased up to a transaction, unless another program does it meanwhile.

    Raises:
        StoreBusy: others use the tables, or older rows. StoreError: the tables have more than `largest` bytes, or one of them has
            no new file.
    """
    names = [table.as_string(connection) for table in tables]
    old_files: dict[str, int] = dict(connection.execute(_FILES, (names,)).fetchall())
    ((size,),) = connection.execute(
        "SELECT sum(pg_total_relation_size(to_regclass(name))) FROM unnest(%s::text[]) AS own(name)", (names,)
    ).fetchall()
    full = size <= largest
    ((first_running, last),) = connection.execute(_SELECT_OLDEST_XID, (xid,)).fetchall()
    while full and not _is_wiped(connection, xid) and connection.execute(_READERS, (last,)).fetchall() != [(False,)]:
        vacuum.wait("a transaction that began before still reads it")
    for table in tables:
        if not _is_wiped(connection, xid):
            vacuum.run(table, "FULL" * full)
    _new_log(connection)
    if _is_wiped(connection, xid):
        return
    if full and (unchanged := [name for name, file in connection.execute(_FILES, (names,)) if file == old_files[name]]):
        raise StoreError(f"the server has not written {', '.join(unchanged)} anew", advice="see the server's log")
    if not full:
        raise StoreError(f"the tables have {size:,} bytes", advice="run `kilburn postgres wipe` when few use them")
    connection.execute("UPDATE kilburn.wiped SET before = greatest(before, %s::xid8)", (first_running,))


def _is_wiped(connection: Connection, xid: str) -> bool:
    """Whether the tables were written anew without what was erased up to a transaction."""
    return connection.execute(_WIPED, (xid,)).fetchall() == [(True,)]


def _new_log(connection: Connection) -> None:
    """Go on in a new file of the write-ahead log, and do not keep the older ones, where the user may say so."""
    try:
        connection.execute("SELECT pg_switch_wal()")
        connection.execute("CHECKPOINT")
    except (errors.InsufficientPrivilege, psycopg.errors.ObjectNotInPrerequisiteState):
        # The server does so by itself in its time, and `held` says when.
        return


# At the first checkpoint after a file of the log is full, the server removes it, or keeps it for use again, and writes over it
# when the log comes there. Between two checkpoints, and in files for use again, there is `max_wal_size` each.
_SELECT_ERASURE_STATE = """
SELECT (SELECT count(*) FROM kilburn.erasure WHERE tenant = %s AND xid >= (SELECT before FROM kilburn.wiped)),
    NOT (has_function_privilege(session_user, 'pg_switch_wal()', 'EXECUTE')
        AND pg_has_role(session_user, 'pg_checkpoint', 'USAGE')),
    current_setting('wal_recycle')::bool OR current_setting('wal_keep_size') <> '0',
    pg_size_pretty(pg_size_bytes(current_setting('wal_segment_size')) + pg_size_bytes(current_setting('wal_keep_size'))
        + pg_size_bytes(current_setting('max_wal_size')) * (1 + current_setting('wal_recycle')::bool::int)),
    quote_ident(session_user), current_setting('checkpoint_timeout'),
    current_setting('archive_mode') <> 'off',
    (SELECT count(*) FROM pg_stat_replication),
    (SELECT count(*) FROM pg_replication_slots),
    current_setting('log_parameter_max_length') <> '0'
        AND (current_setting('log_statement') IN ('mod', 'all') OR current_setting('log_min_duration_statement') <> '-1')
"""


def held(statements: Statements, tenant: int, hindrance: StoreError | None = None) -> tuple[str, ...]:
    """Where the server, by its own account, may still hold what is erased.

    Args:
        hindrance: why the tables were not written anew, as far as this program knows.
    """
    ((waits, fixed, retained, size, user, timeout, archived, replicas, slots, logged),) = statements.rows(
        _SELECT_ERASURE_STATE, tenant
    )
    files = "files of the server, until `kilburn postgres wipe` has written the tables anew"
    if hindrance is not None:
        files = f"files of the server: {hindrance.what} ({hindrance.advice})"
    switched = f"older files of the write-ahead log (wal_recycle, wal_keep_size), until {size} more of it are written"
    unswitched = (
        f"the write-ahead log, which the user {user} may not switch, until {size} more of it are written and a checkpoint is"
        f" made (checkpoint_timeout is {timeout}); while nobody writes it stays"
    )
    places = (
        (waits, files),
        (fixed, unswitched),
        (retained and not fixed, switched),
        (archived, "the archive of the write-ahead log (archive_mode is on), as long as it is kept"),
        (replicas, f"{replicas} connected for replication, until what they keep is written over"),
        (slots, f"older write-ahead log that is kept for {slots} replication slots"),
        (logged, "the server's log, which has statements with their parameters"),
    )
    return tuple(place for is_held, place in places if is_held)

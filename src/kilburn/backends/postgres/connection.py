"""Access to PostgreSQL: a pool of connections for each database, transactions of a tenant, and its errors as Kilburn's.

Statements go out in pipeline mode: together, and an answer is waited for when somebody asks for it. Each transaction says
itself for which role and which tenant it is and how long it waits, and nothing stays behind on the connection: so a pooler may
stand between.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any, TypeVar, cast

from kilburn.errors import (
    KilburnError,
    MissingExtra,
    SpecError,
    StoreBusy,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreReadOnly,
    StoreUnavailable,
    StoreVersion,
)

try:
    import psycopg
    from psycopg import errors
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.types.numeric import Int8BinaryDumper, Int8Dumper
    from psycopg_pool import ConnectionPool, PoolClosed, PoolTimeout
except ModuleNotFoundError as error:
    raise MissingExtra("psycopg", "postgres") from error

T = TypeVar("T")

Row = tuple[Any, ...]

Connection = psycopg.Connection[Row]

NOTHING = 0
"""What psycopg tells a generator that waits when nothing has come for a while."""

LOOK = 0.1
"""Seconds of that while."""


class BoundedConnection(psycopg.Connection[Row]):
    """A connection that is given up when nothing comes from the server for too long, whatever the network says."""

    silence = 30.0
    """Seconds for which nothing may come while an answer is waited for."""

    def wait(self, gen: Generator[Any, Any, T], interval: float = LOOK, timeout: float | None = None) -> T:
        """See psycopg."""
        return super().wait(self._bounded(gen), LOOK, timeout)

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        silent = 0
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                silent = silent + 1 if ready == NOTHING else 0
                if silent * LOOK > self.silence:
                    self.close()
                    raise psycopg.OperationalError(f"nothing came from the server for {self.silence:g} seconds")
                wanted = gen.send(ready)
        except StopIteration as end:
            return cast(T, end.value)


MOST = 1000
"""That many a URL may say."""

ROLE = "kilburn_rows"
"""Owns nothing, and sees the rows of the tenant that a transaction says and no others."""

CONNECTIONS = 8
"""Connections of a process to a database, at most, where the URL does not say `connections=N`."""

REACH = 5
"""Seconds to connect."""

TRIES = 8
"""How often a transaction is done that others were in the way of."""

# A server that is gone without a word is noticed after some ten seconds, not after hours.
ALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}

_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED READ WRITE"
_SETTINGS = (
    "SELECT set_config('role', %s, true), set_config('kilburn.tenant', %s, true), set_config('lock_timeout', %s, true),"
    " set_config('statement_timeout', %s, true), set_config('synchronous_commit', %s, true)"
)

AGAIN = (errors.DeadlockDetected, errors.SerializationFailure, errors.ForeignKeyViolation)
"""Another transaction was in the way: the whole is done again. A foreign key is violated when another has just removed a text
that this one found."""

GONE = (errors.AdminShutdown, errors.CrashShutdown, errors.CannotConnectNow, errors.IdleInTransactionSessionTimeout)


def split_connections(url: str) -> tuple[str, int]:
    """The URL without what is ours, and how many connections a process may have: `?connections=N`.

    Raises:
        SpecError: no number that is one.
    """
    address, mark, query = url.partition("?")
    ours = [part for part in query.split("&") if part.startswith("connections=")]
    if not mark or not ours:
        return url, CONNECTIONS
    number = ours[-1].partition("=")[2]
    if not number.isdecimal() or not 1 <= int(number) <= MOST:
        raise SpecError(f"connections={number[:20]!r}", advice=f"give a number from 1 to {MOST}")
    rest = "&".join(part for part in query.split("&") if not part.startswith("connections="))
    return f"{address}?{rest}" if rest else address, int(number)


def checked_url(url: str) -> str:
    """The URL as libpq takes it, with time-outs that it does not say itself.

    Raises:
        SpecError: it is none.
    """
    url, _ = split_connections(url)
    try:
        given = conninfo_to_dict(url)
    except psycopg.ProgrammingError as error:
        what = "a URL of PostgreSQL that cannot be read"
        raise SpecError(what, advice="write postgresql://user@host:5432/database") from error
    known: dict[str, Any] = {"connect_timeout": REACH, "application_name": "kilburn", "client_encoding": "utf8", **ALIVE}
    return make_conninfo("", **{**known, **given})


def shown_url(url: str) -> str:
    """The URL without a password, for messages."""
    given = conninfo_to_dict(url)
    host = given.get("host") or given.get("hostaddr") or "localhost"
    port = f":{given['port']}" if given.get("port") else ""
    return f"postgresql://{host}{port}/{given.get('dbname') or given.get('user') or ''}"


class Statements:
    """Sends the statements of one transaction."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def send(self, sql: str, *values: object) -> psycopg.Cursor[Row]:
        """Send one; its answer is read by whoever wants it."""
        return self._connection.cursor(binary=True).execute(sql, values)

    def rows(self, sql: str, *values: object) -> list[Row]:
        """The rows of a query."""
        return self.send(sql, *values).fetchall()

    def row(self, sql: str, *values: object) -> Row | None:
        """The first row of a query, or None."""
        return self.send(sql, *values).fetchone()


class _Shared:
    """The pools of this process, by URL. Whoever opens a database again shares its connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[int, str, int], tuple[ConnectionPool[Connection], int]] = {}

    def take(self, url: str, connections: int) -> ConnectionPool[Connection]:
        # A child process has no part in its parent's connections.
        key = os.getpid(), url, connections
        with self._lock:
            if key in self._pools:
                pool, users = self._pools[key]
            else:
                pool = ConnectionPool(
                    url,
                    min_size=0,
                    max_size=connections,
                    max_idle=60.0,
                    connection_class=BoundedConnection,
                    kwargs={"autocommit": True},
                    configure=configure,
                    open=True,
                    reconnect_timeout=REACH,
                    name="kilburn",
                )
                users = 0
            self._pools[key] = pool, users + 1
            return pool

    def leave(self, url: str, connections: int) -> None:
        key = os.getpid(), url, connections
        with self._lock:
            pool, users = self._pools.pop(key)
            if users > 1:
                self._pools[key] = pool, users - 1
                return
        pool.close()


_shared = _Shared()


def configure(connection: Connection) -> None:
    """Numbers are always sent as the same type, so that a statement is planned once."""
    connection.adapters.register_dumper(int, Int8Dumper)
    connection.adapters.register_dumper(int, Int8BinaryDumper)
    connection.prepare_threshold = 2


class _Lasting(threading.local):
    """Whether a commit of this thread waits for the disk, and whether its last one did."""

    on = False
    done = False


class Database:
    """One tenant's transactions in a database. Threads have a connection each while they are in one.

    Args:
        url: as `checked_url` gives it.
        patience: seconds to wait for another writer, and for a connection.
        durable: whether a commit waits for the disk.
        connections: of this process, at most.
    """

    def __init__(self, url: str, *, patience: float, durable: bool, connections: int = CONNECTIONS) -> None:
        self.url, self.shown = url, shown_url(url)
        self._patience, self._always = patience, durable
        # What a statement may take; a server that has nothing to say for longer is gone.
        self._longest = max(2.0, 5 * patience)
        self.tenant = 0
        # Whether erased bytes may still lie in the server's files.
        self.erased = False
        self._connections = connections
        self._pool: ConnectionPool[Connection] | None = _shared.take(url, connections)
        # The connection of a thread whose writes are one transaction now.
        self._joined = threading.local()
        self.lasting = _Lasting()

    def close(self) -> None:
        """Give the connections back; idempotent."""
        pool, self._pool = self._pool, None
        if pool is not None:
            _shared.leave(self.url, self._connections)

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._pool is None

    @property
    def _durable(self) -> bool:
        """Whether a commit waits for the disk."""
        return self._always or self.lasting.on

    @property
    def joined(self) -> Connection | None:
        """The connection of this thread's transaction, if it is in one of several steps."""
        return cast("Connection | None", getattr(self._joined, "connection", None))

    @contextmanager
    def connection(self, doing: str) -> Iterator[Connection]:
        """A connection of the pool."""
        if self._pool is None:
            raise StoreError(f"{doing} {self.shown}: the store was closed", advice="open it again")
        with translate_errors(self.shown, doing), self._pool.connection(timeout=max(self._patience, 1.0)) as connection:
            if isinstance(connection, BoundedConnection):
                connection.silence = self._longest + 1.0
            yield connection

    def read(self, doing: str, do: Callable[[Statements], T]) -> T:
        """What `do` reads, in one snapshot."""
        joined = self.joined
        if joined is not None:
            with translate_errors(self.shown, doing), joined.pipeline():
                return do(Statements(joined))
        return self._transact(doing, do, _READ)

    def write(self, doing: str, do: Callable[[Statements], T], settled: Callable[[Statements], T | None] | None = None) -> T:
        """Do all of `do` or nothing of it; it may be called again, and then begins anew.

        Args:
            settled: finds out, if the reply to the commit was lost, what was done; None if nothing was.
        """
        joined = self.joined
        if joined is None:
            return self._transact(doing, do, _WRITE, settled)
        with translate_errors(self.shown, doing):
            try:
                with joined.pipeline():
                    joined.execute("SAVEPOINT part")
                    made = do(Statements(joined))
                    joined.execute("RELEASE part")
            except BaseException:
                if not joined.closed:
                    with suppress(psycopg.Error):
                        joined.execute("ROLLBACK TO part")
                        joined.execute("RELEASE part")
                raise
            return made

    def _begin(self, statements: Statements, begin: str, *, durable: bool) -> None:
        wait = f"{round(self._patience * 1000)}ms"
        longest = f"{round(self._longest * 1000)}ms"
        statements.send(begin)
        statements.send(_SETTINGS, ROLE, str(self.tenant), wait, longest, "on" if durable else "off")

    def _transact(
        self, doing: str, do: Callable[[Statements], T], begin: str, settled: Callable[[Statements], T | None] | None = None
    ) -> T:
        for attempt in range(TRIES):
            sent = False
            try:
                with self.connection(doing) as connection, connection.pipeline():
                    statements = Statements(connection)
                    self._begin(statements, begin, durable=self._durable)
                    made = do(statements)
                    sent = begin is _WRITE
                    statements.send("COMMIT")
                return made
            except StoreError as error:
                cause = error.__cause__
                if isinstance(cause, AGAIN) and attempt + 1 < TRIES:
                    time.sleep(0.002 * attempt)
                elif isinstance(error, StoreUnavailable) and isinstance(cause, psycopg.Error) and attempt == 0:
                    # A connection that was lost while nobody used it; or the reply to a commit is.
                    if sent and settled is None:
                        raise
                    if sent and settled is not None:
                        done = self._transact(doing, settled, _WRITE)
                        if done is not None:
                            return done
                else:
                    raise
        raise AssertionError

    @contextmanager
    def together(self) -> Iterator[None]:
        """One transaction for all that this thread writes meanwhile."""
        if self.joined is not None:
            yield
            return
        with self.connection("writing") as connection:
            with connection.pipeline():
                self._begin(Statements(connection), _WRITE, durable=self._durable)
            self._joined.connection = connection
            try:
                yield
                connection.execute("COMMIT")
            finally:
                self._joined.connection = None

    def flush(self) -> None:
        """Wait until all that was committed is on the server's disk."""

        def wait(statements: Statements) -> None:
            statements.send("SELECT set_config('synchronous_commit', 'on', true), pg_logical_emit_message(true, 'kilburn', '')")

        self._transact("syncing", wait, _WRITE)


@contextmanager
def connected(url: str, doing: str, *, silence: float = 30.0) -> Iterator[Connection]:
    """A connection of one's own, as the user of the URL; given up when the server says nothing for so many seconds."""
    with translate_errors(shown_url(url), doing), BoundedConnection.connect(url, autocommit=True) as connection:
        connection.silence = silence
        configure(connection)
        yield connection


def translate_errors(place: str, doing: str) -> AbstractContextManager[None]:
    """Turn PostgreSQL's errors inside the block into `StoreError`s that say what to do."""
    return _translated(place, doing)


@contextmanager
def _translated(place: str, doing: str) -> Iterator[None]:
    try:
        yield
    except KilburnError:
        raise
    except (PoolTimeout, PoolClosed) as error:
        advice = "the server does not answer, or all connections are in use; check it, or use fewer threads"
        raise StoreUnavailable(f"{doing} {place}: no connection in time", advice=advice) from error
    except psycopg.Error as error:
        raise _translate(error, f"{doing} {place}: {_words(error)}") from error


def _words(error: psycopg.Error) -> str:
    # What a server says in detail may quote a row.
    said = error.diag.message_primary or str(error)
    return " ".join(said.split()) or type(error).__name__


_CLASSES: Mapping[type[psycopg.Error] | tuple[type[psycopg.Error], ...], tuple[type[StoreError], str]] = {
    errors.InvalidPassword: (StoreUnavailable, "check the user and the password in the URL, or PGPASSWORD"),
    errors.InvalidAuthorizationSpecification: (StoreUnavailable, "check the user in the URL, and pg_hba.conf"),
    errors.InvalidCatalogName: (StoreUnavailable, "make the database first: createdb NAME"),
    errors.TooManyConnections: (StoreBusy, "the server has no connection free; raise max_connections, or use pgbouncer"),
    (errors.LockNotAvailable, errors.DeadlockDetected, errors.SerializationFailure): (
        StoreBusy,
        "another writer holds it; try again, or give a longer busy_timeout",
    ),
    errors.QueryCanceled: (StoreBusy, "the server took too long; try again, and look at what it is busy with"),
    (errors.DiskFull, errors.OutOfMemory, errors.InsufficientResources): (
        StoreFull,
        "free some space on the server; nothing of this write was kept",
    ),
    errors.ReadOnlySqlTransaction: (
        StoreReadOnly,
        "this server is a replica, or read-only: write to the primary, or open it readonly",
    ),
    errors.InsufficientPrivilege: (
        StoreReadOnly,
        "the user of the URL lacks a right; docs/howto/postgres.md says what an administrator has to grant",
    ),
    (errors.DataCorrupted, errors.IndexCorrupted): (StoreCorrupt, "restore the database from a backup"),
    errors.FeatureNotSupported: (StoreVersion, "use PostgreSQL 15 or newer"),
    GONE: (StoreUnavailable, "the server was stopped or is starting; try again"),
    errors.UndefinedTable: (StoreCorrupt, "the schema kilburn is not whole; restore it from a backup"),
}


def _translate(error: psycopg.Error, what: str) -> StoreError:
    for kinds, (made, advice) in _CLASSES.items():
        if isinstance(error, kinds):
            return made(what, advice=advice)
    if isinstance(error, psycopg.OperationalError) and (error.sqlstate is None or error.sqlstate.startswith(("08", "57"))):
        advice = "check that the server runs and can be reached from here, and what the URL says"
        if "password authentication failed" in str(error) or "no password supplied" in str(error):
            advice = "check the user and the password in the URL, or PGPASSWORD"
        elif "does not exist" in str(error):
            advice = "make the database or the user first: createdb NAME, createuser NAME"
        elif "too many" in str(error) or "remaining connection slots" in str(error):
            return StoreBusy(what, advice="the server has no connection free; raise max_connections, or use pgbouncer")
        return StoreUnavailable(what, advice=advice)
    return StoreError(what, advice="what was acknowledged before is intact; try again")

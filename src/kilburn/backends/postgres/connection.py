"""Access to PostgreSQL: the connections to each database, transactions of a tenant, and its errors as Kilburn's.

Each transaction says itself for which role and which tenant it is and how long it waits, and nothing stays behind on the
connection: so a pooler may stand between.
"""

from __future__ import annotations

import logging
import os
import select
import threading
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
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
    StoreStale,
    StoreUnavailable,
    StoreVersion,
)

try:
    import psycopg
    from psycopg import errors
    from psycopg.conninfo import conninfo_to_dict, make_conninfo
    from psycopg.pq import TransactionStatus
except ModuleNotFoundError as error:
    raise MissingExtra("psycopg", "postgres") from error

from kilburn.backends.postgres.statements import Row, Statements

log = logging.getLogger("kilburn")

T = TypeVar("T")

NOTHING = 0
"""What psycopg tells a generator that waits when nothing has come for a while."""

LOOK = 0.1
"""Seconds of that while."""


class BoundedConnection(psycopg.Connection[Row]):
    """A connection that is given up when nothing comes from the server for too long, whatever the network says."""

    silence = 30.0
    """Seconds for which nothing may come while an answer is waited for."""
    answers: Callable[[], bool] = staticmethod(lambda: True)
    """Whether the server says anything to who comes anew."""
    last_used = 0.0
    """When it was used last."""
    lost = 0
    """How many others were lost when it was made."""
    statements: Statements
    """Sends to it."""

    @property
    def told(self) -> bool:
        """Whether the server has said something that nobody asked for: it has ended the connection."""
        # Not `select`, which knows no file with a number over 1023.
        poll = select.poll()
        try:
            poll.register(self.fileno(), select.POLLIN)
            return bool(poll.poll(0))
        except (OSError, ValueError, psycopg.Error):
            return True

    def wait(self, gen: Generator[Any, Any, T], interval: float = LOOK, timeout: float | None = None) -> T:
        """See psycopg."""
        return super().wait(self._bounded(gen), LOOK, timeout)

    def longer(self, silent: float) -> float:
        """How long to go on waiting, where nothing has come for so many seconds. A server may be busy for long; one that says
        nothing to others either is gone.

        Raises:
            psycopg.OperationalError: no longer; the connection is given up.
        """
        if silent >= self.silence or (silent >= REACH and not self.answers()):
            self.close()
            raise psycopg.OperationalError(f"nothing came from the server for {silent:g} seconds")
        return min(self.silence - silent, max(silent, REACH))

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        looks, waits = 0, 0.0
        try:
            state = next(gen)
            while True:
                if looks * LOOK >= waits:
                    waits = looks * LOOK + self.longer(looks * LOOK)
                ready = yield state
                looks, waits = (looks + 1, waits) if ready == NOTHING else (0, 0.0)
                state = gen.send(ready)
        except StopIteration as end:
            return cast(T, end.value)


Connection = BoundedConnection

MAX_CONNECTIONS = 1000
"""That many a URL may say."""

ROLE = "kilburn_rows"
"""Owns nothing, and sees the rows of the tenant that a transaction says and no others."""

CONNECTIONS = 8
"""Connections of a process to a database, at most, where the URL does not say `connections=N`."""

LONG = 3600.0
"""Seconds for which a server may say nothing that does something long."""

IDLE = 60.0
"""Seconds after which a connection that is not needed is ended."""

REACH = 5
"""Seconds to connect."""

RESTS = 2.0
"""Seconds in which nobody waits again for a server that was just waited for in vain. A request takes several transactions: it
waits once, and not in each of them."""

MAX_ATTEMPTS = 8
"""How often a transaction is done that others were in the way of."""

# A server that is gone without a word is noticed after some ten seconds, not after hours.
ALIVE = {"keepalives_idle": 5, "keepalives_interval": 2, "keepalives_count": 3, "tcp_user_timeout": 10_000}

_BEGIN_SINGLE = ""
"""A statement that comes alone is a transaction by itself, with what was set right before it."""
_BEGIN_READ = "BEGIN ISOLATION LEVEL REPEATABLE READ READ ONLY"
# Whether it may write is for the database's owner to say.
_BEGIN_WRITE = "BEGIN ISOLATION LEVEL READ COMMITTED"
# A plan that was made while a table was small is kept: by its indexes it stays right when the table has grown, and never reads
# the rows of others. The checks of foreign keys are planned so too.
# Before PostgreSQL 18 a plan that reads a whole table nevertheless is taken for so dear that it is compiled first.
# What a role or a database has been given by its owner holds in no transaction of ours.
_SETTINGS = (
    "SELECT set_config('role', %s, true), set_config('kilburn.tenant', %s, true), set_config('lock_timeout', %s, true),"
    " set_config('statement_timeout', %s, true), set_config('synchronous_commit', %s, true),"
    " set_config('idle_in_transaction_session_timeout', %s, true), set_config('row_security', 'on', true),"
    " set_config('array_nulls', 'on', true), set_config('enable_seqscan', 'off', true), set_config('jit', 'off', true)"
)
_BOUNDED = f"{_SETTINGS}, set_config('transaction_timeout', %s, true)"

BOUNDS = 170000
"""The first PostgreSQL that ends a transaction of which nothing is heard in the middle of a pipeline."""

RETRYABLE = (errors.DeadlockDetected, errors.SerializationFailure, errors.ForeignKeyViolation)
"""Another transaction was in the way: the whole is done again. A foreign key is violated when another has just removed a text
that this one found."""

UNAVAILABLE = (
    errors.AdminShutdown,
    errors.CrashShutdown,
    errors.CannotConnectNow,
    errors.IdleInTransactionSessionTimeout,
    errors.IdleSessionTimeout,
    errors.TransactionTimeout,
)


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
    if not number.isdecimal() or not 1 <= int(number) <= MAX_CONNECTIONS:
        raise SpecError(f"connections={number[:20]!r}", advice=f"give a number from 1 to {MAX_CONNECTIONS}")
    rest = "&".join(part for part in query.split("&") if not part.startswith("connections="))
    return f"{address}?{rest}" if rest else address, int(number)


def checked_url(url: str) -> str:
    """The URL as libpq takes it, with time-outs that it does not say itself.

    Raises:
        SpecError: it is none.
    """
    url, _ = split_connections(url)
    options: Mapping[str, Any] | None
    try:
        options = conninfo_to_dict(url)
    except psycopg.ProgrammingError:
        options = None
    # A password with such a character is taken for a host, a port or a database, and would be shown as one.
    authority, _, path = url.partition("://")[2].partition("/")
    ports = [port for port in str((options or {}).get("port") or "").split(",") if port]
    if options is None or "@" in path.partition("?")[0] or authority.count("@") > 1 or not all(map(str.isdecimal, ports)):
        # Nothing of it is repeated: it may be a password.
        problem = "a URL of PostgreSQL that cannot be read"
        advice = "write postgresql://user@host:5432/database, and in a password %40 for @, %2F for /, %25 for %"
        raise SpecError(problem, advice=advice)
    defaults: dict[str, Any] = {"connect_timeout": REACH, "application_name": "kilburn", "client_encoding": "utf8", **ALIVE}
    return make_conninfo("", **{**defaults, **options})


def shown_url(url: str) -> str:
    """The URL without a password, for messages."""
    options = conninfo_to_dict(url)
    host = options.get("host") or options.get("hostaddr") or "localhost"
    port = f":{options['port']}" if options.get("port") else ""
    return f"postgresql://{host}{port}/{options.get('dbname') or options.get('user') or ''}"


class _Reach:
    """Connects to a database. While its server says nothing at all, callers do not each wait for it by themselves."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._trying, self._looking = threading.Lock(), threading.Lock()
        self.rests = RESTS
        self._deaf = 0.0
        """Until when it is not tried again; 0 while it answers."""

    @property
    def is_deaf(self) -> bool:
        """Whether it was just waited for in vain."""
        return time.monotonic() < self._deaf

    def connect(self) -> Connection:
        """A connection.

        Raises:
            psycopg.errors.ConnectionTimeout: the server said nothing, or was just waited for in vain. psycopg.OperationalError.
        """
        if not self._deaf:
            return self._connect()
        # One tries, and the others go on without it.
        if self.is_deaf or not self._trying.acquire(blocking=False):
            raise errors.ConnectionTimeout("the server has said nothing for a while")
        try:
            return self._connect()
        finally:
            self._trying.release()

    def _connect(self) -> Connection:
        try:
            connection = Connection.connect(self._url, autocommit=True)
        except errors.ConnectionTimeout:
            self._deaf = time.monotonic() + self.rests
            raise
        except psycopg.OperationalError:
            # It says why it lets nobody in.
            self._deaf = 0.0
            raise
        self._deaf = 0.0
        connection.answers = self.answers
        return connection

    def answers(self) -> bool:
        """Whether the server lets somebody in, or says why not."""
        with self._looking:
            if self.is_deaf:
                return False
            try:
                self._connect().close()
            except errors.ConnectionTimeout:
                return False
            except psycopg.Error:
                pass
            return True


class _Pool:
    """The connections of this process to one database. Who needs one makes it, and so knows why it cannot be made."""

    def __init__(self, url: str, connections: int) -> None:
        self.users = 0
        self._url, self._most = url, connections
        self._free: list[Connection] = []
        self._lost = 0
        self.rests = RESTS
        self.begin_anew()

    def begin_anew(self) -> None:
        """Begin without a connection, as a child process does: those that are there stay its parent's, and are not ended."""
        self._parents = self._free
        self.reach = _Reach(self._url)
        self._lock = threading.Lock()
        self._room = threading.Semaphore(self._most)
        self._free = []
        self._rested = 0.0
        """Until when nobody waits for the server."""

    @contextmanager
    def connection(self, patience: float) -> Iterator[Connection]:
        """One that nobody else has meanwhile. What is not written at the end is undone.

        Args:
            patience: seconds to wait for one that others use, and for a server that lets nobody in.
        """
        if not self._room.acquire(timeout=patience):
            problem = f"all {self._most} connections of this program to it are in use"
            raise StoreBusy(problem, advice="try again, or use fewer threads")
        try:
            connection = self._take(patience)
            try:
                yield connection
            finally:
                self._give(connection)
        finally:
            self._room.release()

    def _take(self, patience: float) -> Connection:
        while True:
            with self._lock:
                connection = self._free.pop() if self._free else None
            if connection is None:
                break
            with suppress(psycopg.Error):
                connection.statements.settle()
                if not connection.told:
                    return connection
            # The server has ended it meanwhile.
            connection.close()
        lost = self._lost
        new_connection = self._connect(patience)
        new_connection.lost = lost
        return new_connection

    def _connect(self, patience: float) -> Connection:
        began, pause, deaf = time.monotonic(), 0.02, self.reach.is_deaf
        while True:
            try:
                connection = self.reach.connect()
            except psycopg.OperationalError:
                # A server that is started anew lets nobody in for a while.
                now = time.monotonic()
                if deaf or now < self._rested:
                    raise
                if now + pause > began + patience:
                    self._rested = now + self.rests
                    raise
                time.sleep(pause)
                pause = min(2 * pause, 0.5)
                continue
            try:
                # Nothing is prepared behind a pooler, which may send the next transaction to another connection.
                connection.statements = Statements(connection, prepares=not is_pooled(connection))
            except BaseException:
                connection.close()
                raise
            return connection

    def _give(self, connection: Connection) -> None:
        is_open = connection.info.transaction_status is not TransactionStatus.IDLE and not connection.statements.is_unsettled
        if not connection.closed and is_open:
            try:
                connection.rollback()
            except psycopg.Error as error:
                log.info("a connection is given up: %s", error)
                connection.close()
        connection.last_used = time.monotonic()
        with self._lock:
            if connection.closed or connection.lost != self._lost:
                connection.close()
            else:
                self._free.append(connection)
            # The one that was used last is used next; the others may not be needed any more.
            while self._free and connection.last_used - self._free[0].last_used > IDLE:
                self._free.pop(0).close()

    def renew(self) -> None:
        """Use none of these connections again: one is lost, and they may hang as that did."""
        with self._lock:
            self._lost += 1
            while self._free:
                self._free.pop().close()

    close = renew


class _Shared:
    """The pools of this process, by URL. Whoever opens a database again shares its connections."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pools: dict[tuple[str, int], _Pool] = {}
        os.register_at_fork(after_in_child=self._begin_anew)

    def _begin_anew(self) -> None:
        # A child process has no part in its parent's connections, and another thread of that may have held a lock.
        self._lock = threading.Lock()
        for pool in self._pools.values():
            pool.begin_anew()

    def take(self, url: str, connections: int) -> _Pool:
        with self._lock:
            pool = self._pools.setdefault((url, connections), _Pool(url, connections))
            pool.users += 1
            return pool

    def leave(self, url: str, connections: int) -> None:
        with self._lock:
            pool = self._pools[url, connections]
            pool.users -= 1
            if not pool.users:
                del self._pools[url, connections]
                pool.close()


_shared = _Shared()


def is_pooled(connection: Connection) -> bool:
    """Whether somebody stands between: then the server is another than who answered first."""
    connection.prepare_threshold = None
    ((server,),) = connection.execute("SELECT pg_backend_pid()").fetchall()
    return bool(server != connection.info.backend_pid)


class _Lasting(threading.local):
    """Whether a commit of this thread waits for the disk, whether its last one did, and what its transaction of several steps has
    written to segments: number, with the last event."""

    joined: list[tuple[int, tuple[int, bytes] | None]]
    on = False
    is_flushed = False


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
        # And a transaction: who is not heard of for longer does not keep what it has locked.
        self._silent = 4 * self._longest
        self.tenant = 0
        # Whether erased bytes may still lie in the server's files.
        self.erased = False
        self._connections = connections
        self._pool: _Pool | None = _shared.take(url, connections)
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

    @property
    def _is_snapshot(self) -> bool:
        """Whether the transaction that this thread is in only reads."""
        return getattr(self._joined, "is_snapshot", False)

    @contextmanager
    def connection(self, doing: str) -> Iterator[Connection]:
        """A connection of the pool."""
        pool = self._pool
        if pool is None:
            raise StoreError(f"{doing} {self.shown}: the store was closed", advice="open it again")
        with translate_errors(self.shown, doing), pool.connection(max(self._patience, 1.0)) as connection:
            connection.silence = self._longest + 1.0
            yield connection

    def read(self, doing: str, do: Callable[[Statements], T], *, long: bool = False) -> T:
        """What `do` reads, in one snapshot.

        Args:
            long: it takes its time, in many statements.
        """
        joined = self.joined
        if joined is None:
            return self._transact(doing, do, _BEGIN_READ, long=long)
        with translate_errors(self.shown, doing):
            if not self._is_snapshot:
                with joined.statements as statements:
                    return do(statements)
            try:
                result = do(joined.statements)
            except psycopg.OperationalError:
                if not joined.closed or self._joined.is_read:
                    raise
                # The connection was lost before anybody used it. Others may hang as this one did.
                self._begin_snapshot(self._joined.ending)
                result = do(self._joined.connection.statements)
            self._joined.is_read = True
            return result

    def rows(self, doing: str, sql: str, *values: object) -> list[Row]:
        """The rows of one query. It needs no snapshot but its own."""
        if self.joined is not None:
            return self.read(doing, lambda statements: statements.rows(sql, *values))
        return self._transact(doing, lambda statements: statements.send(sql, *values), _BEGIN_SINGLE).fetchall()

    def write(
        self,
        doing: str,
        do: Callable[[Statements], T],
        settled: Callable[[Statements], T | None] | None = None,
        *,
        single: bool = False,
    ) -> T:
        """Do all of `do` or nothing of it; it may be called again, and then begins anew.

        Args:
            settled: finds out, if the reply to the commit was lost, what was done; None if nothing was.
            single: whether `do` waits for no answer: then all of it is one message, and needs no `BEGIN`.
        """
        joined = self.joined
        if joined is None:
            return self._transact(doing, do, _BEGIN_SINGLE if single else _BEGIN_WRITE, settled, writes=True)
        if self._is_snapshot:
            raise StoreReadOnly(f"{doing} {self.shown}: a snapshot is only read", advice="write after it")
        with translate_errors(self.shown, doing):
            try:
                with joined.statements as statements:
                    statements.send("SAVEPOINT part")
                    result = do(statements)
                    statements.send("RELEASE part")
            except BaseException:
                if not joined.closed:
                    with suppress(psycopg.Error):
                        joined.execute("ROLLBACK TO part")
                        joined.execute("RELEASE part")
                raise
            return result

    def _begin(self, connection: Connection, begin: str, *, steps: bool = False, long: bool = False) -> None:
        """Begin a transaction.

        Args:
            steps: its caller does other things in between. long: its statements take as long as they take.
        """
        statements = connection.statements
        wait, statement_timeout, silent = (
            f"{round(seconds * 1000)}ms" for seconds in (self._patience, self._longest, self._silent)
        )
        values = ROLE, str(self.tenant), wait, "0" if long else statement_timeout, "on" if self._durable else "off", silent
        if long:
            connection.silence = LONG
        if begin:
            statements.send(begin)
        if not (steps or long) and connection.info.server_version >= BOUNDS:
            statements.send(_BOUNDED, *values, silent)
        else:
            statements.send(_SETTINGS, *values)

    def _transact(
        self,
        doing: str,
        do: Callable[[Statements], T],
        begin: str,
        settled: Callable[[Statements], T | None] | None = None,
        *,
        long: bool = False,
        writes: bool = False,
    ) -> T:
        lost = False
        for attempt in range(MAX_ATTEMPTS):
            connected = is_sent = False
            try:
                with self.connection(doing) as connection, connection.statements as statements:
                    connected = True
                    self._begin(connection, begin, long=long)
                    result = do(statements)
                    is_sent = writes
                    if begin is _BEGIN_READ:
                        statements.end_reading()
                    elif begin:
                        statements.send("COMMIT")
                return result
            except StoreError as error:
                cause = error.__cause__
                if isinstance(cause, RETRYABLE) and attempt + 1 < MAX_ATTEMPTS:
                    time.sleep(0.002 * attempt)
                elif isinstance(error, StoreUnavailable) and connected and (is_sent or not lost):
                    # A connection is lost, and maybe the reply to a commit. Others may hang as this one did.
                    if self._pool is not None:
                        self._pool.renew()
                    result_found_out = self._find_out(doing, error, settled) if is_sent else None
                    if result_found_out is not None:
                        return result_found_out
                    if lost:
                        raise
                    lost = True
                else:
                    raise
        raise AssertionError

    def _find_out(self, doing: str, error: StoreError, settled: Callable[[Statements], T | None] | None) -> T | None:
        """What a transaction has done whose commit was not answered; None if nothing.

        Raises:
            StoreUnavailable: nobody knows.
        """
        try:
            if settled is not None:
                return self._transact(doing, settled, _BEGIN_WRITE, writes=True)
        except StoreError as second:
            log.info("%s", second)
        problem = f"{error.what}; whether it was written is not known"
        raise StoreUnavailable(problem, advice="try again: what was written is not written twice") from error.__cause__

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """Let all that this thread reads meanwhile be as it was at the first read; it goes out with that."""
        if self.joined is not None:
            yield
            return
        joined = self._joined
        with ExitStack() as ending:
            joined.is_snapshot, joined.is_read, joined.ending = True, False, ending
            try:
                self._begin_snapshot(ending)
                yield
                joined.connection.statements.end_reading()
            finally:
                joined.connection, joined.is_snapshot, joined.ending = None, False, None

    def _begin_snapshot(self, ending: ExitStack) -> None:
        """Begin a snapshot on a connection that `ending` gives back, instead of one that was lost."""
        if self.joined is not None and self._pool is not None:
            with suppress(StoreError, psycopg.Error):
                ending.close()
            self._pool.renew()
        connection = ending.enter_context(self.connection("reading"))
        ending.enter_context(connection.statements)
        self._begin(connection, _BEGIN_READ, steps=True)
        self._joined.connection = connection

    @contextmanager
    def together(self) -> Iterator[None]:
        """One transaction for all that this thread does meanwhile.

        Raises:
            StoreStale: another transaction was in the way, or a part of this one failed; nothing was written.
            StoreUnavailable: the connection is lost; its message says so where nobody knows whether it was written.
        """
        if self.joined is not None:
            yield
            return
        is_sent = False
        try:
            with self.connection("writing") as connection:
                with connection.statements:
                    self._begin(connection, _BEGIN_WRITE, steps=True)
                self._joined.connection = connection
                try:
                    yield
                    is_sent = True
                    # What failed within it, even if nobody heeded that, has undone all of it.
                    if connection.execute("COMMIT").statusmessage != "COMMIT":
                        raise StoreStale("a part of this transaction failed, so nothing of it was written", advice="do it again")
                finally:
                    self._joined.connection = None
        except StoreError as error:
            if isinstance(error.__cause__, RETRYABLE):
                raise StoreStale(error.what, advice="do it again") from error.__cause__
            if is_sent and isinstance(error, StoreUnavailable):
                problem = f"{error.what}; whether it was written is not known"
                raise StoreUnavailable(problem, advice="look at what is there before you do it again") from error.__cause__
            raise

    def flush(self, sql: str = "", *values: object) -> Row | None:
        """Wait until all that was committed is on the server's disk; what a query finds there, if one is given."""

        def wait(statements: Statements) -> Row | None:
            statements.send("SELECT set_config('synchronous_commit', 'on', true), pg_logical_emit_message(true, 'kilburn', '')")
            return statements.row(sql, *values) if sql else None

        return self._transact("syncing", wait, _BEGIN_WRITE, writes=True)


@contextmanager
def connected(url: str, doing: str, *, silence: float = 30.0) -> Iterator[Connection]:
    """A connection of one's own, as the user of the URL; given up when the server says nothing for so many seconds."""
    with translate_errors(shown_url(url), doing), _Reach(url).connect() as connection:
        connection.silence, connection.prepare_threshold = silence, None
        yield connection


# What an owner of the database has set holds in no transaction of ours; it is one message, as there may be no time between two.
_OWN_SETTINGS = """;
SET LOCAL idle_in_transaction_session_timeout = 0;
SET LOCAL lock_timeout = '5s';
SET LOCAL statement_timeout = 0;
SET LOCAL row_security = on;
"""
_PATIENT = {
    False: f"BEGIN ISOLATION LEVEL READ COMMITTED{_OWN_SETTINGS}",
    True: f"BEGIN ISOLATION LEVEL REPEATABLE READ{_OWN_SETTINGS}",
}


@contextmanager
def patient(connection: Connection, *, snapshot: bool = False, silence: float = LONG) -> Iterator[None]:
    """Open a transaction that waits for a lock for some time, and works for as long as it takes.

    Args:
        snapshot: whether all statements see the database as the first one does.
        silence: seconds for which the server may say nothing.
    """
    connection.execute(_PATIENT[snapshot])
    previous_silence, connection.silence = connection.silence, silence
    try:
        yield
        connection.execute("COMMIT")
    finally:
        if not connection.closed:
            # Where it is done, or the connection lost, nothing happens.
            with suppress(psycopg.Error):
                connection.rollback()
        connection.silence = previous_silence


def translate_errors(place: str, doing: str) -> AbstractContextManager[None]:
    """Turn PostgreSQL's errors inside the block into `StoreError`s that say what to do."""
    return _translated(place, doing)


@contextmanager
def _translated(place: str, doing: str) -> Iterator[None]:
    try:
        yield
    except KilburnError:
        raise
    except psycopg.Error as error:
        raise _translate(error, f"{doing} {place}: {_words(error)}") from error


def _words(error: psycopg.Error) -> str:
    # What a server says in detail may quote a row.
    message = error.diag.message_primary or str(error)
    return " ".join(message.split()) or type(error).__name__


NO_ROOM = "free some space on the server; nothing of this write was kept"

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
    (errors.DiskFull, errors.OutOfMemory, errors.InsufficientResources): (StoreFull, NO_ROOM),
    errors.ReadOnlySqlTransaction: (
        StoreReadOnly,
        "this server is a replica, or read-only: write to the primary, or open it readonly",
    ),
    errors.InsufficientPrivilege: (
        StoreReadOnly,
        "the user of the URL lacks a right; docs/howto/postgres.md says what an administrator has to grant",
    ),
    (errors.DataCorrupted, errors.IndexCorrupted): (StoreCorrupt, "restore the database from a backup"),
    (errors.UntranslatableCharacter, errors.CharacterNotInRepertoire): (
        StoreError,
        "this database is not in UTF-8: make one by createdb --encoding=UTF8 --template=template0",
    ),
    errors.FeatureNotSupported: (StoreVersion, "use PostgreSQL 15 or newer"),
    UNAVAILABLE: (StoreUnavailable, "the server was stopped or is starting; try again"),
    (errors.UndefinedTable, errors.UndefinedColumn, errors.UndefinedFunction, errors.InvalidSchemaName): (
        StoreCorrupt,
        "the schema kilburn is not whole; restore it from a backup",
    ),
}


FULL = ("too many", "remaining connection slots", "no more connections allowed", "query_wait_timeout")
"""What servers and poolers say that have no connection left."""


def _translate(error: psycopg.Error, problem: str) -> StoreError:
    for kinds, (error_class, advice) in _CLASSES.items():
        if isinstance(error, kinds):
            return error_class(problem, advice=advice)
    if isinstance(error, psycopg.OperationalError) and (error.sqlstate is None or error.sqlstate.startswith(("08", "57"))):
        advice = "check that the server runs and can be reached from here, and what the URL says"
        if "password authentication failed" in str(error) or "no password supplied" in str(error):
            advice = "check the user and the password in the URL, or PGPASSWORD"
        elif "does not exist" in str(error):
            advice = "make the database or the user first: createdb NAME, createuser NAME"
        elif "No space left on device" in str(error):
            # It has not even let anybody in.
            return StoreFull(problem, advice=NO_ROOM)
        elif any(words in str(error) for words in FULL):
            return StoreBusy(problem, advice="the server has no connection free; raise max_connections, or use pgbouncer")
        return StoreUnavailable(problem, advice=advice)
    return StoreError(problem, advice="what was acknowledged before is intact; try again")

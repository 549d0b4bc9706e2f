"""Statements of one transaction: they are held back until an answer is waited for, and then go out as one message.

psycopg's own pipeline writes to the socket for each statement, and its cursors take longer for one than the server does. So this
speaks to libpq through `psycopg.pq`; what stands in an answer is read by psycopg's loaders.
"""

from __future__ import annotations

import re
import select
import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import count
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self

import psycopg
from psycopg import errors
from psycopg.adapt import PyFormat, Transformer
from psycopg.pq import ExecStatus, Format
from psycopg.pq.abc import PGresult
from psycopg.sql import SQL, Composed

if TYPE_CHECKING:
    from kilburn.backends.postgres.connection import Connection

Row = tuple[Any, ...]

OFTEN = 2
"""A statement that is sent more often on a connection is prepared there."""

PREPARED = 400
"""Statements that are prepared on a connection, at most. Nearly all are constants; there are some for each index of vectors."""

Dumped = tuple[bytes | None, int, int]
"""A value as it is sent, the number of its type (0 where the statement says it), and whether it is text or binary."""

Key = tuple[bytes, tuple[int, ...]]
"""A statement, and the types of its values."""

_INTEGER, _BYTES, _FLOAT, _BOOLEAN, _TEXT = 20, 17, 701, 16, 25
_INTEGERS, _BYTESES, _FLOATS, _TEXTS = 1016, 1001, 1022, 1009

_SIZE = struct.Struct("!i").pack
_HEAD = struct.Struct("!iiIii").pack
_NULL = _SIZE(-1)

_FAILED = (ExecStatus.FATAL_ERROR, ExecStatus.BAD_RESPONSE, ExecStatus.PIPELINE_ABORTED)


def _text(value: str) -> Dumped:
    data = value.encode()
    if b"\0" in data:
        raise psycopg.DataError("no text of PostgreSQL has a NUL")
    return data, 0, Format.TEXT


def _list(values: list[Any]) -> Dumped | None:
    kinds = set(map(type, values)) - {type(None)}
    if kinds <= {int, float}:
        # As Python writes them.
        data = f"{{{str(values)[1:-1]}}}".replace("None", "NULL").encode()
        return data, _FLOATS if float in kinds else _INTEGERS if kinds else 0, Format.TEXT
    if kinds == {bytes}:
        return _array(values, _BYTES), _BYTESES, Format.BINARY
    if kinds == {str}:
        return _array([value if value is None else value.encode() for value in values], _TEXT), _TEXTS, Format.BINARY
    return None


def _array(values: Sequence[bytes | None], of: int) -> bytes:
    """An array in PostgreSQL's binary form. As text, bytes would be twice as long."""
    parts = [_HEAD(1, None in values, of, len(values), 1)]
    for value in values:
        parts += (_NULL,) if value is None else (_SIZE(len(value)), value)
    return b"".join(parts)


# Numbers are always of the same type, so that a statement is planned once.
_DUMPS: Mapping[type, Callable[[Any], Dumped | None]] = {
    int: lambda value: (b"%d" % value, _INTEGER, Format.TEXT),
    float: lambda value: (repr(value).encode(), _FLOAT, Format.TEXT),
    bool: lambda value: (b"t" if value else b"f", _BOOLEAN, Format.TEXT),
    bytes: lambda value: (value, _BYTES, Format.BINARY),
    str: _text,
    list: _list,
    type(None): lambda value: (None, 0, Format.TEXT),
}


@lru_cache(maxsize=512)
def _as_sent(sql: str) -> bytes:
    """A statement with `$1`, `$2` where it has `%s`, and `%` where it has `%%`."""
    places = count(1)
    return re.sub("%[%s]", lambda match: "%" if match[0] == "%%" else f"${next(places)}", sql).encode()


class ServerAnswer:
    """What the server says to one statement; it is waited for when somebody asks. Behind the last statement it is there, and any
    thread may read it."""

    __slots__ = ("_of", "prepares", "result")

    def __init__(self, of: Statements, prepares: Key | None = None) -> None:
        self._of, self.prepares = of, prepares
        self.result: PGresult | None = None

    def fetchall(self) -> list[Row]:
        """All rows.

        Raises:
            psycopg.Error: this statement failed, or one before it.
        """
        result = self.result if self.result is not None else self._of.wait(self)
        transformer = Transformer(self._of.connection)
        transformer.set_pgresult(result)
        return transformer.load_rows(0, result.ntuples, tuple)

    def fetchone(self) -> Row | None:
        """The first row, or None. Raises what `fetchall` raises."""
        rows = self.fetchall()
        return rows[0] if rows else None


class Sender(Protocol):
    """Takes statements whose answers nobody reads."""

    def send(self, sql: str, *values: object) -> object:
        """Send one, now or later."""
        ...


class Merged:
    """Takes statements that each change other rows, and sends them as one. None of them sees what another one writes."""

    def __init__(self) -> None:
        self._statements: list[str] = []
        self._values: list[object] = []

    def send(self, sql: str, *values: object) -> None:
        """Take one, which does not begin with `WITH`."""
        self._statements.append(sql)
        self._values += values

    def end(self, statements: Statements) -> None:
        """Send them."""
        *parts, last = self._statements
        ctes = ", ".join(f"part{number} AS ({part})" for number, part in enumerate(parts))
        statements.send(f"WITH {ctes} {last}" if parts else last, *self._values)


class Statements:
    """Sends statements on a connection. As a context, it waits at its end for all answers; one connection has one of these, in
    one thread at a time.

    Args:
        prepares: whether a statement that comes again is prepared on the connection.
    """

    def __init__(self, connection: Connection, *, prepares: bool) -> None:
        self.connection, self._prepares = connection, prepares
        self._transformer = Transformer(connection)
        self._waiting: deque[ServerAnswer] = deque()
        # Whether something was sent since the server was told to answer.
        self._unasked = False
        # Whether only the end of a transaction is left to be answered, and nobody waits for that.
        self._is_over = False
        self._is_unsettled = False
        self._error: psycopg.Error | None = None
        self._counts: dict[Key, int] = {}
        # Under which names they are prepared.
        self._names: dict[Key, bytes] = {}
        self._number = 0

    def __enter__(self) -> Self:
        self._waiting.clear()
        self._error = None
        self._is_over = False
        self.connection.pgconn.enter_pipeline_mode()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        pgconn = self.connection.pgconn
        try:
            if not self.connection.closed:
                pgconn.pipeline_sync()
                self._is_unsettled = self._is_over and error is None and self._error is None and not pgconn.flush()
                if not self._is_unsettled:
                    self._settle()
        except psycopg.Error as lost:
            self.connection.close()
            self._error = self._error or lost
        if self._error is not None and error is None:
            raise self._error

    def _settle(self) -> None:
        self._receive()
        self.connection.pgconn.exit_pipeline_mode()

    @property
    def is_unsettled(self) -> bool:
        """Whether the end of the last transaction was sent and its answer not read."""
        return self._is_unsettled

    def settle(self) -> None:
        """Read the answer to the end of a transaction for which nobody waited.

        Raises:
            psycopg.Error: the connection is lost.
        """
        if self._is_unsettled:
            self._is_unsettled = False
            self._settle()
            if self._error is not None:
                raise self._error

    def end_reading(self) -> None:
        """Send the end of a transaction that has only read. Nobody waits for its answer if all others are there: the connection's
        next user reads it."""
        self._is_over = all(answer.result is not None for answer in self._waiting)
        self.send("COMMIT")

    def send(self, sql: str | SQL | Composed, *values: object) -> ServerAnswer:
        """Send one; its answer is read by whoever wants it."""
        text = _as_sent(sql if isinstance(sql, str) else sql.as_string())
        data, types, formats = zip(*map(self._dump, values), strict=True) if values else ((), (), ())
        name = self._name(text, types) if self._prepares else None
        if name is None:
            self.connection.pgconn.send_query_params(text, data, types, formats, Format.BINARY)
        else:
            self.connection.pgconn.send_query_prepared(name, data, formats, Format.BINARY)
        return self._sent()

    def _sent(self, prepares: Key | None = None) -> ServerAnswer:
        answer = ServerAnswer(self, prepares)
        self._waiting.append(answer)
        self._unasked = True
        return answer

    def _dump(self, value: object) -> Dumped:
        dump = _DUMPS.get(type(value))
        dumped = dump(value) if dump is not None else None
        if dumped is None:
            (data,) = self._transformer.dump_sequence([value], [PyFormat.AUTO])
            types, formats = self._transformer.types or (0,), self._transformer.formats or [Format.TEXT]
            dumped = (None if data is None else bytes(data)), types[0], formats[0]
        return dumped

    def _name(self, text: bytes, types: tuple[int, ...]) -> bytes | None:
        """The name under which a statement is prepared; None where it is not."""
        key = text, types
        if (name := self._names.get(key)) is not None or len(self._names) >= PREPARED:
            return name
        if len(self._counts) >= 10 * PREPARED:
            self._counts.clear()
        self._counts[key] = self._counts.get(key, 0) + 1
        if self._counts[key] <= OFTEN:
            return None
        self._number += 1
        self._names[key] = name = b"kilburn_%d" % self._number
        self.connection.pgconn.send_prepare(name, text, types)
        self._sent(key)
        return name

    def rows(self, sql: str | SQL | Composed, *values: object) -> list[Row]:
        """The rows of a query."""
        return self.send(sql, *values).fetchall()

    def row(self, sql: str | SQL | Composed, *values: object) -> Row | None:
        """The first row of a query, or None."""
        return self.send(sql, *values).fetchone()

    def wait(self, answer: ServerAnswer) -> PGresult:
        """Wait for an answer.

        Raises:
            psycopg.Error: its statement failed, or one before it.
        """
        if self._error is None:
            if self._unasked:
                self.connection.pgconn.send_flush_request()
                self._unasked = False
            self._receive(answer)
        if self._error is not None:
            raise self._error
        assert answer.result is not None
        return answer.result

    def _receive(self, awaited: ServerAnswer | None = None) -> None:
        """Send what is held back, and take answers up to one of them, or all up to the end of the pipeline."""
        pgconn = self.connection.pgconn
        while pgconn.flush():
            # A server that waits until its answers are read takes nothing more.
            if self._wait(select.POLLIN | select.POLLOUT) & select.POLLIN:
                pgconn.consume_input()
        while awaited is None or awaited.result is None:
            while pgconn.is_busy():
                self._wait(select.POLLIN)
                pgconn.consume_input()
            result = pgconn.get_result()
            if result is None:
                # Behind each answer.
                self._waiting.popleft()
            elif result.status == ExecStatus.PIPELINE_SYNC:
                return
            else:
                self._take(self._waiting[0], result)

    def _take(self, answer: ServerAnswer, result: PGresult) -> None:
        answer.result = result
        if result.status in _FAILED:
            if answer.prepares is not None:
                self._names.pop(answer.prepares, None)
            if self._error is None:
                self._error = errors.error_from_result(result)

    def _wait(self, events: int) -> int:
        """Wait until the connection can be read or written.

        Raises:
            psycopg.OperationalError: nothing comes for too long; the connection is given up.
        """
        poll, silent = select.poll(), 0.0
        poll.register(self.connection.pgconn.socket, events)
        try:
            while True:
                longer = self.connection.longer(silent)
                if ready := poll.poll(longer * 1000):
                    return ready[0][1]
                silent += longer
        except BaseException:
            # What the server is about to say is not known.
            self.connection.close()
            raise

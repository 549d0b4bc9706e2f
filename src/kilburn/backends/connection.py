"""Access to SQLite: rows of queries, transactions, and SQLite's errors translated to Kilburn's.

Only this module deals with columns that have no static type. The tables are STRICT: a column holds the type that the
schema says, or the file is corrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import chain, islice
from typing import Any, cast

import apsw
import msgspec

from kilburn.errors import StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreReadOnly

Row = tuple[Any, ...]

MAX_INSERT_ROWS = 4
"""Rows that one statement inserts, at most: SQLite prepares a statement for each number of rows."""


class StoreConnection(apsw.Connection):
    """A connection that can also read the cold place.

    Attributes:
        fetch: returns the content of an object of the cold place, by its name and the digest of its text.
    """

    fetch: Callable[[str, bytes], bytes] | None = None


def rows(db: apsw.Connection, sql: str, *values: object) -> list[Row]:
    """Return all rows of a query."""
    return cast("list[Row]", db.execute(sql, cast("apsw.Bindings", values)).fetchall())


def row(db: apsw.Connection, sql: str, *values: object) -> Row | None:
    """Return the first row of a query, or None."""
    return cast("Row | None", db.execute(sql, cast("apsw.Bindings", values)).fetchone())


def rows_of_each(db: apsw.Connection, sql: str, values: Sequence[tuple[object, ...]]) -> Iterable[Row]:
    """Return the rows of a query for each tuple of values in turn, read lazily."""
    return cast("Iterable[Row]", db.executemany(sql, cast("Sequence[apsw.Bindings]", values)))


def insert(db: apsw.Connection, sql: str, values: Iterable[tuple[object, ...]]) -> list[Row]:
    """Insert rows, several at a time, with a statement for one row. Return its results.

    At each statement the interpreter may switch to other threads, and other processes wait for the file until it returns.
    """
    results: list[Row] = []
    remaining = iter(values)
    while chunk := tuple(islice(remaining, MAX_INSERT_ROWS)):
        results += rows(db, _for_rows(sql, len(chunk)), *chain.from_iterable(chunk))
    return results


@cache
def _for_rows(sql: str, count: int) -> str:
    head, _, rest = sql.partition("VALUES(")
    placeholders, _, tail = rest.partition(")")
    return f"{head}VALUES({placeholders}){f', ({placeholders})' * (count - 1)}{tail}"


def listed(values: Iterable[int] | Iterable[str]) -> str:
    """Return many values as one, for `json_each`: one query for all takes a third of the time of one query for each."""
    return msgspec.json.encode(list(values)).decode()


def by_segment(keys: Iterable[tuple[int, int]]) -> list[tuple[str, int]]:
    """Return the pages of each segment as (pages in one value, segment)."""
    pages: dict[int, list[int]] = {}
    for segment, page in keys:
        pages.setdefault(segment, []).append(page)
    return [(listed(ids), segment) for segment, ids in pages.items()]


@contextmanager
def write_transaction(db: apsw.Connection) -> Iterator[None]:
    """Run the block as one write transaction."""
    with transaction_scope(db):
        db.execute("BEGIN IMMEDIATE")
        yield
        db.execute("COMMIT")


@contextmanager
def savepoint(db: apsw.Connection) -> Iterator[None]:
    """Run the block as a part of an open transaction, which is undone as a whole if the block raises."""
    if not db.in_transaction:
        # SQLite has rolled it back, for example after a full disk.
        raise StoreError("the transaction has failed", advice="do all of it again")
    db.execute("SAVEPOINT part")
    try:
        yield
    except BaseException as error:
        if db.in_transaction:
            try:
                db.execute("ROLLBACK TO part")
                db.execute("RELEASE part")
            except apsw.Error as second:
                error.add_note(f"and rolling back: {second}")
        raise
    db.execute("RELEASE part")


@contextmanager
def transaction_scope(db: apsw.Connection) -> Iterator[None]:
    """Roll back what the block has not committed.

    An interrupt may come between any two steps of Python, also at the end of the block. So a transaction that is open at the
    start was left by an interrupt, and is rolled back too.
    """
    if db.in_transaction:
        db.execute("ROLLBACK")
    try:
        yield
    except BaseException as error:
        # SQLite has already rolled back after some errors, such as a full disk.
        if db.in_transaction:
            try:
                db.execute("ROLLBACK")
            except apsw.Error as second:
                error.add_note(f"and rolling back: {second}")
        raise
    if db.in_transaction:
        db.execute("ROLLBACK")


@contextmanager
def translate_errors(path: str, doing: str) -> Iterator[None]:
    """Turn SQLite's errors inside the block into `StoreError`s that say what to do."""
    try:
        yield
    except apsw.Error as error:
        raise _translate(error, f"{doing} {path}: {error}") from error


def _translate(error: apsw.Error, message: str) -> StoreError:
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy(message, advice="another process is writing; try again, or give a longer busy_timeout")
    if isinstance(error, apsw.FullError):
        return StoreFull(message, advice="free some space; nothing of this write was stored")
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.AuthError):
        return StoreReadOnly(message, advice="the file or its folder cannot be written; check permissions, or open it readonly")
    if isinstance(error, apsw.CantOpenError):
        return StoreReadOnly(message, advice="check that the folder exists and that this user may write there")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError | apsw.FormatError):
        return StoreCorrupt(message, advice="run `kilburn fsck`, or restore the file from a copy")
    if isinstance(error, apsw.ConstraintError):
        return StoreCorrupt(message, advice="the file contradicts itself; run `kilburn fsck --repair`")
    if isinstance(error, apsw.ConnectionClosedError):
        return StoreError(message, advice="the store was closed; open it again")
    return StoreError(message, advice="earlier commits are intact; check the disk, then try again")

"""Reading rows. SQLite's columns carry no static types; this is the one place that says so.

The tables are STRICT, so that a column holds what the schema says or the file is corrupt.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import apsw

__all__ = ["Row", "row", "rows", "rows_of_each"]

Row = tuple[Any, ...]


def rows(db: apsw.Connection, sql: str, *values: object) -> list[Row]:
    """All rows of a query."""
    return cast("list[Row]", db.execute(sql, cast("apsw.Bindings", values)).fetchall())


def row(db: apsw.Connection, sql: str, *values: object) -> Row | None:
    """The first row of a query, or None."""
    return cast("Row | None", db.execute(sql, cast("apsw.Bindings", values)).fetchone())


def rows_of_each(db: apsw.Connection, sql: str, values: Sequence[tuple[object, ...]]) -> Iterable[Row]:
    """The rows of a query for each tuple of values, one after the other, as they come."""
    return cast("Iterable[Row]", db.executemany(sql, cast("Sequence[apsw.Bindings]", values)))

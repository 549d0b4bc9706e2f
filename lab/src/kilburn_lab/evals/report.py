"""What the reports of all measurements share: JSON, CSV, rows found by their fields, and tables of plain text."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterable, Mapping, Sequence
from textwrap import fill
from typing import Any, Protocol, TypeVar

import msgspec

__all__ = ["EvalReport", "best_words", "grid", "row_of", "table_of"]

T = TypeVar("T")

WIDTH = 120
"""Columns that a line of a table may take."""


class EvalReport(msgspec.Struct, frozen=True, kw_only=True):
    """A measurement's figures. Subclasses also have `table`, plain text for people."""

    def to_json(self) -> str:
        """All figures as one line of JSON."""
        return msgspec.json.encode(self).decode()

    def records(self) -> Sequence[msgspec.Struct]:
        """What the table shows, a struct a line, as in the JSON."""
        rows: Sequence[msgspec.Struct] = getattr(self, "rows", ())
        return rows

    def to_csv(self) -> str:
        """The records as RFC 4180 has it: the columns are the JSON's fields.

        A field of a field is a column of its own (`costs.hosted`); a list is written as JSON, true and false as JSON has
        them, and what is null or missing as nothing.
        """
        rows = [_flat(msgspec.to_builtins(record, str_keys=True)) for record in self.records()]
        heads = dict.fromkeys(head for row in rows for head in row)
        text = io.StringIO(newline="")
        lines = csv.writer(text)
        lines.writerow(heads)
        lines.writerows([row.get(head) for head in heads] for row in rows)
        return text.getvalue()

    def judged(self) -> Sequence[Any]:
        """The rows that have a `policy`, and how often it `failed`; none where no policy takes part."""
        return getattr(self, "rows", ())

    def failures(self) -> dict[str, int]:
        """Policies that failed while they were measured, each with how often: what their rows show is the kernel's work."""
        found: dict[str, int] = {}
        for row in self.judged():
            if count := getattr(row, "failed", 0):
                found[row.policy] = found.get(row.policy, 0) + count
        return found


def _flat(record: Mapping[str, object], before: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in record.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{before}{name}.")
        else:
            plain = value is None or (isinstance(value, int | float | str) and not isinstance(value, bool))
            flat[before + name] = value if plain else msgspec.json.encode(value).decode()
    return flat


def row_of(rows: Iterable[T], **fields: object) -> T:
    """The first row with these values.

    Raises:
        KeyError: there is none: it was not measured.
    """
    for row in rows:
        if all(getattr(row, name) == value for name, value in fields.items()):
            return row
    raise KeyError(tuple(fields.values()))


class _Compared(Protocol):
    @property
    def window(self) -> int: ...
    @property
    def best(self) -> str: ...


def best_words(worth: str, rows: Iterable[_Compared]) -> str:
    """A sentence on the columns that compare with the best baseline, and which that is at which window."""
    windows: dict[str, dict[str, None]] = {}
    for row in rows:
        windows.setdefault(row.best, {})[str(row.window)] = None
    named = "; ".join(f"{best} at {', '.join(at)}" for best, at in windows.items())
    return fill(f"to best: {worth} less that of the best baseline ({named})", WIDTH)


def table_of(lines: Iterable[Mapping[str, str]]) -> str:
    """A grid of lines that all have the same heads."""
    body = list(lines)
    return grid(list(body[0]), [list(line.values()) for line in body])


def grid(heads: Sequence[str], body: Iterable[Sequence[str]], left: Collection[str] = ("policy",)) -> str:
    """Columns of equal width, those under the heads `left` flush left, numbers flush right."""
    lines = [heads, *body]
    widths = [max(len(line[at]) for line in lines) for at in range(len(heads))]
    return "\n".join(
        "  ".join(
            cell.ljust(width) if head in left else cell.rjust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        ).rstrip()
        for line in lines
    )

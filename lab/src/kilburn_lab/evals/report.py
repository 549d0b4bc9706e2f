"""What the reports of all measurements share: JSON, CSV, rows found by their fields, tables of plain text, and the look of
their pictures."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from string import Formatter
from textwrap import fill
from typing import Any, Protocol, TypeVar

import msgspec

from kilburn_lab.picture import plain_axes

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

    def row(self, *key: object) -> Any:
        """The first row whose first fields have these values, such as a policy and a window.

        Raises:
            KeyError: there is none: it was not measured.
        """
        for row in getattr(self, "rows", ()):
            if msgspec.structs.astuple(row)[: len(key)] == key:
                return row
        raise KeyError(key)

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

    def complaints(self) -> Sequence[str]:
        """What went wrong, a line each, so that the command does not end as a success."""
        return [f"policy {policy} failed {count} times: its figures are not its own" for policy, count in self.failures().items()]


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


def best_named(rows: Iterable[_Compared]) -> str:
    """Which baseline is the best one at which window."""
    windows: dict[str, dict[str, None]] = {}
    for row in rows:
        windows.setdefault(row.best, {})[str(row.window)] = None
    return "; ".join(f"{best} at {', '.join(at)}" for best, at in windows.items())


def best_words(worth: str, rows: Iterable[_Compared]) -> str:
    """A sentence on the columns that compare with the best baseline, and which that is at which window."""
    return fill(f"to best: {worth} less that of the best baseline ({best_named(rows)})", WIDTH)


class _Cell(Formatter):
    """Formats fields of a row. One that is None counts as one that is missing."""

    def __init__(self, derived: Mapping[Any, Callable[[Any], object]]) -> None:
        self._derived = derived

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return _known(self._derived[key](args[0]) if key in self._derived else getattr(args[0], str(key)))

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value, used = super().get_field(field_name, args, kwargs)
        return _known(value), used

    def format_field(self, value: Any, format_spec: str) -> str:
        if format_spec == "ms":
            return f"{value:.2f} ms" if value < 10 else f"{value:.0f} ms"
        if format_spec.endswith(" MiB"):
            return f"{value / 2**20:{format_spec[:-4]}} MiB"
        return f"{value:{format_spec}}"


def _known(value: object) -> object:
    if value is None:
        raise LookupError
    return value


def table_of(
    rows: Iterable[T], text: str, left: Collection[str] = ("policy",), none: str = "", **derived: Callable[[T], object]
) -> str:
    """A grid of rows.

    Args:
        text: the columns as `head={field:form}` between bars. Forms are those of `str.format`, `ms` for milliseconds, and those
            with ` MiB` at their end for bytes.
        left: see `grid`.
        none: what a cell shows if one of its fields is None, or is a mapping without the key.
        derived: fields that are worked out from a row; they go before its own.
    """
    pairs = [column.strip().partition("=")[::2] for column in text.split(" | ")]
    form = _Cell(derived)

    def cell(cell_form: str, row: T) -> str:
        try:
            return form.vformat(cell_form, (row,), {})
        except LookupError:
            return none

    return grid([head for head, _ in pairs], [[cell(each, row) for _, each in pairs] for row in rows], left)


def columns(field: str, keys: Iterable[object], form: str, head: str = "{}") -> str:
    """The columns for `table_of` of a field that is a mapping: one for each key."""
    return " | ".join(f"{head.format(key)}={{{field}[{key}]:{form}}}" for key in keys)


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


def panel(axes: Any, title: str = "", legend: Mapping[str, object] | None = None, **properties: object) -> None:
    """Finish a panel of a picture: its properties, its title, pale axes, and its legend."""
    axes.set(**properties)
    if title:
        axes.set_title(title, loc="left", fontsize=11)
    plain_axes(axes)
    axes.legend(frameon=False, **(legend or {}))

"""A mapping from page ids that is copied in a few steps, however many pages there are.

A branch begins with the tables of its parent. They lie in sheets of a thousand ids, and a copy shares all sheets: the first
change of a sheet, on either side, copies that sheet alone.
"""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, Mapping, MutableMapping
from typing import TypeVar

T = TypeVar("T")

BITS = 10
"""Bits of the ids on one sheet."""


class Sheets(MutableMapping[int, T]):
    """Values by page ids.

    Args:
        values: what it begins with.
    """

    def __init__(self, values: Mapping[int, T] | None = None) -> None:
        self._sheets: dict[int, dict[int, T]] = {}
        for page, value in (values or {}).items():
            self._sheets.setdefault(page >> BITS, {})[page] = value
        # The sheets that no copy has.
        self._own = set(self._sheets)

    def copy(self) -> Sheets[T]:
        """The same, to be changed by itself."""
        copied: Sheets[T] = Sheets()
        copied._sheets = self._sheets.copy()
        self._own = set()
        return copied

    def __getitem__(self, page: int) -> T:
        return self._sheets[page >> BITS][page]

    def __contains__(self, page: object) -> bool:
        return isinstance(page, int) and page in self._sheets.get(page >> BITS, ())

    def __setitem__(self, page: int, value: T) -> None:
        self._sheet(page >> BITS)[page] = value

    def __delitem__(self, page: int) -> None:
        del self._sheet(page >> BITS)[page]

    def __iter__(self) -> Iterator[int]:
        return (page for sheet in self._sheets.values() for page in sheet)

    def items(self) -> ItemsView[int, T]:
        """All ids with their values."""
        return _Items(self)

    def __len__(self) -> int:
        return sum(map(len, self._sheets.values()))

    def _sheet(self, number: int) -> dict[int, T]:
        """A sheet, to be changed."""
        if number not in self._own:
            self._sheets[number] = self._sheets.get(number, {}).copy()
            self._own.add(number)
        return self._sheets[number]


class _Items(ItemsView[int, T]):
    """Read sheet by sheet."""

    _mapping: Sheets[T]

    def __iter__(self) -> Iterator[tuple[int, T]]:
        return (item for sheet in self._mapping._sheets.values() for item in sheet.items())


def sheets_of(values: MutableMapping[int, T]) -> Sheets[T]:
    """A mapping in sheets; itself, if it is."""
    return values if isinstance(values, Sheets) else Sheets(values)

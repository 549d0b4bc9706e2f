"""Which positions of a sequence belong to which page: ranges in order, none overlapping another.

The table knows which positions of a range are still cached.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from types import MappingProxyType

from kilburn.errors import InvalidRange


class Ranges:
    """Half-open ranges of logical positions, each under the id of a page.

    Args:
        ranges: page -> range.

    Raises:
        InvalidRange: see `put`.
    """

    def __init__(self, ranges: Mapping[int, tuple[int, int]] = MappingProxyType({})) -> None:
        self._pages: list[int] = []
        self._starts: list[int] = []
        self._ranges: dict[int, tuple[int, int]] = {}
        for page, (start, stop) in ranges.items():
            self.put(page, start, stop)

    def __contains__(self, page: object) -> bool:
        return page in self._ranges

    def __getitem__(self, page: int) -> tuple[int, int]:
        found = self._ranges.get(page)
        if found is None:
            raise InvalidRange(f"page {page} has no range in this sequence", advice="label it when its tokens are appended")
        return found

    def put(self, page: int, start: int, stop: int) -> None:
        """Give a page its range.

        Raises:
            InvalidRange: it is empty, the page has one, or another page's overlaps it.
        """
        if start >= stop or start < 0:
            raise InvalidRange(f"positions {start} to {stop} are no range for page {page}")
        if page in self._ranges:
            raise InvalidRange(f"page {page} has a range already: {self._ranges[page]}", advice="remove it first")
        others = self.over(start, stop)
        if others:
            raise InvalidRange(f"positions {start} to {stop} of page {page} overlap page {others[0]}")
        at = bisect_left(self._starts, start)
        self._pages.insert(at, page)
        self._starts.insert(at, start)
        self._ranges[page] = (start, stop)

    def remove(self, page: int) -> None:
        """Forget a page's range."""
        at = bisect_left(self._starts, self[page][0])
        del self._pages[at], self._starts[at], self._ranges[page]

    def over(self, start: int, stop: int) -> list[int]:
        """The pages with a position in this range, in order."""
        at = max(0, bisect_right(self._starts, start) - 1)
        if at < len(self._pages) and self._ranges[self._pages[at]][1] <= start:
            at += 1
        return self._pages[at : max(at, bisect_left(self._starts, stop))]

    def cut(self, position: int) -> None:
        """Forget everything from this position on; a page that spans it keeps its first part."""
        at = bisect_left(self._starts, position)
        for page in self._pages[at:]:
            del self._ranges[page]
        del self._pages[at:], self._starts[at:]
        if at:
            last = self._pages[-1]
            start, stop = self._ranges[last]
            self._ranges[last] = (start, min(stop, position))

    def items(self) -> dict[int, tuple[int, int]]:
        """Page -> range, in the order of the sequence."""
        return {page: self._ranges[page] for page in self._pages}

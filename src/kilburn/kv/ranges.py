"""Which positions of a sequence belong to which page: ranges in order, none overlapping another.

The table knows which positions of a range are still cached.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right

from kilburn.errors import InvalidRange

__all__ = ["Ranges"]


class Ranges:
    """Half-open ranges of logical positions, each under the id of a page."""

    def __init__(self) -> None:
        self._pages: list[int] = []
        self._starts: list[int] = []
        self._stops: dict[int, tuple[int, int]] = {}

    def __contains__(self, page: object) -> bool:
        return page in self._stops

    def __getitem__(self, page: int) -> tuple[int, int]:
        found = self._stops.get(page)
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
        if page in self._stops:
            raise InvalidRange(f"page {page} has a range already: {self._stops[page]}", advice="remove it first")
        others = self.over(start, stop)
        if others:
            raise InvalidRange(f"positions {start} to {stop} of page {page} overlap page {others[0]}")
        at = bisect_left(self._starts, start)
        self._pages.insert(at, page)
        self._starts.insert(at, start)
        self._stops[page] = (start, stop)

    def remove(self, page: int) -> None:
        """Forget a page's range."""
        at = bisect_left(self._starts, self[page][0])
        del self._pages[at], self._starts[at], self._stops[page]

    def over(self, start: int, stop: int) -> list[int]:
        """The pages with a position in this range, in order."""
        at = max(0, bisect_right(self._starts, start) - 1)
        if at < len(self._pages) and self._stops[self._pages[at]][1] <= start:
            at += 1
        return self._pages[at : max(at, bisect_left(self._starts, stop))]

    def cut(self, position: int) -> None:
        """Forget everything from this position on; a page that spans it keeps its first part."""
        at = bisect_left(self._starts, position)
        for page in self._pages[at:]:
            del self._stops[page]
        del self._pages[at:], self._starts[at:]
        if at:
            last = self._pages[-1]
            start, stop = self._stops[last]
            self._stops[last] = (start, min(stop, position))

    def copy(self) -> Ranges:
        """The same ranges, to change apart."""
        made = Ranges()
        made._pages, made._starts, made._stops = self._pages[:], self._starts[:], dict(self._stops)
        return made

    def items(self) -> dict[int, tuple[int, int]]:
        """Page -> range, in the order of the sequence."""
        return {page: self._stops[page] for page in self._pages}

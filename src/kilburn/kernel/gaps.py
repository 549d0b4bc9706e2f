"""The stretches of the transcript that are out of the window, as an interval set.

What leaves the window leaves a handle; neighbours share one, so that the handles of ten thousand
evicted pages cost a few tokens and not a window. This is bookkeeping over page ids and token
counts; it never sees a text but the handle's own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator

from kilburn.page import span_of

__all__ = ["Gap", "Gaps", "handle_of"]

Gap = tuple[int, int, int, int]
"""First page id, last page id, pages, tokens."""


def handle_of(gap: Gap) -> str:
    """The line that stands in the prompt for a gap."""
    first, last, pages, tokens = gap
    many = f"{pages} pages, " if pages > 1 else ""
    return f"[{span_of(first, last)} out: {many}{tokens} tokens]"


class Gaps:
    """Disjoint, non-adjacent intervals of original page ids."""

    def __init__(self, cost_of: Callable[[str], int]) -> None:
        self._cost_of = cost_of
        self._starts: list[int] = []
        self._gaps: dict[int, Gap] = {}
        self._costs: dict[int, int] = {}
        self._sum = 0
        # Starts of gaps whose handle was not priced yet: thousands of pages may leave between two looks.
        self._unpriced: set[int] = set()

    @property
    def cost(self) -> int:
        """What the handles of all gaps cost, in tokens."""
        for start in self._unpriced:
            self._costs[start] = self._cost_of(handle_of(self._gaps[start]))
            self._sum += self._costs[start]
        self._unpriced.clear()
        return self._sum

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Gap]:
        return (self._gaps[start] for start in self._starts)

    def __contains__(self, page: int) -> bool:
        at = bisect_right(self._starts, page) - 1
        return at >= 0 and self._gaps[self._starts[at]][1] >= page

    def add(self, page: int, tokens: int) -> None:
        """Take a page into the set, joining it with its neighbours."""
        if page in self:
            raise ValueError(f"page {page} is in a gap already")
        first, last, pages, total = page, page, 1, tokens
        before = bisect_left(self._starts, page) - 1
        if before >= 0 and self._gaps[self._starts[before]][1] == page - 1:
            first, _, count, cost = self._take(self._starts[before])
            pages, total = pages + count, total + cost
        if page + 1 in self._gaps:
            _, last, count, cost = self._take(page + 1)
            pages, total = pages + count, total + cost
        self._put((first, last, pages, total))

    def remove(self, page: int, tokens: int, tokens_of: Callable[[int], int]) -> None:
        """Take a page out of the set, splitting the gap that it lies in."""
        at = bisect_right(self._starts, page) - 1
        if at < 0 or self._gaps[self._starts[at]][1] < page:
            raise ValueError(f"page {page} is in no gap")
        first, last, _, total = self._take(self._starts[at])
        if first == last:
            return
        # Sum the shorter side only: a fault at the far end of a long gap stays cheap.
        left, right = page - first, last - page
        if left <= right:
            before = sum(tokens_of(member) for member in range(first, page))
            after = total - tokens - before
        else:
            after = sum(tokens_of(member) for member in range(page + 1, last + 1))
            before = total - tokens - after
        if left:
            self._put((first, page - 1, left, before))
        if right:
            self._put((page + 1, last, right, after))

    def _put(self, gap: Gap) -> None:
        start = gap[0]
        insort(self._starts, start)
        self._gaps[start] = gap
        self._unpriced.add(start)

    def _take(self, start: int) -> Gap:
        del self._starts[bisect_left(self._starts, start)]
        self._unpriced.discard(start)
        self._sum -= self._costs.pop(start, 0)
        return self._gaps.pop(start)

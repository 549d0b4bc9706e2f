"""The stretches of the transcript that are out of the window, as an interval set.

Everything that is out between two resident pages shares one handle, so that ten thousand evicted pages in one gap cost
a few tokens. A stretch also spans pages that are forgotten, retired or folded elsewhere, because nothing stands
between the two handles there. This is bookkeeping over page ids and token counts. The only text here is the handle's
own.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence, Set
from types import MappingProxyType

from kilburn.kernel.sheets import sheets_of
from kilburn.page import address_of, span_of

Key = tuple[int, int, int]
"""Order in the window: the page's place, then its id."""

Gap = tuple[int, int, int, int]
"""First page id, last page id, pages that are out, their tokens."""


def handle_of(gap: Gap, labels: Mapping[int, str] = MappingProxyType({})) -> str:
    """Return the handle of a gap, as it stands in the prompt.

    Args:
        labels: what some of its pages are, by their ids.
    """
    first, last, pages, tokens = gap
    count = f"{pages} pages, " if pages > 1 else ""
    listing = "".join(f"; {address_of(page)}: {label}" if pages > 1 else f": {label}" for page, label in labels.items())
    return f"[{span_of(first, last)} out: {count}{tokens} tokens{listing}]"


class Gaps:
    """Stretches of original page ids that are out, between walls. A wall is a place where something stands in the
    prompt.

    The gaps depend only on the walls and the pages that are out, not on the order in which they came.

    Args:
        cost_of: what the handle of a gap costs, in tokens.
        walls: the walls, sorted. After a change of this list call `close` or `part`.
    """

    def __init__(self, cost_of: Callable[[Gap], int], walls: Sequence[Key]) -> None:
        self._cost_of = cost_of
        self._walls = walls
        self._out: MutableMapping[int, int] = {}
        self._starts: list[int] = []
        self._gaps: dict[int, Gap] = {}
        self._costs: dict[int, int] = {}
        self._sum = 0
        # Starts of gaps whose handle was not counted yet: thousands of pages may leave before the cost is needed.
        self._unpriced: set[int] = set()

    def copy(self, cost_of: Callable[[Gap], int], walls: Sequence[Key]) -> Gaps:
        """Return the same gaps, between the same walls in another list."""
        copied = Gaps(cost_of, walls)
        self._out = sheets = sheets_of(self._out)
        copied._out, copied._starts, copied._gaps = sheets.copy(), self._starts.copy(), self._gaps.copy()
        copied._costs, copied._sum, copied._unpriced = self._costs.copy(), self._sum, self._unpriced.copy()
        return copied

    def adopt(self, out: dict[int, int], gaps: Sequence[Gap]) -> None:
        """Take pages that are out, with their tokens, and the stretches that they make, in place of none."""
        self._out = out
        self._gaps = {gap[0]: gap for gap in gaps}
        self._starts = sorted(self._gaps)
        self._unpriced = set(self._gaps)

    @property
    def cost(self) -> int:
        """What the handles of all gaps cost, in tokens."""
        for start in self._unpriced:
            self._costs[start] = self._cost_of(self._gaps[start])
            self._sum += self._costs[start]
        self._unpriced.clear()
        return self._sum

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[Gap]:
        return (self._gaps[start] for start in self._starts)

    def __contains__(self, page: int) -> bool:
        return page in self._out

    def out(self) -> Set[int]:
        """The pages that are out."""
        return self._out.keys()

    def add(self, page: int, tokens: int) -> None:
        """Add a page that is out now and has no wall any more."""
        if page in self._out:
            raise ValueError(f"page {page} is in a gap already")
        self._out[page] = tokens
        first, last, pages, total = page, page, 1, tokens
        at = bisect_left(self._starts, page)
        if at < len(self._starts) and self._meet(page, self._starts[at]):
            _, last, count, cost = self._take(self._starts[at])
            pages, total = pages + count, total + cost
        if at and self._meet(self._gaps[self._starts[at - 1]][1], page):
            first, end, count, cost = self._take(self._starts[at - 1])
            last, pages, total = max(last, end), pages + count, total + cost
        self._put((first, last, pages, total))

    def add_all(self, pages: Mapping[int, int]) -> None:
        """Add pages that are out now, with their tokens: the same as to add each, in as many steps as there are gaps."""
        if self._out.keys() & pages.keys():
            raise ValueError("one of these pages is in a gap already")
        self._out.update(pages)
        ordered, begin = sorted(pages), 0
        while begin < len(ordered):
            first = ordered[begin]
            wall = bisect_right(self._walls, (first, 0, first))
            end = self._before(ordered, self._walls[wall], begin) if wall < len(self._walls) else len(ordered)
            chunk = ordered[begin:end]
            last, count, total = chunk[-1], len(chunk), sum(map(pages.__getitem__, chunk))
            # Between two walls there is one gap at most.
            at = bisect_left(self._starts, first)
            near = [start for start in self._starts[max(0, at - 1) : at + 1] if self._meet(start, first)]
            for start in near:
                begun, ended, members, cost = self._take(start)
                first, last, count, total = min(first, begun), max(last, ended), count + members, total + cost
            self._put((first, last, count, total))
            begin = end

    def remove_all(self, pages: Sequence[int]) -> None:
        """Remove pages that are not out any more: the same as to remove each, in as many steps as there are gaps."""
        if len(self._out.keys() & set(pages)) < len(pages):
            raise ValueError("one of these pages is in no gap")
        ordered, begin = sorted(pages), 0
        while begin < len(ordered):
            first, last, count, total = self._take(self._starts[bisect_right(self._starts, ordered[begin]) - 1])
            end = bisect_right(ordered, last, begin)
            total -= sum([self._out.pop(page) for page in ordered[begin:end]])
            count -= end - begin
            if count:
                self._put((self._next(first, 1), self._next(last, -1), count, total))
            begin = end

    def _before(self, ordered: Sequence[int], wall: Key, begin: int) -> int:
        """How many of the pages in order come before a wall; the first `begin` do."""
        end = bisect_left(ordered, wall[0], begin)
        return end + (end < len(ordered) and ordered[end] == wall[0] and not self._after(ordered[end], wall))

    def remove(self, page: int) -> None:
        """Remove a page that is not out any more."""
        if page not in self._out:
            raise ValueError(f"page {page} is in no gap")
        first, last, pages, total = self._take(self._starts[bisect_right(self._starts, page) - 1])
        tokens = self._out.pop(page)
        if pages > 1:
            first = self._next(first, 1)
            last = self._next(last, -1)
            self._put((first, last, pages - 1, total - tokens))

    def close(self, wall: Key) -> None:
        """A wall is gone: join the gaps on both sides."""
        at = bisect_right(self._starts, wall[0])
        # A wall at a page's own place is before the page.
        if at and self._after(self._starts[at - 1], wall):
            at -= 1
        if 0 < at < len(self._starts):
            left_gap, behind = self._gaps[self._starts[at - 1]], self._gaps[self._starts[at]]
            if self._meet(left_gap[1], behind[0]):
                self._take(left_gap[0])
                self._take(behind[0])
                self._put((left_gap[0], behind[1], left_gap[2] + behind[2], left_gap[3] + behind[3]))

    def part(self, wall: Key) -> None:
        """A new wall splits the gap that contains it."""
        at = bisect_right(self._starts, wall[0]) - 1
        if at < 0 or self._after(self._starts[at], wall) or not self._after(self._gaps[self._starts[at]][1], wall):
            return
        first, last, pages, total = self._take(self._starts[at])
        border = wall[0] + (not self._after(wall[0], wall))
        # Sum the shorter side only: a fault at the far end of a long gap stays cheap.
        near = range(first, border) if border - first <= last - border else range(border, last + 1)
        members = [page for page in near if page in self._out]
        count, cost = len(members), sum(map(self._out.__getitem__, members))
        if near.start == border:
            count, cost = pages - count, total - cost
        self._put((first, self._next(border - 1, -1), count, cost))
        self._put((self._next(border, 1), last, pages - count, total - cost))

    @staticmethod
    def _after(page: int, wall: Key) -> bool:
        return (page, 0, page) > wall

    def _meet(self, page: int, neighbour: int) -> bool:
        """Whether there is no wall between two pages that are out."""
        return bisect_right(self._walls, (page, 0, page)) == bisect_right(self._walls, (neighbour, 0, neighbour))

    def _next(self, page: int, step: int) -> int:
        """The first page that is out from here on; there is one."""
        while page not in self._out:
            page += step
        return page

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

"""Orders of eviction that are only compared: the classical ones besides LRU and LRU-2, and a mistake to avoid."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence

from kilburn.errors import SpecError
from kilburn_kv.eviction import EvictionOrder, LruK, LruOrder, PromptUse, QueueOrder, RankedOrder


class HeadFirst(QueueOrder):
    """Least recently used first, and of one prompt its head: once the head is gone, the rest of it cannot be hit."""

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        for unit in units:
            self._order[unit] = None
            self._order.move_to_end(unit)


class FifoOrder(QueueOrder):
    """First in, first out; of one prompt its tail first."""

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        for unit in reversed(units):
            self._order.setdefault(unit)


class LfuOrder(RankedOrder):
    """Least frequently used first, counted while it is resident."""

    def _worth(self, unit: int) -> float:
        return self._rank[unit][0] + 1.0 if unit in self._rank else 1.0


class GreedyDual(RankedOrder):
    """GreedyDual-Size-Frequency (Cherkasova, HP Labs 1998-69): uses over size, plus the rank of the last to leave.

    All units have one size and one price here, which makes it LFU with an age that rises as units leave.
    """

    def __init__(self) -> None:
        super().__init__()
        self._age = 0.0
        self._uses: dict[int, int] = {}

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen = super().evict(count, busy)
        for unit in chosen:
            del self._uses[unit]
        return chosen

    def _worth(self, unit: int) -> float:
        self._uses[unit] = count = self._uses.get(unit, 0) + 1
        return self._age + count

    def _left(self, rank: float) -> None:
        self._age = max(self._age, rank)


class S3Fifo(EvictionOrder):
    """S3-FIFO (Yang et al., SOSP 2023): a small queue for newcomers, a main one with second chances, a queue of ghosts.

    Args:
        capacity: units; a tenth of them is the small queue, and as many ghosts are remembered as main holds.

    Raises:
        SpecError: a capacity below 1.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 1:
            raise SpecError(f"a cache of {capacity} units", advice="give 1 or more")
        self._few = max(1, capacity // 10)
        self._many = max(1, capacity - self._few)
        self._small: OrderedDict[int, int] = OrderedDict()
        self._main: OrderedDict[int, int] = OrderedDict()
        self._ghosts: OrderedDict[int, None] = OrderedDict()

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        small, main, ghosts = self._small, self._main, self._ghosts
        for unit in reversed(units):
            if unit in small:
                small[unit] = min(3, small[unit] + 1)
            elif unit in main:
                main[unit] = min(3, main[unit] + 1)
            elif unit in ghosts:
                del ghosts[unit]
                main[unit] = 0
            else:
                small[unit] = 0

    def forget(self, units: Iterable[int]) -> None:
        """See `EvictionOrder`."""
        for unit in units:
            self._small.pop(unit, None)
            self._main.pop(unit, None)

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen: list[int] = []
        aside: dict[int, tuple[OrderedDict[int, int], int]] = {}
        while len(chosen) < count and (self._small or self._main):
            small = len(self._small) > self._few or not self._main
            queue = self._small if small else self._main
            unit, uses = queue.popitem(last=False)
            if unit in busy:
                aside[unit] = (queue, uses)
            elif small and uses > 1:
                self._main[unit] = 0
            elif not small and uses:
                self._main[unit] = uses - 1
            else:
                chosen.append(unit)
                if small:
                    self._ghosts[unit] = None
        for unit, (queue, uses) in reversed(aside.items()):
            queue[unit] = uses
            queue.move_to_end(unit, last=False)
        while len(self._ghosts) > self._many:
            self._ghosts.popitem(last=False)
        return chosen


ORDERS: dict[str, Callable[[int], EvictionOrder]] = {
    "fifo": lambda _: FifoOrder(),
    "lru": lambda _: LruOrder(),
    "lru head first": lambda _: HeadFirst(),
    "lfu": lambda _: LfuOrder(),
    "gdsf": lambda _: GreedyDual(),
    "lru-2": lambda capacity: LruK(2, history=capacity),
    "s3-fifo": S3Fifo,
}
"""By name: what makes an order for a capacity in units."""

"""Orders of eviction for a full cache of KV units: the classical ones.

A unit is a number that stands for a stretch of a prompt together with everything before it. So a unit is useful only
while the units before it are cached. Each order is told of uses and asked for victims. It has only numbers: no keys,
no values, no clock. `returning` is the order that knows about sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import islice

from kilburn.errors import SpecError


@dataclass(frozen=True, slots=True)
class PromptUse:
    """One prompt that was computed.

    Args:
        time: when it began, in seconds of any clock that only goes forward.
        request: its number, for `ended`.
        session: the session's number; most prompts of a session continue the previous one.
        sub: whether the session is a sub-agent's.
    """

    time: float
    request: int = 0
    session: int = 0
    sub: bool = False


class EvictionOrder(ABC):
    """An order of eviction."""

    @abstractmethod
    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """These units, head first, were used together; those that were not resident are from now on."""

    def ended(self, use: PromptUse, time: float, why: str) -> None:
        """The reply to a use is complete; `why` is the engine's stop reason, "" if it is not known."""
        return

    @abstractmethod
    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """Forget `count` resident units (fewer where all others are `busy`), worst first, and return them."""


class _Queue(EvictionOrder):
    """The front of a queue first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen = list(islice((unit for unit in self._order if unit not in busy), count))
        for unit in chosen:
            del self._order[unit]
        return chosen


class LruOrder(_Queue):
    """Least recently used first; of one prompt its tail first, or its head first with `head=True`.

    Head first is the mistake to avoid: once the head is gone the rest of the prompt cannot be hit.
    """

    def __init__(self, head: bool = False) -> None:
        super().__init__()
        self._head = head

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        for unit in units if self._head else reversed(units):
            self._order[unit] = None
            self._order.move_to_end(unit)


class FifoOrder(_Queue):
    """First in, first out; of one prompt its tail first."""

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        for unit in reversed(units):
            self._order.setdefault(unit)


class RankedOrder(EvictionOrder):
    """Lowest rank first; of equal ranks the least recently used, of one prompt its tail. A subclass says what a unit is worth,
    or puts units with ranks of its own."""

    def __init__(self) -> None:
        self._rank: dict[int, tuple[float, int, int]] = {}
        self._heap: list[tuple[float, int, int]] = []
        self._turn = 0

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        for unit in reversed(units):
            self.put(unit, self._worth(unit), self._turn)
            self._turn += 1
        if len(self._heap) > 4 * len(self._rank) + 64:
            self._heap = list(self._rank.values())
            heapify(self._heap)

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen: list[int] = []
        kept: list[tuple[float, int, int]] = []
        while len(chosen) < count and self._heap:
            entry = heappop(self._heap)
            unit = entry[2]
            if self._rank.get(unit) != entry:
                continue
            if unit in busy:
                kept.append(entry)
                continue
            del self._rank[unit]
            self._left(entry[0])
            chosen.append(unit)
        for entry in kept:
            heappush(self._heap, entry)
        return chosen

    def put(self, unit: int, rank: float, turn: int) -> None:
        """Give a unit its rank; of equal ranks the lower turn leaves first."""
        self._rank[unit] = entry = (rank, turn, unit)
        heappush(self._heap, entry)

    def _worth(self, unit: int) -> float:
        """The rank of a unit that is used now."""
        raise NotImplementedError

    def _left(self, rank: float) -> None:
        """A unit of this rank was evicted."""


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


class LruK(RankedOrder):
    """LRU-K (O'Neil, O'Neil and Weikum, SIGMOD 1993): the unit whose k-th last use is the longest ago leaves first.

    A unit with fewer than `k` known uses leaves before all others; of several, the least recently used. So what is read
    only once, such as a scan, displaces nothing that was used more often. What is `busy` stays: that is pinning.

    Args:
        k: uses that are looked at; 1 is LRU.
        history: units whose uses are still known after they were evicted; None for all.

    Raises:
        SpecError: a `k` below 1, or a history below 0.
    """

    def __init__(self, k: int = 2, history: int | None = None) -> None:
        super().__init__()
        if k < 1 or (history is not None and history < 0):
            raise SpecError(f"LRU-{k} with a history of {history}", advice="give a k of 1 or more, and a history of 0 or more")
        self.k, self.history = k, history
        self._uses: dict[int, deque[int]] = {}
        self._left_units: OrderedDict[int, None] = OrderedDict()

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen = super().evict(count, busy)
        self._left_units.update(dict.fromkeys(chosen))
        while self.history is not None and len(self._left_units) > self.history:
            del self._uses[self._left_units.popitem(last=False)[0]]
        return chosen

    def _worth(self, unit: int) -> float:
        uses = self._uses.setdefault(unit, deque(maxlen=self.k))
        uses.append(self._turn)
        self._left_units.pop(unit, None)
        return uses[0] if len(uses) == self.k else -1


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
    "lru head first": lambda _: LruOrder(head=True),
    "lfu": lambda _: LfuOrder(),
    "gdsf": lambda _: GreedyDual(),
    "lru-2": lambda capacity: LruK(2, history=capacity),
    "s3-fifo": S3Fifo,
}
"""By name: what makes an order for a capacity in units."""

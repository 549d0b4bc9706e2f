"""Orders of eviction for a full cache of KV units.

A unit is a number that stands for a stretch of a prompt together with everything before it. So a unit is useful only
while the units before it are cached. Each order is told of uses and asked for victims. It has only numbers: no keys,
no values, no clock. The laboratory has more orders to compare, among them one that knows about sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict, deque
from collections.abc import Container, Iterable, Sequence
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
    def forget(self, units: Iterable[int]) -> None:
        """These units are not to be evicted, until they are used again."""

    @abstractmethod
    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """Forget `count` resident units (fewer where all others are `busy`), worst first, and return them."""


class QueueOrder(EvictionOrder):
    """The front of a queue first."""

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()

    def forget(self, units: Iterable[int]) -> None:
        """See `EvictionOrder`."""
        for unit in units:
            self._order.pop(unit, None)

    def evict(self, count: int, busy: Container[int]) -> list[int]:
        """See `EvictionOrder`."""
        chosen = list(islice((unit for unit in self._order if unit not in busy), count))
        for unit in chosen:
            del self._order[unit]
        return chosen


class LruOrder(QueueOrder):
    """Least recently used first; of one prompt its tail first."""

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `EvictionOrder`."""
        for unit in reversed(units):
            self._order[unit] = None
            self._order.move_to_end(unit)


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

    def forget(self, units: Iterable[int]) -> None:
        """See `EvictionOrder`."""
        for unit in units:
            self._rank.pop(unit, None)

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
        self._remember(chosen)
        return chosen

    def forget(self, units: Iterable[int]) -> None:
        """See `EvictionOrder`."""
        known = [unit for unit in units if unit in self._rank]
        super().forget(known)
        self._remember(known)

    def _remember(self, units: Iterable[int]) -> None:
        self._left_units.update(dict.fromkeys(units))
        while self.history is not None and len(self._left_units) > self.history:
            del self._uses[self._left_units.popitem(last=False)[0]]

    def _worth(self, unit: int) -> float:
        uses = self._uses.setdefault(unit, deque(maxlen=self.k))
        uses.append(self._turn)
        self._left_units.pop(unit, None)
        return uses[0] if len(uses) == self.k else -1

"""LRU-K evicts what its definition says, whatever was used, pinned and evicted before."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import SpecError
from kilburn_kv.eviction import EvictionOrder, LruK, LruOrder, PromptUse

USE = PromptUse(0.0)


def test_after_1_2_2_1_1_2_it_evicts_2() -> None:
    order = LruK(2)
    for unit in (1, 2, 2, 1, 1, 2):
        order.used([unit], USE)
    assert order.evict(1, ()) == [2]


def test_what_was_used_once_leaves_before_what_was_used_twice() -> None:
    order = LruK(2)
    for unit in (1, 1, 2, 3):
        order.used([unit], USE)
    assert order.evict(3, ()) == [2, 3, 1]


def test_a_pinned_unit_stays_and_can_leave_later() -> None:
    order = LruK(2)
    for unit in (1, 2, 3):
        order.used([unit], USE)
    assert order.evict(3, {1}) == [2, 3]
    assert order.evict(1, {1}) == []
    assert order.evict(1, ()) == [1]


def test_a_history_of_none_forgets_an_evicted_unit_at_once() -> None:
    kept, forgetful = LruK(2), LruK(2, history=0)
    for order in (kept, forgetful):
        for unit in (1, 2, 2):
            order.used([unit], USE)
        assert order.evict(1, ()) == [1]
        order.used([1], USE)
    # With its history, unit 1 was used twice, the first time before unit 2.
    assert kept.evict(1, ()) == [1]
    for unit in (2,):
        forgetful.used([unit], USE)
    assert forgetful.evict(1, ()) == [1]
    assert forgetful.evict(1, ()) == [2]


@pytest.mark.parametrize(("k", "history"), [(0, None), (2, -1)])
def test_numbers_that_cannot_be_are_refused(k: int, history: int | None) -> None:
    with pytest.raises(SpecError, match="LRU"):
        LruK(k, history)


class Oracle:
    """LRU-K by its definition: every use is kept, and every unit is compared at each eviction."""

    def __init__(self, k: int, history: int | None) -> None:
        self.k, self.history = k, history
        self.uses: dict[int, list[int]] = {}
        self.resident: set[int] = set()
        self.left: list[int] = []
        self.turn = 0

    def used(self, unit: int) -> None:
        self.uses.setdefault(unit, []).append(self.turn)
        self.turn += 1
        self.resident.add(unit)
        self.left = [other for other in self.left if other != unit]

    def evict(self, count: int, busy: set[int]) -> list[int]:
        chosen: list[int] = []
        for _ in range(count):
            free = self.resident - busy
            if not free:
                break
            victim = min(free, key=lambda unit: (len(self.uses[unit]) >= self.k, self.uses[unit][-self.k :][0]))
            if len(self.uses[victim]) < self.k:
                fewer = [unit for unit in free if len(self.uses[unit]) < self.k]
                victim = min(fewer, key=lambda unit: self.uses[unit][-1])
            self.resident.remove(victim)
            chosen.append(victim)
        self.left += chosen
        if self.history is not None:
            while len(self.left) > self.history:
                del self.uses[self.left.pop(0)]
        return chosen


UNITS = st.integers(0, 6)
STEPS = st.lists(UNITS | st.tuples(st.integers(0, 3), st.sets(UNITS, max_size=3)), max_size=80)


@given(STEPS, st.integers(1, 4), st.none() | st.integers(0, 4))
def test_it_is_the_definition(steps: list[int | tuple[int, set[int]]], k: int, history: int | None) -> None:
    order, oracle = LruK(k, history), Oracle(k, history)
    for step in steps:
        if isinstance(step, int):
            order.used([step], USE)
            oracle.used(step)
        else:
            assert order.evict(*step) == oracle.evict(*step)
    assert order.evict(10, ()) == oracle.evict(10, set())


def misses(order: EvictionOrder, trace: list[int], capacity: int) -> int:
    resident: set[int] = set()
    missed = 0
    for unit in trace:
        if unit not in resident:
            missed += 1
            if len(resident) == capacity:
                resident.difference_update(order.evict(1, ()))
            resident.add(unit)
        order.used([unit], USE)
    return missed


def test_a_scan_displaces_what_lru_loses() -> None:
    chance = random.Random(14)
    trace: list[int] = []
    for scan in range(40):
        trace += [chance.randrange(20) for _ in range(40)]
        trace += range(1000 + 40 * scan, 1040 + 40 * scan)  # each of these once, and never again
    once = 40 * 40 + 20  # no order can serve these
    lru, lru_2 = (misses(order, trace, capacity=24) - once for order in (LruOrder(), LruK(2)))
    assert lru_2 < lru / 4

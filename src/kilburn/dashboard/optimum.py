"""Regret: what a window that knows the future would have had of the pages that were asked for, and this one had not.

The reference string is the ledger's: the pages that were recalled by their addresses, in order. The optimum is Belady's MIN: what
is needed furthest in the future leaves first. Pages have different sizes, so it is a close bound, not a proven one.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kilburn.event import Act, Event

NEVER = 1 << 60


class Regret(msgspec.Struct, frozen=True, kw_only=True):
    """Of the pages that were recalled: how many, what the window had, and what the optimum would have had.

    `cold` are recalls of pages whose place is not known there; they are in no other figure. `missed` are the first pages that
    only the optimum had.
    """

    recalled: int
    hits: int
    optimum: int
    cold: int
    window: int
    after: int
    until: int
    missed: tuple[int, ...] = ()

    @property
    def regret(self) -> float | None:
        """The optimum's share of hits less that of the window; None where nothing was recalled."""
        return (self.optimum - self.hits) / self.recalled if self.recalled else None


SHOWN = 12
"""Pages that are named."""


def regret_of(events: Iterable[Event], costs: Mapping[int, int], pins: Iterable[int], after: int, until: int) -> Regret:
    """The regret of a stretch of a ledger.

    Args:
        costs: tokens of the pages.
        pins: what was pinned before the stretch.
        after, until: the event before it, and its last one.
    """
    ledger = [event for event in events if event.act in (Act.ADMIT, Act.FAULT, Act.SHIP, Act.PIN, Act.UNPIN, Act.DROP)]
    capacity = next((window for event in ledger if event.act is Act.SHIP and (window := _window(event))), 0)
    uses: dict[int, list[int]] = {}
    for at, event in enumerate(ledger):
        if event.act is Act.FAULT:
            for page in event.pages:
                uses.setdefault(page, []).append(at)
    for known in uses.values():
        known.reverse()
    cache = _Cache(costs, capacity)
    for page in pins:
        cache.pin(page)
    recalled = hits = best = cold = 0
    seen, missed = set[int](), list[int]()
    for event in ledger:
        if event.act is Act.SHIP:
            cache.capacity = _window(event) or cache.capacity
        elif event.act is Act.ADMIT:
            seen.update(event.pages)
            cache.add(event.pages, uses, newest=True)
        elif event.act is Act.FAULT:
            missing: Any = event.data.get("missed", ())
            out = {page for page in missing if isinstance(page, int)} if isinstance(missing, list | tuple) else set()
            for page in dict.fromkeys(event.pages):
                uses[page].pop()
                if page < 0:
                    continue
                if page in seen:
                    recalled += 1
                    hits += page not in out
                    best += page in cache
                    if page in cache and page in out and len(missed) < SHOWN and page not in missed:
                        missed.append(page)
                else:
                    cold += 1
                seen.add(page)
            cache.add([page for page in event.pages if page > 0], uses)
        elif event.act is Act.PIN:
            for page in event.pages:
                cache.pin(page)
        elif event.act is Act.UNPIN:
            cache.unpin(event.pages, uses)
        else:
            cache.drop(event.pages)
    return Regret(
        recalled=recalled, hits=hits, optimum=best, cold=cold, window=cache.capacity, after=after, until=until,
        missed=tuple(missed),
    )  # fmt: skip


def _window(event: Event) -> int:
    window = event.data.get("window", 0)
    return window if isinstance(window, int) and window > 0 else 0


class _Cache:
    """What MIN keeps: the pages by their next use, which is up to date for all that are in it."""

    def __init__(self, costs: Mapping[int, int], capacity: int) -> None:
        self.capacity, self._costs = capacity, costs
        self._next: dict[int, int] = {}
        self._held = set[int]()
        self._use = 0
        self._heap: list[tuple[int, int, int]] = []
        self._came = 0

    def __contains__(self, page: int) -> bool:
        return page in self._next or page in self._held

    def add(self, pages: Iterable[int], uses: Mapping[int, list[int]], *, newest: bool = False) -> None:
        """Bring pages in, or renew their next use; then those that are needed last leave. The newest message stays."""
        fresh = set(pages)
        for page in fresh - self._held:
            due = uses[page][-1] if uses.get(page) else NEVER
            if page not in self._next:
                self._use += self._costs.get(page, 0)
            self._next[page] = due
            self._came += 1
            # Of pages that nobody needs again the oldest leaves first.
            heapq.heappush(self._heap, (-due, self._came, page))
        spared = []
        while self._use > self.capacity and self._heap:
            entry = heapq.heappop(self._heap)
            due, _, page = entry
            if self._next.get(page) != -due:
                continue
            if newest and page in fresh:
                spared.append(entry)
                continue
            self._remove(page)
        for entry in spared:
            heapq.heappush(self._heap, entry)

    def pin(self, page: int) -> None:
        """It stays until it is unpinned."""
        if page not in self._held:
            if page not in self._next:
                self._use += self._costs.get(page, 0)
            self._next.pop(page, None)
            self._held.add(page)

    def unpin(self, pages: Iterable[int], uses: Mapping[int, list[int]]) -> None:
        """They may leave."""
        loose = [page for page in pages if page in self._held]
        for page in loose:
            self._held.discard(page)
            self._use -= self._costs.get(page, 0)
        self.add(loose, uses)

    def drop(self, pages: Iterable[int]) -> None:
        """They are forgotten."""
        for page in pages:
            if page in self._next:
                self._remove(page)
            elif page in self._held:
                self._held.discard(page)
                self._use -= self._costs.get(page, 0)

    def _remove(self, page: int) -> None:
        del self._next[page]
        self._use -= self._costs.get(page, 0)

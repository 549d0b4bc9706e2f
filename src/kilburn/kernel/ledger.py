"""The ledger: what is read from a process's events, and how they rebuild its state.

`apply` is the replay of law 8: state events, in order, over the stored pages, give the same tier.
`Ledger` folds events into figures. Both only read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kilburn.effect import Outcome
from kilburn.errors import StoreCorrupt
from kilburn.event import STATE, Act, Event
from kilburn.kernel.tier import OUT, Tier
from kilburn.model import is_count
from kilburn.page import Page, Place

__all__ = ["Ledger", "Stats", "apply", "replay"]

REFAULT = 10
"""Turns within which a fault on an evicted page counts as a refault."""

ALARM = 0.60
"""A hit rate under this raises a warning, once there are `ENOUGH` accesses."""

ENOUGH = 20


class Stats(msgspec.Struct, kw_only=True):
    """Figures of one process, from its ledger; tokens by its own counter.

    An *access* is a prompt shipped (the window served it) or a page asked for by address; it is a hit
    where the window had what was asked. `hit_rate` is None before the first access. A *refault* is a
    fault on a page that was evicted at most 10 turns ago. `utilisation` is the mean share of the
    capacity that prompts used. `lost` counts observations that could not be written (a full disk, a lock) and are
    in no other figure. `tokens_reprefilled` counts what
    stood behind the first difference to the previous prompt and was not there for the first time: an
    engine with a prefix cache processes that again because of an edit. `overflow` counts prompts over the
    window and must be 0.
    """

    turns: int = 0
    pages: int = 0
    tokens_seen: int = 0
    tokens_in_window: int = 0
    window: int = 0
    peak: int = 0
    prompts: int = 0
    tokens_shipped: int = 0
    tokens_reprefilled: int = 0
    loads: int = 0
    evictions: int = 0
    folds: int = 0
    retired: int = 0
    dropped: int = 0
    faults: int = 0
    refaults: int = 0
    hits: int = 0
    hit_rate: float | None = None
    searches: int = 0
    asks: int = 0
    asks_failed: int = 0
    refused_moves: int = 0
    fallbacks: int = 0
    overflow: int = 0
    lost: int = 0
    utilisation: float = 0.0
    tokens_reported: int = 0
    warnings: list[str] = []

    def keys(self) -> list[str]:
        """Names of the figures: `dict(stats)` works."""
        return list(self.__struct_fields__)

    def __getitem__(self, name: str) -> Any:
        """A figure by name."""
        if name not in self.__struct_fields__:
            raise KeyError(name)
        return getattr(self, name)


class Ledger:
    """Figures, kept up to date event by event."""

    changing = STATE

    def __init__(self) -> None:
        self.stats = Stats()
        self._evicted: dict[int, int] = {}
        self._filled = 0.0

    def note(self, event: Event, tier: Tier) -> None:
        """Count one event; `tier` gives the pages' costs."""
        stats = self.stats
        stats.turns = max(stats.turns, event.turn)
        match event.act:
            case Act.ADMIT:
                stats.pages += len(event.pages)
                stats.tokens_seen += sum(tier.cost(page) for page in event.pages if page in tier.pages)
            case Act.LOAD:
                stats.loads += len(event.pages)
            case Act.EVICT:
                stats.evictions += len(event.pages)
                stats.fallbacks += event.policy == "kernel"
                self._evicted.update(dict.fromkeys(event.pages, event.turn))
            case Act.FOLD:
                stats.folds += 1
                # What an earlier fold stood for had left before.
                self._evicted.update(dict.fromkeys(event.data.get("to", {}).get(Place.FOLDED, ()), event.turn))
            case Act.RETIRE:
                stats.retired += len(event.pages)
            case Act.DROP:
                stats.dropped += len(event.pages)
            case Act.FAULT:
                self._fault(event)
            case Act.SEARCH:
                stats.searches += 1
            case Act.SHIP:
                self._ship(event)
            case Act.ASK:
                stats.asks += 1
                stats.asks_failed += event.data.get("outcome") != Outcome.DONE
            case Act.REFUSE:
                stats.refused_moves += 1
            case Act.USAGE:
                stats.tokens_reported += event.data["prompt"] if is_count(event.data.get("prompt")) else 0
            case Act.NOTE:
                stats.lost += int(event.data.get("lost", 0))
            case _:
                pass

    def _fault(self, event: Event) -> None:
        missed = set(event.data.get("missed", ()))
        self.stats.hits += len(event.pages) - len(missed)
        self.stats.faults += len(missed)
        for page in missed:
            self.stats.refaults += event.turn - self._evicted.get(page, -(10**9)) <= REFAULT

    def _ship(self, event: Event) -> None:
        stats = self.stats
        tokens, window = event.tokens, int(event.data["window"])
        stats.prompts += 1
        stats.hits += 1
        stats.tokens_shipped += tokens
        stats.tokens_reprefilled += int(event.data["again"])
        stats.peak = max(stats.peak, tokens)
        stats.overflow += tokens > window
        # A provider's absurd report once made it 0: a reader must not fail for that.
        self._filled += tokens / max(1, window)

    def report(self, *, use: int, window: int) -> Stats:
        """The figures as of now."""
        stats = msgspec.structs.replace(self.stats, tokens_in_window=use, window=window, warnings=[])
        accesses = stats.hits + stats.faults
        stats.hit_rate = stats.hits / accesses if accesses else None
        stats.utilisation = self._filled / stats.prompts if stats.prompts else 0.0
        if stats.hit_rate is not None and stats.hit_rate < ALARM and accesses >= ENOUGH:
            stats.warnings.append(
                f"hit rate {stats.hit_rate:.0%} is under {ALARM:.0%}: the window is too small for this task, "
                "or the policy evicts what is needed (try another policy, a larger window, or pins)"
            )
        if stats.overflow:
            stats.warnings.append(f"{stats.overflow} prompts exceeded the window: please report this")
        return stats


def apply(event: Event, pages: Mapping[int, Page], tier: Tier) -> None:
    """Do again what a state event did; observations change nothing."""
    if event.act not in STATE:
        return
    if event.act is Act.ADMIT:
        for number in event.pages:
            tier.add(_page(pages, number, event), msgspec.structs.replace(OUT, at=Place.IN))
    elif event.act in (Act.PIN, Act.UNPIN, Act.REMEMBER):
        for number in event.pages:
            state = tier.states[number]
            if event.act is Act.REMEMBER:
                tier.set(number, msgspec.structs.replace(state, mark=event.data["mark"]))
            else:
                tier.set(number, msgspec.structs.replace(state, pinned=event.act is Act.PIN))
    else:
        _apply_move(event, pages, tier)


def _apply_move(event: Event, pages: Mapping[int, Page], tier: Tier) -> None:
    made = event.data.get("fold")
    if made is not None:
        tier.add(_page(pages, made, event), OUT)
    for where, members in event.data.get("to", {}).items():
        for number in members:
            state = msgspec.structs.replace(tier.states[number], at=Place(where))
            tier.set(number, msgspec.structs.replace(state, pinned=False, mark=0.0) if where == Place.DROPPED else state)
    if "uncover" in event.data:
        tier.set_cover(event.data["uncover"], None)
    if made is not None:
        # Written only where it is not what the fold cites.
        tier.set_cover(event.data.get("cover", event.pages), made)
        tier.set(made, msgspec.structs.replace(tier.states[made], at=Place.IN))


def _page(pages: Mapping[int, Page], number: int, event: Event) -> Page:
    try:
        return pages[number]
    except KeyError:
        raise StoreCorrupt(f"event {event.number} names page {number}, which is missing", advice="run kilburn fsck") from None


def replay(events: Iterable[Event], pages: Mapping[int, Page], tier: Tier) -> Tier:
    """Rebuild a window from its ledger: the same events over the same pages give the same tier."""
    for event in events:
        apply(event, pages, tier)
    tier.begin()
    return tier

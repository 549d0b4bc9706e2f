"""What follows from a session's events: its figures, how its pages are used, and what its prompts really cost."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.backend import Backend
from kilburn.budget import Counter
from kilburn.effect import Outcome
from kilburn.event import Act, Event, clock_of
from kilburn.model import is_count
from kilburn.page import Page, Place
from kilburn.policy import Use
from kilburn.tokens.calibrated import Calibrated

REFAULT = 10
"""Turns within which a fault on an evicted page counts as a refault."""

ALARM = 0.60
"""A hit rate under this raises a warning, once there are `ENOUGH` accesses."""

ENOUGH = 20

MOVING_ACTS = frozenset({Act.LOAD, Act.EVICT, Act.FOLD, Act.RETIRE, Act.DROP})

WINDOW_PLACES = frozenset({Place.IN, Place.STUB, Place.FOLDED})
"""Places of pages whose use is kept though they were never recalled."""


class Stats(msgspec.Struct, kw_only=True):
    """Figures of one session, from its ledger; tokens by its own counter. `docs/explanation/figures.md` defines them, and every
    program that shows one of them takes it from here.

    `pages` and `tokens_seen` count what was appended to this session, also what was forgotten or retired since. Pages that a
    branch inherits are its parent's. Pages that were made from others count in `derived` alone.

    `window` is the window that the last prompt was made for, 0 before the first; `beside` of it was kept for the reply and the
    tools. `room` is what its pages might take by the session's counter. `tokens_in_window` is what the window holds now, in
    tokens of `window`: corrected by what the provider reported. `utilisation` is the mean share of the room that prompts used.

    An *access* is a rendered prompt (the window served it) or a page recalled by its address; it is a hit if the
    window had it. `hit_rate` is None before the first access. A *refault* is a fault on a page that was evicted at
    most 10 turns ago. `lost` counts observations that could not be written (a full disk, a lock) and are in no other figure.

    `tokens_reprefilled` counts the tokens after the first difference from the previous prompt, as far as they were in an earlier
    prompt: an engine with a prefix cache processes them again because of an edit. `tokens_new` counts those that were in none;
    the rest of `tokens_shipped` is in a cache of the prefix. `tokens_unshipped` were appended since the last prompt.

    `tokens_reported` are the provider's counts of all prompts, `tokens_cached` what it says that it read from its cache.

    `refused_moves` counts plans that broke a law, `policy_failures` those in which the policy itself raised or returned nonsense.
    `overflow` counts prompts over the window and must be 0.
    """

    turns: int = 0
    pages: int = 0
    derived: int = 0
    tokens_seen: int = 0
    tokens_in_window: int = 0
    window: int = 0
    beside: int = 0
    room: int = 0
    peak: int = 0
    prompts: int = 0
    tokens_shipped: int = 0
    tokens_reprefilled: int = 0
    tokens_new: int = 0
    tokens_unshipped: int = 0
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
    policy_failures: int = 0
    fallbacks: int = 0
    overflow: int = 0
    lost: int = 0
    utilisation: float = 0.0
    tokens_reported: int = 0
    tokens_cached: int = 0
    warnings: list[str] = []

    @property
    def fill(self) -> float | None:
        """The share of the room for pages that they take; None before the first prompt."""
        return self.tokens_in_window / (self.window - self.beside) if self.window else None

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

    def __init__(self) -> None:
        self.stats = Stats()
        self._evicted: dict[int, int] = {}
        self._filled = 0.0

    def copy(self) -> Ledger:
        """The same figures, to be continued by themselves."""
        copied = Ledger()
        copied.stats, copied._evicted, copied._filled = copy.copy(self.stats), self._evicted.copy(), self._filled
        return copied

    def state(self, turn: int) -> dict[str, Any]:
        """What `adopt` takes, as plain numbers; `turn` is the current one."""
        recent = {page: departure for page, departure in self._evicted.items() if turn - departure <= REFAULT}
        return {"stats": self.stats, "filled": self._filled, "evicted": recent}

    def adopt(self, stats: Stats, filled: float, evicted: dict[int, int]) -> None:
        """Go on from another one's figures."""
        self.stats, self._filled, self._evicted = stats, filled, evicted

    def count(self, event: Event) -> None:
        """Count one event."""
        stats = self.stats
        stats.turns = max(stats.turns, event.turn)
        match event.act:
            case Act.ADMIT:
                stats.pages += len(event.pages)
                stats.tokens_seen += (tokens := event.data.get("tokens", 0))
                stats.tokens_unshipped += tokens
            case Act.LOAD:
                stats.loads += len(event.pages)
            case Act.EVICT:
                stats.evictions += len(event.pages)
                stats.fallbacks += event.policy == "kernel"
                self._evicted.update(dict.fromkeys(event.pages, event.turn))
            case Act.FOLD:
                stats.folds += 1
                stats.derived += "fold" in event.data
                # Pages that an earlier fold stood for had left before.
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
            case Act.COMPACT:
                stats.policy_failures += bool(event.data.get("raised"))
            case Act.USAGE:
                stats.tokens_reported += prompt if is_count(prompt := event.data.get("prompt")) else 0
                stats.tokens_cached += cached if is_count(cached := event.data.get("cached")) else 0
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
        stats, data = self.stats, event.data
        tokens, window, repeated = event.tokens, int(data["window"]), int(data["again"])
        stats.room, stats.window, stats.beside = window, int(data.get("whole", window)), int(data.get("beside", 0))
        stats.tokens_new += int(data.get("fresh", min(stats.tokens_unshipped, tokens - repeated)))
        stats.tokens_unshipped = 0
        stats.prompts += 1
        stats.hits += 1
        stats.tokens_shipped += tokens
        stats.tokens_reprefilled += repeated
        stats.peak = max(stats.peak, tokens)
        stats.overflow += tokens > window
        # An impossible report of a provider once made it 0; a reader must not fail because of that.
        self._filled += tokens / max(1, window)

    def report(self, *, use: int) -> Stats:
        """The figures as of now.

        Args:
            use: tokens in the window, by the session's counter.
        """
        stats = msgspec.structs.replace(self.stats, tokens_in_window=use, warnings=[])
        if stats.room and stats.room != (capacity := stats.window - stats.beside):
            # The kernel lets nothing exceed the capacity: what is more than the last room came after a smaller correction.
            stats.tokens_in_window = min(capacity, round(use * capacity / stats.room))
        accesses = stats.hits + stats.faults
        stats.hit_rate = stats.hits / accesses if accesses else None
        stats.utilisation = self._filled / stats.prompts if stats.prompts else 0.0
        if stats.hit_rate is not None and stats.hit_rate < ALARM and accesses >= ENOUGH:
            stats.warnings.append(
                f"hit rate {stats.hit_rate:.0%} is under {ALARM:.0%}: the window is too small for this task, "
                "or the policy evicts what is needed (try another policy, a larger window, or pins)"
            )
        if stats.policy_failures:
            stats.warnings.append(
                f"the policy failed {stats.policy_failures} times, and the kernel kept the window without it: "
                "the log has the traceback, `receipts` where it was"
            )
        if stats.overflow:
            stats.warnings.append(f"{stats.overflow} prompts exceeded the window: please report this")
        return stats


class Usage:
    """How pages are used, and how this session's counter compares with what providers report."""

    def __init__(self, counter: Counter) -> None:
        self.pages: dict[int, Use] = {}
        self.calibrated = Calibrated(counter)
        # The name of the counter of the pages' costs; "" before the first.
        self.tokenizer = ""

    def copy(self) -> Usage:
        """The same, to be continued by itself."""
        copied = copy.copy(self)
        copied.pages, copied.calibrated = self.pages.copy(), self.calibrated.copy()
        return copied

    def learn(self, event: Event, on_rollback: Callable[[Callable[[], None]], object] | None = None) -> None:
        """Update from one event.

        Of a page that is out and was never recalled nothing is kept: it is used anew when it comes back.

        Args:
            on_rollback: gets what undoes it, of an event that moves pages; None where nothing is undone.
        """
        if event.act is Act.ADMIT:
            self.pages.update({page: Use(0, event.turn, clock_of(event)) for page in event.pages})
        elif event.act is Act.FAULT:
            self._use(event.pages, event)
        elif event.act in MOVING_ACTS and "to" in event.data:
            undo = self._move(event, event.data["to"])
            if on_rollback is not None:
                on_rollback(undo)
        elif event.act is Act.NOTE:
            self.tokenizer = event.data.get("tokenizer", self.tokenizer)
        elif event.act is Act.USAGE:
            counted, prompt = event.data.get("counted"), event.data.get("prompt")
            # What another counter counted says nothing about this one.
            if self.tokenizer in ("", self.calibrated.name) and is_count(counted) and is_count(prompt):
                self.calibrated.observe(counted, prompt)

    def _use(self, pages: Iterable[int], event: Event, more: int = 1) -> None:
        """Count pages as used by an event; those with the same use share one entry."""
        counts = {page: use.count if (use := self.pages.get(page)) else 0 for page in pages}
        entries = {count: Use(count + more, event.turn, clock_of(event)) for count in set(counts.values())}
        self.pages.update({page: entries[count] for page, count in counts.items()})

    def _move(self, event: Event, to: Mapping[str, Sequence[int]]) -> Callable[[], None]:
        # A fold may cite thousands of pages: only those that leave with it now count as used.
        loaded = event.pages if event.act is Act.LOAD else to.get(Place.FOLDED, ()) if event.act is Act.FOLD else ()
        evicted = [page for where, pages in to.items() if where not in WINDOW_PLACES for page in pages]
        uses = self.pages
        old_uses = {page: uses.get(page) for page in (*loaded, *evicted)}
        self._use(loaded, event, more=int(event.act is Act.LOAD))
        # Of most that leave a fold nothing is known any more.
        for page in filter(uses.__contains__, evicted):
            if not uses[page].count:
                del uses[page]

        def undo() -> None:
            for page, use in old_uses.items():
                if use is None:
                    self.pages.pop(page, None)
                else:
                    self.pages[page] = use

        return undo

    def forget(self, pages: Iterable[Page]) -> None:
        """Remove pages whose admission was undone."""
        for page in pages:
            self.pages.pop(page.id, None)


def counter_of(backend: Backend, number: int) -> str:
    """The name of the counter that a session's tokens were counted by last."""
    names = [event.data["tokenizer"] for event in backend.events(number, act=Act.NOTE) if "tokenizer" in event.data]
    return str(names[-1]) if names else "auto"

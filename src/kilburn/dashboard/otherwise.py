"""What another policy would have taken: a session's own messages, replayed with it in a store in memory.

The replay begins with the first message, as the session did, so that both begin with an empty window. It goes on for so many
pages at most; the ledger's own figures are of the same stretch. No model is asked: a policy does what it does without one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import NamedTuple

import msgspec

from kilburn.backend import Backend
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten
from kilburn.event import Act, Event
from kilburn.kernel.ledger import Ledger, Stats
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Message, Part
from kilburn.page import Page, Place
from kilburn.prices import PRICES

CHOICES = (
    "hybrid", "cost", "fifo", "lru", "importance", "tiered", "mask", "preprocess", "clear_tool_uses", "summarize", "recursive",
    "agentfold",
)  # fmt: skip
"""The policies that can be chosen: a word of a query names no other code."""

PAGES = 1_000
"""Pages that are replayed, at most."""

EVENTS = 20_000
"""Events that are read for that, at most."""

GONE = "[forgotten]"
"""Stands for what was forgotten."""


class Taken(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy's prompts took; `unanswered` are questions that no model was there for, `failed` plans that failed."""

    policy: str
    prompts: int
    shipped: int
    again: int
    fresh: int
    left: int = 0
    folds: int = 0
    unanswered: int = 0
    failed: int = 0

    @property
    def cached(self) -> int:
        """Tokens that a cache of the prefix had."""
        return max(0, self.shipped - self.again - self.fresh)

    def price(self, table: str) -> float:
        """By a table of prices."""
        prices = PRICES[table]
        return (self.cached * prices.cached + (self.again + self.fresh) * prices.written) / 1e6


class Otherwise(msgspec.Struct, frozen=True, kw_only=True):
    """A policy beside what was, and beside a window that nothing leaves; `pages` of `all` were replayed, in a window of `window`
    tokens, `forgotten` of them without their text."""

    was: Taken
    other: Taken
    whole: Taken
    pages: int
    all: int
    window: int
    turn: int
    forgotten: int = 0


class LedgerStart(NamedTuple):
    """The beginning of a ledger, up to so many pages."""

    events: list[Event]
    pages: int
    window: int


def beginning(backend: Backend, session: Session, until: int, most: int = PAGES) -> LedgerStart:
    """The events from the first one on, while their pages are not too many."""
    fork = session.branches.forked
    pages = fork.known if fork is not None and fork.at else 0
    events, windows = list[Event](), list[int]()
    for event in islice(backend.events(session.number), min(until, EVENTS)):
        if event.act is Act.ADMIT:
            if pages + len(event.pages) > most:
                break
            pages += len(event.pages)
        elif event.act is Act.SHIP:
            window = event.data.get("window", 0)
            windows.append(window if isinstance(window, int) else 0)
        events.append(event)
    return LedgerStart(events, pages, max(windows, key=windows.count, default=0))


def otherwise(
    backend: Backend, session: Session, policy: str, until: int, told: Callable[[float], None], most: int = PAGES
) -> Otherwise | None:
    """The figures; None where the stretch has no prompt.

    Args:
        policy: one of `CHOICES`.
        told: is called with the share of the work that is done.
    """
    stretch = beginning(backend, session, until, most)
    if not stretch.window:
        return None
    was, whole, forgotten, now = Ledger(), 0, 0, [0.0]
    with Store(
        Sqlite(":memory:"), Budget(stretch.window), policy, tokenizer=session.counter, foreign=False, clock=lambda: now[0]
    ) as store:
        twin = store.session("replay")
        fork = session.branches.forked
        seen = 0
        if fork is not None and fork.at and fork.known <= most:
            messages, forgotten = _messages(session, range(1, fork.known + 1))
            seen = sum(map(session.window.cost, range(1, fork.known + 1)))
            twin.append(*messages)
        for at, event in enumerate(stretch.events):
            was.count(event)
            now[0] = event.time
            if event.act is Act.ADMIT:
                messages, lost = _messages(session, event.pages)
                seen += sum(map(session.window.cost, event.pages))
                forgotten += lost
                twin.append(*messages, time=event.time)
            elif event.act is Act.SHIP:
                whole += seen
                twin.render()
            if at % 32 == 0:
                told(at / len(stretch.events))
        found = twin.stats()
        first, last = was.report(use=0), max((event.turn for event in stretch.events), default=0)
    return Otherwise(
        was=taken_by("as it was", first),
        other=taken_by(policy, found),
        whole=Taken(policy="", prompts=first.prompts, shipped=whole, again=0, fresh=seen),
        pages=stretch.pages,
        all=session.window.last,
        window=stretch.window,
        turn=last,
        forgotten=forgotten,
    )


def taken_by(policy: str, stats: Stats) -> Taken:
    """Return what the prompts of a session took, by its figures."""
    return Taken(
        policy=policy,
        prompts=stats.prompts,
        shipped=stats.tokens_shipped,
        again=stats.tokens_reprefilled,
        fresh=stats.tokens_new,
        left=stats.evictions,
        folds=stats.folds,
        unanswered=stats.asks_failed,
        failed=stats.policy_failures,
    )


def _messages(session: Session, numbers: Iterable[int]) -> tuple[list[Message], int]:
    """The messages of some pages, and how many of these were forgotten. What they were made from is not there."""
    wanted = [number for number in numbers if number in session.window.states]
    with session.lock:
        session.window.pages.fetch(wanted)
        pages = [session.window.pages[number] for number in wanted]
        session.contents.fetch(page for page in pages if session.window.at(page.id) is not Place.DROPPED)
        told = [(page, *_part(session, page)) for page in pages]
    lost = sum(part.text == GONE for _, part, _ in told)
    return list(_joined(told)), lost


def _joined(told: Sequence[tuple[Page, Part, str | None]]) -> Iterator[Message]:
    for _, each in groupby(told, key=lambda one: one[0].message):
        some = list(each)
        page, _, extra = some[0]
        whole = all(part.text != GONE for _, part, _ in some)
        yield Message(role=page.role, parts=tuple(part for _, part, _ in some), extra=extra if whole else None, trust=page.trust)


def _part(session: Session, page: Page) -> tuple[Part, str | None]:
    if session.window.at(page.id) is not Place.DROPPED:
        try:
            return session.contents.part(page)
        except Forgotten:
            pass
    call = session.window.pages[page.answers].call if page.answers else page.call
    return Part(kind=page.kind, text=GONE, call=call, name=page.name), None

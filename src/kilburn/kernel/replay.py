"""Rebuilds a process from a store, event by event (law 8)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from kilburn.budget import Counter
from kilburn.errors import KilburnError, StoreCorrupt
from kilburn.event import Act, Event
from kilburn.kernel.admission import cost_of
from kilburn.kernel.branches import Lineage, fork_of, origin_in
from kilburn.kernel.folding import shown_part
from kilburn.kernel.ledger import Ledger, Usage
from kilburn.kernel.render import part_of
from kilburn.kernel.window import Window
from kilburn.page import Page
from kilburn.store import ProcessInfo, Store

__all__ = ["Rebuilt", "rebuild"]

READ = 500
"""Pages whose texts are read at a time."""

SENSELESS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError)
"""Errors of replaying an event that does not fit the pages, or has wrong data."""


class Rebuilt(NamedTuple):
    """The state of a process up to event `head`, and whose pages these are."""

    window: Window
    ledger: Ledger
    usage: Usage
    head: int
    lineage: Lineage


def rebuild(store: Store, info: ProcessInfo, counter: Counter, *, recount: bool = True, until: int | None = None) -> Rebuilt:
    """Rebuild a process from its store; its pages get the costs of this counter. A branch with its parent's history begins
    where the parent stood when it forked.

    Args:
        info: with the number 0 where the store has no such process yet.
        recount: whether pages that were made under another counter get their costs by this one, for which their texts
            are read.
        until: the last event that counts; None for all.

    Raises:
        StoreCorrupt: the ledger has a hole, or an event that does not fit the state before it.
    """
    window, ledger, usage, lineage = Window(counter), Ledger(), Usage(counter), Lineage(info.number)
    if not info.number:
        return Rebuilt(window, ledger, usage, 0, lineage)
    events = list(islice(store.events(info.number), until))
    fork = fork_of(origin_in(events))
    if fork is not None and fork.at:
        parent = ProcessInfo(number=fork.forked, name=f"process {fork.forked}", created=0.0)
        base = rebuild(store, parent, counter, recount=recount, until=fork.at)
        if base.head < fork.at:
            raise StoreCorrupt(f"what session {info.name!r} forked from is gone", advice="run `kilburn fsck --repair`")
        window, usage, lineage = base.window, base.usage, base.lineage.child(info.number, base.window)
    # Read after the events: another process may be appending, and a page that no event names yet does no harm.
    pages = window.pages | {page.id: page for page, _ in store.pages(info.number)}
    if recount:
        window.costs |= _costs(store, pages, _foreign(events, counter), counter)
    for number, event in enumerate(events, 1):
        where = f"event {number} of session {info.name!r}"
        if event.number != number:
            raise StoreCorrupt(f"{where} is missing", advice="run `kilburn fsck`")
        try:
            window.enact(event, pages)
            ledger.count(event, window)
            usage.learn(event)
        except (KilburnError, *SENSELESS) as error:
            why = error.what if isinstance(error, KilburnError) else f"{type(error).__name__}: {error}"
            raise StoreCorrupt(f"{where} ({event.act}) makes no sense: {why}", advice="run `kilburn fsck`") from error
        # A replay is never undone; its whole journal would take hundreds of megabytes.
        window.keep()
    return Rebuilt(window, ledger, usage, len(events), lineage)


def _foreign(events: Sequence[Event], counter: Counter) -> set[int]:
    """The pages that were made while the session had another counter: their own costs are by that one."""
    tokenizer, found = "", set[int]()
    for event in events:
        if event.act is Act.NOTE:
            tokenizer = str(event.data.get("tokenizer", tokenizer))
        elif tokenizer not in ("", counter.name):
            found.update(event.pages if event.act is Act.ADMIT else [event.data["fold"]] if "fold" in event.data else ())
    return found


def _costs(store: Store, pages: Mapping[int, Page], foreign: Set[int], counter: Counter) -> dict[int, int]:
    """What pages cost by another counter than the one under which they were made; forgotten pages have no text."""
    costs: dict[int, int] = {}
    kept = [page for page in pages.values() if page.id in foreign and page.digest]
    for some in (kept[at : at + READ] for at in range(0, len(kept), READ)):
        texts = {"": ""} | store.texts({digest for page in some for digest in (page.digest, page.extra) if digest})
        for page in some:
            part, leftovers = part_of(page, texts[page.digest], texts[page.extra])
            if page.depth:
                part = shown_part(page, part.text, pages)
            costs[page.id] = cost_of(counter, part, page.role, leftovers, page.order[0])
    return costs

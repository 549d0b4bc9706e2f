"""Rebuilds a session from a store, event by event (law 8)."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import islice
from typing import NamedTuple

from kilburn.backend import Backend, SegmentInfo
from kilburn.budget import Counter
from kilburn.errors import KilburnError, StoreCorrupt
from kilburn.event import STATE, Act, Data, Event
from kilburn.kernel.admission import cost_of
from kilburn.kernel.branches import Lineage, fork_of, origin_in
from kilburn.kernel.checkpoint import restore
from kilburn.kernel.folding import shown_part
from kilburn.kernel.ledger import Ledger, Usage
from kilburn.kernel.pages import Calls, PagesById, finder_of, reader_of
from kilburn.kernel.render import part_of
from kilburn.kernel.window import WindowState
from kilburn.page import Page

CHUNK_PAGES = 500
"""Pages whose texts are read at a time."""

PAGES_PER_STEP = 256
"""Pages that one event moves in the time of an event that moves none."""

SENSELESS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError)
"""Errors of replaying an event that does not fit the pages, or has wrong data."""


class Rebuilt(NamedTuple):
    """The state of a session up to event `head`, and whose pages these are.

    Args:
        work: what it took to replay it, beside what a checkpoint gave; see `work_of`.
    """

    window: WindowState
    ledger: Ledger
    usage: Usage
    head: int
    lineage: Lineage
    work: int = 0


def work_of(events: Iterable[Event]) -> int:
    """What it takes to replay events, in events that move no page."""
    page_counts = (
        sum(map(len, event.data["to"].values())) if "to" in event.data and event.act in STATE else 0 for event in events
    )
    return sum(1 + count // PAGES_PER_STEP for count in page_counts)


def lineage_of(backend: Backend, number: int) -> Lineage:
    """Whose pages a session sees."""
    fork = fork_of(origin_in(backend.events(number)))
    if fork is None or not fork.at:
        return Lineage(number)
    return lineage_of(backend, fork.forked).child(number, fork.known, fork.derived)


def rebuild(
    backend: Backend,
    info: SegmentInfo,
    counter: Counter,
    *,
    recount: bool = True,
    until: int | None = None,
    whole: bool = False,
) -> Rebuilt:
    """Rebuild a session from its last checkpoint and its ledger; its pages get the costs of this counter. A branch with its
    parent's history begins where the parent stood when it forked.

    Args:
        info: with the number 0 where the store has no such session yet.
        recount: whether pages that were made under another counter get their costs by this one, for which their texts
            are read.
        until: the last event that counts; None for all.
        whole: whether everything is replayed, as if there were no checkpoint.

    Raises:
        StoreCorrupt: the ledger has a hole, or an event that does not fit the state before it.
    """
    if not info.number:
        return Rebuilt(WindowState(counter), Ledger(), Usage(counter), 0, Lineage(0))
    lineage = lineage_of(backend, info.number)
    base = None if whole else _restored(backend, lineage, counter, backend.checkpoint(info.number, until))
    if base is not None:
        events = list(islice(backend.events(info.number, base.head), None if until is None else until - base.head))
        pages: Mapping[int, Page] = _pages_of(backend, info, events)
    else:
        events = list(islice(backend.events(info.number), until))
        base = _inherited(backend, info, counter, lineage, origin_in(events), recount=recount, whole=whole) or Rebuilt(
            _window(backend, lineage, counter), Ledger(), Usage(counter), 0, lineage
        )
        # Read after the events: another process may be appending, and a page that no event names yet does no harm.
        every = whole or until is None
        pages = {page.id: page for page, _ in backend.pages(info.number)} if every else _pages_of(backend, info, events)
    window, ledger, usage, work = base.window, base.ledger, base.usage, 0
    if recount:
        foreign = _foreign(events, counter, usage.tokenizer if base.head else "")
        if foreign:
            window.costs.update(_costs(backend, ChainMap(dict(pages), window.pages), foreign, counter))
    for number, event in enumerate(events, base.head + 1):
        where = f"event {number} of session {info.name!r}"
        if event.number != number:
            raise StoreCorrupt(f"{where} is missing", advice="run `kilburn fsck`")
        try:
            window.enact(event, pages)
            ledger.count(event)
            usage.learn(event)
            work += work_of((event,))
        except (KilburnError, *SENSELESS) as error:
            why = error.what if isinstance(error, KilburnError) else f"{type(error).__name__}: {error}"
            raise StoreCorrupt(f"{where} ({event.act}) makes no sense: {why}", advice="run `kilburn fsck`") from error
        # A replay is never undone; its whole journal would take hundreds of megabytes.
        window.keep()
    window.pages.settle(window.last_derived, window.last)
    window.pages.drop(page for page in range(window.last_derived, 0) if page not in window.shown)
    return Rebuilt(window, ledger, usage, base.head + len(events), lineage, base.work + work)


def last_of(backend: Backend, segment: int, turn: int, head: int) -> int:
    """The number of the last event, up to `head`, before the message after a turn, or 0. Turns never go back in a ledger, so it
    is found by halves, and a long ledger is not read."""
    low, high = 0, head
    while low < high:
        middle = (low + high + 1) // 2
        event = next(iter(backend.events(segment, middle - 1)), None)
        low, high = (middle, high) if event is not None and event.turn <= turn else (low, middle - 1)
    return low


def steps(
    backend: Backend, info: SegmentInfo, counter: Counter, start: int, until: int, begin: tuple[int, bytes] | None = None
) -> Iterator[tuple[Event, WindowState]]:
    """The events of a session after `after` up to `until`, each with the window that it left: the same object each time, which
    the next step changes.

    Args:
        begin: a checkpoint that the caller has, with the number of its event, for where the store has none so near.

    Raises:
        StoreCorrupt: see `rebuild`.
    """
    lineage = lineage_of(backend, info.number)
    rebuilt = _restored(backend, lineage, counter, begin) if begin is not None else None
    # Of a branch the first event says what it inherits.
    rebuilt = rebuilt or rebuild(backend, info, counter, until=max(1, start) if lineage.shares else start)
    ledger = islice(backend.events(info.number, rebuilt.head), max(0, until - rebuilt.head))
    while events := list(islice(ledger, CHUNK_PAGES)):
        pages = _pages_of(backend, info, events)
        for event in events:
            try:
                rebuilt.window.enact(event, pages)
            except (KilburnError, *SENSELESS) as error:
                message = f"event {event.number} of session {info.name!r} ({event.act}) makes no sense"
                raise StoreCorrupt(message, advice="run `kilburn fsck`") from error
            rebuilt.window.keep()
            if event.number > start:
                yield event, rebuilt.window


def _window(backend: Backend, lineage: Lineage, counter: Counter) -> WindowState:
    """An empty window, which reads pages and calls when they are asked for."""
    return WindowState(counter, PagesById(reader_of(backend, lineage)), Calls(finder_of(backend, lineage)))


def _restored(backend: Backend, lineage: Lineage, counter: Counter, checkpoint: tuple[int, bytes] | None) -> Rebuilt | None:
    """The state of a checkpoint; None where there is none, or it cannot be used."""
    if checkpoint is None:
        return None
    window, ledger, usage = _window(backend, lineage, counter), Ledger(), Usage(counter)
    return Rebuilt(window, ledger, usage, checkpoint[0], lineage) if restore(checkpoint[1], window, ledger, usage) else None


def _inherited(
    backend: Backend, info: SegmentInfo, counter: Counter, lineage: Lineage, origin: Data, *, recount: bool, whole: bool
) -> Rebuilt | None:
    """The state that a branch begins with; None of any other segment.

    Raises:
        StoreCorrupt: what it inherited is gone.
    """
    fork = fork_of(origin)
    if fork is None or not fork.at:
        return None
    parent = SegmentInfo(number=fork.forked, name=f"segment {fork.forked}", created=0.0)
    base = rebuild(backend, parent, counter, recount=recount, until=fork.at, whole=whole)
    if base.head < fork.at:
        raise StoreCorrupt(f"what session {info.name!r} forked from is gone", advice="run `kilburn fsck --repair`")
    base.window.pages.read, base.window.calls.find = reader_of(backend, lineage), finder_of(backend, lineage)
    return Rebuilt(base.window, Ledger(), base.usage, 0, lineage, base.work)


def _pages_of(backend: Backend, info: SegmentInfo, events: Iterable[Event]) -> dict[int, Page]:
    """The pages that came with some events, in one query; others are read when they are needed."""
    numbers = {page for event in events for page in made_by(event)}
    return {page: row[0] for (_, page), row in backend.read((info.number, page) for page in numbers).items()}


def made_by(event: Event) -> Iterable[int]:
    """The pages that came with an event."""
    if event.act is Act.ADMIT:
        return event.pages
    return (event.data["fold"],) if event.act is Act.FOLD and "fold" in event.data else ()


def _foreign(events: Sequence[Event], counter: Counter, tokenizer: str) -> set[int]:
    """The pages that were made while the session had another counter: their own costs are by that one.

    Args:
        tokenizer: the name of the counter before these events; "" for none.
    """
    foreign = set[int]()
    for event in events:
        if event.act is Act.NOTE:
            tokenizer = str(event.data.get("tokenizer", tokenizer))
        elif tokenizer not in ("", counter.name):
            foreign.update(event.pages if event.act is Act.ADMIT else [event.data["fold"]] if "fold" in event.data else ())
    return foreign


def _readable(backend: Backend, digests: Set[str]) -> dict[str, str]:
    """The texts that are what was written."""
    try:
        return dict(backend.contents.texts(digests))
    except StoreCorrupt:
        if len(digests) == 1:
            return {}
        ordered = sorted(digests)
        middle = len(ordered) // 2
        return _readable(backend, set(ordered[:middle])) | _readable(backend, set(ordered[middle:]))


def _costs(backend: Backend, pages: Mapping[int, Page], foreign: Set[int], counter: Counter) -> dict[int, int]:
    """What pages cost by another counter than the one under which they were made. Forgotten pages have no text, and one whose
    text is damaged keeps its cost: whoever reads it is told."""
    costs: dict[int, int] = {}
    readable = [pages[number] for number in sorted(foreign) if number in pages and pages[number].digest]
    for chunk in (readable[at : at + CHUNK_PAGES] for at in range(0, len(readable), CHUNK_PAGES)):
        texts = {"": ""} | _readable(backend, {digest for page in chunk for digest in (page.digest, page.extra) if digest})
        for page in chunk:
            if page.digest not in texts or page.extra not in texts:
                continue
            part, leftovers = part_of(page, texts[page.digest], texts[page.extra])
            if page.depth:
                part = shown_part(page, part.text, pages)
            costs[page.id] = cost_of(counter, part, page.role, leftovers, page.order[0])
    return costs

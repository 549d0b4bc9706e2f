"""Reads the store for the dashboard: sessions with their figures and alarms, earlier windows, and ranges of a ledger.

The cost of a screen does not grow with the store: figures start at a checkpoint, a ledger is read in ranges, and a request for
too many events raises `TooFar`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from kilburn.backend import Backend, SegmentInfo
from kilburn.budget import Budget
from kilburn.dashboard.marks import Marks, TooFar, weight
from kilburn.effect import Outcome
from kilburn.errors import Forgotten, KilburnError, SpecError
from kilburn.event import Act, Event
from kilburn.kernel.checkpoint import figures_of
from kilburn.kernel.consultation import FAILURES, Breaker
from kilburn.kernel.ledger import Stats, counter_of
from kilburn.kernel.receipts import MOVES, Receipt, receipts
from kilburn.kernel.replay import SENSELESS, steps
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.opening import Store
from kilburn.page import Page

WIDE = 1 << 40
"""Tokens of a window from which nothing has to be evicted."""

MAX_OPEN = 6
"""Sessions that are kept open."""

EFFORT = 15_000
"""Events, or equally expensive reads, with which one request brings the figures of sessions up to date."""

GLANCE = 30
"""Events that take as long as reading one checkpoint."""

STRETCH = 2_000
"""Events that are read at once when the newest ones are searched."""

MAX_SEARCHED = 20_000
"""Events that one request searches."""

REPROCESSED_SHARE = 1 / 3
"""Share of the shipped tokens that were processed again because of edits, from which an alarm is raised."""

REFAULTS, REFAULT_SHARE = 3, 0.05
"""Pages that came back soon after their eviction, and their share of the prompts, from which an alarm is raised."""

MAX_REPLAYED = 4_000
"""Events that one request replays, which takes about 0.3 s."""

MAX_MOVED = 5_000
"""Pages that the events of one request may move, because one event may move many pages. See `weight`."""

SETTLED = MOVES | {Act.COMPACT, Act.REFUSE}
"""Events that may occur within one receipt."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A session in the list. `stats` is None until the session has been counted; `alarms` are texts, the worst first."""

    info: SegmentInfo
    stats: Stats | None
    alarms: tuple[str, ...] = ()

    @property
    def fill(self) -> float | None:
        """Return the share of its window that its prompt takes."""
        return self.stats.fill if self.stats is not None else None


class LedgerReader:
    """Reads one tenant's data.

    Args:
        backend: a read-only connection.
        effort: see `EFFORT`.
        budget: returns the budget of a session whose agent runs in this process; None for any other session.
    """

    def __init__(
        self, backend: Backend, effort: int = EFFORT, budget: Callable[[str], Budget | None] = lambda name: None
    ) -> None:
        self.backend, self._effort, self.budget = backend, effort, budget
        self._lock = threading.Lock()
        self._marks = Marks(backend)
        self._stores: dict[str, Store] = {}
        self._opened: dict[str, Store] = {}
        # For each session number: an event, the figures as of that event, and an alarm about the policy's model.
        self._figures: dict[int, tuple[int, Stats, str]] = {}

    def store(self, tokenizer: str = "chars/4") -> Store:
        """Return the store with a token counter. Data without a window needs no particular counter."""
        if tokenizer not in self._stores:
            self._stores[tokenizer] = Store(self.backend, Budget(WIDE), "fifo", tokenizer=tokenizer)
        return self._stores[tokenizer]

    def sessions(self) -> list[SegmentInfo]:
        """Return all sessions, the most recently used first."""
        return sorted(self.store().sessions(), key=lambda info: (-info.used, -info.number))

    def info(self, name: str) -> SegmentInfo:
        """Return the row of a session.

        Raises:
            SpecError: there is no session of this name.
        """
        info = self.backend.segment(name, time=0.0, create=False) if name else None
        if info is None or info.kind != "session":
            raise SpecError(f"there is no session {name[:80]!r}", advice="see the list of sessions, or `kilburn ps`")
        return info

    def session(self, name: str) -> Session:
        """Open a session with its agent's token counter, and bring it up to date.

        Raises:
            SpecError: there is no session of this name. StoreCorrupt.
        """
        info = self.info(name)
        with self._lock:
            store = self._opened.pop(name, None) or self.store(counter_of(self.backend, info.number))
            self._opened[name] = store
            while len(self._opened) > MAX_OPEN:
                first = next(iter(self._opened))
                self._opened.pop(first).release(first)
        session = store.session(name)
        session.ledger.refresh()
        return session

    def rows(self, infos: Sequence[SegmentInfo]) -> tuple[list[Listed], int]:
        """Return sessions with their figures, those with alarms first, and the number of sessions whose figures are still
        unknown. One call counts for a bounded time; the next call continues."""
        effort, waiting = self._effort, set[int]()
        for info in infos:
            if info.damaged or not self._is_new(info):
                continue
            if effort > 0:
                effort -= self._count(info)
            else:
                waiting.add(info.number)
        rows = []
        for info in infos:
            _, stats, rests = self._figures.get(info.number, (0, None, "")) if not info.damaged else (0, None, "")
            rows.append(Listed(info=info, stats=stats, alarms=tuple(find_alarms(info, stats, rests))))
        return sorted(rows, key=lambda row: not row.alarms), len(waiting)

    def _is_new(self, info: SegmentInfo) -> bool:
        """Return whether a session has changed since its figures were counted."""
        return self._figures.get(info.number, (-1,))[0] != info.head

    def row(self, info: SegmentInfo) -> Listed:
        """Return a session with its current figures."""
        if not info.damaged and self._is_new(info):
            self._count(info)
        return self.rows([info])[0][0]

    def _count(self, info: SegmentInfo) -> int:
        """Bring the figures of a session up to date, and return the effort."""
        try:
            report, events = figures_of(self.backend, info)
            rests = self._resting(info, report) if report.asks_failed >= FAILURES else ""
            self._figures[info.number] = (info.head, report, rests)
        except (KilburnError, *SENSELESS):
            # Opening this session reports the problem; the list shows the others.
            self._figures[info.number] = (info.head, Stats(warnings=["its ledger cannot be read: run kilburn fsck"]), "")
            return GLANCE
        return GLANCE + max(0, events)

    def _resting(self, info: SegmentInfo, stats: Stats) -> str:
        """Describe the failures of a policy's model: whether its last questions failed, and whether the breaker is open."""
        breaker, failed = Breaker(), 0
        for event in self.backend.events(info.number, max(0, info.head - MAX_SEARCHED), Act.ASK):
            word = event.data.get("outcome")
            failed = failed + 1 if word == Outcome.FAILED else 0
            breaker.note(Outcome.FAILED if word == Outcome.FAILED else Outcome.DONE, event.turn)
        if failed < FAILURES:
            return ""
        if breaker.is_open(stats.turns + 1):
            return f"the model does not answer: the breaker is open, after {failed:,} questions that failed"
        return f"the last {failed:,} questions to the model failed"

    @property
    def counted(self) -> int:
        """Return the number of sessions whose figures are known."""
        return len(self._figures)

    def progress(self, number: int) -> float:
        """Return the share of a session that is replayed, 0 to 1."""
        return self._marks.progress(number)

    def replayed(self, number: int, seconds: float) -> bool:
        """Wait until a session is replayed; return whether it is."""
        return self._marks.finish(number, seconds)

    def stretch(self, number: int, start: int, until: int) -> list[Event]:
        """Return the events after `start` up to `until`."""
        return list(islice(self.backend.events(number, max(0, start)), max(0, until - max(0, start))))

    def receipts(self, number: int, until: int, limit: int) -> tuple[list[Receipt], int]:
        """Return the newest receipts up to an event, newest first, and the event up to which to search for older ones, or 0."""
        newest: list[Receipt] = []
        end, scanned = until, 0
        size = STRETCH
        while end > 0 and len(newest) < limit and scanned < MAX_SEARCHED:
            begin = max(0, end - size)
            events = self.stretch(number, begin, end)
            start = 0 if not begin else next((at for at, event in enumerate(events) if event.act not in SETTLED), len(events))
            scanned += len(events)
            if start == len(events) and events:
                size *= 2
                continue
            size = STRETCH
            newest += list(receipts(events[start:]))[::-1]
            end = begin + start
        if len(newest) > limit:
            return newest[:limit], newest[limit].events[1]
        return newest, end

    def of_act(self, number: int, act: Act, until: int, limit: int) -> tuple[list[Event], int]:
        """Return the newest events of an act up to an event, newest first, and the event up to which to search for older ones,
        or 0."""
        begin = max(0, until - MAX_SEARCHED)
        newest = [event for event in self.backend.events(number, begin, act) if event.number <= until][::-1]
        return (newest[:limit], newest[limit].number) if len(newest) > limit else (newest, begin)

    def faults(self, number: int, until: int, limit: int) -> tuple[list[Event], int]:
        """Return the newest recalls and searches; see `of_act`."""
        (recalls, older), (searches, older_searches) = (self.of_act(number, act, until, limit) for act in (Act.FAULT, Act.SEARCH))
        newest = sorted([*recalls, *searches], key=lambda event: -event.number)
        return (newest[:limit], newest[limit].number) if len(newest) > limit else (newest, max(older, older_searches))

    def windows(self, session: Session, start: int, until: int) -> Iterator[tuple[Event, WindowState]]:
        """Yield the events of a range, each with the window after it; see `kilburn.kernel.replay.steps`.

        Raises:
            TooFar: there is no checkpoint nearby. One is made in the background.
        """
        info, counter = session.info, session.counter
        begin = self._marks.near(info.number, max(1, start))
        saved = self.backend.checkpoint(info.number, max(1, start))
        if begin is not None and saved is not None and saved[0] >= begin[0]:
            begin = None
        base = max(begin[0] if begin else 0, saved[0] if saved else 0)
        if until - base > MAX_REPLAYED:
            raise TooFar(self._marks.work(session, until))
        if sum(weight(event) for event in self.stretch(info.number, base, until)) > MAX_MOVED:
            share = self._marks.work(session, until)
            # A finished replay has no nearer checkpoint.
            if share < 1:
                raise TooFar(share)
        return steps(self.backend, info, counter, start, until, begin)

    def naming(self, session: Session, page: int, sources: Iterable[int] = ()) -> list[Event]:
        """Return the events that name a page, oldest first; of an inherited page also those before the fork.

        Args:
            sources: the sources of a derived page.
        """
        pages = {page, *islice(sources, 1)}
        events = self.backend.naming(session.number, pages)
        owner, fork = session.contents.owner(page), session.branches.forked
        if owner != session.number and fork is not None:
            events = [*(event for event in self.backend.naming(owner, pages) if event.number <= fork.at), *events]
        return [event for event in events if page in event.pages or event.data.get("fold") == page]


def read_text(session: Session, page: Page, limit: int, begin: int = 0) -> tuple[str, int]:
    """Return a part of a page's text, and the number of characters after it; -1 if the page was forgotten."""
    try:
        text = session.contents.text(page.id)
    except Forgotten:
        return "", -1
    return text[begin : begin + limit], max(0, len(text) - begin - limit)


def find_alarms(info: SegmentInfo, stats: Stats | None, rests: str = "") -> Iterator[str]:
    """Yield the alarms of a session: problems that a person can solve.

    Args:
        rests: the alarm about the model of its policy.
    """
    if info.damaged:
        yield f"damaged: {info.damaged}"
    if stats is None:
        return
    if stats.overflow:
        yield f"{stats.overflow:,} prompts exceeded the window"
    yield from (warning for warning in stats.warnings if warning.startswith("its ledger"))
    if any(warning.startswith("hit rate") for warning in stats.warnings):
        yield f"hit rate {stats.hit_rate or 0:.0%}"
    if rests:
        yield rests
    if stats.policy_failures:
        yield f"the policy failed {stats.policy_failures:,}×"
    if stats.lost:
        yield f"{stats.lost:,} observations lost"
    if stats.refaults >= max(REFAULTS, REFAULT_SHARE * stats.prompts):
        yield f"{stats.refaults:,} refaults"
    # Without a prompt cache, an edit costs nothing more.
    if stats.tokens_cached and stats.tokens_reprefilled / stats.tokens_shipped >= REPROCESSED_SHARE:
        yield f"{stats.tokens_reprefilled / stats.tokens_shipped:.0%} of the tokens read again"

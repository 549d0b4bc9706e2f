"""The store as the dashboard reads it: sessions with their figures and alarms, a window as it was, a stretch of a ledger.

What a screen costs does not grow with the store: figures begin at a checkpoint, a ledger is read in stretches, and whoever asks
for too much at once is told so.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice

import msgspec

from kilburn.backend import Backend, SegmentInfo
from kilburn.budget import Budget
from kilburn.dashboard.marks import Marks, TooFar, weight
from kilburn.effect import Outcome
from kilburn.errors import KilburnError, SpecError
from kilburn.event import Act, Event
from kilburn.kernel.breaker import FAILURES, Breaker
from kilburn.kernel.checkpoint import figures_of
from kilburn.kernel.ledger import Stats, counter_of
from kilburn.kernel.receipts import MOVES, Receipt, receipts
from kilburn.kernel.replay import SENSELESS, steps
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.kernel.window import WindowState

WIDE = 1 << 40
"""Tokens: a window that is always large enough, so that nothing leaves by looking."""

OPEN = 6
"""Sessions that are kept in memory."""

EFFORT = 15_000
"""Events, or what takes as long, that one request reads to bring the figures of sessions up to date."""

GLANCE = 30
"""Events in the time of reading one checkpoint."""

STRETCH = 2_000
"""Events that are read at once, where the newest are looked through for something."""

FARTHEST = 20_000
"""Events that one request looks through at most."""

AGAIN = 1 / 3
"""The share of the tokens shipped that were read again because of edits, from which on it is an alarm."""

REFAULTS, REFAULT_SHARE = 3, 0.05
"""Pages that came back soon after they had left, and their share of the prompts, from which on they are an alarm."""

REPLAYED = 4_000
"""Events that one request replays at most: as many take some 0.3 s."""

MOVED = 5_000
"""Pages that the events of one request may move, for the same reason: many may come with one event. See `weight`."""

SETTLED = MOVES | {Act.COMPACT, Act.REFUSE}
"""Events that may stand within one receipt."""


class Listed(msgspec.Struct, frozen=True, kw_only=True):
    """A session in the list: `stats` is None where nobody has counted yet, `alarms` is in words, the worst first."""

    info: SegmentInfo
    stats: Stats | None
    alarms: tuple[str, ...] = ()

    @property
    def fill(self) -> float | None:
        """The share of its window that its prompt takes."""
        return self.stats.fill if self.stats is not None else None


class LedgerReader:
    """Reads one tenant's part of a store.

    Args:
        backend: opened for reading.
        effort: see `EFFORT`.
        budget: what the window of a session may hold, where its agent runs in this process; else None.
    """

    def __init__(
        self,
        backend: Backend,
        clock: Callable[[], float] = time.time,
        effort: int = EFFORT,
        budget: Callable[[str], Budget | None] = lambda name: None,
    ) -> None:
        self.backend, self.clock, self._effort, self.budget = backend, clock, effort, budget
        self._lock = threading.Lock()
        self._marks = Marks(backend)
        self._stores: dict[str, Store] = {}
        self._opened: dict[str, Store] = {}
        # The figures of sessions by number, as of an event; and what is wrong with the model of its policy.
        self._figures: dict[int, tuple[int, Stats, str]] = {}

    def store(self, tokenizer: str = "chars/4") -> Store:
        """The store, with a counter; what has no window needs none in particular."""
        if tokenizer not in self._stores:
            self._stores[tokenizer] = Store(self.backend, Budget(WIDE), "fifo", tokenizer=tokenizer, clock=self.clock)
        return self._stores[tokenizer]

    def sessions(self) -> list[SegmentInfo]:
        """All sessions, those used last first."""
        return sorted(self.store().sessions(), key=lambda info: (-info.used, -info.number))

    def info(self, name: str) -> SegmentInfo:
        """A session's row.

        Raises:
            SpecError: there is none of this name.
        """
        found = self.backend.segment(name, time=0.0, create=False) if name else None
        if found is None or found.kind != "session":
            raise SpecError(f"there is no session {name[:80]!r}", advice="see the list of sessions, or `kilburn ps`")
        return found

    def session(self, name: str) -> Session:
        """A session, opened with its agent's counter, so that nothing is counted again; it is as the store is now.

        Raises:
            SpecError: there is none of this name. StoreCorrupt.
        """
        info = self.info(name)
        with self._lock:
            store = self._opened.pop(name, None) or self.store(counter_of(self.backend, info.number))
            self._opened[name] = store
            while len(self._opened) > OPEN:
                first = next(iter(self._opened))
                self._opened.pop(first).release(first)
        session = store.session(name)
        session.refresh()
        return session

    # Figures

    def rows(self, infos: Sequence[SegmentInfo]) -> tuple[list[Listed], int]:
        """Sessions with their figures, alarms first; and of how many the figures are not known yet. One call counts for a while;
        the next one goes on."""
        left, waiting = self._effort, set[int]()
        for info in infos:
            if info.damaged or not self._is_new(info):
                continue
            if left > 0:
                left -= self._count(info)
            else:
                waiting.add(info.number)
        found = []
        for info in infos:
            _, stats, rests = self._figures.get(info.number, (0, None, "")) if not info.damaged else (0, None, "")
            found.append(Listed(info=info, stats=stats, alarms=tuple(alarms_of(info, stats, rests))))
        return sorted(found, key=lambda row: not row.alarms), len(waiting)

    def _is_new(self, info: SegmentInfo) -> bool:
        """Whether a session has changed since its figures were counted."""
        return self._figures.get(info.number, (-1,))[0] != info.head

    def row(self, info: SegmentInfo) -> Listed:
        """One session with its figures as they are now."""
        if not info.damaged and self._is_new(info):
            self._count(info)
        return self.rows([info])[0][0]

    def _count(self, info: SegmentInfo) -> int:
        """Bring a session's figures up to date; returns what that took."""
        try:
            report, events = figures_of(self.backend, info)
            rests = self._resting(info, report) if report.asks_failed >= FAILURES else ""
            self._figures[info.number] = (info.head, report, rests)
        except (KilburnError, *SENSELESS):
            # Opening it says what is wrong; it blocks no other.
            self._figures[info.number] = (info.head, Stats(warnings=["its ledger cannot be read: run kilburn fsck"]), "")
            return GLANCE
        return GLANCE + max(0, events)

    def _resting(self, info: SegmentInfo, stats: Stats) -> str:
        """What is wrong with a policy's model, in words: whether its last questions failed, and until when it is spared."""
        breaker, failed = Breaker(), 0
        for event in self.backend.events(info.number, max(0, info.head - FARTHEST), Act.ASK):
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
        """How many sessions' figures are known."""
        return len(self._figures)

    def progress(self, number: int) -> float:
        """How much of a session is replayed, 0 to 1."""
        return self._marks.progress(number)

    def replayed(self, number: int, seconds: float) -> bool:
        """Wait until a session is replayed; whether it is."""
        return self._marks.finish(number, seconds)

    # Stretches of a ledger

    def stretch(self, number: int, after: int, until: int) -> list[Event]:
        """The events after `after` up to `until`."""
        return list(islice(self.backend.events(number, max(0, after)), max(0, until - max(0, after))))

    def receipts(self, number: int, until: int, most: int) -> tuple[list[Receipt], int]:
        """The newest receipts up to an event, newest first; and the event up to which older ones are to be looked for, or 0."""
        found: list[Receipt] = []
        end, scanned = until, 0
        size = STRETCH
        while end > 0 and len(found) < most and scanned < FARTHEST:
            after = max(0, end - size)
            events = self.stretch(number, after, end)
            start = 0 if not after else next((at for at, event in enumerate(events) if event.act not in SETTLED), len(events))
            scanned += len(events)
            if start == len(events) and events:
                size *= 2
                continue
            size = STRETCH
            found += list(receipts(events[start:]))[::-1]
            end = after + start
        if len(found) > most:
            return found[:most], found[most].events[1]
        return found, end

    def of_act(self, number: int, act: Act, until: int, most: int) -> tuple[list[Event], int]:
        """The newest events of an act up to an event, newest first; and the event up to which to look for older ones, or 0."""
        after = max(0, until - FARTHEST)
        found = [event for event in self.backend.events(number, after, act) if event.number <= until][::-1]
        return (found[:most], found[most].number) if len(found) > most else (found, after)

    def faults(self, number: int, until: int, most: int) -> tuple[list[Event], int]:
        """The newest recalls and searches, as by `of_act`."""
        (recalls, older), (searches, other) = (self.of_act(number, act, until, most) for act in (Act.FAULT, Act.SEARCH))
        found = sorted([*recalls, *searches], key=lambda event: -event.number)
        return (found[:most], found[most].number) if len(found) > most else (found, max(older, other))

    def windows(self, session: Session, after: int, until: int) -> Iterator[tuple[Event, WindowState]]:
        """The events of a stretch, each with the window that it left; see `kilburn.kernel.replay.steps`.

        Raises:
            TooFar: there is no checkpoint near it. One is made in the background.
        """
        info, counter = session.info, session.counter
        begin = self._marks.near(info.number, max(1, after))
        known = self.backend.checkpoint(info.number, max(1, after))
        if begin is not None and known is not None and known[0] >= begin[0]:
            begin = None
        start = max(begin[0] if begin else 0, known[0] if known else 0)
        if until - start > REPLAYED:
            raise TooFar(self._marks.work(session, until))
        if sum(weight(event) for event in self.stretch(info.number, start, until)) > MOVED:
            share = self._marks.work(session, until)
            # Nearer than the checkpoints that it makes there is none.
            if share < 1:
                raise TooFar(share)
        return steps(self.backend, info, counter, after, until, begin)

    def naming(self, session: Session, page: int, sources: Iterable[int] = ()) -> list[Event]:
        """What the ledger says of a page, oldest first: of an inherited one also what happened to it before the fork.

        Args:
            sources: of a derived page, what it was made from.
        """
        wanted = {page, *islice(sources, 1)}
        found = self.backend.naming(session.number, wanted)
        owner, fork = session.owner(page), session.branches.forked
        if owner != session.number and fork is not None:
            found = [*(event for event in self.backend.naming(owner, wanted) if event.number <= fork.at), *found]
        return [event for event in found if page in event.pages or event.data.get("fold") == page]


def alarms_of(info: SegmentInfo, stats: Stats | None, rests: str = "") -> Iterator[str]:
    """What is wrong with a session, and can be mended, in words.

    Args:
        rests: of the model that its policy asks.
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
    # Where the provider reports no cached tokens, what an edit changes costs nothing more.
    if stats.tokens_cached and stats.tokens_reprefilled / stats.tokens_shipped >= AGAIN:
        yield f"{stats.tokens_reprefilled / stats.tokens_shipped:.0%} of the tokens read again"

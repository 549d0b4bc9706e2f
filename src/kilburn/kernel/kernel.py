"""The kernel of one session: the only code that changes where pages are.

Policies propose (`planning`), the laws check (`laws`), and the kernel moves. Every change is part of a batch: it is
made in the window, and written to the store in one transaction. If anything fails, window and store are as they were
before the batch.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager, suppress
from itertools import chain, islice
from typing import Any, Unpack

import msgspec

from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.budget import Budget, Counter, text_cost
from kilburn.collections.collecting import LARGEST
from kilburn.errors import (
    Forgotten,
    KernelError,
    KilburnError,
    LawBroken,
    StoreCorrupt,
    StoreError,
    StoreReadOnly,
    StoreStale,
    UnknownAddress,
)
from kilburn.event import Act, Data, Event, in_order, writable
from kilburn.kernel.admission import pages_of, pins_on_arrival
from kilburn.kernel.branches import Fork, Lineage
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.checkpoint import checkpoint_of
from kilburn.kernel.contents import Contents
from kilburn.kernel.folding import derived_page, pieces_of
from kilburn.kernel.laws import (
    FORCED_PATIENCE,
    LegalMove,
    as_move,
    check_bring,
    check_drop,
    check_evict,
    check_fold,
    check_held,
    check_known,
    check_load,
    check_retire,
    check_standing,
    open_loop,
    partners_of,
    pins_exceed,
)
from kilburn.kernel.pages import finder_of, reader_of
from kilburn.kernel.pending import GATHERED, START, Pending, Savepoint
from kilburn.kernel.render import readable
from kilburn.kernel.replay import rebuild, work_of
from kilburn.kernel.resolve import resolve
from kilburn.kernel.standing import packed, update_standing
from kilburn.kernel.window import GONE, NO_RESULT, PATIENCE
from kilburn.message import Kind, Message
from kilburn.move import Bring, Drop, Evict, Fold, Load, Move, Retire
from kilburn.page import Page, Place, Span, address_of
from kilburn.retrieval import Meanings, Ranking
from kilburn.search.search import RANKING, Searcher

ENDS = 120
"""Characters of head and of tail that an excerpt of the user's latest message keeps in any case."""

LONG, SHARE = 512, 32
"""Work of a replay (see `work_of`) after which there is a checkpoint: so much, or in a long session this share of its pages, so
that what checkpoints cost does not grow with the session."""

SHORT = 64
"""Work after which there is a checkpoint already when the session is released, or a branch begins from it."""

LAST_TIME = 253_402_300_799.0
"""The end of the year 9999: no calendar of Python's goes on."""

HARMLESS = frozenset({Act.FAULT, Act.SEARCH, Act.SHIP})
"""What another writer may write between two transactions: it does not disturb the second."""


class Kernel:
    """Carries out what the laws allow, in batches.

    Its parts are the `window` (which page is where), the batch that is `pending`, the `contents` (cached texts), the
    figures of the `ledger`, and the `usage` of pages. `work` is what a replay since the newest checkpoint takes; see `work_of`.

    Args:
        info: with the number 0 where the store has no such session yet; the first batch that is written begins it.
        clock: seconds since the epoch; the only clock there is.
        until: the last event that counts; None for all. See `as_of`.
    """

    def __init__(
        self,
        backend: Backend,
        info: SegmentInfo,
        counter: Counter,
        budget: Budget,
        clock: Callable[[], float],
        ranking: Ranking | None = None,
        vectors: Meanings | None = None,
        *,
        until: int | None = None,
    ) -> None:
        self.backend, self.info, self.budget, self.clock = backend, info, budget, clock
        self._ranking: Ranking = ranking or resolve("search.rankings", RANKING)
        self._vectors = vectors
        self.lock = threading.RLock()
        self.stale = False
        self.changes = 0
        # Whether a batch is open. Who opens one holds the lock, has called `check_free`, and resets this or calls `fail`, also
        # after an interrupt between any two lines.
        # `_broken`: whether a batch ended in a way that the journal cannot undo.
        self.busy = self._broken = False
        # The budget of the last batch that was written.
        self._settled = budget
        self.contents = Contents(backend, self._needed)
        self._until = until
        # The last page whose reasoning and signatures prompts leave out.
        self.unsigned_to = 0
        # A capacity to be looked at, in place of the budget's: see `Session.edits.preview`.
        self.assumed: int | None = None
        self.set_counter(counter)
        self._load(info)

    def set_counter(self, counter: Counter) -> None:
        """Count what is appended from now on by another counter. The pages keep their counts; see `count_by`."""
        self.counter = counter
        self._exact = bool(getattr(counter, "exact", False)) or counter.name.startswith("chars/")
        # What a line of the kernel's own takes, about: it stands for a handle where none is made yet.
        self._line_cost = text_cost(counter, NO_RESULT)

    def count_by(self, counter: Counter) -> None:
        """Count by another counter from now on; all pages are counted again. Observations that are not written yet are kept.

        Raises:
            StoreCorrupt: the session cannot be read again; the old counter then stays.
        """
        old_counter, observed = self.counter, self.pending.events
        self.set_counter(counter)
        try:
            self._load(self._found() or self.info)
        except BaseException:
            self.set_counter(old_counter)
            raise
        self.take_over(observed)
        self.changes += 1

    def _load(self, info: SegmentInfo) -> None:
        """Read the state of a session from the store; if that fails, the old state stays.

        Raises:
            StoreCorrupt: it cannot be rebuilt. StoreStale: it was forgotten as a whole while it was read.
        """
        try:
            rebuilt = rebuild(self.backend, info, self.counter, until=self._until)
        except StoreCorrupt as error:
            if self._found() is None:
                raise self.overtaken() from error
            raise
        self.window, self.ledger, self.usage = rebuilt.window, rebuilt.ledger, rebuilt.usage
        self.lineage, self.work = rebuilt.lineage, rebuilt.work
        self.pending = Pending(rebuilt.head, info.used, info.used if info.number and info.head == rebuilt.head else None)
        # A branch may look into this cache.
        self.contents.clear()

    def searching(
        self,
        branches: Sequence[SegmentInfo] = (),
        *,
        alone: bool = False,
        is_shown: Callable[[int], bool] | None = None,
        by_words: bool = False,
        by_user: bool = False,
    ) -> Searcher:
        """Return a searcher over this session's state in memory, the pages that it inherited, and its branches.

        Args:
            alone: search only `branches`, in the state of the store.
            is_shown: returns whether the prompt shows a page; None for the pages that are whole in the window.
            by_words: search by words only.
            by_user: search only the user's messages, by words only.
        """
        vectors = None if by_words or by_user else self._vectors
        if alone:
            return Searcher(self.backend, self._ranking, vectors, branches)
        shares = {share.segment: share for share in self.lineage.shares}
        inherited = [SegmentInfo(number=number, name=self.info.name, created=0.0) for number in shares]
        windows = {info.number: self.window for info in (self.info, *inherited)}
        infos = [self.info, *inherited, *branches]
        owner = self.lineage.owner
        return Searcher(
            *(self.backend, self._ranking, vectors, infos),
            windows=windows,
            owner=owner,
            shown=is_shown,
            contents=self.contents,
            by_user=by_user,
        )

    def as_of(self, event: int) -> Kernel:
        """The session as it stood after an event, within this budget. Changes of it are to be looked at and undone: none can be
        written. Observations are to be taken over."""
        past = Kernel(self.backend, self.info, self.counter, self.budget, self.clock, self._ranking, self._vectors, until=event)
        past.contents.share(self.contents)
        return past

    def fork(self, parent: Kernel, fork: Fork, head: int | None = None, **more: Unpack[Data]) -> None:
        """Begin as a branch, in a session that is not written yet; the parent's pages are shared, not copied.

        Args:
            parent: the kernel of the other session, or that session as of an earlier event.
            head: the parent's last event by now; None for the kernel's.
            more: what else the ledger says of the fork.
        """
        if fork.at:
            self.window, self.usage = parent.window.copy(), parent.usage.copy()
            self._descend(parent.lineage.child(self.info.number, fork.known, fork.derived))
            self.contents.share(parent.contents)
        self.budget = self._settled = parent.budget
        self.pending.above = (parent.info.number, parent.pending.head if head is None else head)
        data: dict[str, Any] = {"tokenizer": self.counter.name, **msgspec.structs.asdict(fork), **more}
        self.observe(Act.NOTE, policy="kernel", **data)

    def _descend(self, lineage: Lineage) -> None:
        """See the pages of this lineage."""
        self.lineage = lineage
        self.window.pages.read, self.window.calls.find = reader_of(self.backend, lineage), finder_of(self.backend, lineage)

    # What other writers did

    def refresh(self) -> bool:
        """Check whether another writer continued this session; if so, everything is read again, and the cache of texts
        is emptied.

        Observations that are not written yet are kept.

        Raises:
            StoreStale: there are changes here that are not written. StoreCorrupt; the old state then stays.
        """
        info = self._found()
        if info is not None and self.pending.follows(info):
            self.pending.used = info.used if info.number else None
            return False
        if info is None or self.pending.changes_state or self.window.journal:
            raise self.overtaken()
        observed = self.pending.events
        self._load(info)
        self.take_over(observed)
        self.stale = False
        self.changes += 1
        return True

    def check_current(self) -> None:
        """Check that no other writer has changed this session since it was read; what they only observed is taken over.

        Raises:
            StoreStale: one has; reading something here, or reopening the session, shows the changes.
        """
        info = self._found()
        if info is None or not (self.pending.follows(info) or self._pass_observations()):
            raise self.overtaken()

    def _found(self) -> SegmentInfo | None:
        """The session as the store has it now; None if it is gone, or another one has its name."""
        if not self.info.number:
            return self.info
        info = self.backend.segment(self.info.name, time=0.0, create=False)
        return info if info is not None and info.number == self.info.number else None

    def _pass_observations(self) -> bool:
        """Continue after what other writers wrote since, if that is only what they observed; return whether it is."""
        info, pending = self._found(), self.pending
        if info is None or info.head <= pending.head or not self.info.number:
            return False
        events = list(islice(self.backend.events(self.info.number, pending.head), info.head - pending.head))
        pending_pages = {page for event in pending.events for page in event.pages}
        # Who used a page last must be the same in a replay.
        if not all(
            event.act in HARMLESS and (event.act is not Act.FAULT or pending_pages.isdisjoint(event.pages)) for event in events
        ):
            return False
        for event in events:
            self.ledger.count(event)
            self.usage.learn(event)
        pending.continue_from(info)
        return True

    def overtaken(self) -> StoreStale:
        """Mark this session as stale, and return the error to raise: another writer went on with it, so it has to be opened
        again."""
        self.stale = True
        return StoreStale(f"another writer went on with session {self.info.name!r}", advice="reopen the session")

    # What there is

    @property
    def capacity(self) -> int:
        """Counted tokens that the window holds: its budget, corrected by what providers reported.

        The correction leaves the pins and an eighth of the budget: a session can always go on.
        """
        if self.assumed is not None:
            return self.assumed
        whole = self.budget.capacity
        # What stands beside the pages is counted as they are: the correction is of both.
        beside = self.budget.overhead
        room = whole if self._exact else self.usage.calibrated.room(whole + beside) - beside
        if room >= whole:
            return room
        return max(room, min(whole, sum(map(self.window.cost, self.window.pins)) + whole // 8))

    @property
    def excess(self) -> int:
        """Tokens over the capacity, or 0."""
        return max(0, self.window.use - self.capacity)

    def closure(self, pages: Sequence[int]) -> list[int]:
        """All pages that forgetting these would forget, in order: these, and all that was derived or recalled from them (law 1).

        Raises:
            UnknownAddress, Forgotten, KernelError: no such page, a forgotten one, none or one twice.
        """
        check_known(self.window, pages)
        reached = fresh = set(pages)
        while fresh:
            fresh = self._made_from(fresh) - reached
            reached = reached | fresh
        return sorted(reached, key=abs)

    def _made_from(self, pages: Set[int]) -> set[int]:
        """The pages here that have any of these among their sources."""
        derived = {page.id for page in self.pending.new if not pages.isdisjoint(page.sources)}
        for owner in (*(share.segment for share in self.lineage.shares), self.info.number):
            cited = self.backend.citing(owner, pages) if owner else ()
            derived.update(page for by, page in cited if by == owner == self.lineage.owner(page))
        return {page for page in derived if page in self.window.pages and self.window.at(page) != Place.DROPPED}

    def text(self, page: int) -> str:
        """The exact text of a page.

        Raises:
            UnknownAddress, Forgotten. StoreCorrupt: the text was altered. StoreStale: another writer went on with the session,
                and may have forgotten the page.
        """
        window = self.window
        row = window.pages.get(page)
        if row is None:
            raise UnknownAddress(
                f"{address_of(page)} does not exist in this session", advice="use an address that a handle shows"
            )
        if window.states[page].at == Place.DROPPED:
            raise Forgotten(f"{address_of(page)} was forgotten", advice="nothing of it is kept")
        try:
            # A plan asks for thousands.
            return self.contents.get(row.digest) if row.digest else self.text_of(row)
        except StoreCorrupt:
            info = self._found()
            if info is None or not self.pending.follows(info):
                raise self.overtaken() from None
            raise

    def readable_text(self, page: int) -> str:
        """Return what a policy or a model can read of a page as text; see `readable`.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        text, row = self.text(page), self.window.pages[page]
        return readable(row, text, self.contents.get(row.extra)) if row.is_atomic else text

    def text_of(self, page: Page) -> str:
        """The exact text of a page that is not forgotten here.

        Raises:
            StoreCorrupt: altered; or another program has forgotten it since.
        """
        if not page.digest:
            raise StoreCorrupt(f"another program has just forgotten {page.address}", advice="read the session again")
        return self.contents.get(page.digest)

    def _needed(self) -> set[str]:
        return {digest for page in self.window.resident() for digest in (page.digest, page.extra)} | set(self.pending.texts)

    # Changes

    def take_in(self, messages: Sequence[Message], time: float | None = None) -> tuple[int, int]:
        """Admit messages into the window; returns the first and last page id.

        Args:
            time: when they were said, in seconds since the epoch; None for now.

        Raises:
            WireError, KernelError, LawBroken, PinsExceedWindow: nothing was admitted.
        """
        moment = max(self.clock(), self.pending.latest) if time is None else float(time)
        if not 0.0 <= moment <= LAST_TIME:
            raise KernelError(f"messages of the time {moment}", advice="give seconds since 1970, before the year 10000")
        cites = [message.cites for message in messages if message.cites]
        cited = self._cited(chain.from_iterable(cites)) if cites else {}
        pages, texts = pages_of(messages, self.window, self.counter, moment, cited)
        pinned = pins_on_arrival(pages, self.window, self.capacity)
        numbers = [page.id for page in pages]
        user_texts = [(page, texts[page.digest]) for page in pages if page.is_by_user]
        data: Data = self._orders_with(user_texts, pinned) if user_texts else {}
        data["to"] = {Place.IN: numbers}
        data["tokens"] = sum(page.tokens for page in pages)
        self.record(Act.ADMIT, numbers, new=pages, texts=texts, **data)
        for number, why in pinned.items():
            self.record(Act.PIN, [number], why=why)
        self.check_pins()
        for page in pages:
            if page.answers and self.window.stands_itself(page.answers) is None:
                self._join(page)
        return numbers[0], numbers[-1]

    def _orders_with(self, user_texts: Sequence[tuple[Page, str]], pinned: Collection[int]) -> Data:
        """Return the standing orders, for the event that admits these pages; nothing if they do not change."""
        window = self.window
        new = [(page, text, spans) for page, text in user_texts if (spans := capabilities.orders.find_orders(text))]
        if not new and not window.orders:
            return {}
        window.pages.fetch(window.orders)
        excluded = {page for page in window.orders if window.at(page) in GONE} | window.pins | set(pinned)
        orders = update_standing(new, window.orders, window.pages, self.capacity, excluded, self.text)
        return {} if orders == window.orders else {"standing": packed(orders)}

    def _cited(self, citations: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Page]:
        """The pages of other segments that are cited; those that never were are left out.

        Raises:
            Forgotten: one is, or all of its segment.
        """
        keys = {key for key in citations if key[0] != self.info.number and max(map(abs, key)) < LARGEST}
        rows = self.backend.read(keys) if keys else {}
        for (segment, page), (_, state) in rows.items():
            if state.at is Place.DROPPED:
                message = f"{address_of(page)} of segment {segment}, of which this was made, was forgotten"
                raise Forgotten(message, advice="make it anew")
        if lost := {segment for segment, _ in keys - rows.keys()}:
            whole = {info.number for info in self.backend.segments() if info.kind is SegmentKind.FORGOTTEN} & lost
            if whole:
                message = f"segment {min(whole)}, of which this was made, was forgotten as a whole"
                raise Forgotten(message, advice="make it anew")
        return {key: page for key, (page, _) in rows.items()}

    def _join(self, late: Page) -> None:
        """Bring back the call of a late result, which had left without one. If it cannot be in the window any more, or
        does not fit beside an open tool loop, the result leaves too, and has a handle (law 6)."""
        point = self.savepoint()
        try:
            self.carry(Load(pages=(late.answers,), why="its result came"), policy="kernel", cause="admit")
            if self._fits_beside_loop(late):
                return
            why = "its call does not fit beside the open tool loop"
        except KernelError:
            why = "its call cannot come back"
        self.undo(point)
        self.carry(Evict(pages=(late.id,), why=why), policy="kernel", cause="admit")

    def _fits_beside_loop(self, late: Page) -> bool:
        """Whether a late result's group, with its results as stubs, fits beside an open tool loop and one handle for the rest."""
        window = self.window
        loop = open_loop(window, FORCED_PATIENCE)
        back = {page for page in window.group(late.id) if window.at(page) == Place.IN and not window.pages[page].answers}
        stays = back.union(loop, window.pins, window.request_shown())
        handles = self._line_cost * (1 + len(window.group(late.id)) - len(back))
        return not loop or sum(map(window.cost, stays)) + handles <= self.capacity

    def check_pins(self) -> None:
        """Law 2 against law 3: the pins must fit, with one handle for the rest where not every page is pinned.

        Raises:
            PinsExceedWindow: they do not.
        """
        window = self.window
        if not window.pins:
            return
        minimum = sum(map(window.cost, window.pins)) + self._line_cost
        if minimum > self.capacity and len(window.pins) == len(window.pages):
            # There is no rest. (To count the pages takes long, so it is done last.)
            minimum -= self._line_cost
        if minimum > self.capacity:
            raise pins_exceed(window, self.budget, self.capacity, minimum)

    def carry(self, move: Move, *, policy: str = "user", cause: str = "user", depth: int = 1, closed: bool = False) -> int | None:
        """Carry out one move inside the current batch; returns the id of a derived page, or None.

        Args:
            closed: whether the pages of a `Drop` are a `closure`.

        Raises:
            LawBroken, KernelError: the move is illegal, or not a move; the caller undoes to its savepoint.
        """
        window = self.window
        move = as_move(move)
        if isinstance(move, Fold) and policy != "kernel":
            move = self._with_ends(move)
        match move:
            case Load():
                change, act = check_load(window, move), Act.LOAD
            case Evict():
                forced = policy == "kernel"
                change, act = check_evict(window, move, FORCED_PATIENCE if forced else PATIENCE, forced=forced), Act.EVICT
            case Retire():
                change, act = check_retire(window, move), Act.RETIRE
            case Fold():
                change, act = check_fold(window, move, depth), Act.FOLD
            case Bring():
                # For the ledger it is a fold that stands for nothing.
                change, act = check_bring(window, move), Act.FOLD
            case _:
                if policy != "user":
                    raise LawBroken(1, "a policy may not forget", advice="retire or evict; only a person forgets")
                if not closed:
                    move = Drop(pages=tuple(self.closure(move.pages)), why=move.why)
                dropped = set(move.pages)
                if held_pins := sorted(window.pins & partners_of(window, dropped)):
                    # No pin stands in the way of forgetting: in other segments it is done already.
                    self.record(Act.UNPIN, held_pins, policy=policy, cause=cause, why="what belongs to it was forgotten")
                change, act = check_drop(window, dropped), Act.DROP
        # A person may forget or retire the request; the kernel evicts it last.
        if policy != "kernel" and not (policy == "user" and act in (Act.DROP, Act.RETIRE)) and not self._keeps_ends(move):
            check_held(window, change)
        if policy not in ("kernel", "user"):
            check_standing(window, move, change)
        data: Data = {"to": change.places}
        if policy == "user" and (dropped := {page for page in window.orders if _leaves(change, window.stands_itself(page))}):
            # A person lets go of it.
            data["standing"] = packed({page: sentences for page, sentences in window.orders.items() if page not in dropped})
        derived, texts = self._derived(move, change) if isinstance(move, Fold | Bring) else (None, {})
        if derived is not None:
            data["fold"] = derived.id
            if not change.cited:
                data["cover"] = list(change.cover)
        if change.uncover:
            data["uncover"] = change.uncover
        if isinstance(move, Retire) and move.by:
            data["by"] = move.by
        new = [] if derived is None else [derived]
        self.record(act, move.pages, new=new, texts=texts, policy=policy, cause=cause, why=move.why, **data)
        return None if derived is None else derived.id

    def _with_ends(self, move: Fold) -> Fold:
        """Adds head and tail to an excerpt of the user's latest message, while that is the latest message of all."""
        window = self.window
        page = window.pages.get(move.pages[0]) if len(move.pages) == 1 and move.keep else None
        if page is None or page.id not in window.request or page.message != window.turn:
            return move
        end = len(self.text(page.id))
        merged: list[Span] = []
        for start, stop in sorted([(0, min(ENDS, end)), *move.keep, (max(0, end - ENDS), end)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return msgspec.structs.replace(move, keep=tuple(merged))

    def _keeps_ends(self, move: Move) -> bool:
        """Whether a move puts an excerpt of one page, with its head and tail, in that page's place."""
        if not isinstance(move, Fold) or len(move.pages) != 1 or not move.keep:
            return False
        return move.keep[0][0] == 0 and move.keep[-1][1] == len(self.text(move.pages[0]))

    def _derived(self, move: Fold | Bring, change: LegalMove) -> tuple[Page, dict[str, str]]:
        """The page that a checked move makes, and the texts of its digests."""
        single = isinstance(move, Fold) and len(move.pages) == 1
        extra = self.contents.get(self.window.pages[move.pages[0]].extra) if single else ""
        page, text, leftovers = derived_page(
            move, change, self.window, self.counter, max(self.clock(), self.pending.latest), self.text, extra
        )
        if page.kind is Kind.EXCERPT:
            pieces = pieces_of(page, text, lambda source: self.window.pages[source].digest, self.text)
            self.pending.pieces |= {page.digest: pieces} if pieces is not None else {}
        return page, {page.digest: text, page.extra: leftovers} if page.extra else {page.digest: text}

    def mark(self, act: Act, pages: Sequence[int], why: str = "", **data: Unpack[Data]) -> None:
        """Pin or unpin pages, or set their importance (from 0 to 1), inside the current batch.

        Raises:
            PinsExceedWindow: the pins would not fit; the caller undoes. UnknownAddress, Forgotten, StoreCorrupt.
        """
        for page in pages:
            self.text(page)
        self.record(act, pages, policy="user", cause="user", why=why, **data)
        if act is Act.PIN:
            self.check_pins()

    def rebudget(self, budget: Budget) -> None:
        """Take another budget, as a part of the batch."""
        old_budget, self.budget, self.pending.budget = self.budget, budget, budget
        self.window.journal.append(lambda: setattr(self, "budget", old_budget))

    # The batch

    @contextmanager
    def batch(self, *, undone: bool = False) -> Iterator[None]:
        """All changes inside are written together at the end, or undone.

        Args:
            undone: whether they are undone in any case: what they would lead to is to be seen.

        Raises:
            KernelError: within another batch.
        """
        with self.lock:
            self.check_free()
            try:
                self.busy = True
                yield
                self.undo() if undone else self.flush()
                self.busy = False
            except BaseException as error:
                self.fail(error)
                raise

    @contextmanager
    def alone(self, beside: Iterable[int] = ()) -> Iterator[None]:
        """See `SegmentContents.alone`."""
        with self.lock:
            self.check_free()
            observed = list(self.pending.events)
            try:
                with self.backend.together([self.info.number, *beside]):
                    yield
            except BaseException:
                # What was written in it, and maybe read again, is not there.
                self._broken = True
                with suppress(KilburnError):
                    self._recover()
                    self.take_over(observed)
                raise

    def fail(self, error: BaseException) -> None:
        """The batch failed: restore the state before it.

        After one of our own errors, the journal leads back. Anything else, such as Ctrl-C, may have interrupted a
        step. Then everything is read again from the store, which knows whether the batch was written.
        """
        self._broken, self.busy = True, False
        if isinstance(error, (KilburnError, GeneratorExit)):
            self.undo()
            self._broken = False
            return
        try:
            self._recover()
        except KilburnError as second:
            # The next call tries again.
            error.add_note(f"and reading the session anew: {second}")

    def check_free(self) -> None:
        """Check that no batch is open, and that the state is whole.

        Raises:
            KernelError: this thread is within a batch. StoreError: the state cannot be read again.
        """
        if self.busy:
            raise KernelError(
                f"session {self.info.name!r} is in the middle of a change",
                advice="call it when that has returned, not from within",
            )
        if self._broken:
            self._recover()

    def _recover(self) -> None:
        self.budget = self._settled
        self._load(self._found() or self.info)
        self.changes += 1
        self._broken = False

    def savepoint(self) -> Savepoint:
        """A point inside a batch for `undo`."""
        return Savepoint(len(self.window.journal), len(self.pending.events), len(self.pending.new))

    def undo(self, point: Savepoint = START) -> None:
        """Undo the batch, back to a savepoint or whole; observations are kept."""
        self.window.rollback(point.journal)
        self.usage.forget(self.pending.undo(point, self.window.turn))

    def flush(self, *, wait: bool = True, closing: bool = False) -> None:
        """Write the batch in one transaction; without `wait` it does not wait for another writer.

        Args:
            closing: whether this is the last for now; then also a short rest of the ledger gets a checkpoint.
        """
        pending, window = self.pending, self.window
        work = self.work + work_of(pending.events)
        due = work >= (SHORT if closing else max(LONG, (window.last - window.last_derived) // SHARE))
        if pending.events or (due and self.info.number and not self.backend.readonly):
            if self.backend.readonly:
                raise StoreReadOnly("this store was opened for reading", advice="open it without readonly=True to write")
            changed = window.changed()
            # A copy: if the commit fails, nothing was counted.
            ledger = self.ledger.copy() if due else self.ledger
            batch = pending.batch(window.pages, changed, self.lineage.owns, wait=wait)
            if due:
                for event in pending.events:
                    ledger.count(event)
                batch.checkpoint = checkpoint_of(window, ledger, self.usage)
            try:
                if self.info.number:
                    self.backend.commit(self.info.number, batch)
                else:
                    self.info = self.backend.begin(self.info.name, batch, time=self.info.created, user=self.info.user)
                    pending.used = self.info.used
                    self._descend(self.lineage._replace(segment=self.info.number))
            except StoreStale:
                if self._pass_observations():
                    self.flush(wait=wait, closing=closing)
                    return
                # Without another writer here, a page elsewhere has come in the way, or gone.
                info = self._found() if self.info.number else None
                self.stale = self.stale or info is None or not pending.follows(info)
                if not self.stale:
                    self._cited(key for page in pending.new for key in page.cites)
                raise
            pending.head += len(pending.events)
            if pending.events:
                pending.latest = pending.events[-1].time
            pending.used = None if pending.used is None else pending.latest
            if not due:
                for event in pending.events:
                    ledger.count(event)
            self.ledger, self.work = ledger, 0 if due else work
            pending.clear()
            window.pages.settle(window.last_derived, window.last)
            # An excerpt that another one has replaced is hardly ever asked for again.
            if replaced := [page for page in changed if page < 0 and page not in window.shown]:
                window.pages.drop(replaced)
        self._settled = self.budget
        self.changes += window.keep()

    # The ledger

    def note_counter(self) -> None:
        """Record which counter the costs come from."""
        if self.usage.tokenizer != self.counter.name:
            self.record(Act.NOTE, tokenizer=self.counter.name)

    def record(
        self,
        act: Act,
        pages: Sequence[int] = (),
        *,
        new: Sequence[Page] = (),
        texts: Mapping[str, str] | None = None,
        policy: str = "kernel",
        cause: str = "",
        why: str = "",
        **data: Unpack[Data],
    ) -> None:
        """Add an event to the batch, and make its change.

        Args:
            new: pages that come with it; `texts` are those of their digests.
            data: what is particular to the act; at another boundary than the window's, `cached` is the use of the level
                above it.
        """
        for digest, text in (texts or {}).items():
            self.pending.texts[digest] = text
            self.contents.keep(digest, text)
        pending = self.pending
        event = Event(
            number=pending.head + len(pending.events) + 1,
            act=act,
            time=self.clock(),
            turn=max(self.window.turn, new[-1].message) if new else self.window.turn,
            pages=tuple(pages),
            policy=policy,
            cause=cause,
            why=why,
            data=data,
        )
        event, latest = writable(event), pending.events[-1].time if pending.events else pending.latest
        if event.time < latest:
            (event,) = in_order([event], event.number - 1, latest)
        self.pending.new += new
        self.window.enact(event, {page.id: page for page in new})
        if act is Act.CACHE:
            event = msgspec.structs.replace(event, boundary="kv", tokens=int(data["cached"]))
        else:
            event = msgspec.structs.replace(event, tokens=self.window.use)
        self.pending.events.append(event)
        self.usage.learn(event, self.window.journal.append)

    def observe(
        self,
        act: Act,
        pages: Sequence[int] = (),
        *,
        policy: str = "user",
        cause: str = "",
        why: str = "",
        **data: Unpack[Data],
    ) -> None:
        """Record an observation; it is written with the next batch, or when there are many.

        A reader neither waits nor fails if it cannot be written. If there are too many, the older half is dropped,
        and a note in the ledger says how many.
        """
        self.record(act, pages, policy=policy, cause=cause, why=why, **data)
        if len(self.pending.events) >= GATHERED and not self.flush_observed():
            lost, newer = self.pending.halve()
            self.record(Act.NOTE, lost=lost)
            self.pending.add(newer)

    def take_over(self, observed: Iterable[Event]) -> None:
        """Add observations that were made of another state of this session, to be written as if they were made of this one: the
        turns of a ledger never go back."""
        events = [msgspec.structs.replace(event, turn=max(event.turn, self.window.turn)) for event in observed]
        self.pending.add(events)
        for event in events:
            self.usage.learn(event)

    def flush_observed(self) -> bool:
        """Write the observations, if that is possible at once; not inside a batch."""
        if self.window.journal or self.pending.new or self.pending.changes_state:
            return True
        try:
            self.flush(wait=False)
        except StoreError:
            return False
        return True


def _leaves(change: LegalMove, page: int | None) -> bool:
    return page is not None and change.at.get(page, Place.IN) != Place.IN

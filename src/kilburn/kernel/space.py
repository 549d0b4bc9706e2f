"""One process's address space: its pages, its window, its ledger, and the batch that is being written.

Every change is a batch: enacted on the tier, written to the store in one transaction; if anything
fails, tier and store are as they were. What may change, and how, is the kernel's business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from kilburn.budget import Budget, Counter
from kilburn.errors import (
    Forgotten,
    KernelError,
    KilburnError,
    StoreCorrupt,
    StoreError,
    StoreReadOnly,
    StoreStale,
    UnknownAddress,
)
from kilburn.event import STATE, Act, Event, writable
from kilburn.kernel.admission import cost_of, framing, text_cost
from kilburn.kernel.contents import Contents
from kilburn.kernel.folding import shown_part
from kilburn.kernel.ledger import Ledger, apply
from kilburn.kernel.pending import START, Pending, Savepoint
from kilburn.kernel.render import PENDING, part_of
from kilburn.kernel.tier import Tier
from kilburn.model import is_count
from kilburn.page import Page, Place, address_of
from kilburn.policy import Use
from kilburn.store import ProcessInfo, Store
from kilburn.tokens.calibrated import Calibrated
from kilburn.wire.messages import OPENING
from kilburn.wire.sent import sent_name

__all__ = ["AddressSpace"]

GATHERED = 256
"""Observations that wait for a commit at most."""

LOADED = ("calibrated", "tier", "ledger", "uses", "contents", "pending", "_ruler")
"""What `refresh` reads anew."""

SENSELESS = (LookupError, ValueError, TypeError, ArithmeticError, AttributeError)
"""What replaying an event raises that does not fit the pages, or whose data is not what its act has."""


class AddressSpace:
    """Pages, tier, ledger and store of one process, moved together.

    Args:
        clock: seconds since the epoch; the only clock there is.
    """

    def __init__(self, store: Store, info: ProcessInfo, counter: Counter, budget: Budget, clock: Callable[[], float]) -> None:
        self.store, self.info, self.counter, self.budget, self.clock = store, info, counter, budget, clock
        self.lock = threading.RLock()
        self._waiting = text_cost(counter, PENDING)
        self._opening = text_cost(counter, OPENING)
        self._fixed = bool(getattr(counter, "exact", False)) or counter.name.startswith("chars/")
        self.stale = False
        self.changes = 0
        # In the middle of a batch; and where one ended in a way that the journal does not lead back from.
        self._busy = self._broken = False
        self._settled = budget
        self._load()

    def _load(self) -> None:
        """All that is known of the process, from the store."""
        self.calibrated = Calibrated(self.counter)
        self.tier = Tier(lambda line: text_cost(self.counter, line))
        self.ledger = Ledger()
        self.uses: dict[int, Use] = {}
        self.contents = Contents(self.store, self._needed)
        self.pending = Pending()
        self._ruler = ""
        self._restore()

    def refresh(self) -> bool:
        """See whether another writer went on with this process; if so all is read anew, and texts at hand are let go.

        What was only observed here and is not written yet stays noted.

        Raises:
            StoreStale: there are changes here that are not written. StoreCorrupt; the state is then the one before.
        """
        if self._is_current():
            return False
        observed = self.pending.events
        if any(event.act in STATE for event in observed) or self.tier.mark() or not self._is_there():
            raise self._overtaken()
        before = {name: getattr(self, name) for name in LOADED}
        try:
            self._load()
        except BaseException:
            for name, value in before.items():
                setattr(self, name, value)
            raise
        self.pending.events = [
            msgspec.structs.replace(event, number=number) for number, event in enumerate(observed, self.pending.next)
        ]
        self.stale = False
        self.changes += 1
        return True

    def check_current(self) -> None:
        """See that nobody else wrote to this process since it was read.

        Raises:
            StoreStale: somebody did; reading something here, or reopening it, shows what.
        """
        if not self._is_current():
            raise self._overtaken()

    def _is_current(self) -> bool:
        found = self.store.process(self.info.name, time=0.0, create=False)
        return found is not None and found.number == self.info.number and found.head == self.pending.head

    def _is_there(self) -> bool:
        found = self.store.process(self.info.name, time=0.0, create=False)
        return found is not None and found.number == self.info.number

    def _overtaken(self) -> StoreStale:
        self.stale = True
        return StoreStale(f"another writer went on with session {self.info.name!r}", advice="reopen the process")

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now."""
        tier = self.tier
        waiting = (
            sum(self._waiting + self.counter.count(sent_name(None, tier.pages[call].call)) for call in tier.waiting())
            if tier.open
            else 0
        )
        return tier.use + waiting + (0 if tier.opens_with_user() else self._opening)

    @property
    def capacity(self) -> int:
        """Counted tokens that the window holds: its budget, corrected by what providers reported.

        The correction leaves the pins and an eighth of the budget: a session can always go on.
        """
        whole = self.budget.capacity
        room = whole if self._fixed else self.calibrated.room(whole)
        if room >= whole:
            return room
        return max(room, min(whole, sum(self.tier.cost(page) for page in self.tier.pins) + whole // 8))

    @property
    def excess(self) -> int:
        """Tokens over the capacity, or 0."""
        return max(0, self.use - self.capacity)

    def text(self, page: int) -> str:
        """The exact text of a page.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        known = self.tier.pages.get(page)
        if known is None:
            raise UnknownAddress(
                f"{address_of(page)} does not exist in this process", advice="use an address that a handle shows"
            )
        if self.tier.at(page) == Place.DROPPED:
            raise Forgotten(f"{address_of(page)} was forgotten", advice="nothing of it is kept")
        return self.contents.get(known.digest)

    def _needed(self) -> set[str]:
        return {digest for page in self.tier.resident() for digest in (page.digest, page.extra)} | set(self.pending.texts)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All that happens inside is written together at the end, or undone.

        Raises:
            KernelError: within another batch.
        """
        with self.lock:
            self.begin()
            try:
                yield
                self.flush()
            except BaseException as error:
                self.fail(error)
                raise
            self.end()

    def begin(self) -> None:
        """Start a batch; whoever does holds the lock.

        Raises:
            KernelError: this thread is within one already: a policy or a signal handler calls its own process.
        """
        self.check_free()
        self._busy = True

    def end(self) -> None:
        """The batch is written."""
        self._busy = False

    def fail(self, error: BaseException) -> None:
        """The batch failed: go back to the state before it.

        After an error of ours the journal leads back. Anything else may have come in the middle of a step, as
        Ctrl-C does: then all is read anew from the store, which knows whether the batch was written.
        """
        self._broken, self._busy = True, False
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
        """See that no batch is being written, and that the state is whole.

        Raises:
            KernelError: this thread is within a batch. StoreError: the state cannot be read anew.
        """
        if self._busy:
            raise KernelError(
                f"session {self.info.name!r} is in the middle of a change",
                advice="call it when that has returned, not from within",
            )
        if self._broken:
            self._recover()

    def _recover(self) -> None:
        self.budget = self._settled
        self._load()
        self.changes += 1
        self._broken = False

    def savepoint(self) -> Savepoint:
        """A point inside a batch for `undo`."""
        return self.pending.savepoint(self.tier.mark())

    def undo(self, point: Savepoint = START) -> None:
        """Undo the batch, back to a savepoint or whole; what was only observed stays noted."""
        self.tier.rollback(point.mark)
        for page in self.pending.undo(point):
            self.uses.pop(page.id, None)

    def set_aside(self) -> Pending:
        """Take the batch out of sight while a model is waited for: everybody else sees the state before it."""
        self.tier.rollback()
        self._busy = False
        batch = self.pending.take()
        for page in batch.new:
            self.uses.pop(page.id, None)
        return batch

    def take_up(self, batch: Pending) -> None:
        """Go on with a batch that was set aside; the state must be the one that it was set aside from."""
        if batch.budget is not None:
            self.rebudget(batch.budget)
        pages = {page.id: page for page in batch.new}
        for digest, text in batch.texts.items():
            self.contents.keep(digest, text)
        for event in batch.events:
            apply(event, pages, self.tier)
            if event.act is Act.ADMIT:
                self._note_use(event)
        self.pending.put(batch)

    def give_up(self, batch: Pending) -> None:
        """Let go of a batch that was set aside; what was only observed stays noted."""
        observed = Pending()
        observed.events = [event for event in batch.events if event.act not in STATE]
        self.pending.put(observed)

    def rebudget(self, budget: Budget) -> None:
        """Take another budget, as a part of the batch."""
        before, self.budget, self.pending.budget = self.budget, budget, budget
        self.tier.on_rollback(lambda: setattr(self, "budget", before))

    def flush(self, *, wait: bool = True) -> None:
        """Write the batch: one transaction; without `wait` never behind another writer."""
        pending = self.pending
        if pending.events:
            if self.store.readonly:
                raise StoreReadOnly("this store was opened for reading", advice="open it without readonly=True to write")
            try:
                self.store.commit(self.info.number, pending.batch(self.tier.states, wait=wait))
            except StoreStale:
                self.stale = True
                raise
            pending.head += len(pending.events)
            for event in pending.events:
                self.ledger.note(event, self.tier)
            pending.clear()
        self.changes += self.tier.mark() > 0
        self._settled = self.budget
        self.tier.begin()

    def _restore(self) -> None:
        """Rebuild tier and ledger by replaying the log (law 8).

        Raises:
            StoreCorrupt: the ledger has a hole, or an event that does not fit what was there before it.
        """
        events = list(self.store.events(self.info.number))
        # After the events: another process may be appending, and a page that no event names yet does no harm.
        pages = {page.id: page for page, _ in self.store.pages(self.info.number)}
        for event in events:
            where = f"event {self.pending.next} of session {self.info.name!r}"
            if event.number != self.pending.next:
                raise StoreCorrupt(f"{where} is missing", advice="run `kilburn fsck`")
            self.pending.head = event.number
            try:
                apply(event, pages, self.tier)
                self.ledger.note(event, self.tier)
                self._note_use(event)
            except (KilburnError, *SENSELESS) as error:
                why = error.what if isinstance(error, KilburnError) else f"{type(error).__name__}: {error}"
                raise StoreCorrupt(f"{where} ({event.act}) makes no sense: {why}", advice="run `kilburn fsck`") from error
            # A replay is never undone; its journal, kept whole, took hundreds of megabytes.
            self.tier.begin()
        if self._ruler not in ("", self.counter.name):
            kept = [page for page in pages.values() if page.id in self.tier.pages and self.tier.at(page.id) != Place.DROPPED]
            self.contents.fetch(digest for page in kept for digest in (page.digest, page.extra))
            self.tier.reprice({page.id: self._recount(page) for page in kept})

    def _recount(self, page: Page) -> int:
        """What a page costs by this process's counter, where it was admitted under another one."""
        part, leftovers = part_of(page, self.contents.get(page.digest), self.contents.get(page.extra))
        if page.depth:
            part = shown_part(page, part.text, self.tier)
        return cost_of(self.counter, part, page.role, leftovers) + framing(self.counter, page.role, page.order[0])

    def settle_ruler(self) -> None:
        """Remember which counter the costs are by."""
        if self._ruler != self.counter.name:
            self.note(Act.NOTE, tokenizer=self.counter.name)

    def note(
        self, act: Act, pages: Sequence[int] = (), *, policy: str = "kernel", cause: str = "", why: str = "", **data: Any
    ) -> None:
        """Write an event into the batch. Observations may wait for the next commit; moves never do.

        At another boundary than the window's, `cached` of the data is the use of the level above it.
        """
        at = {"boundary": "kv", "tokens": int(data["cached"])} if act is Act.CACHE else {"tokens": self.use}
        event = writable(
            Event(
                number=self.pending.next,
                act=act,
                time=self.clock(),
                turn=self.tier.turn,
                pages=tuple(pages),
                policy=policy,
                cause=cause,
                why=why,
                data=data,
                **at,
            )
        )
        self.pending.events.append(event)
        self._note_use(event)

    def observe(self, act: Act, pages: Sequence[int] = (), *, policy: str = "user", cause: str = "", **data: Any) -> None:
        """Note what changed nothing; it is written with the next batch, or when many have gathered.

        Whoever only reads neither waits nor fails because it cannot be written: then the older half goes,
        and a note in the ledger says how many.
        """
        self.note(act, pages, policy=policy, cause=cause, **data)
        if len(self.pending.events) >= GATHERED and not self.flush_observed():
            self._lose_observed()

    def flush_observed(self) -> bool:
        """Write what was only observed, if that can be done at once; nothing inside a batch."""
        pending = self.pending
        if self.tier.mark() or pending.new or any(event.act in STATE for event in pending.events):
            return True
        try:
            self.flush(wait=False)
        except StoreError:
            return False
        return True

    def _lose_observed(self) -> None:
        pending = self.pending
        old, kept = pending.events[: GATHERED // 2], pending.events[GATHERED // 2 :]
        lost = sum(int(event.data.get("lost", 1)) if event.act is Act.NOTE else 1 for event in old)
        pending.events = []
        self.note(Act.NOTE, lost=lost)
        for event in kept:
            pending.events.append(msgspec.structs.replace(event, number=pending.next))

    def _note_use(self, event: Event) -> None:
        """Count how pages are used, and learn what prompts really cost."""
        if event.act is Act.ADMIT:
            for page in event.pages:
                self.uses[page] = Use(0, event.turn, event.time)
        elif event.act in (Act.FAULT, Act.LOAD, Act.FOLD):
            # A fold may cite thousands of pages: only those that it takes along now are used, and those
            # that were used as often share one entry.
            more = int(event.act is not Act.FOLD)
            pages = event.pages if more else event.data["to"].get(Place.FOLDED, ())
            counts = {page: before.count if (before := self.uses.get(page)) else 0 for page in pages}
            entries = {count: Use(count + more, event.turn, event.time) for count in set(counts.values())}
            self.uses.update({page: entries[count] for page, count in counts.items()})
        elif event.act is Act.NOTE:
            self._ruler = event.data.get("tokenizer", self._ruler)
        elif event.act is Act.USAGE:
            counted, prompt = event.data.get("counted"), event.data.get("prompt")
            if is_count(counted) and is_count(prompt):  # another version may have written anything
                self.calibrated.observe(counted, prompt)

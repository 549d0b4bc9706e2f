"""The kernel of one process: the only code that changes where pages are.

Every operation is one batch: checked, enacted on the tier, written to the store in one transaction;
if anything fails, tier and store are as they were. Policies propose (`planning`), the laws check
(`laws`), this moves. It refuses to choose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from kilburn.budget import Budget, Counter
from kilburn.errors import Forgotten, LawBroken, PinsExceedWindow, StoreCorrupt, StoreReadOnly, StoreStale, UnknownAddress
from kilburn.event import Act, Event
from kilburn.kernel.admission import cost_of, pages_of, pins_on_arrival, text_cost
from kilburn.kernel.contents import Contents
from kilburn.kernel.folding import arguments_of, derived_page
from kilburn.kernel.laws import Change, check_drop, check_evict, check_fold, check_load, check_retire, closure_of_drop
from kilburn.kernel.ledger import Ledger, apply
from kilburn.kernel.pending import START, Pending, Savepoint
from kilburn.kernel.render import PENDING
from kilburn.kernel.tier import OUT, Tier
from kilburn.message import Kind, Message
from kilburn.move import Drop, Evict, Fold, Load, Move, Retire
from kilburn.page import Page, address_of, parse_address
from kilburn.policy import Use
from kilburn.store import ProcessInfo, Store
from kilburn.tokens.calibrated import Calibrated
from kilburn.wire.messages import OPENING

__all__ = ["Kernel"]

GATHERED = 256
"""Observations that wait for a commit at most."""


class Kernel:
    """Pages, tier, ledger and store of one process, moved together.

    Args:
        clock: seconds since the epoch; the only clock there is.
    """

    def __init__(self, store: Store, info: ProcessInfo, counter: Counter, budget: Budget, clock: Callable[[], float]) -> None:
        self.store, self.info, self.counter, self.budget, self.clock = store, info, counter, budget, clock
        self.lock = threading.RLock()
        self.calibrated = Calibrated(counter)
        self._waiting = text_cost(counter, PENDING)
        self._opening = text_cost(counter, OPENING)
        self._fixed = bool(getattr(counter, "exact", False)) or counter.name.startswith("chars/")
        self.tier = Tier(lambda line: text_cost(counter, line))
        self.ledger = Ledger()
        self.uses: dict[int, Use] = {}
        self.contents = Contents(store, self._needed)
        self.pending = Pending()
        self._ruler = ""
        self.stale = False
        self._restore()

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now."""
        tier = self.tier
        waiting = (
            sum(self._waiting + self.counter.count(tier.pages[call].call or "") for call in tier.waiting()) if tier.open else 0
        )
        return tier.use + waiting + (0 if tier.opens_with_user() else self._opening)

    @property
    def capacity(self) -> int:
        """Counted tokens that the window holds: its budget, corrected by what providers reported."""
        return self.budget.capacity if self._fixed else self.calibrated.room(self.budget.capacity)

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
        if self.tier.at(page) == "dropped":
            raise Forgotten(f"{address_of(page)} was forgotten", advice="nothing of it is kept")
        return self.contents.get(known.digest)

    def resolve(self, address: str) -> list[int]:
        """The page ids that an address names, retired ones included.

        Raises:
            UnknownAddress: not an address, or beyond the last page. Forgotten: all of it was dropped.
        """
        first, last = parse_address(address)
        tier = self.tier
        if first not in tier.pages or last not in tier.pages:
            known = f"this process has p1-p{tier.last}" if tier.last else "this process has no pages yet"
            raise UnknownAddress(f"{address} does not exist in {self.info.name!r}", advice=known)
        found = [page for page in range(first, last + 1) if tier.at(page) != "dropped"]
        if not found:
            raise Forgotten(f"{address} was forgotten", advice="nothing of it is kept")
        return found

    def closure(self, pages: Sequence[int]) -> list[int]:
        """All that a forget of these pages would forget, in order."""
        return sorted(closure_of_drop(self.tier, pages), key=abs)

    def forget_texts(self, gone: Sequence[int]) -> None:
        """Let go of all texts at hand, and of what is known of forgotten pages; what is still wanted is read again."""
        self.tier.scrub(gone)
        self.contents.clear()

    def _needed(self) -> set[str]:
        return {digest for page in self.tier.resident() for digest in (page.digest, page.extra)} | set(self.pending.texts)

    @contextmanager
    def batch(self) -> Iterator[None]:
        """All that happens inside is written together at the end, or undone."""
        with self.lock:
            try:
                yield
                self.flush()
            except BaseException:
                self.undo()
                raise

    def savepoint(self) -> Savepoint:
        """A point inside a batch for `undo`."""
        return self.pending.savepoint(self.tier.mark())

    def undo(self, point: Savepoint = START) -> None:
        """Undo the batch, back to a savepoint or whole; what was only observed stays noted."""
        self.tier.rollback(point.mark)
        for page in self.pending.undo(point):
            self.uses.pop(page.id, None)

    def flush(self) -> None:
        """Write the batch: one transaction."""
        pending = self.pending
        if pending.events:
            if self.store.readonly:
                raise StoreReadOnly("this store was opened for reading", advice="open it without readonly=True to write")
            try:
                self.store.commit(self.info.number, pending.batch(self.tier.states))
            except StoreStale:
                self.stale = True
                raise
            pending.head += len(pending.events)
            for event in pending.events:
                self.ledger.note(event, self.tier)
            pending.clear()
        self.tier.begin()

    def _restore(self) -> None:
        """Rebuild tier and ledger by replaying the log (law 8)."""
        events = list(self.store.events(self.info.number))
        # After the events: another process may be appending, and a page that no event names yet does no harm.
        pages = {page.id: page for page, _ in self.store.pages(self.info.number)}
        for event in events:
            if event.number != self.pending.next:
                raise StoreCorrupt(f"event {self.pending.next} of {self.info.name!r} is missing", advice="run kilburn fsck")
            self.pending.head = event.number
            apply(event, pages, self.tier)
            self.ledger.note(event, self.tier)
            self.note_use(event)
            # A replay is never undone; its journal, kept whole, took hundreds of megabytes.
            self.tier.begin()
        if self._ruler not in ("", self.counter.name):
            kept = [page for page in pages.values() if page.id in self.tier.pages and self.tier.at(page.id) != "dropped"]
            self.contents.fetch(digest for page in kept for digest in (page.digest, page.extra))
            self.tier.reprice({page.id: self._recount(page) for page in kept})

    def _recount(self, page: Page) -> int:
        """What a page costs by this process's counter, where it was admitted under another one."""
        text, extra = self.contents.get(page.digest), self.contents.get(page.extra)
        shown = arguments_of(text) if page.depth and page.sources[0] in self.tier.calls.values() and page.call else text
        kind = Kind.RESULT if page.depth and page.message else page.kind
        return cost_of(self.counter, kind, shown, page.call, page.name) + (self.counter.count(extra) if len(extra) > 200 else 0)

    def settle_ruler(self) -> None:
        """Remember which counter the costs are by."""
        if self._ruler != self.counter.name:
            self.note(Act.NOTE, tokenizer=self.counter.name)

    def note(
        self, act: Act, pages: Sequence[int] = (), *, policy: str = "kernel", cause: str = "", why: str = "", **data: Any
    ) -> None:
        """Write an event into the batch. Observations may wait for the next commit; moves never do."""
        event = Event(
            number=self.pending.next,
            act=act,
            time=self.clock(),
            turn=self.tier.turn,
            pages=tuple(pages),
            policy=policy,
            cause=cause,
            why=why,
            tokens=self.use,
            data=data,
        )
        self.pending.events.append(event)
        self.note_use(event)

    def observe(self, act: Act, pages: Sequence[int] = (), *, policy: str = "user", cause: str = "", **data: Any) -> None:
        """Note what changed nothing; it is written with the next batch, or when many have gathered."""
        self.note(act, pages, policy=policy, cause=cause, **data)
        if len(self.pending.events) >= GATHERED and self.tier.mark() == 0:
            self.flush()

    def note_use(self, event: Event) -> None:
        """Count how pages are used, and learn what prompts really cost."""
        if event.act is Act.ADMIT:
            for page in event.pages:
                self.uses[page] = Use(0, event.turn, event.time)
        elif event.act in (Act.FAULT, Act.LOAD, Act.FOLD):
            for page in event.pages:
                before = self.uses.get(page)
                self.uses[page] = Use((before.count if before else 0) + (event.act is not Act.FOLD), event.turn, event.time)
        elif event.act is Act.NOTE:
            self._ruler = event.data.get("tokenizer", self._ruler)
        elif event.act is Act.USAGE:
            self.calibrated.observe(int(event.data["counted"]), int(event.data["prompt"]))

    def take_in(self, messages: Sequence[Message]) -> tuple[int, int]:
        """Admit messages into the window; returns the first and last page id.

        Raises:
            WireError, LawBroken, PinsExceedWindow: nothing was admitted.
        """
        drafts = pages_of(messages, self.tier, self.counter, self.clock())
        pinned = pins_on_arrival(drafts, self.tier, self.capacity)
        for page in drafts.pages:
            self._add(page, drafts.texts)
            self.tier.set(page.id, msgspec.structs.replace(OUT, at="in", pinned=page.id in pinned))
        self.note(Act.ADMIT, [page.id for page in drafts.pages], to={"in": [page.id for page in drafts.pages]})
        for number, why in pinned.items():
            self.note(Act.PIN, [number], why=why)
        self.check_pins()
        return drafts.pages[0].id, drafts.pages[-1].id

    def _add(self, page: Page, texts: dict[str, str]) -> None:
        for digest in (page.digest, page.extra):
            if digest:
                self.pending.texts[digest] = texts[digest]
                self.contents.keep(digest, texts[digest])
        self.pending.new.append(page)
        self.pending.touched.add(page.id)
        self.tier.add(page, OUT if page.id < 0 else msgspec.structs.replace(OUT, at="folded"))

    def check_pins(self) -> None:
        """Law 2 against law 3: the pins, and one handle for the rest, must fit."""
        held = sum(self.tier.cost(page) for page in self.tier.pins)
        least = held + (text_cost(self.counter, PENDING) if len(self.tier.pins) < len(self.tier.pages) else 0)
        if self.tier.pins and least > self.capacity:
            raise PinsExceedWindow(f"pinned pages take {least} of {self.capacity} tokens")

    def carry(self, move: Move, *, policy: str = "user", cause: str = "user", depth: int = 1) -> int | None:
        """Carry out one move inside the current batch; returns the id of a derived page, or None.

        Raises:
            LawBroken, KernelError: the move is illegal; the caller undoes to its savepoint.
        """
        made: int | None = None
        match move:
            case Load():
                change, act = check_load(self.tier, move), Act.LOAD
            case Evict():
                change, act = check_evict(self.tier, move), Act.EVICT
            case Retire():
                change, act = check_retire(self.tier, move), Act.RETIRE
                self.pending.unindex.update(page for page in move.pages if page > 0)
            case Fold():
                change, act = check_fold(self.tier, move, depth), Act.FOLD
                made = self._derive(move, change)
            case _:
                if policy != "user":
                    raise LawBroken(1, "a policy may not forget", advice="retire or evict; only a person forgets")
                gone = sorted(closure_of_drop(self.tier, move.pages), key=abs)
                move = Drop(pages=tuple(gone), why=move.why)
                change, act = check_drop(self.tier, set(gone)), Act.DROP
        self.enact(change, made)
        data: dict[str, Any] = {"to": _by_place(change.at)}
        if made is not None:
            data |= {"fold": made, "cover": change.cover}
        if change.uncover:
            data["uncover"] = change.uncover
        if isinstance(move, Retire) and move.by:
            data["by"] = move.by
        self.note(act, move.pages, policy=policy, cause=cause, why=move.why, **data)
        return made

    def enact(self, change: Change, fold: int | None = None) -> None:
        """Put pages where a checked change says."""
        for source in change.uncover:
            self.tier.set_cover(source, None)
        for page, at in change.at.items():
            gone = at == "dropped"
            state = msgspec.structs.replace(self.tier.states[page], at=at)
            self.tier.set(page, msgspec.structs.replace(state, pinned=False, mark=0.0) if gone else state)
            self.pending.touched.add(page)
        if fold is not None:
            for source in change.cover:
                self.tier.set_cover(source, fold)
            self.tier.set(fold, msgspec.structs.replace(self.tier.states[fold], at="in"))

    def _derive(self, move: Fold, change: Change) -> int:
        page, text = derived_page(move, change, self.tier, self.counter, self.clock(), self.text)
        self._add(page, {page.digest: text})
        return page.id

    def mark(self, pages: Sequence[int], *, pinned: bool | None = None, importance: float | None = None, why: str = "") -> None:
        """Pin, unpin or mark pages inside the current batch.

        Raises:
            PinsExceedWindow: the pins would not fit; the caller undoes.
        """
        for page in pages:
            self.text(page)
            state = self.tier.states[page]
            if pinned is not None:
                state = msgspec.structs.replace(state, pinned=pinned)
            if importance is not None:
                state = msgspec.structs.replace(state, mark=importance)
            self.tier.set(page, state)
            self.pending.touched.add(page)
        if importance is not None:
            self.note(Act.REMEMBER, pages, policy="user", cause="user", why=why, mark=importance)
        if pinned is not None:
            self.note(Act.PIN if pinned else Act.UNPIN, pages, policy="user", cause="user", why=why)
        self.check_pins()


def _by_place(at: dict[int, str]) -> dict[str, list[int]]:
    places: dict[str, list[int]] = {}
    for page, where in at.items():
        places.setdefault(where, []).append(page)
    return places

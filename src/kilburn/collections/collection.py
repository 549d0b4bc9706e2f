"""A collection: a segment that nobody speaks in, such as the facts of a user or the passages of a document.

It has no window. Its pages are read from the store by number, never all at once, so one of a million pages is opened as
fast as an empty one. Each change is one transaction, checked and made by `collecting`. If another writer went on in the
meantime, the change is checked again against what is there now, and tried again.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, TypeVar, Unpack

import msgspec

from kilburn.arguments import checked
from kilburn.backend import Batch, SegmentInfo, SegmentKind, State
from kilburn.budget import Counter
from kilburn.collections.collecting import Change, Collecting, as_changes, held_of, is_true, keys_of
from kilburn.collections.names import NoteNames
from kilburn.collections.versions import Version, Versions
from kilburn.errors import Forgotten, KernelError, KilburnError, StoreCorrupt, StoreStale, UnknownAddress
from kilburn.event import STATE, Act, Data, Event, in_order, writable
from kilburn.forgetting.closure import Home, forget
from kilburn.kernel.pending import GATHERED, Pending
from kilburn.kernel.segment import ALONE, FREE, Segment
from kilburn.message import Kind
from kilburn.move import Add, Drop, Restore, Retire
from kilburn.page import Page, Place, address_of, parse_address

__all__ = ["Collection"]

T = TypeVar("T")

READ = 500
"""Pages that are read at a time."""

TRIES = 50
"""How often work is done again because another writer was faster; each of them has then written something."""

MOST = 10_000
"""Pages that one address may name here."""


def undisturbed(work: Callable[[], T], head: Callable[[], int] | None = None) -> T:
    """What `work` returns, which reads a collection and then writes with `seen`: done anew if another writer changed the
    collection in between.

    Args:
        head: the number of the collection's last event. With it, a text that is missing because somebody forgot it in between is
            such a change, too.

    Raises:
        StoreStale: so it went each time. Whatever `work` raises.
    """
    for _ in range(TRIES):
        before = head() if head is not None else 0
        try:
            return work()
        except StoreStale:
            continue
        except StoreCorrupt:
            if head is None or head() == before:
                raise
    return work()


@checked
class Collection(Segment):
    """A user's facts, a document, or notes, made by `Store.memory`, `Store.document` and `Store.notes`. Recall, pins, forgetting
    and the ledger are in `Segment`.

    Safe to use from several threads; calls are serialised.

    Args:
        clock: seconds since the epoch.
    """

    def __init__(self, home: Home, info: SegmentInfo, counter: Counter, clock: Callable[[], float]) -> None:
        super().__init__(home, threading.RLock(), counter)
        self._info, self.clock = info, clock
        # Its originals, of so many pages in all, as last counted.
        self._originals = self._counted = 0
        self._pending = Pending(info.head, info.used)
        self._names = NoteNames()

    def __repr__(self) -> str:
        """What was last read of it: nothing is read for this, and no text of a page is in it."""
        return f"<Collection {self.name!r} of tenant {self.backend.tenant!r}: {self.info.pages} pages>"

    @property
    def info(self) -> SegmentInfo:
        """Its row in the store, as it was last read."""
        return self._info

    @property
    def _head(self) -> int:
        with self.lock:
            self._refresh()
            return self.info.head

    def _refresh(self) -> bool:
        with self.lock:
            found, head = self.backend.segment(self.name, time=0.0, create=False), self._pending.head
            if found is None or found.number != self.number:
                raise StoreStale(f"collection {self.name!r} is not what it was", advice="open it again")
            self._info = found
            if found.pages != self._counted:
                self._originals = self._count(found.pages)
                self._counted = found.pages
            self._pending.continue_from(found)
            return found.head != head

    def _count(self, pages: int) -> int:
        """The number of originals among so many pages. Both kinds are numbered without holes and never removed. So a
        search by halves finds the last original in a few reads."""
        low, high = self._originals, self._originals + pages - self._counted
        while low < high:
            probes = range(low + max(1, (high - low) // 16), high + 1, max(1, (high - low) // 16))
            there = self.backend.read((self.number, page) for page in probes)
            for page in probes:
                if (self.number, page) not in there:
                    high = page - 1
                    break
                low = page
        return low

    def named(self) -> Mapping[str, int] | None:
        """Of notes, the pages that are in force by their names, as they were last read; None for any other collection."""
        if self.info.kind is not SegmentKind.NOTES:
            return None
        return self._names.follow(self.backend, self.number, self.info.head)

    @property
    def _last(self) -> tuple[int, int]:
        return self._originals, self._originals - self._counted

    # What changes it

    def add(self, text: str, **fields: Any) -> str:
        """Add one page, as a person; returns its address. `fields` are those of `Add`.

        Raises:
            KernelError: see `apply`.
        """
        return self.apply(Add(text=text, **fields))[0]

    def apply(
        self,
        *changes: Add | Retire | Restore | Drop,
        policy: str = "user",
        cause: str = "user",
        tainted: bool = False,
        seen: int | None = None,
        note: Data | None = None,
    ) -> list[str]:
        """Carry out changes in one transaction, all or none; returns the addresses of the added pages.

        An `Add` without sources, refers and cites is an original (`p1`): somebody told it. Any other is derived (`f1`);
        the kernel works out its trust and its depth. What a policy adds is proposed, and no search finds it until a person
        accepts it, if `tainted` is set or if something that it was made from is trusted no more than a tool, or is itself
        proposed. What such a page would supersede stays in force until then.

        Args:
            policy: the name of the policy that wants it; "user" for a person.
            tainted: whether the policy had read untrusted text before.
            seen: the last event (`head`) that the caller knew when it decided; None if the changes are right whatever
                others have written since. A `Drop` stands alone.
            note: figures for the ledger, written with the changes or not at all; also where there is no change.

        Raises:
            LawBroken, KernelError: one of them is not allowed. UnknownAddress, Forgotten: it names a page that is not
                there. StoreStale: the collection was changed after event `seen`. StoreError. Nothing was changed.
        """
        if any(isinstance(change, Drop) for change in changes):
            return self._drop_all(changes, policy)
        wanted = as_changes(changes)
        if not wanted and note is None:
            return []

        def collect() -> Collecting:
            made = self._carried(wanted, policy, cause, tainted=tainted)
            if note is not None:
                made.events.append(self._event(Act.NOTE, (), policy=policy, cause=cause, data=note))
            return made

        with self.lock:
            made = self._commit(collect, seen)
        return [address_of(page) for page in made.added]

    def _drop_all(self, changes: tuple[object, ...], policy: str) -> list[str]:
        if policy != "user":
            raise KernelError("a policy may not forget", advice="retire; only a person forgets")
        if len(changes) != 1 or not isinstance(changes[0], Drop):
            raise KernelError("a Drop beside other changes", advice="forget on its own: it may reach other segments")
        self._check_writable()
        known = [page for page in changes[0].pages if self.read(page)]
        forget(self._home, {self.number: known}, changes[0].why)
        return []

    def _carried(
        self, wanted: Sequence[Change], policy: str = "user", cause: str = "user", *, tainted: bool = False
    ) -> Collecting:
        """The transaction of these changes, checked against what is there now."""
        rows = self.backend.read(keys_of(wanted, self.number))
        clock, named = self.clock(), self.named()
        made = Collecting(
            self.info, self._last, rows, self.counter, clock, policy=policy, cause=cause, tainted=tainted, named=named
        )
        made.carry(wanted)
        return made

    def _commit(self, collect: Callable[[], Collecting], seen: int | None = None) -> Collecting:
        """Write what `collect` makes of what is there now, with the observations that wait."""
        self._check_writable()
        cited = set[int]()
        for left in reversed(range(FREE + ALONE)):
            try:
                with self._alone(cited) if left < ALONE else nullcontext():
                    self._refresh()
                    if seen is not None and any(event.act in STATE for event in self.backend.events(self.number, seen)):
                        break
                    made = collect()
                    if made.events:
                        batch = made.batch(self._pending.head, self._pending.events)
                        cited = {segment for page in batch.pages for segment, _ in page.cites}
                        self._write(batch)
            except StoreStale:
                if not left:
                    raise
            else:
                self._originals += sum(page > 0 for page in made.added)
                self._counted += len(made.added)
                return made
        raise StoreStale(f"{self.name!r} was changed after event {seen}", advice="read it again, then decide again")

    @contextmanager
    def _alone(self, beside: Iterable[int] = ()) -> Iterator[None]:
        with self.lock:
            before = self._pending
            try:
                with self.backend.together([self.number, *beside]):
                    yield
            except BaseException:
                # What it has written is not there.
                self._pending = before
                raise

    def _write(self, batch: Batch) -> None:
        self.backend.commit(self.number, batch)
        self._pending = Pending(self._pending.head + len(batch.events), batch.events[-1].time)

    def accept(self, address: str, why: str = "") -> list[str]:
        """Put proposed pages in force, as a person: with what they are to supersede, and with the entities that they need.
        To reject them, retire them.

        Returns:
            The addresses that are in force by this.

        Raises:
            UnknownAddress, Forgotten. KernelError: one of them is not proposed.
        """

        def accepted() -> Collecting:
            numbers = self._resolve(address)
            rows = self.backend.read((self.number, page) for page in numbers)
            if strange := [page for (_, page), (_, state) in rows.items() if state.at is not Place.PROPOSED]:
                raise KernelError(f"{address_of(strange[0])} is not proposed", advice="see `pages(proposed=True)`")
            sources = self.backend.read({(self.number, source) for page, _ in rows.values() for source in page.sources})
            numbers += [page.id for page, state in sources.values() if state.at is Place.PROPOSED]
            held = [move for event in self.backend.events(self.number) for move in held_of(event) if move.by in numbers]
            there = self.backend.read((self.number, page) for move in held for page in move.pages)
            changes: list[Change] = [Restore(tuple(dict.fromkeys(numbers)), why)]
            for move in held:
                left = tuple(page for page in move.pages if there[self.number, page][1].at is Place.OUT)
                changes += [msgspec.structs.replace(move, pages=left)] if left else []
            return self._carried(changes, cause="accept")

        return self._restored(accepted)

    def undo(self, address: str, why: str = "") -> list[str]:
        """Undo what last happened to pages, as a person. What was retired is in force again, and what superseded it is
        retired as if it had never been true. What is in force is retired in this way, and what it had superseded is in
        force again. Undoing it once more leads back. What was proposed and rejected waits again.

        Returns:
            The addresses that are in force by this.

        Raises:
            UnknownAddress, Forgotten. KernelError: it is proposed. LawBroken: what would be retired is pinned.
        """

        def undone() -> Collecting:
            versions = Versions(self.backend.events(self.number))
            numbers = self._resolve(address)
            kept = self.backend.read((self.number, page) for page in versions.of(*numbers))
            rows = {page: row for (_, page), row in kept.items() if row[1].at is not Place.DROPPED}
            return self._carried(versions.undo(numbers, rows, why), cause="undo")

        return self._restored(undone)

    def _restored(self, collect: Callable[[], Collecting]) -> list[str]:
        with self.lock:
            made = self._commit(collect)
        restored = [event for event in made.events if event.act is Act.RESTORE and event.data["at"] == Place.OUT]
        return [address_of(page) for event in restored for page in event.pages]

    def history(self, address: str) -> list[Version]:
        """The versions of what an address names, oldest first: what it superseded, and what superseded it, each with what
        happened to it. The whole ledger is read.

        Raises:
            UnknownAddress, Forgotten.
        """
        numbers = self._resolve(address)
        versions = Versions(self.backend.events(self.number))
        chain = versions.of(*numbers)
        rows = self.backend.read((self.number, page) for page in chain)
        told: dict[int, list[Event]] = {page: [] for page in chain}
        for event in self.backend.events(self.number):
            if event.act in STATE:
                for page in chain.intersection(event.pages):
                    told[page].append(event)
        found = [Version(page=page, state=state, events=tuple(told[page.id])) for page, state in rows.values()]
        return sorted(found, key=lambda one: one.events[0].number if one.events else 0)

    def _mark(self, act: Act, address: str, **data: Unpack[Data]) -> None:
        def made() -> Collecting:
            pages = self._resolve(address)
            rows = self.backend.read((self.number, page) for page in pages)
            collecting = Collecting(self.info, self._last, rows, self.counter, self.clock())
            collecting.mark(act, pages, **data)
            return collecting

        with self.lock:
            self._commit(made)

    def _made_from(self, pages: Iterable[int]) -> list[int]:
        """These pages, without the forgotten ones. The store's index finds the pages that were made from them."""
        rows = self.backend.read((self.number, page) for page in pages)
        return [page for (_, page), (_, state) in rows.items() if state.at is not Place.DROPPED]

    def _with_made_from(self, pages: Iterable[int]) -> list[int]:
        """These pages and all that was made from them here, also by somebody else just now, without the forgotten ones. An entity
        is only a name: one that something else holds by now stays."""
        rows = self.backend.read((self.number, page) for page in self._made_from(pages))
        gone = {page for _, page in rows}
        names = {page.id for page, _ in rows.values() if page.kind is Kind.ENTITY}
        fresh = gone - names
        while fresh:
            fresh = set(self._citing(fresh)) - gone
            gone |= fresh
        return sorted(gone - {name for name in names if not gone.issuperset(self._citing([name]))})

    def _citing(self, pages: Iterable[int]) -> Iterator[int]:
        return (page for number, page in self.backend.citing(self.number, pages) if number == self.number)

    def _drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        gone = list[int]()
        with self.lock:
            self._check_writable()
            for left in reversed(range(FREE + 1)):
                try:
                    with nullcontext() if left else self._alone():
                        self._refresh()
                        gone = self._with_made_from(pages)
                        if gone:
                            event = self._event(Act.DROP, gone, why=why, data={"at": Place.DROPPED})
                            events = in_order([*self._pending.events, event], self._pending.head, self.info.used)
                            states = dict.fromkeys(gone, State(Place.DROPPED))
                            self._write(Batch(head=self._pending.head, events=events, states=states, erase=gone))
                    break
                except StoreStale:
                    # If nobody has written here, one of them is cited.
                    if not left or not self._refresh():
                        raise
            return gone

    # What is in it

    def pages(
        self, at: float | None = None, *, proposed: bool = False, history: bool = False, after: int = 0, limit: int | None = None
    ) -> Iterator[tuple[Page, State]]:
        """Its pages with their states: p1, p2, ..., then f1, f2, ..., without the forgotten ones. Each is read when the iterator
        comes to it.

        Args:
            at: a time, in seconds since the epoch: what was true then, by all that is known now; None for what is true now.
            proposed: also what waits to be accepted.
            history: also what is not true any more, or not yet.
            after: the id of the page after which to begin.
            limit: how many at most.
        """
        with self.lock:
            self._refresh()
            time = max(self.clock(), self.info.used) if at is None else at
            originals, derived = self._last
        numbers = range(after + 1, originals + 1) if after >= 0 else range(0)
        ids = itertools.chain(numbers, range(min(after, 0) - 1, derived - 1, -1))
        left = limit
        while left is None or left > 0:
            some = list(itertools.islice(ids, READ))
            if not some:
                return
            rows = self.backend.read((self.number, page) for page in some)
            for number in some:
                if (self.number, number) not in rows:
                    continue
                page, state = rows[self.number, number]
                waits = state.at is Place.PROPOSED
                true = history or is_true(page, state, time, now=at is None)
                if state.at is not Place.DROPPED and (proposed if waits else true):
                    yield page, state
                    left = None if left is None else left - 1
                    if left == 0:
                        return

    def read(self, page: int) -> tuple[Page, State]:
        """A page with its state, by its id.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        key = (self.number, page)
        rows = self.backend.read([key]) if 0 < abs(page) < 1 << 62 else {}
        if key not in rows:
            raise UnknownAddress(f"{address_of(page)} does not exist in {self.name!r}", advice="see its pages")
        if rows[key][1].at is Place.DROPPED:
            raise Forgotten(f"{address_of(page)} was forgotten", advice="nothing of it is kept")
        return rows[key]

    def _text(self, page: int) -> str:
        digest = self.read(page)[0].digest
        return self.backend.contents.texts([digest])[digest]

    def _resolve(self, address: str) -> list[int]:
        with self.lock:
            self._refresh()
            return [page.id for page in self._named(address)]

    def _named(self, address: str) -> list[Page]:
        """The pages that an address names."""
        first, last = parse_address(address)
        originals, derived = self._last
        if not derived <= first <= originals or last > originals:
            kinds = [(kind, count) for kind, count in (("p", originals), ("f", -derived)) if count]
            known = " and ".join(f"{kind}1" if count == 1 else f"{kind}1-{kind}{count}" for kind, count in kinds)
            raise UnknownAddress(f"{address} does not exist in {self.name!r}", advice=f"it has {known or 'no pages yet'}")
        if last - first >= MOST:
            raise KernelError(f"{address} names {last - first + 1:,} pages", advice=f"name {MOST:,} at most")
        rows = self.backend.read((self.number, page) for page in range(first, last + 1))
        if missing := [page for page in range(first, last + 1) if (self.number, page) not in rows]:
            raise StoreCorrupt(f"{address_of(missing[0])} of {self.name!r} is missing", advice="run `kilburn fsck`")
        found = [page for page, state in rows.values() if state.at is not Place.DROPPED]
        if not found:
            raise Forgotten(f"{address} was forgotten", advice="nothing of it is kept")
        return found

    def _read(self, address: str) -> tuple[Sequence[Page], Sequence[str], list[int]]:
        pages = self._named(address)
        texts = self.backend.contents.texts({page.digest for page in pages})
        return pages, [texts[page.digest] for page in pages], [page.id for page in pages]

    # The ledger

    def _observe(self, act: Act, pages: Sequence[int], *, policy: str, cause: str, why: str, **data: Unpack[Data]) -> None:
        self._pending.add([self._event(act, pages, policy=policy, cause=cause, why=why, data=data)])
        if len(self._pending.events) >= GATHERED and not self._flush():
            lost, kept = self._pending.halve()
            self._pending.add([self._event(Act.NOTE, (), policy="kernel", data={"lost": lost}), *kept])

    def _flush(self) -> bool:
        with self.lock:
            for _ in range(TRIES if self._pending.events else 0):
                try:
                    self._refresh()
                    self._write(Batch(head=self._pending.head, events=self._pending.events, wait=False))
                except StoreStale:
                    continue
                except KilburnError:
                    return False
                break
            return not self._pending.events

    def close(self) -> None:
        """Write the observations that wait; called when the store closes."""
        if not self._flush():
            warnings.warn(f"observations of {self.name!r} are not in its ledger", stacklevel=3)

    def _waiting(self) -> Sequence[Event]:
        return self._pending.events

    def _event(
        self, act: Act, pages: Iterable[int], *, policy: str = "user", cause: str = "user", why: str = "", data: Data
    ) -> Event:
        event = Event(number=0, act=act, time=self.clock(), pages=tuple(pages), boundary="database", data=data)
        return writable(msgspec.structs.replace(event, policy=policy, cause=cause, why=why))

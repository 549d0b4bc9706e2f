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

CHUNK_PAGES = 500
"""Pages that are read at a time."""

MAX_ATTEMPTS = 50
"""How often work is done again because another writer was faster; each of them has then written something."""

MAX_ADDRESS_PAGES = 10_000
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
    for _ in range(MAX_ATTEMPTS):
        start = head() if head is not None else 0
        try:
            return work()
        except StoreStale:
            continue
        except StoreCorrupt:
            if head is None or head() == start:
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
            info, head = self.backend.segment(self.name, time=0.0, create=False), self._pending.head
            if info is None or info.number != self.number:
                raise StoreStale(f"collection {self.name!r} is not what it was", advice="open it again")
            self._info = info
            if info.pages != self._counted:
                self._originals = self._count(info.pages)
                self._counted = info.pages
            self._pending.continue_from(info)
            return info.head != head

    def _count(self, pages: int) -> int:
        """The number of originals among so many pages. Both kinds are numbered without holes and never removed. So a
        search by halves finds the last original in a few reads."""
        low, high = self._originals, self._originals + pages - self._counted
        while low < high:
            probes = range(low + max(1, (high - low) // 16), high + 1, max(1, (high - low) // 16))
            rows = self.backend.read((self.number, page) for page in probes)
            for page in probes:
                if (self.number, page) not in rows:
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
        checked_changes = as_changes(changes)
        if not checked_changes and note is None:
            return []

        def collect() -> Collecting:
            collecting = self._carried(checked_changes, policy, cause, tainted=tainted)
            if note is not None:
                collecting.events.append(self._event(Act.NOTE, (), policy=policy, cause=cause, data=note))
            return collecting

        with self.lock:
            collecting = self._commit(collect, seen)
        return [address_of(page) for page in collecting.added]

    def _drop_all(self, changes: tuple[object, ...], policy: str) -> list[str]:
        if policy != "user":
            raise KernelError("a policy may not forget", advice="retire; only a person forgets")
        if len(changes) != 1 or not isinstance(changes[0], Drop):
            raise KernelError("a Drop beside other changes", advice="forget on its own: it may reach other segments")
        self._check_writable()
        pages = [page for page in changes[0].pages if self.read(page)]
        forget(self._home, {self.number: pages}, changes[0].why)
        return []

    def _carried(
        self, changes: Sequence[Change], policy: str = "user", cause: str = "user", *, tainted: bool = False
    ) -> Collecting:
        """The transaction of these changes, checked against what is there now."""
        rows = self.backend.read(keys_of(changes, self.number))
        clock, note_pages = self.clock(), self.named()
        collecting = Collecting(
            self.info, self._last, rows, self.counter, clock, policy=policy, cause=cause, tainted=tainted, named=note_pages
        )
        collecting.carry(changes)
        return collecting

    def _commit(self, collect: Callable[[], Collecting], seen: int | None = None) -> Collecting:
        """Write what `collect` makes of what is there now, with the observations that wait."""
        self._check_writable()
        cited = set[int]()
        for attempts in reversed(range(FREE + ALONE)):
            try:
                with self._alone(cited) if attempts < ALONE else nullcontext():
                    self._refresh()
                    if seen is not None and any(event.act in STATE for event in self.backend.events(self.number, seen)):
                        break
                    collecting = collect()
                    if collecting.events:
                        batch = collecting.batch(self._pending.head, self._pending.events)
                        cited = {segment for page in batch.pages for segment, _ in page.cites}
                        self._write(batch)
            except StoreStale:
                if not attempts:
                    raise
            else:
                self._originals += sum(page > 0 for page in collecting.added)
                self._counted += len(collecting.added)
                return collecting
        raise StoreStale(f"{self.name!r} was changed after event {seen}", advice="read it again, then decide again")

    @contextmanager
    def _alone(self, beside: Iterable[int] = ()) -> Iterator[None]:
        with self.lock:
            pending = self._pending
            try:
                with self.backend.together([self.number, *beside]):
                    yield
            except BaseException:
                # What it has written is not there.
                self._pending = pending
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
                raise KernelError(f"{address_of(strange[0])} is not proposed", advice="see `kilburn memories list --proposed`")
            sources = self.backend.read({(self.number, source) for page, _ in rows.values() for source in page.sources})
            numbers += [page.id for page, state in sources.values() if state.at is Place.PROPOSED]
            moves = [move for event in self.backend.events(self.number) for move in held_of(event) if move.by in numbers]
            targets = self.backend.read((self.number, page) for move in moves for page in move.pages)
            changes: list[Change] = [Restore(tuple(dict.fromkeys(numbers)), why)]
            for move in moves:
                in_force = tuple(page for page in move.pages if targets[self.number, page][1].at is Place.OUT)
                changes += [msgspec.structs.replace(move, pages=in_force)] if in_force else []
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
            versions_rows = self.backend.read((self.number, page) for page in versions.of(*numbers))
            rows = {page: row for (_, page), row in versions_rows.items() if row[1].at is not Place.DROPPED}
            return self._carried(versions.undo(numbers, rows, why), cause="undo")

        return self._restored(undone)

    def _restored(self, collect: Callable[[], Collecting]) -> list[str]:
        with self.lock:
            collecting = self._commit(collect)
        restored = [event for event in collecting.events if event.act is Act.RESTORE and event.data["at"] == Place.OUT]
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
        page_events: dict[int, list[Event]] = {page: [] for page in chain}
        for event in self.backend.events(self.number):
            if event.act in STATE:
                for page in chain.intersection(event.pages):
                    page_events[page].append(event)
        chain_versions = [Version(page=page, state=state, events=tuple(page_events[page.id])) for page, state in rows.values()]
        return sorted(chain_versions, key=lambda version: version.events[0].number if version.events else 0)

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
        dropped = {page for _, page in rows}
        names = {page.id for page, _ in rows.values() if page.kind is Kind.ENTITY}
        fresh = dropped - names
        while fresh:
            fresh = set(self._citing(fresh)) - dropped
            dropped |= fresh
        return sorted(dropped - {name for name in names if not dropped.issuperset(self._citing([name]))})

    def _citing(self, pages: Iterable[int]) -> Iterator[int]:
        return (page for number, page in self.backend.citing(self.number, pages) if number == self.number)

    def _drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        dropped = list[int]()
        with self.lock:
            self._check_writable()
            for attempts in reversed(range(FREE + 1)):
                try:
                    with nullcontext() if attempts else self._alone():
                        self._refresh()
                        dropped = self._with_made_from(pages)
                        if dropped:
                            event = self._event(Act.DROP, dropped, why=why, data={"at": Place.DROPPED})
                            events = in_order([*self._pending.events, event], self._pending.head, self.info.used)
                            states = dict.fromkeys(dropped, State(Place.DROPPED))
                            self._write(Batch(head=self._pending.head, events=events, states=states, erase=dropped))
                    break
                except StoreStale:
                    # If nobody has written here, one of them is cited.
                    if not attempts or not self._refresh():
                        raise
            return dropped

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
        remaining = limit
        while remaining is None or remaining > 0:
            chunk = list(itertools.islice(ids, CHUNK_PAGES))
            if not chunk:
                return
            rows = self.backend.read((self.number, page) for page in chunk)
            for number in chunk:
                if (self.number, number) not in rows:
                    continue
                page, state = rows[self.number, number]
                waits = state.at is Place.PROPOSED
                true = history or is_true(page, state, time, now=at is None)
                if state.at is not Place.DROPPED and (proposed if waits else true):
                    yield page, state
                    remaining = None if remaining is None else remaining - 1
                    if remaining == 0:
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
            extent = " and ".join(f"{kind}1" if count == 1 else f"{kind}1-{kind}{count}" for kind, count in kinds)
            raise UnknownAddress(f"{address} does not exist in {self.name!r}", advice=f"it has {extent or 'no pages yet'}")
        if last - first >= MAX_ADDRESS_PAGES:
            raise KernelError(f"{address} names {last - first + 1:,} pages", advice=f"name {MAX_ADDRESS_PAGES:,} at most")
        rows = self.backend.read((self.number, page) for page in range(first, last + 1))
        if missing := [page for page in range(first, last + 1) if (self.number, page) not in rows]:
            raise StoreCorrupt(f"{address_of(missing[0])} of {self.name!r} is missing", advice="run `kilburn fsck`")
        pages = [page for page, state in rows.values() if state.at is not Place.DROPPED]
        if not pages:
            raise Forgotten(f"{address} was forgotten", advice="nothing of it is kept")
        return pages

    def _read(self, address: str) -> tuple[Sequence[Page], Sequence[str], list[int]]:
        pages = self._named(address)
        texts = self.backend.contents.texts({page.digest for page in pages})
        return pages, [texts[page.digest] for page in pages], [page.id for page in pages]

    # The ledger

    def _observe(self, act: Act, pages: Sequence[int], *, policy: str, cause: str, why: str, **data: Unpack[Data]) -> None:
        self._pending.add([self._event(act, pages, policy=policy, cause=cause, why=why, data=data)])
        if len(self._pending.events) >= GATHERED and not self._flush():
            lost, newer = self._pending.halve()
            self._pending.add([self._event(Act.NOTE, (), policy="kernel", data={"lost": lost}), *newer])

    def _flush(self) -> bool:
        with self.lock:
            for _ in range(MAX_ATTEMPTS if self._pending.events else 0):
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

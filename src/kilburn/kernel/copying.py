"""Copies all of a tenant from one store into another: what a move is made of, whatever keeps the two stores.

Everything is read and written by the verbs of `kilburn.backend`. A segment is appended batch by batch, in the order of its
ledger, so that after a crash the last event that is there says where to go on. Then both sides are read page by page and event by
event, and compared: what differs because the source went on, or forgot something, is brought up to date, and anything else is an
error. The numbers of segments may differ between two stores, so what names one by its number gets the number it has there.

What is derived is made again and not copied: the text index, the index of citations, the digests of histories.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, zip_longest
from typing import Any, cast

import msgspec

from kilburn.backend import COPYING, Backend, Batch, SegmentInfo, SegmentKind, State
from kilburn.errors import SpecError, StoreCorrupt, StoreError, StoreReadOnly, StoreStale
from kilburn.event import Act, Data, Event
from kilburn.kernel.folding import pieces_of
from kilburn.kernel.replay import made_by
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of

EVENTS, TOKENS = 256, 250_000
"""Events of one batch at most, and tokens of the pages that come with them."""

VECTORS = 1000
"""Vectors of one batch."""

TRIES = 20
"""How often a store is compared again whose source goes on meanwhile."""

NAMES = "copied settings of "
"""How the setting begins that says which settings were copied from a source."""

OWN = (COPYING, "copied ", "copies", "cold", "job ")
"""How the settings begin that a store has for itself, and that no copy gets."""

NUMBERS = ("forked", "learned")
"""Data of a note that is the number of a segment; `continues` has several."""

Told = Callable[[int, int, str], object]
"""Is told how many pages and events are done, of how many, and what is in hand."""


class Copied(msgspec.Struct, frozen=True, kw_only=True):
    """What a copy came to.

    Args:
        kinds: how many segments there are, by what they are.
        pages, events, vectors, settings: how many there are now, on both sides the same.
        new: pages and events that this call wrote.
        digest: SHA-256 over all of it, in hex: that of the source and that of the copy.
        left: (name, reason) of segments that were left behind because they are damaged.
    """

    kinds: dict[str, int]
    pages: int
    events: int
    vectors: int
    settings: int
    new: int
    digest: str
    left: tuple[tuple[str, str], ...] = ()


def copy(
    source: Backend,
    target: Backend,
    place: str,
    told: Told = lambda done, total, words: None,
    note: Callable[[], object] = lambda: None,
    *,
    noted: bool = False,
) -> Copied:
    """Copy everything of the source's tenant into the target's, and compare both. What the target has of it already stays, so it
    goes on where an earlier call was killed, and a call after that changes nothing.

    Args:
        place: what the source is called; by the same name a later call knows what it copied.
        note: called before the first thing is copied, when nothing stands in the way.
        noted: whether the source says that it was copied there before.

    Raises:
        SpecError: both are the same store.
        StoreError: the target has something else under a name of the source, or has changed what was copied, or another store
            of this name was copied there; or the source is half a copy itself.
        StoreReadOnly, StoreFull, StoreBusy, StoreCorrupt.
    """
    return _Copy(source, target, place, told, noted=noted).run(note)


class _Copy:
    def __init__(self, source: Backend, target: Backend, place: str, told: Told, *, noted: bool) -> None:
        self.source, self.target, self.place, self._told, self._noted = source, target, place, told, noted
        self._setting = f"copied {place}"
        kept = target.settings().get(self._setting)
        self.numbers: dict[int, int] = msgspec.json.decode(kept or "{}", type=dict[int, int])
        # The settings that were copied from there.
        self._names = set(msgspec.json.decode(target.settings().get(f"{NAMES}{place}", "[]"), type=list[str]))
        self._done = self._total = self._new = 0
        self._digests: dict[int, bytes] = {}

    def run(self, note: Callable[[], object]) -> Copied:
        """Copy, compare, and say what is there now."""
        if self.target.readonly:
            raise StoreReadOnly("the destination was opened for reading", advice="open it for writing")
        every = list(self.source.segments())
        infos = [info for info in every if not info.damaged]
        self._check(infos)
        half = self.source.settings().get(COPYING)
        if half not in (None, self.place):
            what = f"a copy of {half} into the source is not complete"
            raise StoreError(what, advice="run that `kilburn copy` again first, or copy from where it came")
        self._total = sum(2 * (info.pages + info.head) for info in infos)
        before = self.target.settings().get(COPYING)
        self.target.keep_setting(COPYING, self.place)
        if self.source.settings().get(COPYING) == self.place:
            # One store under two names: a server has several.
            self.target.keep_setting(COPYING, before if before != self.place else None)
            raise SpecError(f"{self.place} is both source and destination", advice="give two stores, or two tenants")
        note()
        self._make_way(infos)
        self._begin(infos)
        for info in infos:
            self._append(info)
        infos = self._compare(infos)
        digest = hashlib.sha256(
            b"".join(self._digests[info.number] for info in infos if info.number in self._digests)
        ).hexdigest()
        vectors = self._vectors()
        settings = self._settings()
        self.target.sync()
        self.target.keep_setting(COPYING, None)
        self.target.sync()
        return Copied(
            kinds=dict(Counter(info.kind.value for info in infos)),
            pages=sum(info.pages for info in infos),
            events=sum(info.head for info in infos),
            vectors=vectors,
            settings=settings,
            new=self._new,
            digest=digest,
            left=tuple((info.name, info.damaged) for info in every if info.damaged),
        )

    def _tell(self, done: int, words: str) -> None:
        self._done += done
        self._told(self._done, self._total, words)

    # What is there already

    def _check(self, infos: Sequence[SegmentInfo]) -> None:
        """Check that the target has nothing of its own under a name of the source. Nothing is written before."""
        every = list(self.target.segments())
        there, forgotten = {info.name: info for info in every}, {info.number for info in every if _is_forgotten(info)}
        going = self._going(infos)
        if not self._is_known(infos, every):
            if going:
                what = f"the destination has what was copied from another store that was {self.place}"
                raise StoreError(what, advice="give another destination, or another tenant of it")
            self.numbers, self._names = {}, set()
        for info in infos:
            if _is_forgotten(info):
                continue
            found = there.get(info.name)
            if found is None and self.numbers.get(info.number) in forgotten:
                raise self._diverged(info, "it was forgotten there")
            if found is None or found.number in going:
                continue
            if found.damaged:
                raise StoreCorrupt(f"{found.name!r} in the destination: {found.damaged}", advice="run `kilburn fsck` on it")
            if not self._is_copy(info, found):
                what = f"the destination has another {found.kind} {info.name!r}"
                raise StoreError(what, advice="give another destination, or another tenant of it, or forget it there first")
            gone = set(self.target.forgotten(found.number)).difference(self.source.forgotten(info.number))
            if gone:
                raise self._diverged(info, f"{address_of(min(gone))} was forgotten there")

    def _going(self, infos: Iterable[SegmentInfo]) -> set[int]:
        """The numbers in the target of what was copied, and is forgotten in the source as a whole."""
        return {self.numbers[info.number] for info in infos if _is_forgotten(info) and info.number in self.numbers}

    def _is_known(self, infos: Iterable[SegmentInfo], every: Iterable[SegmentInfo]) -> bool:
        """Whether the numbers that the target keeps are of this source: it says so, or something is still there that was copied
        under its number. Else it may be a new store in the place of one that is gone; what is forgotten there has no name."""
        there = {info.number: info for info in every}
        copied = ((info, there.get(self.numbers.get(info.number, 0))) for info in infos if not _is_forgotten(info))
        return self._noted or any(found is not None and _identity(info) == _identity(found) for info, found in copied)

    def _is_copy(self, info: SegmentInfo, found: SegmentInfo) -> bool:
        """Whether a segment of the target is the beginning of one of the source."""
        if _identity(info) != _identity(found) or found.head > info.head:
            return False
        if not found.head:
            return not found.pages
        for after in {0, found.head - 1}:
            ours, theirs = (
                next(iter(backend.events(number, after)), None)
                for backend, number in ((self.source, info.number), (self.target, found.number))
            )
            if ours is None or theirs is None or _told_by(ours) != _told_by(theirs):
                return False
        return True

    def _make_way(self, infos: Sequence[SegmentInfo]) -> None:
        """Where a name was given anew in the source: forget in the target who had it, leaf first, with all that was forgotten."""
        there = {info.name: info.number for info in self.target.segments()}
        going = self._going(infos)
        if not any(there.get(info.name) in going for info in infos):
            return

        def let_go(info: SegmentInfo) -> bool:
            number = self.numbers[info.number]
            if _is_forgotten(info):
                return self._forget(number)
            found = self.target.segment(info.name, time=info.created, create=False)
            if found is None or found.number != number:
                return True  # it comes anew
            gone = {page.id for page, state in self.source.pages(info.number) if state.at is Place.DROPPED}
            some = [page.id for page, state in self.target.pages(number) if state.at is not Place.DROPPED and page.id in gone]
            if some:
                self.target.commit(number, Batch(head=found.head, erase=some, copied=True))
            return True

        self._one_by_one([info for info in infos if info.number in self.numbers], let_go)

    def _begin(self, infos: Sequence[SegmentInfo]) -> None:
        """Give every segment its number in the target, in the order of the source: all, or none."""
        with self.target.together():
            for info in infos:
                if _is_forgotten(info):
                    self._forgotten_number(info.number)
                    continue
                made = self.target.segment(info.name, time=info.created, kind=info.kind, user=info.user)
                assert made is not None
                self.numbers[info.number] = made.number
            self._keep_numbers()

    def _keep_numbers(self) -> None:
        kept = msgspec.json.encode(dict(sorted(self.numbers.items()))).decode()
        self.target.keep_setting(self._setting, kept)

    def _forgotten_number(self, number: int) -> int:
        """The number in the target of a segment that is forgotten, or not there: nobody gets it again."""
        if number not in self.numbers:
            made = self.target.segment(f"@copied/{number}", time=0.0)
            assert made is not None
            self.target.erase(made.number)
            self.numbers[number] = made.number
        return self.numbers[number]

    def _number(self, number: int) -> int:
        if number in self.numbers:
            return self.numbers[number]
        with self.target.together():
            made = self._forgotten_number(number)
            self._keep_numbers()
        return made

    # What a record is in the target

    def _page(self, page: Page) -> Page:
        """A page of the source as it stands in the target."""
        if not page.cites:
            return page
        return msgspec.structs.replace(page, cites=tuple((self._number(number), cited) for number, cited in page.cites))

    def _event(self, event: Event) -> Event:
        """An event of the source as it stands in the target."""
        data = event.data
        if event.act is not Act.NOTE or data.keys().isdisjoint((*NUMBERS, "continues")):
            return event
        made: dict[str, Any] = dict(data)
        for key in NUMBERS:
            if isinstance(made.get(key), int) and made[key]:
                made[key] = self._number(made[key])
        if isinstance(made.get("continues"), list | tuple):
            made["continues"] = [self._number(one) if isinstance(one, int) else one for one in made["continues"]]
        return msgspec.structs.replace(event, data=cast(Data, made))

    # Appending

    def _append(self, info: SegmentInfo) -> None:
        """Append what the target does not have yet of a segment."""
        number = self.numbers[info.number]
        if _is_forgotten(info):
            return
        head = self._head(info)
        kept = self.source.checkpoint(info.number, info.head)
        cut = kept[0] if kept is not None else -1
        self._tell(head, info.name)
        for events, rows in self._batches(info, head, cut):
            batch = self._batch(info, head, events, rows)
            head += len(events)
            if kept is not None and head == cut:
                batch.checkpoint = kept[1]
            self.target.commit(number, batch)
            self._new += len(rows) + len(events)
            self._tell(len(rows) + len(events), info.name)

    def _head(self, info: SegmentInfo) -> int:
        found = self.target.segment(info.name, time=info.created, create=False)
        assert found is not None
        return found.head

    def _batches(self, info: SegmentInfo, head: int, cut: int) -> Iterator[tuple[list[Event], list[tuple[Page, State]]]]:
        """The events after the head, with the pages that came with them; one ends at event `cut`."""
        events: list[Event] = []
        rows: list[tuple[Page, State]] = []
        tokens = 0
        for event, made in self._made(info, head):
            events.append(event)
            rows += made
            tokens += sum(page.tokens for page, _ in made)
            if len(events) >= EVENTS or tokens >= TOKENS or event.number == cut:
                yield events, rows
                events, rows, tokens = [], [], 0
        if events:
            yield events, rows

    def _made(self, info: SegmentInfo, head: int) -> Iterator[tuple[Event, list[tuple[Page, State]]]]:
        """The events after the head up to that of `info`, each with its pages."""
        waiting: list[Event] = []
        for event in chain(self.source.events(info.number, head), (None,)):
            ends = event is None or event.number > info.head
            if not ends:
                assert event is not None
                waiting.append(event)
            if waiting and (ends or len(waiting) >= EVENTS):
                rows = self.source.read((info.number, page) for each in waiting for page in made_by(each))
                for each in waiting:
                    found = (rows.get((info.number, page)) for page in made_by(each))
                    yield each, [row for row in found if row is not None]
                waiting = []
            if ends:
                return

    def _batch(self, info: SegmentInfo, head: int, events: Sequence[Event], rows: Sequence[tuple[Page, State]]) -> Batch:
        pages = [self._page(page) for page, _ in rows]
        texts = self._texts(info, pages)
        found = self.source.entries((info.number, page.id) for page in pages)
        return Batch(
            head=head,
            events=[self._event(event) for event in events],
            pages=pages,
            texts=texts,
            pieces=self._pieces(info, pages, texts),
            states={page.id: state for page, state in rows},
            index=[page.id for page in pages if (info.number, page.id) in found],
            copied=True,
        )

    def _texts(self, info: SegmentInfo, pages: Sequence[Page]) -> dict[str, str]:
        """The texts of pages of the source.

        Raises:
            StoreCorrupt: one cannot be read; it says of which page.
        """
        whose = {digest: page for page in pages for digest in (page.digest, page.extra) if digest}
        try:
            return self.source.texts(whose)
        except StoreCorrupt:
            for digest, page in whose.items():
                try:
                    self.source.texts([digest])
                except StoreCorrupt as error:
                    raise StoreCorrupt(
                        f"{info.name!r} in the source, {page.address}: {error.what}",
                        advice="restore it from a copy; or run `kilburn fsck --repair`, forget this page there, and copy again",
                    ) from error
            raise

    def _pieces(self, info: SegmentInfo, pages: Iterable[Page], texts: Mapping[str, str]) -> dict[str, Any]:
        """What excerpts are made of, so that a store can keep them so."""
        excerpts = [page for page in pages if page.kind is Kind.EXCERPT and page.digest]
        if not excerpts:
            return {}
        rows = self.source.read((info.number, source) for page in excerpts for source in page.sources)
        digests = {page: row.digest for (_, page), (row, _) in rows.items() if row.digest}
        known = self.source.texts(set(digests.values()))
        made = {}
        for page in excerpts:
            named = [source for source, _ in page.parts] or list(page.sources[:1])
            if named and digests.keys() >= set(named):
                cut = pieces_of(page, texts[page.digest], digests.__getitem__, lambda source: known[digests[source]])
                if cut is not None:
                    made[page.digest] = cut
        return made

    # Comparing

    def _compare(self, infos: Sequence[SegmentInfo]) -> list[SegmentInfo]:
        """Bring the target up to what the source says by now, until both say the same; returns the segments as they are then."""
        settled: dict[int, SegmentInfo] = {}

        def is_same(info: SegmentInfo) -> bool:
            settled[info.number] = fresh = info if _is_forgotten(info) else self._fresh(info)
            return self._mend(fresh)

        self._one_by_one(infos, is_same)
        return [settled[info.number] for info in infos]

    def _one_by_one(self, infos: Sequence[SegmentInfo], do: Callable[[SegmentInfo], bool]) -> None:
        """Do something with each segment until it says that all is well.

        What is forgotten goes leaf first, as in every store: a segment whose pages are still cited waits for the others.
        """
        waiting = {info.number: info for info in infos}
        for _ in range(TRIES):
            for number, info in list(waiting.items()):
                try:
                    with self.target.erasing():
                        done = do(info)
                except StoreStale:
                    continue
                if done:
                    del waiting[number]
            if not waiting:
                return
        name = next(iter(waiting.values())).name
        what = f"{name!r} differs from its copy, each time that they are compared"
        raise StoreError(what, advice="stop the agents that write to the source, then run it again")

    def _fresh(self, info: SegmentInfo) -> SegmentInfo:
        """The segment as it is by now; what was appended to it since is appended to the target."""
        found = self.source.segment(info.name, time=info.created, create=False)
        if found is None or found.number != info.number:
            raise StoreError(f"{info.name!r} was forgotten in the source meanwhile", advice="run it again: it goes there too")
        if found.head > self._head(found):
            self._append(found)
        return found

    def _mend(self, info: SegmentInfo) -> bool:
        """Compare all of a segment, byte for byte, and write what differs; returns whether nothing did."""
        number = self.numbers[info.number]
        if _is_forgotten(info):
            return self._forget(number)
        made = hashlib.sha256(_encode([*_identity(info), info.head]))
        again: list[Event] = []
        going: list[int] = []
        states: dict[int, State] = {}
        missing: list[tuple[Page, State]] = []
        for ours, theirs in zip_longest(self._events_of(info), self.target.events(number)):
            if ours is None or theirs is None or _told_by(ours) != _told_by(theirs):
                raise self._diverged(info, f"event {(ours or theirs).number} is another there")
            record = _encode(ours)
            made.update(record)
            if record != _encode(theirs):
                again.append(ours)
        self._tell(info.head, "comparing")
        there = {page.id: (page, state) for page, state in self.target.pages(number)}
        for some in chunks(self.source.pages(info.number), EVENTS):
            for page, state in some:
                page = self._page(page)
                made.update(record := _encode((page, state)))
                other = there.pop(page.id, None)
                if other is None:
                    missing.append((page, state))
                elif other[0].digest and not page.digest:
                    going.append(page.id)
                elif _encode(page) != _encode(other[0]):
                    what = "was forgotten there" if page.digest and not other[0].digest else "is another page there"
                    raise self._diverged(info, f"{page.address} {what}")
                elif record != _encode(other):
                    states[page.id] = state
            lacking = {page.id for page, _ in missing}
            self._same_texts(info, [page for page, _ in some if page.id not in lacking])
            self._tell(len(some), "comparing")
        if there:
            raise self._diverged(info, f"it has {address_of(next(iter(there)))} too")
        if not (again or going or states or missing):
            self._digests[info.number] = made.digest()
            return True
        if going:
            self.target.commit(number, Batch(head=info.head, erase=going, copied=True))
        if again or states or missing:
            batch = self._batch(info, info.head, (), missing)
            batch.states, batch.again = {**batch.states, **states}, again
            self.target.commit(number, batch)
        self._new += len(again) + len(going) + len(states) + len(missing)
        return False

    def _same_texts(self, info: SegmentInfo, pages: Sequence[Page]) -> None:
        """Check that both have the texts of these pages. A text is verified by its digest when it is read, so one that both can
        read is the same.

        Raises:
            StoreCorrupt: the target has another one, or none.
        """
        ours = self._texts(info, pages)
        if ours != self.target.texts(ours):
            raise StoreCorrupt(f"a text of {info.name!r} differs in its copy", advice="run `kilburn fsck` on both")

    def _events_of(self, info: SegmentInfo) -> Iterator[Event]:
        """The events of the source that are copied, as they stand in the target."""
        for event in self.source.events(info.number):
            if event.number > info.head:
                return
            yield self._event(event)

    def _forget(self, number: int) -> bool:
        """Forget a segment of the target that was forgotten in the source as a whole."""
        found = next((info for info in self.target.segments() if info.number == number), None)
        if found is None or _is_forgotten(found):
            return True
        some = [page.id for page, state in self.target.pages(number) if state.at is not Place.DROPPED]
        if some:
            self.target.commit(number, Batch(head=found.head, erase=some, copied=True))
        self.target.erase(number)
        return False

    def _diverged(self, info: SegmentInfo, why: str) -> StoreError:
        what = f"the copy of {info.name!r} has changed since: {why}"
        return StoreError(what, advice="a copy follows its source only while nobody writes to it; give another destination")

    # Vectors and settings

    def _vectors(self) -> int:
        """Copy the vectors that the target does not have; returns how many there are."""
        count = 0
        for embedder in self.source.embedders():
            have = {vector.entry: hashlib.sha256(vector.data).digest() for vector in self.target.vectors(embedder)}
            for vectors in chunks(self.source.vectors(embedder), VECTORS):
                where = self._entries([vector.entry for vector in vectors])
                made = [(where[vector.entry], vector.data) for vector in vectors if vector.entry in where]
                fresh = [(entry, data) for entry, data in made if have.get(entry) != hashlib.sha256(data).digest()]
                if fresh:
                    self.target.keep_vectors(embedder, fresh)
                    self._new += len(fresh)
                count += len(made)
                self._tell(0, "vectors")
        return count

    def _entries(self, entries: Sequence[int]) -> dict[int, int]:
        """The target's numbers of passages of the source."""
        found = self.source.passages(entries)
        keys = {(self.numbers[one.segment], one.page) for one in found.values() if one.segment in self.numbers}
        there = {(key, passage.span): passage.entry for key, some in self.target.entries(keys).items() for passage in some}
        made = {}
        for entry, one in found.items():
            wanted = there.get(((self.numbers.get(one.segment, 0), one.page), one.span))
            if wanted is not None:
                made[entry] = wanted
        return made

    def _settings(self) -> int:
        """Copy the settings of the tenant, but for those that a store has for itself. One that was copied, and that the source
        has no more, is removed."""
        ours = {name: value for name, value in self.source.settings().items() if not name.startswith(OWN)}
        theirs = self.target.settings()
        for name, value in ours.items():
            if theirs.get(name) != value:
                self.target.keep_setting(name, value)
        for name in sorted(self._names - ours.keys()):
            self.target.keep_setting(name, None)
        if self._names != ours.keys():
            self.target.keep_setting(f"{NAMES}{self.place}", msgspec.json.encode(sorted(ours)).decode())
        return len(ours)


_encode = msgspec.msgpack.Encoder().encode


def _is_forgotten(info: SegmentInfo) -> bool:
    return info.kind is SegmentKind.FORGOTTEN


def _identity(info: SegmentInfo) -> tuple[object, ...]:
    """What a segment was begun as."""
    return info.name, info.kind.value, info.user, info.created


def _told_by(event: Event) -> tuple[object, ...]:
    """What of an event no forgetting changes."""
    return event.number, event.act, event.time, event.turn, event.pages


def chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """The values in lists of this length; the last one may be shorter."""
    chunk = []
    for value in values:
        chunk.append(value)
        if len(chunk) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

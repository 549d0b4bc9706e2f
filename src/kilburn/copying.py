"""Copies all of a tenant from one store into another, whatever keeps the two stores.

Everything is read and written by the verbs of `kilburn.backend`. The source is read in one snapshot, so agents may go on writing
to it. The target is written in one transaction, and compared with the source before that ends: a copy that fails or is killed
leaves the target as it was. A later copy writes what differs. The numbers of segments may differ between two stores, so each
reference to a segment gets the number that the segment has in the target.

Derived data is not copied but made again: the text index, the index of citations, the digests of histories.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from typing import Any, cast

import msgspec

from kilburn.backend import Backend, Batch, SegmentInfo, SegmentKind, State
from kilburn.errors import SpecError, StoreCorrupt, StoreError, StoreReadOnly
from kilburn.event import Act, Data, Event
from kilburn.kernel.folding import pieces_of
from kilburn.kernel.replay import made_by
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of

EVENTS = 128
"""Events, or pages, of one batch."""

VECTORS = 1000
"""Vectors of one batch."""

OWN_SETTINGS = frozenset({"copies", "cold"})
"""Settings that a store has for itself, and that no copy gets."""

OWN_PREFIXES = ("copied ", "job ")
"""Prefixes of the names of further settings of that kind."""

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


class _Record(msgspec.Struct):
    """What the target keeps of copies from one place.

    Args:
        numbers: the number in the target of each segment of the source.
        reserved: the same of segments that could not be copied: of forgotten segments in their place.
        settings: names of the settings that were copied.
        pending: whether a copy was begun and has not ended.
    """

    numbers: dict[int, int] = {}
    reserved: dict[int, int] = {}
    settings: list[str] = []
    pending: bool = False


def copy(
    source: Backend,
    target: Backend,
    place: str,
    told: Told = lambda done, total, words: None,
    note: Callable[[], object] = lambda: None,
    *,
    noted: bool = False,
) -> Copied:
    """Copy everything of the source's tenant into the target's, and compare both; all of it is in the target then, or, after an
    error, nothing. A later call writes what differs by then.

    Args:
        place: what the source is called; by the same name a later call knows what it copied.
        note: called before the first thing is copied, when nothing stands in the way.
        noted: whether the source says that it was copied there before.

    Raises:
        SpecError: both are the same store.
        StoreError: the target has something else under a name of the source, or has changed what was copied, or another store
            of this name was copied there.
        StoreReadOnly, StoreFull, StoreBusy, StoreStale, StoreCorrupt.
    """
    return _Copy(source, target, place, told, noted=noted).run(note)


class _Copy:
    def __init__(self, source: Backend, target: Backend, place: str, told: Told, *, noted: bool) -> None:
        self.source, self.target, self.place, self._told, self._noted = source, target, place, told, noted
        self._setting = f"copied {place}"
        self._done = self._new = 0
        # Pages that this copy erased in the target, by segment.
        self._erased: dict[int, list[int]] = {}

    def run(self, note: Callable[[], object]) -> Copied:
        """Copy, compare, and return what is there now."""
        if self.target.readonly:
            raise StoreReadOnly("the destination was opened for reading", advice="open it for writing")
        with self.source.snapshot():
            self._check()
        was_pending = self._announce()
        note()
        with self.target.erasing(), self.source.snapshot(), self.target.together():
            # The first statement keeps another copy from this place waiting.
            self.target.settings.put(self._setting, self._encoded(pending=True))
            self._check()
            self._remove(self._outdated(), flag=was_pending)
            self._begin()
            self._total = 2 * sum(info.pages + info.head for info in self._infos)
            heads = {info.number: info.head for info in self.target.segments()}
            digest = hashlib.sha256()
            for info in self._infos:
                if not _is_forgotten(info):
                    digest.update(self._copy(info, heads[self.record.numbers[info.number]]))
            self._check_citations()
            vectors, settings = self._vectors(), self._settings()
            self.target.settings.put(self._setting, self._encoded(pending=False))
        self.target.sync()
        return Copied(
            kinds=dict(Counter(info.kind.value for info in self._infos)),
            pages=sum(info.pages for info in self._infos),
            events=sum(info.head for info in self._infos),
            vectors=vectors,
            settings=settings,
            new=self._new,
            digest=digest.hexdigest(),
            left=tuple((info.name, info.damaged) for info in self._damaged),
        )

    def _announce(self) -> bool:
        """Keep in the target that a copy was begun; returns whether an earlier one has not ended.

        Raises:
            SpecError: the source has it too, so both are the same store: a server has several names.
        """
        old_value, was_pending = self.target.settings.all().get(self._setting), self.record.pending
        self.target.settings.put(self._setting, self._encoded(pending=True))
        if self.source.settings.all().get(self._setting) == self._encoded(pending=True):
            self.target.settings.put(self._setting, old_value)
            raise SpecError(f"{self.place} is both source and destination", advice="give two stores, or two tenants")
        return was_pending

    def _encoded(self, *, pending: bool) -> str:
        self.record.pending = pending
        return msgspec.json.encode(self.record).decode()

    def _tell(self, count: int, words: str) -> None:
        self._done += count
        self._told(self._done, self._total, words)

    # Checking

    def _check(self) -> None:
        """Read the lists of segments of both sides, and check that the target has nothing of its own under a name of the source,
        and has not changed what was copied."""
        segments = list(self.source.segments())
        self._infos = [info for info in segments if not info.damaged]
        self._damaged = [info for info in segments if info.damaged]
        self.record = msgspec.json.decode(self.target.settings.all().get(self._setting, "{}"), type=_Record)
        copies = {info.number: info for info in self.target.segments()}
        names = {info.name: info for info in copies.values()}
        numbers = self.record.numbers
        removed = {numbers[info.number] for info in self._infos if _is_forgotten(info) and info.number in numbers}
        if not self._is_known(copies):
            if removed:
                message = f"the destination has what was copied from another store that was {self.place}"
                raise StoreError(message, advice="give another destination, or another tenant of it")
            self.record = _Record(pending=self.record.pending)
        for info in self._infos:
            if not _is_forgotten(info):
                self._check_segment(info, names.get(info.name), copies.get(self.record.numbers.get(info.number, 0)), removed)

    def _is_known(self, copies: Mapping[int, SegmentInfo]) -> bool:
        """Return whether the record is of this source: the source says so, or a segment of it is still in the target.
        Otherwise it may be a new store in the place of one that is gone."""
        pairs = ((info, copies.get(self.record.numbers.get(info.number, 0))) for info in self._infos if not _is_forgotten(info))
        return self._noted or any(copied is not None and _identity(info) == _identity(copied) for info, copied in pairs)

    def _check_segment(
        self, info: SegmentInfo, same_name: SegmentInfo | None, copied: SegmentInfo | None, removed: set[int]
    ) -> None:
        """Check what the target has under the name of a segment, and under the number of its copy."""
        if same_name is None and copied is not None and _is_forgotten(copied):
            raise self._diverged(info, "it was forgotten there")
        if same_name is None or same_name.number in removed:
            return
        if same_name.damaged:
            raise StoreCorrupt(f"{same_name.name!r} in the destination: {same_name.damaged}", advice="run `kilburn fsck` on it")
        if not self._is_copy(info, same_name):
            message = f"the destination has another {same_name.kind} {info.name!r}"
            raise StoreError(message, advice="give another destination, or another tenant of it, or forget it there first")
        forgotten = set(self.target.forgotten(same_name.number)).difference(self.source.forgotten(info.number))
        if forgotten:
            raise self._diverged(info, f"{address_of(min(forgotten))} was forgotten there")

    def _is_copy(self, info: SegmentInfo, copied: SegmentInfo) -> bool:
        """Return whether a segment of the target is the beginning of one of the source, by its first and its last event."""
        if _identity(info) != _identity(copied) or copied.head > info.head:
            return False
        if not copied.head:
            return not copied.pages
        pairs = (
            [next(iter(backend.events(number, start))) for backend, number in self._both(info.number, copied.number)]
            for start in {0, copied.head - 1}
        )
        return all(_lasting(ours) == _lasting(theirs) for ours, theirs in pairs)

    def _both(self, source: int, target: int) -> tuple[tuple[Backend, int], tuple[Backend, int]]:
        return (self.source, source), (self.target, target)

    def _diverged(self, info: SegmentInfo, why: str) -> StoreError:
        message = f"the copy of {info.name!r} has changed since: {why}"
        return StoreError(message, advice="a copy follows its source only while nobody writes to it; give another destination")

    # Segments and their numbers

    def _outdated(self) -> list[int]:
        """Return the numbers in the target of copies to remove: of segments that are forgotten in the source; and of those that
        cite a segment which was damaged when they were copied and is whole by now. The latter are copied anew."""
        numbers, reserved = self.record.numbers, self.record.reserved
        outdated = [numbers[info.number] for info in self._infos if _is_forgotten(info) and info.number in numbers]
        waiting = [info.number for info in self._infos if not _is_forgotten(info) and reserved.pop(info.number, 0)]
        citing = set(waiting)
        while waiting:
            cited = waiting.pop()
            pages = [page.id for page, _ in self.source.pages(cited)]
            new = {number for number, _ in self.source.citing(cited, pages)} - citing
            citing |= new
            waiting += new
        return outdated + [numbers.pop(number) for number in sorted(citing) if number in numbers]

    def _remove(self, outdated: Iterable[int], *, flag: bool) -> None:
        """Forget segments of the target.

        Args:
            flag: whether erased bytes may lie in it, because a copy was killed.
        """
        for info in [info for info in self.target.segments() if info.number in set(outdated) and not _is_forgotten(info)]:
            pages = [page.id for page, state in self.target.pages(info.number) if state.at is not Place.DROPPED]
            if pages:
                self._erase(info.number, info.head, pages, {})
            self.target.erase(info.number)
            self._new += 1
        if flag:
            self._reserve(0, wipe=True)

    def _erase(self, number: int, head: int, pages: list[int], states: Mapping[int, State]) -> None:
        self.target.commit(number, Batch(head=head, erase=pages, states=states, copied=True))
        self._erased.setdefault(number, []).extend(pages)
        self._new += len(pages) + len(states)

    def _check_citations(self) -> None:
        """Check that nothing in the target cites what this copy erased there: the source has nothing that does.

        Raises:
            StoreError: something of the target's own cites it.
        """
        for number, pages in self._erased.items():
            for citing, page in self.target.citing(number, pages):
                name = next(info.name for info in self.target.segments() if info.number == citing)
                message = f"{address_of(page)} of {name!r} in the destination cites what was forgotten in the source"
                raise StoreError(message, advice="forget it there first")

    def _begin(self) -> None:
        """Give every segment its number in the target, in the order of the source."""
        numbers, reserved = self.record.numbers, self.record.reserved
        for info in self._infos:
            if not _is_forgotten(info):
                segment = self.target.segment(info.name, time=info.created, kind=info.kind, user=info.user)
                assert segment is not None
                numbers[info.number] = segment.number
            elif info.number not in numbers:
                numbers[info.number] = reserved.pop(info.number, 0) or self._reserve(info.number)

    def _reserve(self, number: int, *, wipe: bool = False) -> int:
        """Return a number of the target that nobody gets again."""
        segment = self.target.segment(f"@copied/{number}", time=0.0)
        assert segment is not None
        self.target.erase(segment.number, wipe=wipe)
        return segment.number

    def _number(self, number: int) -> int:
        """Return the number in the target of a segment that another one names."""
        if number not in self.record.numbers and number not in self.record.reserved:
            self.record.reserved[number] = self._reserve(number)
        return self.record.numbers.get(number) or self.record.reserved[number]

    def _page(self, page: Page) -> Page:
        """Return a page of the source as it stands in the target."""
        if not page.cites:
            return page
        return msgspec.structs.replace(page, cites=tuple((self._number(number), cited) for number, cited in page.cites))

    def _event(self, event: Event) -> Event:
        """Return an event of the source as it stands in the target."""
        data = event.data
        if event.act is not Act.NOTE or data.keys().isdisjoint((*NUMBERS, "continues")):
            return event
        changed: dict[str, Any] = dict(data)
        for key in NUMBERS:
            if isinstance(changed.get(key), int) and changed[key]:
                changed[key] = self._number(changed[key])
        if isinstance(changed.get("continues"), list | tuple):
            changed["continues"] = [
                self._number(number) if isinstance(number, int) else number for number in changed["continues"]
            ]
        return msgspec.structs.replace(event, data=cast(Data, changed))

    # Pages and events

    def _copy(self, info: SegmentInfo, head: int) -> bytes:
        """Bring the copy of a segment up to date and compare it; returns the digest of both.

        Args:
            head: the last event that the target has.
        """
        number = self.record.numbers[info.number]
        digest = hashlib.sha256(_encode([*_identity(info), info.head]))
        pages = self._copy_pages(info, number, head, digest)
        self._copy_events(info, number, head, digest, pages)
        copied = hashlib.sha256(_encode([*_identity(info), info.head]))
        for rows in chunks(self.target.pages(number), EVENTS):
            for row in rows:
                copied.update(_encode(row))
            # Each is verified by its digest when it is read.
            self.target.contents.texts({text for page, _ in rows for text in (page.digest, page.extra) if text})
            self._tell(len(rows), "comparing")
        for event in self.target.events(number):
            copied.update(_encode(event))
        self._tell(info.head, "comparing")
        if copied.digest() != digest.digest():
            raise StoreCorrupt(f"{info.name!r} differs from its copy", advice="run `kilburn fsck` on both")
        return copied.digest()

    def _copy_pages(self, info: SegmentInfo, number: int, head: int, digest: Any) -> dict[int, tuple[Page, State]]:
        """Bring the pages up to date that the target has; returns those that it does not have."""
        copies = {page.id: (page, state) for page, state in self.target.pages(number)}
        new: dict[int, tuple[Page, State]] = {}
        for rows in chunks(self.source.pages(info.number), EVENTS):
            erased, states = [], {}
            for original, state in rows:
                page = self._page(original)
                digest.update(row := _encode((page, state)))
                copied = copies.pop(page.id, None)
                if copied is None:
                    new[page.id] = page, state
                elif copied[0].digest and not page.digest:
                    erased.append(page.id)
                elif _encode(page) != _encode(copied[0]):
                    raise self._diverged(info, f"{page.address} is another page there")
                elif row != _encode(copied):
                    states[page.id] = state
            if erased or states:
                self._erase(number, head, erased, states)
        if copies:
            raise self._diverged(info, f"it has {address_of(next(iter(copies)))} too")
        return new

    def _copy_events(self, info: SegmentInfo, number: int, head: int, digest: Any, pages: dict[int, tuple[Page, State]]) -> None:
        """Append the events that the target does not have, each with its pages, and replace those that differ."""
        last, checkpoint = self.source.checkpoint(info.number, info.head) or (0, None)
        new: list[Event] = []
        changed: list[Event] = []

        def append() -> None:
            nonlocal head
            rows = [pages.pop(page) for event in new for page in made_by(event) if page in pages]
            batch = self._batch(info, head, new, rows)
            head += len(new)
            batch.checkpoint = checkpoint if head == last else None
            self.target.commit(number, batch)
            self._new += len(new) + len(rows)
            self._tell(len(new) + len(rows), info.name)
            new.clear()

        for ours, theirs in zip_longest(map(self._event, self.source.events(info.number)), self.target.events(number)):
            if ours is None or (theirs is not None and _lasting(ours) != _lasting(theirs)):
                raise self._diverged(info, f"event {(ours or theirs).number} is another there")
            digest.update(row := _encode(ours))
            if theirs is None:
                new.append(ours)
                if len(new) == EVENTS or ours.number == last:
                    append()
            elif row != _encode(theirs):
                changed.append(ours)
        if new:
            append()
        for rows in chunks(list(pages.values()), EVENTS):
            # No event says how they came.
            self.target.commit(number, self._batch(info, head, (), rows))
            self._new += len(rows)
        for events in chunks(changed, EVENTS):
            self.target.commit(number, Batch(head=head, replaced=events, copied=True))
            self._new += len(events)

    def _batch(self, info: SegmentInfo, head: int, events: Sequence[Event], rows: Sequence[tuple[Page, State]]) -> Batch:
        pages = [page for page, _ in rows]
        texts = self._texts(info, pages)
        indexed = self.source.words.entries((info.number, page.id) for page in pages)
        return Batch(
            head=head,
            events=list(events),
            pages=pages,
            texts=texts,
            pieces=self._pieces(info, pages, texts),
            states={page.id: state for page, state in rows},
            index=[page.id for page in pages if (info.number, page.id) in indexed],
            copied=True,
        )

    def _texts(self, info: SegmentInfo, pages: Sequence[Page]) -> dict[str, str]:
        """Return the texts of pages of the source.

        Raises:
            StoreCorrupt: one cannot be read; it says of which page.
        """
        owners = {digest: page for page in pages for digest in (page.digest, page.extra) if digest}
        try:
            return self.source.contents.texts(owners)
        except StoreCorrupt:
            for digest, page in owners.items():
                try:
                    self.source.contents.texts([digest])
                except StoreCorrupt as error:
                    raise StoreCorrupt(
                        f"{info.name!r} in the source, {page.address}: {error.what}",
                        advice="restore it from a copy; or run `kilburn fsck --repair`, forget this page there, and copy again",
                    ) from error
            raise

    def _pieces(self, info: SegmentInfo, pages: Iterable[Page], texts: Mapping[str, str]) -> dict[str, Any]:
        """Return the pieces that excerpts are made of, so that a store can keep them in place of the texts."""
        excerpts = [page for page in pages if page.kind is Kind.EXCERPT and page.digest]
        if not excerpts:
            return {}
        rows = self.source.read((info.number, source) for page in excerpts for source in page.sources)
        digests = {page: row.digest for (_, page), (row, _) in rows.items() if row.digest}
        sources = self.source.contents.texts(set(digests.values()))
        pieces = {}
        for page in excerpts:
            originals = [source for source, _ in page.parts] or list(page.sources[:1])
            if originals and digests.keys() >= set(originals):
                spliced = pieces_of(page, texts[page.digest], digests.__getitem__, lambda source: sources[digests[source]])
                if spliced is not None:
                    pieces[page.digest] = spliced
        return pieces

    # Vectors and settings

    def _vectors(self) -> int:
        """Copy the vectors that the target does not have; returns how many there are."""
        count = 0
        for embedder in self.source.vectors.embedders():
            hashes = {vector.entry: hashlib.sha256(vector.data).digest() for vector in self.target.vectors.read(embedder)}
            for vectors in chunks(self.source.vectors.read(embedder), VECTORS):
                entries = self._entries([vector.entry for vector in vectors])
                rows = [(entries[vector.entry], vector.data) for vector in vectors if vector.entry in entries]
                new = [(entry, data) for entry, data in rows if hashes.get(entry) != hashlib.sha256(data).digest()]
                if new:
                    self.target.vectors.add(embedder, new)
                    self._new += len(new)
                count += len(rows)
                self._tell(0, "vectors")
        return count

    def _entries(self, entries: Sequence[int]) -> dict[int, int]:
        """Return the target's numbers of passages of the source."""
        keys = {
            entry: (self.record.numbers.get(passage.segment, 0), passage.page, passage.span)
            for entry, passage in self.source.words.passages(entries).items()
        }
        copies = {
            (*key, passage.span): passage.entry
            for key, passages in self.target.words.entries({(number, page) for number, page, _ in keys.values()}).items()
            for passage in passages
        }
        return {entry: copies[key] for entry, key in keys.items() if key in copies}

    def _settings(self) -> int:
        """Copy the settings of the tenant, and remove those that were copied and that the source does not have any more."""
        settings = self.source.settings.all().items()
        ours = {name: value for name, value in settings if name not in OWN_SETTINGS and not name.startswith(OWN_PREFIXES)}
        theirs = self.target.settings.all()
        for name, value in ours.items():
            if theirs.get(name) != value:
                self.target.settings.put(name, value)
        for name in set(self.record.settings) - ours.keys():
            self.target.settings.put(name, None)
        self.record.settings = sorted(ours)
        return len(ours)


_encode = msgspec.msgpack.Encoder().encode


def _is_forgotten(info: SegmentInfo) -> bool:
    return info.kind is SegmentKind.FORGOTTEN


def _identity(info: SegmentInfo) -> tuple[object, ...]:
    """Return the properties that a segment has from its creation."""
    return info.name, info.kind.value, info.user, info.created


def _lasting(event: Event) -> tuple[object, ...]:
    """Return the fields of an event that forgetting does not change."""
    return event.number, event.act, event.time, event.turn, event.pages


def chunks(values: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Yield the values in lists of `size`; the last one may be shorter."""
    chunk = []
    for value in values:
        chunk.append(value)
        if len(chunk) >= size:
            yield chunk
            chunk = []
    if chunk:
        yield chunk

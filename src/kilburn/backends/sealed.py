"""Reads sealed rows (sessions, pages, events) and verifies each one.

A row that is not as it was written raises a `StoreCorrupt` that names the session and the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import apsw

from kilburn.backend import SegmentInfo, SegmentKind, State
from kilburn.backends.codec import inflate
from kilburn.backends.connection import Row, by_segment, row, rows, rows_of_each
from kilburn.backends.records import UNREADABLE, event_of, page_of, seal_of
from kilburn.errors import StoreCorrupt, StoreError
from kilburn.event import Event
from kilburn.page import Page, Place, address_of

ADVICE = "run `kilburn fsck`; other sessions are not affected"

TENANT_ADVICE = "run `kilburn fsck --repair`; tenants whose own rows are whole are not affected"

QUARANTINED = "it was quarantined by `kilburn fsck --repair`"
"""What `damaged` says for a session that was quarantined by a person."""

COUNTERS = ("used", "head", "pages", "tokens", "passages", "characters")
"""The counters of a segment: columns of its row, under a separate seal."""

_SESSION = (
    "SELECT id, tenant, CAST(name AS BLOB), created, quarantined, CAST(kind AS BLOB), CAST(owner AS BLOB), seal,"
    f" {', '.join(COUNTERS)}, counters_seal"
)
_SESSIONS = f"{_SESSION} FROM segment"


def seal_of_segment(number: int, tenant: int, name: bytes, created: float, quarantined: int, kind: bytes, owner: bytes) -> bytes:
    """Return the checksum of the columns of a segment's row that never change."""
    return seal_of("segment", number, tenant, name, created, quarantined, kind, owner)


def seal_of_state(segment: int, page: int, place: bytes, pinned: int, importance: float, until: float | None) -> bytes:
    """Return the checksum of a page's state."""
    return seal_of("state", segment, page, place, pinned, importance, until)


REMEMBERED = 100_000
"""Sessions that are known as they were last read, for each connection: about .5 KB each."""

_PLACES = {place.value.encode(): place for place in Place}

_PAGE = "page.id, record, seal, CAST(place AS BLOB), pinned, importance, valid_until, state_seal"

_OF_PAGES = "FROM json_each(?) CROSS JOIN page ON segment = ? AND page.id = value"
_PAGES = f"SELECT segment, {_PAGE} {_OF_PAGES}"
_SKIMMED = f"SELECT segment, page.id, record, CAST(place AS BLOB), pinned, importance, valid_until {_OF_PAGES}"


@lru_cache
def state_of(place: bytes, pinned: int, importance: float, until: float | None) -> State:
    """Return the state of a row. Most pages have one of a few."""
    return State(_PLACES[place], bool(pinned), importance, until)


class SegmentRow(SegmentInfo, frozen=True, kw_only=True):
    """One row of `segment`. In a damaged row (`damaged` says why) only number and name are meaningful.

    Args:
        passages: entries that it ever made in the text index; `characters`: their total length.
        quarantined: whether `fsck --repair` quarantined it.
    """

    passages: int = 0
    characters: int = 0
    quarantined: bool = False

    @property
    def info(self) -> SegmentInfo:
        """The session as callers of the store see it."""
        return SegmentInfo(
            number=self.number,
            name=self.name,
            created=self.created,
            head=self.head,
            pages=self.pages,
            tokens=self.tokens,
            used=self.used,
            damaged=self.damaged,
            kind=self.kind,
            user=self.user,
        )

    def whole(self) -> SegmentRow:
        """Itself.

        Raises:
            StoreCorrupt: it is damaged.
        """
        if self.damaged:
            erase = f"work goes on under its old name; `kilburn forget {self.name!r} --all` erases what is left of it"
            raise StoreCorrupt(f"session {self.name!r}: {self.damaged}", advice=erase if self.quarantined else ADVICE)
        return self


def shown(page: object) -> str:
    """The address of a page as a damaged record may give it: a value of any type."""
    return address_of(page) if isinstance(page, int) else f"page {page!r}"


PageRows = Iterable[tuple[int, Page | str, State | str]]
"""Every row of a session's pages: its number, and page and state or what is wrong with them."""


class Seals:
    """Verifies rows and decodes them; the same for every backend."""

    def segment_of(self, found: Row) -> SegmentRow:
        """The segment of a row, which says so if it is damaged."""
        number, tenant, stored, created, quarantined, kind, owner, seal, *counters, counters_seal = found
        name = stored.decode("utf-8", "replace") if isinstance(stored, bytes) else f"session {number}"
        damaged = ""
        if seal != seal_of_segment(number, tenant, stored, created, quarantined, kind, owner):
            damaged, quarantined = "its row is not what was written", False
        elif counters_seal != seal_of("counters", number, *counters):
            damaged, quarantined = "its counters are not what was written", False
        elif quarantined:
            damaged = QUARANTINED
        if damaged:
            return SegmentRow(number=number, name=name, created=0.0, damaged=damaged, quarantined=bool(quarantined))
        owned = {"kind": SegmentKind(kind.decode()), "user": owner.decode()}
        return SegmentRow(number=number, name=name, created=created, **owned, **dict(zip(COUNTERS, counters, strict=True)))

    def page(self, segment: int, number: int, record: bytes, seal: object) -> Page:
        """One page.

        Raises:
            StoreCorrupt: it is not what was written.
        """
        page = self.page_of(segment, number, record, seal)
        if isinstance(page, str):
            raise StoreCorrupt(f"{shown(number)} of session {segment}: {page}", advice=ADVICE)
        return page

    # The next two are called for each page that a search finds, so they call little themselves.

    def page_of(self, segment: int, number: int, record: bytes, seal: object) -> Page | str:
        """The page of a row, or what is wrong with it."""
        if seal != seal_of("page", segment, number, record):
            return "its record is not what was written"
        try:
            page = page_of(record)
        except UNREADABLE as error:
            return f"its record cannot be read: {error}"
        return page if page.id == number else f"its record is that of {address_of(page.id)}"

    def state_of(
        self, segment: int, number: int, place: bytes, pinned: int, importance: float, until: float | None, seal: object
    ) -> State | str:
        """The state of a row, or what is wrong with it."""
        if seal != seal_of_state(segment, number, place, pinned, importance, until):
            return "its state is not what was written"
        try:
            return state_of(place, pinned, importance, until)
        except UNREADABLE as error:
            return f"its state cannot be read: {error}"

    def pages_of(self, segment: SegmentRow, each: Iterable[tuple[int, Page | str, State | str]]) -> list[tuple[Page, State]]:
        """All pages of a segment from its rows, which come in order: p1, p2, ..., then f1, f2, ...

        Raises:
            StoreCorrupt: one is missing, or not what was written.
        """
        found: list[tuple[Page, State]] = []
        wrong: list[str] = []
        for number, page, state in each:
            if isinstance(page, Page) and isinstance(state, State):
                found.append((page, state))
            else:
                wrong.append(f"{shown(number)} of session {segment.name!r}: {page if isinstance(page, str) else state}")
        # A row of another session is skipped.
        if len(found) != segment.pages:
            what = f"session {segment.name!r} has {len(found)} pages where {segment.pages} were written"
            raise StoreCorrupt(wrong[0] if wrong else what, advice=ADVICE)
        first = next((at for at, (page, _) in enumerate(found) if page.id > 0), len(found))
        return [*found[first:], *found[:first][::-1]]

    def whole_event(self, segment: SegmentRow, number: int, act: bytes, body: bytes, seal: object) -> Event:
        """One event.

        Raises:
            StoreCorrupt: it is not what was written.
        """
        event = self.event(segment.number, number, act, body, seal)
        if isinstance(event, str):
            raise StoreCorrupt(f"event {number} of session {segment.name!r}: {event}", advice=ADVICE)
        return event

    def event(self, segment: int, number: int, act: bytes, body: bytes, seal: object) -> Event | str:
        """One event, or what is wrong with it."""
        if seal != seal_of("event", segment, number, act, body):
            return "it is not what was written"
        try:
            event = event_of(body)
        except UNREADABLE as error:
            return f"it cannot be read: {error}"
        return event if event.number == number else f"it is event {event.number}"


class SealedRows(Seals):
    """The rows of one file."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        # What was last read of each session, and the hash of its row, which says as much as a seal: a row that is still the same
        # is not verified again.
        self._read_before: dict[int, tuple[int, SegmentRow]] = {}

    def tenant(self, name: str) -> int | None:
        """Return a tenant's number, or None if there is no such tenant.

        Raises:
            StoreCorrupt: its row is damaged, or a row is damaged that might be its row.
        """
        found = row(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant WHERE name = ?", name)
        if found is not None:
            number, stored, seal = found
            if stored != name.encode() or seal != seal_of("tenant", number, stored):
                raise StoreCorrupt(f"the row of tenant {name!r} is not what was written", advice=TENANT_ADVICE)
            return int(number)
        for number, stored, seal in rows(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED"):
            if stored == name.encode() or seal != seal_of("tenant", number, stored):
                raise StoreCorrupt(
                    f"tenant {name!r} may be here, but the row of tenant {number} is damaged", advice=TENANT_ADVICE
                )
        lost = row(self._db, "SELECT id FROM segment NOT INDEXED WHERE tenant NOT IN (SELECT id FROM tenant NOT INDEXED)")
        if lost is not None:
            raise StoreCorrupt(f"tenant {name!r} may be here, but session {lost[0]} belongs to no tenant", advice=TENANT_ADVICE)
        return None

    def check_key(self) -> None:
        """Check that the rows are sealed with the key of this process.

        Raises:
            StoreError: no tenant is, and no segment.
        """
        tenants = rows(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED")
        if any(seal == seal_of("tenant", number, name) for number, name, seal in tenants):
            return
        segments = [self._segment(found) for found in rows(self._db, f"{_SESSIONS} NOT INDEXED")]
        if segments and all(segment.damaged and not segment.quarantined for segment in segments):
            advice = "set KILBURN_SEAL_KEY, or leave it out, as when the store was made"
            raise StoreError("no row is sealed with the key of this process", advice=advice)

    def restore_tenant(self, name: str) -> bool:
        """Restore a tenant's damaged row, if its name or its seal identifies it. Returns whether a row was restored."""
        restored = False
        for number, stored, seal in rows(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED"):
            own = seal_of("tenant", number, name.encode())
            if (stored == name.encode()) != (seal == own):
                self._db.execute("UPDATE tenant SET name = ?, seal = ? WHERE id = ?", (name, own, number))
                restored = True
        return restored

    def segments(self, tenant: int) -> list[SegmentRow]:
        """All sessions of a tenant, oldest first; read from the table, because an index may be damaged."""
        found = rows(self._db, f"{_SESSIONS} NOT INDEXED WHERE tenant = ? ORDER BY id", tenant)
        return [self._segment(one) for one in found]

    def named(self, tenant: int, name: str) -> SegmentRow | None:
        """The session of that name."""
        found = row(self._db, f"{_SESSIONS} WHERE tenant = ? AND name = ?", tenant, name)
        return self._segment(found) if found else None

    def under(self, tenant: int, name: str) -> list[SegmentRow]:
        """The sessions whose names begin with this one and a slash, oldest first."""
        # In the order of UTF-8, "0" comes right behind "/".
        between = f"{_SESSIONS} WHERE tenant = ? AND name >= ? AND name < ? ORDER BY id"
        return [self._segment(one) for one in rows(self._db, between, tenant, f"{name}/", f"{name}0")]

    def segment(self, tenant: int, number: int) -> SegmentRow | None:
        """The session of that number."""
        found = row(self._db, f"{_SESSIONS} WHERE id = ? AND tenant = ?", number, tenant)
        return self._segment(found) if found else None

    def to_write(self, tenant: int, number: int) -> tuple[SegmentRow | None, bool]:
        """The session of that number, and whether erased bytes may lie in the file: what whoever writes has to know."""
        select = f"{_SESSION}, EXISTS(SELECT 1 FROM erasure) FROM segment WHERE id = ? AND tenant = ?"
        found = row(self._db, select, number, tenant)
        return (self._segment(found[:-1]), bool(found[-1])) if found else (None, False)

    def _segment(self, found: Row) -> SegmentRow:
        known, read = self._read_before.get(found[0]), hash(found)
        if known is not None and known[0] == read:
            return known[1]
        segment = self.segment_of(found)
        if isinstance(found[0], int):
            self._read_before[found[0]] = read, segment
            if len(self._read_before) > REMEMBERED:
                del self._read_before[next(iter(self._read_before))]
        return segment

    def pages(self, segment: SegmentRow) -> list[tuple[Page, State]]:
        """A session's pages with their states: p1, p2, ..., then f1, f2, ...

        Raises:
            StoreCorrupt: one is missing, or not what was written.
        """
        return self.pages_of(segment, self.each_page(segment))

    def each_page(self, segment: SegmentRow) -> Iterator[tuple[int, Page | str, State | str]]:
        """Every row of a session's pages: its number, and page and state or what is wrong with them."""
        select = f"SELECT {_PAGE} FROM page WHERE segment = ? ORDER BY id"
        for number, record, seal, *state in rows(self._db, select, segment.number):
            yield number, self.page_of(segment.number, number, record, seal), self.state_of(segment.number, number, *state)

    def read(self, keys: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[Page, State]]]:
        """Single pages with their states, by segment and page; those that do not exist are left out.

        Raises:
            StoreCorrupt: one is not what was written.
        """
        for segment, number, record, seal, *values in rows_of_each(self._db, _PAGES, by_segment(keys)):
            page, state = self.page_of(segment, number, record, seal), self.state_of(segment, number, *values)
            if isinstance(page, str) or isinstance(state, str):
                wrong = page if isinstance(page, str) else state
                raise StoreCorrupt(f"{shown(number)} of session {segment}: {wrong}", advice=ADVICE)
            yield (segment, number), (page, state)

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """As `read`, but nothing is verified.

        Raises:
            StoreCorrupt: one cannot be decoded.
        """
        try:
            return {
                (segment, number): (page_of(record), state_of(*state))
                for segment, number, record, *state in rows_of_each(self._db, _SKIMMED, by_segment(keys))
            }
        except UNREADABLE as error:
            raise StoreCorrupt(f"a record cannot be read: {error}", advice=ADVICE) from error

    def events(self, segment: SegmentRow, after: int, limit: int) -> Iterator[Event]:
        """At most `limit` events of a session's ledger from `after` + 1 on.

        Raises:
            StoreCorrupt: one is missing, or not what was written.
        """
        select = (
            "SELECT number, CAST(act AS BLOB), body, seal FROM event"
            " WHERE segment = ? AND number > ? AND number <= ? ORDER BY number LIMIT ?"
        )
        found = rows(self._db, select, segment.number, after, segment.head, limit)
        for number, act, body, seal in found:
            after += 1
            if number != after:
                raise StoreCorrupt(f"event {after} of session {segment.name!r} is missing", advice=ADVICE)
            yield self.whole_event(segment, number, act, body, seal)
        if len(found) < limit and after < segment.head:
            raise StoreCorrupt(f"event {after + 1} of session {segment.name!r} is missing", advice=ADVICE)

    def numbered(self, segment: SegmentRow, numbers: Sequence[int]) -> Iterator[Event]:
        """The events with these numbers.

        Raises:
            StoreCorrupt: one is missing, or not what was written.
        """
        select = "SELECT number, CAST(act AS BLOB), body, seal FROM event WHERE segment = ? AND number = ?"
        wanted = [(segment.number, number) for number in numbers if number <= segment.head]
        there = 0
        for number, act, body, seal in rows_of_each(self._db, select, wanted):
            there += 1
            yield self.whole_event(segment, number, act, body, seal)
        if there < len(wanted):
            raise StoreCorrupt(f"an event of session {segment.name!r} is missing", advice=ADVICE)

    def checkpoint(self, segment: SegmentRow, until: int) -> tuple[int, bytes] | None:
        """The newest checkpoint of a session at or before an event, with the number of its event; None if there is none, or it
        is not what was written: it is derived from the ledger."""
        select = "SELECT head, size, codec, data, seal FROM checkpoint WHERE segment = ? AND head <= ? ORDER BY head DESC LIMIT 1"
        found = row(self._db, select, segment.number, until)
        if found is None or found[-1] != seal_of("checkpoint", segment.number, *found[:-1]):
            return None
        head, size, codec, data, _ = found
        return head, inflate(codec, data, size, b"")

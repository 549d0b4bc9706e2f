"""Reads sealed rows (sessions, pages, events) and verifies each one.

An altered row raises a `StoreCorrupt` that names the session and the record.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import apsw

from kilburn.backend import SegmentInfo, SegmentKind, State
from kilburn.backends.codec import inflate
from kilburn.backends.connection import Row, by_segment, row, rows, rows_of_each
from kilburn.backends.records import UNREADABLE, compute_seal, decode_event, decode_page
from kilburn.errors import StoreCorrupt, StoreError
from kilburn.event import Event
from kilburn.page import Page, Place, address_of

ADVICE = "run `kilburn fsck`; other sessions are not affected"

TENANT_ADVICE = "run `kilburn fsck --repair`; tenants whose own rows are whole are not affected"

QUARANTINED = "it was quarantined by `kilburn fsck --repair`"
"""The value of `damaged` of a session that was quarantined."""

COUNTERS = ("used", "head", "pages", "tokens", "passages", "characters")
"""The counters of a segment: columns of its row, under a separate seal."""

_SESSION = (
    "SELECT id, tenant, CAST(name AS BLOB), created, quarantined, CAST(kind AS BLOB), CAST(owner AS BLOB), seal,"
    f" {', '.join(COUNTERS)}, counters_seal"
)
_SESSIONS = f"{_SESSION} FROM segment"


def seal_of_segment(number: int, tenant: int, name: bytes, created: float, quarantined: int, kind: bytes, owner: bytes) -> bytes:
    """Return the checksum of the columns of a segment's row that never change."""
    return compute_seal("segment", number, tenant, name, created, quarantined, kind, owner)


def seal_of_state(segment: int, page: int, place: bytes, pinned: int, importance: float, until: float | None) -> bytes:
    """Return the checksum of a page's state."""
    return compute_seal("state", segment, page, place, pinned, importance, until)


MAX_CACHED_SEGMENTS = 100_000
"""Cached rows of segments for each connection: about 0.5 KB each."""

_PLACES = {place.value.encode(): place for place in Place}

_PAGE = "page.id, record, seal, CAST(place AS BLOB), pinned, importance, valid_until, state_seal"

_OF_PAGES = "FROM json_each(?) CROSS JOIN page ON segment = ? AND page.id = value"
_PAGES = f"SELECT segment, {_PAGE} {_OF_PAGES}"
_SKIMMED = f"SELECT segment, page.id, record, CAST(place AS BLOB), pinned, importance, valid_until {_OF_PAGES}"


@lru_cache
def make_state(place: bytes, pinned: int, importance: float, until: float | None) -> State:
    """Return the state of a row. Few states are common, so they are cached."""
    return State(_PLACES[place], bool(pinned), importance, until)


class SegmentRow(SegmentInfo, frozen=True, kw_only=True):
    """One row of `segment`. In a damaged row (`damaged` says why) only number and name are meaningful.

    Args:
        passages: entries that it ever added to the text index. characters: their total length.
        quarantined: whether `fsck --repair` quarantined it.
    """

    passages: int = 0
    characters: int = 0
    quarantined: bool = False

    @property
    def info(self) -> SegmentInfo:
        """The segment without its internal figures."""
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
        """Return this row.

        Raises:
            StoreCorrupt: it is damaged.
        """
        if self.damaged:
            erase = f"work goes on under its old name; `kilburn forget {self.name!r} --all` erases the rest"
            raise StoreCorrupt(f"session {self.name!r}: {self.damaged}", advice=erase if self.quarantined else ADVICE)
        return self


def shown(page: object) -> str:
    """Return the address of a page for messages; in a damaged record its id may be of any type."""
    return address_of(page) if isinstance(page, int) else f"page {page!r}"


PageRows = Iterable[tuple[int, Page | str, State | str]]
"""The rows of a session's pages: number, page or its problem, state or its problem."""


class Seals:
    """Verifies and decodes rows, for every backend."""

    def parse_segment(self, columns: Row) -> SegmentRow:
        """Return the segment of a row; `damaged` tells what is wrong with it."""
        number, tenant, name_bytes, created, quarantined, kind, owner, seal, *counters, counters_seal = columns
        name = name_bytes.decode("utf-8", "replace") if isinstance(name_bytes, bytes) else f"session {number}"
        damaged = ""
        if seal != seal_of_segment(number, tenant, name_bytes, created, quarantined, kind, owner):
            damaged, quarantined = "its row is not what was written", False
        elif counters_seal != compute_seal("counters", number, *counters):
            damaged, quarantined = "its counters are not what was written", False
        elif quarantined:
            damaged = QUARANTINED
        if damaged:
            return SegmentRow(number=number, name=name, created=0.0, damaged=damaged, quarantined=bool(quarantined))
        owned = {"kind": SegmentKind(kind.decode()), "user": owner.decode()}
        return SegmentRow(number=number, name=name, created=created, **owned, **dict(zip(COUNTERS, counters, strict=True)))

    def page(self, segment: int, number: int, record: bytes, seal: object) -> Page:
        """Return the page of a row.

        Raises:
            StoreCorrupt: it is altered.
        """
        page = self.parse_page(segment, number, record, seal)
        if isinstance(page, str):
            raise StoreCorrupt(f"{shown(number)} of session {segment}: {page}", advice=ADVICE)
        return page

    # The next two run for each page that a search finds, so they avoid calls.

    def parse_page(self, segment: int, number: int, record: bytes, seal: object) -> Page | str:
        """Return the page of a row, or a description of what is wrong with it."""
        if seal != compute_seal("page", segment, number, record):
            return "its record is not what was written"
        try:
            page = decode_page(record)
        except UNREADABLE as error:
            return f"its record cannot be read: {error}"
        return page if page.id == number else f"its record is that of {address_of(page.id)}"

    def parse_state(
        self, segment: int, number: int, place: bytes, pinned: int, importance: float, until: float | None, seal: object
    ) -> State | str:
        """Return the state of a row, or a description of what is wrong with it."""
        if seal != seal_of_state(segment, number, place, pinned, importance, until):
            return "its state is not what was written"
        try:
            return make_state(place, pinned, importance, until)
        except UNREADABLE as error:
            return f"its state cannot be read: {error}"

    def parse_pages(
        self, segment: SegmentRow, page_rows: Iterable[tuple[int, Page | str, State | str]]
    ) -> list[tuple[Page, State]]:
        """Return all pages of a segment from its ordered rows: p1, p2, ..., then f1, f2, ...

        Raises:
            StoreCorrupt: one is missing or altered.
        """
        pages: list[tuple[Page, State]] = []
        wrong: list[str] = []
        for number, page, state in page_rows:
            if isinstance(page, Page) and isinstance(state, State):
                pages.append((page, state))
            else:
                wrong.append(f"{shown(number)} of session {segment.name!r}: {page if isinstance(page, str) else state}")
        # Rows of other sessions are skipped.
        if len(pages) != segment.pages:
            message = f"session {segment.name!r} has {len(pages)} pages where {segment.pages} were written"
            raise StoreCorrupt(wrong[0] if wrong else message, advice=ADVICE)
        first = next((at for at, (page, _) in enumerate(pages) if page.id > 0), len(pages))
        return [*pages[first:], *pages[:first][::-1]]

    def whole_event(self, segment: SegmentRow, number: int, act: bytes, body: bytes, seal: object) -> Event:
        """Return the event of a row.

        Raises:
            StoreCorrupt: it is altered.
        """
        event = self.event(segment.number, number, act, body, seal)
        if isinstance(event, str):
            raise StoreCorrupt(f"event {number} of session {segment.name!r}: {event}", advice=ADVICE)
        return event

    def event(self, segment: int, number: int, act: bytes, body: bytes, seal: object) -> Event | str:
        """Return the event of a row, or a description of what is wrong with it."""
        if seal != compute_seal("event", segment, number, act, body):
            return "it is not what was written"
        try:
            event = decode_event(body)
        except UNREADABLE as error:
            return f"it cannot be read: {error}"
        return event if event.number == number else f"it is event {event.number}"


class SealedRows(Seals):
    """Reads the rows of one file."""

    def __init__(self, db: apsw.Connection) -> None:
        self._db = db
        # The last row read of each segment, and its hash: an unchanged row is not verified again.
        self._read_before: dict[int, tuple[int, SegmentRow]] = {}

    def tenant(self, name: str) -> int | None:
        """Return a tenant's number, or None if there is no such tenant.

        Raises:
            StoreCorrupt: its row is damaged, or a row is damaged that might be its row.
        """
        tenant_row = row(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant WHERE name = ?", name)
        if tenant_row is not None:
            number, name_bytes, seal = tenant_row
            if name_bytes != name.encode() or seal != compute_seal("tenant", number, name_bytes):
                raise StoreCorrupt(f"the row of tenant {name!r} is not what was written", advice=TENANT_ADVICE)
            return int(number)
        for number, name_bytes, seal in rows(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED"):
            if name_bytes == name.encode() or seal != compute_seal("tenant", number, name_bytes):
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
            StoreError: neither a tenant nor a segment is.
        """
        tenants = rows(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED")
        if any(seal == compute_seal("tenant", number, name) for number, name, seal in tenants):
            return
        segments = [self._segment(columns) for columns in rows(self._db, f"{_SESSIONS} NOT INDEXED")]
        if segments and all(segment.damaged and not segment.quarantined for segment in segments):
            advice = "set KILBURN_SEAL_KEY, or leave it out, as when the store was made"
            raise StoreError("no row is sealed with the key of this process", advice=advice)

    def restore_tenant(self, name: str) -> bool:
        """Restore a tenant's damaged row, if its name or its seal identifies it. Returns whether a row was restored."""
        restored = False
        for number, name_bytes, seal in rows(self._db, "SELECT id, CAST(name AS BLOB), seal FROM tenant NOT INDEXED"):
            expected = compute_seal("tenant", number, name.encode())
            if (name_bytes == name.encode()) != (seal == expected):
                self._db.execute("UPDATE tenant SET name = ?, seal = ? WHERE id = ?", (name, expected, number))
                restored = True
        return restored

    def segments(self, tenant: int) -> list[SegmentRow]:
        """Return all segments of a tenant, oldest first. They are read from the table, because an index may be damaged."""
        segment_rows = rows(self._db, f"{_SESSIONS} NOT INDEXED WHERE tenant = ? ORDER BY id", tenant)
        return [self._segment(columns) for columns in segment_rows]

    def named(self, tenant: int, name: str) -> SegmentRow | None:
        """Return the segment of that name."""
        columns = row(self._db, f"{_SESSIONS} WHERE tenant = ? AND name = ?", tenant, name)
        return self._segment(columns) if columns else None

    def under(self, tenant: int, name: str) -> list[SegmentRow]:
        """Return the segments whose names begin with this name and a slash, oldest first."""
        # In the order of UTF-8, "0" comes right behind "/".
        between = f"{_SESSIONS} WHERE tenant = ? AND name >= ? AND name < ? ORDER BY id"
        return [self._segment(columns) for columns in rows(self._db, between, tenant, f"{name}/", f"{name}0")]

    def segment(self, tenant: int, number: int) -> SegmentRow | None:
        """Return the segment of that number."""
        columns = row(self._db, f"{_SESSIONS} WHERE id = ? AND tenant = ?", number, tenant)
        return self._segment(columns) if columns else None

    def to_write(self, tenant: int, number: int) -> tuple[SegmentRow | None, bool]:
        """Return the segment of that number, and whether the file may contain erased bytes: what a writer needs."""
        select = f"{_SESSION}, EXISTS(SELECT 1 FROM erasure) FROM segment WHERE id = ? AND tenant = ?"
        columns = row(self._db, select, number, tenant)
        return (self._segment(columns[:-1]), bool(columns[-1])) if columns else (None, False)

    def _segment(self, columns: Row) -> SegmentRow:
        cached, row_hash = self._read_before.get(columns[0]), hash(columns)
        if cached is not None and cached[0] == row_hash:
            return cached[1]
        segment = self.parse_segment(columns)
        if isinstance(columns[0], int):
            self._read_before[columns[0]] = row_hash, segment
            if len(self._read_before) > MAX_CACHED_SEGMENTS:
                del self._read_before[next(iter(self._read_before))]
        return segment

    def pages(self, segment: SegmentRow) -> list[tuple[Page, State]]:
        """Return a segment's pages with their states: p1, p2, ..., then f1, f2, ...

        Raises:
            StoreCorrupt: one is missing or altered.
        """
        return self.parse_pages(segment, self.each_page(segment))

    def each_page(self, segment: SegmentRow) -> Iterator[tuple[int, Page | str, State | str]]:
        """Yield the rows of a segment's pages; see `PageRows`."""
        select = f"SELECT {_PAGE} FROM page WHERE segment = ? ORDER BY id"
        for number, record, seal, *state in rows(self._db, select, segment.number):
            yield number, self.parse_page(segment.number, number, record, seal), self.parse_state(segment.number, number, *state)

    def read(self, keys: Iterable[tuple[int, int]]) -> Iterator[tuple[tuple[int, int], tuple[Page, State]]]:
        """Single pages with their states, by segment and page; those that do not exist are left out.

        Raises:
            StoreCorrupt: one is not what was written.
        """
        for segment, number, record, seal, *values in rows_of_each(self._db, _PAGES, by_segment(keys)):
            page, state = self.parse_page(segment, number, record, seal), self.parse_state(segment, number, *values)
            if isinstance(page, str) or isinstance(state, str):
                wrong = page if isinstance(page, str) else state
                raise StoreCorrupt(f"{shown(number)} of session {segment}: {wrong}", advice=ADVICE)
            yield (segment, number), (page, state)

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Return pages like `read`, but unverified.

        Raises:
            StoreCorrupt: one cannot be decoded.
        """
        try:
            return {
                (segment, number): (decode_page(record), make_state(*state))
                for segment, number, record, *state in rows_of_each(self._db, _SKIMMED, by_segment(keys))
            }
        except UNREADABLE as error:
            raise StoreCorrupt(f"a record cannot be read: {error}", advice=ADVICE) from error

    def events(self, segment: SegmentRow, after: int, limit: int) -> Iterator[Event]:
        """Yield at most `limit` events of a ledger from number `after` + 1.

        Raises:
            StoreCorrupt: one is missing or altered.
        """
        select = (
            "SELECT number, CAST(act AS BLOB), body, seal FROM event"
            " WHERE segment = ? AND number > ? AND number <= ? ORDER BY number LIMIT ?"
        )
        event_rows = rows(self._db, select, segment.number, after, segment.head, limit)
        for number, act, body, seal in event_rows:
            after += 1
            if number != after:
                raise StoreCorrupt(f"event {after} of session {segment.name!r} is missing", advice=ADVICE)
            yield self.whole_event(segment, number, act, body, seal)
        if len(event_rows) < limit and after < segment.head:
            raise StoreCorrupt(f"event {after + 1} of session {segment.name!r} is missing", advice=ADVICE)

    def numbered(self, segment: SegmentRow, numbers: Sequence[int]) -> Iterator[Event]:
        """Yield the events with these numbers.

        Raises:
            StoreCorrupt: one is missing or altered.
        """
        select = "SELECT number, CAST(act AS BLOB), body, seal FROM event WHERE segment = ? AND number = ?"
        requested = [(segment.number, number) for number in numbers if number <= segment.head]
        event_rows = 0
        for number, act, body, seal in rows_of_each(self._db, select, requested):
            event_rows += 1
            yield self.whole_event(segment, number, act, body, seal)
        if event_rows < len(requested):
            raise StoreCorrupt(f"an event of session {segment.name!r} is missing", advice=ADVICE)

    def checkpoint(self, segment: SegmentRow, until: int) -> tuple[int, bytes] | None:
        """Return the number of the event and the data of the newest checkpoint up to an event; None if there is none, or it is
        altered: it is derived from the ledger."""
        select = "SELECT head, size, codec, data, seal FROM checkpoint WHERE segment = ? AND head <= ? ORDER BY head DESC LIMIT 1"
        checkpoint_row = row(self._db, select, segment.number, until)
        if checkpoint_row is None or checkpoint_row[-1] != compute_seal("checkpoint", segment.number, *checkpoint_row[:-1]):
            return None
        head, size, codec, data, _ = checkpoint_row
        return head, inflate(codec, data, size, b"")

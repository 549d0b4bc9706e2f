"""The durable store in PostgreSQL, for many programs on many machines. It keeps what `kilburn.backends.sqlite` keeps, under the
same seals, and finds the same in the same order.

One object serves one tenant. Objects of a process share their connections. No correctness depends on a clock, or on
anything that a connection remembers.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from types import TracebackType
from typing import Any, TypeVar

from kilburn.backend import (
    Batch,
    Digests,
    HistoryOwner,
    Moved,
    Passage,
    Scope,
    SegmentInfo,
    SegmentKind,
    State,
    Vector,
    check_name,
    root_of,
)
from kilburn.backends import citations, mentions
from kilburn.backends.anchor import Anchor
from kilburn.backends.chilling import Chilling, ColdRows, OpenPlace, required
from kilburn.backends.codec import inflate, key_of, sound_passages
from kilburn.backends.findings import Finding
from kilburn.backends.postgres import halves, schema, writing
from kilburn.backends.postgres.coldrows import ROW, PostgresColdRows, searchable_in, text_at
from kilburn.backends.postgres.connection import Database, checked_url, connected, split_connections
from kilburn.backends.postgres.erasing import held, wipe
from kilburn.backends.postgres.inspection import Inspection, orphans
from kilburn.backends.postgres.postings import Postings
from kilburn.backends.postgres.statements import Row, Statements
from kilburn.backends.postgres.writing import SEALS, SEGMENT, Writing
from kilburn.backends.ranked import PLACES, Extents, number_of
from kilburn.backends.records import UNREADABLE, page_of, seal_of
from kilburn.backends.sealed import ADVICE, SegmentRow, shown, state_of
from kilburn.errors import KilburnError, StoreCorrupt, StoreError, StoreReadOnly, StoreStale, StoreUnavailable
from kilburn.event import Act, Event
from kilburn.page import Page, Span
from kilburn.retrieval import EXACT

log = logging.getLogger("kilburn")

T = TypeVar("T")

CHUNK = 1000
"""Events, or vectors, that are read at a time: no transaction stays open while a caller thinks."""

AHEAD = 4000
"""Bytes of a text that is read with what was found in it, at most."""

FEW_EVENTS = 16
"""Events that are read first: what a session was made of stands among them."""

_PAGE = "page.segment, page.id, record, page.seal, convert_to(place, 'UTF8'), pinned, importance, valid_until, state_seal"
_OF_SEGMENT = f"SELECT {_PAGE} FROM kilburn.page WHERE tenant = %s AND segment = %s ORDER BY id"
# Each is looked up by itself (OFFSET 0): as long as the tables have no statistics, a join would read all of the tenant's.
# With the texts of the pages, where these are short: each page and its text once, for the first of its passages.
_HITS = (
    "SELECT hit.id, hit.page, start, stop, page.segment, record, page.seal, place, pinned, importance, valid_until, state_seal,"
    " size, codec, data, digest FROM (SELECT own.*,"
    " row_number() OVER (PARTITION BY own.id >> 32, own.page ORDER BY place) AS turn"
    " FROM unnest(%s::bigint[]) WITH ORDINALITY AS wanted(id, place) CROSS JOIN LATERAL (SELECT id, page, start, stop"
    " FROM kilburn.passage WHERE tenant = %s AND passage.id = wanted.id OFFSET 0) AS own) AS hit"
    " LEFT JOIN LATERAL (SELECT segment, record, seal, convert_to(place, 'UTF8') AS place, pinned, importance, valid_until,"
    " state_seal, content FROM kilburn.page WHERE tenant = %s AND segment = hit.id >> 32 AND page.id = hit.page OFFSET 0) AS page"
    " ON turn = 1 LEFT JOIN LATERAL (SELECT size, codec, data, digest FROM kilburn.content WHERE tenant = %s"
    " AND digest = page.content AND size <= %s OFFSET 0) AS text ON true"
)
_WANTED = (
    "unnest(%s::bigint[], %s::bigint[]) AS wanted(segment, id) CROSS JOIN LATERAL (SELECT * FROM kilburn.page WHERE tenant = %s"
    " AND page.segment = wanted.segment AND page.id = wanted.id OFFSET 0) AS page"
)
_OF_KEYS = f"SELECT {_PAGE} FROM {_WANTED}"
_WITH_TEXTS = (
    f"SELECT {_PAGE}, size, codec, data, digest FROM {_WANTED} LEFT JOIN LATERAL (SELECT size, codec, data, digest"
    " FROM kilburn.content WHERE content.tenant = page.tenant AND digest = page.content AND size <= %s OFFSET 0) AS text ON true"
)
# By their names (OFFSET 0), and not through all of the tenant's because these are in order.
_UNDER = (
    f"SELECT * FROM (SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s AND name >= %s AND name < %s ORDER BY name OFFSET 0)"
    " AS own ORDER BY id"
)
_ALL = f"SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s ORDER BY id"
_SOME = (
    "SELECT own.* FROM unnest(%s::bigint[]) AS wanted(id) CROSS JOIN LATERAL"
    f" (SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s AND segment.id = wanted.id OFFSET 0) AS own"
)
_NAMED = f"SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s AND name = %s"
_NUMBERS = range(-(1 << 63), 1 << 63)
_LAST = "SELECT seal FROM kilburn.event WHERE tenant = %s AND segment = %s AND number = %s"
# Each passage is looked up by itself (OFFSET 0), as most often the first few are enough: a join would read all of the tenant's.
_WAITING = (
    "SELECT waits.id, waits.page, waits.start, waits.stop FROM kilburn.segment"
    " LEFT JOIN kilburn.embedded ON embedded.tenant = segment.tenant AND embedded.segment = segment.id AND embedder = %s"
    " CROSS JOIN LATERAL (SELECT id, page, start, stop FROM kilburn.passage WHERE passage.tenant = segment.tenant"
    " AND passage.id BETWEEN (segment.id << 32) AND ((segment.id << 32) | ((%s - coalesce(passages_done, 0)) << 4) | 15)"
    " AND NOT EXISTS(SELECT FROM kilburn.vector WHERE vector.tenant = passage.tenant AND entry = passage.id AND embedder = %s"
    " OFFSET 0)"
    " ORDER BY passage.id DESC LIMIT %s) AS waits"
    " WHERE segment.tenant = %s AND passages > coalesce(passages_done, 0){among} ORDER BY segment.id DESC, waits.id DESC LIMIT %s"
)


class _Reads:
    """What was read in a snapshot.

    Args:
        ahead: whether pages and short texts are read with the passages that are found in them.
    """

    def __init__(self, *, ahead: bool = False) -> None:
        self.ahead = ahead
        self.segments: dict[int, SegmentRow] = {}
        self.is_whole = False
        """Whether these are all segments of the tenant."""
        self.pages: dict[tuple[int, int], Row] = {}
        self.texts: dict[bytes, Row] = {}

    def take(self, segment: int, page: int, row: Sequence[Any]) -> None:
        """Take a page, and its text if that was read: the rest of its row, then size, codec, data and digest."""
        self.pages[segment, page] = (segment, page, *row[:-4])
        if row[-1] is not None:
            self.texts[row[-1]] = tuple(row[-4:])


class Postgres:
    """A store in a database of PostgreSQL.

    Args:
        url: `postgresql://user:password@host:port/database`, with whatever libpq takes, and `connections=N`: what this process
            may have at most, 8 unless it says so.
        tenant: the partition that this object serves.
        readonly: refuse every write; a replica is enough.
        busy_timeout: seconds to wait for another writer.
        durable: whether a commit waits for the server's disk; without, `sync` does.

    Raises:
        StoreUnavailable: the server cannot be reached, or lets this user not in.
        StoreVersion: a server that is too old, or a store of a newer Kilburn or of a development version.
        StoreCorrupt: another's schema.
        StoreReadOnly: the user lacks a right, or the server is a replica.
        StoreError: `readonly`, and there is no store. SpecError: no URL, or no name of a tenant.
    """

    def __repr__(self) -> str:
        """Where it is and for whom; nothing is read for it."""
        return f"<Postgres {self.path!r} of tenant {self.tenant!r}{', for reading' * self.readonly}>"

    def __init__(
        self, url: str, *, tenant: str = "default", readonly: bool = False, busy_timeout: float = 5.0, durable: bool = True
    ) -> None:
        self.tenant = check_name(tenant, "tenant")
        self.readonly = readonly
        _, connections = split_connections(url)
        self._url = checked_url(url)
        self._durable, self._patience = durable, busy_timeout
        self._erasing, self._local = threading.local(), threading.local()
        # What is said to be leaving, and is not any more.
        self._staying = set[citations.Citation]()
        self.anchor = Anchor()
        # Of segments that were written to and not yet synced: the number and the seal of the last event.
        self._unsynced: dict[int, tuple[int, bytes]] = {}
        self._db = Database(self._url, patience=busy_timeout, durable=durable, connections=connections)
        self.path = self._db.shown
        # Where pgvector is, if the server searches by meaning.
        self._halves = ""
        # Why erased bytes could not be removed from the server's files.
        self._hindrance: StoreError | None = None
        self._opened = OpenPlace()
        self._chilling = Chilling(self.path, self._read_cold, self._change_cold, self.sync, self._leaves_objects)
        try:
            self._number = self._db.tenant = self._register()
            if not readonly:
                # A program that was killed, or a reader, may have left erased bytes.
                self._chilling.sweep()
                self._wipe()
        except BaseException:
            self._db.close()
            raise

    def _register(self) -> int:
        with connected(self._url, "opening") as connection:
            if self.readonly:
                schema.check_server(connection, self.path)
                if schema.schema_number(connection, self.path) == 0:
                    raise StoreError(f"there is no store in {self.path}", advice="`kilburn chat` or `kilburn copy` makes one")
                self._halves = halves.found_halves(connection)
            else:
                schema.prepare_schema(connection, self.path)
                self._halves = halves.add_halves(connection)
            return schema.tenant_number(connection, self.tenant, create=not self.readonly)

    def _check_writes(self) -> None:
        if self.readonly:
            raise StoreReadOnly(f"{self.path} was opened for reading", advice="open it without readonly")

    def segment(
        self, name: str, *, time: float, create: bool = True, kind: SegmentKind = SegmentKind.SESSION, user: str = ""
    ) -> SegmentInfo | None:
        """The segment of that name, made at `time` where there is none and `create` is set, of this kind and for this user."""
        if user:
            check_name(user, "user")
        rows = self._ask(_NAMED, self._number, name.encode("utf-8", "surrogatepass"))
        segment = SEALS.segment_of(rows[0]) if rows else None
        if segment is None and create:
            self._check_writes()
            segment = self._db.write("writing", partial(self._make, name=name, time=time, kind=kind, user=user))
        return segment.whole().info if segment is not None else None

    def _named(self, statements: Statements, name: str) -> SegmentRow | None:
        row = statements.row(_NAMED, self._number, name.encode("utf-8", "surrogatepass"))
        return SEALS.segment_of(row) if row is not None else None

    def _make(self, statements: Statements, name: str, time: float, kind: SegmentKind, user: str) -> SegmentRow | None:
        writing.create(statements, self._number, check_storable(name), time, kind, user)
        return self._named(statements, name)

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        """Create a session at `time`, for this user, and do its first batch, as one transaction: both, or nothing."""
        if user:
            check_name(user, "user")
        self._check_writes()
        if self._staying:
            self._stay()
        mark, last = secrets.token_bytes(writing.MARK), None

        def do(statements: Statements) -> SegmentRow:
            nonlocal last
            number = writing.create(statements, self._number, check_storable(name), time, SegmentKind.SESSION, user)
            if number is None:
                raise StoreStale(f"there is a session {name!r} already", advice="take another name")
            writing_step = Writing(statements, self._number, number, batch, self._opened, mark)
            writing_step.write()
            last = writing_step.last
            segment = self._named(statements, name)
            assert segment is not None
            return segment

        def settled(statements: Statements) -> SegmentRow | None:
            # Who creates a session holds this row until the transaction that may have done it has ended.
            statements.send("SELECT FROM kilburn.counter WHERE tenant = %s FOR UPDATE", self._number)
            segment = self._named(statements, name)
            return segment if segment is not None and self._is_mine(statements, segment.number, mark) else None

        info = self._db.write("writing", do, settled).whole().info
        self._written(info.number, last)
        if self.anchor.file:
            self.anchor.note(info.number, batch)
        return info

    @property
    def _reads(self) -> _Reads | None:
        """What this thread has read in its snapshot, if it is in one."""
        return getattr(self._local, "reads", None)

    def _segments(self, statements: Statements) -> list[SegmentRow]:
        reads = self._reads or _Reads()
        if not reads.is_whole:
            rows = [SEALS.segment_of(row) for row in statements.rows(_ALL, self._number)]
            reads.segments, reads.is_whole = {row.number: row for row in rows}, True
        return list(reads.segments.values())

    def _numbered(self, statements: Statements, numbers: Iterable[int]) -> dict[int, SegmentRow]:
        reads, wanted_numbers = self._reads or _Reads(), set(numbers)
        missing = [] if reads.is_whole else [number for number in wanted_numbers - reads.segments.keys() if number in _NUMBERS]
        rows = statements.rows(_SOME, missing, self._number) if missing else []
        reads.segments.update((row[0], SEALS.segment_of(row)) for row in rows)
        return {number: reads.segments[number] for number in wanted_numbers if number in reads.segments}

    def segments(self, under: str = "") -> list[SegmentInfo]:
        """All segments of the tenant, oldest first, or those under a name; damaged ones say so."""
        if not under:
            return [segment.info for segment in self._db.read("reading", self._segments)]
        # In the order of bytes, "0" comes right behind "/".
        low, high = f"{under}/".encode(), f"{under}0".encode()
        rows = self._db.read("reading", lambda statements: statements.rows(_UNDER, self._number, low, high))
        return [SEALS.segment_of(row).info for row in rows]

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """See `Backend`."""
        every = self.segments()
        selected = [info for info in every if info.kind in kinds and (user is None or info.user in ("", user))]
        infos = {info.number: info for info in selected if not info.damaged}
        damaged = tuple(info for info in selected if info.damaged)
        return Scope(infos=infos, damaged=damaged, everything=len(selected) == len(every))

    def commit(self, segment: int, batch: Batch) -> None:
        """Do the whole batch durably, or raise and do nothing.

        What was erased is gone for every reader when this returns; see `kilburn.backends.postgres.erasing` for its bytes.
        """
        self._check_writes()
        if self._staying:
            self._stay()
        mark, last = secrets.token_bytes(writing.MARK), None

        def do(statements: Statements) -> bool:
            nonlocal last
            writing = Writing(statements, self._number, segment, batch, self._opened, mark)
            writing.write()
            last = writing.last
            return True

        def settled(statements: Statements) -> bool | None:
            return self._is_mine(statements, segment, mark) or None

        self._db.write("writing", do, settled)
        self._written(segment, last)
        if self.anchor.file:
            self.anchor.note(segment, batch)
        if batch.erase:
            self._chilling.sweep()
        if batch.erase or batch.inherited or self._db.erased:
            self._db.erased = True
            self._wipe()

    def _is_mine(self, statements: Statements, segment: int, mark: bytes) -> bool:
        """Whether a write with this mark was done. Others may have gone on with the segment since."""
        # The row is free when the transaction that may have done it has ended.
        select = "SELECT writer FROM kilburn.segment WHERE tenant = %s AND id = %s FOR UPDATE"
        row = statements.row(select, self._number, segment)
        return row is not None and writing.has_mark(row[0], mark)

    def _written(self, segment: int, last: tuple[int, bytes] | None) -> None:
        """Remember what was committed to a segment: whether it is on the disk, or has to be asked for there."""
        if self._db.joined is not None:
            # It may be undone yet.
            self._db.lasting.joined.append((segment, last))
            return
        self._db.lasting.done = self._db.lasting.on
        if self._db.lasting.on:
            self._unsynced.pop(segment, None)
        elif last is not None and not self._durable:
            self._unsynced[segment] = last

    def _stored(self, statements: Statements, segment: int) -> SegmentRow | None:
        """A segment that is whole; None where there is none of that number."""
        row = self._numbered(statements, [segment]).get(segment)
        return row.whole() if row is not None else None

    def pages(self, segment: int) -> Iterator[tuple[Page, State]]:
        """All pages of a segment with their states: p1, p2, ..., then f1, f2, ..."""

        def do(statements: Statements) -> list[tuple[Page, State]]:
            of, rows = statements.send(_SOME, [segment], self._number), statements.send(_OF_SEGMENT, self._number, segment)
            segment_row = of.fetchone()
            if segment_row is None:
                return []
            return SEALS.pages_of(
                SEALS.segment_of(segment_row).whole(),
                (
                    (number, SEALS.page_of(segment_number, number, record, seal), SEALS.state_of(segment_number, number, *state))
                    for segment_number, number, record, seal, *state in rows.fetchall()
                ),
            )

        yield from self._db.read("reading", do)

    def _rows(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Row]:
        """The rows of pages; in the order of the keys.

        Raises:
            StoreCorrupt: a segment is damaged.
        """
        unique_keys = [key for key in dict.fromkeys(keys) if all(part in _NUMBERS for part in key)]
        pages = (self._reads or _Reads()).pages
        missing = [key for key in unique_keys if key not in pages]

        def do(statements: Statements) -> None:
            answer = statements.send(_OF_KEYS, [number for number, _ in missing], [page for _, page in missing], self._number)
            for segment in self._numbered(statements, (segment for segment, _ in unique_keys)).values():
                segment.whole()
            pages.update(((row[0], row[1]), row) for row in answer.fetchall())

        if missing:
            self._db.read("reading", do)
        return {key: pages[key] for key in unique_keys if key in pages}

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Single pages with their states; what does not exist is left out."""
        pages = {}
        for key, (segment, number, record, seal, *values) in self._rows(keys).items():
            page, state = SEALS.page_of(segment, number, record, seal), SEALS.state_of(segment, number, *values)
            if isinstance(page, str) or isinstance(state, str):
                wrong = page if isinstance(page, str) else state
                raise StoreCorrupt(f"{shown(number)} of session {segment}: {wrong}", advice=ADVICE)
            pages[key] = page, state
        return pages

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        try:
            return {
                key: (page_of(record), state_of(place, pinned, importance, valid_until))
                for key, (_, _, record, _, place, pinned, importance, valid_until, _) in self._rows(keys).items()
            }
        except UNREADABLE as error:
            raise StoreCorrupt(f"a record cannot be read: {error}", advice=ADVICE) from error

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """See `Backend`."""
        page_ids = set(pages)
        select = (
            "SELECT citing_segment, citing_page FROM kilburn.citation WHERE tenant = %s AND segment = %s"
            f" AND page = ANY(%s::bigint[]) AND NOT {citations.LEAVES}"
        )

        def do(statements: Statements) -> tuple[set[tuple[int, int]], set[int]]:
            row = self._numbered(statements, [segment]).get(segment)
            if row is None or not page_ids:
                return set(), set()
            keys = set(statements.rows(select, self._number, segment, sorted(page_ids)))
            if row.kind is not SegmentKind.SESSION or row.damaged:
                return keys, set()
            numbers = writing.events_of(statements, self._number, segment, mentions.source_nodes(page_ids))
            events = writing.read_events(statements, self._number, row, [number for number in numbers if number <= row.head])
            return keys, mentions.made_by(events, page_ids)

        found, derived = self._db.read("reading", do)
        rows = self.read([(segment, page) for page in sorted(derived)])
        found.update(key for key, (page, _) in rows.items() if page.digest and not page_ids.isdisjoint(page.sources))
        return sorted(found)

    def calls(self, segment: int, among: Iterable[str] | None = None) -> dict[str, int]:
        """The calls of a segment by their ids, with the ids of their pages: all, or those with these ids."""
        select = "SELECT call, id FROM kilburn.page WHERE tenant = %s AND segment = %s AND call IS NOT NULL"
        if among is None:
            rows = self._ask(f"{select} ORDER BY id", self._number, segment)
        else:
            call_ids = [call.encode("utf-8", "surrogatepass") for call in among]
            rows = self._ask(f"{select} AND call = ANY(%s::bytea[]) ORDER BY id", self._number, segment, call_ids)
        return {call.decode(): page for call, page in rows}

    def _ask(self, sql: str, *values: object) -> list[Row]:
        """The rows of one question."""
        return self._db.rows("reading", sql, *values)

    def forgotten(self, segment: int) -> list[int]:
        """The ids of the pages of a segment that are forgotten, in order."""
        select = "SELECT id FROM kilburn.page WHERE tenant = %s AND segment = %s AND content IS NULL ORDER BY id"
        return [page for (page,) in self._ask(select, self._number, segment)]

    def checkpoint(self, segment: int, until: int | None = None) -> tuple[int, bytes] | None:
        """The newest checkpoint of a segment, at event `until` or before it, with the number of its last event."""
        select = (
            "SELECT head, size, codec, data, seal FROM kilburn.checkpoint WHERE tenant = %s AND segment = %s AND head <= %s"
            " ORDER BY head DESC LIMIT 1"
        )

        def do(statements: Statements) -> Row | None:
            segment_row = self._stored(statements, segment)
            if segment_row is None:
                return None
            return statements.row(
                select, self._number, segment, segment_row.head if until is None else min(until, segment_row.head)
            )

        row = self._db.read("reading", do)
        if row is None or row[-1] != seal_of("checkpoint", segment, *row[:-1]):
            return None
        head, size, codec, data, _ = row
        return head, inflate(codec, data, size, b"")

    def events(self, segment: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """The ledger from event `after` + 1 on; only the events of one act, if it is given."""
        # Many a caller needs only the first few.
        for limit in chain((FEW_EVENTS,), repeat(CHUNK)):
            events = self._db.read("reading", partial(self._events, segment=segment, after=after, act=act, limit=limit))
            yield from events
            if len(events) < limit:
                return
            after = events[-1].number

    def _events(self, statements: Statements, segment: int, after: int, act: Act | None, limit: int) -> list[Event]:
        of = statements.send(_SOME, [segment], self._number)
        where = "tenant = %s AND segment = %s AND number > %s"
        if act is not None:
            # Of notes there is an index.
            kind = "act = 'note' AND act = %s" if act is Act.NOTE else "act = %s"
            where = f"{where} AND {kind}"
        values = (self._number, segment, after, *(() if act is None else (act.value,)), limit)
        select = f"SELECT number, convert_to(act, 'UTF8'), body, seal FROM kilburn.event WHERE {where} ORDER BY number LIMIT %s"
        rows = statements.rows(select, *values)
        row = of.fetchone()
        if row is None:
            return []
        segment_row = SEALS.segment_of(row).whole()
        events = [SEALS.whole_event(segment_row, *event_row) for event_row in rows if event_row[0] <= segment_row.head]
        if act is None:
            for number, event in enumerate(events, after + 1):
                if event.number != number:
                    raise StoreCorrupt(f"event {number} of session {segment_row.name!r} is missing", advice=ADVICE)
            if len(events) < limit and after + len(events) < segment_row.head:
                problem = f"event {after + len(events) + 1} of session {segment_row.name!r} is missing"
                raise StoreCorrupt(problem, advice=ADVICE)
        return events

    def naming(self, segment: int, pages: Iterable[int]) -> list[Event]:
        """See `Backend`."""
        page_ids = set(pages)

        def do(statements: Statements) -> list[Event]:
            row = self._stored(statements, segment)
            if row is None or not page_ids:
                return []
            numbers = writing.events_of(statements, self._number, segment, mentions.nodes_of(page_ids))
            return writing.read_events(statements, self._number, row, [number for number in numbers if number <= row.head])

        return [event for event in self._db.read("reading", do) if _names(event, page_ids)]

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """The texts of these digests, verified."""
        keys = {digest: key_of(digest) for digest in digests}
        if not keys:
            return {}
        select = "SELECT size, codec, data, digest FROM kilburn.content WHERE tenant = %s AND digest = ANY(%s::bytea[])"
        cached = self._reads.texts if self._reads is not None else {}
        missing = [key for key in keys.values() if key not in cached]
        rows = self._ask(select, self._number, missing) if missing else []
        texts = {row[-1]: self._text(row) for row in (*rows, *(cached[key] for key in keys.values() if key in cached))}
        for digest, key in keys.items():
            if key not in texts:
                raise StoreCorrupt(f"content {digest} is missing", advice=ADVICE)
        return {digest: texts[key] for digest, key in keys.items()}

    def search(self, query: str, *, segments: Collection[int] | None = None, limit: int = 20) -> list[Passage]:
        """Passages that match the query's words, best first; of these segments, or of all. Damaged ones are left out."""

        def do(statements: Statements) -> list[Passage]:
            index = Postings(statements, self._number)
            if segments is None:
                rows_by_number = {row.number: row for row in self._segments(statements)}
                extents, apart = Extents(_made(rows_by_number.values())), False
            else:
                rows_by_number = self._numbered(statements, segments)
                extents = Extents(_made(row for row in rows_by_number.values() if not row.damaged))
                apart = len(extents.segments) > 1
            hits = index.search(query, extents, limit, apart=apart)
            spans = self._spans(statements, index, [number for number, _ in hits])
            whole = {number for number, row in rows_by_number.items() if not row.damaged}
            return [
                _passage(number, *spans[number], score) for number, score in hits if number in spans and number >> 32 in whole
            ]

        return self._db.read("searching", do)

    def _spans(self, statements: Statements, index: Postings, entries: list[int]) -> dict[int, tuple[int, Span]]:
        """Page and span of entries. In a snapshot their pages and short texts are read with them, as these are asked for next."""
        reads = self._reads
        if reads is None or not reads.ahead:
            return index.spans(entries)
        spans = {}
        for entry, page, start, stop, segment, *row in statements.rows(_HITS, entries, *[self._number] * 3, AHEAD):
            spans[entry] = page, (start, stop)
            if segment is not None:
                reads.take(segment, page, row)
        return spans

    def newest(self, segment: int, wanted: Sequence[tuple[str, str]], limit: int = 20) -> list[list[Passage]]:
        """See `Backend`."""

        def do(statements: Statements) -> list[list[Passage]]:
            if not self._whole(statements, [segment]):
                return [[] for _ in wanted]
            index = Postings(statements, self._number)
            entries = [index.newest(all_words, any_words, segment, limit) for all_words, any_words in wanted]
            spans = index.spans(list({number for numbers in entries for number in numbers}))
            passages = {number: _passage(number, *of) for number, of in spans.items()}
            return [[passages[number] for number in numbers if number in passages] for numbers in entries]

        return self._db.read("searching", do)

    def _whole(self, statements: Statements, segments: Iterable[int]) -> set[int]:
        """Those that are segments of this tenant and not damaged."""
        return {number for number, row in self._numbered(statements, segments).items() if not row.damaged}

    def entries(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[Passage]]:
        """The passages of pages, in reading order; a page that is not indexed is left out."""
        unique_keys = [key for key in dict.fromkeys(keys) if all(-(1 << 63) <= part < 1 << 63 for part in key)]
        select = (
            f"SELECT page.segment, page.id, passage.id, start, stop FROM {_WANTED}"
            " JOIN kilburn.passage ON passage.tenant = page.tenant AND passage.id BETWEEN first_passage AND last_passage"
            " WHERE passage.page = page.id ORDER BY passage.id DESC"
        )

        reads = self._reads

        def do(statements: Statements) -> list[Row]:
            whole = self._whole(statements, (segment for segment, _ in unique_keys))
            columns = (
                [segment for segment, _ in unique_keys if segment in whole],
                [page for segment, page in unique_keys if segment in whole],
            )
            if reads is None or not reads.ahead:
                return statements.rows(select, *columns, self._number)
            ahead = statements.send(_WITH_TEXTS, *columns, self._number, AHEAD)
            rows = statements.rows(select, *columns, self._number)
            for segment, page, *row in ahead.fetchall():
                reads.take(segment, page, row)
            return rows

        passages: dict[tuple[int, int], list[Passage]] = {}
        for segment, page, number, start, stop in self._db.read("reading", do):
            passages.setdefault((segment, page), []).append(_passage(number, page, (start, stop)))
        return {key: passages[key] for key in unique_keys if key in passages}

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """The passages with these numbers; those that do not exist any more are left out."""
        numbers = list(entries)

        def do(statements: Statements) -> dict[int, Passage]:
            spans = Postings(statements, self._number).spans(numbers)
            whole = self._whole(statements, (number >> 32 for number in spans))
            return {number: _passage(number, *span) for number, span in spans.items() if number >> 32 in whole}

        return self._db.read("reading", do)

    def unembedded(
        self, embedder: str, limit: int, damaged: MutableMapping[int, StoreCorrupt] | None = None
    ) -> list[tuple[int, str]]:
        """At most so many passages that have no vector of this embedder: (entry, text), newest segments first. One whose text is
        not what was written is passed over, and is added to `damaged`."""
        name = check_name(embedder, "embedder").encode()
        texts = (
            "SELECT page.segment, page.id, text.size, text.codec, text.data, text.digest,"
            f" own.size, own.codec, own.data, own.digest FROM {_WANTED} CROSS JOIN LATERAL (SELECT * FROM kilburn.content"
            " WHERE content.tenant = page.tenant AND content.digest = page.content OFFSET 0) AS text"
            " LEFT JOIN LATERAL (SELECT * FROM kilburn.content"
            " WHERE content.tenant = page.tenant AND content.digest = page.extra OFFSET 0) AS own ON true"
        )

        rows_by_page: dict[tuple[int, int], Row] = {}

        def waiting(limit_rows: int) -> list[Row]:
            def do(statements: Statements) -> tuple[list[Row], list[Row]]:
                number = self._embedder(statements, name)
                waits = statements.rows(_WAITING.format(among=""), number, PLACES, number, limit_rows, self._number, limit_rows)
                keys = sorted({(entry >> 32, page) for entry, page, *_ in waits} - rows_by_page.keys())
                text_rows = (
                    statements.rows(texts, [segment for segment, _ in keys], [page for _, page in keys], self._number)
                    if keys
                    else []
                )
                return waits, text_rows

            waits, rows = self._db.read("reading", do)
            rows_by_page.update({(segment, page): tuple(row) for segment, page, *row in rows})
            return waits

        def text_of(segment: int, page: int) -> str:
            row = rows_by_page.get((segment, page))
            text = None if row is None else searchable_in(row[:4], row[4:], self._text)
            if text is None:
                raise StoreCorrupt(f"the content of page {page} is missing", advice=ADVICE)
            return text

        return sound_passages(limit, waiting, text_of, damaged if damaged is not None else {})

    def _embedder(self, statements: Statements, name: bytes) -> int:
        """The number of an embedder; 0 if it has no vectors here."""
        row = statements.row("SELECT id FROM kilburn.embedder WHERE tenant = %s AND name = %s", self._number, name)
        return row[0] if row is not None else 0

    def keep_vectors(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """Store vectors of passages, by entry, all or none; those of passages that are forgotten by now are not stored."""
        name = check_name(embedder, "embedder")
        self._check_writes()
        if rows:
            self._db.write("writing", lambda statements: self._keep_vectors(statements, name, dict(rows)))

    def _keep_vectors(self, statements: Statements, name: str, rows: Mapping[int, bytes]) -> None:
        key, first = name.encode(), len(next(iter(rows.values())))
        # Who stores vectors of an embedder holds its row: so their numbers come in the order of their commits.
        statements.send(
            "INSERT INTO kilburn.embedder(tenant, name, size, vectors) VALUES(%s, %s, %s, 0) ON CONFLICT DO NOTHING",
            *(self._number, key, first),
        )
        ((number, size, count),) = statements.rows(
            "SELECT id, size, vectors FROM kilburn.embedder WHERE tenant = %s AND name = %s FOR UPDATE", self._number, key
        )
        wrong = next((len(data) for data in rows.values() if len(data) != size), None)
        if wrong is not None or not size:
            problem = f"a vector of {wrong or 0} bytes among those of {name!r}, which have {size}"
            raise StoreError(problem, advice="give another model another name")
        # A passage that is being forgotten is waited for.
        segments = sorted({entry >> 32 for entry in rows})
        statements.send(
            "SELECT FROM unnest(%s::bigint[]) AS wanted(id) CROSS JOIN LATERAL"
            " (SELECT FROM kilburn.segment WHERE tenant = %s AND segment.id = wanted.id FOR SHARE) AS own",
            segments,
            self._number,
        )
        there = statements.rows(
            "SELECT id FROM kilburn.passage WHERE tenant = %s AND id = ANY(%s::bigint[])", self._number, list(rows)
        )
        stored_entries = {entry for (entry,) in there}
        entries = [entry for entry in rows if entry in stored_entries]
        if entries:
            statements.send(
                # Most often there is none. Each is looked up by itself: without statistics all of the tenant's would be read.
                "DELETE FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND entry = ANY(%s::bigint[])"
                " AND EXISTS(SELECT FROM unnest(%s::bigint[]) AS wanted(entry) CROSS JOIN LATERAL (SELECT id"
                " FROM kilburn.vector WHERE tenant = %s AND embedder = %s AND vector.entry = wanted.entry OFFSET 0) AS own)",
                *(self._number, number, entries, entries, self._number, number),
            )
            statements.send(
                "INSERT INTO kilburn.vector(tenant, embedder, id, entry, data, seal)"
                " SELECT %s, %s, * FROM unnest(%s::bigint[], %s::bigint[], %s::bytea[], %s::bytea[])",
                *(
                    self._number,
                    number,
                    list(range(count + 1, count + len(entries) + 1)),
                    entries,
                    [rows[entry] for entry in entries],
                ),
                [self._seal(name, entry, rows[entry]) for entry in entries],
            )
            statements.send(
                "UPDATE kilburn.embedder SET vectors = %s WHERE tenant = %s AND id = %s",
                count + len(entries),
                self._number,
                number,
            )
        for segment in sorted({entry >> 32 for entry in entries}):
            self._advance(statements, number, segment)

    def _seal(self, name: str, entry: int, data: bytes) -> bytes:
        return seal_of("vector", self._number, name, entry, data)

    def _advance(self, statements: Statements, embedder: int, segment: int) -> None:
        """Note how many of a segment's first passages do not wait any more."""
        among = _WAITING.format(among=" AND segment.id = %s")
        waits = statements.row(among, embedder, PLACES, embedder, 1, self._number, segment, 1)
        if waits is not None:
            passages_done = number_of(waits[0])
        else:
            select = "SELECT passages FROM kilburn.segment WHERE tenant = %s AND id = %s"
            ((passages_done,),) = statements.rows(select, self._number, segment)
        statements.send(
            "INSERT INTO kilburn.embedded(tenant, embedder, segment, passages_done) VALUES(%s, %s, %s, %s)"
            " ON CONFLICT(tenant, embedder, segment) DO UPDATE SET passages_done = excluded.passages_done",
            *(self._number, embedder, segment, passages_done),
        )

    def vectors(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """The vectors of this embedder in the order in which they were stored, those whose number is greater than `after`."""
        select = (
            "SELECT vector.id, entry, data, seal FROM kilburn.vector"
            " JOIN kilburn.embedder ON embedder.tenant = vector.tenant AND embedder.id = vector.embedder"
            " WHERE vector.tenant = %s AND name = %s AND vector.id > %s ORDER BY vector.id LIMIT %s"
        )
        while True:
            rows = self._ask(select, self._number, embedder.encode("utf-8", "surrogatepass"), after, CHUNK)
            for number, entry, data, seal in rows:
                if seal == self._seal(embedder, entry, data):
                    yield Vector(number=number, entry=entry, data=data)
            if not rows:
                return
            after = rows[-1][0]

    def near(
        self, embedder: str, vector: Sequence[float], limit: int, segments: Collection[int] | None = None
    ) -> list[tuple[int, bytes]] | None:
        """See `kilburn.search.vectors.Nearby`."""
        if not self._halves:
            return None
        name = embedder.encode("utf-8", "surrogatepass")
        rows = self._db.read(
            "searching",
            lambda statements: halves.HalfVectors(statements, self._number, self._halves).near(name, vector, limit, segments),
        )
        return self._whole_vectors(embedder, rows) if rows is not None else None

    def vectors_of(self, embedder: str, entries: Iterable[int]) -> list[tuple[int, bytes]]:
        """See `kilburn.search.vectors.Nearby`."""
        name, unique_entries = embedder.encode("utf-8", "surrogatepass"), sorted(set(entries))
        rows = self._db.read(
            "reading", lambda statements: halves.HalfVectors(statements, self._number, self._halves).of(name, unique_entries)
        )
        return self._whole_vectors(embedder, rows)

    def _whole_vectors(self, embedder: str, rows: Iterable[halves.Found]) -> list[tuple[int, bytes]]:
        return [(entry, data) for entry, data, seal in rows if seal == self._seal(embedder, entry, data)]

    def tend(self, above: int = EXACT) -> list[str]:
        """See `kilburn.search.vectors.Nearby`; `above` so many vectors of an embedder there is an index."""
        self._check_writes()
        actions = halves.tend(self._db, self._halves, above) if self._halves else []
        if actions:
            # What was forgotten meanwhile could not be removed.
            self._wipe()
        return actions

    def embedders(self) -> list[str]:
        """The names of the embedders that vectors are kept of, in the order in which they first came."""
        select = "SELECT name FROM kilburn.embedder WHERE tenant = %s ORDER BY id"
        return [name.decode() for (name,) in self._ask(select, self._number)]

    def drop_vectors(self, embedder: str) -> None:
        """Remove all vectors of this embedder."""
        self._check_writes()
        delete = "DELETE FROM kilburn.embedder WHERE tenant = %s AND name = %s"
        name = embedder.encode("utf-8", "surrogatepass")
        self._db.write("writing", lambda statements: statements.send(delete, self._number, name))

    def keep_history(self, segment: int, said: Digests, *, page: int) -> bool:
        """See `Backend`."""
        self._check_writes()
        fits = (
            "SELECT 1 WHERE %s = (SELECT max(id) FROM kilburn.page WHERE tenant = %s AND segment = %s)"
            " AND NOT EXISTS(SELECT FROM kilburn.page WHERE tenant = %s AND segment = %s AND content IS NULL)"
            " AND (%s = 0 OR EXISTS(SELECT FROM kilburn.history WHERE tenant = %s AND segment = %s AND message = %s AND is_last))"
        )
        own = self._number, segment

        def do(statements: Statements) -> bool:
            # Who writes to the session waits; its next write is not this one's concern.
            select = "SELECT 1 FROM kilburn.segment WHERE tenant = %s AND id = %s FOR UPDATE"
            segment_row = statements.send(select, *own)
            answer = statements.send(fits, page, *own, *own, said.after, *own, said.after)
            if segment_row.fetchone() is None or answer.fetchone() is None:
                return False
            writing.put_history(statements, *own, said, page)
            return len(said.added) + said.after > 0

        return self._db.write("writing", do)

    def said_by(self, digest: bytes, limit: int, *, tail: bool = False) -> list[HistoryOwner]:
        """See `Backend`."""
        select = (
            "SELECT name, message, (SELECT max(message) FROM kilburn.history AS own"
            " WHERE own.tenant = history.tenant AND own.segment = history.segment)"
            " FROM kilburn.history JOIN kilburn.segment ON segment.tenant = history.tenant AND segment.id = history.segment"
            f" WHERE history.tenant = %s AND {'tail' if tail else 'digest'} = %s"
            " ORDER BY is_last DESC, history.segment DESC LIMIT %s"
        )
        return [
            HistoryOwner(name=name.decode(), at=message, count=count)
            for name, message, count in self._ask(select, self._number, digest, limit)
        ]

    def unkept(self, root: str, user: str, limit: int) -> list[str]:
        """See `Backend`."""
        select = (
            "SELECT name FROM kilburn.segment"
            " WHERE tenant = %s AND (name = %s OR (name > %s AND name < %s) OR (name > %s AND name < %s))"
            " AND owner = %s AND kind = 'session' AND pages > 0"
            " AND NOT EXISTS(SELECT FROM kilburn.history WHERE history.tenant = segment.tenant AND history.segment = segment.id"
            " AND is_last AND last_page = (SELECT max(page.id) FROM kilburn.page"
            " WHERE page.tenant = segment.tenant AND page.segment = segment.id)) ORDER BY used DESC LIMIT %s"
        )
        names = [name.encode() for name in (root, f"{root}~", f"{root}~:", f"{root}/b", f"{root}/b:", user)]
        candidates = [name.decode() for (name,) in self._ask(select, self._number, *names, limit)]
        return [name for name in candidates if root_of(name) == root]

    def settings(self) -> dict[str, str]:
        """What is kept for the tenant as a whole, by its name. A damaged one is left out."""
        select = "SELECT name, value, seal FROM kilburn.setting WHERE tenant = %s ORDER BY name"
        return {
            name.decode(): value.decode()
            for name, value, seal in self._ask(select, self._number)
            if seal == seal_of("setting", self._number, name, value)
        }

    def keep_setting(self, name: str, value: str | None) -> None:
        """See `Backend`."""
        self._check_writes()
        key, stored_value = name.encode(), None if value is None else value.encode()
        insert = (
            "INSERT INTO kilburn.setting(tenant, name, value, seal) VALUES(%s, %s, %s, %s)"
            " ON CONFLICT(tenant, name) DO UPDATE SET value = excluded.value, seal = excluded.seal"
        )

        def do(statements: Statements) -> None:
            if stored_value is None:
                statements.send("DELETE FROM kilburn.setting WHERE tenant = %s AND name = %s", self._number, key)
            else:
                statements.send(insert, self._number, key, stored_value, seal_of("setting", self._number, key, stored_value))

        self._db.write("writing", do)

    def replace_setting(self, name: str, known: str | None, value: str | None) -> bool:
        """See `Backend`."""
        self._check_writes()
        key, seal = name.encode(), b"" if value is None else seal_of("setting", self._number, name.encode(), value.encode())

        def do(statements: Statements) -> bool:
            own = self._number, key
            if known is None and value is None:
                row = statements.row(
                    "SELECT 1 WHERE NOT EXISTS(SELECT FROM kilburn.setting WHERE tenant = %s AND name = %s)", *own
                )
            elif known is None:
                insert = (
                    "INSERT INTO kilburn.setting(tenant, name, value, seal) VALUES(%s, %s, %s, %s)"
                    " ON CONFLICT DO NOTHING RETURNING 1"
                )
                row = statements.row(insert, *own, (value or "").encode(), seal)
            elif value is None:
                delete = "DELETE FROM kilburn.setting WHERE tenant = %s AND name = %s AND value = %s RETURNING 1"
                row = statements.row(delete, *own, known.encode())
            else:
                # Who waits here for another's transaction looks again at what that has written.
                update = (
                    "UPDATE kilburn.setting SET value = %s, seal = %s WHERE tenant = %s AND name = %s AND value = %s RETURNING 1"
                )
                row = statements.row(update, value.encode(), seal, *own, known.encode())
            return row is not None

        return self._db.write("writing", do)

    def now(self) -> float:
        """See `Backend`: the clock of the server."""
        ((now,),) = self._ask("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(now)

    def chill(self, digests: Iterable[str]) -> Moved:
        """See `Backend`."""
        self._check_writes()
        return self._chilling.chill(digests)

    def warm(self, digests: Iterable[str] | None = None) -> Moved:
        """See `Backend`."""
        self._check_writes()
        return self._chilling.warm(digests)

    def scrub(self, *, repair: bool = False) -> list[str]:
        """See `Backend`."""
        return self._chilling.scrub(repair=repair)

    def findings(self) -> list[Finding]:
        """Everything that is wrong with this tenant's rows, and with what holds tenants apart; empty if nothing is. Nothing is
        repaired, and nobody waits meanwhile but who would wipe what is forgotten."""

        def do(statements: Statements) -> list[Finding]:
            cold = PostgresColdRows(statements, self._number, self._opened)
            return Inspection(statements, self._number, cold).findings()

        findings = self._db.read("checking", do, long=True)
        with connected(self._url, "checking") as connection:
            findings += orphans(connection)
        try:
            # The texts themselves have been read already.
            wrong = self._chilling.wrong(repair=False, read=False)
            findings += [Finding(kind="cold", what=problem, derived=derived) for problem, derived in wrong]
        except KilburnError as error:
            findings.append(Finding(kind="cold", what=f"the cold place cannot be checked: {error}"))
        return findings

    def unreached(self) -> tuple[str, ...]:
        """Where the server and the cold place, by their own account, may still hold what is erased."""
        places = self._db.read("reading", lambda statements: held(statements, self._number, self._hindrance))
        return places + self._chilling.unreached()

    def cold(self) -> dict[str, int]:
        """See `Backend`."""
        return self._chilling.cold()

    def _read_cold(self, do: Callable[[ColdRows], T]) -> T:
        return self._db.read("reading", lambda statements: do(PostgresColdRows(statements, self._number, self._opened)))

    def _change_cold(self, do: Callable[[ColdRows], T], *, wait: bool = True) -> T:
        return self._db.write("writing", lambda statements: do(PostgresColdRows(statements, self._number, self._opened)))

    def _leaves_objects(self) -> bool:
        """Whether objects are not to be deleted now."""
        return self.readonly or self._db.joined is not None or getattr(self._erasing, "inside", False)

    def _text(self, row: Row) -> str:
        """The text of a row (size, codec, data, digest), verified; one that is cold, too."""

        def fetch(name: str, digest: bytes) -> bytes:
            return required(self._read_cold(lambda rows: rows.place())).get(name, digest)

        return text_at(row, fetch, lambda digest: next(iter(self._ask(ROW, self._number, digest)), None))

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        """Erase what is left of a segment of which every page is forgotten: its name, its user and its ledger."""
        self._check_writes()
        self._db.write("erasing", lambda statements: writing.erase_segment(statements, self._number, segment, wipe=wipe))
        if wipe:
            self._db.erased = True
            self._wipe()

    def snapshot(self) -> AbstractContextManager[None]:
        """See `Backend`."""
        return self._db.snapshot()

    @contextmanager
    def at_once(self, *, ahead: bool = False) -> Iterator[None]:
        """See `kilburn.backend.at_once`."""
        if self._db.joined is not None:
            yield
            return
        with self._db.snapshot():
            self._local.reads = _Reads(ahead=ahead)
            try:
                yield
            finally:
                self._local.reads = None

    @contextmanager
    def together(self, segments: Collection[int] = ()) -> Iterator[None]:
        """See `Backend`. Who writes to the same segments waits."""
        self._check_writes()
        inner, lasting = self._db.joined is not None, self._db.lasting
        if not inner:
            lasting.joined = []
        with self.anchor.held(), self._db.together():
            if segments:
                self._db.write("writing", lambda statements: writing.lock(statements, self._number, segments).fetchall())
            yield
        for write in () if inner else lasting.joined:
            self._written(*write)
        if self._db.erased:
            self._chilling.sweep()
            self._wipe()

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """See `Backend`."""
        outer, self._erasing.inside = getattr(self._erasing, "inside", False), True
        try:
            yield
        finally:
            self._erasing.inside = outer
            if not outer:
                self._chilling.sweep()
                self._wipe()

    @contextmanager
    def leaving(self, keys: Iterable[tuple[int, int]]) -> Iterator[None]:
        """See `Backend`."""
        self._check_writes()
        leaving_keys, marks = set(keys), set[citations.Citation]()

        def do(statements: Statements) -> None:
            marks.update(writing.mark_leaving(statements, self._number, leaving_keys))

        try:
            self._db.write("writing", do)
            self._staying -= marks
            yield
        finally:
            # Also where nobody knows whether they were written.
            self._staying |= marks
            self._stay()

    def _stay(self) -> None:
        """Let new pages cite again what is not being forgotten any more. Where that cannot be written now, or may be undone with
        what is written around it, it waits for the next commit."""
        marks = set(self._staying)
        if self._db.joined is not None or not marks:
            return
        with suppress(StoreError):
            self._db.write("writing", lambda statements: writing.remove_citations(statements, self._number, marks))
            self._staying -= marks

    def _wipe(self) -> None:
        """Remove erased bytes from the server's files, if there are any. What hinders it is logged. It is tried again with the
        next erasure, and when the store is opened or closed."""
        if self._db.joined is not None or getattr(self._erasing, "inside", False):
            return
        try:
            wipe(self._db, self._patience)
        except StoreError as error:
            log.warning("%s: erased bytes may still lie in the files of the server: %s", self.path, error)
            # The next write is not tried for a right that is missing.
            self._hindrance, self._db.erased = error, not isinstance(error, StoreReadOnly)
        else:
            self._hindrance, self._db.erased = None, False

    def wipe(self) -> None:
        """Remove erased bytes from the server's files, however large the tables are.

        Raises:
            StoreReadOnly: the user of the URL may not; the advice says what has to be granted. StoreBusy: others use the tables,
            or older rows. StoreError: the server did not do it.
        """
        self._check_writes()
        wipe(self._db, self._patience, largest=1 << 62)
        self._hindrance, self._db.erased = None, False

    @contextmanager
    def lasting(self) -> Iterator[None]:
        """See `Backend`."""
        self._db.lasting.on = True
        try:
            yield
        finally:
            self._db.lasting.on = False

    def sync(self, segment: int | None = None) -> None:
        """See `Backend`."""
        if self._durable or self.readonly:
            return
        is_flushed, self._db.lasting.done = self._db.lasting.done, False
        last = self._unsynced.get(segment) if segment is not None else None
        if segment is None or last is None:
            if not is_flushed:
                self._db.flush()
            return
        # The server that is asked may be another one than the one that was written to: killed, and begun again without what it
        # had not yet on its disk.
        if self._db.flush(_LAST, self._number, segment, last[0]) != (last[1],):
            problem = f"the server was killed, and has lost what segment {segment} was given last"
            raise StoreUnavailable(problem, advice="try again")
        if self._unsynced.get(segment) == last:
            del self._unsynced[segment]

    def close(self) -> None:
        """Give the connections back; idempotent."""
        try:
            if self._staying and not self._db.closed:
                self._stay()
                self._staying.clear()
            if self._db.erased and not self._db.closed:
                self._wipe()
        finally:
            self._db.close()

    def __enter__(self) -> Postgres:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def check_storable(name: str) -> str:
    """A name that can be stored; its owner checked the rest.

    Raises:
        StoreError: it has a lone surrogate.
    """
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise StoreError(f"the name {name[:40]!a} cannot be stored", advice="give another name") from error
    return name


def _made(segments: Iterable[SegmentRow]) -> Iterator[tuple[int, int, int]]:
    return ((row.number, row.passages, row.characters) for row in segments)


def _names(event: Event, pages: Set[int]) -> bool:
    return not pages.isdisjoint((*event.pages, event.data.get("fold", 0)))


def _passage(entry: int, page: int, span: Span, score: float = 0.0) -> Passage:
    return Passage(segment=entry >> 32, page=page, span=span, score=score, entry=entry)

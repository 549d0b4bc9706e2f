"""The durable store in PostgreSQL, for many programs on many machines. It keeps what `kilburn.backends.sqlite` keeps, under the
same seals, and finds the same in the same order.

One object serves one tenant. Objects of a process share their connections. No correctness depends on a clock, or on
anything that a connection remembers.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeVar

from kilburn.backend import (
    Batch,
    Scope,
    SegmentInfo,
    SegmentKind,
    State,
    check_name,
)
from kilburn.backends import citations, mentions
from kilburn.backends.chilling import ColdRows, OpenPlace
from kilburn.backends.codec import inflate
from kilburn.backends.durable import DurableBackend, PassageIndex
from kilburn.backends.postgres import halves, schema, writing
from kilburn.backends.postgres.coldrows import PostgresColdRows
from kilburn.backends.postgres.connection import Database, checked_url, connected, split_connections
from kilburn.backends.postgres.erasing import wipe
from kilburn.backends.postgres.parts import (
    NUMBERS,
    PAGE,
    PAGES_BY_KEY,
    PostgresContents,
    PostgresHistories,
    PostgresSettings,
    PostgresVectors,
    SnapshotReads,
    read_index,
)
from kilburn.backends.postgres.statements import Row, Statements
from kilburn.backends.postgres.writing import SEALS, SEGMENT, Writing
from kilburn.backends.records import UNREADABLE, compute_seal, decode_page
from kilburn.backends.sealed import ADVICE, SegmentRow, make_state, shown
from kilburn.errors import StoreCorrupt, StoreError, StoreReadOnly, StoreStale, StoreUnavailable
from kilburn.event import Act, Event
from kilburn.page import Page

log = logging.getLogger("kilburn")

T = TypeVar("T")

_OF_SEGMENT = f"SELECT {PAGE} FROM kilburn.page WHERE tenant = %s AND segment = %s ORDER BY id"
_OF_KEYS = f"SELECT {PAGE} FROM {PAGES_BY_KEY}"
# By their names (OFFSET 0), and not through all of the tenant's because these are in order.
_UNDER = (
    f"SELECT * FROM (SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s AND name >= %s AND name < %s ORDER BY name OFFSET 0)"
    " AS own ORDER BY id"
)
_ALL = f"SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s ORDER BY id"
_SELECT_SEGMENTS = (
    "SELECT own.* FROM unnest(%s::bigint[]) AS wanted(id) CROSS JOIN LATERAL"
    f" (SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s AND segment.id = wanted.id OFFSET 0) AS own"
)
_SELECT_BY_NAME = f"SELECT {SEGMENT} FROM kilburn.segment WHERE tenant = %s AND name = %s"
_LAST = "SELECT seal FROM kilburn.event WHERE tenant = %s AND segment = %s AND number = %s"


class Postgres(DurableBackend):
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

    def __init__(
        self, url: str, *, tenant: str = "default", readonly: bool = False, busy_timeout: float = 5.0, durable: bool = True
    ) -> None:
        super().__init__(check_name(tenant, "tenant"), readonly=readonly)
        _, connections = split_connections(url)
        self._url = checked_url(url)
        self._durable, self._patience = durable, busy_timeout
        # Of segments that were written to and not yet synced: the number and the seal of the last event.
        self._unsynced: dict[int, tuple[int, bytes]] = {}
        self._db = Database(self._url, patience=busy_timeout, durable=durable, connections=connections)
        self.path = self._db.shown
        # Where pgvector is, if the server searches by meaning.
        self._halves = ""
        self._opened = OpenPlace()
        # Why erased bytes could not be removed from the server's files.
        self._hindrance: StoreError | None = None
        self._local = threading.local()
        try:
            self._number = self._db.tenant = self._register()
            self._chilling: PostgresContents = PostgresContents(self)
            self.contents = self._chilling
            self.words = PassageIndex(partial(read_index, self))
            self.vectors = PostgresVectors(self)
            self.settings = PostgresSettings(self)
            self.histories = PostgresHistories(self)
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
                self._halves = halves.read_schema(connection)
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
        rows = self._ask(_SELECT_BY_NAME, self._number, name.encode("utf-8", "surrogatepass"))
        row = SEALS.parse_segment(rows[0]) if rows else None
        if row is None and create:
            self._check_writes()
            row = self._db.write("writing", partial(self._make, name=name, time=time, kind=kind, user=user))
        return row.whole().info if row is not None else None

    def _named(self, statements: Statements, name: str) -> SegmentRow | None:
        row = statements.row(_SELECT_BY_NAME, self._number, name.encode("utf-8", "surrogatepass"))
        return SEALS.parse_segment(row) if row is not None else None

    def _make(self, statements: Statements, name: str, time: float, kind: SegmentKind, user: str) -> SegmentRow | None:
        writing.create(statements, self._number, name, time, kind, user)
        return self._named(statements, name)

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        """Create a session at `time`, for this user, and do its first batch, as one transaction: both, or nothing."""
        if user:
            check_name(user, "user")
        self._check_writes()
        self._remove_stale_marks()
        mark, last = secrets.token_bytes(writing.MARK), None

        def do(statements: Statements) -> SegmentRow:
            nonlocal last
            number = writing.create(statements, self._number, name, time, SegmentKind.SESSION, user)
            if number is None:
                raise StoreStale(f"there is a session {name!r} already", advice="take another name")
            step = Writing(statements, self._number, number, batch, self._opened, mark)
            step.write()
            last = step.last
            row = self._named(statements, name)
            assert row is not None
            return row

        def settled(statements: Statements) -> SegmentRow | None:
            # Who creates a session holds this row until the transaction that may have done it has ended.
            statements.send("SELECT FROM kilburn.counter WHERE tenant = %s FOR UPDATE", self._number)
            row = self._named(statements, name)
            return row if row is not None and self._is_mine(statements, row.number, mark) else None

        info = self._db.write("writing", do, settled).whole().info
        self._written(info.number, last)
        if self.anchor is not None:
            self.anchor.note(info.number, batch)
        return info

    @property
    def _reads(self) -> SnapshotReads | None:
        """The rows that this thread has read in its snapshot, if it is in one."""
        return getattr(self._local, "reads", None)

    def _segments(self, statements: Statements) -> list[SegmentRow]:
        reads = self._reads or SnapshotReads()
        if not reads.has_all_segments:
            rows = [SEALS.parse_segment(row) for row in statements.rows(_ALL, self._number)]
            reads.segments, reads.has_all_segments = {row.number: row for row in rows}, True
        return list(reads.segments.values())

    def _numbered(self, statements: Statements, numbers: Iterable[int]) -> dict[int, SegmentRow]:
        reads, requested = self._reads or SnapshotReads(), set(numbers)
        unread = requested - reads.segments.keys() if not reads.has_all_segments else ()
        missing = [number for number in unread if number in NUMBERS]
        rows = statements.rows(_SELECT_SEGMENTS, missing, self._number) if missing else []
        reads.segments.update((row[0], SEALS.parse_segment(row)) for row in rows)
        return {number: reads.segments[number] for number in requested if number in reads.segments}

    def segments(self, under: str = "") -> list[SegmentInfo]:
        """All segments of the tenant, oldest first, or those under a name; damaged ones say so."""
        if not under:
            return [row.info for row in self._db.read("reading", self._segments)]
        # In the order of bytes, "0" comes right behind "/".
        low, high = f"{under}/".encode(), f"{under}0".encode()
        rows = self._db.read("reading", lambda statements: statements.rows(_UNDER, self._number, low, high))
        return [SEALS.parse_segment(row).info for row in rows]

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """See `Backend`."""
        every = self.segments()
        chosen = [info for info in every if info.kind in kinds and (user is None or info.user in ("", user))]
        infos = {info.number: info for info in chosen if not info.damaged}
        damaged = tuple(info for info in chosen if info.damaged)
        return Scope(infos=infos, damaged=damaged, everything=len(chosen) == len(every))

    def commit(self, segment: int, batch: Batch) -> None:
        """Do the whole batch durably, or raise and do nothing.

        What was erased is gone for every reader when this returns; see `kilburn.backends.postgres.erasing` for its bytes.
        """
        self._check_writes()
        self._remove_stale_marks()
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
        if self.anchor is not None:
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
        self._db.lasting.is_flushed = self._db.lasting.on
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
            of, rows = (
                statements.send(_SELECT_SEGMENTS, [segment], self._number),
                statements.send(_OF_SEGMENT, self._number, segment),
            )
            row = of.fetchone()
            if row is None:
                return []
            return SEALS.parse_pages(
                SEALS.parse_segment(row).whole(),
                (
                    (
                        number,
                        SEALS.parse_page(number_of_segment, number, record, seal),
                        SEALS.parse_state(number_of_segment, number, *state),
                    )
                    for number_of_segment, number, record, seal, *state in rows.fetchall()
                ),
            )

        yield from self._db.read("reading", do)

    def _rows(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], Row]:
        """The rows of pages; in the order of the keys.

        Raises:
            StoreCorrupt: a segment is damaged.
        """
        requested = [key for key in dict.fromkeys(keys) if all(part in NUMBERS for part in key)]
        pages = (self._reads or SnapshotReads()).pages
        missing = [key for key in requested if key not in pages]

        def do(statements: Statements) -> None:
            answer = statements.send(_OF_KEYS, [segment for segment, _ in missing], [page for _, page in missing], self._number)
            for segment in self._numbered(statements, (segment for segment, _ in requested)).values():
                segment.whole()
            pages.update(((row[0], row[1]), row) for row in answer.fetchall())

        if missing:
            self._db.read("reading", do)
        return {key: pages[key] for key in requested if key in pages}

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Single pages with their states; what does not exist is left out."""
        pages = {}
        for key, (segment, number, record, seal, *values) in self._rows(keys).items():
            page, state = SEALS.parse_page(segment, number, record, seal), SEALS.parse_state(segment, number, *values)
            if isinstance(page, str) or isinstance(state, str):
                wrong = page if isinstance(page, str) else state
                raise StoreCorrupt(f"{shown(number)} of session {segment}: {wrong}", advice=ADVICE)
            pages[key] = page, state
        return pages

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        try:
            return {
                key: (decode_page(record), make_state(place, pinned, importance, valid_until))
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
            numbers = writing.events_with_nodes(statements, self._number, segment, mentions.source_nodes(page_ids))
            events = writing.read_events(statements, self._number, row, [number for number in numbers if number <= row.head])
            return keys, mentions.made_by(events, page_ids)

        citing_keys, derived = self._db.read("reading", do)
        rows = self.read([(segment, page) for page in sorted(derived)])
        citing_keys.update(key for key, (page, _) in rows.items() if page.digest and not page_ids.isdisjoint(page.sources))
        return sorted(citing_keys)

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
        """Return the newest checkpoint of a segment at or before event `until`, with the number of its last event."""
        select = (
            "SELECT head, size, codec, data, seal FROM kilburn.checkpoint WHERE tenant = %s AND segment = %s AND head <= %s"
            " ORDER BY head DESC LIMIT 1"
        )

        def do(statements: Statements) -> Row | None:
            row = self._stored(statements, segment)
            if row is None:
                return None
            return statements.row(select, self._number, segment, row.head if until is None else min(until, row.head))

        checkpoint_row = self._db.read("reading", do)
        if checkpoint_row is None or checkpoint_row[-1] != compute_seal("checkpoint", segment, *checkpoint_row[:-1]):
            return None
        head, size, codec, data, _ = checkpoint_row
        return head, inflate(codec, data, size, b"")

    def _read_events(self, segment: int, after: int, act: Act | None, limit: int) -> list[Event]:
        return self._db.read("reading", partial(self._events, segment=segment, after=after, act=act, limit=limit))

    def _events(self, statements: Statements, segment: int, after: int, act: Act | None, limit: int) -> list[Event]:
        of = statements.send(_SELECT_SEGMENTS, [segment], self._number)
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
        segment_row = SEALS.parse_segment(row).whole()
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
            numbers = writing.events_with_nodes(statements, self._number, segment, mentions.page_nodes(page_ids))
            return writing.read_events(statements, self._number, row, [number for number in numbers if number <= row.head])

        return [event for event in self._db.read("reading", do) if _names(event, page_ids)]

    def now(self) -> float:
        """See `Backend`: the clock of the server."""
        ((now,),) = self._ask("SELECT extract(epoch FROM clock_timestamp())::float8")
        return float(now)

    def _read_cold(self, do: Callable[[ColdRows], T]) -> T:
        return self._db.read("reading", lambda statements: do(PostgresColdRows(statements, self._number, self._opened)))

    def _change_cold(self, do: Callable[[ColdRows], T], *, wait: bool = True) -> T:
        return self._db.write("writing", lambda statements: do(PostgresColdRows(statements, self._number, self._opened)))

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
            self._local.reads = SnapshotReads(ahead=ahead)
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
        with self._hold_anchor(), self._db.together():
            if segments:
                self._db.write("writing", lambda statements: writing.lock(statements, self._number, segments).fetchall())
            yield
        for write in () if inner else lasting.joined:
            self._written(*write)
        if self._db.erased:
            self._chilling.sweep()
            self._wipe()

    def _mark_leaving(self, keys: Collection[tuple[int, int]], marks: set[citations.Citation]) -> None:
        self._check_writes()

        def do(statements: Statements) -> None:
            marks.update(writing.mark_leaving(statements, self._number, keys))

        self._db.write("writing", do)

    def _remove_citations(self, marks: Collection[citations.Citation], *, wait: bool) -> None:
        self._db.write("writing", lambda statements: writing.remove_citations(statements, self._number, marks))

    def _is_joined(self) -> bool:
        return self._db.joined is not None

    def _wipe_erased(self, *, strict: bool) -> None:
        self._wipe()
        if strict and self._hindrance is not None:
            raise self._hindrance

    def _wipe(self) -> None:
        """Remove erased bytes from the server's files, if there are any. What hinders it is logged. It is tried again with the
        next erasure, and when the store is opened or closed."""
        if self._db.joined is not None or self._is_erasing():
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
        is_flushed, self._db.lasting.is_flushed = self._db.lasting.is_flushed, False
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
            if self._stale_marks and not self._db.closed:
                self._remove_stale_marks()
                self._stale_marks.clear()
            if self._db.erased and not self._db.closed:
                self._wipe()
        finally:
            self._db.close()


def _names(event: Event, pages: Set[int]) -> bool:
    return not pages.isdisjoint((*event.pages, event.data.get("fold", 0)))

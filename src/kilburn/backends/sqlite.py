"""The backend in a file: one SQLite file for content, ledger, state and text index.

Every write is one transaction. With `synchronous="FULL"` it survives a power cut when `commit` returns; with "NORMAL", when the
next `sync` has returned. Several processes may read while one writes. One object serves one tenant. SQLite versions that can lose
data and foreign files are refused.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import NamedTuple, Protocol, TypeVar

import apsw
import msgspec

from kilburn.backend import Batch, Digests, HistoryOwner, Scope, SegmentInfo, SegmentKind, State, Vector, check_name
from kilburn.backends import citations, histories, mentions
from kilburn.backends.chilling import ChangesRows, Chilling, ColdRows, ReadsRows
from kilburn.backends.codec import check_storable, digest_bytes, sound_passages
from kilburn.backends.connection import row, rows, rows_of_each, translate_errors, write_transaction
from kilburn.backends.contenttable import ColdTable, ContentTable, searchable_text
from kilburn.backends.directory import Directory
from kilburn.backends.durable import READ_ROWS, IndexView, PassageIndex
from kilburn.backends.ranked import Extents
from kilburn.backends.records import compute_seal
from kilburn.backends.repair import erase_segment, erase_session, rebuild
from kilburn.backends.schema import prepare_schema, schema_number
from kilburn.backends.sealed import SealedRows, SegmentRow, seal_of_segment
from kilburn.backends.storefile import StoreFile
from kilburn.backends.textindex import TextIndex
from kilburn.backends.transaction import BatchWriter, prepared
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page, Span

T = TypeVar("T")

log = logging.getLogger("kilburn")


MAX_READS = 20
"""How often cold texts are read again while another program moves them."""

Reading = Callable[[str], AbstractContextManager[None]]
"""One snapshot for a block, named in errors by what it does."""


class WriteScope(Protocol):
    """Opens a write transaction for a block."""

    def __call__(self, doing: str, *, wait: bool = True, to: Collection[int] | None = None) -> AbstractContextManager[None]:
        """See `StoreFile._writing`."""
        ...


class SqliteContents(Chilling):
    """See `kilburn.backend.ContentStore`."""

    def __init__(self, store: Sqlite, table: ContentTable, read_rows: ReadsRows, change: ChangesRows) -> None:
        super().__init__(store.path, read_rows, change, store.sync, store._keeps_objects)
        self._store, self._table = store, table

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """See `ContentStore`."""
        keys = {digest: digest_bytes(digest) for digest in digests}
        with self._store._lock:
            texts = self._read_texts(keys)
        if len(texts) < len(keys):
            missing = next(digest for digest in keys if digest not in texts)
            raise StoreCorrupt(f"content {missing} is missing", advice="run `kilburn fsck`")
        return texts

    def _read_texts(self, digests: Mapping[str, bytes]) -> dict[str, str]:
        for attempt in range(MAX_READS + 1):
            version = self._store._written_by_others()
            try:
                with self._store._reading("reading"):
                    return dict(self._table.texts(digests))
            except StoreCorrupt as error:
                # The object of a cold text is gone if another program has just brought the text back, or forgotten it.
                if self._store._is_joined() and self._is_superseded(digests.values()):
                    message = "another program has forgotten or moved a cold text since this snapshot began"
                    raise StoreStale(message, advice="do it again from the beginning") from error
                if attempt == MAX_READS or self._store._written_by_others() == version:
                    raise
        raise AssertionError("the last attempt returns or raises")

    def _is_superseded(self, keys: Iterable[bytes]) -> bool:
        """Whether others have changed the rows of these texts since the present snapshot began."""
        store, select = self._store, "SELECT codec, data FROM content WHERE tenant = ? AND digest = ?"
        values = [(store._number, key) for key in keys]
        present = apsw.Connection(store.path, flags=apsw.SQLITE_OPEN_READONLY)
        try:
            return list(rows_of_each(present, select, values)) != list(rows_of_each(store._db, select, values))
        finally:
            present.close()


class SqliteView:
    """See `kilburn.backends.durable.IndexView`."""

    def __init__(self, index: TextIndex, directory: Directory, reading: Reading) -> None:
        self.index, self._table, self._directory, self._reading = index, index, directory, reading

    def read(self, do: Callable[[IndexView], T]) -> T:
        """Call a function with the passages in one snapshot."""
        with self._reading("searching"):
            return do(self)

    def extents(self, segments: Collection[int] | None) -> Extents:
        """See `IndexView`."""
        return self._directory.extents() if segments is None else self._directory.segment_extents(list(segments))

    def whole(self, segments: Iterable[int]) -> set[int]:
        """See `IndexView`."""
        return {number for number, segment in self._directory.numbered(set(segments)).items() if not segment.damaged}

    def page_entries(self, keys: Sequence[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], int, Span]]:
        """See `IndexView`."""
        return self._table.of_pages(keys)


class SqliteVectors:
    """See `kilburn.backend.VectorIndex`."""

    def __init__(
        self, db: apsw.Connection, table: VectorTable, directory: Directory, reading: Reading, writing: WriteScope
    ) -> None:
        self._db, self._table, self._directory, self._reading, self._writing = db, table, directory, reading, writing

    def unembedded(
        self, embedder: str, limit: int, damaged: MutableMapping[int, StoreCorrupt] | None = None
    ) -> list[tuple[int, str]]:
        """See `VectorIndex`."""
        name, errors = check_name(embedder, "embedder"), damaged if damaged is not None else {}
        with self._reading("reading"):
            # A search asks this every time: after "none waits" nothing is looked at until somebody writes.
            segments = self._directory.waits_in(embedder)
            if segments is not None and not segments:
                return []
            passages = sound_passages(
                limit, lambda count: self._table.waiting(name, count, segments), partial(searchable_text, self._db), errors
            )
            if not passages and not errors and limit > 0:
                self._directory.nothing_waits(embedder)
        return passages

    def add(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """See `VectorIndex`."""
        with self._writing("writing", to=()):
            self._table.keep(check_name(embedder, "embedder"), rows)

    def read(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """See `VectorIndex`. `fsck --repair` drops damaged vectors; their passages then wait for new ones."""
        while True:
            with self._reading("reading"):
                vectors, after = self._table.read(embedder, after, READ_ROWS)
            yield from vectors
            if not after:
                return

    def embedders(self) -> list[str]:
        """See `VectorIndex`."""
        with self._reading("reading"):
            return self._table.names()

    def drop(self, embedder: str) -> None:
        """See `VectorIndex`."""
        with self._writing("writing"):
            self._table.drop(embedder)


class SqliteSettings:
    """See `kilburn.backend.SettingStore`."""

    def __init__(self, db: apsw.Connection, tenant: int, reading: Reading, writing: WriteScope) -> None:
        self._db, self._tenant, self._reading, self._writing = db, tenant, reading, writing

    def all(self) -> dict[str, str]:
        """See `SettingStore`. A damaged setting is left out; `fsck` reports it."""
        with self._reading("reading"):
            return self._all()

    def put(self, name: str, value: str | None) -> None:
        """See `SettingStore`."""
        check_storable(name, value)
        with self._writing("writing", to=()):
            self._put(name, value)

    def replace(self, name: str, expected: str | None, value: str | None) -> bool:
        """See `SettingStore`."""
        check_storable(name, expected, value)
        with self._writing("writing", to=()):
            is_known = self._all().get(name) == expected
            if is_known:
                self._put(name, value)
            return is_known

    def _all(self) -> dict[str, str]:
        select = "SELECT name, value, seal FROM setting WHERE tenant = ? ORDER BY name"
        return {
            name: value
            for name, value, seal in rows(self._db, select, self._tenant)
            if seal == compute_seal("setting", self._tenant, name, value)
        }

    def _put(self, name: str, value: str | None) -> None:
        if value is None:
            self._db.execute("DELETE FROM setting WHERE tenant = ? AND name = ?", (self._tenant, name))
            return
        insert = (
            "INSERT INTO setting(tenant, name, value, seal) VALUES(?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET value = excluded.value, seal = excluded.seal"
        )
        self._db.execute(insert, (self._tenant, name, value, compute_seal("setting", self._tenant, name, value)))


class SqliteHistories:
    """See `kilburn.backend.HistoryIndex`."""

    def __init__(self, db: apsw.Connection, tenant: int, reading: Reading, writing: WriteScope) -> None:
        self._db, self._tenant, self._reading, self._writing = db, tenant, reading, writing

    def put(self, segment: int, digests: Digests, *, page: int) -> bool:
        """See `HistoryIndex`."""
        with self._writing("writing", to=()):
            return histories.put(self._db, self._tenant, segment, digests, page)

    def owners(self, digest: bytes, limit: int, *, tail: bool = False) -> list[HistoryOwner]:
        """See `HistoryIndex`."""
        with self._reading("reading"):
            return histories.owners(self._db, self._tenant, digest, limit, tail=tail)

    def missing(self, root: str, user: str, limit: int) -> list[str]:
        """See `HistoryIndex`."""
        with self._reading("reading"):
            return histories.missing(self._db, self._tenant, root, user, limit)


class _Surveyed(NamedTuple):
    """The state of the file when the sessions' rows were last looked at, the last row, and how many sessions were made."""

    state: int
    last: int
    session_count: int


class Sqlite(StoreFile):
    """A store in one SQLite file.

    Args:
        path: the file, created if it is missing (mode 0600), or ":memory:".
        tenant: the partition that this object serves.
        readonly: refuse every write.
        busy_timeout: seconds to wait for another writer.
        synchronous: "FULL": commits survive a power cut. "NORMAL": a power cut may lose the commits after the last `sync`.
            "OFF": a power cut may lose the file. A killed process never loses a commit.
        vfs: the name of a registered APSW VFS. It has no shared memory, so this object holds the file exclusively, and `sync`
            does nothing.
        restore: restore the tenant's own row if it is damaged, instead of refusing the file.

    Raises:
        StoreVersion: SQLite older than 3.51.3, or a file of a newer Kilburn or of a development version.
        StoreCorrupt: not a Kilburn file.
        StoreReadOnly: the folder or file may not be written.
        StoreError: `readonly` and no such file.
        SpecError: not a valid tenant name.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        tenant: str = "default",
        readonly: bool = False,
        busy_timeout: float = 5.0,
        synchronous: str = "FULL",
        vfs: str | None = None,
        restore: bool = False,
    ) -> None:
        super().__init__(
            path,
            tenant=check_name(tenant, "tenant"),
            readonly=readonly,
            busy_timeout=busy_timeout,
            synchronous=synchronous,
            vfs=vfs,
        )
        # The state when every session's row was last looked at before a new one was made.
        self._surveyed: _Surveyed | None = None
        try:
            with translate_errors(self.path, "opening"):
                self._configure(synchronous, exclusive=vfs is not None)
                self._number = self._register(restore=restore and not readonly)
                self._open_parts()
            self._chilling.sweep()
            if not self.readonly:
                with translate_errors(self.path, "opening"):
                    # A writer that was killed, or a reader, may have left erased bytes.
                    self._unwiped = row(self._db, "SELECT 1 FROM erasure") is not None
                    self._wipe(wait=False)
        except BaseException:
            self._db.close(True)
            raise

    def _open_parts(self) -> None:
        db, number, reading, writing = self._db, self._number, self._reading, self._writing
        self._directory = Directory(db, self._sealed, number)
        self._cold = ColdTable(db, number)
        db.fetch = self._cold.fetch
        self._index, self._vector_table = TextIndex(db, number), VectorTable(db, number)
        texts = ContentTable(db, number)
        self._batches = BatchWriter(db, self._sealed, texts, self._index, self._vector_table, number)
        self._chilling = self.contents = SqliteContents(self, texts, self._read_cold, self._change_cold)
        self.words = PassageIndex(SqliteView(self._index, self._directory, reading).read)
        self.vectors = SqliteVectors(db, self._vector_table, self._directory, reading, writing)
        self.settings = SqliteSettings(db, number, reading, writing)
        self.histories = SqliteHistories(db, number, reading, writing)

    def _register(self, *, restore: bool) -> int:
        """Return the tenant's number in the file; 0 if the file is read-only and does not have this tenant."""
        if self.readonly:
            if schema_number(self._db, self.path) == 0:
                raise StoreCorrupt(f"{self.path} is empty", advice="open it for writing first, or give another path")
        else:
            prepare_schema(self._db, self.path, self._note_wiped)
        self._sealed = SealedRows(self._db)
        self._sealed.check_key()
        if restore:
            with write_transaction(self._db):
                restored = self._sealed.restore_tenant(self.tenant)
            if restored:
                log.warning("%s: the row of tenant %r was damaged and is restored", self.path, self.tenant)
        number = self._sealed.tenant(self.tenant)
        if self.readonly:
            return number or 0
        if number is None:
            with write_transaction(self._db):
                number = self._sealed.tenant(self.tenant)
                if number is None:
                    self._db.execute("INSERT INTO tenant(name) VALUES(?)", (self.tenant,))
                    number = self._db.last_insert_rowid()
                    seal = compute_seal("tenant", number, self.tenant.encode())
                    self._db.execute("UPDATE tenant SET seal = ? WHERE id = ?", (seal, number))
                    TextIndex(self._db, number).create()
        self._set_index(number)
        return number

    def _set_index(self, number: int) -> None:
        """Restore the settings of the text index if they were lost: without them forgotten words would stay in it."""
        try:
            index = TextIndex(self._db, number)
            if not index.is_configured():
                with write_transaction(self._db):
                    index.configure()
        except (apsw.CorruptError, apsw.SQLError) as error:
            # A damaged index must prevent neither reading nor the repair.
            log.warning("%s: the text index is damaged, run `kilburn fsck --repair`: %s", self.path, error)

    def segment(
        self, name: str, *, time: float, create: bool = True, kind: SegmentKind = SegmentKind.SESSION, user: str = ""
    ) -> SegmentInfo | None:
        """See `Backend`.

        Raises:
            StoreCorrupt: it is damaged; or it would be created, and a damaged or lost session might be the same.
            SpecError: not a valid user name.
        """
        if user:
            check_name(user, "user")
        with self._reading("reading"):
            stored_row = self._sealed.named(self._number, name)
        if stored_row is not None:
            return stored_row.whole().info
        if not create:
            return None
        created: list[int] = []
        with self._writing("writing", to=created):
            stored_row = self._sealed.named(self._number, name)
            if stored_row is None:
                created.append(self._create(name, time, kind, user))
                stored_row = self._sealed.segment(self._number, created[0])
        return stored_row.whole().info if stored_row is not None else None

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        """See `Backend`."""
        if user:
            check_name(user, "user")
        if self._stale_marks:
            self._remove_stale_marks(wait=batch.wait)
        created, work = list[int](), prepared(batch)
        with self._writing("writing", wait=batch.wait, to=created):
            if self._sealed.named(self._number, name) is not None:
                raise StoreStale(f"there is a session {name!r} already", advice="take another name")
            created.append(self._create(name, time, SegmentKind.SESSION, user))
            self._batches.write(created[0], batch, work)
            stored_row = self._sealed.segment(self._number, created[0])
            assert stored_row is not None
        if self.anchor is not None:
            self.anchor.note(created[0], batch)
        return stored_row.whole().info

    def _create(self, name: str, time: float, kind: SegmentKind, user: str) -> int:
        """Add the row of a segment, in a transaction, and return its number."""
        self._survey(name)
        insert = "INSERT INTO segment(tenant, name, created, used, kind, owner) VALUES(?, ?, ?, ?, ?, ?)"
        self._db.execute(insert, (self._number, name, time, time, kind.value, user))
        number = self._db.last_insert_rowid()
        seal = seal_of_segment(number, self._number, name.encode(), float(time), 0, kind.encode(), user.encode())
        counters_seal = compute_seal("counters", number, float(time), 0, 0, 0, 0, 0)
        self._db.execute("UPDATE segment SET seal = ?, counters_seal = ? WHERE id = ?", (seal, counters_seal, number))
        self._db.execute("UPDATE tenant SET sessions = sessions + 1 WHERE id = ?", (self._number,))
        return number

    def _survey(self, name: str) -> None:
        """Check that no damage hides a session of this name. An agent would otherwise start a new session instead of continuing
        the hidden one."""
        state = self._db.pragma("data_version")
        if self._surveyed is not None and self._surveyed.state == state:
            # Only this connection has written since. So the cost of a new session does not grow with their number.
            return
        expected, survey = self._segments_made(), self._surveyed
        if survey is not None:
            # Others have written. Their new rows are checked once; all rows, if their number does not match.
            count, same, last = self._count_sessions(name, survey.last)
            if not same and count == expected - survey.session_count:
                self._surveyed = _Surveyed(state, max(last, survey.last), expected)
                return
        segments = self._sealed.segments(self._number) if survey is None else []
        count, same, last = self._count_sessions(name, 0)
        if same or count < expected or any(segment.damaged and not segment.quarantined for segment in segments):
            raise StoreCorrupt(
                f"session {name!r} may be here already, damaged", advice="run `kilburn fsck --repair`, then open it again"
            )
        self._surveyed = _Surveyed(state, last, expected)

    def _count_sessions(self, name: str, first: int) -> tuple[int, int, int]:
        """Return the number of rows behind one, how many of them have this name, and the last row's number. The table itself is
        read, so a damaged index hides none."""
        count = "SELECT count(*), total(name = ?2), ifnull(max(id), 0) FROM segment NOT INDEXED WHERE tenant = ?1 AND id > ?3"
        ((total, same, last),) = rows(self._db, count, self._number, name, first)
        return total, same, last

    def _segments_made(self) -> int:
        """Return how many segments this tenant has created; 0 if unknown."""
        tenant_row = row(self._db, "SELECT sessions FROM tenant WHERE id = ?", self._number)
        return tenant_row[0] if tenant_row and isinstance(tenant_row[0], int) else 0

    def segments(self, under: str = "") -> list[SegmentInfo]:
        """See `Backend`."""
        with self._reading("reading"):
            if under:
                return [segment.info for segment in self._sealed.under(self._number, under)]
            infos = list(self._directory.infos().values())
            return [*infos, *self._missing(len(infos))]

    def _missing(self, present: int) -> list[SegmentInfo]:
        """Return a placeholder for missing sessions, given how many are present."""
        lost = self._segments_made() - present
        return [SegmentInfo(number=0, name="?", created=0.0, damaged=f"sessions that are missing: {lost}")] if lost > 0 else []

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """See `Backend`."""
        with self._reading("reading"):
            scope = self._directory.scope(kinds, user)
            if SegmentKind.SESSION in kinds and (lost := self._missing(len(self._directory.infos()))):
                scope = msgspec.structs.replace(scope, damaged=(*scope.damaged, *lost))
        return scope

    def _segment(self, segment: int) -> SegmentRow | None:
        """Return the row of an undamaged segment of this tenant, or None if there is no segment of that number.

        Raises:
            StoreCorrupt: it is damaged.
        """
        stored_row = self._sealed.segment(self._number, segment)
        return stored_row.whole() if stored_row is not None else None

    def commit(self, segment: int, batch: Batch) -> None:
        """See `Backend`.

        When this returns, erased bytes are wiped from the file, unless another process is reading an older state. In that case
        the file is flagged, and the next commit of any writer, its `close`, or the next opening for writing wipes them.
        """
        if self._stale_marks:
            self._remove_stale_marks(wait=batch.wait)
        work = prepared(batch)
        with self._writing("writing", wait=batch.wait, to=(segment,)):
            unwiped = self._batches.write(segment, batch, work)
        if self.anchor is not None:
            self.anchor.note(segment, batch)
        if batch.erase:
            # Before the wipe, because an object's name is a hash of its content.
            self._chilling.sweep()
        if unwiped or self._unwiped:
            with self._lock:
                # Another thread may have erased something meanwhile.
                self._unwiped = self._unwiped or unwiped
                self._wipe(wait=bool(batch.erase))

    def pages(self, segment: int) -> Iterator[tuple[Page, State]]:
        """See `Backend`."""
        with self._reading("reading"):
            stored_row = self._segment(segment)
            page_rows = self._sealed.pages(stored_row) if stored_row is not None else []
        yield from page_rows

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        with self._reading("reading"):
            return dict(self._sealed.read(self._there(keys)))

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        with self._reading("reading"):
            return self._sealed.skim(self._there(keys))

    def _there(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the keys whose segments belong to this tenant, without duplicates.

        Raises:
            StoreCorrupt: such a segment is damaged.
        """
        requested = dict.fromkeys(keys)
        segments = self._directory.numbered({segment for segment, _ in requested})
        for segment in segments.values():
            segment.whole()
        return [key for key in requested if key[0] in segments]

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """See `Backend`."""
        with self._reading("reading"):
            stored_row = self._sealed.segment(self._number, segment)
            if stored_row is None:
                return []
            requested = set(pages)
            citing = citations.citing(self._db, segment, requested)
            if stored_row.kind is SegmentKind.SESSION and not stored_row.damaged:
                citing.update((segment, page) for page in self._made_from(stored_row, requested))
            return sorted(citing)

    def _made_from(self, segment: SegmentRow, pages: Set[int]) -> Iterator[int]:
        """Return the other pages of a session with any of these pages among their sources."""
        numbers = mentions.events_with_nodes(self._db, segment.number, mentions.source_nodes(pages))
        candidates = mentions.made_by(self._sealed.numbered(segment, numbers), pages)
        page_rows = self._sealed.read([(segment.number, page) for page in sorted(candidates)])
        return (page.id for _, (page, _) in page_rows if page.digest and not pages.isdisjoint(page.sources))

    def calls(self, segment: int, among: Iterable[str] | None = None) -> dict[str, int]:
        """See `Backend`."""
        select = "SELECT call, id FROM page WHERE segment = ? AND call "
        with self._reading("reading"):
            if among is None:
                return dict(rows(self._db, f"{select} IS NOT NULL ORDER BY id", segment)) if self._owns(segment) else {}
            if not self._owns(segment):
                return {}
            requested = list(among)
            plain = msgspec.json.encode([call for call in requested if "\0" not in call]).decode()
            # One query for thousands of calls. SQLite ends a text of JSON at NUL, so ids with NUL are looked up singly.
            inside = "SELECT call, page.id FROM json_each(?2) CROSS JOIN page ON segment = ?1 AND call = value"
            pages: dict[str, int] = dict(rows(self._db, inside, segment, plain))
            odd = [(segment, call) for call in requested if "\0" in call]
            return pages | dict(rows_of_each(self._db, f"{select} = ? ORDER BY id", odd)) if odd else pages

    def forgotten(self, segment: int) -> list[int]:
        """See `Backend`."""
        select = "SELECT id FROM page WHERE segment = ? AND content IS NULL ORDER BY id"
        with self._reading("reading"):
            return [page for (page,) in rows(self._db, select, segment)] if self._owns(segment) else []

    def checkpoint(self, segment: int, until: int | None = None) -> tuple[int, bytes] | None:
        """See `Backend`."""
        with self._reading("reading"):
            stored_row = self._segment(segment)
            if stored_row is None:
                return None
            return self._sealed.checkpoint(stored_row, stored_row.head if until is None else min(until, stored_row.head))

    def _read_events(self, segment: int, after: int, act: Act | None, limit: int) -> list[Event]:
        with self._reading("reading"):
            stored_row = self._segment(segment)
            if stored_row is None:
                return []
            if act is None:
                return list(self._sealed.events(stored_row, after, limit))
            return list(self._sealed.numbered(stored_row, self._numbers(segment, after, act, limit)))

    def _mark_leaving(self, keys: Collection[tuple[int, int]], marks: set[citations.Citation]) -> None:
        with self._writing("writing", to=()):
            marks.update(citations.mark_leaving(self._db, self._there(keys)))

    def _remove_citations(self, marks: Collection[citations.Citation], *, wait: bool) -> None:
        with self._writing("writing", wait=wait, to=()):
            citations.remove(self._db, marks)

    def _owns(self, segment: int) -> bool:
        """Whether this is a segment of this tenant."""
        return self._sealed.segment(self._number, segment) is not None

    def naming(self, segment: int, pages: Iterable[int]) -> list[Event]:
        """See `Backend`."""
        requested = set(pages)
        with self._reading("reading"):
            stored_row = self._segment(segment)
            if stored_row is None:
                return []
            events = self._sealed.numbered(
                stored_row, mentions.events_with_nodes(self._db, segment, mentions.page_nodes(requested))
            )
            return [event for event in events if not requested.isdisjoint((*event.pages, event.data.get("fold", 0)))]

    def _numbers(self, segment: int, after: int, act: Act, limit: int) -> list[int]:
        """Return the numbers of at most `limit` events of one act. Only notes have an index."""
        indexed = "act = 'note' AND " if act is Act.NOTE else ""
        select = f"SELECT number FROM event WHERE segment = ? AND number > ? AND {indexed}act = ? ORDER BY number LIMIT ?"
        return [number for (number,) in rows(self._db, select, segment, after, act.value, limit)]

    def now(self) -> float:
        """See `Backend`: the clock of this machine."""
        return time.time()

    def _read_cold(self, do: Callable[[ColdRows], T]) -> T:
        with self._reading("reading"):
            return do(self._cold)

    def _change_cold(self, do: Callable[[ColdRows], T], *, wait: bool = True) -> T:
        with self._writing("writing", wait=wait, to=()):
            return do(self._cold)

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        """See `Backend`.

        A quarantined session is erased as a whole: its rows, the texts that no other session has, its index entries and its
        quarantined bytes. The index is rebuilt.
        """
        with self._removing("erasing") if wipe else self._writing("erasing"):
            stored_row = self._sealed.segment(self._number, segment)
            if stored_row is None:
                raise StoreError(f"no segment {segment} here", advice="open it by name with `segment`")
            if stored_row.quarantined:
                erase_session(self._db, segment)
                rebuild(self._db, self._sealed, self._index, self._vector_table, self._number)
            else:
                erase_segment(self._db, stored_row.whole(), self._number)

    def lasting(self) -> AbstractContextManager[None]:
        """See `Backend`. It has no effect here: threads that call `sync` at the same time wait for the disk once."""
        return nullcontext()

"""The durable store: one SQLite file for content, ledger, state and text index.

Every write is one transaction with full sync: when `commit` returns, it survives a power cut. A caller that can wait for
several commits at once opens it with less, and calls `sync`.
Several processes may read while one writes. One object serves one tenant; no method takes one. An
SQLite that can lose data and a file that is not Kilburn's are refused.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Set
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple, TypeVar

import apsw
import msgspec

from kilburn.backend import Batch, Scope, SegmentInfo, SegmentKind, State, check_name
from kilburn.backends import citations, mentions
from kilburn.backends.chilling import ColdRows
from kilburn.backends.coldtable import ColdTable
from kilburn.backends.connection import row, rows, rows_of_each, translate_errors, write_transaction
from kilburn.backends.contenttable import ContentTable
from kilburn.backends.directory import Directory
from kilburn.backends.durable import PassageIndex
from kilburn.backends.parts import SqliteContents, SqliteHistories, SqliteSettings, SqliteVectors, SqliteView
from kilburn.backends.records import seal_of
from kilburn.backends.repair import erase_segment, erase_session, rebuild
from kilburn.backends.schema import prepare_schema, schema_number
from kilburn.backends.sealed import SealedRows, SegmentRow, seal_of_segment
from kilburn.backends.storefile import StoreFile
from kilburn.backends.textindex import TextIndex
from kilburn.backends.transaction import Transaction, prepared, sealed_in
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page

T = TypeVar("T")

log = logging.getLogger("kilburn")


class _Surveyed(NamedTuple):
    """The state of the file when the sessions' rows were last looked at, the last row, and how many sessions were made."""

    state: int
    last: int
    made: int


class Sqlite(StoreFile):
    """A store in one SQLite file.

    Args:
        path: the file, made where there is none (mode 0600), or ":memory:".
        tenant: the partition that this object serves.
        readonly: refuse every write.
        busy_timeout: seconds to wait for another writer.
        synchronous: "FULL" survives a power cut; "NORMAL" may lose the commits after the last `sync` in one, and
            "OFF" the file; neither loses anything to a killed process.
        vfs: the name of a registered APSW VFS. Such a one has no shared memory, so that the file is
            held by this object alone, and `sync` does nothing.
        restore: make the tenant's own row good where it is damaged, instead of refusing the file.

    Raises:
        StoreVersion: SQLite older than 3.51.3, or a file of a newer Kilburn or of a development version.
        StoreCorrupt: not a Kilburn file.
        StoreReadOnly: the folder or file may not be written.
        StoreError: `readonly` and no such file.
        SpecError: no name of a tenant.
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
                    self._unwiped = self._is_unwiped()
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
        self._transaction = Transaction(db, self._sealed, texts, self._index, self._vector_table, number)
        self._chilling = self.contents = SqliteContents(self, texts, self._read_cold, self._change_cold)
        self.words = PassageIndex(SqliteView(self._index, self._directory, reading).read)
        self.vectors = SqliteVectors(db, self._vector_table, self._directory, reading, writing)
        self.settings = SqliteSettings(db, number, reading, writing)
        self.histories = SqliteHistories(db, number, reading, writing)

    def _register(self, *, restore: bool) -> int:
        """The tenant's number in the file; 0 where it is read only and has none."""
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
                    seal = seal_of("tenant", number, self.tenant.encode())
                    self._db.execute("UPDATE tenant SET seal = ? WHERE id = ?", (seal, number))
                    TextIndex(self._db, number).create()
        self._set_index(number)
        return number

    def _set_index(self, number: int) -> None:
        """Give the text index its settings again if they were lost: without them forgotten words would stay in it."""
        try:
            index = TextIndex(self._db, number)
            if not index.is_configured():
                with write_transaction(self._db):
                    index.configure()
        except (apsw.CorruptError, apsw.SQLError) as error:
            # A damaged index must not prevent reading, or the repair.
            log.warning("%s: the text index is damaged, run `kilburn fsck --repair`: %s", self.path, error)

    def segment(
        self, name: str, *, time: float, create: bool = True, kind: SegmentKind = SegmentKind.SESSION, user: str = ""
    ) -> SegmentInfo | None:
        """The segment of that name, made at `time` where there is none and `create` is set, of this kind and for this user.

        Raises:
            StoreCorrupt: it is damaged; or it is to be made, and a session that might be it is damaged or lost.
            SpecError: no name of a user.
        """
        if user:
            check_name(user, "user")
        with self._reading("reading"):
            found = self._sealed.named(self._number, name)
        if found is not None:
            return found.whole().info
        if not create:
            return None
        made: list[int] = []
        with self._writing("writing", to=made):
            found = self._sealed.named(self._number, name)
            if found is None:
                made.append(self._create(name, time, kind, user))
                found = self._sealed.segment(self._number, made[0])
        return found.whole().info if found is not None else None

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        """Create a session at `time`, for this user, and do its first batch, as one transaction: both, or nothing.

        Raises:
            StoreStale: the name is taken by now. What `segment` raises when it creates, and what `commit` raises.
        """
        if user:
            check_name(user, "user")
        self._remove_stale_marks(wait=batch.wait)
        made, work = list[int](), prepared(batch)
        with self._writing("writing", wait=batch.wait, to=made):
            if self._sealed.named(self._number, name) is not None:
                raise StoreStale(f"there is a session {name!r} already", advice="take another name")
            made.append(self._create(name, time, SegmentKind.SESSION, user))
            self._transaction.write(made[0], batch, sealed_in(made[0], batch, work))
            found = self._sealed.segment(self._number, made[0])
            assert found is not None
        if self.anchor is not None:
            self.anchor.note(made[0], batch)
        return found.whole().info

    def _create(self, name: str, time: float, kind: SegmentKind, user: str) -> int:
        """Add the row of a segment, in a transaction; returns its number."""
        self._survey(name)
        insert = "INSERT INTO segment(tenant, name, created, used, kind, owner) VALUES(?, ?, ?, ?, ?, ?)"
        self._db.execute(insert, (self._number, name, time, time, kind.value, user))
        number = self._db.last_insert_rowid()
        seal = seal_of_segment(number, self._number, name.encode(), float(time), 0, kind.encode(), user.encode())
        counters_seal = seal_of("counters", number, float(time), 0, 0, 0, 0, 0)
        self._db.execute("UPDATE segment SET seal = ?, counters_seal = ? WHERE id = ?", (seal, counters_seal, number))
        self._db.execute("UPDATE tenant SET sessions = sessions + 1 WHERE id = ?", (self._number,))
        return number

    def _survey(self, name: str) -> None:
        """Check that no damage hides a session of this name. Otherwise an agent would start a new session instead of
        continuing the old one."""
        state = self._db.pragma("data_version")
        if self._surveyed is not None and self._surveyed.state == state:
            # Since then only this connection has written: what a new session costs does not grow with their number.
            return
        made, before = self._sessions_made(), self._surveyed
        if before is not None:
            # Others have: what they made is looked at, each row once; all rows, if there are not as many more as were made.
            there, same, last = self._count_sessions(name, before.last)
            if not same and there == made - before.made:
                self._surveyed = _Surveyed(state, max(last, before.last), made)
                return
        known = self._sealed.segments(self._number) if before is None else []
        there, same, last = self._count_sessions(name, 0)
        if same or there < made or any(one.damaged and not one.quarantined for one in known):
            raise StoreCorrupt(
                f"session {name!r} may be here already, damaged", advice="run `kilburn fsck --repair`, then open it again"
            )
        self._surveyed = _Surveyed(state, last, made)

    def _count_sessions(self, name: str, after: int) -> tuple[int, int, int]:
        """Of the rows behind one in the table, which no damaged index hides: how many there are, how many have this name, and
        the last."""
        count = "SELECT count(*), total(name = ?2), ifnull(max(id), 0) FROM segment NOT INDEXED WHERE tenant = ?1 AND id > ?3"
        ((there, same, last),) = rows(self._db, count, self._number, name, after)
        return there, same, last

    def _sessions_made(self) -> int:
        """How many sessions this tenant must have; 0 where that is not known."""
        found = row(self._db, "SELECT sessions FROM tenant WHERE id = ?", self._number)
        return found[0] if found and isinstance(found[0], int) else 0

    def segments(self, under: str = "") -> list[SegmentInfo]:
        """All segments of the tenant, oldest first, or those under a name; damaged ones say so."""
        with self._reading("reading"):
            if under:
                return [one.info for one in self._sealed.under(self._number, under)]
            infos = list(self._directory.infos().values())
            return [*infos, *self._missing(len(infos))]

    def _missing(self, there: int) -> list[SegmentInfo]:
        """What stands for sessions that must be there beside these and are not."""
        lost = self._sessions_made() - there
        return [SegmentInfo(number=0, name="?", created=0.0, damaged=f"sessions that are missing: {lost}")] if lost > 0 else []

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """See `Backend`."""
        with self._reading("reading"):
            found = self._directory.scope(kinds, user)
            if SegmentKind.SESSION in kinds and (lost := self._missing(len(self._directory.infos()))):
                found = msgspec.structs.replace(found, damaged=(*found.damaged, *lost))
        return found

    def _segment(self, segment: int) -> SegmentRow | None:
        """A session of this tenant that is whole; None where there is none of that number.

        Raises:
            StoreCorrupt: it is damaged.
        """
        found = self._sealed.segment(self._number, segment)
        return found.whole() if found is not None else None

    def commit(self, segment: int, batch: Batch) -> None:
        """Do the whole batch durably, or raise and do nothing.

        When this returns, erased bytes are gone from the file, unless another process is reading an older state at
        that moment. In this case a flag in the file says so, and they are removed by the next commit of any writer,
        its `close`, or the next opening for writing.

        Raises:
            StoreStale: the segment's ledger has moved on. StoreBusy, StoreFull, StoreReadOnly.
            StoreCorrupt: what is there already is damaged.
            StoreError: a batch that contradicts itself, or an I/O error.
        """
        self._remove_stale_marks(wait=batch.wait)
        work = sealed_in(segment, batch, prepared(batch))
        with self._writing("writing", wait=batch.wait, to=(segment,)):
            unwiped = self._transaction.write(segment, batch, work)
        if self.anchor is not None:
            self.anchor.note(segment, batch)
        if batch.erase:
            # First, as an object's name is a hash of what it holds.
            self._chilling.sweep()
        if unwiped or self._unwiped:
            with self._lock:
                # What another thread has erased meanwhile is not forgotten by this.
                self._unwiped = self._unwiped or unwiped
                self._wipe(wait=bool(batch.erase))

    def pages(self, segment: int) -> Iterator[tuple[Page, State]]:
        """All pages of a segment with their states: p1, p2, ..., then f1, f2, ..."""
        with self._reading("reading"):
            stored = self._segment(segment)
            found = self._sealed.pages(stored) if stored is not None else []
        yield from found

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Single pages with their states; what does not exist is left out.

        Raises:
            StoreCorrupt: one is not what was written.
        """
        with self._reading("reading"):
            return dict(self._sealed.read(self._there(keys)))

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        with self._reading("reading"):
            return self._sealed.skim(self._there(keys))

    def _there(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Those of segments of this tenant, each once.

        Raises:
            StoreCorrupt: such a segment is damaged.
        """
        wanted = dict.fromkeys(keys)
        there = self._directory.numbered({segment for segment, _ in wanted})
        for segment in there.values():
            segment.whole()
        return [key for key in wanted if key[0] in there]

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """See `Backend`."""
        with self._reading("reading"):
            stored = self._sealed.segment(self._number, segment)
            if stored is None:
                return []
            wanted = set(pages)
            found = citations.citing(self._db, segment, wanted)
            if stored.kind is SegmentKind.SESSION and not stored.damaged:
                found.update((segment, page) for page in self._made_from(stored, wanted))
            return sorted(found)

    def _made_from(self, segment: SegmentRow, pages: Set[int]) -> Iterator[int]:
        """The other pages of a session that have any of these among their sources."""
        numbers = mentions.events_of(self._db, segment.number, mentions.source_nodes(pages))
        made = mentions.made_by(self._sealed.numbered(segment, numbers), pages)
        read = self._sealed.read([(segment.number, page) for page in sorted(made)])
        return (page.id for _, (page, _) in read if page.digest and not pages.isdisjoint(page.sources))

    def calls(self, segment: int, among: Iterable[str] | None = None) -> dict[str, int]:
        """The calls of a segment by their ids, with the ids of their pages: all, or those with these ids."""
        select = "SELECT call, id FROM page WHERE segment = ? AND call "
        with self._reading("reading"):
            if among is None:
                return dict(rows(self._db, f"{select} IS NOT NULL ORDER BY id", segment)) if self._owns(segment) else {}
            if not self._owns(segment):
                return {}
            wanted = list(among)
            plain = msgspec.json.encode([call for call in wanted if "\0" not in call]).decode()
            # One question for thousands. SQLite ends a text of JSON at NUL.
            inside = "SELECT call, page.id FROM json_each(?2) CROSS JOIN page ON segment = ?1 AND call = value"
            found: dict[str, int] = dict(rows(self._db, inside, segment, plain))
            odd = [(segment, call) for call in wanted if "\0" in call]
            return found | dict(rows_of_each(self._db, f"{select} = ? ORDER BY id", odd)) if odd else found

    def forgotten(self, segment: int) -> list[int]:
        """The ids of the pages of a segment that are forgotten, in order."""
        select = "SELECT id FROM page WHERE segment = ? AND content IS NULL ORDER BY id"
        with self._reading("reading"):
            return [page for (page,) in rows(self._db, select, segment)] if self._owns(segment) else []

    def checkpoint(self, segment: int, until: int | None = None) -> tuple[int, bytes] | None:
        """The newest checkpoint of a segment, at event `until` or before it, with the number of its last event."""
        with self._reading("reading"):
            stored = self._segment(segment)
            if stored is None:
                return None
            return self._sealed.checkpoint(stored, stored.head if until is None else min(until, stored.head))

    def _read_events(self, segment: int, after: int, act: Act | None, limit: int) -> list[Event]:
        with self._reading("reading"):
            stored = self._segment(segment)
            if stored is None:
                return []
            if act is None:
                return list(self._sealed.events(stored, after, limit))
            return list(self._sealed.numbered(stored, self._numbers(segment, after, act, limit)))

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
        wanted = set(pages)
        with self._reading("reading"):
            stored = self._segment(segment)
            if stored is None:
                return []
            found = self._sealed.numbered(stored, mentions.events_of(self._db, segment, mentions.nodes_of(wanted)))
            return [event for event in found if not wanted.isdisjoint((*event.pages, event.data.get("fold", 0)))]

    def _numbers(self, segment: int, after: int, act: Act, limit: int) -> list[int]:
        """The numbers of at most so many events of one act; of notes they are in an index."""
        notes = "SELECT number FROM event WHERE segment = ? AND number > ? AND act = 'note' ORDER BY number LIMIT ?"
        others = "SELECT number FROM event WHERE segment = ? AND number > ? AND act = ? ORDER BY number LIMIT ?"
        if act is Act.NOTE:
            return [number for (number,) in rows(self._db, notes, segment, after, limit)]
        return [number for (number,) in rows(self._db, others, segment, after, act.value, limit)]

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
        """Erase what is left of a segment of which every page is forgotten: its name, its user and its ledger.

        Of a session that was quarantined, everything: its rows, the texts that no other session has, its index entries and
        its quarantined bytes; the index is built again. No byte is left, as when `commit` erases pages, but see `wipe` in
        `Backend`.

        Raises:
            StoreError: no such segment, or it has pages that are not forgotten.
        """
        with self._removing("erasing") if wipe else self._writing("erasing"):
            found = self._sealed.segment(self._number, segment)
            if found is None:
                raise StoreError(f"no segment {segment} here", advice="open it by name with `segment`")
            if found.quarantined:
                erase_session(self._db, segment)
                rebuild(self._db, self._sealed, self._index, self._vector_table, self._number)
            else:
                erase_segment(self._db, found.whole(), self._number)

    def lasting(self) -> AbstractContextManager[None]:
        """See `Backend`. What is committed waits for `sync` here: threads that come together wait for the disk once."""
        return nullcontext()

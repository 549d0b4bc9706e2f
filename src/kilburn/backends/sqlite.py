"""The durable store: one SQLite file for content, ledger, state and text index.

Every write is one transaction with full sync: when `commit` returns, it survives a power cut. A caller that can wait for
several commits at once opens it with less, and calls `sync`.
Several processes may read while one writes. One object serves one tenant; no method takes one. An
SQLite that can lose data and a file that is not Kilburn's are refused.
"""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from itertools import chain, repeat
from types import TracebackType
from typing import NamedTuple, TypeVar
from urllib.parse import quote

import apsw
import msgspec

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
)
from kilburn.backends import citations, histories, mentions
from kilburn.backends.anchor import Anchor
from kilburn.backends.chilling import Chilling, ColdRows
from kilburn.backends.codec import key_of, sound_passages
from kilburn.backends.coldtable import ColdTable
from kilburn.backends.connection import (
    StoreConnection,
    row,
    rows,
    rows_of_each,
    savepoint,
    transaction_scope,
    translate_errors,
    write_transaction,
)
from kilburn.backends.contenttable import ContentTable, searchable_of
from kilburn.backends.directory import Directory
from kilburn.backends.findings import Finding
from kilburn.backends.inspection import erase_segment, erase_session, inspect, quarantine_session, rebuild
from kilburn.backends.records import UNREADABLE, seal_of
from kilburn.backends.schema import check_library, prepare_schema, schema_number
from kilburn.backends.sealed import SealedRows, SegmentRow, seal_of_segment
from kilburn.backends.slack import logged_pages, wipe
from kilburn.backends.textindex import TextIndex
from kilburn.backends.transaction import FLAG, Transaction, prepared, sealed_in
from kilburn.backends.vectortable import VectorTable
from kilburn.errors import KilburnError, StoreCorrupt, StoreError, StoreReadOnly, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page, Span

T = TypeVar("T")

log = logging.getLogger("kilburn")

CHUNK = 1000
"""Events read at a time, so that no read transaction stays open while a caller thinks."""

FEW_EVENTS = 16
"""Events that are read first: what a session was made of stands among them."""

SYNC: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)

TRIES = 20
"""How often cold texts are read again, while another program moves them."""

FIRST_PAUSE, PAUSE = 0.0001, 0.005
"""Seconds between two tries to become the writer: at least and at most; between these, a quarter of what was waited already.
A commit holds the file for half a millisecond. SQLite's own waiting would keep this object's lock, and so its readers."""

GROWTH = 4000
"""Pages by which the write-ahead log grows until what is in it is moved into the file: 16 MB. Pages that are written again and
again are moved once."""

TURN = 50
"""Milliseconds for which the end of such a move waits until no other process writes, and then until none reads the log."""


class _Surveyed(NamedTuple):
    """What is known of the sessions' rows: the state of the file as others left it, the last row, and how many were made."""

    state: int
    last: int
    made: int


class Sqlite:
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

    def __repr__(self) -> str:
        """Where it is and for whom; nothing is read for it."""
        return f"<Sqlite {self.path!r} of tenant {self.tenant!r}{', for reading' * self.readonly}>"

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
        check_library(apsw.sqlite_lib_version())
        if synchronous not in ("FULL", "NORMAL", "OFF"):
            raise StoreError(f"synchronous {synchronous!r} is none of FULL, NORMAL, OFF")
        self.path = os.fspath(path)
        self.tenant = check_name(tenant, "tenant")
        self.readonly = readonly
        self._lock = threading.RLock()
        self._patience, self._milliseconds = busy_timeout, round(busy_timeout * 1000)
        # Set while the file or its write-ahead log may still contain erased bytes.
        self._unwiped = False
        # Whether a thread is within `erasing`.
        self._erasing = threading.local()
        # What is said to be leaving, and is not any more.
        self._staying = set[citations.Citation]()
        # Whether several batches are one transaction now; read and set under the lock.
        self._joined = False
        self.anchor = Anchor()
        # Commits, and how many of them `sync` has made durable.
        self._commits = self._synced = 0
        self._is_plain = vfs is None and self.path != ":memory:"
        self._lazy = synchronous == "NORMAL" and self._is_plain
        self._sync_lock = threading.Lock()
        # Of the threads that wait for another process, the one that holds this looks whether it writes no more.
        self._queue = threading.Lock()
        # Pages of the write-ahead log: after the last commit here, and when they were last moved into the file.
        self._log = self._moved = 0
        # What was known when every session's row was last looked at, before a new one was made.
        self._surveyed: _Surveyed | None = None
        self._prepare_file(vfs)
        with translate_errors(self.path, "opening"):
            self._db = self._connect(vfs)
        try:
            with translate_errors(self.path, "opening"):
                self._configure(synchronous, exclusive=vfs is not None)
                self._number = self._register(restore=restore and not readonly)
                self._directory = Directory(self._db, self._sealed, self._number)
                self._contents = ContentTable(self._db, self._number)
                self._index = TextIndex(self._db, self._number)
                self._vectors = VectorTable(self._db, self._number)
                self._cold = ColdTable(self._db, self._number)
                self._db.fetch = self._cold.fetch
                self._chilling = Chilling(self.path, self._read_cold, self._change_cold, self.sync, self._leaves_objects)
                self._transaction = Transaction(self._db, self._sealed, self._contents, self._index, self._vectors, self._number)
            self._chilling.sweep()
            if not self.readonly:
                with translate_errors(self.path, "opening"):
                    # A writer that was killed, or a reader, may have left erased bytes.
                    self._unwiped = self._is_unwiped()
                    self._wipe(wait=False)
        except BaseException:
            self._db.close(True)
            raise

    def _prepare_file(self, vfs: str | None) -> None:
        if self.path == ":memory:" or vfs is not None:
            return
        try:
            mode = os.stat(self.path).st_mode
        except FileNotFoundError:
            if self.readonly:
                raise StoreError(f"there is no file {self.path}", advice="check the path, or open it for writing first") from None
        except OSError as error:
            raise StoreReadOnly(f"opening {self.path}: {error.strerror}", advice="check the path and its permissions") from error
        else:
            if not stat.S_ISREG(mode):
                raise StoreError(f"{self.path} is not a file", advice="give the path of a file")
            return
        try:
            # Created here and not by SQLite, so that no other user can read it, whatever the umask is.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except FileNotFoundError as error:
            raise StoreError(f"there is no folder for {self.path}", advice="make it first") from error
        except OSError as error:
            raise StoreReadOnly(f"creating {self.path}: {error.strerror}", advice="give a path that can be written") from error

    def _connect(self, vfs: str | None) -> StoreConnection:
        writes = apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE
        db = StoreConnection(self.path, flags=apsw.SQLITE_OPEN_READONLY if self.readonly else writes, vfs=vfs)
        # Before the first statement: a writer that just opens or leaves the file holds it for a moment.
        db.set_busy_timeout(self._milliseconds)
        if not self.readonly:
            return db
        try:
            self._retry(lambda: db.pragma("user_version"))
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            db.close(True)
            # A folder where not even the shared memory of readers can be made: with no log beside it
            # the file is complete, and nobody can change it while it is read.
            if os.path.exists(f"{self.path}-wal"):
                raise
            name = f"file:{quote(os.path.abspath(self.path))}?immutable=1"
            db = StoreConnection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, vfs=vfs)
            db.set_busy_timeout(self._milliseconds)
        except BaseException:
            db.close(True)
            raise
        return db

    def _configure(self, synchronous: str, *, exclusive: bool) -> None:
        db = self._db
        db.config(apsw.SQLITE_DBCONFIG_DEFENSIVE, 1)
        db.config(apsw.SQLITE_DBCONFIG_TRUSTED_SCHEMA, 0)
        # Nothing of a page may reach a temporary file.
        db.pragma("temp_store", "MEMORY")
        db.pragma("cache_size", -16_000)
        db.pragma("cell_size_check", True)
        if self.readonly:
            return
        if exclusive:
            db.pragma("locking_mode", "EXCLUSIVE")
        schema_number(db, self.path)
        # SQLite does not wait here as it does elsewhere: of two that open a new file at once, one is
        # told at once that it is busy.
        self._retry(lambda: db.pragma("journal_mode", "WAL"))
        db.pragma("synchronous", synchronous)
        db.pragma("secure_delete", True)
        db.pragma("foreign_keys", True)
        db.set_wal_hook(self._note_log)

    def _note_log(self, db: apsw.Connection, name: str, pages: int) -> int:
        # It may have been begun anew.
        self._log, self._moved = pages, min(self._moved, pages)
        return apsw.SQLITE_OK

    def _move_log(self) -> None:
        """Move what is in the write-ahead log into the file, once it has grown by so much. Others may not write at the end; most
        is moved before that.

        SQLite's own way, a move after each commit that finds a long log, ends only if nobody writes meanwhile: with two writers
        it moved little after nearly each commit, and waited for the disk twice each time.
        """
        self._moved = self._log
        self._db.set_busy_timeout(TURN)
        try:
            self._empty_log()
        except apsw.Error as error:
            # The commits are in the log, which is read until it can be moved.
            log.debug("%s: its log stays as it is for now: %s", self.path, error)
        finally:
            self._db.set_busy_timeout(self._milliseconds)

    def _retry(self, do: Callable[[], object]) -> None:
        """Repeat an operation for which SQLite itself does not wait, until it succeeds or the time is over."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                do()
            except (apsw.BusyError, apsw.ProtocolError):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(PAUSE)
            else:
                return

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

    @contextmanager
    def _reading(self, doing: str) -> Iterator[None]:
        """One snapshot for all statements of the block."""
        with self._lock, translate_errors(self.path, doing):
            if self._joined:
                yield
                return
            with transaction_scope(self._db):
                self._db.execute("BEGIN")
                yield

    @contextmanager
    def _writing(self, doing: str, *, wait: bool = True, to: Collection[int] | None = None) -> Iterator[None]:
        """One write transaction: all of the block or nothing of it.

        While another process writes, this object's other threads go on reading.

        Args:
            to: the segments whose rows it changes, known at its end; None if that may be any.
        """
        deadline, since, first = time.monotonic() + (self._patience if wait else 0.0), 0.0, False
        try:
            while True:
                with self._lock:
                    if self._joined:
                        with translate_errors(self.path, doing):
                            self._directory.begins()
                            with savepoint(self._db):
                                yield
                            if to is not None:
                                self._directory.wrote(to)
                        return
                with self._lock, translate_errors(self.path, doing), transaction_scope(self._db):
                    if self.readonly:
                        raise StoreReadOnly(f"{self.path} was opened for reading", advice="open it without readonly")
                    if self._begin(last=time.monotonic() >= deadline):
                        if first:
                            first = False
                            self._queue.release()
                        if to is not None:
                            self._directory.begins()
                        yield
                        self._db.execute("COMMIT")
                        self._commits += 1
                        if to is not None:
                            self._directory.wrote(to)
                        if self._log - self._moved >= GROWTH:
                            self._move_log()
                        return
                if first:
                    time.sleep(min(max((time.monotonic() - since) / 4, FIRST_PAUSE), PAUSE))
                else:
                    # Not for long: whoever is first may need the lock that this thread holds.
                    first, since = self._queue.acquire(timeout=PAUSE), time.monotonic()
        finally:
            if first:
                self._queue.release()

    @contextmanager
    def _removing(self, doing: str) -> Iterator[None]:
        """One write transaction that removes rows, and their bytes afterwards."""
        with self._writing(doing):
            yield
            self._db.execute(FLAG)
        self._chilling.sweep()
        with self._lock:
            self._unwiped = True
            self._wipe(wait=True)

    def _begin(self, *, last: bool) -> bool:
        """Become the writer; False where another is and this is not the `last` try."""
        self._db.set_busy_timeout(0)
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except apsw.BusyError:
            if last:
                raise
            return False
        finally:
            self._db.set_busy_timeout(self._milliseconds)
        return True

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
        if self._staying:
            self._stay(wait=batch.wait)
        made, work = list[int](), prepared(batch)
        with self._writing("writing", wait=batch.wait, to=made):
            if self._sealed.named(self._number, name) is not None:
                raise StoreStale(f"there is a session {name!r} already", advice="take another name")
            made.append(self._create(name, time, SegmentKind.SESSION, user))
            self._transaction.write(made[0], batch, sealed_in(made[0], batch, work))
            found = self._sealed.segment(self._number, made[0])
            assert found is not None
        if self.anchor.file:
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
        if self._staying:
            self._stay(wait=batch.wait)
        work = sealed_in(segment, batch, prepared(batch))
        with self._writing("writing", wait=batch.wait, to=(segment,)):
            unwiped = self._transaction.write(segment, batch, work)
        if self.anchor.file:
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

    def _owns(self, segment: int) -> bool:
        """Whether this is a segment of this tenant."""
        return self._sealed.segment(self._number, segment) is not None

    def events(self, segment: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """The ledger from event `after` + 1 on; only the events of one act, if it is given."""
        # Many a caller needs only the first few.
        for limit in chain((FEW_EVENTS,), repeat(CHUNK)):
            with self._reading("reading"):
                stored = self._segment(segment)
                if stored is None:
                    return
                if act is None:
                    found = list(self._sealed.events(stored, after, limit))
                else:
                    found = list(self._sealed.numbered(stored, self._numbers(segment, after, act, limit)))
            yield from found
            if len(found) < limit:
                return
            after = found[-1].number

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

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """The texts of these digests, verified.

        Raises:
            StoreCorrupt: a text does not match its digest, or is missing.
        """
        wanted = {digest: key_of(digest) for digest in digests}
        with self._lock:
            found: dict[str, str] | None = None
            for left in reversed(range(TRIES)):
                before = self._written_by_others()
                try:
                    with self._reading("reading"):
                        found = dict(self._contents.texts(wanted))
                    break
                except StoreCorrupt:
                    # The object of a cold text is gone if another program has just brought the text back.
                    if not left or self._written_by_others() == before:
                        raise
        assert found is not None
        if len(found) < len(wanted):
            missing = next(digest for digest in wanted if digest not in found)
            raise StoreCorrupt(f"content {missing} is missing", advice="run `kilburn fsck`")
        return found

    def _written_by_others(self) -> int:
        """A number that is another one when another connection has written."""
        with translate_errors(self.path, "reading"):
            return int(self._db.pragma("data_version"))

    def search(self, query: str, *, segments: Collection[int] | None = None, limit: int = 20) -> list[Passage]:
        """Passages that match the query's words, best first; of these segments, or of all. Damaged ones are left out."""
        with self._reading("searching"):
            if segments is None:
                hits = self._index.search(query, self._directory.extents(), limit)
            else:
                extents = self._directory.extents_of(list(segments))
                hits = self._index.search(query, extents, limit, apart=len(extents.segments) > 1)
            spans = self._index.spans([number for number, _ in hits])
            readable = self._whole(number >> 32 for number in spans)
        return [_passage(number, *spans[number], score) for number, score in hits if number in spans and number >> 32 in readable]

    def newest(self, segment: int, wanted: Sequence[tuple[str, str]], limit: int = 20) -> list[list[Passage]]:
        """See `Backend`."""
        with self._reading("searching"):
            if not self._whole([segment]):
                return [[] for _ in wanted]
            found = [self._index.newest(every, some, segment, limit) for every, some in wanted]
            spans = self._index.spans(list({number for numbers in found for number in numbers}))
        # Texts share words, so they share passages.
        known = {number: _passage(number, *of) for number, of in spans.items()}
        return [[known[number] for number in numbers if number in known] for numbers in found]

    def entries(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[Passage]]:
        """The passages of pages, in reading order; a page that is not indexed is left out."""
        found: dict[tuple[int, int], list[Passage]] = {}
        with self._reading("reading"):
            wanted = dict.fromkeys(keys)
            whole = self._whole(segment for segment, _ in wanted)
            for key, number, span in self._index.of_pages(key for key in wanted if key[0] in whole):
                found.setdefault(key, []).append(_passage(number, key[1], span))
        return {key: found[key] for key in wanted if key in found}

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """The passages with these numbers; those that do not exist any more are left out."""
        with self._reading("reading"):
            spans = self._index.spans(list(entries))
            whole = self._whole(number >> 32 for number in spans)
        return {number: _passage(number, *found) for number, found in spans.items() if number >> 32 in whole}

    def _whole(self, segments: Iterable[int]) -> set[int]:
        """Those that are segments of this tenant and not damaged."""
        return {number for number, one in self._directory.numbered(set(segments)).items() if not one.damaged}

    def unembedded(
        self, embedder: str, limit: int, damaged: MutableMapping[int, StoreCorrupt] | None = None
    ) -> list[tuple[int, str]]:
        """At most so many passages that have no vector of this embedder: (entry, text), newest segments first. One whose text is
        not what was written is passed over, and is added to `damaged`."""
        name, wrong = check_name(embedder, "embedder"), damaged if damaged is not None else {}
        with self._reading("reading"):
            # A search asks this every time: after "none waits" nothing is looked at until somebody writes.
            among = self._directory.waits_in(embedder)
            if among is not None and not among:
                return []
            found = sound_passages(
                limit, lambda most: self._vectors.waiting(name, most, among), partial(searchable_of, self._db), wrong
            )
            if not found and not wrong and limit > 0:
                self._directory.nothing_waits(embedder)
        return found

    def keep_vectors(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """Store vectors of passages, by entry, all or none; those of passages that are forgotten by now are not stored.

        Raises:
            StoreError: vectors of different length than this embedder's others. StoreBusy, StoreFull, StoreReadOnly.
            SpecError: no name of an embedder.
        """
        with self._writing("writing", to=()):
            self._vectors.keep(check_name(embedder, "embedder"), rows)

    def vectors(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """The vectors of this embedder in the order in which they were stored, those whose number is greater than `after`.
        A damaged one is never returned; `fsck --repair` drops it, and its passage waits for a vector again."""
        while True:
            with self._reading("reading"):
                found, after = self._vectors.read(embedder, after, CHUNK)
            yield from found
            if not after:
                return

    def embedders(self) -> list[str]:
        """The names of the embedders that vectors are kept of, in the order in which they first came."""
        with self._reading("reading"):
            return self._vectors.names()

    def drop_vectors(self, embedder: str) -> None:
        """Remove all vectors of this embedder.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        with self._writing("writing"):
            self._vectors.drop(embedder)

    def keep_history(self, segment: int, said: Digests, *, page: int) -> bool:
        """See `Backend`."""
        with self._writing("writing", to=()):
            return histories.keep(self._db, self._number, segment, said, page)

    def said_by(self, digest: bytes, limit: int, *, tail: bool = False) -> list[HistoryOwner]:
        """See `Backend`."""
        with self._reading("reading"):
            return histories.said_by(self._db, self._number, digest, limit, tail=tail)

    def unkept(self, root: str, user: str, limit: int) -> list[str]:
        """See `Backend`."""
        with self._reading("reading"):
            return histories.unkept(self._db, self._number, root, user, limit)

    def settings(self) -> dict[str, str]:
        """What is kept for the tenant as a whole, by its name. A damaged one is left out; `fsck` reports it."""
        with self._reading("reading"):
            return self._settings()

    def _settings(self) -> dict[str, str]:
        found = rows(self._db, "SELECT name, value, seal FROM setting WHERE tenant = ? ORDER BY name", self._number)
        return {name: value for name, value, seal in found if seal == seal_of("setting", self._number, name, value)}

    def keep_setting(self, name: str, value: str | None) -> None:
        """See `Backend`."""
        with self._writing("writing", to=()):
            self._keep_setting(name, value)

    def _keep_setting(self, name: str, value: str | None) -> None:
        if value is None:
            self._db.execute("DELETE FROM setting WHERE tenant = ? AND name = ?", (self._number, name))
            return
        insert = (
            "INSERT INTO setting(tenant, name, value, seal) VALUES(?, ?, ?, ?)"
            " ON CONFLICT DO UPDATE SET value = excluded.value, seal = excluded.seal"
        )
        self._db.execute(insert, (self._number, name, value, seal_of("setting", self._number, name, value)))

    def replace_setting(self, name: str, known: str | None, value: str | None) -> bool:
        """See `Backend`."""
        with self._writing("writing", to=()):
            fits = self._settings().get(name) == known
            if fits:
                self._keep_setting(name, value)
            return fits

    def now(self) -> float:
        """See `Backend`: the clock of this machine."""
        return time.time()

    def chill(self, digests: Iterable[str]) -> Moved:
        """See `Backend`."""
        return self._chilling.chill(digests)

    def warm(self, digests: Iterable[str] | None = None) -> Moved:
        """See `Backend`."""
        return self._chilling.warm(digests)

    def cold(self) -> dict[str, int]:
        """See `Backend`."""
        return self._chilling.cold()

    def scrub(self, *, repair: bool = False) -> list[str]:
        """See `Backend`."""
        return self._chilling.scrub(repair=repair)

    def unreached(self) -> tuple[str, ...]:
        """What of erased texts may still be in the cold place, as far as it is known."""
        return self._chilling.unreached()

    def _read_cold(self, do: Callable[[ColdRows], T]) -> T:
        with self._reading("reading"):
            return do(self._cold)

    def _change_cold(self, do: Callable[[ColdRows], T], *, wait: bool = True) -> T:
        with self._writing("writing", wait=wait, to=()):
            return do(self._cold)

    def _leaves_objects(self) -> bool:
        """Whether objects are not to be deleted now."""
        return self.readonly or self._joined or getattr(self._erasing, "inside", False)

    def findings(self) -> list[Finding]:
        """Everything that is wrong with the file, as far as this tenant can see; empty if nothing is."""
        with self._reading("checking"):
            found = inspect(self._db, self._sealed, self._index, self._vectors, self._number)
        try:
            # The texts themselves have been read already.
            wrong = self._chilling.wrong(repair=False, read=False)
            return found + [Finding(kind="cold", what=what, derived=derived) for what, derived in wrong]
        except (KilburnError, apsw.Error) as error:
            return [*found, Finding(kind="cold", what=f"the cold place cannot be checked: {error}")]

    def repair(self) -> list[Finding]:
        """Rebuild derived data (text index, counters), remove unused content, and quarantine records that cannot be
        read.

        An observation that cannot be read is replaced by a note, and its bytes stay in quarantine. Nothing that was
        admitted is deleted.

        Returns:
            What is still wrong: lost content cannot be restored.
        """
        # The bytes of what it removes are still there afterwards.
        with self._removing("repairing"):
            try:
                rebuild(self._db, self._sealed, self._index, self._vectors, self._number)
            except UNREADABLE as error:
                raise StoreCorrupt(f"{self.path} cannot be repaired: {error}", advice="restore it from a copy") from error
        return self.findings()

    def quarantine(self, segment: int) -> str:
        """Quarantine a session that cannot be read, under a new name. Its old name becomes free; nothing is deleted.

        Returns:
            The new name.
        """
        with self._writing("repairing"):
            return quarantine_session(self._db, self._number, segment)

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
                rebuild(self._db, self._sealed, self._index, self._vectors, self._number)
            else:
                erase_segment(self._db, found.whole(), self._number)

    @contextmanager
    def snapshot(self) -> Iterator[None]:
        """See `Backend`. Other threads wait."""
        with self._reading("reading"):
            if self._joined:
                yield
                return
            self._joined = True
            self._db.pragma("query_only", True)
            try:
                yield
            finally:
                self._db.pragma("query_only", False)
                self._joined = False

    @contextmanager
    def together(self, segments: Collection[int] = ()) -> Iterator[None]:
        """See `Backend`. Other threads wait, too, whatever the segments are; not while this one waits for another process."""
        with self._lock:
            if self._joined:
                yield
                return
        try:
            with self.anchor.held(), self._writing("writing"):
                self._joined = True
                try:
                    yield
                finally:
                    self._joined = False
                    # What was read in the meantime may be undone.
                    self._directory.clear()
        finally:
            self._chilling.sweep()
            with self._lock, translate_errors(self.path, "writing"):
                self._wipe(wait=True)

    @contextmanager
    def erasing(self) -> Iterator[None]:
        """See `Backend`. Other threads' commits do not wait for the end of this one's."""
        outer, self._erasing.inside = getattr(self._erasing, "inside", False), True
        try:
            yield
        finally:
            self._erasing.inside = outer
            if not outer:
                self._chilling.sweep()
                with self._lock, translate_errors(self.path, "erasing"):
                    self._wipe(wait=True)

    @contextmanager
    def leaving(self, keys: Iterable[tuple[int, int]]) -> Iterator[None]:
        """See `Backend`."""
        marks = set[citations.Citation]()
        try:
            with self._writing("writing", to=()):
                marks.update(citations.mark_leaving(self._db, self._there(keys)))
            self._staying -= marks
            yield
        finally:
            # Also where an interrupt came just after they were written.
            self._staying |= marks
            self._stay()

    def _stay(self, *, wait: bool = True) -> None:
        """Let new pages cite again what is not being forgotten any more. Where that cannot be written now, or may be undone with
        what is written around it, it waits for the next commit."""
        some = set(self._staying)
        with self._lock:
            if self._joined or not some:
                return
        with suppress(StoreError):
            with self._writing("writing", wait=wait, to=()):
                citations.remove(self._db, some)
            self._staying -= some

    def lasting(self) -> AbstractContextManager[None]:
        """See `Backend`. What is committed waits for `sync` here: threads that come together wait for the disk once."""
        return nullcontext()

    def sync(self, segment: int | None = None) -> None:
        """See `Backend`. Threads that wait for the same disk share what it does."""
        wanted = self._commits
        with self._sync_lock:
            if self._synced >= wanted or not self._lazy:
                return
            upto = self._commits
            try:
                # Without synchronous="FULL" SQLite writes the log and leaves it to the system when it is on the disk.
                log = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CLOEXEC)
                try:
                    SYNC(log)
                finally:
                    os.close(log)
            except OSError as error:
                raise StoreError(f"syncing {self.path}: {error.strerror}", advice="check the disk, then try again") from error
            self._synced = upto

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._staying:
            self._stay()
            self._staying.clear()
        with self._lock, translate_errors(self.path, "closing"):
            try:
                self._wipe(wait=False)
                self._end_log()
            except (apsw.Error, OSError) as error:
                # Nothing is lost: the next forget wipes all of the file.
                log.debug("%s: its log is not emptied: %s", self.path, error)
            finally:
                self._unwiped, self._commits = False, 0
                self._db.close(True)

    def __enter__(self) -> Sqlite:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _is_unwiped(self) -> bool:
        """Whether the file says that erased bytes may still be there."""
        return row(self._db, "SELECT 1 FROM erasure") is not None

    def _wipe(self, *, wait: bool) -> None:
        """Remove erased bytes from the file and its log, if there may be any.

        The erasure itself is committed, and so is the flag that its bytes may still be there. If something goes wrong
        here, it is tried again at the next occasion.
        """
        if not self._unwiped or self._joined or getattr(self._erasing, "inside", False):
            return
        if not wait:
            self._db.set_busy_timeout(0)
        deadline = time.monotonic() + (self._patience if wait else 0.0)
        try:
            while not self._empty_log(erased=True):
                if time.monotonic() >= deadline:
                    return
            self._unwiped = False
        except apsw.BusyError:
            # A reader still needs the log, or another writer is at work.
            return
        except apsw.Error as error:
            log.warning("%s: erased bytes may still lie in it: %s", self.path, error)
        finally:
            self._db.set_busy_timeout(self._milliseconds)

    def _is_as_wiped(self) -> bool:
        """Whether nobody has written to the file itself since all of its pages were wiped."""
        noted = row(self._db, "SELECT modified FROM wiped") if self._is_plain else None
        return noted is not None and os.path.exists(self.path) and os.stat(self.path).st_mtime_ns == noted[0]

    def _note_wiped(self) -> None:
        """Note, in a write transaction with nothing in the log, that every page of the file is wiped."""
        if not self._is_plain:
            return
        # A time of its own: of two writes in a moment, the system may say the same time.
        modified = time.time_ns()
        with suppress(OSError):  # the file of another user, who lets this one write
            os.utime(self.path, ns=(modified, modified))
        self._db.execute("INSERT OR REPLACE INTO wiped VALUES(1, ?)", (modified,))

    def _end_log(self) -> None:
        """Empty the log before the file is closed, so that it is still as it was wiped when it is opened again."""
        if not self._commits or not self._is_as_wiped():
            return
        self._db.set_busy_timeout(0)
        if not self._empty_log():
            return
        version, (noted,) = self._written_by_others(), row(self._db, "SELECT modified FROM wiped") or (0,)
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        with write_transaction(self._db):
            if self._db.pragma("data_version") == version:
                os.utime(self.path, ns=(noted, noted))

    def _empty_log(self, *, erased: bool = False) -> bool:
        """Move all of the write-ahead log into the file, so that it is begun anew, and wipe the pages that were in it; False
        where another writer came between, or a reader needs the log.

        Args:
            erased: whether erased bytes may be in both. Then the log is cut to nothing, and all of the file is wiped where others
                have moved a log into it.
        """
        if self.path == ":memory:":
            if erased:
                self._db.execute("DELETE FROM erasure")
            return True
        # In this order: whoever empties the log meanwhile changes the file's time, or commits.
        version, pages, was_wiped = self._written_by_others(), logged_pages(self._db), self._is_as_wiped()
        if not was_wiped:
            # Or a power cut could bring that time back.
            self._db.execute("DELETE FROM wiped")
        if not erased:
            logged, moved = self._db.wal_checkpoint()
            if moved < logged:
                return False  # a reader needs what was there before
        # A log that is written over is synced faster than one that grows.
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE if erased else apsw.SQLITE_CHECKPOINT_RESTART)
        self._moved = self._log = 0
        if not erased and not was_wiped:
            return True
        if erased:
            # A page that is still in memory would be written again as it was before it was wiped. This forgets the pages of
            # this connection; those that it reads before it wipes, of the schema and of the flag, never had a text. Other
            # connections forget theirs because the flag is removed: they see that somebody has written.
            self._db.release_memory()
        with write_transaction(self._db):
            if self._db.pragma("data_version") != version:
                return False
            damaged = wipe(self._db, pages if was_wiped else None)
            if erased:
                self._db.execute("DELETE FROM erasure")
            if not damaged:
                self._note_wiped()
        if damaged:
            where = ", ".join(map(str, damaged[:10]))
            log.warning("%s: erased bytes may lie in damaged pages: %s; run `kilburn fsck`", self.path, where)
        return True


def _passage(entry: int, page: int, span: Span, score: float = 0.0) -> Passage:
    return Passage(segment=entry >> 32, page=page, span=span, score=score, entry=entry)

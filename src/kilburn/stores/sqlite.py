"""The durable store: one SQLite file for content, ledger, state and text index.

Every write is one transaction with full sync: when `commit` returns, it survives a power cut.
Several processes may read while one writes. One object serves one tenant; no method takes one. It
refuses an SQLite that can lose data and a file that is not its own.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from operator import itemgetter
from types import TracebackType
from urllib.parse import quote

import apsw

from kilburn.errors import StoreCorrupt, StoreError, StoreReadOnly
from kilburn.event import Event
from kilburn.page import Page
from kilburn.store import Batch, Passage, ProcessInfo, State, checked_name
from kilburn.stores.codec import key_of, unpack
from kilburn.stores.faults import typed
from kilburn.stores.inspection import Finding, inspect, rebuild
from kilburn.stores.records import event_of, page_of
from kilburn.stores.schema import check_identity, check_library, create_text, immediate, migrate
from kilburn.stores.statement import row, rows
from kilburn.stores.textindex import TextIndex
from kilburn.stores.transaction import Transaction

__all__ = ["Sqlite"]

CHUNK = 1000
"""Events read at a time, so that no read transaction stays open while a caller thinks."""


class Sqlite:
    """A store in one SQLite file.

    Args:
        path: the file, made where there is none (mode 0600), or ":memory:".
        tenant: the partition that this object serves.
        readonly: refuse every write.
        busy_timeout: seconds to wait for another writer.
        synchronous: "FULL" survives a power cut; "NORMAL" may lose the last commits in one, and
            "OFF" the file; neither loses anything to a killed process.
        vfs: the name of a registered APSW VFS. Such a one has no shared memory, so that the file is
            held by this object alone.

    Raises:
        StoreVersion: SQLite older than 3.51.3, or a file of a newer Kilburn.
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
    ) -> None:
        check_library(apsw.sqlite_lib_version())
        if synchronous not in ("FULL", "NORMAL", "OFF"):
            raise StoreError(f"synchronous {synchronous!r} is none of FULL, NORMAL, OFF")
        self.path = os.fspath(path)
        self.tenant = checked_name(tenant, "tenant")
        self.readonly = readonly
        self._lock = threading.RLock()
        # Set while erased bytes may still lie in the write-ahead log.
        self._unsettled = False
        self._prepare_file(vfs)
        with typed(self.path, "opening"):
            self._db = self._connect(vfs)
        try:
            with typed(self.path, "opening"):
                self._configure(busy_timeout, synchronous, exclusive=vfs is not None)
                self._number = self._register()
                self._index = TextIndex(self._db, self._number)
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
            # Made here and not by SQLite, so that no other user can read it, whatever the umask.
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
        except FileNotFoundError as error:
            raise StoreError(f"there is no folder for {self.path}", advice="make it first") from error
        except OSError as error:
            raise StoreReadOnly(f"creating {self.path}: {error.strerror}", advice="give a path that can be written") from error

    def _connect(self, vfs: str | None) -> apsw.Connection:
        if not self.readonly:
            return apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READWRITE | apsw.SQLITE_OPEN_CREATE, vfs=vfs)
        db = apsw.Connection(self.path, flags=apsw.SQLITE_OPEN_READONLY, vfs=vfs)
        try:
            db.pragma("user_version")
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            db.close(True)
            # A folder where not even the shared memory of readers can be made: with no log beside it
            # the file is complete, and nobody can change it while it is read.
            if os.path.exists(f"{self.path}-wal"):
                raise
            name = f"file:{quote(os.path.abspath(self.path))}?immutable=1"
            db = apsw.Connection(name, flags=apsw.SQLITE_OPEN_READONLY | apsw.SQLITE_OPEN_URI, vfs=vfs)
        except BaseException:
            db.close(True)
            raise
        return db

    def _configure(self, busy_timeout: float, synchronous: str, *, exclusive: bool) -> None:
        db = self._db
        db.set_busy_timeout(round(busy_timeout * 1000))
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
        check_identity(db, self.path)
        self._use_log(busy_timeout)
        db.pragma("synchronous", synchronous)
        db.pragma("secure_delete", True)
        db.pragma("foreign_keys", True)

    def _use_log(self, busy_timeout: float) -> None:
        """Switch a new file to its write-ahead log.

        SQLite does not wait here as it does elsewhere: of two that open a new file at once, one is
        told at once that it is busy.
        """
        deadline = time.monotonic() + busy_timeout
        while True:
            try:
                self._db.pragma("journal_mode", "WAL")
            except apsw.BusyError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.005)
            else:
                return

    def _register(self) -> int:
        """The tenant's number in the file; 0 where it is read only and has none."""
        if self.readonly:
            if check_identity(self._db, self.path) == 0:
                raise StoreCorrupt(f"{self.path} is empty", advice="open it for writing first, or give another path")
        else:
            migrate(self._db, self.path)
        find = "SELECT id FROM tenant WHERE name = ?"
        found = row(self._db, find, self.tenant)
        if found is None and not self.readonly:
            with immediate(self._db):
                found = row(self._db, find, self.tenant)
                if found is None:
                    self._db.execute("INSERT INTO tenant(name) VALUES(?)", (self.tenant,))
                    found = (self._db.last_insert_rowid(),)
                    create_text(self._db, found[0])
        return int(found[0]) if found else 0

    def process(self, name: str, *, time: float, create: bool = True) -> ProcessInfo | None:
        """The process of that name, made at `time` where there is none and `create` is set."""
        with self._lock, typed(self.path, "reading"):
            found = self._infos(name)
            if found or not create:
                return found[0] if found else None
            self._check_writable()
            with immediate(self._db):
                self._db.execute(
                    "INSERT INTO process(tenant, name, created, used) VALUES(?, ?, ?, ?) ON CONFLICT DO NOTHING",
                    (self._number, name, time, time),
                )
            return self._infos(name)[0]

    def processes(self) -> list[ProcessInfo]:
        """All processes of the tenant, oldest first."""
        with self._lock, typed(self.path, "reading"):
            return self._infos(None)

    def _infos(self, name: str | None) -> list[ProcessInfo]:
        select = (
            "SELECT id, name, created, head, pages, tokens, used FROM process"
            " WHERE tenant = ?1 AND (?2 IS NULL OR name = ?2) ORDER BY id"
        )
        return [
            ProcessInfo(number=number, name=name, created=created, head=head, pages=pages, tokens=tokens, used=used)
            for number, name, created, head, pages, tokens, used in rows(self._db, select, self._number, name)
        ]

    def commit(self, process: int, batch: Batch) -> None:
        """Do the whole batch durably, or raise and do nothing.

        Erased bytes are gone from the file when this returns, unless another process is just reading
        an older state: then they go with the next commit or with `close`.

        Raises:
            StoreStale: the process's ledger has moved on. StoreBusy, StoreFull, StoreReadOnly.
            StoreError: a batch that contradicts itself, or an I/O error.
        """
        with self._lock, typed(self.path, "writing"):
            self._check_writable()
            with immediate(self._db):
                Transaction(self._db, self._index, self._number, process).write(batch)
            self._unsettled = self._unsettled or bool(batch.erase)
            self._settle()

    def pages(self, process: int) -> Iterator[tuple[Page, State]]:
        """All pages of a process with their states: p1, p2, ..., then f1, f2, ..."""
        select = (
            "SELECT meta, at, pinned, mark, page.id FROM page JOIN process ON process.id = page.process"
            " WHERE process.id = ? AND tenant = ? ORDER BY page.id"
        )
        with self._lock, typed(self.path, "reading"):
            found = rows(self._db, select, process, self._number)
        originals = bisect_left(found, 0, key=itemgetter(4))
        for meta, at, pinned, mark, _ in (*found[originals:], *found[:originals][::-1]):
            yield page_of(meta), State(at, bool(pinned), mark)

    def events(self, process: int, after: int = 0) -> Iterator[Event]:
        """The ledger from event `after` + 1 on."""
        select = (
            "SELECT number, body FROM event JOIN process ON process.id = event.process"
            " WHERE process.id = ? AND tenant = ? AND number > ? ORDER BY number LIMIT ?"
        )
        while True:
            with self._lock, typed(self.path, "reading"):
                found = rows(self._db, select, process, self._number, after, CHUNK)
            for number, body in found:
                yield event_of(body)
                after = number
            if len(found) < CHUNK:
                return

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """The texts of these digests, verified.

        Raises:
            StoreCorrupt: a text does not match its digest, or is missing.
        """
        found: dict[str, str] = {}
        select = "SELECT size, codec, data FROM content WHERE tenant = ? AND digest = ?"
        with self._lock, typed(self.path, "reading"):
            for digest in dict.fromkeys(digests):
                key = key_of(digest)
                stored = row(self._db, select, self._number, key)
                if stored is None:
                    raise StoreCorrupt(f"content {digest} is missing", advice="run `kilburn fsck`")
                size, codec, data = stored
                found[digest] = unpack(codec, data, size, key)
        return found

    def search(self, query: str, *, process: int | None = None, limit: int = 20) -> list[Passage]:
        """Passages that match the query's words, best first; of one process, or of all."""
        select = "SELECT id, passages, characters FROM process WHERE tenant = ?1 AND (?2 IS NULL OR id = ?2) ORDER BY id"
        with self._lock, typed(self.path, "searching"):
            known = rows(self._db, select, self._number, process)
            extents = [(number, used) for number, used, _ in known if used]
            mean = sum(characters for _, _, characters in known) / max(1, sum(used for _, used in extents))
            hits = self._index.search(query, extents, mean, limit)
            spans = self._index.spans([number for number, _ in hits])
        return [
            Passage(process=number >> 32, page=spans[number][0], span=spans[number][1], score=score)
            for number, score in hits
            if number in spans
        ]

    def findings(self) -> list[Finding]:
        """All that is wrong with the file, as far as this tenant can tell; empty when all is well."""
        with self._lock, typed(self.path, "checking"):
            self._db.execute("BEGIN")
            try:
                return inspect(self._db, self._index, self._number)
            finally:
                self._db.execute("ROLLBACK")

    def repair(self) -> list[Finding]:
        """Rebuild what is derived (text index, counters) and remove what nothing refers to.

        Returns:
            What is still wrong: lost content cannot be made again.
        """
        with self._lock, typed(self.path, "repairing"):
            self._check_writable()
            with immediate(self._db):
                rebuild(self._db, self._index, self._number)
            self._unsettled = True
            self._settle()
            self._db.execute("BEGIN")
            try:
                return inspect(self._db, self._index, self._number)
            finally:
                self._db.execute("ROLLBACK")

    def close(self) -> None:
        """Release the file; idempotent."""
        with self._lock, typed(self.path, "closing"):
            try:
                self._settle()
            finally:
                self._db.close(True)

    def __enter__(self) -> Sqlite:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def _check_writable(self) -> None:
        if self.readonly:
            raise StoreReadOnly(f"{self.path} was opened for reading", advice="open it without readonly")

    def _settle(self) -> None:
        """Move the write-ahead log into the file and cut it to nothing, if it may hold erased bytes."""
        if not self._unsettled:
            return
        try:
            self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE)
        except apsw.BusyError:
            # A reader still needs the log. The erasure itself is committed; its bytes wait for the next write.
            return
        self._unsettled = False

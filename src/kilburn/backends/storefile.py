"""The file of the SQLite store: its connection, its transactions, its write-ahead log, and the removal of erased bytes."""

from __future__ import annotations

import logging
import os
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import quote

import apsw

from kilburn.backends.connection import (
    StoreConnection,
    row,
    savepoint,
    transaction_scope,
    translate_errors,
    write_transaction,
)
from kilburn.backends.directory import Directory
from kilburn.backends.durable import DurableBackend
from kilburn.backends.schema import FLAG, check_library, schema_number
from kilburn.backends.slack import logged_pages, wipe
from kilburn.errors import StoreError, StoreReadOnly

log = logging.getLogger("kilburn")

SYNC: Callable[[int], None] = getattr(os, "fdatasync", os.fsync)

MIN_PAUSE, MAX_PAUSE = 0.0001, 0.005
"""Seconds between two attempts to become the writer, at least and at most; between these, a quarter of the time waited so far.
A commit holds the file for half a millisecond. SQLite's own waiting would keep this object's lock, and so its readers."""

MAX_LOG_GROWTH = 4000
"""Pages by which the write-ahead log grows until its content is moved into the file: 16 MB. Pages that are written again and
again are moved once."""

MOVE_TIMEOUT_MS = 50
"""Milliseconds for which the end of such a move waits until no other process writes, and then until none reads the log."""


class StoreFile(DurableBackend):
    """A store in an SQLite file; see `kilburn.backends.sqlite.Sqlite` for the arguments and errors.

    A subclass reads and writes within `_reading` and `_writing`.
    """

    _directory: Directory

    def __init__(
        self, path: str | os.PathLike[str], *, tenant: str, readonly: bool, busy_timeout: float, synchronous: str, vfs: str | None
    ) -> None:
        super().__init__(tenant, readonly=readonly)
        check_library(apsw.sqlite_lib_version())
        if synchronous not in ("FULL", "NORMAL", "OFF"):
            raise StoreError(f"synchronous {synchronous!r} is none of FULL, NORMAL, OFF", advice="give one of these")
        self.path = os.fspath(path)
        self._lock = threading.RLock()
        self._patience, self._milliseconds = busy_timeout, round(busy_timeout * 1000)
        # Set while the file or its write-ahead log may still contain erased bytes.
        self._unwiped = False
        # Whether several batches are one transaction now; read and set under the lock.
        self._joined = False
        # Commits, and how many of them `sync` has made durable.
        self._commits = self._synced = 0
        self._is_plain = vfs is None and self.path != ":memory:"
        self._lazy = synchronous == "NORMAL" and self._is_plain
        self._sync_lock = threading.Lock()
        # Held by the one thread among those waiting for another process that polls whether that process still writes.
        self._queue = threading.Lock()
        # Pages of the write-ahead log: after the last commit here, and when they were last moved into the file.
        self._log = self._moved = 0
        self._prepare_file(vfs)
        with translate_errors(self.path, "opening"):
            self._db = self._connect(vfs)

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
        # Set before the first statement: a writer that opens or closes the file holds it for a moment.
        db.set_busy_timeout(self._milliseconds)
        if not self.readonly:
            return db
        try:
            self._retry(lambda: db.pragma("user_version"))
        except (apsw.CantOpenError, apsw.ReadOnlyError):
            db.close(True)
            # The folder does not even allow the shared memory of readers. Without a log beside it the file is complete,
            # and nobody can change it while it is read.
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
        # No text of a page may reach a temporary file.
        db.pragma("temp_store", "MEMORY")
        db.pragma("cache_size", -16_000)
        db.pragma("cell_size_check", True)
        if self.readonly:
            return
        if exclusive:
            db.pragma("locking_mode", "EXCLUSIVE")
        schema_number(db, self.path)
        # SQLite does not wait here: of two programs that open a new file at once, one gets "busy" immediately.
        self._retry(lambda: db.pragma("journal_mode", "WAL"))
        db.pragma("synchronous", synchronous)
        db.pragma("secure_delete", True)
        db.pragma("foreign_keys", True)
        db.set_wal_hook(self._note_log)

    def _note_log(self, db: apsw.Connection, name: str, pages: int) -> int:
        # The log may have been restarted.
        self._log, self._moved = pages, min(self._moved, pages)
        return apsw.SQLITE_OK

    def _move_log(self) -> None:
        """Move the content of the write-ahead log into the file. Other writers wait only at the end of the move.

        SQLite's automatic checkpoint runs after each commit that finds a long log, and completes only if nobody writes meanwhile.
        With two writers it moved little after nearly every commit, and waited for the disk twice each time.
        """
        self._moved = self._log
        self._db.set_busy_timeout(MOVE_TIMEOUT_MS)
        try:
            self._empty_log()
        except apsw.Error as error:
            # The commits stay in the log, and are read from there.
            log.debug("%s: its log stays as it is for now: %s", self.path, error)
        finally:
            self._db.set_busy_timeout(self._milliseconds)

    def _retry(self, do: Callable[[], object]) -> None:
        """Repeat an operation for which SQLite itself does not wait, until it succeeds or `busy_timeout` is over."""
        deadline = time.monotonic() + self._patience
        while True:
            try:
                do()
            except (apsw.BusyError, apsw.ProtocolError):
                if time.monotonic() >= deadline:
                    raise
                time.sleep(MAX_PAUSE)
            else:
                return

    @contextmanager
    def _reading(self, doing: str) -> Iterator[None]:
        """Run the statements of the block in one snapshot."""
        with self._lock, translate_errors(self.path, doing):
            if self._joined:
                yield
                return
            with transaction_scope(self._db):
                self._db.execute("BEGIN")
                yield

    @contextmanager
    def _writing(self, doing: str, *, wait: bool = True, to: Collection[int] | None = None) -> Iterator[None]:
        """Run the block as one write transaction, which succeeds as a whole or changes nothing.

        While another process writes, this object's other threads can read.

        Args:
            to: the segments whose rows the block changes, complete at its end; None for any.
        """
        # One waiting thread (`polls`, it holds `_queue`) tries again and again to become the writer; the others wait for
        # `_queue`. The lock is free between two attempts, so readers go on.
        deadline, since, polls = time.monotonic() + (self._patience if wait else 0.0), 0.0, False
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
                        if polls:
                            polls = False
                            self._queue.release()
                        if to is not None:
                            self._directory.begins()
                        yield
                        self._db.execute("COMMIT")
                        self._commits += 1
                        if to is not None:
                            self._directory.wrote(to)
                        if self._log - self._moved >= MAX_LOG_GROWTH:
                            self._move_log()
                        return
                if polls:
                    time.sleep(min(max((time.monotonic() - since) / 4, MIN_PAUSE), MAX_PAUSE))
                else:
                    # Waits briefly: the thread that polls may need the lock that this thread holds.
                    polls, since = self._queue.acquire(timeout=MAX_PAUSE), time.monotonic()
        finally:
            if polls:
                self._queue.release()

    @contextmanager
    def _removing(self, doing: str) -> Iterator[None]:
        """Run the block as one write transaction that removes rows, and wipe their bytes afterwards."""
        with self._writing(doing):
            yield
            self._db.execute(FLAG)
        self._chilling.sweep()
        with self._lock:
            self._unwiped = True
            self._wipe(wait=True)

    def _begin(self, *, last: bool) -> bool:
        """Become the writer. Return False if another process is, unless this is the `last` attempt, which raises."""
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

    def _written_by_others(self) -> int:
        """Return a number that changes when another connection has written."""
        with translate_errors(self.path, "reading"):
            return int(self._db.pragma("data_version"))

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
        """See `Backend`. Other threads wait too, whatever the segments, but not while this thread waits for another process."""
        with self._lock:
            if self._joined:
                yield
                return
        try:
            with self._hold_anchor(), self._writing("writing"):
                self._joined = True
                try:
                    yield
                finally:
                    self._joined = False
                    # The transaction may be undone, and with it what was read in it.
                    self._directory.clear()
        finally:
            self._chilling.sweep()
            with self._lock, translate_errors(self.path, "writing"):
                self._wipe(wait=True)

    def sync(self, segment: int | None = None) -> None:
        """See `Backend`. Threads that wait at the same time share one sync."""
        commits = self._commits
        with self._sync_lock:
            if self._synced >= commits or not self._lazy:
                return
            upto = self._commits
            try:
                # Without synchronous="FULL" SQLite writes the log, and the system decides when it reaches the disk.
                wal = os.open(f"{self.path}-wal", os.O_RDWR | os.O_CLOEXEC)
                try:
                    SYNC(wal)
                finally:
                    os.close(wal)
            except OSError as error:
                raise StoreError(f"syncing {self.path}: {error.strerror}", advice="check the disk, then try again") from error
            self._synced = upto

    def close(self) -> None:
        """Release the file; idempotent."""
        if self._stale_marks:
            self._remove_stale_marks()
            self._stale_marks.clear()
        with self._lock, translate_errors(self.path, "closing"):
            try:
                self._wipe(wait=False)
                self._end_log()
            except (apsw.Error, OSError) as error:
                # Nothing is lost: the next erasure wipes the whole file.
                log.debug("%s: its log is not emptied: %s", self.path, error)
            finally:
                self._unwiped, self._commits = False, 0
                self._db.close(True)

    def _wipe(self, *, wait: bool) -> None:
        """Remove erased bytes from the file and its log, if there may be any.

        The erasure itself is committed, and so is the flag for its bytes. A failure here is retried at the next occasion.
        """
        if not self._unwiped or self._joined or self._is_erasing():
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
            # A reader still needs the log, or another process writes.
            return
        except apsw.Error as error:
            log.warning("%s: erased bytes may still lie in it: %s", self.path, error)
        finally:
            self._db.set_busy_timeout(self._milliseconds)

    def _is_as_wiped(self) -> bool:
        """Whether the file itself is unchanged since all of its pages were wiped."""
        noted = row(self._db, "SELECT modified FROM wiped") if self._is_plain else None
        return noted is not None and os.path.exists(self.path) and os.stat(self.path).st_mtime_ns == noted[0]

    def _note_wiped(self) -> None:
        """Record that every page of the file is wiped, in a write transaction with an empty log."""
        if not self._is_plain:
            return
        # A distinct time: the system may give two writes in quick succession the same one.
        modified = time.time_ns()
        with suppress(OSError):  # a file of another user that this one may write
            os.utime(self.path, ns=(modified, modified))
        self._db.execute("INSERT OR REPLACE INTO wiped VALUES(1, ?)", (modified,))

    def _end_log(self) -> None:
        """Empty the log before the file is closed, so that the next opening finds the file as it was wiped."""
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
        """Move the whole write-ahead log into the file, so that it restarts, and wipe the pages that were in it. Return False if
        another writer interfered, or a reader needs the log.

        If others have moved a log into the file since its pages were last wiped, only an erasure wipes it again; any other call
        leaves it as it is.

        Args:
            erased: whether both may contain erased bytes. Then the log is truncated, and in such a case the whole file is wiped.
        """
        if self.path == ":memory:":
            if erased:
                self._db.execute("DELETE FROM erasure")
            return True
        # The order matters: a process that empties the log meanwhile changes the file's time, or commits.
        version, pages, was_wiped = self._written_by_others(), logged_pages(self._db), self._is_as_wiped()
        if not was_wiped:
            # A power cut must not bring that time back.
            self._db.execute("DELETE FROM wiped")
        if not erased:
            logged, copied = self._db.wal_checkpoint()
            if copied < logged:
                return False  # a reader needs an earlier state
        # A log that is overwritten is synced faster than one that grows.
        self._db.wal_checkpoint(mode=apsw.SQLITE_CHECKPOINT_TRUNCATE if erased else apsw.SQLITE_CHECKPOINT_RESTART)
        self._moved = self._log = 0
        if not erased and not was_wiped:
            return True
        if erased:
            # A page that is cached in memory would be written again unwiped. This drops the cache of this connection. The pages
            # that it reads before it wipes, of the schema and of the flag, never contained text. Other connections drop their
            # caches because removing the flag is a write that they notice.
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

    def _is_joined(self) -> bool:
        with self._lock:
            return self._joined

    def _wipe_erased(self, *, strict: bool) -> None:
        with self._lock, translate_errors(self.path, "erasing"):
            self._wipe(wait=True)

"""What SQLite reports, as Kilburn's typed errors. It refuses to swallow or to retry."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import apsw

from kilburn.errors import StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreReadOnly

__all__ = ["typed"]


@contextmanager
def typed(path: str, doing: str) -> Iterator[None]:
    """Turn SQLite's errors inside the block into `StoreError`s that say what to do."""
    try:
        yield
    except apsw.Error as error:
        raise _translated(error, path, doing) from error


def _translated(error: apsw.Error, path: str, doing: str) -> StoreError:
    where = f"{doing} {path}: {error}"
    if isinstance(error, apsw.BusyError | apsw.LockedError):
        return StoreBusy(where, advice="another process is writing; try again, or give a longer busy_timeout")
    if isinstance(error, apsw.FullError):
        return StoreFull(where, advice="free some space; nothing of this write was kept")
    if isinstance(error, apsw.ReadOnlyError | apsw.PermissionsError | apsw.AuthError):
        return StoreReadOnly(where, advice="the file or its folder cannot be written; check permissions, or open it readonly")
    if isinstance(error, apsw.CantOpenError):
        return StoreReadOnly(where, advice="check that the folder exists and that this user may write there")
    if isinstance(error, apsw.CorruptError | apsw.NotADBError | apsw.FormatError):
        return StoreCorrupt(where, advice="run `kilburn fsck`, or restore the file from a copy")
    if isinstance(error, apsw.ConstraintError):
        return StoreCorrupt(where, advice="the file contradicts itself; run `kilburn fsck --repair`")
    if isinstance(error, apsw.ConnectionClosedError):
        return StoreError(where, advice="the store was closed; open it again")
    return StoreError(where, advice="what was acknowledged before is intact; check the disk, then try again")

"""A failing disk: an APSW VFS for testing a store under I/O errors.

`FaultVFS` passes everything through to the real file system until its n-th operation, which fails in one of several
ways. `lose_power` then undoes what a disk may undo: any part of what was written since the last successful sync of
each file. Shared memory is not supported (APSW cannot do it), so SQLite must hold the file exclusively.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import apsw

FAULTS = ("write", "torn", "full", "sync", "read", "truncate")
"""Kinds of faults: a write that is not done, a torn write, a full disk, a sync, a read, a truncation."""

SECTOR = 512


@dataclass
class _Disk:
    """The bytes of a file at its last sync, and the writes since: (offset, data), or (size, None) for a truncation."""

    synced: bytes = b""
    writes: list[tuple[int, bytes | None]] = field(default_factory=list)


def _written(content: bytes, writes: Iterable[tuple[int, bytes | None]]) -> bytes:
    """Return the bytes of a file after some writes; None for a truncation."""
    image = bytearray(content)
    for offset, data in writes:
        if data is None:
            del image[offset:]
        else:
            image.extend(bytes(max(0, offset + len(data) - len(image))))
            image[offset : offset + len(data)] = data
    return bytes(image)


class FaultVFS(apsw.VFS):
    """A VFS named `name` whose operation number `at` fails, and, if `broken`, all after it.

    Args:
        name: to give as `vfs` when opening.
        seed: of all choices: which fault, how much of a write is torn, what a power cut leaves.
        faults: kinds to choose from.
    """

    def __init__(self, name: str, *, seed: int, faults: tuple[str, ...] = FAULTS, broken: bool = False) -> None:
        self.name = name
        self.at = 0
        """The number of the operation that fails; 0 for none."""
        self.done = 0
        """The number of operations so far that could have failed."""
        self.failed: list[str] = []
        """The faults that happened, such as "torn t.db-wal"."""
        self._broken = broken
        self._faults = faults
        self._random = random.Random(seed)
        self._disks: dict[str, _Disk] = {}
        super().__init__(name, "", maxpathname=1024)

    def xOpen(self, name: str | apsw.URIFilename | None, flags: list[int]) -> apsw.VFSFile:
        """Open a file for SQLite."""
        return _File(self, name, flags)

    def arm(self, operation: int) -> None:
        """Fail the `operation`-th operation from now on."""
        self.at = self.done + operation

    def break_down(self) -> None:
        """Fail every operation from now on."""
        self.arm(1)
        self._broken = True

    def disarm(self) -> None:
        """Stop failing."""
        self.at = 0
        self._broken = False

    def lose_power(self) -> None:
        """Put each file into a state that a power cut could leave: the synced bytes, and any subset of the later writes, the
        last of them possibly torn at a sector. Close the store first."""
        for path, disk in self._disks.items():
            if not os.path.exists(path):
                continue
            survivors = []
            for offset, data in disk.writes:
                fate = self._random.random()
                if 0.4 <= fate < 0.6 and data is not None:
                    data = data[: self._random.randrange(len(data) + 1) // SECTOR * SECTOR]
                if fate >= 0.4:
                    survivors.append((offset, data))
            with open(path, "wb") as file:
                file.write(_written(disk.synced, survivors))
        self._disks.clear()

    def fault(self, path: str, *kinds: str) -> str | None:
        """Count an operation that may fail in these ways. Return the fault to inject, or None."""
        self.done += 1
        possible = [kind for kind in kinds if kind in self._faults]
        due = self.at and (self.done == self.at or (self._broken and self.done > self.at))
        if not due:
            return None
        if not possible:
            # This operation cannot fail in the requested way; the next one may.
            self.at += 1
            return None
        kind = self._random.choice(possible)
        self.failed.append(f"{kind} {os.path.basename(path)}")
        return kind

    def disk(self, path: str) -> _Disk:
        """Return the durable state of a file."""
        if path not in self._disks:
            content = b""
            if os.path.exists(path):
                with open(path, "rb") as file:
                    content = file.read()
            self._disks[path] = _Disk(content)
        return self._disks[path]

    def part(self, length: int) -> int:
        """Return how many bytes of a torn write reach the file."""
        return self._random.randrange(length) if length else 0


class _File(apsw.VFSFile):
    def __init__(self, vfs: FaultVFS, name: str | apsw.URIFilename | None, flags: list[int]) -> None:
        self._vfs = vfs
        self._path = name.filename() if isinstance(name, apsw.URIFilename) else name or ""
        self._disk = vfs.disk(self._path) if self._path else _Disk()
        super().__init__("", name, flags)

    def xRead(self, amount: int, offset: int) -> bytes:
        if self._vfs.fault(self._path, "read"):
            raise apsw.IOError("injected: read")
        return super().xRead(amount, offset)

    def xWrite(self, data: bytes, offset: int) -> None:
        kind = self._vfs.fault(self._path, "write", "torn", "full")
        persisted = bytes(data)
        if kind == "torn":
            persisted = persisted[: self._vfs.part(len(persisted))]
        if kind in (None, "torn") and persisted:
            super().xWrite(persisted, offset)
            self._disk.writes.append((offset, persisted))
        if kind == "full":
            raise apsw.FullError("injected: full")
        if kind:
            raise apsw.IOError(f"injected: {kind}")

    def xTruncate(self, size: int) -> None:
        if self._vfs.fault(self._path, "truncate"):
            raise apsw.IOError("injected: truncate")
        super().xTruncate(size)
        self._disk.writes.append((size, None))

    def xSync(self, flags: int) -> None:
        if self._vfs.fault(self._path, "sync"):
            raise apsw.IOError("injected: sync")
        # The disk's own sync is left out: what survives a power cut is decided here.
        self._disk.synced = _written(self._disk.synced, self._disk.writes)
        self._disk.writes.clear()

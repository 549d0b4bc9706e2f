"""A folder of spilled keys and values: its size, and which files are deleted when it is full.

If there is a limit, the least recently read or written files are deleted first, but never one that is pinned, by this
session or another.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from kilburn.errors import SpillFailed
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.spill_file import (
    SUFFIX,
    Contents,
    Draft,
    Header,
    Miss,
    SequenceHeader,
    header_of,
    read,
    remove_leftovers,
    size_of,
    write,
)


class Shelf:
    """Files by address, in one folder. Several processes may share it.

    Args:
        folder: created if it is missing, readable by this user only.
        limit_bytes: of all its files together, or None for no limit. If several processes share a folder, each
            enforces its own limit.

    Raises:
        SpillFailed: the folder cannot be created.
    """

    def __init__(self, folder: str | Path, limit_bytes: int | None = None) -> None:
        self.folder, self.limit = Path(folder), limit_bytes
        # Address -> how often it was pinned, and the descriptor with the lock that shows this to other processes.
        self._pins: dict[str, tuple[int, int]] = {}
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            remove_leftovers(self.folder)
        except OSError as error:
            raise SpillFailed(f"{self.folder} cannot be spilled to: {error}", advice="name another folder") from error

    def __enter__(self) -> Shelf:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __contains__(self, address: object) -> bool:
        return isinstance(address, str) and self._path(address).exists()

    @property
    def used(self) -> int:
        """Bytes of all its files."""
        return sum(size for _, size, _ in self._files())

    def put(self, header: Header, drafts: Sequence[Draft], *, pin: bool = False) -> tuple[str, int]:
        """Write a file; returns its address and its bytes.

        Raises:
            SpillFailed: the limit or the disk does not allow it; nothing of it is left.
        """
        if self.limit is not None:
            try:
                self._make_space(size_of(header, drafts), self.limit)
            except OSError as error:
                raise SpillFailed(f"no space could be made in {self.folder}: {error}", advice="look who owns it") from error
        address, size = write(self.folder, header, drafts)
        if pin:
            self.pin(address)
        return address, size

    def get(self, address: str, key: PrefixKey) -> Contents | Miss:
        """The content of a file, every byte checked."""
        found = read(self.folder, address, key)
        if not isinstance(found, Miss):
            # The file was removed in the meantime, or the folder is read-only; the time of last use does not matter
            # then.
            with suppress(OSError):
                os.utime(self._path(address))
        return found

    def pin(self, address: str) -> None:
        """Keep a file until it was unpinned as often as pinned, or the shelf is closed.

        Raises:
            SpillFailed: there is no such file any more.
        """
        count, descriptor = self._pins.get(address, (0, -1))
        try:
            # The file may have been replaced since it was pinned; the lock has to be on the current one.
            fresh = os.open(self._path(address), os.O_RDONLY)
            fcntl.flock(fresh, fcntl.LOCK_SH)
        except OSError as error:
            raise SpillFailed(f"{address} cannot be pinned: {error}", advice="save it again") from error
        if count:
            os.close(descriptor)
        self._pins[address] = (count + 1, fresh)

    def unpin(self, address: str) -> int:
        """Release one pin; returns how many are left."""
        count, descriptor = self._pins.pop(address, (0, -1))
        if count > 1:
            self._pins[address] = (count - 1, descriptor)
        elif count:
            os.close(descriptor)
        return max(0, count - 1)

    def drop(self, address: str) -> bool:
        """Remove a file, pinned or not; returns whether it was there."""
        count, descriptor = self._pins.pop(address, (0, -1))
        if count:
            os.close(descriptor)
        try:
            self._path(address).unlink()
        except FileNotFoundError:
            return False
        return True

    def forget(self, owner: str, pages: Collection[int]) -> list[str]:
        """Remove all files of an owner that contain one of these pages, or were computed while one was visible, pinned
        or not.

        Files whose header cannot be read are removed too. Returns the addresses.

        Raises:
            SpillFailed: some could not be removed; the others are.
        """
        gone, failures = [], []
        for _, _, path in list(self._files()):
            found = header_of(path)
            if not isinstance(found, Miss):
                held = {*found.stood, *(found.pages if isinstance(found, SequenceHeader) else (found.page,))}
                if owner not in found.owners or held.isdisjoint(pages):
                    continue
            address = path.name.removesuffix(SUFFIX)
            try:
                if self.drop(address):
                    gone.append(address)
            except OSError as error:
                failures.append(f"{path}: {error}")
        if failures:
            raise SpillFailed(f"forgotten pages are still in {'; '.join(failures)}", advice="remove these files")
        return gone

    def close(self) -> None:
        """Release all pins. The files stay."""
        for _, descriptor in self._pins.values():
            os.close(descriptor)
        self._pins.clear()

    def _path(self, address: str) -> Path:
        return self.folder / (Path(address).name + SUFFIX)

    def _files(self) -> Iterable[tuple[int, int, Path]]:
        """(time of last use, bytes, path) of each file."""
        for path in self.folder.glob("*" + SUFFIX):
            # Another process may drop it between the two calls.
            with suppress(FileNotFoundError):
                found = path.stat()
                yield found.st_mtime_ns, found.st_size, path

    def _make_space(self, size: int, limit: int) -> None:
        files = sorted(self._files())
        over = sum(held for _, held, _ in files) + size - limit
        going = []
        for _, held, path in files:
            if over <= 0:
                break
            if not _is_pinned(path):
                going.append(path)
                over -= held
        if over > 0:
            raise SpillFailed(
                f"{size} bytes do not fit beside what is pinned: {self.folder} may hold {limit}",
                advice="raise limit_bytes, or resume or unpin something first",
            )
        for path in going:
            path.unlink(missing_ok=True)


def _is_pinned(path: Path) -> bool:
    """Whether any process has pinned it, including this one."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except FileNotFoundError:
        return False
    return False

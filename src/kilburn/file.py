"""Writes a file that a user named: whole or not at all, and never over something else by mistake.

The bytes go to a new file in the same folder, which only its owner can read. It has no name until all bytes are on the
disk: so nothing is left of it when the program is killed. Where the system has no such files, or one must be replaced, it
has an unpredictable name for a while; what a killed program left so is removed by the next one that writes to the folder.
No link is followed, and no file that someone else put there is written to. A database is never replaced, not even with
`force`.
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import stat
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kilburn.errors import SpecError

DATABASE = (
    b"SQLite format 3\0",
    b"\x37\x7f\x06\x82",
    b"\x37\x7f\x06\x83",
    b"\xd9\xd5\x05\xf9\x20\xa1\x63\xd7",
    struct.pack("=I", 3_007_000),
)
"""The first bytes of a database, and of its companion files: write-ahead logs (both byte orders), journal, shared
memory."""

COMPANIONS = ("-wal", "-shm", "-journal")

PART_NAME = re.compile(r"\.kilburn-[0-9a-f]+\.part")
"""The name of a file that is not complete yet."""


def check_target(path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Raise what `write_file` would raise, before the work is done.

    Raises:
        SpecError: the path is a database or a companion file of one; a folder, a device or a pipe; or an existing
            file, unless `force` is set.
    """
    place = Path(path)
    owner = next((Path(str(place).removesuffix(end)) for end in COMPANIONS if place.name.endswith(end)), place)
    if _begins_as_database(place) or _begins_as_database(owner):
        raise SpecError(f"{place} is a database, or belongs to one", advice="give a file of another name")
    if not os.path.lexists(place):
        return
    if _leads_to_device(place):
        raise SpecError(f"{place} leads to a device or a process", advice="give a file, or write to standard output")
    if place.exists() and not stat.S_ISREG(place.stat().st_mode):
        raise SpecError(f"{place} is no file", advice="give the name of a file; pipes and devices take standard output")
    if not force:
        raise SpecError(f"{place} exists", advice="give another name, or --force to replace it")


def _leads_to_device(place: Path) -> bool:
    """Whether a path, or a link on its way, lies in /dev or /proc: replacing `/dev/stdout` would harm the whole machine."""
    for _ in range(40):
        folder = place.parent.resolve()
        if folder.parts[:2] in (("/", "dev"), ("/", "proc")) and folder.parts[:3] != ("/", "dev", "shm"):
            return True
        if not place.is_symlink():
            return False
        place = folder / os.readlink(place)
    return True


def _begins_as_database(path: Path) -> bool:
    """Whether a file, also behind links, begins like a database or a companion file; False if it cannot be read."""
    try:
        # Checked first, because opening a pipe would wait for its other end.
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(16).startswith(DATABASE)
    except OSError:
        return False


@contextmanager
def write_file(path: str | os.PathLike[str], *, force: bool = False, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A new file to write to. It is renamed to `path` when the block ends, and removed if the block raises.

    Args:
        force: replace an existing file. If `path` is a link, the link is replaced, not its target.
        mode: who may read it; its owner only.

    Raises:
        SpecError: see `check_target`. OSError: it cannot be written; what was there before is untouched.
    """
    place = Path(path)
    check_target(place, force=force)
    remove_parts(place.parent)
    try:
        descriptor, name = _new_file(place.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
            if name is None and force:
                # Only what has a name can be put in the place of another file.
                name = _part(place.parent)
                _link(descriptor, Path(name))
            if name is None:
                _give_name(lambda: _link(descriptor, place), place)
            else:
                _rename(name, place, force)
        sync_folder(place.parent)
    finally:
        if name is not None:
            with suppress(FileNotFoundError):
                os.unlink(name)


def _new_file(folder: Path) -> tuple[int, str | None]:
    """A new file in a folder, and its name; None if it has none. It is locked as long as it is written to."""
    if hasattr(os, "O_TMPFILE") and os.path.isdir("/proc/self/fd"):
        try:
            descriptor = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            raise
        except OSError:
            pass  # a file system without files that have no name
        else:
            _lock(descriptor)
            return descriptor, None
    while True:
        name = _part(folder)
        descriptor = os.open(name, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        _lock(descriptor)
        if os.fstat(descriptor).st_nlink:
            return descriptor, name
        os.close(descriptor)  # another program took it for one that was left, before it was locked


def _part(folder: Path) -> str:
    return str(folder / f".kilburn-{secrets.token_hex(8)}.part")


def _lock(descriptor: int) -> None:
    with suppress(OSError):  # a file system without locks; there nothing is removed either
        fcntl.flock(descriptor, fcntl.LOCK_EX)


def remove_parts(folder: Path) -> None:
    """Remove what programs that are gone have left of files. What cannot be removed stays."""
    try:
        names = [entry.path for entry in os.scandir(folder) if PART_NAME.fullmatch(entry.name)]
    except OSError:
        return
    for name in names:
        with suppress(OSError):
            descriptor = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                if stat.S_ISREG(os.fstat(descriptor).st_mode):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    os.unlink(name)
            finally:
                os.close(descriptor)


def _link(descriptor: int, place: Path) -> None:
    """Give a file without a name one. This fails if there is another of that name."""
    folder = os.open(place.parent, os.O_RDONLY | os.O_CLOEXEC)
    try:
        # With a folder's descriptor the call follows the link that stands for our own descriptor.
        os.link(f"/proc/self/fd/{descriptor}", place.name, src_dir_fd=folder, dst_dir_fd=folder, follow_symlinks=True)
    finally:
        os.close(folder)


def _give_name(link: Callable[[], None], place: Path) -> None:
    try:
        # Unlike a rename, this fails if someone else created the file in the meantime.
        link()
    except FileExistsError:
        check_target(place)
        raise


def _rename(part: str, place: Path, force: bool) -> None:
    if force:
        os.replace(part, place)
        return
    try:
        _give_name(lambda: os.link(part, place), place)
    except (FileExistsError, SpecError):
        raise
    except OSError:  # a file system without hard links
        check_target(place)
        os.replace(part, place)


def sync_folder(folder: Path) -> None:
    """Sync a folder, so that a rename in it survives a power cut.

    Raises:
        OSError: it cannot be opened or synced.
    """
    entry = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(entry)
    finally:
        os.close(entry)

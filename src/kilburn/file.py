"""Writes a file that a user named: whole or not at all, and never over something else by mistake.

The bytes go to a new file in the same folder. It has an unpredictable name, and only its owner can read it. When all
bytes are on the disk, it is renamed. So no link is followed, and no file that someone else put there is written to. A
database is never replaced, not even with `force`.
"""

from __future__ import annotations

import os
import stat
import struct
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from kilburn.errors import SpecError

__all__ = ["check_target", "sync_folder", "write_file"]

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
    try:
        descriptor, name = tempfile.mkstemp(prefix=".", suffix=".part", dir=place.parent)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(place)) from error
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fchmod(descriptor, mode)
            os.fsync(descriptor)
        _give_name(name, place, force)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(name)


def _give_name(part: str, place: Path, force: bool) -> None:
    if force:
        os.replace(part, place)
    else:
        try:
            # Unlike a rename, this fails if someone else created the file in the meantime.
            os.link(part, place)
        except FileExistsError:
            check_target(place)
            raise
        except OSError:  # a file system without hard links
            check_target(place)
            os.replace(part, place)
    sync_folder(place.parent)


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

"""Reads the texts among the files of a folder. Content decides whether a file is a text, not its name.

Other files are skipped with a reason. No link inside a folder is followed: files are opened relative to the descriptor of their
folder, so that a link that is put there in the meantime is not followed either.
"""

from __future__ import annotations

import codecs
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import msgspec

from kilburn.errors import SpecError

MAX_FILE_BYTES = 4_000_000
"""Bytes of a file at most; a larger one is a table or a log, not a document."""


HIDDEN = "hidden"
"""The reason why a file whose name begins with a dot is skipped."""


class File(msgspec.Struct, frozen=True):
    """A file: its path relative to the requested folder (its name if the file itself was requested), and its text, or the reason
    why it was skipped. `marked` says whether it began with a byte order mark, which is not part of the text."""

    path: str
    text: str = ""
    skipped: str = ""
    marked: bool = False


def read_texts(path: str | os.PathLike[str], largest: int = MAX_FILE_BYTES) -> Iterator[File]:
    """Yield the file of a path, or all files of a folder and the folders in it, in the order of their names.

    Args:
        path: may itself be a link; links inside the folder are skipped, and so are hidden files.
        largest: bytes of a file at most.

    Raises:
        SpecError: there is no such file or folder.
    """
    place = Path(path)
    try:
        kind = place.stat().st_mode
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise SpecError(f"{str(place)[:200]!r}: {why}", advice="give the path of a file or folder that can be read") from error
    if stat.S_ISDIR(kind):
        yield from _folder(place.resolve(), largest)
    elif stat.S_ISREG(kind):
        yield _file(place.name, os.fspath(place), None, largest, follow=True)
    else:
        raise SpecError(f"{str(place)[:200]!r} is neither a file nor a folder", advice="give one of the two")


def _folder(place: Path, largest: int) -> Iterator[File]:
    unread: list[File] = []

    def note(error: OSError) -> None:
        unread.append(File(os.path.relpath(str(error.filename), place), skipped=error.strerror or "cannot be read"))

    for folder, inner, names, descriptor in os.fwalk(place, onerror=note):
        beside = os.path.relpath(folder, place)
        yield from (File(item.path, skipped=item.skipped) for item in unread)
        unread.clear()
        for name in sorted(inner):
            if name.startswith("."):
                yield File(os.path.normpath(os.path.join(beside, name)), skipped=HIDDEN)
            elif stat.S_ISLNK(os.stat(name, dir_fd=descriptor, follow_symlinks=False).st_mode):
                yield File(os.path.normpath(os.path.join(beside, name)), skipped="a link")
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        for name in sorted(names):
            path = os.path.normpath(os.path.join(beside, name))
            if name.startswith("."):
                yield File(path, skipped=HIDDEN)
            else:
                yield _file(path, name, descriptor, largest, follow=False)
    yield from unread


def _file(path: str, name: str, folder: int | None, largest: int, *, follow: bool) -> File:
    """Read one file; `name` is relative to the descriptor `folder`."""
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (0 if follow else os.O_NOFOLLOW)
    try:
        if not follow and stat.S_ISLNK(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            return File(path, skipped="a link")
        with open(os.open(name, flags, dir_fd=folder), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return File(path, skipped="no file: a device, a pipe or a socket")
            data = file.read(largest + 1)
    except OSError as error:
        return File(path, skipped=error.strerror or "cannot be read")
    if len(data) > largest:
        return File(path, skipped=f"more than {largest:,} bytes")
    return _text(path, data)


def _text(path: str, data: bytes) -> File:
    """Decode bytes as a text: UTF-8, or UTF-16 with a byte order mark."""
    coding = "utf-16" if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) else "utf-8-sig"
    if coding == "utf-8-sig" and b"\0" in data:
        return File(path, skipped="binary")
    try:
        text = data.decode(coding)
    except UnicodeDecodeError:
        return File(path, skipped="no text in UTF-8")
    if not text.strip():
        return File(path, skipped="empty")
    marked = coding == "utf-16" or data.startswith(codecs.BOM_UTF8)
    return File(path, text, marked=marked) if "\0" not in text else File(path, skipped="binary")

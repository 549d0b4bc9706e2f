"""The bytes of an SQLite file that belong to no row, and how they are overwritten.

`secure_delete` overwrites a row where it is deleted. But a row has been elsewhere before: when SQLite moves rows between the
pages of a table, or to another place in a page, it leaves their bytes where they were, in the *slack* of a page. They stay
there when the row itself is deleted. SQLite has no means to clean them: not even VACUUM leaves none.

So the pages are read and their slack is overwritten through SQLite's own open file. A second one would end SQLite's locks
when it is closed, because POSIX locks belong to the process.

A page gets slack only when it is written, and all writes go through the write-ahead log. So whoever moves the log into the file
wipes the pages that were in it. The time of the file's last modification is noted in it then. While it has that time, nobody has
moved anything since, and all pages that are not in the log are clean.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Collection, Iterable

import apsw

from kilburn.page import stretches

CHUNK = 256
"""Pages read at a time."""

HEADERS = {2: 12, 5: 12, 10: 8, 13: 8}
"""Header bytes of a tree page by its first byte: index, table, and the leaves of both. Any other page starts with the number of
a page, and thus with a smaller byte."""

LOG_HEADER, FRAME_HEADER = 32, 24
"""Bytes before the frames of a write-ahead log, and before the page of a frame."""

SYNC_NORMAL = 2

_head = struct.Struct(">xHHHB").unpack_from
_pair = struct.Struct(">HH").unpack_from

_Transfer = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int, ctypes.c_int64)
_Sync = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_int)
_Size = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int64))


class _Methods(ctypes.Structure):
    """The used part of `sqlite3_io_methods`."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("close", ctypes.c_void_p),
        ("read", _Transfer),
        ("write", _Transfer),
        ("truncate", ctypes.c_void_p),
        ("sync", _Sync),
        ("size", _Size),
    )


class _File:
    """A file that SQLite has open: `sqlite3_file`. The caller holds the connection's lock."""

    def __init__(self, db: apsw.Connection, opcode: int) -> None:
        self._file = ctypes.c_void_p()
        db.file_control("main", opcode, ctypes.addressof(self._file))
        self._methods = ctypes.cast(self._file, ctypes.POINTER(ctypes.POINTER(_Methods)))[0][0]

    def size(self) -> int:
        size = ctypes.c_int64()
        self._do("size", ctypes.byref(size))
        return size.value

    def read(self, length: int, at: int) -> bytes:
        data = ctypes.create_string_buffer(length)
        self._do("read", data, length, at)
        return data.raw

    def clear(self, length: int, at: int) -> None:
        self._do("write", bytes(length), length, at)

    def sync(self) -> None:
        self._do("sync", SYNC_NORMAL)

    def _do(self, verb: str, *arguments: object) -> None:
        try:
            code = getattr(self._methods, verb)(self._file, *arguments)
        except SystemError as error:
            # A VFS in Python has raised an error instead of returning a code.
            if error.__cause__ is None:
                raise
            raise error.__cause__ from None
        if code != apsw.SQLITE_OK:
            raise apsw.exception_for(code)


def logged_pages(db: apsw.Connection) -> set[int]:
    """Return the numbers of the pages in the write-ahead log; only some of them if another program empties it meanwhile."""
    pages = set[int]()
    file = _File(db, apsw.SQLITE_FCNTL_JOURNAL_POINTER)
    size = file.size()
    if size < LOG_HEADER:
        return pages
    try:
        header = file.read(LOG_HEADER, 0)
        salts, frame = header[16:24], FRAME_HEADER + int.from_bytes(header[8:12])
        for start in range(LOG_HEADER, size - frame + 1, CHUNK * frame):
            chunk = file.read(min(CHUNK, (size - start) // frame) * frame, start)
            for at in range(0, len(chunk), frame):
                if chunk[at + 8 : at + 16] != salts:
                    return pages  # frames of an earlier log: it was restarted
                pages.add(int.from_bytes(chunk[at : at + 4]))
    except apsw.IOError as error:
        if getattr(error, "extendedresult", None) != apsw.SQLITE_IOERR_SHORT_READ:  # a VFS in Python gives none
            raise
    return pages


def wipe(db: apsw.Connection, only: Collection[int] | None = None) -> list[int]:
    """Overwrite the slack of every page, or of `only` these pages, with zeros, durably.

    Only unused bytes are written, so that it may be interrupted anywhere and readers may read meanwhile. The caller is in a
    write transaction with an empty log: so every page is in the file, and nobody else can write. Pages that SQLite has cached
    still have their slack. So the caller has emptied its own cache, and commits something afterwards, which makes other
    connections empty theirs.

    Returns:
        The numbers of damaged pages, which are left unchanged.

    Raises:
        apsw.Error: the disk fails.
    """
    file = _File(db, apsw.SQLITE_FCNTL_FILE_POINTER)
    size = file.size()
    header = file.read(100, 0)
    length = int.from_bytes(header[16:18])
    length = 65536 if length == 1 else length
    pages, usable = size // length, length - header[20]
    zeros = bytes(length)
    damaged, is_changed = list[int](), False
    runs = [1, pages] if only is None else stretches(sorted(page for page in only if page <= pages))
    chunks = (
        (first, min(CHUNK, last + 1 - first))
        for start, last in zip(runs[::2], runs[1::2], strict=True)
        for first in range(start, last + 1, CHUNK)
    )
    for first, count in chunks:
        chunk = file.read(count * length, (first - 1) * length)
        for at in range(0, len(chunk), length):
            number = first + at // length
            head = at if number > 1 else 100
            if chunk[head] not in HEADERS:
                continue
            try:
                clean = _is_clean(chunk, at, head, zeros)
                spans = [] if clean else _slack(chunk[at : at + usable], head - at, pages)
            except (ValueError, IndexError, struct.error):
                damaged.append(number)
                continue
            for start, stop in spans:
                if chunk[at + start : at + stop] != zeros[: stop - start]:
                    file.clear(stop - start, (number - 1) * length + start)
                    is_changed = True
    if is_changed:
        file.sync()
    return damaged


def _is_clean(chunk: bytes, at: int, head: int, zeros: bytes) -> bool:
    """Whether the gap before a page's rows and its free blocks are empty."""
    free, cells, content, _ = _head(chunk, head)
    start, stop = head + HEADERS[chunk[head]] + 2 * cells, at + (content or 65536)
    if stop < start or chunk[start:stop] != zeros[: stop - start]:
        return False
    while free:
        next_free, size = _pair(chunk, at + free)
        if 0 < next_free <= free or size < 4 or chunk[at + free + 4 : at + free + size] != zeros[: size - 4]:
            return False
        free = next_free
    return True


def _slack(page: bytes, head: int, pages: int) -> list[tuple[int, int]]:
    """Return the stretches of a tree page that belong to no row.

    Raises:
        ValueError, IndexError, struct.error: the page contradicts itself, or may not be a tree page.
    """
    # In a file of more than 128 GiB the number of a page may begin as these pages do.
    if head == 0 and int.from_bytes(page[:4]) <= pages:
        raise ValueError("perhaps the number of a page")
    kind = page[head]
    free, cells, content, fragments = _head(page, head)
    pointers = head + HEADERS[kind]
    cells_used = _cells(page, kind, struct.unpack_from(f">{cells}H", page, pointers))
    slack: list[tuple[int, int]] = []
    while free:
        next_free, size = _pair(page, free)
        if 0 < next_free <= free or size < 4:
            raise ValueError("an impossible free block")
        cells_used.append((free, free + size))
        slack.append((free + 4, free + size))
        free = next_free
    last = content or 65536
    if last < pointers + 2 * cells:
        raise ValueError("rows in the header")
    slack.append((pointers + 2 * cells, last))
    for start, stop in sorted(cells_used):
        if start < last or stop > len(page):
            raise ValueError("rows that overlap")
        fragments -= start - last
        slack.append((last, start))
        last = stop
    if fragments != len(page) - last:
        raise ValueError("unaccounted bytes")
    slack.append((last, len(page)))
    return slack


def _cells(page: bytes, kind: int, starts: Iterable[int]) -> list[tuple[int, int]]:
    """Return start and end of the cells with these starts, without their overflow on other pages."""
    usable = len(page)
    # Longer payloads overflow to other pages; a row of a table may be longer than one of an index.
    max_local, min_local = (usable - 12) * 64 // 255 - 23, (usable - 12) * 32 // 255 - 23
    if kind == 13:
        max_local = usable - 35
    spans: list[tuple[int, int]] = []
    for start in starts:
        at = start + 4 if kind in (2, 5) else start
        # Most numbers have one byte and need no call: there are many cells.
        size, at = (page[at], at + 1) if page[at] < 0x80 else varint(page, at)
        if kind == 5:
            spans.append((start, at))
            continue
        if kind == 13:
            at = at + 1 if page[at] < 0x80 else varint(page, at)[1]
        if size > max_local:
            size = min_local + (size - min_local) % (usable - 4)
            size = (size if size <= max_local else min_local) + 4
        spans.append((start, max(start + 4, at + size)))
    return spans


def varint(page: bytes, at: int) -> tuple[int, int]:
    """Return a number of variable length, and where it ends.

    Raises:
        IndexError: the bytes end before it.
    """
    value = 0
    for end in range(at + 1, at + 9):
        value = value << 7 | page[end - 1] & 0x7F
        if page[end - 1] < 0x80:
            return value, end
    return value << 8 | page[at + 8], at + 9

"""What a message's bytes say, in digests: a client that moves its marks sends most messages as they were, and reading one takes
much longer than looking for it here. It is a cache: what is not here is read again.

There may be very many messages, so they are rows of one table that never grows, for all tenants together: what a message says
follows from its bytes, whoever sends it.
"""

from __future__ import annotations

import hashlib
import struct
import threading

ROWS = 1 << 17
"""Digests that are kept in memory, 33 bytes each."""

WIDTH = 17
"""Bytes of a digest of what is said: whether the assistant says it comes first, as 1 or 0."""

MAX_DIGESTS = 64
"""Digests of one message at most: one that says more has the table for itself, and is read again."""

_PAIR = struct.Struct(f"16s{WIDTH}s16s{WIDTH}s")
"""A message has two places. A new one takes the first, and who stood there the second."""

_MORE, _NOTHING = 0x40, 0x10
"""In place of 1 or 0: a further row says more; the message says nothing."""

_SILENT = bytes((_NOTHING,)).ljust(WIDTH, b"\0")


def message_key(form: bytes, raw: bytes) -> bytes:
    """Return the digest of a message's bytes in the wire form of this name."""
    return hashlib.blake2b(raw, digest_size=16, person=form).digest()


class Sayings:
    """A table from digests of messages' bytes to digests of their content. Safe to use from several threads.

    Args:
        rows: digests that are kept, an even number.
    """

    def __init__(self, rows: int = ROWS) -> None:
        self._pairs = rows // 2
        self._lock = threading.Lock()
        self._table = bytearray(self._pairs * _PAIR.size)

    @property
    def size(self) -> int:
        """Bytes of the table, which never change."""
        return len(self._table)

    def get(self, key: bytes) -> bytes | None:
        """Return the digests of a message's content, `WIDTH` bytes each; None if they are not in the table."""
        prefix = b""
        while True:
            first, row, second, second_row = _PAIR.unpack_from(self._table, hash(key) % self._pairs * _PAIR.size)
            if first != key:
                if second != key:
                    return None
                row = second_row
            if row[0] < 2:
                return prefix + row if prefix else row  # type: ignore[no-any-return]
            if row[0] == _NOTHING:
                return b""
            prefix += bytes((row[0] ^ _MORE,)) + row[1:]
            key = _next(key)

    def keep(self, key: bytes, row: bytes) -> None:
        """Store the digests of a message's content."""
        if len(row) > MAX_DIGESTS * WIDTH:
            return
        for at in range(0, len(row), WIDTH):
            ends = at + WIDTH == len(row)
            self._put(key, row[at : at + WIDTH] if ends else bytes((row[at] | _MORE,)) + row[at + 1 : at + WIDTH])
            key = key if ends else _next(key)
        if not row:
            self._put(key, _SILENT)

    def _put(self, key: bytes, row: bytes) -> None:
        at = hash(key) % self._pairs * _PAIR.size
        with self._lock:
            first, first_row, second, second_row = _PAIR.unpack_from(self._table, at)
            if first != key:
                second, second_row = first, first_row
            _PAIR.pack_into(self._table, at, key, row, second, second_row)


def _next(key: bytes) -> bytes:
    """Return the key of a row with further digests."""
    return hashlib.blake2b(key, digest_size=16).digest()

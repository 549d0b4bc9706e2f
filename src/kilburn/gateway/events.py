"""Server-sent events as bytes: taken apart as they come, whatever pieces the network makes of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from kilburn.errors import Unavailable

__all__ = ["Events", "ServerEvent", "written"]

LONGEST = 64 << 20
"""Bytes of one event."""


class ServerEvent(NamedTuple):
    """One event: its bytes with the blank line behind it, its name ("" for none), and its data."""

    raw: bytes
    name: str
    data: bytes


class Events:
    """Splits a stream of bytes into events. Comments, and events without data, keep their bytes and have no data."""

    def __init__(self) -> None:
        self._left = bytearray()
        self._returned = False

    @property
    def open(self) -> bool:
        """Whether a part of an event waits for the rest of it."""
        return bool(self._left.strip())

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """The events that a piece completes. Each byte is looked at once, however long an event is.

        Raises:
            Unavailable: an event that never ends.
        """
        if self._returned:
            piece = piece.removeprefix(b"\n")  # the second half of a line's end
        self._returned = piece.endswith(b"\r") or (self._returned and not piece)
        if b"\r" in piece:
            piece = piece.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        known = max(0, len(self._left) - 1)
        self._left += piece
        if self._left.find(b"\n\n", known) < 0:
            if len(self._left) > LONGEST:
                raise Unavailable("the upstream sent an event that does not end", advice="check the upstream")
            return []
        *whole, rest = bytes(self._left).split(b"\n\n")
        self._left = bytearray(rest)
        return [_event_of(raw) for raw in whole if raw]


def _event_of(raw: bytes) -> ServerEvent:
    name, data = "", []
    for line in raw.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
    return ServerEvent(raw + b"\n\n", name, b"\n".join(data))


def written(value: Any, name: str = "") -> bytes:
    """One event with this data as JSON, or as it is where it is bytes."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"

"""Server-sent events as bytes: taken apart as they come, whatever pieces the network makes of them."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from enum import StrEnum
from typing import Any, NamedTuple

import msgspec

from kilburn.errors import Unavailable

MAX_EVENT_BYTES = 64 << 20
"""Bytes of one event."""

MARK = b"\xef\xbb\xbf"
"""A byte order mark, with which a text may begin."""

BLANKS = b" \t\r\n"

_LINE = rb"(?:\r\n|\n|\r(?!\n))"
_lines = re.compile(_LINE).split
_end = re.compile(_LINE + _LINE)
_FIELDS = (b"data", b"event", b"id", b"retry", b":")
"""The beginnings of the lines of an event."""


LAST = ("message_stop", "response.completed", "response.incomplete")
"""Names of the events that end a reply. In the chat form, the data `[DONE]` ends it."""


class ServerEvent(NamedTuple):
    """One event: its bytes with the blank line at its end, its name ("" for none), and its data."""

    raw: bytes
    name: str
    data: bytes

    @property
    def is_done(self) -> bool:
        """Whether this is the last event of a stream of chat completions, which has no JSON."""
        return self.data.strip() == b"[DONE]"

    @property
    def is_last(self) -> bool:
        """Whether this event ends a reply, in any form."""
        return self.is_done or self.name in LAST


class Events:
    """Splits a stream of bytes into events, which together have all its bytes, line ends included. Comments and events without
    data have empty data."""

    def __init__(self) -> None:
        self._left = bytearray()
        self._returns = False
        """Whether lines may end with a carriage return."""

    @property
    def open(self) -> bool:
        """Whether an event is incomplete."""
        return bool(self._left.strip())

    def feed(self, piece: bytes) -> list[ServerEvent]:
        """Return the events that a piece completes. Each byte is examined once, however long an event is.

        Raises:
            Unavailable: an event that never ends.
        """
        start = max(0, len(self._left) - 3)
        self._left += piece
        self._returns = self._returns or b"\r" in piece
        events: list[ServerEvent] = []
        if not self._returns:
            start = max(start, len(self._left) - len(piece) - 1)
            if self._left.find(b"\n\n", start) >= 0:
                *whole, rest = bytes(self._left).split(b"\n\n")
                events, self._left = [_parse_event(raw + b"\n\n") for raw in whole], bytearray(rest)
        else:
            event_start, data = 0, self._left
            for match in _end.finditer(data, start):
                events.append(_parse_event(bytes(data[event_start : match.end()])))
                event_start = match.end()
            if event_start:
                self._left = data[event_start:]
        if len(self._left) > MAX_EVENT_BYTES:
            raise Unavailable("the upstream sent an event that does not end", advice="check the upstream")
        return events

    def end(self) -> list[ServerEvent]:
        """Return the rest at the end of the stream, as an event without its blank line."""
        rest, self._left = bytes(self._left), bytearray()
        return [_parse_event(rest)] if rest else []


def _parse_event(raw: bytes) -> ServerEvent:
    if raw.startswith(b"data: ") and raw.find(b"\n") == len(raw) - 2 and b"\r" not in raw:
        return ServerEvent(raw, "", raw[6:-2])
    name, data = "", []
    for line in _lines(raw.removeprefix(MARK)):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            name = line[6:].strip().decode("utf-8", "replace")
    return ServerEvent(raw, name, b"\n".join(data))


class Shape(StrEnum):
    """The kind of an answer's body, by its bytes."""

    EVENTS = "events"
    WHOLE = "whole"
    """JSON."""
    OTHER = "other"
    """Nothing at all, or something else."""


async def detect_shape(pieces: AsyncIterator[bytes]) -> tuple[Shape, AsyncIterator[bytes]]:
    """Return the shape of an answer by its first bytes, and all of its pieces."""
    head, shape = b"", None
    async for piece in pieces:
        head += piece
        shape = _shape(head.removeprefix(MARK).lstrip(BLANKS))
        if shape is not None or len(head) > 1 << 16:
            break

    async def all_of_it() -> AsyncIterator[bytes]:
        if head:
            yield head
        async for piece in pieces:
            yield piece

    return shape or Shape.OTHER, all_of_it()


def _shape(head: bytes) -> Shape | None:
    """Return the shape of a body that begins so; None if that is too short to tell."""
    if not head:
        return None
    if head[:1] in (b"{", b"["):
        return Shape.WHOLE
    if head.startswith(_FIELDS):
        return Shape.EVENTS
    return None if any(field.startswith(head) for field in _FIELDS) else Shape.OTHER


def written(value: Any, name: str = "") -> bytes:
    """Return one event with this data as JSON, or as it is if it is bytes."""
    data = value if isinstance(value, bytes) else msgspec.json.encode(value)
    return (b"event: " + name.encode() + b"\n" if name else b"") + b"data: " + data + b"\n\n"

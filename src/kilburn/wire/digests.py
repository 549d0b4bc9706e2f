"""What messages say, as digests: by these a history is recognised that a client, a framework or a provider hands over again.

They rewrite ids, marks for a cache, reasoning, blanks at the ends of texts, and the spaces and the order of a call's arguments.
Of a block that only its provider reads (a document, a file, a search) they leave out what it has by default. None of that is in a
digest, and neither are calls of our own, which none of them ever sees.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from typing import Any

import msgspec

from kilburn.message import Kind, Message, Part, Role
from kilburn.wire.plain import load_object

HIDDEN = "kilburn_"
"""Ids of calls of our own, which a client or a framework never sees, begin with this."""

NAMES = ("id", "call_id", "tool_use_id", "status")
"""Keys that a provider gives a block, and that clients leave out or write anew."""

HOLDERS = ("content", "source", "output")
"""Keys of a block below which there are blocks. Below any other one is what somebody said."""

EXACT = 1 << 53
"""Below this a whole number is the same as a float."""

DEFAULTS: dict[str, Any] = {"citations": {"enabled": False}, "detail": "auto"}
"""What a block that does not say it has."""


def digest(message: Message) -> bytes:
    """Return what a message says, in 16 bytes. The last bit says whether the assistant says it."""
    values = [message.role, "".join(part.text for part in message.parts if part.kind is Kind.TEXT).strip()]
    for part in message.parts:
        if part.kind is Kind.CALL and not _is_hidden(part):
            values += [part.kind, part.name or "", _sorted(part.text)]
        elif part.kind is Kind.OPAQUE:
            values += [part.kind, _plain(part.text)]
        elif part.kind in (Kind.RESULT, Kind.IMAGE):
            values += [part.kind, part.text]
    hasher = hashlib.blake2b(digest_size=16)
    for text in values:
        data = text.encode("utf-8", "surrogatepass")
        hasher.update(len(data).to_bytes(8, "big"))
        hasher.update(data)
    result = bytearray(hasher.digest())
    result[-1] = result[-1] & 0xFE | (message.role is Role.ASSISTANT)
    return bytes(result)


def is_spoken(digest: bytes) -> bool:
    """Return whether the message with a digest is the assistant's."""
    return bool(digest[-1] & 1)


def canonical(messages: Iterable[Message]) -> list[bytes]:
    """Digests of messages, one for each and one for each result. What the assistant says in a row is one message, as clients
    have it; our own calls and their results are left out, and so is what says nothing."""
    return [digest(message) for message in visible(messages)]


def visible(messages: Iterable[Message]) -> Iterator[Message]:
    """Yield messages as a client has them, of which `canonical` has the digests."""
    waiting: list[Part] = []

    def speak() -> Iterator[Message]:
        if any(part.kind is Kind.CALL or part.text.strip() for part in waiting):
            yield Message(role=Role.ASSISTANT, parts=tuple(waiting))
        waiting.clear()

    for message in messages:
        parts = [part for part in message.parts if not _is_hidden(part) and part.kind is not Kind.REASONING]
        if message.role is Role.ASSISTANT:
            waiting += parts
        elif parts:
            yield from speak()
            yield from apart([msgspec.structs.replace(message, parts=tuple(parts))])
    yield from speak()


def apart(messages: Iterable[Message]) -> list[Message]:
    """Return each result as a message of its own, with what is attached to it."""
    out: list[Message] = []
    for message in messages:
        results = [at for at, part in enumerate(message.parts) if part.kind is Kind.RESULT]
        if len(results) < 2 or message.role is not Role.TOOL:
            out.append(message)
            continue
        for start, end in zip([0, *results[1:]], [*results[1:], len(message.parts)], strict=True):
            out.append(msgspec.structs.replace(message, parts=message.parts[start:end], extra=None))
    return out


def _is_hidden(part: Part) -> bool:
    return (part.call or "").startswith(HIDDEN)


def _sorted(arguments: str) -> str:
    """Return a call's arguments whatever their spaces and the order of their keys."""
    value = load_object(arguments) if arguments.strip() else {}
    return arguments if value is None else _encoded(value)


def _encoded(value: Any) -> str:
    return msgspec.json.encode(_whole(value), order="sorted").decode()


def _whole(value: Any) -> Any:
    """Return a value with 1 for 1.0: JavaScript does not know one from the other."""
    if isinstance(value, dict):
        return {key: _whole(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [_whole(inner) for inner in value]
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < EXACT else value


def _plain(block: str) -> str:
    """Return what a block says that only its provider reads."""
    value = load_object(block)
    return block if value is None else _encoded(_said(value, NAMES))


def _said(value: Any, names: tuple[str, ...] = ()) -> Any:
    if isinstance(value, list):
        return [_said(inner, NAMES) for inner in value]
    if not isinstance(value, dict):
        return value
    fields = {}
    for key, inner in value.items():
        if key == "cache_control" or key in names or inner in (None, [], {}) or DEFAULTS.get(key) == inner:
            continue
        fields[key] = _said(inner) if key in HOLDERS else inner
    return fields

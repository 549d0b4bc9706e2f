"""What a provider of the chat form attached to a message with calls, as one opaque text for a client of another form.

Such a provider demands its reasoning and signatures back with the calls. The other forms have no fields for these, but each has
one for a text that only the provider understands, and clients send it back unchanged with the calls.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from kilburn.message import Kind, Message, Part
from kilburn.wire.chat import ASIDES
from kilburn.wire.parts import block_template
from kilburn.wire.plain import NOT_JSON, unpack

PREFIX = "kilburn:"
_KNOWN_KEYS = {"role", "content", "tool_calls", *ASIDES}


class _Attached(msgspec.Struct, array_like=True, frozen=True):
    """The message's own fields, its reasoning, and the further fields of each call."""

    extra: str | None
    thoughts: tuple[Part, ...]
    calls: tuple[str | None, ...]


def pack_attached(message: Message) -> str:
    """Return what the provider attached to a reply, or "" if it made no calls or attached nothing."""
    extra = unpack(message.extra)
    thoughts = tuple(part for part in message.parts if part.kind is Kind.REASONING)
    calls = tuple(part.extra for part in message.parts if part.kind is Kind.CALL)
    has_fields = extra.get("dict", {}).keys() - _KNOWN_KEYS
    if extra.get("form") != "chat" or not calls or not (thoughts or any(calls) or has_fields):
        return ""
    return PREFIX + base64.b64encode(msgspec.json.encode(_Attached(message.extra, thoughts, calls))).decode()


def is_attached(block: Mapping[str, Any]) -> bool:
    """Return whether a block or an item holds what `pack_attached` gave."""
    return _text(block).startswith(PREFIX)


def restore_attached(messages: Iterable[Message]) -> list[Message]:
    """Return the messages as their provider wrote them, where a client sent back what `pack_attached` gave it."""
    return [_restored(message) for message in messages]


def _restored(message: Message) -> Message:
    attached = [value for part in message.parts if part.kind is Kind.REASONING and (value := _unpack(part)) is not None]
    if not attached:
        return message
    extras = iter([extra for block in attached for extra in block.calls])
    parts = [thought for block in attached for thought in block.thoughts]
    for part in message.parts:
        if part.kind is not Kind.REASONING:
            extra = next(extras, None) if part.kind is Kind.CALL else None
            parts.append(msgspec.structs.replace(part, extra=extra))
    return msgspec.structs.replace(message, parts=tuple(parts), extra=attached[0].extra)


def _unpack(part: Part) -> _Attached | None:
    block = block_template(part) or {}
    if not is_attached(block):
        return None
    try:
        return msgspec.json.decode(base64.b64decode(_text(block).removeprefix(PREFIX)), type=_Attached)
    except (ValueError, *NOT_JSON):
        return None


def _text(block: Mapping[str, Any]) -> str:
    return str(block.get("data") or block.get("encrypted_content") or "")

"""What is sent to a provider for a part, and what is sent beside its text: renderers and the counter ask here.

A prompt may be rendered in either form, so whatever one of the two sends is counted.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Part, Role
from kilburn.wire.plain import load_object, pack, unpack
from kilburn.wire.quotation import quote
from kilburn.wire.turns import MESSAGES_ID, safe_id, safe_name

FAILED = "(it failed without a message)"
UNSHOWN = "(an image that cannot be shown here)"
FUNCTION_OUTPUT = "function-output"
IMAGES = "(attached to tool result {})"

OPENING = "(conversation continues)"
COMPACTION = "compaction by the provider"
"""The label of a page with a compaction that stands for everything before it."""

_PROTOCOL = frozenset({
    "role", "type", "content", "text", "tool_calls", "function", "custom", "id", "name", "arguments", "input",
    "tool_use_id", "tool_call_id", "thinking", "signature", "data", "refusal", "image_url", "url", "source",
    "media_type", "detail", "is_error", "citations", "reasoning_content", "reasoning",
})  # fmt: skip
"""Keys of the wire forms: the message's envelope is counted for them."""
_UNREAD = frozenset({"cache_control", "role", "type", "media_type", "detail"})
"""Keys whose values are instructions to the provider, not text for the model."""

_SIGNED = frozenset(
    {"extra_content", "provider_specific_fields", "reasoning", "reasoning_content", "reasoning_details", "signature"}
    | {"thinking_blocks", "thought_signature"}
)
"""Keys of signatures and of reasoning."""


def form_of(extra: str | None) -> str | None:
    """Return the wire form that a message came in, and the shape of its content, without its other leftovers."""
    if extra is None:
        return None
    fields = {key: value for key, value in unpack(extra).items() if key in ("form", "shape")}
    return pack(fields) if fields else None


def is_plain(part: Part, role: Role, leftovers: str | None) -> bool:
    """Return whether both forms send a part's text and nothing else; this is so for most parts."""
    if part.extra is not None or (leftovers is not None and '"dict"' in leftovers):
        return False
    return part.kind is Kind.RESULT or (part.kind is Kind.TEXT and role is not Role.TOOL)


def is_signed(part: Part) -> bool:
    """Return whether a part is thinking that its provider signed: it is sent back whole, or not at all."""
    if part.kind is not Kind.REASONING or part.extra is None:
        return False
    block = unpack(part.extra).get("block") or {}
    # A chunk of Mistral's reasoning holds a list, and no signature.
    whole = block.get("type") in ("redacted_thinking", "reasoning") or isinstance(block.get("thinking"), list)
    return whole or bool(block.get("signature"))


def is_sent(part: Part, role: Role, form: str | None, into: str) -> bool:
    """Return whether a part that came in one wire form is sent in another.

    Args:
        form: "chat", "messages" or None, as the message's extra says.
        into: "chat" or "messages".
    """
    if part.kind is Kind.REASONING:
        if form != into or role is not Role.ASSISTANT:
            return False
        return is_signed(part) or (into == "chat" and "at" in unpack(part.extra))
    if part.kind is Kind.OPAQUE:
        # Only their own provider understands its blocks.
        return form == into and not (into == "chat" and role is Role.SYSTEM)
    if part.kind is Kind.IMAGE and role in (Role.ASSISTANT, Role.SYSTEM):
        return into == "messages" and role is Role.ASSISTANT
    return True


def unsigned(text: str | None) -> str | None:
    """Return the extra of a part or of a message without what only the model that wrote it can check or read: signatures,
    reasoning, and the ids by which items of OpenAI's responses belong to their reasoning."""
    if text is None or not any(f'"{key}":' in text for key in (*_SIGNED, "item")):
        return text
    return pack(_unsigned(unpack(text)))


def _unsigned(value: Any, holder: str = "") -> Any:
    if isinstance(value, dict):
        return {
            key: _unsigned(inner, key) for key, inner in value.items() if key not in _SIGNED and (holder, key) != ("item", "id")
        }
    return [_unsigned(inner) for inner in value] if isinstance(value, list) else value


def sent_name(name: str | None, call: str | None) -> str:
    """Return a call's name and id as they are sent; the longer one if the two forms differ."""
    return f"{safe_name(name) if name else ''} {safe_id(call, MESSAGES_ID) if call else ''}"


def sent_text(part: Part, role: Role, form: str | None) -> str:
    """Return the text that is sent for a part, in the longer form; "" if none is sent."""
    if not any(is_sent(part, role, form, into) for into in ("chat", "messages")):
        return ""
    if part.kind is Kind.CALL and form != "messages":
        whole = pack(arguments) if (arguments := load_object(part.text)) is not None else pack({"_raw": part.text})
        return max(part.text, whole if part.text.strip() else "{}", key=len)
    if part.kind is Kind.IMAGE:
        return UNSHOWN
    # The old `function` role has no place of its own in the messages form.
    return quote(FUNCTION_OUTPUT, part.text) if role is Role.TOOL and part.call is None and part.text.strip() else part.text


def strings_beside(part: Part, role: Role, leftovers: str | None) -> list[tuple[str, str]]:
    """Return the strings that are sent with a part besides its text, each with its key: what a wire form had beyond the neutral
    form. Some may be media, such as the ciphertext of reasoning."""
    strings: list[tuple[str, str]] = []
    message_extra = unpack(leftovers)
    form = message_extra.get("form")
    if part.extra is not None and any(is_sent(part, role, form, into) for into in ("chat", "messages")):
        extra = unpack(part.extra)
        strings += _strings(
            [
                extra.get("block"),
                extra.get("call"),
                extra.get("item"),
                [item for item in extra.get("layout") or () if isinstance(item, dict)],
            ]
        )
        failed = (extra.get("block") or {}).get("is_error") is True or extra.get("is_error") is True
        if part.kind is Kind.RESULT and failed and not part.text.strip():
            strings.append(("", FAILED))
    if form == "chat" and "dict" in message_extra:
        strings += _strings(message_extra["dict"])
    if part.call is not None and part.kind in (Kind.IMAGE, Kind.OPAQUE):
        strings.append(("", IMAGES.format(safe_id(part.call, MESSAGES_ID))))
    return strings


def _strings(template: Any, key: str = "") -> list[tuple[str, str]]:
    """Return all strings of a template with their keys: its values, and those keys that do not belong to a wire form."""
    if isinstance(template, dict):
        names = [("", name) for name in template if name not in _PROTOCOL and name not in _UNREAD]
        return names + [pair for name, inner in template.items() if name not in _UNREAD for pair in _strings(inner, name)]
    if isinstance(template, list):
        return [pair for inner in template for pair in _strings(inner, key)]
    if template is None or isinstance(template, bool) or key == "n":
        return []
    return [(key, template)] if isinstance(template, str) else [(key, msgspec.json.encode(template).decode())]


def is_compaction(part: Part) -> bool:
    """Whether a part is what a provider made of the prompt before it: Anthropic's compaction block, or a compaction item of
    OpenAI's responses, encrypted or not."""
    if part.kind is not Kind.OPAQUE or "compaction" not in part.text:
        return False
    try:
        kind = unpack(part.text).get("type")
    except InvalidMessage:
        return False
    return isinstance(kind, str) and "compaction" in kind


def stands(part: Part) -> bool:
    """Whether a part is a compaction that did not fail: it has a summary, which may be encrypted."""
    if not is_compaction(part):
        return False
    block = unpack(part.text)
    summary = block.get("content", block.get("encrypted_content"))
    return isinstance(summary, str) and bool(summary)

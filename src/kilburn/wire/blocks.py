"""Anthropic's content blocks: one block read into a part, one part written back as its block."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Part
from kilburn.wire.plain import load_object, pack, string_at, type_of, unpack
from kilburn.wire.result import read_blocks, write_blocks

__all__ = ["call_input", "read_block", "write_block", "write_image", "write_result"]


def read_block(block: Any, where: str) -> list[Part]:
    """The part of a block, followed by the attached parts of a tool result."""
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidMessage(f"{where}: a content block is an object with a `type`, not {type_of(block)}")
    if kind == "tool_result":
        return _read_result(block, where)
    if kind == "tool_use":
        return [_read_call(block, where)]
    return [_read_leaf(block, where)]


def _read_leaf(block: Any, where: str) -> Part:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidMessage(f"{where}: a content block is an object with a `type`, not {type_of(block)}")
    if kind == "redacted_thinking":
        return Part(kind=Kind.REASONING, text="", extra=pack({"block": block}))
    if kind in ("text", "thinking"):
        text = string_at(block, kind, where, empty=True)
        default = kind == "text" and list(block) == ["type", "text"]
        return Part(
            kind=Kind.TEXT if kind == "text" else Kind.REASONING,
            text=text,
            extra=None if default else pack({"block": {**block, kind: None}}),
        )
    if kind == "image":
        return _read_image(block)
    if kind == "tool_use":
        return _read_call(block, where)
    return Part(kind=Kind.OPAQUE, text=pack(block))


def _read_call(block: dict[str, Any], where: str) -> Part:
    call, name, given = string_at(block, "id", where), string_at(block, "name", where), block.get("input")
    if not isinstance(given, dict):
        raise InvalidMessage(f"{where}.input: {type_of(given)} where an object belongs")
    default = list(block) == ["type", "id", "name", "input"]
    template = {**block, "id": None, "name": None, "input": None}
    return Part(kind=Kind.CALL, text=pack(given), call=call, name=name, extra=None if default else pack({"block": template}))


def _read_image(block: dict[str, Any]) -> Part:
    """An image as an URL; one whose source says more than that stays OPAQUE."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "url" and isinstance(source.get("url"), str):
        text, slot, known = source["url"], "url", ["type", "url"]
        if text.startswith("data:"):
            return Part(kind=Kind.OPAQUE, text=pack(block))
    elif isinstance(source, dict) and source.get("type") == "base64" and _sound_base64(source):
        text, slot, known = f"data:{source['media_type']};base64,{source['data']}", "data", ["type", "media_type", "data"]
    else:
        return Part(kind=Kind.OPAQUE, text=pack(block))
    default = list(block) == ["type", "source"] and list(source) == known
    template = {**block, "source": {**source, slot: None}}
    return Part(kind=Kind.IMAGE, text=text, extra=None if default else pack({"block": template}))


def _sound_base64(source: dict[str, Any]) -> bool:
    media = source.get("media_type")
    return isinstance(media, str) and isinstance(source.get("data"), str) and ";" not in media and "," not in media


def _read_result(block: dict[str, Any], where: str) -> list[Part]:
    call, content = string_at(block, "tool_use_id", where), block.get("content")
    template = {**block, "tool_use_id": None, "content": None}
    extra: dict[str, Any] = {}
    attached: tuple[Part, ...] = ()
    text = ""
    if content is None:
        extra["void"] = True
        if "content" not in block:
            del template["content"]
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text, extra["layout"], attached = read_blocks(content, call, f"{where}.content", _read_leaf)
    else:
        raise InvalidMessage(f"{where}.content: {type_of(content)} where a string or a list of blocks belongs")
    if list(block) != ["type", "tool_use_id", "content"]:
        extra["block"] = template
    return [Part(kind=Kind.RESULT, text=text, call=call, extra=pack(extra) if extra else None), *attached]


def write_result(part: Part, attached: Sequence[Part]) -> dict[str, Any]:
    """The tool_result block of a RESULT of this form and the parts attached to it.

    If its text was replaced, or attached parts are missing, the block has one text and the parts that are left.
    """
    extra = unpack(part.extra)
    block: dict[str, Any] = extra.get("block") or {"type": "tool_result", "tool_use_id": None, "content": None}
    block["tool_use_id"] = part.call
    if extra.get("void") and not part.text and not attached:
        return block
    layout = extra.get("layout")
    content: Any = None if layout is None else write_blocks(part.text, layout, attached, write_block)
    if content is None:
        prose = [{"type": "text", "text": part.text}] if part.text else []
        content = [*prose, *(write_block(item) for item in attached)] if attached else part.text
    block["content"] = content
    return block


def write_block(part: Part) -> dict[str, Any]:
    """The block of a part of this form; for a tool result see `write_result`."""
    if part.kind is Kind.OPAQUE:
        return unpack(part.text)
    block: dict[str, Any] | None = unpack(part.extra).get("block") if part.extra is not None else None
    if part.kind is Kind.CALL:
        block = block or {"type": "tool_use", "id": None, "name": None, "input": None}
        block["id"], block["name"], block["input"] = part.call, part.name, call_input(part.text)
        return block
    if part.kind is Kind.IMAGE:
        return write_image(part.text, block)
    block = block or {"type": "text", "text": None}
    if block["type"] != "redacted_thinking":
        block[block["type"]] = part.text
    return block


def call_input(arguments: str) -> dict[str, Any]:
    """A call's arguments as an object. Arguments that are not a JSON object are put under the key `_raw`, as text."""
    if not arguments.strip():
        return {}
    given = load_object(arguments)
    return {"_raw": arguments} if given is None else given


def write_image(url: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """The image block of a URL: a data URL goes as base64, any other as it is.

    Args:
        block: the block that the image came in, with its data left out; None makes a plain one.
    """
    head, mark, data = url.partition(";base64,")
    if url.startswith("data:") and mark:
        block = block or {"type": "image", "source": {"type": "base64", "media_type": head[5:], "data": None}}
        block["source"]["data"] = data
    else:
        block = block or {"type": "image", "source": {"type": "url", "url": None}}
        block["source"]["url"] = url
    return block

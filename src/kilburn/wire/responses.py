"""Items of OpenAI's responses API, from messages of the chat form and back.

An item that only its provider understands becomes a block of an assistant's message, and stays as it is. So does a reasoning
item. An item's own id is left out: with it the provider would ask for the reasoning that came before, which may have left.

What the assistant says in a row is one message, with its items in their order: a provider takes reasoning back only right
before what came of it, and results behind all calls.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Message, Part, Role
from kilburn.wire.chat import ASIDES
from kilburn.wire.parts import call_slots, kind_at
from kilburn.wire.plain import pack, string_at, type_name, unpack

CALLS = {"function_call": ("function", "arguments"), "custom_tool_call": ("custom", "input")}
RESULTS = ("function_call_output", "custom_tool_call_output")
TEXTS = ("input_text", "output_text", "text")
PROVIDER_KEYS = ("id", "status")
"""Keys of an item that its provider gives it."""


def read(item: dict[str, Any], where: str = "input") -> dict[str, Any]:
    """Return the message of the chat form that an item is.

    Raises:
        InvalidMessage: not an item.
    """
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidMessage(f"{where}.type: {type_name(kind)} where a string belongs")
    if kind in CALLS:
        body, slot = CALLS[kind]
        inner = {"name": string_at(item, "name", where), slot: string_at(item, slot, where, empty=True)}
        rest = _rest(item, "call_id", "name", slot)
        call = {"id": string_at(item, "call_id", where), "type": body, body: inner, **({"item": rest} if rest else {})}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind in RESULTS:
        head = {"role": "tool", "tool_call_id": string_at(item, "call_id", where)}
        return {**head, "content": _output(item.get("output"), where), **_rest(item, "call_id", "output")}
    if kind != "message":
        return {"role": "assistant", "content": [item]}
    content = item.get("content")
    if isinstance(content, list):
        content = [_block(block, where) for block in content]
    elif not isinstance(content, str):
        raise InvalidMessage(f"{where}.content: {type_name(content)} where a string or a list belongs")
    return {"role": item.get("role"), "content": content, **_rest(item, "role", "content")}


def together(messages: Sequence[Message]) -> list[Message]:
    """The messages of items, with what the assistant says in a row as one message of the shape "items": a text that begins an
    item says what else the item has."""
    out: list[Message] = []
    for speaks, run in itertools.groupby(messages, lambda message: message.role is Role.ASSISTANT):
        group = list(run)
        if speaks:
            parts = tuple(part for message in group for part in _begun(message))
            group = [msgspec.structs.replace(group[0], parts=parts, extra=pack({"form": "chat", "shape": "items"}))]
        out += group
    return out


def _begun(message: Message) -> tuple[Part, ...]:
    first, *rest = message.parts
    if first.kind is not Kind.TEXT:
        return message.parts
    template = unpack(message.extra).get("dict", {})
    item = {key: value for key, value in template.items() if key not in ("role", "content")}
    return (msgspec.structs.replace(first, extra=pack({**unpack(first.extra), "item": item})), *rest)


def _rest(item: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return what else an item has."""
    excluded = {"type", "tool_calls", "tool_call_id", *PROVIDER_KEYS, *ASIDES, *keys}
    return {key: value for key, value in item.items() if key not in excluded}


def _output(output: Any, where: str) -> Any:
    if isinstance(output, str):
        return output
    if not isinstance(output, list):
        raise InvalidMessage(f"{where}.output: {type_name(output)} where a string or a list belongs")
    return [_block(block, where) for block in output]


def _block(block: Any, where: str) -> dict[str, Any]:
    if kind_at(block, where) in TEXTS:
        return {**block, "type": "text", "text": string_at(block, "text", where, empty=True)}
    if block["type"] == "input_image" and isinstance(block.get("image_url"), str):
        image = {"url": block["image_url"], **({"detail": block["detail"]} if "detail" in block else {})}
        rest = {key: value for key, value in block.items() if key not in ("type", "image_url", "detail")}
        return {"type": "image_url", "image_url": image, **rest}
    return dict(block)


def write(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the items of messages of the chat form. Reasoning with nothing of the assistant behind it is left out."""
    items: list[dict[str, Any]] = []
    for message in messages:
        role, content = message["role"], message.get("content")
        rest = _rest(message, "role", "content")
        if role == "tool":
            output = {"call_id": message["tool_call_id"], "output": _written(content, "input")}
            items.append({"type": "function_call_output", **output, **rest})
            continue
        side = "output" if role == "assistant" else "input"
        if isinstance(content, str) and content:
            text = content if side == "input" else _written(content, side, listed=True)
            items.append({"type": "message", "role": role, "content": text, **rest})
        elif content:
            for native, blocks in itertools.groupby(content, _is_item):
                run = list(blocks)
                texts = [_written_block(block, side) for block in run]
                items += run if native else [{"type": "message", "role": role, "content": texts, **rest}]
        for call in message.get("tool_calls") or ():
            body, slot = call_slots(call)
            kind = "custom_tool_call" if body == "custom" else "function_call"
            called = {"call_id": call["id"], "name": call[body]["name"], slot: call[body][slot]}
            items.append({"type": kind, **called, **call.get("item", {})})
    custom = {item["call_id"] for item in items if item["type"] == "custom_tool_call"}
    for item in items:
        if item["type"] == "function_call_output" and item["call_id"] in custom:
            item["type"] = "custom_tool_call_output"
    ordered: list[dict[str, Any]] = []
    spoken = False
    for item in reversed(items):
        if item["type"] != "reasoning" or spoken:
            ordered.append(item)
            spoken = item["type"] not in RESULTS and item.get("role", "assistant") == "assistant"
    return ordered[::-1]


def _is_item(block: dict[str, Any]) -> bool:
    return block["type"] not in ("text", "image_url", "refusal") and not block["type"].startswith("input_")


def _written(content: Any, side: str, *, listed: bool = False) -> Any:
    if isinstance(content, str):
        return [{"type": f"{side}_text", "text": content}] if listed else content
    return [_written_block(block, side) for block in content or ()]


def _written_block(block: dict[str, Any], side: str) -> dict[str, Any]:
    if block["type"] == "text":
        return {**block, "type": f"{side}_text"}
    if block["type"] == "image_url":
        image = block["image_url"]
        rest = {key: value for key, value in block.items() if key not in ("type", "image_url")}
        return {
            "type": "input_image",
            "image_url": image["url"],
            **({"detail": image["detail"]} if "detail" in image else {}),
            **rest,
        }
    return block

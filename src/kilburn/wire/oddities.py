"""Messages of real clients and providers, as the wire's readers take them.

Some leave out a call's id, send its arguments as an object, or a content of null. A reader that is strict would refuse what
their other side takes. What is mended here is only how it is read: the bytes that go through stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import Any

import msgspec

from kilburn.message import Kind, Message, Part, Role
from kilburn.wire.parts import call_slots
from kilburn.wire.plain import load_object, pack

NO_ID = "call-without-id"
"""The id of a call, or of a result, that has none. What has the same id in one turn is told apart by its order."""

_TEXTS = ("text", "refusal", "thinking", "input_text", "output_text")


def chat_message(source: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the chat form; the same object if nothing is odd about it."""
    more: dict[str, Any] = {}
    role, content = source.get("role"), source.get("content")
    if content is None and role in ("user", "system", "developer", "tool"):
        more["content"] = ""
    elif content is None and "content" not in source and role == "assistant":
        more["content"] = None
    elif content is not None and (value := _content(content, "text")) is not content:
        more["content"] = value
    if role == "tool" and (call_id := _id(source.get("tool_call_id"))) != source.get("tool_call_id"):
        more["tool_call_id"] = call_id
    calls = source.get("tool_calls")
    if role == "assistant" and calls:
        listed = calls if isinstance(calls, list) else [calls]
        value = _apart([_call(call) for call in listed if isinstance(call, dict)], "id")
        if value != calls:
            more["tool_calls"] = value
    return {**source, **more} if more else source


def _call(call: dict[str, Any]) -> dict[str, Any]:
    body, slot = call_slots(call)
    inner = call.get(body)
    if not isinstance(inner, dict):
        inner = {key: call[key] for key in ("name", slot) if key in call}
    return _with(call, id=_id(call.get("id")), **{body: _with(inner, name=_name(inner), **{slot: as_text(inner.get(slot))})})


def messages_message(source: dict[str, Any]) -> dict[str, Any]:
    """Return a message of the messages form; the same object if nothing is odd about it."""
    content = source.get("content")
    if content is None:
        return source if source.get("role") == "system" and "content" not in source else {**source, "content": ""}
    blocks = _content(content, "text")
    if isinstance(blocks, list):
        repaired = [_used(block) for block in blocks]
        calls = _apart([block for block in repaired if block.get("type") == "tool_use"], "id")
        results = _apart([block for block in repaired if block.get("type") == "tool_result"], "tool_use_id")
        waiting = {"tool_use": iter(calls), "tool_result": iter(results)}
        repaired = [next(waiting[block["type"]]) if block.get("type") in waiting else block for block in repaired]
        blocks = blocks if repaired == blocks else repaired
    return source if blocks is content else {**source, "content": blocks}


def _used(block: dict[str, Any]) -> dict[str, Any]:
    if block.get("type") == "tool_use":
        arguments = block.get("input")
        if not isinstance(arguments, dict):
            text = as_text(arguments)
            arguments = {} if not text.strip() else load_object(text) or {"_raw": text}
        return _with(block, id=_id(block.get("id")), name=_name(block), input=arguments)
    if block.get("type") == "tool_result":
        content = block.get("content")
        more = {} if content is None or isinstance(content, str) else {"content": _content(content, "text")}
        return _with(block, tool_use_id=_id(block.get("tool_use_id")), **more)
    return block


def response_item(source: dict[str, Any]) -> dict[str, Any]:
    """Return an item of the responses form; the same object if nothing is odd about it."""
    kind = source.get("type") or "message"
    if kind in ("function_call", "custom_tool_call"):
        slot = "arguments" if kind == "function_call" else "input"
        return _with(source, call_id=_id(source.get("call_id")), name=_name(source), **{slot: as_text(source.get(slot))})
    if kind in ("function_call_output", "custom_tool_call_output"):
        output = source.get("output")
        return _with(source, call_id=_id(source.get("call_id")), output="" if output is None else _content(output, "input_text"))
    if kind == "message":
        content = source.get("content")
        return _with(source, type=kind, content="" if content is None else _content(content, "input_text"))
    return source


def _with(source: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """Return a dict with other values; itself if it has these. What has no type needs none."""
    if "type" in fields and "type" not in source:
        del fields["type"]
    same = all(key in source and source[key] == value for key, value in fields.items())
    return source if same else {**source, **fields}


def _content(content: Any, kind: str) -> Any:
    """Return a content that is a string or a list of blocks; the same object if it is that already."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return as_text(content)
    blocks: list[dict[str, Any]] = []
    for is_block, run in groupby(content, _is_block):
        values = list(run)
        # Values that are no blocks are one text, however many they are: a page for each would take a kilobyte for two bytes.
        blocks += (
            [_block(block, kind) for block in values] if is_block else [{"type": kind, "text": "\n".join(map(as_text, values))}]
        )
    same = len(blocks) == len(content) and all(block is original for block, original in zip(blocks, content, strict=True))
    return content if same else blocks


def _is_block(value: Any) -> bool:
    return isinstance(value, dict) and (isinstance(value.get("type"), str) or "text" in value)


def _block(source: dict[str, Any], kind: str) -> dict[str, Any]:
    block = source if isinstance(source.get("type"), str) else {**source, "type": kind}
    slot = "text" if block["type"].endswith("_text") else block["type"]
    if block["type"] == "thinking" and isinstance(block.get("thinking"), list):
        return block
    if block["type"] in _TEXTS and not isinstance(block.get(slot), str):
        return {**block, slot: as_text(block.get(slot))}
    if block["type"] == "image_url" and isinstance(block.get("image_url"), str):
        return {**block, "image_url": {"url": block["image_url"]}}
    return block


def _id(value: Any) -> str:
    if isinstance(value, str) and value:
        return value
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else NO_ID


def _name(holder: dict[str, Any]) -> str:
    name = holder.get("name")
    return name if isinstance(name, str) and name else "_"


def as_text(value: Any) -> str:
    """Return what stands where a text belongs: nothing for null, JSON for anything else."""
    if isinstance(value, str):
        return value
    return "" if value is None else pack(value)


def _apart(sources: Sequence[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Calls or results of one message, each with an id of its own."""
    counts: Counter[str] = Counter()
    return [_with(source, **{key: _nth(source[key], counts)}) for source in sources]


def _nth(call: str, counts: Counter[str]) -> str:
    counts[call] += 1
    return call if counts[call] == 1 else f"{call}-{counts[call]}"


def numbered(messages: Iterable[Message], *, whole: bool = False) -> list[Message]:
    """Messages whose results name their calls also where several of a turn have one id, or none: they come in the order of the
    calls.

    Args:
        whole: whether these are all messages; then no two calls without id get the same one.
    """
    out: list[Message] = []
    calls: Counter[str] = Counter()
    results: Counter[str] = Counter()
    spoke = False
    for message in messages:
        if message.role is Role.ASSISTANT and not spoke:
            unnamed = calls[NO_ID] if whole else 0
            calls.clear()
            results.clear()
            calls[NO_ID] = results[NO_ID] = unnamed
        spoke = message.role is Role.ASSISTANT
        parts: list[Part] = []
        answered: tuple[str | None, str] = ("", "")
        for part in message.parts:
            new = part.call
            if part.kind is Kind.CALL and new is not None and new.startswith(NO_ID):
                new = _nth(NO_ID, calls)
            elif part.kind is Kind.RESULT and new is not None:
                answered = new, _nth(NO_ID if new.startswith(NO_ID) else new, results)
                new = answered[1]
            elif part.kind is not Kind.CALL and new == answered[0]:
                new = answered[1]  # it is attached to that result
            parts.append(part if new == part.call else msgspec.structs.replace(part, call=new))
        same = all(part is original for part, original in zip(parts, message.parts, strict=True))
        out.append(message if same else msgspec.structs.replace(message, parts=tuple(parts)))
    return out

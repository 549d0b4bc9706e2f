"""Anthropic's messages form: read a dict, rebuild it exactly, render for the API.

One dict of this form may become several messages, because tool results travel in user messages. `kilburn.wire.form`
finds out which form a dict has; `kilburn.wire.validity` checks a transcript.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kilburn.errors import DuplicateCall, InvalidMessage
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import ToolSpec
from kilburn.wire.blocks import call_input, read_block, write_block, write_image, write_result
from kilburn.wire.plain import pack, type_of, unpack
from kilburn.wire.quotation import quoted
from kilburn.wire.sent import FAILED, SAID, UNSHOWN, is_sent
from kilburn.wire.turns import MESSAGES_ID, PROSE, Turn, safe_id, safe_name, turns

__all__ = ["OPENING", "read", "render", "tools", "write"]

_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


def read(source: dict[str, Any], where: str = "message") -> list[Message]:
    """The messages in a dict of this form, in order. Tool results are separated from what stands around them. `source`
    is plain data (see `kilburn.wire.plain`).

    Raises:
        InvalidMessage: unknown role, content or a block of the wrong type, a call or result without id.
        DuplicateCall: two calls of the message have one id.
    """
    role = source.get("role")
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidMessage(
            f"{where}.role: {str(role)[:40]!r} is no role of the messages form", advice=f"use one of {', '.join(_ROLES)}"
        )
    content = source.get("content")
    extra: dict[str, Any] = {"form": "messages"}
    template = {**source, "content": None if content else content}
    if list(source) != ["role", "content"]:
        extra["dict"] = template
    if isinstance(content, str):
        return [Message(role=_ROLES[role], parts=(Part(kind=Kind.TEXT, text=content),), extra=pack(extra))]
    if not isinstance(content, list):
        raise InvalidMessage(f"{where}.content: {type_of(content)} where a string or a list of blocks belongs")
    extra["shape"] = "list" if content else "void"
    if not content:
        return [Message(role=_ROLES[role], parts=(Part(kind=Kind.TEXT, text=""),), extra=pack(extra))]
    return _segments(content, _ROLES[role], extra, where)


def _segments(content: list[Any], role: Role, extra: dict[str, Any], where: str) -> list[Message]:
    runs: list[tuple[Role, list[Part]]] = []
    calls: set[str | None] = set()
    answers: set[str | None] = set()
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        parts = read_block(block, place)
        first = parts[0]
        _check_place(first, role, calls if first.kind is Kind.CALL else answers, place)
        speaker = Role.TOOL if first.kind is Kind.RESULT else role
        if runs and runs[-1][0] is speaker:
            runs[-1][1].extend(parts)
        else:
            runs.append((speaker, parts))
    messages: list[Message] = []
    for index, (speaker, parts) in enumerate(runs):
        here = extra if index == 0 else {"form": "messages", "shape": "list"}
        more = {"more": True} if index < len(runs) - 1 else {}
        messages.append(Message(role=speaker, parts=tuple(parts), extra=pack({**here, **more})))
    return messages


def _check_place(part: Part, role: Role, seen: set[str | None], where: str) -> None:
    if part.kind is Kind.CALL:
        if role is not Role.ASSISTANT:
            raise InvalidMessage(f"{where}: a tool_use block in a {role} message", advice="only the assistant calls tools")
        if part.call in seen:
            raise DuplicateCall(f"{where}: two calls have the id {str(part.call)[:80]!r}", advice="give each call its own id")
        seen.add(part.call)
    elif part.kind is Kind.RESULT:
        if role is not Role.USER:
            raise InvalidMessage(f"{where}: a tool_result block in a {role} message", advice="results belong in a user message")
        if part.call in seen:
            raise InvalidMessage(f"{where}: two results for the call {str(part.call)[:80]!r}", advice="give each call one result")
        seen.add(part.call)


def write(messages: Sequence[Message]) -> dict[str, Any]:
    """The dict that `read` made these messages from, exactly.

    Raises:
        InvalidMessage: the messages are not as `read` gave them.
    """
    first = messages[0]
    extra = unpack(first.extra)
    role = Role.USER if first.role is Role.TOOL else first.role
    out: dict[str, Any] = extra.get("dict") or {"role": role.value, "content": None}
    shape = extra.get("shape", "text")
    if shape == "text":
        if len(first.parts) != 1:
            raise InvalidMessage(
                f"a message whose content was one string has {len(first.parts)} parts", advice="dump whole messages only"
            )
        out["content"] = first.parts[0].text
    elif shape == "list":
        out["content"] = [block for message in messages for block in _write_parts(message.parts)]
    else:
        out["content"] = []
    return out


def _write_parts(parts: Sequence[Part]) -> list[dict[str, Any]]:
    blocks: list[dict[str, Any]] = []
    index = 0
    while index < len(parts):
        part = parts[index]
        end = index + 1
        if part.kind is Kind.RESULT:
            while end < len(parts) and parts[end].kind is not Kind.RESULT and parts[end].call == part.call:
                end += 1
            blocks.append(write_result(part, parts[index + 1 : end]))
        else:
            blocks.append(write_block(part))
        index = end
    return blocks


_MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp")
OPENING = "(conversation continues)"
_THOUGHTS = ("thinking", "redacted_thinking")
_SERVED = ("server_tool_use", "mcp_tool_use")
_BREAKPOINTS = 4
"""Anthropic refuses a request with more cache breakpoints than this."""

Blocks = list[dict[str, Any]]


def render(messages: Sequence[Message]) -> tuple[str | Blocks | None, list[dict[str, Any]]]:
    """`system` and `messages` as Anthropic's API accepts them, whatever form the messages came in.

    Parts of a message may be missing. Blocks and reasoning of another provider are left out, as is
    text without a visible character. System messages at the start become `system` (None without
    any), later ones user text in `<system>` tags. Of more than four cache breakpoints the last four
    stay. The same messages give the same bytes.
    """
    queue = turns(messages)
    start = next((index for index, turn in enumerate(queue) if turn.role is not Role.SYSTEM), len(queue))
    system = _system(queue[:start])
    groups = _merged([_spoken(turn) for turn in queue[start:]])
    out = _settled(groups)
    if queue and (not out or out[0][0] != "user"):
        out.insert(0, ("user", OPENING))
    rendered = [{"role": role, "content": content} for role, content in out]
    _limit_breakpoints([system, *(message["content"] for message in rendered)])
    return system, rendered


def _system(leading: Sequence[Turn]) -> str | Blocks | None:
    blocks = [block for turn in leading for block in _texts(turn)]
    if not blocks:
        return None
    if any("cache_control" in block for block in blocks):
        return blocks
    return "\n\n".join(block["text"] for block in blocks)


def _texts(turn: Turn) -> Blocks:
    return [_text(part, turn) for part in turn.parts if part.kind in PROSE and part.text.strip()]


def _text(part: Part, turn: Turn) -> dict[str, Any]:
    if turn.form == "messages":
        return write_block(part)
    block: dict[str, Any] = {"type": "text", "text": part.text}
    carried = unpack(part.extra).get("block", {}) if part.extra is not None else {}
    if isinstance(carried.get("cache_control"), dict):
        block["cache_control"] = carried["cache_control"]
    return block


def _spoken(turn: Turn) -> tuple[str, str | Blocks]:
    """The role and content of one turn, on its own."""
    if turn.result is not None:
        return "user", _answered(turn)
    if turn.role is Role.SYSTEM:
        return "user", [{**block, "text": f"<system>\n{block['text']}\n</system>"} for block in _texts(turn)]
    role = "assistant" if turn.role is Role.ASSISTANT else "user"
    blocks = [block for part in turn.parts for block in _block(part, turn, role)]
    listed = turn.form is not None and turn.extra.get("shape") == "list"
    if not listed and len(blocks) == 1 and list(blocks[0]) == ["type", "text"]:
        return role, str(blocks[0]["text"])
    return role, blocks


def _block(part: Part, turn: Turn, role: str) -> Blocks:
    own = turn.form == "messages"
    if part.kind in PROSE and turn.role is Role.TOOL and part.text.strip():
        return [{"type": "text", "text": quoted(SAID, part.text)}]
    if part.kind in PROSE:
        return [_text(part, turn)] if part.text.strip() else []
    if part.kind is Kind.IMAGE:
        return [_image(part, own)] if role == "user" else [{"type": "text", "text": UNSHOWN}]
    if part.kind is Kind.CALL and role == "assistant":
        block = write_block(part) if own else {"type": "tool_use", "id": "", "name": "", "input": call_input(part.text)}
        block["id"], block["name"] = safe_id(part.call, MESSAGES_ID), safe_name(part.name)
        return [block]
    return [write_block(part)] if is_sent(part, turn.role, turn.form, "messages") else []


def _image(part: Part, own: bool) -> dict[str, Any]:
    if own:
        return write_block(part)
    media, mark, _ = part.text[5:].partition(";base64,") if part.text.startswith("data:") else ("", "", "")
    shown = (mark and media in _MEDIA) or part.text.startswith(("https://", "http://"))
    return write_image(part.text, None) if shown else {"type": "text", "text": UNSHOWN}


def _answered(turn: Turn) -> Blocks:
    """A tool_result block, followed by what the API does not accept inside it."""
    result, attached = turn.parts[0], turn.parts[1:]
    own = turn.form == "messages"
    if own:
        block = write_result(result, attached)
    else:
        images = [_image(part, own) for part in attached if part.kind is Kind.IMAGE]
        prose = [{"type": "text", "text": result.text}]
        block = {"type": "tool_result", "tool_use_id": "", "content": [*prose, *images] if images else result.text}
        if turn.form is None and unpack(result.extra).get("is_error") is True:
            block["is_error"] = True
    block["tool_use_id"] = safe_id(result.call, MESSAGES_ID)
    content = block.get("content")
    if content is None:
        block.pop("content", None)
    moved: Blocks = []
    if isinstance(content, list):
        block["content"] = content = [item for item in content if item["type"] != "text" or item["text"].strip()]
        if block.get("is_error"):
            moved = [item for item in content if item["type"] != "text"]
            block["content"] = content = [item for item in content if item["type"] == "text"]
    if block.get("is_error") and not content:
        block["content"] = FAILED
    return [block, *moved]


def _merged(spoken: Sequence[tuple[str, str | Blocks]]) -> list[tuple[str, str | Blocks]]:
    """Neighbouring messages of one role, joined; empty messages are left out."""
    merged: list[tuple[str, str | Blocks]] = []
    for role, content in spoken:
        if not content:
            continue
        if merged and merged[-1][0] == role:
            merged[-1] = (role, _joined(_as_blocks(merged[-1][1]), _as_blocks(content)))
        else:
            merged.append((role, content))
    return merged


def _joined(before: Blocks, blocks: Blocks) -> Blocks:
    """Two messages of one role, joined. If the second begins with thinking, this is moved to the beginning, because
    calls must follow their thinking."""
    lead = next((at for at, block in enumerate(blocks) if block["type"] not in _THOUGHTS), len(blocks))
    if any(block["type"] in _THOUGHTS for block in before):
        lead = 0
    return [*blocks[:lead], *before, *blocks[lead:]]


def _as_blocks(content: str | Blocks) -> Blocks:
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _settled(groups: Sequence[tuple[str, str | Blocks]]) -> list[tuple[str, str | Blocks]]:
    """Results first, without halves of server-side calls, and without thinking at the end."""
    said = [block for role, content in groups if role == "assistant" and isinstance(content, list) for block in content]
    started = {block.get("id") for block in said if block["type"] in _SERVED}
    ended = {block.get("tool_use_id") for block in said if _is_served_result(block)}
    settled: list[tuple[str, str | Blocks]] = []
    for index, (role, content) in enumerate(groups):
        if isinstance(content, str):
            settled.append((role, content))
            continue
        if role != "assistant":
            # What was moved out of one result must not stand before the next one.
            settled.append((role, sorted(content, key=lambda block: block["type"] != "tool_result")))
            continue
        if index == len(groups) - 1:
            ended = started
        kept = [
            block
            for block in content
            if not (block["type"] in _SERVED and block.get("id") not in ended)
            and not (_is_served_result(block) and block.get("tool_use_id") not in started)
        ]
        while kept and kept[-1]["type"] in _THOUGHTS:
            kept.pop()
        settled.append((role, kept))
    return _merged(settled)


def _is_served_result(block: dict[str, Any]) -> bool:
    return bool(block["type"].endswith("_tool_result"))


def _limit_breakpoints(contents: Sequence[str | Blocks | None]) -> None:
    marked: Blocks = []
    for content in contents:
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if block["type"] == "tool_result" else None
            marked.extend(item for item in (inner if isinstance(inner, list) else ()) if item.get("cache_control") is not None)
            if block.get("cache_control") is not None:
                marked.append(block)
    for block in marked[:-_BREAKPOINTS]:
        del block["cache_control"]


def tools(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """The `tools` argument of a messages request."""
    return [{"name": spec.name, "description": spec.description, "input_schema": spec.parameters} for spec in specs]

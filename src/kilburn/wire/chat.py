"""OpenAI's chat-completions form: read a dict, rebuild it exactly, render for the API.

Whatever `read` cannot put into parts is kept as a template in `extra`: the original object with its texts taken out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Request, Tokens, ToolSpec
from kilburn.wire.parts import (
    block_template,
    call_slots,
    claim_call,
    kind_at,
    only_text,
    read_blocks,
    read_text,
    role_at,
    write_blocks,
)
from kilburn.wire.plain import counted, pack, string_at, type_name, unpack
from kilburn.wire.sent import IMAGES
from kilburn.wire.turns import CHAT_ID, PROSE, Turn, safe_id, safe_name, turns

ROLES = {
    "system": Role.SYSTEM,
    "developer": Role.SYSTEM,
    "user": Role.USER,
    "assistant": Role.ASSISTANT,
    "tool": Role.TOOL,
    "function": Role.TOOL,
}

THOUGHTS = ("reasoning_content", "reasoning")
UNVOICED = ("refusal", "function_call", "audio")
ASIDES = (*THOUGHTS, *UNVOICED)
"""Keys of an assistant message whose value becomes a part of its own."""


def read(source: dict[str, Any], where: str = "message") -> Message:
    """Return the message that a chat dict is. `source` is plain data (see `kilburn.wire.plain`).

    Raises:
        InvalidMessage: unknown role, content of the wrong type, a call or result without id.
        DuplicateCall: two calls of the message have one id.
    """
    role = role_at(source, ROLES, "chat", where)
    template = dict(source)
    if role is Role.TOOL and source["role"] == "tool":
        shape, parts = _read_result(source, template, where)
    else:
        shape, parts = _read_content(source, template, where)
    if role is Role.ASSISTANT:
        thoughts, asides = _read_asides(source, template)
        calls = _read_calls(source, template, where)
        if shape == "text" and parts[0].text == "" and (thoughts or asides or calls):
            shape, parts, template["content"] = "void", [], ""
        if shape == "void" and "content" not in source and not (thoughts or asides or calls):
            raise InvalidMessage(f"{where}: an assistant message with neither content nor tool_calls")
        parts = [*thoughts, *parts, *asides, *calls]
    elif source.get("tool_calls"):
        raise InvalidMessage(f"{where}.tool_calls: a {source['role']} message cannot call tools")
    extra: dict[str, Any] = {"form": "chat"}
    if shape != "text":
        extra["shape"] = shape
    if list(template.items()) != _PLAIN[role]:
        extra["dict"] = template
    packed = pack(extra) if len(extra) > 1 else _FORM
    return Message(role=role, parts=tuple(parts) or (Part(kind=Kind.TEXT, text=""),), extra=packed)


def _default(role: Role) -> dict[str, Any]:
    """Return the template of a message that carries nothing special."""
    if role is Role.TOOL:
        return {"role": "tool", "tool_call_id": None, "content": None}
    return {"role": role.value, "content": None}


_PLAIN = {role: list(_default(role).items()) for role in Role}
_FORM = pack({"form": "chat"})


def _read_content(source: dict[str, Any], template: dict[str, Any], where: str) -> tuple[str, list[Part]]:
    content = source.get("content")
    if isinstance(content, str):
        template["content"] = None
        return "text", [Part(kind=Kind.TEXT, text=content)]
    if content is None and source["role"] in ("assistant", "function"):
        return "void", []
    if not isinstance(content, list):
        raise InvalidMessage(
            f"{where}.content: {type_name(content)} where a {source['role']} message has a string or a list of parts"
        )
    if not content:
        return "void", []
    template["content"] = None
    return "list", [_read_block(block, f"{where}.content[{index}]") for index, block in enumerate(content)]


def _read_result(source: dict[str, Any], template: dict[str, Any], where: str) -> tuple[str, list[Part]]:
    call = string_at(source, "tool_call_id", where)
    content = source.get("content")
    if not isinstance(content, str | list):
        raise InvalidMessage(f"{where}.content: {type_name(content)} where a tool message has a string or a list of text parts")
    template["tool_call_id"] = template["content"] = None
    if isinstance(content, str):
        return "text", [Part(kind=Kind.RESULT, text=content, call=call)]
    text, layout, attached = read_blocks(content, call, f"{where}.content", _read_block)
    return "text", [Part(kind=Kind.RESULT, text=text, call=call, extra=pack({"layout": layout})), *attached]


def _read_block(block: Any, where: str) -> Part:
    kind = kind_at(block, where)
    if kind in ("text", "refusal"):
        return read_text(block, kind, where)
    image = block.get("image_url")
    if kind == "image_url" and isinstance(image, dict) and isinstance(image.get("url"), str):
        default = list(block) == ["type", "image_url"] and list(image) == ["url"]
        template = {**block, "image_url": {**image, "url": None}}
        return Part(kind=Kind.IMAGE, text=image["url"], extra=None if default else pack({"block": template}))
    if kind == "image_url":
        raise InvalidMessage(f"{where}.image_url: {type_name(image)} where an object with a string `url` belongs")
    if kind in ("reasoning", "thinking"):
        # An item of OpenAI's responses, or a chunk of Mistral's reasoning: it is sent back as it is.
        return Part(kind=Kind.REASONING, text="", extra=pack({"block": block}))
    return Part(kind=Kind.OPAQUE, text=pack(block))


def _read_asides(source: dict[str, Any], template: dict[str, Any]) -> tuple[list[Part], list[Part]]:
    thoughts: list[Part] = []
    asides: list[Part] = []
    for key in ASIDES:
        value = source.get(key)
        extra = pack({"at": key})
        if key in THOUGHTS and isinstance(value, str) and value:
            thoughts.append(Part(kind=Kind.REASONING, text=value, extra=extra))
        elif key == "refusal" and isinstance(value, str) and value:
            asides.append(Part(kind=Kind.TEXT, text=value, extra=extra))
        elif key in ("function_call", "audio") and isinstance(value, dict):
            asides.append(Part(kind=Kind.OPAQUE, text=pack(value), extra=extra))
        else:
            continue
        template[key] = None
    return thoughts, asides


def _read_calls(source: dict[str, Any], template: dict[str, Any], where: str) -> list[Part]:
    calls = source.get("tool_calls")
    if not calls and (calls is None or isinstance(calls, list)):
        return []
    if not isinstance(calls, list):
        raise InvalidMessage(f"{where}.tool_calls: {type_name(calls)} where a list belongs")
    template["tool_calls"] = None
    parts = [_read_call(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    ids: set[str | None] = set()
    for part in parts:
        claim_call(part.call, ids, f"{where}.tool_calls")
    return parts


def _read_call(call: Any, where: str) -> Part:
    if not isinstance(call, dict):
        raise InvalidMessage(f"{where}: {type_name(call)} where an object belongs")
    body, slot = call_slots(call)
    inner = call.get(body)
    if not isinstance(inner, dict):
        raise InvalidMessage(f"{where}.{body}: {type_name(inner)} where an object belongs")
    call_id = string_at(call, "id", where)
    name = string_at(inner, "name", f"{where}.{body}")
    text = string_at(inner, slot, f"{where}.{body}", empty=True)
    template = {**call, "id": None, body: {**inner, "name": None, slot: None}}
    default = list(call) == ["id", "type", "function"] and call["type"] == "function" and list(inner) == ["name", "arguments"]
    return Part(kind=Kind.CALL, text=text, call=call_id, name=name, extra=None if default else pack({"call": template}))


def write(message: Message) -> dict[str, Any]:
    """Return the dict that `read` made this message from, exactly.

    Raises:
        InvalidMessage: the message is not as `read` gave it.
    """
    extra = unpack(message.extra)
    turn = Turn(message.role, message.parts, extra)
    out = extra.get("dict") or _default(message.role)
    if turn.result is not None:
        out["tool_call_id"] = turn.result.call
        out["content"] = _result_content(turn.result, turn.parts[1:])
        return out
    content, calls = _fill_asides(turn, out)
    shape = extra.get("shape", "text")
    if shape in ("list", "items"):
        out["content"] = [_write_block(part) for part in content] or None
    elif shape == "text":
        out["content"] = only_text(content)
    if calls:
        out["tool_calls"] = [_write_call(part) for part in calls]
    return out


def _result_content(result: Part, attached: Sequence[Part]) -> str | list[dict[str, Any]]:
    layout = unpack(result.extra).get("layout")
    blocks = None if layout is None else write_blocks(result.text, layout, attached, _write_block)
    return result.text if blocks is None else blocks


def _fill_asides(turn: Turn, out: dict[str, Any]) -> tuple[list[Part], list[Part]]:
    """Put the parts that stand beside the content back under their keys; return the content parts and the calls."""
    content: list[Part] = []
    calls: list[Part] = []
    for part in turn.parts:
        at = unpack(part.extra).get("at")
        if at in ASIDES:
            out[at] = unpack(part.text) if part.kind is Kind.OPAQUE else part.text
        elif part.kind is Kind.CALL:
            calls.append(part)
        else:
            content.append(part)
    return content, calls


def _write_block(part: Part) -> dict[str, Any]:
    if part.kind is Kind.OPAQUE:
        return unpack(part.text)
    block = block_template(part)
    if part.kind is Kind.IMAGE:
        block = block or {"type": "image_url", "image_url": {"url": None}}
        block["image_url"]["url"] = part.text
        return block
    block = block or {"type": "text", "text": None}
    if part.kind is not Kind.REASONING:
        block[block["type"]] = part.text
    return block


def _write_call(part: Part) -> dict[str, Any]:
    call = block_template(part, "call") or {"id": None, "type": "function", "function": {"name": None, "arguments": None}}
    body, slot = call_slots(call)
    call["id"] = part.call
    call[body]["name"] = part.name
    call[body][slot] = part.text
    return call


def render(messages: Sequence[Message], *, apart: bool = False) -> list[dict[str, Any]]:
    """Return what OpenAI's chat API accepts for these messages, whatever form they came in.

    Parts of a message may be missing. Blocks and reasoning of another provider are left out. What is attached to tool results
    follows the results, in a user message that names the call. A message without anything that can be rendered is left out, and
    so is one of thinking alone. The same messages give the same bytes.

    Args:
        apart: for OpenAI's responses, whose items have an order: each of a message's items becomes a message.
    """
    out: list[dict[str, Any]] = []
    images: list[dict[str, Any]] = []
    queue = map(_without_foreign, turns(messages))
    for turn in chain.from_iterable(map(_items, queue)) if apart else queue:
        if _is_plain(turn) and not images:
            out.append({"role": turn.role.value, "content": turn.parts[0].text})
            continue
        if turn.result is not None:
            out.append(_render_result(turn, images))
            continue
        if images:
            out.append({"role": "user", "content": images})
            images = []
        rendered = _render_assistant(turn) if turn.role is Role.ASSISTANT else _render_other(turn)
        if rendered is not None:
            out.append(rendered)
    if images:
        out.append({"role": "user", "content": images})
    return out


def _is_plain(turn: Turn) -> bool:
    """Whether a turn is one text and nothing else, as most are: everything below makes the same of it, and takes longer."""
    part = turn.parts[0]
    bare = len(turn.parts) == 1 and part.extra is None and len(turn.extra) <= ("form" in turn.extra)
    return bare and part.kind in PROSE and turn.role is not Role.TOOL


def _without_foreign(turn: Turn) -> Turn:
    """Return a turn without the leftovers of another form."""
    if turn.form == "chat":
        return turn
    parts = (part if part.extra is None else msgspec.structs.replace(part, extra=None) for part in turn.parts)
    return Turn(turn.role, tuple(parts), {})


def _items(turn: Turn) -> list[Turn]:
    """Return a turn of the shape "items", item by item; any other as it is."""
    if turn.extra.get("shape") != "items":
        return [turn]
    groups: list[tuple[dict[str, Any] | None, list[Part]]] = []
    for part in turn.parts:
        item = unpack(part.extra).get("item")
        text = part.kind in PROSE
        if groups and text and item is None and groups[-1][1][-1].kind in PROSE:
            groups[-1][1].append(part)
        else:
            groups.append(({**_default(turn.role), **(item or {})} if text else None, [part]))
    return [
        Turn(turn.role, tuple(parts), {"form": "chat", "shape": "list", **({"dict": template} if template else {})})
        for template, parts in groups
    ]


def _template(turn: Turn, role: Role) -> dict[str, Any]:
    """Return the message's own template, unless it has another role than the message."""
    template: dict[str, Any] | None = turn.extra.get("dict")
    if template is not None and ROLES.get(template["role"]) is turn.role:
        return template
    return _default(role)


def _render_result(turn: Turn, images: list[dict[str, Any]]) -> dict[str, Any]:
    result, attached = turn.parts[0], turn.parts[1:]
    out = _template(turn, Role.TOOL)
    out["tool_call_id"] = call = safe_id(result.call, CHAT_ID)
    content = _result_content(result, attached)
    plain_text = isinstance(content, str) or not content or any(block["type"] != "text" for block in content)
    out["content"] = result.text if plain_text else content
    visible = [part for part in attached if part.kind is Kind.IMAGE or turn.form == "chat"]
    if visible:
        images.append({"type": "text", "text": IMAGES.format(call)})
        images.extend(_write_block(part) for part in visible)
    return out


def _render_other(turn: Turn) -> dict[str, Any] | None:
    """Return a system or user message, or a tool message without a result (the old `function` role)."""
    role = Role.USER if turn.role is Role.TOOL else turn.role
    out = _template(turn, role)
    if out["role"] == "tool":
        out = _default(role)
    shape = turn.extra.get("shape", "text")
    kinds = PROSE
    if role is Role.USER and out["role"] == "user":
        kinds |= {Kind.IMAGE, Kind.OPAQUE} if turn.form == "chat" else {Kind.IMAGE}
    parts = [part for part in turn.parts if part.kind in kinds]
    if not parts:
        return None
    if shape == "void" and out["role"] == "function" and not any(part.text for part in parts):
        return out
    if (shape != "list" and len(parts) == 1 and parts[0].kind in PROSE) or out["role"] == "function":
        out["content"] = "\n".join(part.text for part in parts)
    else:
        out["content"] = [_write_block(part) for part in parts]
    out.pop("tool_calls", None)
    return out


def _render_assistant(turn: Turn) -> dict[str, Any] | None:
    native = turn.form == "chat"
    out = _template(turn, Role.ASSISTANT)
    content, calls = _fill_asides(turn, out)
    parts = [part for part in content if part.kind in PROSE or (native and part.kind in (Kind.OPAQUE, Kind.REASONING))]
    shape = turn.extra.get("shape", "text")
    if shape == "void":
        parts = [part for part in parts if part.text or part.kind is Kind.REASONING]
    if parts and (shape in ("list", "items") or len(parts) > 1):
        out["content"] = [_write_block(part) for part in parts]
    elif parts:
        out["content"] = parts[0].text
    if calls:
        out["tool_calls"] = [_render_call(part) for part in calls]
    else:
        out.pop("tool_calls", None)
    if not native and not parts and not calls:
        return None
    voiced = calls or any(out.get(key) is not None for key in UNVOICED)
    if not voiced and is_thinking_alone(out):
        return None
    if not voiced and not out.get("content"):
        out["content"] = ""
    elif out.get("content") == []:
        out["content"] = None
    return out


def is_thinking_alone(message: dict[str, Any]) -> bool:
    """Whether an assistant's message has thoughts, and neither content nor calls: providers refuse it, or show the model an
    empty answer of its own."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(str(block.get("text", block["type"])) for block in content)
    asides = any(message.get(key) is not None for key in UNVOICED)
    return any(message.get(key) for key in THOUGHTS) and not (content or asides or message.get("tool_calls"))


def _render_call(part: Part) -> dict[str, Any]:
    call = _write_call(part)
    call["id"] = safe_id(part.call, CHAT_ID)
    call.setdefault("type", "function")
    call[call_slots(call)[0]]["name"] = safe_name(part.name)
    return call


def tools(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the `tools` argument of a chat request."""
    return [
        {"type": "function", "function": {"name": spec.name, "description": spec.description, "parameters": spec.parameters}}
        for spec in specs
    ]


def request_fields(model: str, request: Request, host: str | None) -> dict[str, Any]:
    """Return the fields of a streamed chat request to a host, without `request.options`.

    OpenAI itself takes the cap of the reply under a newer name.
    """
    return {
        "model": model,
        "messages": list(request.messages),
        "stream": True,
        "stream_options": {"include_usage": True},
        "max_completion_tokens" if host == "api.openai.com" else "max_tokens": request.max_tokens,
        **optional_fields(request),
    }


def optional_fields(request: Request) -> dict[str, Any]:
    """Return the fields that a request may lack: tools, temperature, seed, and the schema of the reply."""
    fields: dict[str, Any] = {}
    if request.tools:
        fields["tools"] = tools(request.tools)
    if request.temperature is not None:
        fields["temperature"] = request.temperature
    if request.seed is not None:
        fields["seed"] = request.seed
    if request.schema is not None:
        schema = {"name": "reply", "schema": request.schema, "strict": True}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    return fields


def read_usage(usage: Any) -> Tokens | None:
    """Return the figures of a chat completion's `usage`, or None if it lacks the prompt or the reply, or is impossible."""
    counts = counted(usage)
    details = counts.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else details
    prompt: Any = counts.get("prompt_tokens")
    reply: Any = counts.get("completion_tokens")
    tokens = Tokens(prompt=prompt, reply=reply, cached=0 if cached is None else cached)
    return tokens if tokens.sound else None

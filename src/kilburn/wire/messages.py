"""Anthropic's messages form: read a dict, rebuild it exactly, render for the API.

One dict of this form may become several messages, because tool results travel in user messages. What
`read` cannot put into parts is kept as a template in `extra`: the original block with its texts taken out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from kilburn.errors import InvalidMessage
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Request, ToolSpec
from kilburn.wire.parts import block_template, claim_call, kind_at, only_text, read_blocks, read_text, role_at, write_blocks
from kilburn.wire.plain import load_object, pack, string_at, type_name, unpack
from kilburn.wire.quotation import quote
from kilburn.wire.sent import FAILED, FUNCTION_OUTPUT, OPENING, UNSHOWN, is_sent
from kilburn.wire.turns import MESSAGES_ID, PROSE, Turn, safe_id, safe_name, turns

_ROLES = {"system": Role.SYSTEM, "user": Role.USER, "assistant": Role.ASSISTANT}


def read(source: dict[str, Any], where: str = "message") -> list[Message]:
    """Return the messages in a dict of this form, in order. Tool results are separated from what stands around them. `source`
    is plain data (see `kilburn.wire.plain`).

    Raises:
        InvalidMessage: unknown role, content or a block of the wrong type, a call or result without id.
        DuplicateCall: two calls of the message have one id.
    """
    role = role_at(source, _ROLES, "messages", where)
    content = source.get("content")
    extra: dict[str, Any] = {"form": "messages"}
    if role is Role.SYSTEM and "content" not in source:
        # It may have settings for what follows, and no text.
        bare = pack({**extra, "shape": "bare", "dict": source})
        return [Message(role=role, parts=(Part(kind=Kind.TEXT, text=""),), extra=bare)]
    if list(source) != ["role", "content"]:
        extra["dict"] = {**source, "content": None if content else content}
    if isinstance(content, list):
        extra["shape"] = "list" if content else "void"
        if content:
            return _segments(content, role, extra, where)
        content = ""
    elif not isinstance(content, str):
        raise InvalidMessage(f"{where}.content: {type_name(content)} where a string or a list of blocks belongs")
    return [Message(role=role, parts=(Part(kind=Kind.TEXT, text=content),), extra=pack(extra))]


def _segments(content: list[Any], role: Role, extra: dict[str, Any], where: str) -> list[Message]:
    runs: list[tuple[Role, list[Part]]] = []
    calls: set[str | None] = set()
    answers: set[str | None] = set()
    for index, block in enumerate(content):
        place = f"{where}.content[{index}]"
        parts = _read_block(block, place)
        first = parts[0]
        _check_place(first, role, calls if first.kind is Kind.CALL else answers, place)
        speaker = Role.TOOL if first.kind is Kind.RESULT else role
        if runs and runs[-1][0] is speaker:
            runs[-1][1].extend(parts)
        else:
            runs.append((speaker, parts))
    messages: list[Message] = []
    for index, (speaker, parts) in enumerate(runs):
        fields = extra if index == 0 else {"form": "messages", "shape": "list"}
        more = {"more": True} if index < len(runs) - 1 else {}
        messages.append(Message(role=speaker, parts=tuple(parts), extra=pack({**fields, **more})))
    return messages


def _check_place(part: Part, role: Role, ids: set[str | None], where: str) -> None:
    if part.kind is Kind.CALL:
        if role is not Role.ASSISTANT:
            raise InvalidMessage(f"{where}: a tool_use block in a {role} message", advice="only the assistant calls tools")
        claim_call(part.call, ids, where)
    elif part.kind is Kind.RESULT:
        if role is not Role.USER:
            raise InvalidMessage(f"{where}: a tool_result block in a {role} message", advice="results belong in a user message")
        if part.call in ids:
            raise InvalidMessage(f"{where}: two results for the call {str(part.call)[:80]!r}", advice="give each call one result")
        ids.add(part.call)


def _read_block(block: Any, where: str) -> list[Part]:
    """Return the part of a block, followed by the attached parts of a tool result."""
    return _read_result(block, where) if kind_at(block, where) == "tool_result" else [_read_leaf(block, where)]


def _read_leaf(block: Any, where: str) -> Part:
    kind = kind_at(block, where)
    if kind == "redacted_thinking":
        return Part(kind=Kind.REASONING, text="", extra=pack({"block": block}))
    if kind in ("text", "thinking"):
        return read_text(block, kind, where, Kind.TEXT if kind == "text" else Kind.REASONING)
    if kind == "image":
        return _read_image(block)
    if kind == "tool_use":
        return _read_call(block, where)
    return Part(kind=Kind.OPAQUE, text=pack(block))


def _read_call(block: dict[str, Any], where: str) -> Part:
    call, name, arguments = string_at(block, "id", where), string_at(block, "name", where), block.get("input")
    if not isinstance(arguments, dict):
        raise InvalidMessage(f"{where}.input: {type_name(arguments)} where an object belongs")
    default = list(block) == ["type", "id", "name", "input"]
    template = {**block, "id": None, "name": None, "input": None}
    return Part(kind=Kind.CALL, text=pack(arguments), call=call, name=name, extra=None if default else pack({"block": template}))


def _read_image(block: dict[str, Any]) -> Part:
    """Return an image as an URL; one whose source says more than that stays OPAQUE."""
    source = block.get("source")
    if isinstance(source, dict) and source.get("type") == "url" and isinstance(source.get("url"), str):
        text, slot, keys = source["url"], "url", ["type", "url"]
        if text.startswith("data:"):
            return Part(kind=Kind.OPAQUE, text=pack(block))
    elif isinstance(source, dict) and source.get("type") == "base64" and _sound_base64(source):
        text, slot, keys = f"data:{source['media_type']};base64,{source['data']}", "data", ["type", "media_type", "data"]
    else:
        return Part(kind=Kind.OPAQUE, text=pack(block))
    default = list(block) == ["type", "source"] and list(source) == keys
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
        raise InvalidMessage(f"{where}.content: {type_name(content)} where a string or a list of blocks belongs")
    if list(block) != ["type", "tool_use_id", "content"]:
        extra["block"] = template
    return [Part(kind=Kind.RESULT, text=text, call=call, extra=pack(extra) if extra else None), *attached]


def write(messages: Sequence[Message]) -> dict[str, Any]:
    """Return the dict that `read` made these messages from, exactly.

    Raises:
        InvalidMessage: the messages are not as `read` gave them.
    """
    first = messages[0]
    extra = unpack(first.extra)
    role = Role.USER if first.role is Role.TOOL else first.role
    out: dict[str, Any] = extra.get("dict") or {"role": role.value, "content": None}
    shape = extra.get("shape", "text")
    if shape == "text":
        out["content"] = only_text(first.parts)
    elif shape == "list":
        out["content"] = [block for message in messages for block in _write_parts(message.parts)]
    elif shape == "void":
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
            blocks.append(_write_result(part, parts[index + 1 : end]))
        else:
            blocks.append(_write_block(part))
        index = end
    return blocks


def _write_result(part: Part, attached: Sequence[Part]) -> dict[str, Any]:
    """Return the tool_result block of a RESULT of this form and the parts attached to it.

    If its text was replaced, or attached parts are missing, the block has one text and the parts that are left.
    """
    extra = unpack(part.extra)
    block: dict[str, Any] = extra.get("block") or {"type": "tool_result", "tool_use_id": None, "content": None}
    block["tool_use_id"] = part.call
    if extra.get("void") and not part.text and not attached:
        return block
    layout = extra.get("layout")
    content: Any = None if layout is None else write_blocks(part.text, layout, attached, _write_block)
    if content is None:
        prose = [{"type": "text", "text": part.text}] if part.text else []
        content = [*prose, *(_write_block(item) for item in attached)] if attached else part.text
    block["content"] = content
    return block


def _write_block(part: Part) -> dict[str, Any]:
    """Return the block of a part of this form; for a tool result see `_write_result`."""
    if part.kind is Kind.OPAQUE:
        return unpack(part.text)
    block = block_template(part)
    if part.kind is Kind.CALL:
        block = block or {"type": "tool_use", "id": None, "name": None, "input": None}
        block["id"], block["name"], block["input"] = part.call, part.name, _call_input(part.text)
        return block
    if part.kind is Kind.IMAGE:
        return _write_image(part.text, block)
    block = block or {"type": "text", "text": None}
    if block["type"] != "redacted_thinking":
        block[block["type"]] = part.text
    return block


def _call_input(arguments: str) -> dict[str, Any]:
    """Return a call's arguments as an object. Arguments that are not a JSON object are put under the key `_raw`, as text."""
    if not arguments.strip():
        return {}
    value = load_object(arguments)
    return {"_raw": arguments} if value is None else value


def _write_image(url: str, block: dict[str, Any] | None) -> dict[str, Any]:
    """Return the image block of a URL: a data URL goes as base64, any other as it is.

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


_MEDIA = ("image/jpeg", "image/png", "image/gif", "image/webp")
THOUGHTS = ("thinking", "redacted_thinking")
SETTINGS = ("clear_at", "output_config")
"""Keys of a system message among the others, besides role and content."""
SERVED = ("server_tool_use", "mcp_tool_use")
BREAKPOINTS = 4
"""Anthropic refuses a request with more cache breakpoints than this."""
CACHE_MARK = {"type": "ephemeral"}
"""The value of `cache_control` of a breakpoint."""

Blocks = list[dict[str, Any]]


def render(messages: Sequence[Message]) -> tuple[str | Blocks | None, list[dict[str, Any]]]:
    """`system` and `messages` as Anthropic's API accepts them, whatever form the messages came in.

    Parts of a message may be missing. Blocks and reasoning of another provider are left out, as is
    text without a visible character. System messages at the start become `system` (None without
    any); later ones stay what they are if they came in this form and still stand where the API takes
    them, and otherwise become user text in `<system>` tags. Of more than four cache breakpoints the
    last four stay. The same messages give the same bytes.
    """
    queue = turns(messages)
    start = next((index for index, turn in enumerate(queue) if turn.role is not Role.SYSTEM), len(queue))
    system = _system(queue[:start])
    groups = _merge([_turn_message(turn) for turn in queue[start:]])
    out = _in_order(_placed(groups))
    if queue and (not out or out[0].role == "assistant"):
        out.insert(0, Spoken("user", OPENING))
    rendered = [
        {"role": message.role, **({"content": message.content} if message.content else {}), **message.more} for message in out
    ]
    for block in marked([system, *(message.content for message in out)])[:-BREAKPOINTS]:
        del block["cache_control"]
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
        return _write_block(part)
    block: dict[str, Any] = {"type": "text", "text": part.text}
    carried = block_template(part) or {}
    if isinstance(carried.get("cache_control"), dict):
        block["cache_control"] = carried["cache_control"]
    return block


class Spoken(NamedTuple):
    """A message while it is rendered; `more` is what a system message has besides."""

    role: str
    content: str | Blocks
    more: Mapping[str, Any] = MappingProxyType({})


def _turn_message(turn: Turn) -> Spoken:
    """Return one turn on its own."""
    if turn.result is not None:
        return Spoken("user", _result_blocks(turn))
    if turn.role is Role.SYSTEM and turn.form == "messages":
        more = {key: value for key, value in turn.extra.get("dict", {}).items() if key in SETTINGS}
        parts = [part for part in turn.parts if part.kind is Kind.OPAQUE or part.text.strip()]
        plain = turn.extra.get("shape", "text") == "text" and len(parts) == 1
        return Spoken("system", parts[0].text if plain else [_write_block(part) for part in parts], more)
    if turn.role is Role.SYSTEM:
        return Spoken("user", _framed(_texts(turn)))
    role = "assistant" if turn.role is Role.ASSISTANT else "user"
    blocks = [block for part in turn.parts for block in _block(part, turn, role)]
    listed = turn.form is not None and turn.extra.get("shape") == "list"
    if not listed and len(blocks) == 1 and list(blocks[0]) == ["type", "text"]:
        return Spoken(role, str(blocks[0]["text"]))
    return Spoken(role, blocks)


def _framed(texts: Blocks) -> Blocks:
    """Return what the system says, as a user's text."""
    return [{**block, "text": f"<system>\n{block['text']}\n</system>"} for block in texts]


def _placed(groups: Sequence[Spoken]) -> list[Spoken]:
    """System messages where the API takes them: behind the user, and before the assistant or at the end."""
    out = []
    for index, message in enumerate(groups):
        previous, following = groups[index - 1 : index], groups[index + 1 : index + 2]
        stays = previous and previous[0].role == "user" and (not following or following[0].role == "assistant")
        if message.role == "system" and not stays:
            message = Spoken("user", _framed([block for block in as_blocks(message.content) if block["type"] == "text"]))
        out.append(message)
    return _merge(out)


def _block(part: Part, turn: Turn, role: str) -> Blocks:
    native = turn.form == "messages"
    if part.kind in PROSE and turn.role is Role.TOOL and part.text.strip():
        return [{"type": "text", "text": quote(FUNCTION_OUTPUT, part.text)}]
    if part.kind in PROSE:
        return [_text(part, turn)] if part.text.strip() else []
    if part.kind is Kind.IMAGE:
        return [_image(part, native)] if role == "user" else [{"type": "text", "text": UNSHOWN}]
    if part.kind is Kind.CALL and role == "assistant":
        block = _write_block(part) if native else {"type": "tool_use", "id": "", "name": "", "input": _call_input(part.text)}
        block["id"], block["name"] = safe_id(part.call, MESSAGES_ID), safe_name(part.name)
        return [block]
    return [_write_block(part)] if is_sent(part, turn.role, turn.form, "messages") else []


def _image(part: Part, native: bool) -> dict[str, Any]:
    if native:
        return _write_block(part)
    media, mark, _ = part.text[5:].partition(";base64,") if part.text.startswith("data:") else ("", "", "")
    displayable = (mark and media in _MEDIA) or part.text.startswith(("https://", "http://"))
    return _write_image(part.text, None) if displayable else {"type": "text", "text": UNSHOWN}


def _result_blocks(turn: Turn) -> Blocks:
    """Return a tool_result block, followed by what the API does not accept inside it."""
    result, attached = turn.parts[0], turn.parts[1:]
    native = turn.form == "messages"
    if native:
        block = _write_result(result, attached)
    else:
        images = [_image(part, native) for part in attached if part.kind is Kind.IMAGE]
        prose = [{"type": "text", "text": result.text}]
        block = {"type": "tool_result", "tool_use_id": "", "content": [*prose, *images] if images else result.text}
        if turn.form is None and unpack(result.extra).get("is_error") is True:
            block["is_error"] = True
    block["tool_use_id"] = safe_id(result.call, MESSAGES_ID)
    content = block.get("content")
    if content is None:
        block.pop("content", None)
    outside: Blocks = []
    if isinstance(content, list):
        block["content"] = content = [item for item in content if item["type"] != "text" or item["text"].strip()]
        if block.get("is_error"):
            outside = [item for item in content if item["type"] != "text"]
            block["content"] = content = [item for item in content if item["type"] == "text"]
    if block.get("is_error") and not content:
        block["content"] = FAILED
    return [block, *outside]


def _merge(spoken: Sequence[Spoken]) -> list[Spoken]:
    """Neighbouring messages of one role, joined; empty messages are left out."""
    merged: list[Spoken] = []
    # What the last of them is joined of; None as long as it is one message.
    joined: Blocks | None = None
    thinks = False
    for message in spoken:
        if not message.content and not message.more:
            continue
        if not merged or merged[-1].role != message.role:
            merged.append(message)
            joined = None
            continue
        if joined is None:
            joined = [*as_blocks(merged[-1].content)]
            thinks = _thinks(joined)
        thinks = _join(joined, as_blocks(message.content), thinks)
        merged[-1] = Spoken(message.role, joined, {**merged[-1].more, **message.more})
    return merged


def _join(previous: Blocks, blocks: Blocks, thinks: bool) -> bool:
    """Add the blocks of another message of the same role. If these begin with thinking, and the ones before have none, it is
    moved to the beginning, because calls must follow their thinking. Returns whether there is thinking now."""
    lead = next((at for at, block in enumerate(blocks) if block["type"] not in THOUGHTS), len(blocks))
    if not thinks:
        previous[:0], blocks = blocks[:lead], blocks[lead:]
    previous += blocks
    return thinks or lead > 0 or _thinks(blocks)


def _thinks(blocks: Blocks) -> bool:
    return any(block["type"] in THOUGHTS for block in blocks)


def as_blocks(content: str | Blocks) -> Blocks:
    """Return a message's content as a list of blocks, also where it was one string."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _in_order(groups: Sequence[Spoken]) -> list[Spoken]:
    """Results first, without halves of server-side calls, and without thinking at the end."""
    blocks = [
        block
        for message in groups
        if message.role == "assistant" and isinstance(message.content, list)
        for block in message.content
    ]
    started = {block.get("id") for block in blocks if block["type"] in SERVED}
    ended = {block.get("tool_use_id") for block in blocks if _is_served_result(block)}
    ordered: list[Spoken] = []
    for index, message in enumerate(groups):
        content = message.content
        if isinstance(content, str):
            ordered.append(message)
            continue
        if message.role != "assistant":
            # What was moved out of one result must not stand before the next one.
            ordered.append(message._replace(content=sorted(content, key=lambda block: block["type"] != "tool_result")))
            continue
        if index == len(groups) - 1:
            ended = started
        retained = [
            block
            for block in content
            if not (block["type"] in SERVED and block.get("id") not in ended)
            and not (_is_served_result(block) and block.get("tool_use_id") not in started)
        ]
        while retained and retained[-1]["type"] in THOUGHTS:
            retained.pop()
        ordered.append(message._replace(content=retained))
    return _merge(ordered)


def _is_served_result(block: dict[str, Any]) -> bool:
    return bool(block["type"].endswith("_tool_result"))


def marked(contents: Sequence[str | Blocks | None]) -> Blocks:
    """Return the blocks that have a cache breakpoint, those inside of a tool's result too, in their order."""
    marks: Blocks = []
    for content in contents:
        for block in content if isinstance(content, list) else ():
            inner = block.get("content") if block["type"] == "tool_result" else None
            every = (*(inner if isinstance(inner, list) else ()), block)
            marks += [item for item in every if item.get("cache_control") is not None]
    return marks


def tools(specs: Sequence[ToolSpec]) -> list[dict[str, Any]]:
    """Return the `tools` argument of a messages request."""
    return [{"name": spec.name, "description": spec.description, "input_schema": spec.parameters} for spec in specs]


def request_fields(model: str, request: Request, *, cache: bool) -> dict[str, Any]:
    """Return the fields of a request as the SDK takes them; those that the SDK does not know are in `extra_body`.

    Args:
        cache: whether the system prompt and the ends of the last two messages get cache breakpoints.
    """
    messages, system = list(request.messages), request.system
    if cache:
        # A copy that was recalled for the question stands in the last message, and is not in the next prompt.
        for index in range(len(messages))[-2:]:
            messages[index] = {**messages[index], "content": _with_breakpoint(messages[index]["content"])}
        system = system and _with_breakpoint(system)
    fields: dict[str, Any] = {"model": model, "messages": messages, "max_tokens": request.max_tokens}
    if system:
        fields["system"] = system
    if request.tools:
        fields["tools"] = tools(request.tools)
    if request.schema is not None:
        fields["output_config"] = {"format": {"type": "json_schema", "schema": request.schema}}
    if request.temperature is not None:
        fields["extra_body"] = {"temperature": request.temperature}
    if request.options:
        fields["extra_body"] = {**fields.get("extra_body", {}), **request.options}
    return fields


def _with_breakpoint(content: str | Blocks) -> str | Blocks:
    """Return a copy of the content with a cache breakpoint on the last block that may have one."""
    blocks = list(as_blocks(content))
    for index in range(len(blocks) - 1, -1, -1):
        empty = blocks[index].get("type") == "text" and not blocks[index].get("text")
        if not empty and blocks[index].get("type") not in THOUGHTS:
            blocks[index] = {"cache_control": CACHE_MARK, **blocks[index]}
            return blocks
    return content

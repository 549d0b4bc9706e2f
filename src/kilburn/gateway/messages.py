"""Anthropic's messages as the gateway speaks them."""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from kilburn.gateway.events import ServerEvent, written
from kilburn.gateway.form import Form, ParsedRequest, Reading, decode_object, is_ours, usage_or_zero, with_tools
from kilburn.gateway.problems import anthropic_error
from kilburn.kernel.render import render
from kilburn.message import Message
from kilburn.model import Delta, Reply, Request, Tokens, ToolSpec
from kilburn.wire import messages as wire
from kilburn.wire.attached import pack_attached, restore_attached
from kilburn.wire.form import parse
from kilburn.wire.messages_stream import STOP_REASONS, ReplyBlocks
from kilburn.wire.oddities import messages_message
from kilburn.wire.plain import counted

LONG_TTL = b'"1h"'
"""The longest lifetime of a cache mark; the other one is 5 minutes."""

_MARKS = re.compile(rb'"cache_control"\s*:\s*(\{[^{}]*\})')

_raws = msgspec.json.Decoder(list[msgspec.Raw]).decode


class MessagesReading(Reading):
    """Reads the events of a message, or whole messages."""

    def __init__(self, faults: bool, *, holds: bool = True) -> None:
        super().__init__(faults, holds=holds)
        self._body: dict[str, Any] = {}
        self._content: list[dict[str, Any]] = []
        self._theirs = False

    def _begin(self) -> None:
        self._blocks = ReplyBlocks("the upstream")
        self._last: dict[str, Any] = {}

    def _feed(self, event: ServerEvent) -> bytes:
        data = decode_object(event.data)
        kind = data.get("type")
        if kind == "error" or (kind is None and data.get("error")):
            self.failed = data
            return event.raw
        self.spoke = self.spoke or kind != "ping"
        self.deltas = list(self._blocks.feed(data))
        if kind == "message_start":
            message = data.get("message")
            self._count(counted(message.get("usage") if isinstance(message, dict) else None))
        elif kind == "message_delta":
            self._count(counted(data.get("usage")))
            self.ended = self.ended or bool((data.get("delta") or {}).get("stop_reason"))
        elif kind == "message_stop":
            self.ended = True
        self._ends = kind in ("message_delta", "message_stop")
        return self._seen(data, str(kind), event.raw) if self.faults else event.raw

    def _count(self, usage: Mapping[str, Any]) -> None:
        """Add the figures of an event. The newest figure counts, but some servers repeat one as 0 at the end."""
        self.usage.update({key: value for key, value in usage.items() if value or key not in self.usage})

    def _seen(self, data: dict[str, Any], kind: str, raw: bytes) -> bytes:
        if kind == "message_start":
            return b"" if self.rounds else raw
        if kind == "message_delta":
            self._last = data
        if self._ends:
            return b"" if self.changed else raw
        index = data.get("index")
        if not isinstance(index, int):
            return raw
        if kind == "content_block_start":
            block = {"type": "text", **data["content_block"]}
            mine = block["type"] == "tool_use" and is_ours(block)
            self._theirs = self._theirs or (block["type"] == "tool_use" and not mine)
            self._slot(index, mine)
        elif index not in self._slots and kind == "content_block_delta":  # its beginning is missing
            self._slot(index, False)
        slot = self._slots.get(index, index)
        if slot is None:
            return b""
        return written({**data, "index": slot}, kind) if self.changed and slot != index else raw

    def _reply(self) -> Reply:
        self._check(self._blocks.said, any(slot is None for slot in self._slots.values()))
        return self._blocks.reply(ended=True)

    def _take(self, body: bytes) -> None:
        self._body = {}
        body_fields = decode_object(body)
        if body_fields.get("type") == "error" or (body_fields.get("error") and "content" not in body_fields):
            self.failed = body_fields
            return
        self.usage = counted(body_fields.get("usage"))
        list(self._blocks.feed({"type": "message_start", "message": {"usage": body_fields.get("usage")}}))
        content = body_fields.get("content")
        blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for index, block in enumerate(blocks):
            self.deltas += self._blocks.feed({"type": "content_block_start", "index": index, "content_block": block})
            if not (block.get("type") == "tool_use" and is_ours(block)):
                self._content.append(block)
            else:
                self.changed = self.changed or self.faults
        list(self._blocks.feed({"type": "message_delta", "delta": {"stop_reason": body_fields.get("stop_reason")}, "usage": {}}))
        self._body, self.ended = {**body_fields, "content": blocks}, True

    def _end(self) -> bytes:
        if self._raw:
            stop = self._body.get("stop_reason")
            if stop == "tool_use" and not any(block.get("type") == "tool_use" for block in self._content):
                stop = "end_turn"
            return msgspec.json.encode(
                {**self._body, "content": self._content, "stop_reason": stop, "usage": self._reported_usage()}
            )
        delta = dict(self._last.get("delta") or {"stop_reason": "end_turn", "stop_sequence": None})
        if delta.get("stop_reason") == "tool_use" and not self._theirs:
            delta["stop_reason"] = "end_turn"
        last = {**self._last, "type": "message_delta", "delta": delta, "usage": self._reported_usage()}
        return written(last, "message_delta") + written({"type": "message_stop"}, "message_stop")


class MessagesForm(Form):
    """`/v1/messages`."""

    name: ClassVar[str] = "messages"
    path: ClassVar[str] = "/messages"
    rendered: ClassVar[str] = "messages"
    caps: ClassVar[tuple[str, ...]] = ("max_tokens",)
    reader: ClassVar[type[Reading]] = MessagesReading

    def _read(self, source: dict[str, Any]) -> list[Message]:
        return wire.read(messages_message(source))

    def splice(self, req: ParsedRequest, messages: Sequence[dict[str, Any]], specs: Sequence[ToolSpec]) -> bytes:
        """See `Form`."""
        fields: dict[str, Any] = {**req.fields}
        marks = sum(raw.count(b'"cache_control"') for raw in req.beside) + ("cache_control" in fields)
        lead = getattr(messages, "system", None)  # of the conversation; the client's own system prompt stands beside it
        if lead:
            messages = [{"role": "system", "content": lead}, *messages]
        fields["messages"] = marked(messages, wire.BREAKPOINTS - marks, _cache_mark(req), _marked_blocks(req))
        return msgspec.json.encode(with_tools(fields, wire.tools(specs)))

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """See `Form`."""
        return anthropic_error(status, message, uuid.uuid4().hex[:24])

    def _request(self, fields: dict[str, Any], into: str, cap: int) -> Request:
        messages, system = fields["messages"], fields.get("system")
        if into != "messages":
            texts = [system] if isinstance(system, str) else [block["text"] for block in system or () if "text" in block]
            lead = [{"role": "system", "content": text} for text in texts]
            messages, system = render([*parse(lead), *restore_attached(self.parsed(messages))], into, 0), None
        return self.asking(fields, messages, system, into, cap)

    def writer(self, model: str) -> Callable[[Delta | Reply], list[bytes]]:
        """See `Form`."""
        return _Writer(model).write

    def whole(self, reply: Reply, model: str) -> dict[str, Any]:
        """See `Form`."""
        end = {"stop_reason": STOP_REASONS[reply.finish], "stop_sequence": None, "usage": _usage(reply.usage)}
        return {**_head(model), "content": _blocks(reply), **end}


class _Writer:
    """Writes a model's reply as events; `at` is the index of the block that is open, or of the next one."""

    def __init__(self, model: str) -> None:
        self._message = {**_head(model), "content": [], "stop_reason": None, "stop_sequence": None, "usage": _usage(None)}
        self._begun = False
        self._at = 0
        self._open = ""

    def write(self, piece: Delta | Reply) -> list[bytes]:
        """Return the events of one piece."""
        out = [] if self._begun else [_say("message_start", message=self._message)]
        self._begun = True
        if isinstance(piece, Reply):
            return [*out, *self._end(piece)]
        kind = "thinking" if piece.reasoning else "text"
        if self._open != kind:
            out += self._close()
            block = {"type": kind, kind: "", **({"signature": ""} if piece.reasoning else {})}
            out.append(_say("content_block_start", index=self._at, content_block=block))
            self._open = kind
        delta = {"type": f"{kind}_delta", kind: piece.text}
        return [*out, _say("content_block_delta", index=self._at, delta=delta)]

    def _close(self) -> list[bytes]:
        if not self._open:
            return []
        self._open = ""
        self._at += 1
        return [_say("content_block_stop", index=self._at - 1)]

    def _end(self, reply: Reply) -> list[bytes]:
        out = self._close()
        for block in _blocks(reply):
            if block["type"] == "redacted_thinking":
                out.append(_say("content_block_start", index=self._at, content_block=block))
                self._open = "redacted_thinking"
                out += self._close()
            elif block["type"] == "tool_use":
                text = msgspec.json.encode(block["input"]).decode()
                out.append(_say("content_block_start", index=self._at, content_block={**block, "input": {}}))
                delta = {"type": "input_json_delta", "partial_json": text}
                out.append(_say("content_block_delta", index=self._at, delta=delta))
                self._open = "tool_use"
                out += self._close()
        stop = {"stop_reason": STOP_REASONS[reply.finish], "stop_sequence": None}
        return [*out, _say("message_delta", delta=stop, usage=_usage(reply.usage)), _say("message_stop")]


def _say(kind: str, **data: Any) -> bytes:
    return written({"type": kind, **data}, kind)


def _head(model: str) -> dict[str, Any]:
    return {"id": f"msg_{uuid.uuid4().hex[:24]}", "type": "message", "role": "assistant", "model": model}


def _usage(tokens: Tokens | None) -> dict[str, int]:
    usage = usage_or_zero(tokens)
    return {
        "input_tokens": usage.prompt - usage.cached - usage.written,
        "output_tokens": usage.reply,
        "cache_read_input_tokens": usage.cached,
        "cache_creation_input_tokens": usage.written,
    }


def _blocks(reply: Reply) -> list[dict[str, Any]]:
    rendered = wire.render([reply.message])[1]
    content = rendered[-1]["content"] if rendered and rendered[-1]["role"] == "assistant" else []
    blocks = [*wire.as_blocks(content)]
    if attached := pack_attached(reply.message):
        first = next(at for at, block in enumerate(blocks) if block["type"] == "tool_use")
        blocks.insert(first, {"type": "redacted_thinking", "data": attached})
    return blocks


def _cache_mark(req: ParsedRequest) -> dict[str, str]:
    """Return the cache mark for messages, with the longest `ttl` of the client's marks. It is no longer than that of a mark
    before the messages, or of the automatic mark: the provider refuses a request with such a mark."""
    bounds = [mark for raw in req.beside for mark in _MARKS.findall(raw)]
    bounds += [bytes(req.fields["cache_control"])] if "cache_control" in req.fields else []
    marks = [*bounds, *_MARKS.findall(req.fields["messages"])]
    lasts = any(LONG_TTL in mark for mark in marks) and all(LONG_TTL in mark for mark in bounds)
    return wire.CACHE_MARK | {"ttl": "1h"} if lasts else wire.CACHE_MARK


def _marked_blocks(req: ParsedRequest) -> list[dict[str, Any]]:
    """Return the blocks on which the client placed a cache mark, in order and without the mark."""
    source = bytes(req.fields["messages"])
    if b'"cache_control"' not in source:
        return []
    marked_messages = [decode_object(raw) for raw in _raws(source) if b'"cache_control"' in bytes(raw)]
    blocks = [block for message in marked_messages for block in wire.as_blocks(message.get("content", ""))]
    return [bare for block in blocks if (bare := _bare(block)) != block]


def marked(
    messages: Sequence[dict[str, Any]], room: int, mark: Mapping[str, str], client: Sequence[dict[str, Any]] = ()
) -> list[dict[str, Any]]:
    """The messages with the provider's cache marks: on the last message, on the blocks that the client marked, on the user's
    message before the last, where the last prompt ended, and on the assistant's before the last message, because a copy that was
    brought for the question stands in the last message and is not in the next prompt. As many as there is room for, in that
    order.

    Args:
        room: marks that a request may still have.
        mark: the value of `cache_control`.
        client: the blocks that the client marked (see `_marked_blocks`).
    """
    bare = [_without_marks(message) for message in messages]
    ends = [at for at, message in enumerate(messages) if message["role"] == "user"][-2:][::-1]
    ends += [at - 1 for at in ends[:1] if at and _can_end(messages[at - 1])]
    places = [(at, len(wire.as_blocks(bare[at]["content"])) - 1) for at in ends]
    if client:
        blocks = (
            (at, place, block)
            for at, message in enumerate(bare)
            for place, block in enumerate(wire.as_blocks(message.get("content", "")))
        )
        places[1:1] = [(at, place) for at, place, block in blocks if block in client]
    for at, place in list(dict.fromkeys(places))[: max(room, 0)]:
        bare[at] = _with_mark(bare[at], place, mark)
    return bare


def _can_end(message: dict[str, Any]) -> bool:
    """Return whether a cache mark may stand on the end of a message: an empty text and thinking take none."""
    content = message.get("content", "")
    last = content[-1] if isinstance(content, list) and content else {}
    return bool(content) and message["role"] == "assistant" and last.get("type") not in wire.THOUGHTS


def _without_marks(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content", "")
    if isinstance(content, str) or not any(
        "cache_control" in block or isinstance(block.get("content"), list) for block in content
    ):
        return message
    return {**message, "content": [_bare(block) for block in content]}


def _bare(block: dict[str, Any]) -> dict[str, Any]:
    block = {key: value for key, value in block.items() if key != "cache_control"}
    if block["type"] == "tool_result" and isinstance(block.get("content"), list):
        block["content"] = [{key: value for key, value in item.items() if key != "cache_control"} for item in block["content"]]
    return block


def _with_mark(message: dict[str, Any], place: int, mark: Mapping[str, str]) -> dict[str, Any]:
    blocks = list(wire.as_blocks(message["content"]))
    blocks[place] = {**blocks[place], "cache_control": mark}
    return {**message, "content": blocks}

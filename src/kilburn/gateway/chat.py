"""OpenAI's chat completions as the gateway speaks them."""

from __future__ import annotations

import operator
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import msgspec

from kilburn.errors import InvalidMessage, Refused
from kilburn.gateway.events import ServerEvent, written
from kilburn.gateway.form import Form, ParsedRequest, Reading, decode_object, is_ours, listed, usage_or_zero, with_tools
from kilburn.gateway.problems import openai_error
from kilburn.kernel.render import render
from kilburn.message import Message
from kilburn.model import Delta, Reply, Request, Tokens, ToolSpec
from kilburn.wire import chat as wire
from kilburn.wire.chat_stream import FINISH_REASONS, Assembly
from kilburn.wire.oddities import chat_message
from kilburn.wire.plain import NOT_JSON, counted

END_OF_STREAM = b"data: [DONE]\n\n"


class _Said(msgspec.Struct, forbid_unknown_fields=True):
    """A piece of text, and nothing else."""

    content: str
    role: Literal["assistant"] | None = None
    refusal: None = None


class _Choice(msgspec.Struct, forbid_unknown_fields=True):
    delta: _Said
    index: Literal[0] = 0
    finish_reason: None = None
    logprobs: Any = None


class _Piece(msgspec.Struct):
    """A chunk as nearly all of them are: nothing of it is ours to take out, or to count."""

    choices: tuple[_Choice]
    usage: None = None
    error: None = None


_piece = msgspec.json.Decoder(_Piece).decode
_role = msgspec.json.Decoder(msgspec.defstruct("_Role", [("role", Any, None)])).decode


class ChatReading(Reading):
    """Reads chunks, or whole chat completions."""

    done_ends: ClassVar[bool] = True

    def __init__(self, faults: bool, *, holds: bool = True) -> None:
        super().__init__(faults, holds=holds)
        self._first: dict[str, Any] = {}
        self._texts: list[str] = []
        self._usage_asked = False
        self._body: dict[str, Any] = {}
        self._owed = b""
        """What was said in events that are held back: the client hears it also if the reply goes on."""

    def _begin(self) -> None:
        self._assembly = Assembly("the upstream", whole=True)
        self._plain = True
        """Whether there were only pieces of text so far."""
        self._last: dict[str, Any] | None = None
        self._told = False

    def _feed(self, event: ServerEvent) -> bytes:
        if self._plain and not self.faults:
            try:
                self.deltas = self._assembly.feed_text(_piece(event.data).choices[0].delta.content)
            except msgspec.DecodeError:
                self._plain = False
            else:
                self.spoke = True
                return event.raw
        chunk = decode_object(event.data)
        if chunk.get("error"):
            self.failed = chunk
            return event.raw
        self.spoke = True
        self.deltas = list(self._assembly.feed(chunk))
        self.usage.update(counted(chunk.get("usage")))
        self._ends = any(choice.get("finish_reason") for choice in chunk.get("choices") or ())
        self.ended = self.ended or self._ends
        return self._seen(chunk, event.raw) if self.faults else event.raw

    def _seen(self, chunk: dict[str, Any], raw: bytes) -> bytes:
        """Return the bytes that the client sees of a chunk: no call of ours, and an end only at the end of the reply."""
        if not self._first:
            self._first = {key: value for key, value in chunk.items() if key not in ("choices", "usage")}
        choices = chunk.get("choices") or []
        if chunk.get("usage") is not None:
            self._usage_asked = True
        if not choices:
            return b"" if self.changed else raw
        choice = choices[0]
        delta = dict(choice.get("delta") or {})
        plain = "tool_calls" not in delta and not choice.get("finish_reason") and not chunk.get("usage")
        if delta.get("tool_calls"):
            delta["tool_calls"] = [piece for piece in map(self._call, delta["tool_calls"]) if piece is not None]
            if not delta["tool_calls"]:
                del delta["tool_calls"]
        if choice.get("finish_reason"):
            self._last = choice
        if not self.changed and not self._ends and not self._held:
            return raw
        if self.rounds:
            delta.pop("role", None)
            if delta.get("content") and not self._told and self._texts:
                delta["content"] = "\n\n" + delta["content"]
        self._told = self._told or bool(delta.get("content"))
        visible = b""
        if plain and not self.rounds:
            visible = raw
        elif choice.get("logprobs") or any(value for key, value in delta.items() if key != "role"):
            visible = written({**self._first, "choices": [{**choice, "delta": delta, "finish_reason": None}]})
        if not self.changed:
            self._owed += visible
            return raw
        visible, self._owed = self._owed + visible, b""
        return visible

    def _call(self, piece: dict[str, Any]) -> dict[str, Any] | None:
        index, function = piece.get("index"), piece.get("function")
        if not isinstance(index, int):  # some servers leave it out
            name = isinstance(function, dict) and function.get("name")
            index = -len(self._slots) - 1 if name or not self._slots else min(self._slots)
        slot = self._slots[index] if index in self._slots else self._slot(index, is_ours(function))
        return None if slot is None else {**piece, "index": slot}

    def _reply(self) -> Reply:
        self._check(self._assembly.said, any(slot is None for slot in self._slots.values()))
        reply = self._assembly.reply(ended=True)
        if self.rounds and self._texts and reply.text:
            reply = msgspec.structs.replace(reply, message=_separated(reply.message))
        self._texts += [reply.text] if reply.text else []
        return reply

    def _take(self, body: bytes) -> None:
        self._body = {}
        completion = decode_object(body)
        if completion.get("error") and not completion.get("choices"):
            self.failed = completion
            return
        self.usage = counted(completion.get("usage"))
        for choice in completion.get("choices") or ():
            message = choice.get("message")
            delta = dict(message) if isinstance(message, dict) else {}
            calls = delta.get("tool_calls")
            if calls:
                listed = calls if isinstance(calls, list) else [calls]
                self.changed = self.changed or (self.faults and any(is_ours(call.get("function")) for call in listed))
                delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(listed)]
            whole = {"choices": [{**choice, "index": 0, "delta": delta}], "usage": completion.get("usage")}
            self.deltas = list(self._assembly.feed(whole))
            break
        self._body, self.ended = completion, True

    def _end(self) -> bytes:
        if self._raw:
            return self._whole()
        choice = self._last or {"index": 0}
        finish = choice.get("finish_reason") or "stop"
        if finish == "tool_calls" and not self._next:
            finish = "stop"
        out = self._owed + written({**self._first, "choices": [{"index": 0, "delta": {}, "finish_reason": finish}]})
        if self._usage_asked and self.usage:
            out += written({**self._first, "choices": [], "usage": self._reported_usage()})
        return out + END_OF_STREAM

    def broken(self, error: dict[str, Any]) -> bytes:
        """See `Reading`."""
        return written(error)

    def _whole(self) -> bytes:
        choice = self._body["choices"][0]
        message = dict(choice.get("message") or {})
        calls = message.get("tool_calls") or []
        calls = calls if isinstance(calls, list) else [calls]
        client_calls = [call for call in calls if not is_ours(call.get("function"))]
        message["content"] = "".join(self._texts) or message.get("content")
        message.pop("tool_calls", None)
        finish = choice.get("finish_reason")
        if client_calls:
            message["tool_calls"] = client_calls
        elif finish == "tool_calls":
            finish = "stop"
        body = {**self._body, "choices": [{**choice, "message": message, "finish_reason": finish}]}
        return msgspec.json.encode({**body, "usage": self._reported_usage()} if self.usage else body)


def _separated(message: Message) -> Message:
    """Return a later round's message as the client sees it behind the earlier texts."""
    at = next(index for index, part in enumerate(message.parts) if part.kind == "text" and part.text)
    part = message.parts[at]
    parts = (*message.parts[:at], msgspec.structs.replace(part, text="\n\n" + part.text), *message.parts[at + 1 :])
    return msgspec.structs.replace(message, parts=parts)


class ChatForm(Form):
    """`/v1/chat/completions`."""

    name: ClassVar[str] = "chat"
    path: ClassVar[str] = "/chat/completions"
    rendered: ClassVar[str] = "chat"
    caps: ClassVar[tuple[str, ...]] = ("max_tokens", "max_completion_tokens")
    reader: ClassVar[type[Reading]] = ChatReading

    def split(self, req: ParsedRequest) -> None:
        """See `Form`."""
        messages = listed(req.fields[self.key], self.key)
        at = 0
        while at < len(messages) and self._leads(messages[at]):
            at += 1
        req.lead, req.messages = messages[:at], messages[at:]

    def _leads(self, raw: bytes) -> bool:
        try:
            return _role(raw).role in ("system", "developer")  # type: ignore[attr-defined]
        except NOT_JSON as error:
            raise InvalidMessage(f"messages: {error}") from None

    def _read(self, source: dict[str, Any]) -> list[Message]:
        return [wire.read(chat_message(source))]

    def splice(self, req: ParsedRequest, messages: Sequence[dict[str, Any]], specs: Sequence[ToolSpec]) -> bytes:
        """See `Form`."""
        contents = [_without_thoughts(message) for message in messages]
        if any(map(operator.is_not, contents, messages)) and b'"reasoning' in req.raw:
            contents = [*messages]
        fields: dict[str, Any] = {**req.fields, "messages": [*map(msgspec.Raw, req.lead), *contents]}
        return msgspec.json.encode(with_tools(fields, wire.tools(specs)))

    def error(self, status: int, message: str, code: str | None = None) -> dict[str, Any]:
        """See `Form`."""
        return openai_error(status, message, code)

    def _request(self, fields: dict[str, Any], into: str, cap: int) -> Request:
        if (fields.get("n") or 1) > 1:
            raise Refused("n is above 1, and this model returns a single reply", advice="ask several times")
        prompt = render(self.parsed(fields["messages"]), into, 0) if into != "chat" else None
        schema = (fields.get("response_format") or {}).get("json_schema") or {}
        messages, system = (fields["messages"], None) if prompt is None else (prompt, prompt.system)
        return self.asking(fields, messages, system, into, cap, schema=schema.get("schema"), seed=fields.get("seed"))

    def writer(self, model: str) -> Callable[[Delta | Reply], list[bytes]]:
        """See `Form`."""
        head = _head(model, "chat.completion.chunk")
        starts: list[bool] = []

        def chunk(delta: dict[str, Any], finish: str | None = None) -> bytes:
            return written({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

        def write(piece: Delta | Reply) -> list[bytes]:
            out = [] if starts else [chunk({"role": "assistant", "content": ""})]
            starts.append(True)
            if isinstance(piece, Delta):
                return [*out, chunk({"reasoning_content" if piece.reasoning else "content": piece.text})]
            for index, part in enumerate(piece.calls):
                function = {"name": part.name, "arguments": part.text}
                out.append(chunk({"tool_calls": [{"index": index, "id": part.call, "type": "function", "function": function}]}))
            last = chunk({}, FINISH_REASONS[piece.finish])
            return [*out, last, written({**head, "choices": [], "usage": _usage(piece.usage)}), END_OF_STREAM]

        return write

    def whole(self, reply: Reply, model: str) -> dict[str, Any]:
        """See `Form`."""
        message = wire.render([reply.message])
        choice = {"index": 0, "message": message[0] if message else {"role": "assistant", "content": ""}}
        choices = [{**choice, "finish_reason": FINISH_REASONS[reply.finish]}]
        return {**_head(model, "chat.completion"), "choices": choices, "usage": _usage(reply.usage)}


def _head(model: str, kind: str) -> dict[str, Any]:
    return {"id": f"chatcmpl-{uuid.uuid4().hex[:24]}", "object": kind, "created": int(time.time()), "model": model}


def _usage(tokens: Tokens | None) -> dict[str, Any]:
    usage = usage_or_zero(tokens)
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.reply,
        "total_tokens": usage.prompt + usage.reply,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }


def _without_thoughts(message: dict[str, Any]) -> dict[str, Any]:
    """Return an assistant's message without its reasoning, unless it has a call: the provider requires the reasoning of calls."""
    if message.get("role") != "assistant" or message.get("tool_calls") or not any(key in message for key in wire.THOUGHTS):
        return message
    return {key: value for key, value in message.items() if key not in wire.THOUGHTS}

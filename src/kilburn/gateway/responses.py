"""OpenAI's responses as the gateway speaks them.

A client that lets its provider keep the conversation sends no history. A request that goes on from a reply
(`previous_response_id`) goes on with the session that has this reply; any other (`conversation`, `background`, items that are
only named) goes through unread.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from kilburn.errors import InvalidMessage
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.events import ServerEvent, written
from kilburn.gateway.form import ParsedRequest, Reading, decode_object, is_ours, listed, parse_fields, usage_or_zero, with_tools
from kilburn.kernel.render import render
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request, Tokens, ToolSpec
from kilburn.wire import chat as wire
from kilburn.wire import responses as items
from kilburn.wire.attached import is_attached, pack_attached, restore_attached
from kilburn.wire.form import parse
from kilburn.wire.oddities import chat_message, numbered, response_item
from kilburn.wire.plain import NOT_JSON, counted, plain

KEPT_THERE = ("conversation", "background")
"""Fields of a request that goes on from what its provider keeps, or leaves its reply there."""

PREVIOUS = "previous_response_id"
"""The field with the id of the reply that a request goes on from."""

ITEM_REFERENCE = "item_reference"
"""The type of an item that only its provider has."""


BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDS = ("response.completed", "response.incomplete")


class ResponsesReading(Reading):
    """Reads the events of a response, or whole responses."""

    def __init__(self, faults: bool, *, holds: bool = True) -> None:
        super().__init__(faults, holds=holds)
        self._first: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        self._number = 0

    def _begin(self) -> None:
        self._response: dict[str, Any] | None = None
        self._items: dict[Any, dict[str, Any]] = {}
        self._text: list[str] = []
        self._thinking: dict[int, list[tuple[dict[str, Any], str, bytes]]] = {}
        """Events of reasoning by output position, held back until the next item decides whether the client sees them."""

    def _feed(self, event: ServerEvent) -> bytes:
        data = decode_object(event.data)
        kind = str(data.get("type") or event.name or "error" * bool(data.get("error")))
        if kind in ("error", "response.failed"):
            self.failed = data.get("response") or data
            return self._thought() + self._shown(data, kind, event.raw)
        self.spoke = self.spoke or kind not in BEGINNINGS
        if kind in ENDS:
            thought = self._thought()
            self.ended = self._ends = True
            self._end_round(data.get("response"))
            return thought if self.changed else thought + self._shown(data, kind, event.raw)
        if kind == "response.output_item.done":
            self._items[data.get("output_index", len(self._items))] = data["item"]
        elif kind == "response.output_text.delta" and isinstance(data.get("delta"), str):
            self._text.append(data["delta"])
        return self._told(data, kind, event.raw) if self.faults else self._seen(data, kind, event.raw)

    def _told(self, data: dict[str, Any], kind: str, raw: bytes) -> bytes:
        """Return the bytes that the client gets of an event now. Reasoning is held back until the next item. If that is a call of
        ours, the client gets neither: a provider accepts such reasoning only with its call."""
        index, item = data.get("output_index"), data.get("item")
        begins = kind == "response.output_item.added"
        if isinstance(index, int) and begins and isinstance(item, dict) and item.get("type") == "reasoning":
            self._thinking[index] = []
        if isinstance(index, int) and index in self._thinking:
            self._thinking[index].append((data, kind, raw))
            return b""
        if begins and self._thinking and _is_ours(item):
            for hidden in self._thinking:
                self._slot(hidden, True)
            self._thinking.clear()
        return self._thought() + self._seen(data, kind, raw)

    def _thought(self) -> bytes:
        """Return the reasoning held back."""
        waited = [event for events in self._thinking.values() for event in events]
        self._thinking.clear()
        return b"".join(self._seen(*event) for event in waited)

    def _end_round(self, source: Any) -> None:
        """Process the end of a reply; some servers do not repeat the output there, or send no end."""
        response: dict[str, Any] = dict(source) if isinstance(source, dict) else {}
        output = response.get("output") or list(self._items.values())
        if not output and self._text:
            text = {"type": "output_text", "text": "".join(self._text), "annotations": []}
            output = [{"type": "message", "role": "assistant", "content": [text]}]
        self.changed = self.changed or (self.faults and any(map(_is_ours, output)))
        self._response = {**response, "output": output}
        self._first = self._first or response
        self.usage.update(counted(response.get("usage")))
        self._output += _visible(output)

    def _seen(self, data: dict[str, Any], kind: str, raw: bytes) -> bytes:
        response = data.get("response")
        if isinstance(response, dict):
            if self.rounds:
                return b""
            self._first = self._first or response
        index = data.get("output_index")
        if self.faults and isinstance(index, int):
            if kind == "response.output_item.added" or index not in self._slots:  # some replies have no beginning
                self._slot(index, _is_ours(data.get("item")))
            slot = self._slots[index]
            if slot is None:
                return b""
            data["output_index"] = slot
        return self._shown(data, kind, raw)

    def _shown(self, data: dict[str, Any], kind: str, raw: bytes) -> bytes:
        """Return an event as the client sees it: unchanged, unless it names our tools or is renumbered."""
        visible = _unseen(data) if self.faults else data
        if self.changed:
            return self._numbered(visible, kind)
        if not self._ends and self.failed is None:
            number = data.get("sequence_number")
            self._number = (number if isinstance(number, int) else self._number) + 1
        return raw if visible is data else written(visible, kind)

    def _numbered(self, data: dict[str, Any], kind: str) -> bytes:
        if "sequence_number" in data:
            data["sequence_number"] = self._number
        self._number += 1
        return written(data, kind)

    def _take(self, body: bytes) -> None:
        data = decode_object(body)
        if data.get("error") or data.get("status") == "failed":
            self.failed = data
            return
        if isinstance(data.get("output"), str):
            data["output"] = [{"type": "message", "role": "assistant", "content": data["output"]}]
        if "output" in data:
            self.ended = True
            self._end_round(data)
            self.changed = self.changed or (self.faults and _unseen({"response": data})["response"] is not data)

    def left(self) -> bytes:
        """See `Reading`."""
        return self._thought() + super().left()

    @property
    def id(self) -> str:
        """See `Reading`."""
        # See `end`.
        response = (self._response if self._raw else self._first) or {}
        return str(response.get("id") or "") if response.get("store") is not False else ""

    def _reply(self) -> Reply:
        if self._response is None and (self._items or self._text):
            self._end_round(None)
        response = self._response or {}
        self._check(self._response is not None, any(map(_is_ours, response.get("output") or ())))
        messages = [wire.read(chat_message(items.read(response_item(item)))) for item in plain(response["output"], "output")]
        if any(message.role is not Role.ASSISTANT for message in messages):
            raise InvalidMessage("a reply with another role")
        nonempty = [message for message in messages if any(part.text or part.kind is not Kind.TEXT for part in message.parts)]
        (message,) = items.together(nonempty) or [Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=""),))]
        usage_fields = counted(response.get("usage"))
        details = counted(usage_fields.get("input_tokens_details"))
        figures = {"prompt_tokens": usage_fields.get("input_tokens"), "completion_tokens": usage_fields.get("output_tokens")}
        usage = wire.read_usage({**figures, "prompt_tokens_details": {"cached_tokens": details.get("cached_tokens", 0)}})
        called = any(part.kind is Kind.CALL for part in message.parts)
        finish = Finish.LENGTH if response.get("status") == "incomplete" else Finish.CALLS if called else Finish.STOP
        return Reply(message=numbered([message])[0], finish=finish, usage=usage)

    def _end(self) -> bytes:
        response: dict[str, Any] = self._response or {}
        # The id is that of the last round, because the provider's response of an earlier round has calls without results. A
        # stream has already sent the first id, and OpenAI's client accepts no other at its end.
        first = ("created_at",) if self._raw else ("id", "created_at")
        whole: dict[str, Any] = {**response, **{key: self._first[key] for key in first if key in self._first}}
        whole |= {"output": self._output, "usage": self._reported_usage() or None}
        whole = _unseen({"response": whole})["response"]
        if self._raw:
            return msgspec.json.encode(whole)
        kind = "response.incomplete" if response.get("status") == "incomplete" else "response.completed"
        return self._numbered({"type": kind, "sequence_number": 0, "response": whole}, kind)

    def broken(self, error: dict[str, Any]) -> bytes:
        """See `Reading`."""
        return self._numbered({**error["error"], "type": "error", "sequence_number": 0}, "error")


def _unseen(data: dict[str, Any]) -> dict[str, Any]:
    """Return an event without our tools and their calls in its response; the event itself if it has none."""
    response = data.get("response")
    if not isinstance(response, dict):
        return data
    lists = {key: response[key] for key in ("tools", "output") if isinstance(response.get(key), list)}
    if not any(_is_ours(entry) for got in lists.values() for entry in got):
        return data
    return {**data, "response": response | {key: _visible(got) for key, got in lists.items()}}


def _visible(listed: list[Any]) -> list[Any]:
    """Return tools without ours, or items without calls of ours and the reasoning that led to them."""
    visible: list[Any] = []
    hides = False
    for entry in reversed(listed):
        hides = _is_ours(entry) or (hides and isinstance(entry, dict) and entry.get("type") == "reasoning")
        visible += [] if hides else [entry]
    return visible[::-1]


def _is_ours(item: Any) -> bool:
    return is_ours(item) and item.get("type") in ("function", "function_call")


class ResponsesForm(ChatForm):
    """`/v1/responses`."""

    name: ClassVar[str] = "responses"
    path: ClassVar[str] = "/responses"
    rendered: ClassVar[str] = "responses"
    key: ClassVar[str] = "input"
    caps: ClassVar[tuple[str, ...]] = ("max_output_tokens",)
    reader: ClassVar[type[Reading]] = ResponsesReading

    def unread(self, raw: bytes, parsed: Mapping[str, msgspec.Raw] | None = None) -> bool:
        """See `Form`."""
        previous, at_provider = _kept_there(raw, parsed)
        return bool(previous) or at_provider

    def after(self, raw: bytes, parsed: Mapping[str, msgspec.Raw] | None = None) -> str:
        """See `Form`."""
        previous, at_provider = _kept_there(raw, parsed)
        return "" if at_provider else previous

    def split(self, req: ParsedRequest) -> None:
        """See `Form`."""
        if req.history.startswith(b'"'):
            req.history = b'[{"role":"user","content":' + req.history + b"}"
            req.messages = listed(req.history + b"]", self.key)
        elif not req.messages:
            req.messages = listed(req.fields[self.key], self.key)

    def _read(self, source: dict[str, Any]) -> list[Message]:
        return [wire.read(chat_message(items.read(response_item(source))))]

    def together(self, messages: list[Message]) -> list[Message]:
        """See `Form`."""
        return items.together(numbered(messages))

    def shown(self, message: Message) -> list[Part]:
        """See `Form`. Here that is the reasoning right before it."""
        visible: list[Part] = []
        for part, following in reversed([*zip(message.parts, (*message.parts[1:], None), strict=True)]):
            led = part.kind is Kind.REASONING and bool(visible) and visible[-1] is following
            visible += [part] if part.kind is Kind.TEXT or led else []
        return visible[::-1]

    def led(self, message: Message, parts: Sequence[Part]) -> Message:
        """See `Form`. Here reasoning stays with what came of it."""
        return msgspec.structs.replace(message, parts=(*parts, *message.parts))

    def splice(self, req: ParsedRequest, messages: Sequence[dict[str, Any]], specs: Sequence[ToolSpec]) -> bytes:
        """See `Form`."""
        # What came before is in the input now.
        fields: dict[str, Any] = {**req.fields, "input": items.write(messages)}
        if bytes(fields.get(PREVIOUS, b"null")).strip() != b"null":
            del fields[PREVIOUS]
        offered = [{"type": "function", **tool["function"], "strict": False} for tool in wire.tools(specs)]
        return msgspec.json.encode(with_tools(fields, offered))

    def _request(self, fields: dict[str, Any], into: str, cap: int) -> Request:
        items_or_text = fields["input"]
        listed_items = [{"role": "user", "content": items_or_text}] if isinstance(items_or_text, str) else items_or_text
        messages = _chat(map(response_item, listed_items))
        if fields.get("instructions"):
            messages.insert(0, {"role": "system", "content": fields["instructions"]})
        prompt = render(restore_attached(numbered(parse([chat_message(message) for message in messages]), whole=True)), into, 0)
        return self.asking(fields, prompt, prompt.system, into, cap)

    def writer(self, model: str) -> Callable[[Delta | Reply], list[bytes]]:
        """See `Form`."""
        return _Writer(model).write

    def whole(self, reply: Reply, model: str) -> dict[str, Any]:
        """See `Form`."""
        return _whole(_head(model), reply)


def _kept_there(raw: bytes, parsed: Mapping[str, msgspec.Raw] | None) -> tuple[str, bool]:
    """Return the id of the reply that a request continues, and whether it names other objects that only its provider has."""
    given_keys = (parse_fields(raw) if parsed is None else parsed) or {}
    if given_keys.keys().isdisjoint((*KEPT_THERE, PREVIOUS)) and f'"{ITEM_REFERENCE}"'.encode() not in raw:
        return "", False
    try:
        fields = decode_object(raw)
    except NOT_JSON:
        return "", False
    input_value, previous = fields.get("input"), fields.get(PREVIOUS)
    listed = input_value if isinstance(input_value, list) else []
    references = any(isinstance(item, dict) and item.get("type") == ITEM_REFERENCE for item in listed)
    at_provider = references or any(fields.get(name) for name in KEPT_THERE) or not isinstance(previous, str | None)
    return previous if isinstance(previous, str) else "", at_provider or (bool(previous) and not input_value)


def _chat(sources: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Convert items for another provider: without OpenAI's own blocks, and with one message for consecutive items of the
    assistant."""
    out: list[dict[str, Any]] = []
    for message in map(items.read, sources):
        if message["role"] != "assistant":
            out.append(message)
            continue
        content = message["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        texts = [block for block in texts if block["type"] in ("text", "refusal") or is_attached(block)]
        calls = message.get("tool_calls", [])
        if out and out[-1]["role"] == "assistant":
            out[-1] = {**out[-1], "content": out[-1]["content"] + texts, "tool_calls": out[-1]["tool_calls"] + calls}
        elif texts or calls:
            out.append({"role": "assistant", "content": texts, "tool_calls": calls})
    return out


def _head(model: str) -> dict[str, Any]:
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
    }


def _whole(head: dict[str, Any], reply: Reply, text_id: str = "") -> dict[str, Any]:
    output: list[dict[str, Any]] = []
    for item in items.write(wire.render([reply.message])):
        if item["type"] == "message":
            content = [{**block, "annotations": []} if block["type"] == "output_text" else block for block in item["content"]]
            item = {"id": text_id or f"msg_{uuid.uuid4().hex}", **item, "content": content}
        else:
            item = {"id": f"fc_{uuid.uuid4().hex}", **item}
        output.append({**item, "status": "completed"})
    if attached := pack_attached(reply.message):
        first = next(at for at, item in enumerate(output) if item["type"] in items.CALLS)
        reasoning = {"id": f"rs_{uuid.uuid4().hex}", "type": "reasoning", "summary": [], "encrypted_content": attached}
        output.insert(first, reasoning)
    cut = reply.finish is Finish.LENGTH
    ended = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}} if cut else {"status": "completed"}
    return {**head, **ended, "output": output, "usage": _usage(reply.usage)}


def _usage(tokens: Tokens | None) -> dict[str, Any]:
    usage = usage_or_zero(tokens)
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.reply,
    }


class _Writer:
    """Writes a model's reply as events: one message, then calls."""

    def __init__(self, model: str) -> None:
        self._head = _head(model)
        self._number = 0
        self._text = ""
        self._id = f"msg_{uuid.uuid4().hex}"

    def _say(self, kind: str, **data: Any) -> bytes:
        self._number += 1
        return written({"type": kind, "sequence_number": self._number - 1, **data}, kind)

    def write(self, piece: Delta | Reply) -> list[bytes]:
        """Return the events of one piece."""
        out = []
        if not self._number:
            out += [self._say("response.created", response=self._head), self._say("response.in_progress", response=self._head)]
        place = {"item_id": self._id, "output_index": 0, "content_index": 0}
        if isinstance(piece, Delta):
            if piece.reasoning or not piece.text:
                return out
            if not self._text:
                item = {"id": self._id, "type": "message", "role": "assistant", "status": "in_progress", "content": []}
                out.append(self._say("response.output_item.added", output_index=0, item=item))
                part = {"type": "output_text", "text": "", "annotations": []}
                out.append(self._say("response.content_part.added", **place, part=part))
            self._text += piece.text
            return [*out, self._say("response.output_text.delta", **place, delta=piece.text, logprobs=[])]
        whole = _whole(self._head, piece, self._id)
        for index, item in enumerate(whole["output"]):
            if item["type"] == "message":
                part = item["content"][0]
                out.append(self._say("response.output_text.done", **place, text=part["text"], logprobs=[]))
                out.append(self._say("response.content_part.done", **place, part=part))
            elif item["type"] == "reasoning":
                out.append(self._say("response.output_item.added", output_index=index, item=item))
            else:
                item_start = {**item, "arguments": "", "status": "in_progress"}
                out.append(self._say("response.output_item.added", output_index=index, item=item_start))
                place_of_item = {"item_id": item["id"], "output_index": index}
                arguments = item.get("arguments", "")
                out.append(self._say("response.function_call_arguments.delta", **place_of_item, delta=arguments))
                out.append(
                    self._say("response.function_call_arguments.done", **place_of_item, arguments=arguments, name=item["name"])
                )
            out.append(self._say("response.output_item.done", output_index=index, item=item))
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return [*out, self._say(kind, response=whole)]

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
from kilburn.gateway.form import Asked, Reading, fields_of, is_ours, listed, usage_of, with_tools
from kilburn.kernel.render import render
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Finish, Reply, Request, Tokens, ToolSpec
from kilburn.wire import chat as wire
from kilburn.wire import responses as items
from kilburn.wire.attached import is_attached, pack_attached, restore_attached
from kilburn.wire.form import parse
from kilburn.wire.oddities import chat_message, counted, numbered, response_item, whole_number
from kilburn.wire.plain import NOT_JSON, plain

KEPT_THERE = ("conversation", "background")
"""Fields of a request that goes on from what its provider keeps, or leaves its reply there."""

BEFORE = "previous_response_id"
"""The field with the id of the reply that a request goes on from."""

NAMED = "item_reference"
"""The type of an item that only its provider has."""

_object = msgspec.json.Decoder(dict[str, Any]).decode


class ResponsesForm(ChatForm):
    """`/v1/responses`."""

    name: ClassVar[str] = "responses"
    path: ClassVar[str] = "/responses"
    rendered: ClassVar[str] = "responses"
    key: ClassVar[str] = "input"
    caps: ClassVar[tuple[str, ...]] = ("max_output_tokens",)

    def unread(self, raw: bytes, known: Mapping[str, msgspec.Raw] | None = None) -> bool:
        """See `Form`."""
        before, kept = _kept_there(raw, known)
        return bool(before) or kept

    def after(self, raw: bytes, known: Mapping[str, msgspec.Raw] | None = None) -> str:
        """See `Form`."""
        before, kept = _kept_there(raw, known)
        return "" if kept else before

    def split(self, asked: Asked) -> None:
        """See `Form`."""
        if asked.history.startswith(b'"'):
            asked.history = b'[{"role":"user","content":' + asked.history + b"}"
            asked.messages = listed(asked.history + b"]", self.key)
        elif not asked.messages:
            asked.messages = listed(asked.fields[self.key], self.key)

    def _read(self, source: dict[str, Any]) -> list[Message]:
        return [wire.read(chat_message(items.read(response_item(source))))]

    def together(self, messages: list[Message]) -> list[Message]:
        """See `Form`."""
        return items.together(numbered(messages))

    def shown(self, message: Message) -> list[Part]:
        """See `Form`. Here that is the reasoning right before it."""
        shown: list[Part] = []
        for part, after in reversed([*zip(message.parts, (*message.parts[1:], None), strict=True)]):
            led = part.kind is Kind.REASONING and bool(shown) and shown[-1] is after
            shown += [part] if part.kind is Kind.TEXT or led else []
        return shown[::-1]

    def led(self, message: Message, said: Sequence[Part]) -> Message:
        """See `Form`. Here reasoning stays with what came of it."""
        return msgspec.structs.replace(message, parts=(*said, *message.parts))

    def splice(self, asked: Asked, messages: Sequence[dict[str, Any]], specs: Sequence[ToolSpec]) -> bytes:
        """See `Form`."""
        # What came before is in the input now.
        fields: dict[str, Any] = {**asked.fields, "input": items.write(messages)}
        if bytes(fields.get(BEFORE, b"null")).strip() != b"null":
            del fields[BEFORE]
        offered = [{"type": "function", **tool["function"], "strict": False} for tool in wire.tools(specs)]
        return msgspec.json.encode(with_tools(fields, offered))

    def reading(self, faults: bool, *, held: bool = True) -> Reading:
        """See `Form`."""
        return ResponsesReading(faults, held=held)

    def request(self, body: bytes, into: str, cap: int) -> Request:
        """See `Form`."""
        asked = {key: whole_number(value) for key, value in _object(body).items()}
        given = asked["input"]
        listed_items = [{"role": "user", "content": given}] if isinstance(given, str) else given
        messages = _chat(map(response_item, listed_items))
        if asked.get("instructions"):
            messages.insert(0, {"role": "system", "content": asked["instructions"]})
        prompt = render(restore_attached(numbered(parse([chat_message(message) for message in messages]), whole=True)), into, 0)
        return self.asking(asked, prompt, prompt.system, into, cap)

    def writer(self, model: str) -> Callable[[Delta | Reply], list[bytes]]:
        """See `Form`."""
        return _Writer(model).write

    def whole(self, reply: Reply, model: str) -> dict[str, Any]:
        """See `Form`."""
        return _whole(_head(model), reply)


def _kept_there(raw: bytes, known: Mapping[str, msgspec.Raw] | None) -> tuple[str, bool]:
    """The id of the reply that a request goes on from, and whether it names anything else that only its provider has."""
    given_keys = (fields_of(raw) if known is None else known) or {}
    if given_keys.keys().isdisjoint((*KEPT_THERE, BEFORE)) and f'"{NAMED}"'.encode() not in raw:
        return "", False
    try:
        fields = _object(raw)
    except NOT_JSON:
        return "", False
    given, before = fields.get("input"), fields.get(BEFORE)
    listed = given if isinstance(given, list) else []
    named = any(isinstance(item, dict) and item.get("type") == NAMED for item in listed)
    kept = named or any(fields.get(name) for name in KEPT_THERE) or not isinstance(before, str | None)
    return before if isinstance(before, str) else "", kept or (bool(before) and not given)


def _chat(given: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Items as another provider takes them: no blocks of OpenAI's own, and one message for all that the assistant says in a
    row."""
    out: list[dict[str, Any]] = []
    for made in map(items.read, given):
        if made["role"] != "assistant":
            out.append(made)
            continue
        content = made["content"]
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        texts = [block for block in texts if block["type"] in ("text", "refusal") or is_attached(block)]
        calls = made.get("tool_calls", [])
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
    used = usage_of(tokens)
    return {
        "input_tokens": used.prompt,
        "input_tokens_details": {"cached_tokens": used.cached},
        "output_tokens": used.reply,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": used.prompt + used.reply,
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
        """The events of one piece."""
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
                begun = {**item, "arguments": "", "status": "in_progress"}
                out.append(self._say("response.output_item.added", output_index=index, item=begun))
                said = {"item_id": item["id"], "output_index": index}
                arguments = item.get("arguments", "")
                out.append(self._say("response.function_call_arguments.delta", **said, delta=arguments))
                out.append(self._say("response.function_call_arguments.done", **said, arguments=arguments, name=item["name"]))
            out.append(self._say("response.output_item.done", output_index=index, item=item))
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return [*out, self._say(kind, response=whole)]


BEGINNINGS = ("response.created", "response.queued", "response.in_progress")
ENDS = ("response.completed", "response.incomplete")


class ResponsesReading(Reading):
    """Reads the events of a response, or whole responses."""

    def __init__(self, faults: bool, *, held: bool = True) -> None:
        super().__init__(faults, held=held)
        self._first: dict[str, Any] = {}
        self._output: list[dict[str, Any]] = []
        self._number = 0

    def _begin(self) -> None:
        self._response: dict[str, Any] | None = None
        self._items: dict[Any, dict[str, Any]] = {}
        self._text: list[str] = []
        self._thinking: dict[int, list[tuple[dict[str, Any], str, bytes]]] = {}
        """Events of reasoning, by its place in the output: whether the client sees it depends on what comes of it."""

    def _feed(self, event: ServerEvent) -> bytes:
        if not event.data or event.data.strip() == b"[DONE]":
            return b"" if self.rounds else event.raw
        said = _object(event.data)
        kind = str(said.get("type") or event.name or "error" * bool(said.get("error")))
        if kind in ("error", "response.failed"):
            self.failed = said.get("response") or said
            return self._thought() + self._shown(said, kind, event.raw)
        self.spoke = self.spoke or kind not in BEGINNINGS
        if kind in ENDS:
            thought = self._thought()
            self.ended = self._ends = True
            self._end_round(said.get("response"))
            return thought if self.changed else thought + self._shown(said, kind, event.raw)
        if kind == "response.output_item.done":
            self._items[said.get("output_index", len(self._items))] = said["item"]
        elif kind == "response.output_text.delta" and isinstance(said.get("delta"), str):
            self._text.append(said["delta"])
        return self._told(said, kind, event.raw) if self.faults else self._seen(said, kind, event.raw)

    def _told(self, said: dict[str, Any], kind: str, raw: bytes) -> bytes:
        """What the client hears of an event now. Reasoning waits for what comes of it. If that is a call of ours, the client sees
        neither: a provider takes such reasoning back only with its call."""
        index, item = said.get("output_index"), said.get("item")
        begins = kind == "response.output_item.added"
        if isinstance(index, int) and begins and isinstance(item, dict) and item.get("type") == "reasoning":
            self._thinking[index] = []
        if isinstance(index, int) and index in self._thinking:
            self._thinking[index].append((said, kind, raw))
            return b""
        if begins and self._thinking and _is_ours(item):
            for hidden in self._thinking:
                self._slot(hidden, True)
            self._thinking.clear()
        return self._thought() + self._seen(said, kind, raw)

    def _thought(self) -> bytes:
        """The reasoning that waited."""
        waited = [event for events in self._thinking.values() for event in events]
        self._thinking.clear()
        return b"".join(self._seen(*event) for event in waited)

    def _end_round(self, given: Any) -> None:
        """The end of a reply; some servers do not repeat there what it was, or send none."""
        response: dict[str, Any] = dict(given) if isinstance(given, dict) else {}
        output = response.get("output") or list(self._items.values())
        if not output and self._text:
            text = {"type": "output_text", "text": "".join(self._text), "annotations": []}
            output = [{"type": "message", "role": "assistant", "content": [text]}]
        self.changed = self.changed or (self.faults and any(map(_is_ours, output)))
        self._response = {**response, "output": output}
        self._first = self._first or response
        self.usage.update(counted(response.get("usage")))
        self._output += _visible(output)

    def _seen(self, said: dict[str, Any], kind: str, raw: bytes) -> bytes:
        response = said.get("response")
        if isinstance(response, dict):
            if self.rounds:
                return b""
            self._first = self._first or response
        index = said.get("output_index")
        if self.faults and isinstance(index, int):
            if kind == "response.output_item.added" or index not in self._slots:  # some have no beginning
                self._slot(index, _is_ours(said.get("item")))
            slot = self._slots[index]
            if slot is None:
                return b""
            said["output_index"] = slot
        return self._shown(said, kind, raw)

    def _shown(self, said: dict[str, Any], kind: str, raw: bytes) -> bytes:
        """An event as the client sees it: as it came, unless it names our tools, or has other numbers by now."""
        seen = _unseen(said) if self.faults else said
        if self.changed:
            return self._numbered(seen, kind)
        if not self._ends and self.failed is None:
            number = said.get("sequence_number")
            self._number = (number if isinstance(number, int) else self._number) + 1
        return raw if seen is said else written(seen, kind)

    def _numbered(self, said: dict[str, Any], kind: str) -> bytes:
        if "sequence_number" in said:
            said["sequence_number"] = self._number
        self._number += 1
        return written(said, kind)

    def _take(self, body: bytes) -> None:
        said = _object(body)
        if said.get("error") or said.get("status") == "failed":
            self.failed = said
            return
        if isinstance(said.get("output"), str):
            said["output"] = [{"type": "message", "role": "assistant", "content": said["output"]}]
        if "output" in said:
            self.ended = True
            self._end_round(said)
            self.changed = self.changed or (self.faults and _unseen({"response": said})["response"] is not said)

    def left(self) -> bytes:
        """See `Reading`."""
        return self._thought() + super().left()

    @property
    def id(self) -> str:
        """See `Reading`."""
        # See `end`.
        seen = (self._response if self._raw else self._first) or {}
        return str(seen.get("id") or "") if seen.get("store") is not False else ""

    def _reply(self) -> Reply:
        if self._response is None and (self._items or self._text):
            self._end_round(None)
        response = self._response or {}
        self._check(self._response is not None, any(map(_is_ours, response.get("output") or ())))
        read = [wire.read(chat_message(items.read(response_item(each)))) for each in plain(response["output"], "output")]
        if any(message.role is not Role.ASSISTANT for message in read):
            raise InvalidMessage("a reply of somebody else")
        said = [message for message in read if any(part.text or part.kind is not Kind.TEXT for part in message.parts)]
        (message,) = items.together(said) or [Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=""),))]
        used = counted(response.get("usage"))
        details = counted(used.get("input_tokens_details"))
        figures = {"prompt_tokens": used.get("input_tokens"), "completion_tokens": used.get("output_tokens")}
        usage = wire.read_usage({**figures, "prompt_tokens_details": {"cached_tokens": details.get("cached_tokens", 0)}})
        called = any(part.kind is Kind.CALL for part in message.parts)
        finish = Finish.LENGTH if response.get("status") == "incomplete" else Finish.CALLS if called else Finish.STOP
        return Reply(message=numbered([message])[0], finish=finish, usage=usage)

    def _end(self) -> bytes:
        response: dict[str, Any] = self._response or {}
        # Its id is that of the last round: the provider has an earlier one with calls that have no results there. A stream has
        # said the first one already, and OpenAI's client takes no other at its end.
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


def _unseen(said: dict[str, Any]) -> dict[str, Any]:
    """An event whose response names neither our tools nor calls of them; itself if it does not."""
    response = said.get("response")
    if not isinstance(response, dict):
        return said
    lists = {key: response[key] for key in ("tools", "output") if isinstance(response.get(key), list)}
    if not any(_is_ours(each) for got in lists.values() for each in got):
        return said
    return {**said, "response": response | {key: _visible(got) for key, got in lists.items()}}


def _visible(listed: list[Any]) -> list[Any]:
    """Tools without ours; or items without calls of ours, and without the reasoning that led to them."""
    kept: list[Any] = []
    hides = False
    for each in reversed(listed):
        hides = _is_ours(each) or (hides and isinstance(each, dict) and each.get("type") == "reasoning")
        kept += [] if hides else [each]
    return kept[::-1]


def _is_ours(item: Any) -> bool:
    return is_ours(item) and item.get("type") in ("function", "function_call")

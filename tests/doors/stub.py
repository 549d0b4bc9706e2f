"""A provider on a plain socket: it sends exactly the bytes that a fuzzer gives it, and refuses what the real ones refuse.

It shares no code with Kilburn. `whole` and `stream` say a reply in one of three dialects: "chat" (OpenAI's chat
completions), "responses" (OpenAI's responses), "messages" (Anthropic's). A reply is a list of parts: ("R", text) for
reasoning, ("M", text) for words, ("F", name, arguments) for a call, ("W", query) for a search that the provider did itself.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Json = dict[str, Any]
Part = tuple[Any, ...]

PATHS = {"chat": "/v1/chat/completions", "responses": "/v1/responses", "messages": "/v1/messages"}
COUNT = itertools.count(1)


def form_of(path: str) -> str:
    """Which dialect a path speaks; "" for none."""
    plain = path.partition("?")[0]
    return next((form for form, ending in PATHS.items() if plain.endswith(ending.removeprefix("/v1"))), "")


@dataclass
class Seen:
    """A request as it came."""

    method: str
    path: str
    headers: dict[str, str]
    raw: bytes
    refused: str = ""

    @property
    def form(self) -> str:
        return form_of(self.path)

    @property
    def body(self) -> Any:
        return json.loads(self.raw)


@dataclass
class Answer:
    """What is sent back, byte for byte: pieces, one write each. `cut`: the connection breaks behind them."""

    pieces: Sequence[bytes]
    status: int = 200
    type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    framing: str = "length"
    cut: bool = False

    @property
    def body(self) -> bytes:
        return b"".join(self.pieces)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Each piece leaves at once; else every reply waits 40 ms for the gateway's acknowledgement of its head.
    disable_nagle_algorithm = True
    server: Any

    def log_message(self, *_: Any) -> None:
        pass

    def do_POST(self) -> None:
        length = self.headers.get("content-length")
        if length is not None:
            raw = self.rfile.read(int(length))
        elif self.headers.get("transfer-encoding", "").lower() == "chunked":
            raw = b"".join(self.chunks())
        else:
            raw = b""
        seen = Seen(self.command, self.path, {name.lower(): value for name, value in self.headers.items()}, raw)
        with self.server.lock:
            self.server.seen.append(seen)
            answer = self.server.answer(seen)
        self.send(answer)

    do_GET = do_PUT = do_DELETE = do_PATCH = do_POST

    def chunks(self) -> Iterator[bytes]:
        while size := int(self.rfile.readline().split(b";")[0], 16):
            yield self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()

    def send(self, answer: Answer) -> None:
        self.send_response_only(answer.status)
        if answer.type:
            self.send_header("content-type", answer.type)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        if answer.framing == "length":
            self.send_header("content-length", str(len(answer.body) + 64 * answer.cut))
        elif answer.framing == "chunked":
            self.send_header("transfer-encoding", "chunked")
        if answer.framing == "close" or answer.cut:
            self.send_header("connection", "close")
            self.close_connection = True
        try:
            self.end_headers()
            for piece in answer.pieces:
                if piece:
                    self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece) if answer.framing == "chunked" else piece)
            if answer.framing == "chunked" and not answer.cut:
                self.wfile.write(b"0\r\n\r\n")
        except OSError:
            self.close_connection = True


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, answer: Callable[[Seen], Answer]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.seen: list[Seen] = []
        self.answer = answer
        self.lock = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


@contextmanager
def serving(answer: Callable[[Seen], Answer]) -> Iterator[Server]:
    """A provider that answers so; `seen` has what it was asked."""
    server = Server(answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def sealed(text: str) -> str:
    """What stands for a provider's signature of a text."""
    return hashlib.sha256(f"seal {text}".encode()).hexdigest()


def answer_of(form: str, reply: Json, streamed: bool, **more: Any) -> Answer:
    """A reply as it is sent."""
    if streamed:
        return Answer(stream(form, reply), type="text/event-stream; charset=utf-8", framing="chunked", **more)
    return Answer([json.dumps(reply).encode()], **more)


def refusal(form: str, words: str, status: int = 400) -> Answer:
    """An error in the dialect's own form."""
    kind = "invalid_request_error"
    body: Json = {"error": {"message": words, "type": kind, "param": None, "code": None}}
    if form == "messages":
        body = {"type": "error", "error": {"type": kind, "message": words}}
    return Answer([json.dumps(body).encode()], status=status)


def whole(form: str, parts: Sequence[Part], *, encrypted: bool = True, model: str = "m") -> Json:
    """A reply that is not streamed; ids are new each time."""
    number = next(COUNT)
    if form == "chat":
        return chat(number, parts, model)
    if form == "messages":
        return messages(number, parts, model)
    return responses(number, parts, model, encrypted)


def chat(number: int, parts: Sequence[Part], model: str) -> Json:
    said = "".join(part[1] for part in parts if part[0] == "M")
    thought = "".join(part[1] for part in parts if part[0] == "R")
    calls = [
        {
            "id": f"call_{number}_{place}",
            "type": "function",
            "function": {"name": part[1], "arguments": json.dumps(part[2])},
        }
        for place, part in enumerate(parts)
        if part[0] == "F"
    ]
    message: Json = {"role": "assistant", "content": said or None, "refusal": None}
    if thought:
        message["reasoning_content"] = thought
    if calls:
        message["tool_calls"] = calls
    return {
        "id": f"chatcmpl-{number}",
        "object": "chat.completion",
        "created": 1_700_000_000 + number,
        "model": model,
        "choices": [{"index": 0, "message": message, "logprobs": None, "finish_reason": "tool_calls" if calls else "stop"}],
        "usage": {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15},
        "system_fingerprint": "fp_1",
    }


def messages(number: int, parts: Sequence[Part], model: str) -> Json:
    content: list[Json] = []
    for place, part in enumerate(parts):
        name = f"{number}_{place}"
        if part[0] == "R":
            content.append({"type": "thinking", "thinking": part[1], "signature": sealed(part[1])})
        elif part[0] == "X":
            content.append({"type": "redacted_thinking", "data": sealed(part[1])})
        elif part[0] == "M":
            content.append({"type": "text", "text": part[1]})
        elif part[0] == "F":
            content.append({"type": "tool_use", "id": f"toolu_{name}", "name": part[1], "input": part[2]})
        else:
            content.append(
                {"type": "server_tool_use", "id": f"srvtoolu_{name}", "name": "web_search", "input": {"query": part[1]}}
            )
            found = {
                "type": "web_search_result",
                "url": "https://x.example",
                "title": part[1],
                "encrypted_content": sealed(part[1]),
            }
            content.append({"type": "web_search_tool_result", "tool_use_id": f"srvtoolu_{name}", "content": [found]})
    called = any(part[0] == "F" for part in parts)
    return {
        "id": f"msg_{number}",
        "type": "message",
        "role": "assistant",
        "model": model,
        "content": content,
        "stop_reason": "tool_use" if called else "end_turn",
        "stop_sequence": None,
        "usage": {"input_tokens": 10, "output_tokens": 5},
    }


def responses(number: int, parts: Sequence[Part], model: str, encrypted: bool) -> Json:
    output: list[Json] = []
    for place, part in enumerate(parts):
        name = f"{number}_{place}"
        if part[0] in "RX":
            item: Json = {"id": f"rs_{name}", "type": "reasoning", "summary": [{"type": "summary_text", "text": part[1]}]}
            if part[0] == "X":
                item["summary"] = []
            if encrypted:
                item["encrypted_content"] = sealed(name)
        elif part[0] == "M":
            text = {"type": "output_text", "text": part[1], "annotations": [], "logprobs": []}
            item = {"id": f"msg_{name}", "type": "message", "status": "completed", "role": "assistant", "content": [text]}
        elif part[0] == "F":
            item = {
                "id": f"fc_{name}",
                "type": "function_call",
                "status": "completed",
                "call_id": f"call_{name}",
                "name": part[1],
            }
            item["arguments"] = json.dumps(part[2])
        else:
            action = {"type": "search", "query": part[1]}
            item = {"id": f"ws_{name}", "type": "web_search_call", "status": "completed", "action": action}
        output.append(item)
    return {
        "id": f"resp_{number}",
        "object": "response",
        "created_at": 1_700_000_000 + number,
        "status": "completed",
        "error": None,
        "incomplete_details": None,
        "model": model,
        "output": output,
        "parallel_tool_calls": True,
        "tool_choice": "auto",
        "tools": [],
        "usage": {
            "input_tokens": 10,
            "input_tokens_details": {"cached_tokens": 0},
            "output_tokens": 5,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": 15,
        },
    }


def halves(text: str) -> list[str]:
    middle = len(text) // 2
    return [piece for piece in (text[:middle], text[middle:]) if piece]


def event(data: Json, name: str = "") -> bytes:
    line = f"data: {json.dumps(data)}\n\n"
    return (f"event: {name}\n{line}" if name else line).encode()


def stream(form: str, reply: Json) -> list[bytes]:
    """The events of a reply, one piece each."""
    return [*{"chat": chat_events, "messages": messages_events, "responses": responses_events}[form](reply)]


def chat_events(reply: Json) -> Iterator[bytes]:
    shared = {name: reply[name] for name in ("id", "created", "model", "system_fingerprint")} | {
        "object": "chat.completion.chunk"
    }
    choice = reply["choices"][0]
    message = choice["message"]

    def chunk(delta: Json, finish: str | None = None) -> bytes:
        return event(shared | {"choices": [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]})

    yield chunk({"role": "assistant", "content": ""})
    for piece in halves(message.get("reasoning_content") or ""):
        yield chunk({"reasoning_content": piece})
    for piece in halves(message["content"] or ""):
        yield chunk({"content": piece})
    for place, call in enumerate(message.get("tool_calls", ())):
        function = call["function"]
        head = {"index": place, "id": call["id"], "type": "function", "function": {"name": function["name"], "arguments": ""}}
        yield chunk({"tool_calls": [head]})
        for piece in halves(function["arguments"]):
            yield chunk({"tool_calls": [{"index": place, "function": {"arguments": piece}}]})
    yield chunk({}, choice["finish_reason"])
    yield event(shared | {"choices": [], "usage": reply["usage"]})
    yield b"data: [DONE]\n\n"


def messages_events(reply: Json) -> Iterator[bytes]:
    def named(name: str, /, **data: Any) -> bytes:
        return event({"type": name} | data, name)

    yield named("message_start", message=reply | {"content": [], "stop_reason": None, "stop_sequence": None})
    for index, block in enumerate(reply["content"]):
        kind = block["type"]
        first = block
        deltas: list[Json] = []
        if kind == "text":
            first = {"type": "text", "text": ""}
            deltas = [{"type": "text_delta", "text": piece} for piece in halves(block["text"])]
        elif kind == "thinking":
            first = {"type": "thinking", "thinking": "", "signature": ""}
            deltas = [{"type": "thinking_delta", "thinking": piece} for piece in halves(block["thinking"])]
            deltas += [{"type": "signature_delta", "signature": block["signature"]}]
        elif kind in ("tool_use", "server_tool_use"):
            first = block | {"input": {}}
            deltas = [{"type": "input_json_delta", "partial_json": piece} for piece in halves(json.dumps(block["input"]))]
        yield named("content_block_start", index=index, content_block=first)
        for delta in deltas:
            yield named("content_block_delta", index=index, delta=delta)
        yield named("content_block_stop", index=index)
    yield named("message_delta", delta={"stop_reason": reply["stop_reason"], "stop_sequence": None}, usage={"output_tokens": 5})
    yield named("message_stop")


def responses_events(reply: Json) -> Iterator[bytes]:
    number = itertools.count()

    def named(name: str, /, **data: Any) -> bytes:
        return event({"type": name, "sequence_number": next(number)} | data, name)

    begun = reply | {"status": "in_progress", "output": [], "usage": None}
    yield named("response.created", response=begun)
    yield named("response.in_progress", response=begun)
    for place, item in enumerate(reply["output"]):
        where = {"item_id": item["id"], "output_index": place}
        kind = item["type"]
        begins = item | ({"status": "in_progress"} if "status" in item else {})
        if kind == "message":
            begins["content"] = []
        elif kind == "function_call":
            begins["arguments"] = ""
        elif kind == "reasoning":
            begins["summary"] = []
        yield named("response.output_item.added", output_index=place, item=begins)
        if kind == "message":
            for index, part in enumerate(item["content"]):
                at = where | {"content_index": index}
                yield named("response.content_part.added", **at, part=part | {"text": ""})
                for piece in halves(part["text"]):
                    yield named("response.output_text.delta", **at, delta=piece, logprobs=[])
                yield named("response.output_text.done", **at, text=part["text"], logprobs=[])
                yield named("response.content_part.done", **at, part=part)
        elif kind == "function_call":
            for piece in halves(item["arguments"]):
                yield named("response.function_call_arguments.delta", **where, delta=piece)
            yield named("response.function_call_arguments.done", **where, arguments=item["arguments"], name=item["name"])
        elif kind == "reasoning":
            for index, part in enumerate(item["summary"]):
                at = where | {"summary_index": index}
                yield named("response.reasoning_summary_part.added", **at, part={"type": "summary_text", "text": ""})
                yield named("response.reasoning_summary_text.delta", **at, delta=part["text"])
                yield named("response.reasoning_summary_text.done", **at, text=part["text"])
                yield named("response.reasoning_summary_part.done", **at, part=part)
        else:
            yield named("response.web_search_call.in_progress", **where)
            yield named("response.web_search_call.completed", **where)
        yield named("response.output_item.done", output_index=place, item=item)
    yield named("response.completed", response=reply)


class Judge:
    """What a strict provider refuses. It knows the replies that it gave."""

    def __init__(self) -> None:
        self.given: dict[str, tuple[Json, str, str]] = {}
        """An item by its id, with the ids of those before and behind it in its reply."""
        self.seals: dict[str, str] = {}

    def gave(self, form: str, reply: Json) -> None:
        if form != "responses":
            return
        ids = ["", *(item["id"] for item in reply["output"]), ""]
        for place, item in enumerate(reply["output"], 1):
            self.given[item["id"]] = (item, ids[place - 1], ids[place + 1])
            if "encrypted_content" in item:
                self.seals[item["encrypted_content"]] = item["id"]

    def wrong(self, form: str, body: Json) -> str:
        """Why this request gets 400; "" if it does not."""
        look = {"chat": self.wrong_chat, "messages": self.wrong_messages, "responses": self.wrong_responses}
        return next(look[form](body), "")

    def wrong_chat(self, body: Json) -> Iterator[str]:
        if "functions" in body and "tools" in body:
            yield "functions and tools together"
        open_calls: set[str] = set()
        for place, message in enumerate(body["messages"]):
            if message["role"] == "tool":
                if message["tool_call_id"] not in open_calls:
                    yield f"messages[{place}]: a tool's result without its call"
                open_calls.discard(message["tool_call_id"])
            else:
                if open_calls:
                    yield f"messages[{place}]: calls without results: {sorted(open_calls)}"
                open_calls = {call["id"] for call in message.get("tool_calls") or ()}
        if open_calls:
            yield f"calls without results at the end: {sorted(open_calls)}"

    def wrong_messages(self, body: Json) -> Iterator[str]:
        before: list[str] = []
        known: set[str] = set()
        role = ""
        marks = 0
        for part in body["system"] if isinstance(body.get("system"), list) else ():
            marks += "cache_control" in part
        for tool in body.get("tools", ()):
            marks += "cache_control" in tool
        for place, message in enumerate(body["messages"]):
            at = f"messages[{place}]"
            content = message["content"]
            blocks = [{"type": "text", "text": content}] if isinstance(content, str) else content
            if place == 0 and message["role"] != "user":
                yield "the first message is not the user's"
            results = [block["tool_use_id"] for block in blocks if block["type"] == "tool_result"]
            if before and not set(before) <= set(results):
                yield f"{at}: tool_use without tool_result: {before}"
            if set(results) - set(before) and message["role"] != role:
                yield f"{at}: tool_result without tool_use in the message before"
            if len(results) != len(set(results)):
                yield f"{at}: two results of one call"
            before = []
            role = message["role"]
            for block in blocks:
                kind = block["type"]
                marks += "cache_control" in block
                if kind == "text" and not block["text"].strip():
                    yield f"{at}: an empty text"
                if kind == "thinking" and block["signature"] != sealed(block["thinking"]):
                    yield f"{at}: the signature of thinking has changed"
                if kind in ("thinking", "redacted_thinking") and "cache_control" in block:
                    yield f"{at}: a cache mark on thinking"
                if kind in ("tool_use", "server_tool_use"):
                    if block["id"] in known:
                        yield f"{at}: tool_use ids must be unique: {block['id']}"
                    known.add(block["id"])
                    if kind == "tool_use":
                        before.append(block["id"])
                if kind == "web_search_tool_result" and block["tool_use_id"] not in known:
                    yield f"{at}: a search's result without the search"
        if before:
            yield f"tool_use without tool_result at the end: {before}"
        if marks > 4:
            yield f"{marks} blocks with cache_control, 4 at most"

    def wrong_responses(self, body: Json) -> Iterator[str]:
        items = body["input"]
        if isinstance(items, str):
            return
        ids: set[str] = set()
        calls: dict[str, bool] = {}
        for place, item in enumerate(items):
            at = f"input[{place}]"
            name = item.get("id")
            kind = item.get("type", "message")
            sealing = item.get("encrypted_content")
            if sealing is not None and (sealing not in self.seals or name not in (None, self.seals[sealing])):
                yield f"{at}: the encrypted content could not be verified"
            if name is not None:
                if name in ids:
                    yield f"{at}: duplicate item with id {name}"
                ids.add(name)
            known = self.seals.get(sealing, "") if sealing else name
            if known in self.given:
                given, earlier, later = self.given[known]
                follows = items[place + 1] if place + 1 < len(items) else {}
                precedes = items[place - 1] if place else {}
                if kind == "reasoning":
                    if given["summary"] != item["summary"]:
                        yield f"{at}: reasoning has changed"
                    if later and not self.same(follows, later):
                        yield f"{at}: reasoning {known} without its required following item {later}"
                elif earlier.startswith("rs_") and not self.same(precedes, earlier):
                    yield f"{at}: {kind} {known} without its required reasoning item {earlier}"
            if kind == "function_call":
                if item["call_id"] in calls:
                    yield f"{at}: duplicate call {item['call_id']}"
                calls[item["call_id"]] = False
            elif kind == "function_call_output":
                if item["call_id"] not in calls:
                    yield f"{at}: no tool call found for output {item['call_id']}"
                calls[item["call_id"]] = True
        if missing := [call for call, over in calls.items() if not over]:
            yield f"no tool output found for {missing}"

    def same(self, item: Json, name: str) -> bool:
        """Whether an item may be the one with this id; a client may leave ids out, and then its kind says it."""
        if item.get("id") is not None:
            return bool(item["id"] == name)
        given = self.given[name][0]
        if given["type"] != item.get("type", "message"):
            return False
        return all(item.get(key) == given[key] for key in ("name", "encrypted_content") if key in given)

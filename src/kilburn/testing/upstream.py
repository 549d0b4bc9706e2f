"""A provider with scripted replies over HTTP, for tests of clients, proxies and gateways.

It implements OpenAI's chat completions, responses and embeddings, Anthropic's messages and token count, and both lists of models.
It refuses what the providers refuse, counts the cached prefix as they do, records every request, and fails in the ways in which
providers and networks fail.

    upstream = Upstream(calling(("read", {"path": "a.py"})), "The slice is wrong.", Refusal(status=529))
    with serving(upstream) as url:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        ...
    assert not upstream.refused
    assert upstream.sent[1].shared > 0.9 * upstream.sent[0].tokens

The application is plain ASGI; `serving` needs uvicorn (extra `serve`).
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal

import msgspec

from kilburn.errors import KilburnError, MissingExtra, Unavailable
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Finish, Reply
from kilburn.testing.replies import SIGNED, Choice, Replied, ReplyUsage, encoded, events, signature, whole
from kilburn.wire.form import parse
from kilburn.wire.validity import validate_chat, validate_messages

__all__ = ["Sent", "Upstream", "calling", "serving"]

if TYPE_CHECKING:
    import uvicorn

Json = dict[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

Entry = Any
"""One entry of a script: a text, a message (a `Message`, or a dict of the chat or the messages form), a `Reply`, a tuple of
these (one for each choice of `n`), a `Refusal`, a `Break`, or a function of the `Sent` that gives one of these."""

CHARS_PER_TOKEN = 4
"""Characters of a token in this provider's count."""

BLOCK = 64
"""Bytes of the prompt that are compared at once to find the prefix shared with earlier prompts."""

SHUTDOWN_TIMEOUT = 1.0
"""Seconds for which a stopping server waits for its requests."""

CACHE_STEP = 128
"""Step in tokens of the cached prefix that OpenAI reports."""

LOOKBACK = 20
"""Blocks before a breakpoint where Anthropic's cache looks for an entry."""

PATHS = {
    "/v1/chat/completions": "chat",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "count",
    "/v1/embeddings": "embeddings",
    "/v1/models": "models",
}

SYNTAX = ("type", "cache_control")
"""Keys whose values a model does not read."""

SCHEMAS = ("input", "input_schema", "parameters")
"""Keys whose values a model reads as JSON."""

KINDS = {
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("invalid_request_error", "authentication_error"),
    403: ("invalid_request_error", "permission_error"),
    404: ("invalid_request_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    429: ("requests", "rate_limit_error"),
    500: ("server_error", "api_error"),
    529: ("server_error", "overloaded_error"),
}
"""OpenAI's and Anthropic's error types by status."""

CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}


class Refusal(msgspec.Struct, frozen=True, kw_only=True):
    """An error in place of a reply, in the form of the requested API.

    Args:
        status: 429, 500, 529, ...
        words: the message; None for the status's usual one.
        retry_after: seconds in the header of that name.
        overlong: report that the prompt is too long for the model, in the provider's own words, with status 400.
    """

    status: int = 400
    words: str | None = None
    retry_after: float | None = None
    overlong: bool = False


class Break(msgspec.Struct, frozen=True, kw_only=True):
    """A reply that fails while it is sent.

    Args:
        how: cut: the connection breaks between two events. torn: it breaks within an event, and within a multi-byte character
            if there is one. short: the body ends regularly, without the closing events of a reply. garbled: one event is not
            JSON, and the others follow. error: an error event in the API's form ends the stream. silent: nothing follows until
            the client disconnects.
        after: events before the failure; None for a failure before the headers, with cut and silent only. An unstreamed reply
            is cut or torn in the middle of its body.
        reply: the reply that begins.
        error: the content of an error event.
    """

    how: Literal["cut", "torn", "short", "garbled", "error", "silent"]
    after: int | None = 4
    reply: Entry = "A reply that nobody hears to its end."
    error: Refusal = Refusal(status=529)


class Sent:
    """A received request and its outcome.

    `api` is "chat", "messages", "responses", "count", "embeddings" or "models". `raw` is the body in bytes, `body` decoded.
    `tokens` counts the prompt, `shared` the longest prefix in common with an earlier prompt; `cached` and `written` are the
    tokens that the provider's cache would read and write. `wrong` tells why a request was refused as invalid. `gone` is the time
    (of `time.monotonic`) at which the client disconnected before the end. `over` is set when the answer has ended or failed.
    """

    def __init__(self, api: str, method: str, path: str, headers: dict[str, str], raw: bytes) -> None:
        self.api, self.method, self.path, self.headers, self.raw = api, method, path, headers, raw
        self.body: Json = {}
        self.at = time.monotonic()
        self.status: int | None = None
        self.wrong: str | None = None
        self.tokens = self.shared = self.cached = self.written = 0
        self.gone: float | None = None
        self.over = threading.Event()

    @property
    def streamed(self) -> bool:
        """Whether the client asked for a stream."""
        return self.body.get("stream") is True


class _Cut(Exception):
    """Ends a connection without its closing bytes."""


def calling(
    *calls: tuple[str, Mapping[str, Any]] | tuple[str, Mapping[str, Any], str], text: str = "", thinking: str = ""
) -> Message:
    """Return a reply that calls tools, each given as name, arguments and call id; without an id it gets the next free one."""
    parts = [Part(kind=kind, text=words) for kind, words in ((Kind.REASONING, thinking), (Kind.TEXT, text)) if words]
    for name, arguments, *rest in calls:
        arguments_json = json.dumps(arguments, ensure_ascii=False)
        parts.append(Part(kind=Kind.CALL, text=arguments_json, name=name, call=rest[0] if rest else ""))
    return Message(role=Role.ASSISTANT, parts=tuple(parts))


class Upstream:
    """The provider, as an ASGI application.

    Args:
        script: replies, one entry for each request; `enqueue` adds more.
        otherwise: the reply once the script has run out.
        window: maximum tokens of a prompt; None for any number.
        least: minimum tokens of a cached prefix.
        delay, pause: seconds before a reply begins, and before each further event.
        piece: characters of a streamed piece.
        measured: whether requests are validated, recorded, and compared with earlier ones. A load test switches this off.

    `sent` lists all requests, oldest first.
    """

    def __init__(
        self,
        *script: Entry,
        otherwise: Entry = "OK.",
        window: int | None = None,
        least: int = 1024,
        delay: float = 0.0,
        pause: float = 0.0,
        piece: int = 4,
        measured: bool = True,
    ) -> None:
        self.sent: list[Sent] = []
        self.otherwise, self.window, self.least = otherwise, window, least
        self.delay, self.pause, self.piece, self.measured = delay, pause, piece, measured
        self._script: deque[Entry] = deque(script)
        self._seen: set[bytes] = set()
        self._written: set[bytes] = set()
        self._responses: dict[str, list[Json]] = {}
        self._items = Items()
        self._number = itertools.count(1)

    def enqueue(self, *entries: Entry) -> None:
        """Append to the script."""
        self._script.extend(entries)

    @property
    def left(self) -> int:
        """The number of unused entries of the script."""
        return len(self._script)

    @property
    def refused(self) -> list[Sent]:
        """The requests that a provider would have refused."""
        return [request for request in self.sent if request.wrong is not None]

    @property
    def prompts(self) -> list[Sent]:
        """The requests for replies, without those for counts, embeddings and lists."""
        return [request for request in self.sent if request.api in ("chat", "messages", "responses")]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
            return
        if scope["type"] != "http":
            raise NotImplementedError(f"{scope['type']} is not supported here")
        raw = await _body(receive)
        path = scope["path"]
        api = "models" if path.startswith("/v1/models/") else PATHS.get(path, "unknown")
        headers = {key.decode("latin-1"): value.decode("latin-1") for key, value in scope["headers"]}
        request = Sent(api, scope["method"], path, headers, raw)
        if self.measured:
            self.sent.append(request)
        try:
            await self._answer(request, receive, send)
        finally:
            request.over.set()

    async def _answer(self, request: Sent, receive: Receive, send: Send) -> None:
        if request.api == "unknown" or (request.method == "POST") == (request.api == "models"):
            await self._refuse(request, Refusal(status=404, words=f"{request.method} {request.path} is not supported here"), send)
            return
        if request.api == "models":
            await _reply(request, 200, _models(request), send)
            return
        if (wrong := self._read(request)) is not None:
            request.wrong = wrong
            await self._refuse(request, Refusal(words=wrong), send)
            return
        if request.api == "count":
            await _reply(request, 200, {"input_tokens": request.tokens}, send)
        elif request.api == "embeddings":
            await _reply(request, 200, _embeddings(request), send)
        elif self.window is not None and request.tokens > self.window:
            await self._refuse(request, Refusal(overlong=True), send)
        else:
            await self._play(request, self._script.popleft() if self._script else self.otherwise, receive, send)

    def _read(self, request: Sent) -> str | None:
        """Decode, validate and count a request. Return what is wrong with it, or None."""
        try:
            body = json.loads(request.raw)
        except ValueError as error:
            return f"We could not parse the JSON body of your request: {error}"
        if not isinstance(body, dict):
            return "the body is no JSON object"
        request.body = body
        if not self.measured or request.api == "embeddings":
            return None
        try:
            resolved = self._resolved(request)
            _judge(request.api, resolved)
            if request.api == "responses":
                self._items.judge(resolved["input"], persisted=request.body.get("store") is not False)
        except KilburnError as error:
            return error.what
        items, breakpoints = _prompt(request.api, resolved)
        request.tokens = sum(len(item) for item in items) // CHARS_PER_TOKEN
        if request.api != "count":
            self._count(request, items, breakpoints)
        return None

    def _resolved(self, request: Sent) -> Json:
        """Return the body of a request to the responses API with the items that it continues."""
        if request.api != "responses":
            return request.body
        name = request.body.get("previous_response_id")
        if name is not None and name not in self._responses:
            raise _Wrong(f"Previous response with id '{name}' not found.")
        earlier_items = [] if name is None else self._responses[name]
        return {**request.body, "input": [*earlier_items, *_input_items(request.body)]}

    def _count(self, request: Sent, items: Sequence[bytes], breakpoints: Sequence[int]) -> None:
        """Compute the prefix shared with earlier prompts, and its cached part."""
        text, model = b"".join(items), str(request.body.get("model")).encode()
        chain = hashlib.blake2b(model, digest_size=16)
        is_shared = True
        for at in range(0, len(text) - len(text) % BLOCK, BLOCK):
            chain.update(text[at : at + BLOCK])
            digest = chain.digest()
            is_shared = is_shared and digest in self._seen
            request.shared += is_shared * BLOCK
            self._seen.add(digest)
        request.shared //= CHARS_PER_TOKEN
        if request.api != "messages":
            request.cached = request.shared - request.shared % CACHE_STEP if request.shared >= self.least else 0
            return
        digests, ends, chain, length = [], [], hashlib.blake2b(model, digest_size=16), 0
        for item in items:
            chain.update(hashlib.blake2b(item, digest_size=16).digest())
            length += len(item)
            digests.append(chain.digest())
            ends.append(length // CHARS_PER_TOKEN)
        for index in breakpoints:
            near = range(max(0, index - LOOKBACK), index + 1)
            request.cached = max([request.cached, *(ends[at] for at in near if digests[at] in self._written)])
        eligible = [index for index in breakpoints if ends[index] >= self.least]
        request.written = max([ends[index] - request.cached for index in eligible] + [0])
        self._written.update(digests[index] for index in eligible)

    async def _refuse(self, request: Sent, refusal: Refusal, send: Send) -> None:
        extra = {} if refusal.retry_after is None else {"retry-after": f"{refusal.retry_after:g}"}
        await _reply(request, refusal.status, self._error(request, refusal), send, extra)

    def _error(self, request: Sent, refusal: Refusal) -> Json:
        anthropic = request.api in ("messages", "count") or "anthropic-version" in request.headers
        usual = {429: "Rate limit reached", 500: "Internal server error", 529: "Overloaded"}
        words, code = refusal.words or usual.get(refusal.status, "Bad request"), CODES.get(refusal.status)
        param = None
        if refusal.overlong:
            window, code = self.window or request.tokens - 1, "context_length_exceeded"
            param = "input" if request.api == "responses" else "messages"
            words = f"This model's maximum context length is {window} tokens. However, your messages resulted in {request.tokens}"
            words += " tokens. Please reduce the length of the messages."
            if anthropic:
                words = f"prompt is too long: {request.tokens} tokens > {window} maximum"
            elif request.api == "responses":
                words = "Your input exceeds the context window of this model. Please adjust your input and try again."
        openai_kind, anthropic_kind = KINDS.get(refusal.status, KINDS[500 if refusal.status >= 500 else 400])
        if anthropic:
            number = next(self._number)
            return {"type": "error", "error": {"type": anthropic_kind, "message": words}, "request_id": f"req_{number}"}
        return {"error": {"message": words, "type": openai_kind, "param": param, "code": code}}

    async def _play(self, request: Sent, entry: Entry, receive: Receive, send: Send) -> None:
        """Send an entry, and watch meanwhile for the client's disconnection."""
        while callable(entry):
            entry = entry(request)
        saying = asyncio.ensure_future(self._say(request, entry, send))
        watching = asyncio.ensure_future(_hung_up(receive))
        try:
            await asyncio.wait({saying, watching}, return_when=asyncio.FIRST_COMPLETED)
            if not saying.done():
                request.gone = time.monotonic()
        finally:
            for task in (saying, watching):
                if not task.done():
                    task.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        with suppress(asyncio.CancelledError):
            await saying

    async def _say(self, request: Sent, entry: Entry, send: Send) -> None:
        fault = entry if isinstance(entry, Break) else None
        if fault is not None:
            entry = fault.reply
            if fault.after is None:
                if fault.how == "silent":
                    await asyncio.Event().wait()
                raise _Cut
        if isinstance(entry, Refusal):
            await self._refuse(request, entry, send)
            return
        answer = self._answered(request, entry)
        if self.delay:
            await asyncio.sleep(self.delay)
        if request.streamed:
            await self._stream(request, answer, fault, send)
            return
        body = json.dumps(whole(request.api, answer), ensure_ascii=False).encode()
        if fault is None:
            await _send(request, 200, "application/json", [body], send)
        elif fault.how == "error":
            await self._refuse(request, Refusal(status=500), send)
        elif fault.how == "garbled":
            await _send(request, 200, "application/json", [b"<html>" + body], send)
        else:
            await _begin(request, 200, "application/json", {}, send)
            await send({"type": "http.response.body", "body": body[: len(body) // 2], "more_body": True})
            await self._fail(request, fault, b"", send)

    async def _stream(self, request: Sent, answer: Replied, fault: Break | None, send: Send) -> None:
        await _begin(request, 200, "text/event-stream; charset=utf-8", {"cache-control": "no-cache"}, send)
        for number, event in enumerate(events(request.api, answer)):
            data = encoded(event)
            if number and self.pause:
                await asyncio.sleep(self.pause)
            if fault is not None and number == fault.after:
                if fault.how != "garbled":
                    await self._fail(request, fault, data, send)
                    return
                data = data[: len(data) // 2] + b"\n\n"
            await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b""})

    async def _fail(self, request: Sent, fault: Break, data: bytes, send: Send) -> None:
        """End a started answer. `data`: the event that would have come next."""
        if fault.how == "silent":
            await asyncio.Event().wait()
        if fault.how == "torn":
            wide = next((at for at, byte in enumerate(data) if byte >= 0x80), len(data) // 2)
            await send({"type": "http.response.body", "body": data[: wide + 1], "more_body": True})
        if fault.how in ("cut", "torn"):
            await asyncio.sleep(0.01)
            raise _Cut
        last = b""
        if fault.how == "error":
            error = self._error(request, fault.error)
            if request.api == "responses":
                error = {**error["error"], "type": "error", "sequence_number": 0}
            last = encoded((None if request.api == "chat" else "error", error))
        await send({"type": "http.response.body", "body": last})

    def _answered(self, request: Sent, entry: Entry) -> Replied:
        number = next(self._number)
        count = int(request.body.get("n") or 1) if request.api == "chat" else 1
        entries = list(entry) if isinstance(entry, tuple) else [entry]
        choices = [self._choice(request, entries[min(index, len(entries) - 1)]) for index in range(count)]
        parts = [part for choice in choices for part in choice.parts]
        usage = ReplyUsage(
            prompt=request.tokens,
            cached=request.cached,
            written=request.written,
            reply=sum(-(-len(part.text) // CHARS_PER_TOKEN) for part in parts) or 1,
            thought=sum(-(-len(part.text) // CHARS_PER_TOKEN) for part in parts if part.kind is Kind.REASONING),
        )
        answer = Replied(
            id=f"{number:024d}",
            created=int(time.time()),
            asked=request.body,
            choices=tuple(choices),
            usage=usage,
            piece=self.piece,
        )
        if request.api == "responses":
            response, keeps = whole("responses", answer), request.body.get("store") is not False
            if keeps:
                self._responses[response["id"]] = [*self._resolved(request)["input"], *response["output"]]
            if self.measured:
                self._items.keep(response["output"], persisted=keeps)
        return answer

    def _choice(self, request: Sent, entry: Entry) -> Choice:
        reply = _as_reply(entry)
        parts = [self._named(request, part) for part in reply.message.parts]
        finish, stop = reply.finish, None
        if finish is Finish.STOP and any(part.kind is Kind.CALL for part in parts):
            finish = Finish.CALLS
        stops = request.body.get("stop_sequences" if request.api == "messages" else "stop") or ()
        stops = [stops] if isinstance(stops, str) else stops
        caps = (request.body.get(key) for key in ("max_tokens", "max_completion_tokens", "max_output_tokens"))
        room = next((cap for cap in caps if cap), 1 << 40) * CHARS_PER_TOKEN
        reply_parts: list[Part] = []
        for part in parts:
            text = part.text
            if part.kind is Kind.TEXT:
                first_stop = min(((text.find(word), word) for word in stops if word in text), default=None)
                if first_stop is not None:
                    text, stop = text[: first_stop[0]], first_stop[1]
            if len(text) > room and part.kind in (Kind.TEXT, Kind.REASONING):
                text, stop, finish = text[:room], None, Finish.LENGTH
            room -= len(text)
            reply_parts.append(msgspec.structs.replace(part, text=text))
            if stop is not None or finish is Finish.LENGTH:
                break
        if stop is not None:
            finish = Finish.STOP
        return Choice(parts=tuple(reply_parts), finish=finish, stop=stop)

    def _named(self, request: Sent, part: Part) -> Part:
        if part.kind is not Kind.CALL or part.call:
            return part
        prefix = "toolu_" if request.api == "messages" else "call_"
        return msgspec.structs.replace(part, call=f"{prefix}{next(self._number):08d}")


def _as_reply(entry: Entry) -> Reply:
    if isinstance(entry, Reply):
        return entry
    if isinstance(entry, str):
        entry = Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=entry),))
    elif isinstance(entry, dict):
        entry = parse(entry)[0]
    if not isinstance(entry, Message):
        raise TypeError(f"{type(entry).__name__} in the script; give a text, a message, a Reply, a Refusal or a Break")
    return Reply(message=entry)


def _judge(api: str, body: Json) -> None:
    """Validate a request.

    Raises:
        KilburnError: the provider would refuse it.
    """
    if not isinstance(body.get("model"), str):
        raise _Wrong("you must provide a model parameter")
    if api == "responses":
        _judge_items(body["input"])
        return
    transcript = body.get("messages")
    if not isinstance(transcript, list) or not all(isinstance(message, dict) for message in transcript):
        raise _Wrong("messages: not a list of objects")
    if api == "chat":
        validate_chat(transcript)
        return
    if api == "messages" and not isinstance(body.get("max_tokens"), int):
        raise _Wrong("max_tokens: Field required")
    validate_messages(transcript)
    for message in transcript:
        for block in message["content"] if isinstance(message.get("content"), list) else ():
            signed = str(block.get("signature", ""))
            if block["type"] == "thinking" and signed.startswith(SIGNED) and signed != signature(block["thinking"]):
                raise _Wrong("Invalid `signature` in `thinking` block")


class _Wrong(KilburnError):
    """A request that the provider refuses for other reasons than its transcript."""

    boundary = "wire"


def _input_items(body: Json) -> list[Json]:
    items = body.get("input")
    if isinstance(items, str):
        return [{"type": "message", "role": "user", "content": items}]
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise _Wrong("input: neither a string nor a list of items")
    return items


class Items:
    """The items of responses, by their ids."""

    def __init__(self) -> None:
        self._kept: set[str] = set()
        self._sealed: dict[str, Any] = {}
        self._thought: dict[str, str] = {}
        """The id of the reasoning before an item, by the item's id."""
        self._behind: dict[str, Json] = {}
        """The item behind a reasoning, by the reasoning's id."""

    def keep(self, output: Sequence[Json], *, persisted: bool) -> None:
        """Record a reply's items; `persisted`: later requests may name them by id."""
        for previous, item in zip([{}, *output], output, strict=False):
            name = str(item.get("id"))
            if persisted:
                self._kept.add(name)
            if item["type"] == "reasoning":
                self._sealed[name] = item.get("encrypted_content")
            if previous.get("type") == "reasoning":
                self._thought[name] = previous["id"]
                self._behind[previous["id"]] = item

    def judge(self, items: Sequence[Json], *, persisted: bool) -> None:
        """Validate the items of a request.

        Raises:
            KilburnError: the provider would refuse them.
        """
        ids: set[str] = set()
        for item, following in zip(items, [*items, {"role": "user"}][1:], strict=True):
            name, kind = item.get("id"), item.get("type", "message")
            if kind == "reasoning":
                self._judge_reasoning(item, following, persisted=persisted)
            if not isinstance(name, str):
                continue
            if name in ids:
                raise _Wrong(f"Duplicate item found with id {name}. Remove duplicate items from your input and try again.")
            ids.add(name)
            if (thought := self._thought.get(name, name)) not in ids:
                raise _Wrong(f"Item '{name}' of type '{kind}' was provided without its required 'reasoning' item: '{thought}'.")

    def _judge_reasoning(self, item: Json, following: Json, *, persisted: bool) -> None:
        name, sealed = str(item.get("id")), item.get("encrypted_content")
        spoken = following.get("role", "assistant") == "assistant" and not str(following.get("type")).endswith("_output")
        behind = self._behind.get(name, following)
        same = following.get("type", "message") == behind.get("type", "message") and following.get("name") == behind.get("name")
        if not spoken or not same or following.get("id", behind.get("id")) != behind.get("id"):
            raise _Wrong(f"Item '{name}' of type 'reasoning' was provided without its required following item.")
        if sealed is not None and self._sealed.get(name, sealed) not in (sealed, None):
            raise _Wrong(f"The encrypted content for item {name} could not be verified.")
        if sealed is None and name in self._sealed and not (persisted and name in self._kept):
            raise _Wrong(f"Item with id '{name}' not found. Items are not persisted when `store` is set to false.")


def _judge_items(items: Sequence[Json]) -> None:
    called: dict[str, bool] = {}
    for index, item in enumerate(items):
        kind = item.get("type", "message")
        if kind in ("function_call", "custom_tool_call"):
            if item.get("call_id") in called:
                raise _Wrong(f"Duplicate call with call_id {item.get('call_id')}")
            called[str(item.get("call_id"))] = False
        elif kind in ("function_call_output", "custom_tool_call_output"):
            if called.get(str(item.get("call_id"))) is not False:
                raise _Wrong(f"No tool call found for function call output with call_id {item.get('call_id')}.")
            called[item["call_id"]] = True
        elif kind == "message" and item.get("role") not in ("user", "assistant", "system", "developer"):
            raise _Wrong(f"input[{index}].role: {str(item.get('role'))[:40]!r}")
    if missing := [call for call, answered in called.items() if not answered]:
        raise _Wrong(f"No tool output found for function call {missing[0]}.")


def _prompt(api: str, body: Json) -> tuple[list[bytes], list[int]]:
    """Return what the model reads, in the provider's order, and the indexes of the client's cache breakpoints."""
    items: list[bytes] = []
    breakpoints: list[int] = []

    def add(value: Any, role: str = "") -> None:
        if _marked(value):
            breakpoints.append(len(items))
        items.append(f"<{role}>{_spoken(value)}\n".encode("utf-8", "surrogatepass"))

    for tool in body.get("tools") or ():
        add(tool)
    if api in ("messages", "count"):
        system = body.get("system") or ()
        for block in [{"type": "text", "text": system}] if isinstance(system, str) else system:
            add(block)
        for message in body["messages"]:
            content = message.get("content", "")
            for block in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                add(block, message["role"])
        if body.get("cache_control") and items:
            breakpoints.append(len(items) - 1)
        return items, breakpoints
    if body.get("instructions"):
        add(body["instructions"])
    for message in body["input"] if api == "responses" else body["messages"]:
        add(message)
    return items, breakpoints


def _marked(value: Any) -> bool:
    if isinstance(value, dict):
        return bool(value.get("cache_control")) or any(map(_marked, value.values()))
    return isinstance(value, list) and any(map(_marked, value))


def _spoken(value: Any) -> str:
    """Return what a model reads of a message, block or tool."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "".join(map(_spoken, value))
    if not isinstance(value, dict):
        return "" if value is None else str(value)
    values = [(key, inner) for key, inner in value.items() if key not in SYNTAX]
    return " ".join(json.dumps(inner, ensure_ascii=False) if key in SCHEMAS else _spoken(inner) for key, inner in values)


def _models(request: Sent) -> Json:
    names = ("scripted", "scripted-mini")
    if "anthropic-version" in request.headers:
        models: list[Json] = [
            {"type": "model", "id": name, "display_name": name, "created_at": "2026-01-01T00:00:00Z", "lifecycle": "active"}
            for name in names
        ]
        listed: Json = {"data": models, "has_more": False, "first_id": names[0], "last_id": names[-1]}
    else:
        models = [{"id": name, "object": "model", "created": 1767225600, "owned_by": "kilburn"} for name in names]
        listed = {"object": "list", "data": models}
    model_id = request.path.removeprefix("/v1/models").strip("/")
    return {**models[0], "id": model_id} if model_id else listed


def _embeddings(request: Sent) -> Json:
    """Return eight numbers for each text, from its digest."""
    inputs = request.body.get("input")
    texts = inputs if isinstance(inputs, list) and not all(isinstance(item, int) for item in inputs) else [inputs]
    data = []
    for index, text in enumerate(texts):
        digest = hashlib.blake2b(json.dumps(text).encode(), digest_size=8).digest()
        vector = [byte / 255 for byte in digest]
        packed = base64.b64encode(struct.pack("<8f", *vector)).decode()
        embedding: Any = packed if request.body.get("encoding_format") == "base64" else vector
        data.append({"object": "embedding", "index": index, "embedding": embedding})
    tokens = len(request.raw) // CHARS_PER_TOKEN
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": request.body.get("model"), "usage": usage}


async def _live(receive: Receive, send: Send) -> None:
    while True:
        kind = (await receive())["type"]
        await send({"type": f"{kind}.complete"})
        if kind == "lifespan.shutdown":
            return


async def _body(receive: Receive) -> bytes:
    chunks: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(chunks)
        chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(chunks)


async def _hung_up(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _begin(request: Sent, status: int, kind: str, extra: Mapping[str, str], send: Send) -> None:
    request.status = status
    name = "request-id" if request.api in ("messages", "count") else "x-request-id"
    headers = {"content-type": kind, name: f"req_{id(request):x}", **extra}
    packed = [(key.encode(), value.encode()) for key, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": packed})


async def _send(request: Sent, status: int, kind: str, body: Sequence[bytes], send: Send, **extra: str) -> None:
    await _begin(request, status, kind, {"content-length": str(sum(map(len, body))), **extra}, send)
    await send({"type": "http.response.body", "body": b"".join(body)})


async def _reply(request: Sent, status: int, body: Json, send: Send, extra: Mapping[str, str] | None = None) -> None:
    await _send(request, status, "application/json", [json.dumps(body, ensure_ascii=False).encode()], send, **(extra or {}))


@contextmanager
def serving(app: Any, **options: Any) -> Iterator[str]:
    """Serve an ASGI application on a free port of the loopback, in a thread. Yields its URL without a trailing slash.

    At the end of the block open connections are closed.

    Args:
        options: of `uvicorn.Config`.

    Raises:
        MissingExtra: uvicorn is not installed. Unavailable: the application did not start.
    """
    try:
        import uvicorn
    except ImportError:
        raise MissingExtra("uvicorn", "serve") from None
    server = uvicorn.Server(uvicorn.Config(app, **({"log_config": None, "log_level": "critical"} | options)))
    loop, ended = asyncio.new_event_loop(), asyncio.Event()

    def run(listening: socket.socket) -> None:
        with suppress(SystemExit), asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(_serve(server, listening, ended))

    with socket.socket() as listening:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        listening.bind(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        thread = threading.Thread(target=run, args=(listening,), name=f"serving {port}", daemon=True)
        thread.start()
        try:
            while not server.started:
                if not thread.is_alive():
                    raise Unavailable("the application did not start", advice="run it with uvicorn to see the reason")
                time.sleep(0.005)
            yield f"http://127.0.0.1:{port}"
        finally:
            with suppress(RuntimeError):  # the loop has ended already
                loop.call_soon_threadsafe(ended.set)
            thread.join()


async def _serve(server: uvicorn.Server, listening: socket.socket, ended: asyncio.Event) -> None:
    """Serve until `ended` is set, and stop at once: uvicorn itself polls ten times a second, and pauses twice on the way."""
    server.config.load()
    server.lifespan = server.config.lifespan_class(server.config)
    await server.startup(sockets=[listening])
    await server.on_tick(0)  # sets the headers of every response
    await ended.wait()
    for listener in server.servers:
        listener.close()
    state = server.server_state
    for connection in list(state.connections):
        connection.shutdown()
    patience = time.monotonic() + SHUTDOWN_TIMEOUT
    while (state.connections or state.tasks) and time.monotonic() < patience:
        await asyncio.sleep(0.002)
    for task in state.tasks:
        task.cancel()
    await server.lifespan.shutdown()

"""The upstream of the gateway: an endpoint over HTTP, or a model in this process.

Both answer with a status, headers and pieces of bytes in the client's form. Leaving the block of `ask` ends the work, also before
the first piece.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import traceback
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack, aclosing, asynccontextmanager, suppress
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import anyio
import msgspec

from kilburn.errors import (
    KilburnError,
    MissingExtra,
    ModelError,
    Overlong,
    RateLimited,
    Refused,
    SpecError,
    ToolsRefused,
    Unavailable,
)
from kilburn.gateway.chat import ChatForm as ChatForm
from kilburn.gateway.events import Events, ServerEvent, Shape, detect_shape
from kilburn.gateway.form import Form
from kilburn.gateway.keys import STAND_INS
from kilburn.gateway.messages import MessagesForm as MessagesForm
from kilburn.gateway.problems import has_openai_api
from kilburn.gateway.threads import in_thread
from kilburn.model import Delta, Model, Reply, Request
from kilburn.models.provider_errors import MESSAGE_LETTERS, provider_error
from kilburn.tokens.choice import counter_for
from kilburn.wire import chat, messages
from kilburn.wire.compaction import betas_for
from kilburn.wire.plain import NOT_JSON

try:
    import aiohttp
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.http import HttpProcessingError
    from yarl import URL
except ModuleNotFoundError as error:
    raise MissingExtra("aiohttp", "serve") from error


log = logging.getLogger("kilburn.gateway")

HOP = frozenset({
    "connection", "cookie", "keep-alive", "proxy-authenticate", "proxy-authorization", "te", "trailer", "transfer-encoding",
    "upgrade", "host", "content-length", "accept-encoding", "content-encoding", "date", "server", "expect", "set-cookie",
    "proxy-connection", "alt-svc",
})  # fmt: skip
"""Headers of a single connection or host, or that are set anew."""

AUTOMATIC = ("user-agent", "accept", "content-type")
"""Headers that are sent only if the client sends them."""

MAX_HEADER_BYTES = 1 << 16
"""Maximum length of a header of an answer, in bytes."""

ABSENT = (404, 405, 501)
"""Statuses of a missing path."""

KEY_FROM = "x-kilburn-key-from"
"""The gateway's own header: the environment variable with the provider's key. A client's header of this name is dropped."""

AZURE = "/openai/"
"""The prefix of Azure's paths, which go upstream unchanged and are never translated."""

TRACED = ("traceparent", "tracestate")
"""Headers with the span of a request, in every form."""

REPLY = 4096
"""Maximum tokens of a reply if the request sets none and the messages form requires a value."""

UNLIMITED = 1 << 40
"""The same for the chat form, which requires no value."""

MAX_ANSWER_BYTES = 1 << 28
"""Maximum size of a whole answer, in bytes."""

LARGE = 1 << 18
"""Minimum size of a body that is read by a thread, in bytes."""

WHOLE = 1 << 20
"""Maximum size of a body that aiohttp gets in one piece, in bytes."""

LINGER = 1.0
"""Seconds that an endpoint may keep its stream open after a reply."""

DEFAULT_REPLY_TOKENS = 1024
"""Tokens of a reply if a request names no number."""

THREADS = 64
"""Maximum number of concurrent requests to a model in this process."""

FORMS: dict[str, Form] = {"chat": ChatForm(), "messages": MessagesForm()}
"""The forms of endpoints."""


class _More(msgspec.Struct):
    model: Any = ""
    stream: Any = False


Body = bytes | AsyncIterable[bytes]


class Response(NamedTuple):
    """An upstream's answer: its status, its headers, and its body in pieces."""

    status: int
    headers: dict[str, str]
    pieces: AsyncIterator[bytes]


def is_lent(headers: Mapping[str, str]) -> bool:
    """Return whether a request uses the gateway's key for the provider, and not one of the client's own."""
    bearer = headers.get("authorization", "").removeprefix("Bearer ").strip()
    credentials = (bearer, headers.get("x-api-key", ""), headers.get("api-key", ""))
    return bool(headers.get(KEY_FROM)) or all(key in STAND_INS for key in credentials)


def joined(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return headers by lower-case name; several of one name are joined as a list, which means the same (RFC 9110, 5.2)."""
    out: dict[str, str] = {}
    for spelling, value in headers:
        name = spelling.lower()
        out[name] = f"{out[name]}, {value}" if name in out else value
    return out


def _passed_on(headers: Mapping[str, str]) -> dict[str, str]:
    """Return the headers that do not concern a single connection, by their name or by the `Connection` header."""
    connection_headers = {name.strip().lower() for name in headers.get("connection", "").split(",")}
    return {name: value for name, value in headers.items() if name not in HOP and name not in connection_headers}


class UpstreamApi(Protocol):
    """Answers requests in the clients' forms."""

    def speaks(self, form: Form) -> bool:
        """Return whether requests of a form are passed on as they are, as far as is known; others are translated."""
        ...

    def ask(self, method: str, path: str, body: Body, headers: Mapping[str, str], form: Form | None) -> Any:
        """Return an async context with the `Response`.

        Args:
            path: the path below `/v1`, or from `/openai/` on, with the query, percent-encoded as by the client.
            body: the body, or its pieces if there is no form.
            headers: the client's headers.
            form: the body's form; None if it is passed on unread.

        Raises:
            ModelError: there is no answer.
        """
        ...

    async def close(self) -> None:
        """Close the connections that are kept open."""
        ...


class Endpoint:
    """An endpoint that speaks the client's form.

    Args:
        url: the base URL, as the provider's SDK takes it: "https://api.openai.com/v1", or "https://api.anthropic.com".
        timeout: seconds of silence before a request is given up.

    Raises:
        SpecError: the URL is not an address of a server.
    """

    def __init__(self, url: str, *, timeout: float = 600.0) -> None:
        if not re.fullmatch(r"https?://[^/?#\s]+(/[^?#\s]*)?", url):
            raise SpecError("the upstream's URL is invalid", advice="give one such as https://api.openai.com/v1")
        base = url.rstrip("/")
        self.form = "chat" if has_openai_api(base) else "messages"
        self.url = base if self.form == "chat" else f"{base.removesuffix('/v1')}/v1"
        self._lacks: set[str] = set()
        self._timeout = timeout
        self._session: aiohttp.ClientSession | None = None
        # The last answer on each open connection.
        self._answers: dict[ResponseHandler, aiohttp.StreamReader] = {}

    @property
    def _client(self) -> aiohttp.ClientSession:
        if self._session is None:  # it belongs to the event loop of the first request
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0),
                timeout=aiohttp.ClientTimeout(total=None, sock_connect=min(self._timeout, 15.0), sock_read=self._timeout),
                cookie_jar=aiohttp.DummyCookieJar(),
                skip_auto_headers=AUTOMATIC,
                max_line_size=MAX_HEADER_BYTES,
                max_field_size=MAX_HEADER_BYTES,
            )
        return self._session

    def speaks(self, form: Form) -> bool:
        """See `UpstreamApi`."""
        return (form.rendered == "messages") == (self.form == "messages") and form.path not in self._lacks

    def ask(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], form: Form | None
    ) -> AbstractAsyncContextManager[Response]:
        """See `UpstreamApi`. An endpoint without the path of the responses form is asked for chat completions instead."""
        whole, azure = body if isinstance(body, bytes) else b"", path.startswith(AZURE)
        if form is not None and not azure and not self.speaks(form):
            return self._translated(whole, headers, form)
        out_headers = self._headers(headers, azure=azure)
        if whole is not body and "content-length" in headers:
            out_headers["content-length"] = headers["content-length"]
        if form is None or azure or form.name != "responses":
            return self._sent(method, path, body, out_headers, through=form is None)
        return self._either(method, path, whole, out_headers, headers, form)

    @asynccontextmanager
    async def _either(
        self, method: str, path: str, whole: bytes, out_headers: dict[str, str], headers: Mapping[str, str], form: Form
    ) -> AsyncIterator[Response]:
        """Yield the answer to a request as it is, or translated if the endpoint has no such path."""
        async with AsyncExitStack() as stack:
            answer = await stack.enter_async_context(self._sent(method, path, whole, out_headers))
            if answer.status in ABSENT:
                with suppress(Refused):  # in that case the model is missing
                    translated = await stack.enter_async_context(self._translated(whole, headers, form))
                    if translated.status < 400:
                        self._lacks.add(form.path)
                    if translated.status not in ABSENT:
                        answer = translated
            yield answer

    @asynccontextmanager
    async def _sent(
        self, method: str, path: str, body: Body, headers: dict[str, str], *, through: bool = False
    ) -> AsyncIterator[Response]:
        """Yield the endpoint's answer to a request as it is.

        Args:
            through: whether the client gets the answer unchanged, so that its length is known.
        """
        data: AsyncIterator[bytes] | bytes | None
        if isinstance(body, bytes):
            # aiohttp warns of larger ones; it writes them piece by piece in any case.
            data = (body if len(body) <= WHOLE else _one(body)) if body else None
            if body:
                headers["content-length"] = str(len(body))
        else:
            data = body.__aiter__()
        # A client's path cannot change the host, nor add a fragment, which would not be sent.
        place = self.url.removesuffix("/v1").removesuffix("/openai") if path.startswith(AZURE) else self.url
        url = URL(f"{place}{path}".replace("#", "%23"), encoded=True)
        try:
            async with asyncio.timeout(self._timeout) as patience:
                if isinstance(data, AsyncIterator) and not isinstance(body, bytes):
                    data = self._patiently(data, patience)
                response = await self._client.request(method, url, data=data, headers=headers, allow_redirects=False)
        except TimeoutError as error:
            raise Unavailable(f"the upstream did not answer within {self._timeout:g} seconds", advice="try again") from error
        except (aiohttp.ClientError, ValueError) as error:
            raise Unavailable(f"the upstream cannot be reached: {type(error).__name__}", advice="is it running?") from error
        self._watch(response)
        try:
            if not 200 <= response.status < 600:
                raise Unavailable(f"the upstream answered with status {response.status}", advice="check the upstream")
            response_headers = joined(response.headers.items())
            answer = Response(response.status, _passed_on(response_headers), self._pieces(response))
            if (
                through
                and "content-length" in response_headers
                and response_headers.get("content-encoding", "identity") == "identity"
            ):
                answer.headers["content-length"] = response_headers["content-length"]
            yield answer
        finally:
            # Closes the connection, unless the answer was read to its end.
            response.close()

    @asynccontextmanager
    async def _translated(self, body: bytes, headers: Mapping[str, str], form: Form) -> AsyncIterator[Response]:
        """Yield the endpoint's answer, translated for a client of another form. No thread waits for it."""
        far = FORMS[self.form]
        req = await _read(form, body, far.name, UNLIMITED if far is FORMS["chat"] else REPLY)
        path, out_headers = far.path, self._foreign(headers)
        if far is FORMS["messages"]:
            if betas := betas_for(req.request.options, req.request.messages):
                path, out_headers["anthropic-beta"] = f"{path}?beta=true", ",".join(betas)
            fields = messages.request_fields(req.name, req.request, cache=True)
            fields = {**fields, **fields.pop("extra_body", {}), "stream": True}
        else:
            fields = {**chat.request_fields(req.name, req.request, URL(self.url).host), **req.request.options}
            fields = {name: value for name, value in fields.items() if value != UNLIMITED}
        async with self._sent("POST", path, msgspec.json.encode(fields), out_headers) as answer:
            if answer.status >= 400:
                yield await _refusal(req.name, answer, form)
                return
            if answer.status >= 300:
                raise Unavailable(f"the upstream answered with status {answer.status}", advice="check the upstream")
            async with aclosing(_pieces_of_reply(req.name, answer, far)) as pieces:
                yield await _in_form(pieces, form, req, answer.headers)
            with anyio.move_on_after(LINGER):  # so that the connection can be reused
                async for _ in answer.pieces:
                    pass

    def _foreign(self, headers: Mapping[str, str]) -> dict[str, str]:
        """Return the headers of a translated request: of the client's own headers, only its key has the same meaning there."""
        client_headers = {name: headers[name] for name in (*TRACED, "authorization", "x-api-key", KEY_FROM) if name in headers}
        anthropic = self.form == "messages"
        resolved = self._headers(client_headers)
        key = resolved.get("x-api-key") or resolved.get("authorization", "").removeprefix("Bearer ").strip()
        out_headers = {"content-type": "application/json", "accept": "text/event-stream", "accept-encoding": "identity"}
        if anthropic:
            out_headers["anthropic-version"] = "2023-06-01"
        if key:
            out_headers["authorization"] = f"Bearer {key}"  # as the SDKs of both do
        return out_headers

    async def _patiently(self, body: AsyncIterable[bytes], patience: asyncio.Timeout) -> AsyncIterator[bytes]:
        """Yield a body's pieces; the timeout restarts with each piece."""
        async for piece in body:
            with suppress(RuntimeError):  # the answer came before the end of the body
                patience.reschedule(asyncio.get_running_loop().time() + self._timeout)
            yield piece

    def _watch(self, response: aiohttp.ClientResponse) -> None:
        """End an answer with its connection: aiohttp leaves a reader waiting if the answer is framed wrongly."""
        protocol = response.connection.protocol if response.connection is not None else None
        if protocol is None:
            return

        def lost(closed: asyncio.Future[None] | None) -> None:
            if closed is not None:
                closed.exception()  # the answer's own error is more precise
            content = self._answers.pop(protocol)
            if not content.is_eof() and content.exception() is None:
                content.set_exception(aiohttp.ClientPayloadError("the connection closed"))

        watched, closed = protocol in self._answers, protocol.closed
        self._answers[protocol] = response.content
        if closed is None:
            lost(None)
        elif not watched:
            closed.add_done_callback(lost)

    async def _pieces(self, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        has_data = False
        try:
            while piece := await response.content.readany():
                has_data = True
                yield piece
            if not has_data and response.headers.get("content-encoding"):
                raise Unavailable("the upstream broke off a compressed answer", advice="try again")
        except TimeoutError as error:
            raise Unavailable(f"the upstream was silent for {self._timeout:g} seconds", advice="try again") from error
        except (aiohttp.ClientError, HttpProcessingError) as error:
            # aiohttp does not return the received rest as long as an exception is set.
            response.content.set_exception(None)  # type: ignore[arg-type]
            if rest := response.content.read_nowait():
                yield rest
            raise Unavailable(f"the upstream broke off: {type(error).__name__}", advice="try again") from error

    def _headers(self, client_headers: Mapping[str, str], *, azure: bool = False) -> dict[str, str]:
        """Return the client's headers with the provider's key: from the environment variable that `KEY_FROM` names, or the
        client's own, or from the usual variable of the endpoint's provider."""
        headers = {name: value for name, value in _passed_on(client_headers).items() if not name.startswith("x-kilburn")}
        headers["accept-encoding"] = "identity"
        if is_lent(client_headers):
            headers.pop("authorization", None)
            headers.pop("x-api-key", None)
            headers.pop("api-key", None)
            anthropic = self.form == "messages"
            variable = client_headers.get(KEY_FROM, "")
            if azure:
                headers |= {"api-key": key} if (key := os.environ.get(variable or "AZURE_OPENAI_API_KEY")) else {}
            elif key := os.environ.get(variable or ("ANTHROPIC_API_KEY" if anthropic else "OPENAI_API_KEY")):
                headers["x-api-key" if anthropic else "authorization"] = key if anthropic else f"Bearer {key}"
        return headers

    async def close(self) -> None:
        """See `UpstreamApi`."""
        if self._session is not None:
            await self._session.close()


class _ModelRequest(NamedTuple):
    """A request for a model, the model's name, and whether the client wants a stream."""

    request: Request
    name: str
    streamed: bool


async def _read(form: Form, body: bytes, into: str, cap: int) -> _ModelRequest:
    """Convert a client's request for a model's form. A thread reads a long conversation, so that the event loop is not blocked.

    Args:
        cap: tokens of a reply where the request says nothing.

    Raises:
        Refused: the request cannot be read. WireError: a message cannot be read.
    """

    def read() -> _ModelRequest:
        try:
            fields = msgspec.to_builtins(form.request(body, into, cap))
            request = msgspec.convert(fields, Request)  # every field is checked
            if request.max_tokens < 1:
                raise ValueError("a reply has at least one token")
            if not request.messages:
                raise ValueError("no message can be sent in the upstream's form")
            more = msgspec.json.decode(body, type=_More)
        except (AttributeError, LookupError, TypeError, ValueError, RecursionError) as error:
            raise Refused(f"the request cannot be read: {error!r}", advice="see the provider's reference") from error
        return _ModelRequest(request, str(more.model), bool(more.stream))

    return await in_thread(read) if len(body) > LARGE else read()


async def _in_form(pieces: AsyncIterator[Delta | Reply], form: Form, req: _ModelRequest, headers: Mapping[str, str]) -> Response:
    """Return a model's reply in a client's form. An error before the first piece has a status of its own."""
    first = await anext(pieces, None)
    if req.streamed and first is not None:
        kind = {"content-type": "text/event-stream", "cache-control": "no-cache"}
        return Response(200, {**headers, **kind}, _streamed(first, pieces, form, req.name))
    while first is not None and not isinstance(first, Reply):
        first = await anext(pieces, None)
    if first is None:
        raise Unavailable(f"{req.name} ended its stream without a reply")
    return _json(form.whole(first, req.name), headers=headers)


async def replayed(reply: Reply, form: Form, model: str, *, streamed: bool) -> Response:
    """Return a stored reply in a client's form."""

    async def pieces() -> AsyncIterator[Delta | Reply]:
        if reply.text:
            yield Delta(reply.text)
        yield reply

    return await _in_form(pieces(), form, _ModelRequest(Request(messages=()), model, streamed), {})


async def _streamed(piece: Delta | Reply, pieces: AsyncIterator[Delta | Reply], form: Form, name: str) -> AsyncIterator[bytes]:
    write = form.writer(name)
    yield b"".join(write(piece))
    if not isinstance(piece, Reply):
        async for piece in pieces:
            yield b"".join(write(piece))


async def _pieces_of_reply(name: str, answer: Response, form: Form) -> AsyncGenerator[Delta | Reply, None]:
    """Yield the pieces of an endpoint's reply in its own form, streamed or whole.

    Raises:
        ModelError: the answer is an error, or no valid reply.
    """
    reading = form.reading(False, holds=False)
    shape, pieces = await detect_shape(answer.pieces)
    if shape is Shape.EVENTS:
        async with aclosing(_events(pieces)) as events:
            async for event in events:
                reading.feed(event)
                for delta in reading.deltas:
                    yield delta
                if reading.failed is not None or event.is_last:
                    break
    elif shape is Shape.WHOLE:
        reading.take(await gathered(answer._replace(pieces=pieces)))
        for delta in reading.deltas:
            yield delta
    else:
        raise Unavailable(f"{name} sent no valid reply", advice="check the upstream")
    if reading.failed is not None:
        raise provider_error(name, None, reading.failed, "")
    yield reading.reply()


async def _events(pieces: AsyncIterator[bytes]) -> AsyncGenerator[ServerEvent, None]:
    events = Events()
    async for piece in pieces:
        for event in events.feed(piece):
            yield event
    for event in events.end():
        yield event


async def _refusal(name: str, answer: Response, form: Form) -> Response:
    """Return an endpoint's error in a client's form, with its status, message and headers.

    Raises:
        Overlong, ToolsRefused: the error has this meaning.
    """
    body = await gathered(answer)
    error, decoded = read_error(name, answer, body)
    if isinstance(error, Overlong | ToolsRefused):
        raise error
    inner = decoded.get("error", decoded) if isinstance(decoded, dict) else None
    words, code = (inner.get("message"), inner.get("code")) if isinstance(inner, dict) else (inner, None)
    whole = form.error(
        answer.status, str(words or _text(body) or error.what), code if isinstance(code, str) else error_status(error)[1]
    )
    return _json(whole, answer.status, answer.headers)


def read_error(name: str, answer: Response, body: bytes) -> tuple[ModelError, Any]:
    """Return the error for an endpoint's reply, and the decoded body, which is None if it is not JSON."""
    try:
        decoded = msgspec.json.decode(body)
    except NOT_JSON:
        decoded = None
    return provider_error(name, answer.status, decoded, _text(body), answer.headers), decoded


def _text(body: bytes) -> str:
    return body[:MESSAGE_LETTERS].decode("utf-8", "replace")


def _json(value: Any, status: int = 200, headers: Mapping[str, str] = MappingProxyType({})) -> Response:
    return Response(status, {**headers, "content-type": "application/json"}, _one(msgspec.json.encode(value)))


class InProcess:
    """A model of this process behind the forms of the gateway. Its generator blocks, so it has threads of its own, and the rest
    of the gateway does not wait for them.

    Args:
        model: the model.
    """

    def __init__(self, model: Model) -> None:
        self.model = model
        self._pool = ThreadPoolExecutor(THREADS, "kilburn-model")

    def speaks(self, form: Form) -> bool:
        """See `UpstreamApi`."""
        return False

    @asynccontextmanager
    async def ask(
        self, method: str, path: str, body: Body, headers: Mapping[str, str], form: Form | None
    ) -> AsyncIterator[Response]:
        """See `UpstreamApi`."""
        body = body if isinstance(body, bytes) else b""
        if form is None:
            yield self._other(path, body)
            return
        req = await _read(form, body, self.model.form, DEFAULT_REPLY_TOKENS)
        thread = _Thread(self.model.name, iter(self.model.stream(req.request)), self._pool)
        try:
            pieces = thread.pieces() if req.streamed else thread.reply()
            yield await _in_form(pieces, form, req._replace(name=self.model.name), {})
        finally:
            with anyio.CancelScope(shield=True):
                await thread.close()

    def answers(self, path: str) -> bool:
        """Return whether the model answers a path without a form, below `/v1`."""
        return path.partition("?")[0] in ("/messages/count_tokens", "/models")

    def _other(self, path: str, body: bytes) -> Response:
        path = path.partition("?")[0]
        if path == "/messages/count_tokens":
            tokens = counter_for(self.model.tokenizer).count(body.decode("utf-8", "replace"))
            return _json({"input_tokens": tokens})
        if path == "/models":
            card = {"id": self.model.name, "object": "model", "created": 0, "owned_by": "kilburn"}
            return _json({"object": "list", "data": [card]})
        raise Refused(f"{self.model.name} does not answer {path}", advice="give the gateway an upstream that does")

    async def close(self) -> None:
        """See `UpstreamApi`."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        close: Callable[[], None] | None = getattr(self.model, "close", None)
        if close is not None:
            await in_thread(close)


class _Thread:
    """A blocking generator that runs in threads of a pool, and is closed when its client leaves. It occupies a thread only while
    it makes a piece, or a reply that is not streamed."""

    def __init__(self, name: str, pieces: Iterator[Delta | Reply], pool: ThreadPoolExecutor) -> None:
        self._name, self._pieces, self._pool = name, pieces, pool
        self._lock = threading.Lock()
        self._left = self._ended = False

    async def pieces(self) -> AsyncIterator[Delta | Reply]:
        """Yield the pieces. A client that leaves while it waits for a thread gives up its place in the queue; one that leaves
        while its piece is made occupies the thread until the piece is complete."""
        while (piece := await asyncio.wrap_future(self._pool.submit(self._next))) is not None:
            yield piece
            if isinstance(piece, Reply):
                return

    async def reply(self) -> AsyncIterator[Delta | Reply]:
        """Yield only the reply, made and ended by one thread. A client that leaves is treated as in `pieces`."""
        if (reply := await asyncio.wrap_future(self._pool.submit(self._whole))) is not None:
            yield reply

    def _whole(self) -> Delta | Reply | None:
        while (piece := self._next()) is not None and not isinstance(piece, Reply):
            pass
        with self._lock:
            self._end()
        return piece

    def _next(self) -> Delta | Reply | None:
        with self._lock:
            if not self._left:
                try:
                    piece = next(self._pieces, None)
                except KilburnError:
                    raise
                except Exception as error:  # noqa: BLE001 - its words may quote what was said
                    place = traceback.extract_tb(error.__traceback__)[-1]
                    log.warning("%s: %s at %s:%s", self._name, type(error).__name__, place.filename, place.lineno)
                    raise Unavailable(f"{self._name} failed: {type(error).__name__}", advice="see the gateway's log") from None
                if not self._left:
                    return piece
            self._end()
            return None

    async def close(self) -> None:
        """End the generator; if it is running, as soon as it yields."""
        self._left = True
        if not self._ended and self._lock.acquire(blocking=False):
            try:
                await in_thread(self._end)
            finally:
                self._lock.release()

    def _end(self) -> None:
        close: Callable[[], None] | None = getattr(self._pieces, "close", None)
        if close is not None:
            close()
        self._ended = True


async def gathered(answer: Response, max_bytes: int = MAX_ANSWER_BYTES) -> bytes:
    """Return an answer's whole body.

    Raises:
        Unavailable: the body is larger than `max_bytes`.
    """
    pieces: list[bytes] = []
    size = 0
    async for piece in answer.pieces:
        size += len(piece)
        if size > max_bytes:
            raise Unavailable("the upstream's answer is too large", advice="check the upstream")
        pieces.append(piece)
    return b"".join(pieces)


async def _one(piece: bytes) -> AsyncIterator[bytes]:
    yield piece


def error_status(error: KilburnError) -> tuple[int, str | None]:
    """Return the HTTP status of an error of a model or of the gateway, and OpenAI's code for it."""
    match error:
        case Overlong():
            return 400, "context_length_exceeded"
        case RateLimited():
            return 429, "rate_limit_exceeded"
        case Refused(status=status):
            return status or 400, None
        case Unavailable(status=int(status)):
            return status, "upstream_error"
        case Unavailable():
            return (504, "timeout") if "silent" in error.what or "within" in error.what else (502, "upstream_error")
        case ModelError():
            return 502, "upstream_error"
    return 500, None

"""The `openai` and `anthropic` clients in one line: `client = wrap(client, process)`.

The wrap stands where the client sends its requests, so all of its ways to ask go through the process: chat completions, responses
and messages, `create`, `parse` and `stream`, beta or not, plain or async, raw responses too. It does in the program what the
gateway does beside it, by the same code. All other requests (embeddings, batches, counts of tokens) go on as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator
from functools import partial
from typing import Any, TypeVar

import msgspec

from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.agents.loop import shrink
from kilburn.errors import KilburnError, MissingExtra, Overlong, SpecError
from kilburn.extras import command
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.events import Events, ServerEvent
from kilburn.gateway.form import Form, ParsedRequest, Reading
from kilburn.gateway.messages import MessagesForm
from kilburn.gateway.responses import ResponsesForm
from kilburn.kernel.render import Prompt, to_send
from kilburn.kernel.session import Session
from kilburn.memory.memory_tools import OFFERED
from kilburn.message import Message, Role
from kilburn.models.provider_errors import provider_error
from kilburn.wire import messages as wire

try:
    import httpx2
except ImportError as error:
    raise MissingExtra("httpx2", "openai") from error

__all__ = ["wrap"]

MAX_ROUNDS = 5
"""Times that a model may use its memory before it has to reply."""

CLIENTS = {"openai.OpenAI", "openai.AsyncOpenAI", "anthropic.Anthropic", "anthropic.AsyncAnthropic"}

FORMS: tuple[Form, ...] = (ChatForm(), ResponsesForm(), MessagesForm())

CARRIED = ("content-encoding", "content-length", "transfer-encoding")
"""Headers that say how a body was carried; what is handed on is carried otherwise."""

Client = TypeVar("Client")


def wrap(client: Client, session: Session, *, recollections: Recollections | None = None, tools: bool = True) -> Client:
    """A copy of an `OpenAI`, `AsyncOpenAI`, `Anthropic` or `AsyncAnthropic` client whose conversation goes through a session.

    Hand over the whole history in each call, as the APIs want it. One that is not the session's (a title, a judge with a few
    messages of its own) goes to the provider byte for byte, and the session does not change: see `KeptHistory.is_foreign`.
    Kilburn's own errors are raised as they are.

    Args:
        recollections: long-term memory to put before the user's messages.
        tools: whether the model is offered `recall` and `search_memory`, which are answered here.

    Raises:
        SpecError: not one of these clients, or one that is wrapped; one for another cloud has its own kind of requests. Or no
            session, or no recollections. The calls raise it where the provider keeps the conversation
            (`previous_response_id`), so that there is no window to send.
    """
    if not isinstance(session, Session):
        raise SpecError(f"a session of type {_type(session)}", advice='wrap(client, store.session("name"))')
    if not isinstance(recollections, Recollections | None):
        raise SpecError(f"recollections of type {_type(recollections)}", advice="give Recollections(store)")
    _check(client)
    return _wrapped(client, KeptHistory(session, recollections), tools)


def _check(client: object) -> None:
    """Check that a client is one that can be wrapped.

    Raises:
        SpecError: it is none.
    """
    kinds = client.__mro__ if isinstance(client, type) else type(client).__mro__
    names = [kind.__name__ for kind in kinds if f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in CLIENTS]
    if isinstance(client, type) and names:
        raise SpecError(f"the class {client.__name__}, not a client", advice=f"wrap an object: {client.__name__}(...)")
    if not names:
        module = getattr(client if isinstance(client, type) else type(client), "__module__", "")
        advice = "wrap OpenAI, Anthropic or their async clients, of the libraries openai and anthropic"
        raise SpecError(f"a client of type {_type(client)}, from {module}", advice=advice)
    inner = getattr(client, "_client", None)
    if not isinstance(inner, httpx2.Client | httpx2.AsyncClient):
        problem = f"a client of type {_type(client)} that this Kilburn does not know"
        raise SpecError(
            problem, advice=f"another version of its library may do: {command(names[-1].removeprefix('Async').lower())}"
        )
    if isinstance(inner._transport, _Through | _AsyncThrough):
        raise SpecError("a client that is wrapped already", advice="wrap the plain client, once for each segment")


def _type(value: object) -> str:
    return "type" if isinstance(value, type) else type(value).__name__


def _wrapped(client: Client, history: KeptHistory, tools: bool) -> Client:
    source: Any = client
    inner = source._client

    def begin(form: Form, body: bytes) -> _WrappedCall:
        return _WrappedCall(history, form, body, tools)

    http: httpx2.Client | httpx2.AsyncClient
    if isinstance(inner, httpx2.Client):
        http = httpx2.Client(transport=_Through(inner, begin))
    else:
        http = httpx2.AsyncClient(transport=_AsyncThrough(inner, begin))
    copy = source.copy(http_client=http)
    refused = copy._make_status_error

    def raised(message: str, *, body: object, response: Any) -> Exception:
        error = response.extensions.get("kilburn")
        return error if error is not None else refused(message, body=body, response=response)  # type: ignore[no-any-return]

    def again(**options: Any) -> Any:
        return _wrapped(source.copy(**options), history, tools)

    copy._make_status_error = raised
    copy.copy = copy.with_options = again
    return copy  # type: ignore[no-any-return]


class _WrappedCall:
    """One request of the client, with all its rounds. A `foreign` one is none of the session's, and goes on as it is.

    Args:
        tools: whether ours may be offered.
    """

    def __init__(self, history: KeptHistory, form: Form, body: bytes, tools: bool) -> None:
        self._history, self._form = history, form
        if form.unread(body):
            raise SpecError("the provider keeps this conversation", advice="hand over the history, or use a client without wrap")
        self._asked = request = form.open(body)
        form.split(request)
        choice = bytes(request.fields.get("tool_choice", b"")).replace(b" ", b"")
        self._offered = OFFERED if tools and request.faults and choice not in (b'"none"', b'{"type":"none"}') else ()
        beside = b" ".join([*request.beside, msgspec.json.encode(self._offered)])
        messages = [message for raw in request.messages for message in form.read(raw)]
        if form.name == "responses":
            messages = _joined(messages)
        with history.session.lock:
            self.foreign = history.is_foreign(messages, _system_prompt(form, request))
            if self.foreign:
                return
            self._put(history.prompt(messages, form.rendered, beside.decode(), model=request.model))
        self._rounds_left, self._shortened = MAX_ROUNDS, False
        self.stream = request.stream
        self.reading: Reading = form.reading(bool(self._offered))

    def _put(self, prompt: Prompt) -> None:
        request = self._asked
        if prompt.system:
            blocks = wire.as_blocks(msgspec.json.decode(request.fields["system"])) if "system" in request.fields else []
            request = msgspec.structs.replace(
                request, fields={**request.fields, "system": [*blocks, *wire.as_blocks(prompt.system)]}
            )
        self.body = self._form.splice(request, to_send(prompt), self._offered)
        self._tokens = prompt.tokens

    def shortens(self, response: httpx2.Response) -> bool:
        """Shorten `body` if the provider's error is that the prompt was too long, once; return whether it was shortened."""
        error = _provider_error(response)
        if self._shortened or not isinstance(error, Overlong):
            return False
        self._shortened = True
        try:
            shrink(self._history.session, self._tokens, error)
        except Overlong:
            return False
        self._put(self._history.render(self._form.rendered))
        return True

    def continues(self) -> bool:
        """Append this round's reply and the results of our tools; return whether another round follows, with another `body`."""
        reply = self.reading.reply()
        ours = self.reading.ours(reply)
        # Of several choices, the client's next request has the one that it took.
        if self._asked.choices == 1 and not ours:
            self._history.append([reply.message])
        rest = self._history.answered(reply.message) if self._asked.choices == 1 and ours else None
        self._history.observe(reply.usage)
        if self._asked.choices != 1 or not ours or rest is not None or not self._rounds_left:
            return False
        self._rounds_left -= 1
        if not self._rounds_left:
            self._asked.fields["tool_choice"] = msgspec.Raw(b'{"type":"none"}' if self._form.name == "messages" else b'"none"')
        self._put(self._history.render(self._form.rendered))
        self.reading.again()
        return True

    def take(self, body: bytes) -> bool:
        """Read a whole reply; return whether another round follows."""
        self.reading.take(body)
        return self.continues()


def _joined(messages: Iterable[Message]) -> list[Message]:
    """Return what the assistant says in a row as one message: a response is several items of the next request."""
    out: list[Message] = []
    for message in messages:
        if out and message.role is out[-1].role is Role.ASSISTANT:
            message = Message(role=Role.ASSISTANT, parts=(*out.pop().parts, *message.parts))
        out.append(message)
    return out


def _system_prompt(form: Form, request: ParsedRequest) -> str:
    """Return the system prompt before a conversation."""
    texts = [part.text for raw in request.lead for message in form.read(raw) for part in message.parts]
    for key in ("system", "instructions"):
        blocks = wire.as_blocks(msgspec.json.decode(request.fields[key])) if key in request.fields else None
        texts += [str(block.get("text", "")) for block in blocks or () if isinstance(block, dict)]
    return "\n".join(texts)


def _request_form(request: httpx2.Request) -> Form | None:
    return next((form for form in FORMS if request.method == "POST" and request.url.path.endswith(form.path)), None)


def _with_body(request: httpx2.Request, body: bytes) -> httpx2.Request:
    headers = [(name, value) for name, value in request.headers.raw if name.lower().decode() not in CARRIED]
    return httpx2.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)


def _response(response: httpx2.Response, **body: Any) -> httpx2.Response:
    """Return a response like the provider's, with another body."""
    headers = [(name, value) for name, value in response.headers.raw if name.lower().decode() not in CARRIED]
    return httpx2.Response(response.status_code, headers=headers, extensions=response.extensions, **body)


def _provider_error(response: httpx2.Response) -> KilburnError:
    return provider_error("the provider", response.status_code, None, response.text, response.headers)


def _refusal(error: KilburnError) -> httpx2.Response:
    """Return a response that the SDKs neither retry nor read: they raise the error in it."""
    return httpx2.Response(400, headers={"x-should-retry": "false"}, json={}, extensions={"kilburn": error})


_Step = httpx2.Request | httpx2.Response | Callable[[], Any]
"""A step of an exchange: a request to send, a response to read whole, or a call that may wait for the session's lock."""

_Exchange = Generator[_Step, Any, Any]
"""The steps of an exchange, each of which gets its result: one program for plain and async clients."""


def _run(steps: _Exchange, inner: httpx2.Client) -> Any:
    """Run the steps of an exchange, and return its result."""
    result: Any = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            return end.value
        if isinstance(step, httpx2.Request):
            result = inner.send(step, stream=True)
        else:
            result = step.read() if isinstance(step, httpx2.Response) else step()


async def _run_async(steps: _Exchange, inner: httpx2.AsyncClient) -> Any:
    """Run the steps of an exchange for an async client."""
    result: Any = None
    while True:
        try:
            step = steps.send(result)
        except StopIteration as end:
            return end.value
        if isinstance(step, httpx2.Request):
            result = await inner.send(step, stream=True)
        else:
            result = await (step.aread() if isinstance(step, httpx2.Response) else asyncio.to_thread(step))


def _exchange(
    begin: Callable[[], _WrappedCall], request: httpx2.Request, stream: Callable[[_WrappedCall, httpx2.Response], Any]
) -> _Exchange:
    """Send a request through the session, with all rounds of its reply; a streamed reply goes on in `stream`."""
    call = yield begin
    if call.foreign:
        return (yield request)
    while True:
        response = yield _with_body(request, call.body)
        if call.stream and response.status_code < 400:
            return _response(response, stream=stream(call, response))
        body = yield response
        if response.status_code >= 400:
            if not (yield partial(call.shortens, response)):
                return _response(response, content=body)
        elif not (yield partial(call.take, body)):
            return _response(response, content=call.reading.end())


class _Through(httpx2.BaseTransport):
    """Sends requests over a client's own connections, and through the session."""

    def __init__(self, inner: httpx2.Client, begin: Callable[[Form, bytes], _WrappedCall]) -> None:
        self._inner, self._begin = inner, begin

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        form = _request_form(request)
        if form is None:
            return self._inner.send(request, stream=True)
        begin = partial(self._begin, form, request.read())
        try:
            response: httpx2.Response = _run(_exchange(begin, request, partial(_Streamed, self._inner, request)), self._inner)
        except KilburnError as error:
            return _refusal(error)
        return response

    def close(self) -> None:
        self._inner.close()


class _AsyncThrough(httpx2.AsyncBaseTransport):
    """`_Through` for async clients."""

    def __init__(self, inner: httpx2.AsyncClient, begin: Callable[[Form, bytes], _WrappedCall]) -> None:
        self._inner, self._begin = inner, begin

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        form = _request_form(request)
        if form is None:
            return await self._inner.send(request, stream=True)
        begin = partial(self._begin, form, await request.aread())
        steps = _exchange(begin, request, partial(_AsyncStreamed, self._inner, request))
        try:
            response: httpx2.Response = await _run_async(steps, self._inner)
        except KilburnError as error:
            return _refusal(error)
        return response

    async def aclose(self) -> None:
        await self._inner.aclose()


class _Rounds:
    """The rounds of a streamed reply. If it is closed early, nothing of the round in progress is appended."""

    def __init__(self, inner: Any, request: httpx2.Request, call: _WrappedCall, response: httpx2.Response) -> None:
        self._inner, self._request, self._call, self._response = inner, request, call, response

    def _feed(self, events: Iterable[ServerEvent]) -> bytes:
        return b"".join(map(self._call.reading.feed, events))

    def _end_round(self) -> _Exchange:
        """Begin another round and return None, or return the end of the reply."""
        call = self._call
        if call.reading.failed is not None:
            return call.reading.left()
        if not (yield call.continues):
            return call.reading.end()
        self._response = yield _with_body(self._request, call.body)
        if self._response.status_code >= 400:
            yield self._response
            # The client has seen the beginning of the reply.
            raise _provider_error(self._response)
        return None


class _Streamed(_Rounds, httpx2.SyncByteStream):
    """A streamed reply, over all rounds."""

    def __iter__(self) -> Iterator[bytes]:
        end: bytes | None = None
        while end is None:
            events = Events()
            for piece in self._response.iter_bytes():
                yield self._feed(events.feed(piece))
            yield self._feed(events.end())
            self._response.close()
            end = _run(self._end_round(), self._inner)
        yield end

    def close(self) -> None:
        self._response.close()


class _AsyncStreamed(_Rounds, httpx2.AsyncByteStream):
    """`_Streamed` for async clients."""

    async def __aiter__(self) -> AsyncIterator[bytes]:
        end: bytes | None = None
        while end is None:
            events = Events()
            async for piece in self._response.aiter_bytes():
                yield self._feed(events.feed(piece))
            yield self._feed(events.end())
            await self._response.aclose()
            end = await _run_async(self._end_round(), self._inner)
        yield end

    async def aclose(self) -> None:
        await self._response.aclose()

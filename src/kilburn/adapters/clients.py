"""The `openai` and `anthropic` clients in one line: `client = wrap(client, process)`.

The wrap stands where the client sends its requests, so all of its ways to ask go through the process: chat completions, responses
and messages, `create`, `parse` and `stream`, beta or not, plain or async, raw responses too. It does in the program what the
gateway does beside it, by the same code. All other requests (embeddings, batches, counts of tokens) go on as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, TypeVar

import msgspec

from kilburn.adapters.history import KeptHistory, Recollections
from kilburn.agents.loop import shrink
from kilburn.errors import KilburnError, MissingExtra, Overlong, SpecError
from kilburn.extras import command
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.events import Events
from kilburn.gateway.form import Form, ParsedRequest, Reading
from kilburn.gateway.messages import MessagesForm
from kilburn.gateway.responses import ResponsesForm
from kilburn.kernel.memory_tools import OFFERED
from kilburn.kernel.render import Prompt, to_send
from kilburn.kernel.session import Session
from kilburn.message import Message, Role
from kilburn.models.provider_errors import error_of
from kilburn.wire import messages as wire

try:
    import httpx2
except ImportError as error:
    raise MissingExtra("httpx2", "openai") from error

__all__ = ["wrap"]

ROUNDS = 5
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
    known = [kind.__name__ for kind in kinds if f"{kind.__module__.partition('.')[0]}.{kind.__name__}" in CLIENTS]
    if isinstance(client, type) and known:
        raise SpecError(f"the class {client.__name__}, not a client", advice=f"wrap an object: {client.__name__}(...)")
    if not known:
        module = getattr(client if isinstance(client, type) else type(client), "__module__", "")
        advice = "wrap OpenAI, Anthropic or their async clients, of the libraries openai and anthropic"
        raise SpecError(f"a client of type {_type(client)}, from {module}", advice=advice)
    inner = getattr(client, "_client", None)
    if not isinstance(inner, httpx2.Client | httpx2.AsyncClient):
        said = f"a client of type {_type(client)} that this Kilburn does not know"
        raise SpecError(said, advice=f"another version of its library may do: {command(known[-1].removeprefix('Async').lower())}")
    if isinstance(inner._transport, _Through | _AsyncThrough):
        raise SpecError("a client that is wrapped already", advice="wrap the plain client, once for each segment")


def _type(value: object) -> str:
    return "type" if isinstance(value, type) else type(value).__name__


def _wrapped(client: Client, history: KeptHistory, tools: bool) -> Client:
    source: Any = client
    inner = source._client

    def begin(form: Form, body: bytes) -> _Turn:
        return _Turn(history, form, body, tools)

    http: httpx2.Client | httpx2.AsyncClient
    if isinstance(inner, httpx2.Client):
        http = httpx2.Client(transport=_Through(inner, begin))
    else:
        http = httpx2.AsyncClient(transport=_AsyncThrough(inner, begin))
    made = source.copy(http_client=http)
    refused = made._make_status_error

    def raised(message: str, *, body: object, response: Any) -> Exception:
        own = response.extensions.get("kilburn")
        return own if own is not None else refused(message, body=body, response=response)  # type: ignore[no-any-return]

    def again(**options: Any) -> Any:
        return _wrapped(source.copy(**options), history, tools)

    made._make_status_error = raised
    made.copy = made.with_options = again
    return made  # type: ignore[no-any-return]


class _Turn:
    """One request of the client, with all its rounds. A `foreign` one is none of the session's, and goes on as it is.

    Args:
        tools: whether ours may be offered.
    """

    def __init__(self, history: KeptHistory, form: Form, body: bytes, tools: bool) -> None:
        self._history, self._form = history, form
        if form.unread(body):
            raise SpecError("the provider keeps this conversation", advice="hand over the history, or use a client without wrap")
        self._asked = asked = form.open(body)
        form.split(asked)
        choice = bytes(asked.fields.get("tool_choice", b"")).replace(b" ", b"")
        self._offered = OFFERED if tools and asked.faults and choice not in (b'"none"', b'{"type":"none"}') else ()
        beside = b" ".join([*asked.beside, msgspec.json.encode(self._offered)])
        messages = [message for raw in asked.messages for message in form.read(raw)]
        if form.name == "responses":
            messages = _joined(messages)
        with history.session.lock:
            self.foreign = history.is_foreign(messages, _lead_of(form, asked))
            if self.foreign:
                return
            self._put(history.prompt(messages, form.rendered, beside.decode(), model=asked.model))
        self._left, self._shortened = ROUNDS, False
        self.stream = asked.stream
        self.reading: Reading = form.reading(bool(self._offered))

    def _put(self, prompt: Prompt) -> None:
        asked = self._asked
        if prompt.system:
            own = wire.as_blocks(msgspec.json.decode(asked.fields["system"])) if "system" in asked.fields else []
            asked = msgspec.structs.replace(asked, fields={**asked.fields, "system": [*own, *wire.as_blocks(prompt.system)]})
        self.body = self._form.splice(asked, to_send(prompt), self._offered)
        self._tokens = prompt.tokens

    def shortens(self, answer: httpx2.Response) -> bool:
        """Whether the provider's error is that the prompt was too long, for the first time, and `body` is shorter now."""
        error = error_of("the provider", answer.status_code, None, answer.text, answer.headers)
        if self._shortened or not isinstance(error, Overlong):
            return False
        self._shortened = True
        try:
            shrink(self._history.session, self._tokens, error)
        except Overlong:
            return False
        self._put(self._history.render(self._form.rendered))
        return True

    def goes_on(self) -> bool:
        """Append this round's reply, and what our tools answer; whether another round follows, with another `body`."""
        reply = self.reading.reply()
        ours = self.reading.ours(reply)
        # Which one of several the client takes, its next request says.
        if self._asked.choices == 1 and not ours:
            self._history.append([reply.message])
        rest = self._history.answered(reply.message) if self._asked.choices == 1 and ours else None
        self._history.observe(reply.usage)
        if self._asked.choices != 1 or not ours or rest is not None or not self._left:
            return False
        self._left -= 1
        if not self._left:
            self._asked.fields["tool_choice"] = msgspec.Raw(b'{"type":"none"}' if self._form.name == "messages" else b'"none"')
        self._put(self._history.render(self._form.rendered))
        self.reading.again()
        return True

    def took(self, body: bytes) -> bool:
        """Take a whole reply; whether another round follows."""
        self.reading.take(body)
        return self.goes_on()


def _joined(messages: Iterable[Message]) -> list[Message]:
    """What the assistant says in a row as one message: a response is several items of the next request."""
    out: list[Message] = []
    for message in messages:
        if out and message.role is out[-1].role is Role.ASSISTANT:
            message = Message(role=Role.ASSISTANT, parts=(*out.pop().parts, *message.parts))
        out.append(message)
    return out


def _lead_of(form: Form, asked: ParsedRequest) -> str:
    """The system prompt that stands before a conversation."""
    told = [part.text for raw in asked.lead for message in form.read(raw) for part in message.parts]
    for key in ("system", "instructions"):
        blocks = wire.as_blocks(msgspec.json.decode(asked.fields[key])) if key in asked.fields else None
        told += [str(block.get("text", "")) for block in blocks or () if isinstance(block, dict)]
    return "\n".join(told)


def _form_of(request: httpx2.Request) -> Form | None:
    return next((form for form in FORMS if request.method == "POST" and request.url.path.endswith(form.path)), None)


def _with_body(request: httpx2.Request, body: bytes) -> httpx2.Request:
    headers = [(name, value) for name, value in request.headers.raw if name.lower().decode() not in CARRIED]
    return httpx2.Request(request.method, request.url, headers=headers, content=body, extensions=request.extensions)


def _answer(answer: httpx2.Response, **body: Any) -> httpx2.Response:
    """A response like the provider's, with another body."""
    headers = [(name, value) for name, value in answer.headers.raw if name.lower().decode() not in CARRIED]
    return httpx2.Response(answer.status_code, headers=headers, extensions=answer.extensions, **body)


def _refusal(error: KilburnError) -> httpx2.Response:
    """What the SDKs neither try again nor read, and raise as it is."""
    return httpx2.Response(400, headers={"x-should-retry": "false"}, json={}, extensions={"kilburn": error})


def _broken(answer: httpx2.Response) -> KilburnError:
    """The error of a later round whose beginning the client has seen."""
    return error_of("the provider", answer.status_code, None, answer.text, answer.headers)


class _Through(httpx2.BaseTransport):
    """Sends requests by a client's own connections, and through the session."""

    def __init__(self, inner: httpx2.Client, begin: Callable[[Form, bytes], _Turn]) -> None:
        self._inner, self._begin = inner, begin

    def handle_request(self, request: httpx2.Request) -> httpx2.Response:
        form = _form_of(request)
        if form is None:
            return self._inner.send(request, stream=True)
        try:
            turn = self._begin(form, request.read())
            if turn.foreign:
                return self._inner.send(request, stream=True)
            while True:
                answer = self._inner.send(_with_body(request, turn.body), stream=True)
                if turn.stream and answer.status_code < 400:
                    return _answer(answer, stream=_Streamed(self._inner, request, turn, answer))
                body = answer.read()
                if answer.status_code >= 400:
                    if not turn.shortens(answer):
                        return _answer(answer, content=body)
                elif not turn.took(body):
                    return _answer(answer, content=turn.reading.end())
        except KilburnError as error:
            return _refusal(error)

    def close(self) -> None:
        self._inner.close()


class _Streamed(httpx2.SyncByteStream):
    """A streamed reply, over all rounds. If it is closed early, nothing of the round that was under way is appended."""

    def __init__(self, inner: httpx2.Client, request: httpx2.Request, turn: _Turn, answer: httpx2.Response) -> None:
        self._inner, self._request, self._turn, self._answer = inner, request, turn, answer

    def __iter__(self) -> Iterator[bytes]:
        turn = self._turn
        while True:
            events = Events()
            for piece in self._answer.iter_bytes():
                yield b"".join(map(turn.reading.feed, events.feed(piece)))
            yield b"".join(map(turn.reading.feed, events.end()))
            self._answer.close()
            if turn.reading.failed is not None:
                yield turn.reading.left()
                return
            if not turn.goes_on():
                yield turn.reading.end()
                return
            self._answer = self._inner.send(_with_body(self._request, turn.body), stream=True)
            if self._answer.status_code >= 400:
                self._answer.read()
                raise _broken(self._answer)

    def close(self) -> None:
        self._answer.close()


class _AsyncThrough(httpx2.AsyncBaseTransport):
    """`_Through` for async clients."""

    def __init__(self, inner: httpx2.AsyncClient, begin: Callable[[Form, bytes], _Turn]) -> None:
        self._inner, self._begin = inner, begin

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        form = _form_of(request)
        if form is None:
            return await self._inner.send(request, stream=True)
        try:
            turn = await asyncio.to_thread(self._begin, form, await request.aread())
            if turn.foreign:
                return await self._inner.send(request, stream=True)
            while True:
                answer = await self._inner.send(_with_body(request, turn.body), stream=True)
                if turn.stream and answer.status_code < 400:
                    return _answer(answer, stream=_AsyncStreamed(self._inner, request, turn, answer))
                body = await answer.aread()
                if answer.status_code >= 400:
                    if not await asyncio.to_thread(turn.shortens, answer):
                        return _answer(answer, content=body)
                elif not await asyncio.to_thread(turn.took, body):
                    return _answer(answer, content=turn.reading.end())
        except KilburnError as error:
            return _refusal(error)

    async def aclose(self) -> None:
        await self._inner.aclose()


class _AsyncStreamed(httpx2.AsyncByteStream):
    """`_Streamed` for async clients."""

    def __init__(self, inner: httpx2.AsyncClient, request: httpx2.Request, turn: _Turn, answer: httpx2.Response) -> None:
        self._inner, self._request, self._turn, self._answer = inner, request, turn, answer

    async def __aiter__(self) -> AsyncIterator[bytes]:
        turn = self._turn
        while True:
            events = Events()
            async for piece in self._answer.aiter_bytes():
                yield b"".join(map(turn.reading.feed, events.feed(piece)))
            yield b"".join(map(turn.reading.feed, events.end()))
            await self._answer.aclose()
            if turn.reading.failed is not None:
                yield turn.reading.left()
                return
            if not await asyncio.to_thread(turn.goes_on):
                yield turn.reading.end()
                return
            self._answer = await self._inner.send(_with_body(self._request, turn.body), stream=True)
            if self._answer.status_code >= 400:
                await self._answer.aread()
                raise _broken(self._answer)

    async def aclose(self) -> None:
        await self._answer.aclose()

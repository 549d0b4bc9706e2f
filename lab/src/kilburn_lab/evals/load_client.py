"""The clients of a load: they speak three wire forms, send their whole history, ask again as the official SDKs do, and keep a
record of their own of what they said and heard. They share no code with the gateway.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from enum import StrEnum
from typing import Any, NamedTuple

from kilburn.errors import MissingExtra
from kilburn_lab.evals.load_traffic import TOOL, Script, ScriptedExchange

try:
    import aiohttp
except ModuleNotFoundError as error:
    raise MissingExtra("aiohttp", "serve") from error

SDK_TRIES, FIRST_PAUSE, LONGEST_PAUSE, LONGEST_WAIT = 2, 0.5, 8.0, 60.0
"""How the SDKs of OpenAI and Anthropic ask again: twice, after half a second and twice that, at most eight; and as late as the
server says, if that is within a minute."""

AGAIN = (408, 409, 429)
"""Statuses after which they do so, beside all from 500."""

PATIENCE, PAUSE = 300.0, 1.0
"""Seconds for which a program asks again when its SDK has given up, and between two such askings."""

REACH, SILENCE = 5.0, 600.0
"""Seconds to connect, and without a byte, after which a client gives an answer up."""

PARAMETERS = {"type": "object", "properties": {"at": {"type": "string"}, "why": {"type": "string"}}}
TOOLS: dict[str, list[dict[str, Any]]] = {
    "chat": [{"type": "function", "function": {"name": TOOL, "parameters": PARAMETERS}}],
    "messages": [{"name": TOOL, "input_schema": PARAMETERS}],
    "responses": [{"type": "function", "name": TOOL, "parameters": PARAMETERS}],
}
PATHS = {"chat": "/v1/chat/completions", "messages": "/v1/messages", "responses": "/v1/responses"}


class What(StrEnum):
    """What an entry of a record is."""

    QUESTION = "question"
    CALL = "call"
    OUTPUT = "output"
    REPLY = "reply"


class SaidEntry(NamedTuple):
    """One entry of a record: what was said, in words. Of a call, its arguments as JSON with sorted keys."""

    what: What
    exchange: int
    text: str


class SessionRecord(NamedTuple):
    """What a client knows of a session when it is over.

    Args:
        number: of the script. name: of the session, as the gateway said it last; "" if it said none.
        said: what was acknowledged, in order: the client has heard a whole reply to it.
        unsure: what was said after that, and what would have been answered. The store may have it, from its beginning on.
        wrong: what was heard and is not what was to be answered.
        gave_up: whether the client wanted an answer and never got it.
    """

    number: int
    name: str
    said: tuple[SaidEntry, ...]
    unsure: tuple[SaidEntry, ...]
    wrong: tuple[str, ...] = ()
    gave_up: bool = False


class HeardReply(NamedTuple):
    """A whole reply: its text, its call if it has one, what goes into the history, and the response's id."""

    text: str
    call: tuple[str, str] | None
    history: list[dict[str, Any]]
    id: str


class AnswerWait(NamedTuple):
    """How long an answer took: when the client began to ask, seconds to its first byte and to its end, and how often it asked."""

    began: float
    first: float
    whole: float
    tries: int


class Broken(Exception):
    """An answer that did not come to its end.

    Args:
        why: in a few words. asks_again: whether the SDK does so by itself. after: seconds that the server asks it to wait.
        hopeless: whether the same request would be refused again.
    """

    def __init__(self, why: str, *, asks_again: bool = False, after: float | None = None, hopeless: bool = False) -> None:
        self.why, self.asks_again, self.after, self.hopeless = why, asks_again, after, hopeless
        super().__init__(why)


class _Left(Exception):
    """The client has hung up."""


class Crowd:
    """Clients of some gateways.

    Args:
        urls: of the gateways, which each client goes round.
        seed: of the clients' pauses.
        step: called with the number of exchanges that are over, or that will never be.
    """

    def __init__(self, urls: Sequence[str], seed: int, step: Callable[[int], None]) -> None:
        self.urls, self.seed, self.step = urls, seed, step
        self.waits: list[AnswerWait] = []
        self.failures: Counter[str] = Counter()
        """Why answers did not come to their end."""
        self.longest_failure = 0.0
        """Seconds until one of these was known, at most."""
        self.begun = self.requests = self.left = 0

    async def run(self, scripts: Iterable[Script], clients: int) -> list[SessionRecord]:
        """Carry out the sessions, as many at once as there are clients; their records, in the order of their numbers."""
        waiting, records = iter(scripts), list[SessionRecord]()
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=REACH, sock_read=SILENCE)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:

            async def client() -> None:
                for script in waiting:
                    self.begun += 1
                    records.append(await _Talk(self, http, script).run())

            await asyncio.gather(*(client() for _ in range(clients)))
        return sorted(records)


class _Talk:
    """One session of a client."""

    def __init__(self, crowd: Crowd, http: aiohttp.ClientSession, script: Script) -> None:
        self._crowd, self._http, self._script = crowd, http, script
        self._chained = script.form == "chain"
        self._form = "responses" if self._chained else script.form
        self._chance = random.Random(f"{crowd.seed}/{script.number}/pauses")
        self._at = self._chance.randrange(len(crowd.urls))
        self._history: list[dict[str, Any]] = []
        self._before = ""
        """The id of the last response."""
        self._said: list[SaidEntry] = []
        self._unsure: list[SaidEntry] = []
        self._wrong: list[str] = []
        self._name = ""
        self._gave_up = False

    async def run(self) -> SessionRecord:
        """Say everything, or as much as is answered."""
        exchanges = self._script.exchanges
        for at, exchange in enumerate(exchanges, 1):
            if not await self._exchange(at, exchange):
                self._crowd.step(1 + len(exchanges) - at)
                break
            self._crowd.step(1)
            self._unsure.clear()
        return SessionRecord(
            number=self._script.number,
            name=self._name,
            said=tuple(self._said),
            unsure=tuple(self._unsure),
            wrong=tuple(self._wrong),
            gave_up=self._gave_up,
        )

    async def _exchange(self, at: int, exchange: ScriptedExchange) -> bool:
        """Whether it came to its end, and the session goes on."""
        called = None if exchange.call is None else json.dumps(exchange.call, sort_keys=True)
        answer = SaidEntry(What.REPLY, at, exchange.reply) if called is None else SaidEntry(What.CALL, at, called)
        self._unsure = [SaidEntry(What.QUESTION, at, exchange.question), answer]
        self._add(self._question(exchange.question))
        if exchange.leaves:
            await self._leave(exchange)
            if not exchange.returns:
                return False
            await asyncio.sleep(PAUSE * self._chance.random())
        heard = await self._answered(exchange)
        if heard is None:
            return False
        if called is not None and heard.call is not None:
            self._keep(heard, SaidEntry(What.CALL, at, heard.call[1]), called)
            output = SaidEntry(What.OUTPUT, at, exchange.output)
            self._unsure = [output, SaidEntry(What.REPLY, at, exchange.reply)]
            self._add(self._output(heard.call[0], exchange.output))
            heard = await self._answered(exchange)
            if heard is None:
                return False
        self._keep(heard, SaidEntry(What.REPLY, at, heard.text), exchange.reply)
        return True

    def _keep(self, heard: HeardReply, entry: SaidEntry, right: str) -> None:
        """Put into the record what was said and what was heard, and see whether this is what was to be heard."""
        if entry.text != right or (heard.call is None) != (entry.what is What.REPLY):
            self._wrong.append(f"session {self._script.number}: heard {entry.text[:200]!r} in place of {right[:200]!r}")
        self._said += [self._unsure[0], entry]
        if self._chained:
            self._history, self._before = [], heard.id
        else:
            self._history += heard.history

    def _add(self, message: dict[str, Any]) -> None:
        self._history.append(message)

    def _question(self, text: str) -> dict[str, Any]:
        return {"role": "user", "content": text}

    def _output(self, call: str, text: str) -> dict[str, Any]:
        if self._form == "chat":
            return {"role": "tool", "tool_call_id": call, "content": text}
        if self._form == "messages":
            return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": call, "content": text}]}
        return {"type": "function_call_output", "call_id": call, "output": text}

    async def _leave(self, exchange: ScriptedExchange) -> None:
        """Hang up in the middle of the answer."""
        try:
            await self._asked(stream=True, leaves=exchange.leaves, began=time.monotonic())
        except (_Left, Broken):
            self._crowd.left += 1

    async def _answered(self, exchange: ScriptedExchange) -> HeardReply | None:
        """A whole answer, however often it has to be asked for; None if that was too often."""
        began, tries, sdk = time.monotonic(), 0, 0
        while True:
            tries += 1
            asked = time.monotonic()
            try:
                heard, first = await self._asked(stream=exchange.stream, leaves=0, began=began)
            except Broken as broken:
                now = time.monotonic()
                self._crowd.failures[broken.why] += 1
                self._crowd.longest_failure = max(self._crowd.longest_failure, now - asked)
                if broken.hopeless or now - began > PATIENCE:
                    self._gave_up = True
                    return None
                if broken.asks_again and sdk < SDK_TRIES:
                    await asyncio.sleep(self._pause(sdk, broken.after))
                    sdk += 1
                else:
                    await asyncio.sleep(PAUSE * (0.5 + self._chance.random()))
                    sdk = 0
                continue
            self._crowd.waits.append(AnswerWait(began, first, time.monotonic() - began, tries))
            return heard

    def _pause(self, tries: int, after: float | None) -> float:
        if after is not None and 0 < after <= LONGEST_WAIT:
            return after
        pause: float = min(FIRST_PAUSE * 2**tries, LONGEST_PAUSE)
        return pause * (1 - 0.25 * self._chance.random())

    def _body(self, *, stream: bool) -> bytes:
        body: dict[str, Any] = {"model": "scripted", "stream": stream, "tools": TOOLS[self._form]}
        if self._form == "responses":
            body["input"] = self._history
            if self._before:
                body["previous_response_id"] = self._before
        else:
            body["messages"] = self._history
        if self._form == "messages":
            body["max_tokens"] = 1000
        return json.dumps(body).encode()

    def _headers(self) -> dict[str, str]:
        headers = {"authorization": "Bearer none", "content-type": "application/json"}
        if self._form == "messages":
            headers = {"x-api-key": "none", "anthropic-version": "2023-06-01", "content-type": "application/json"}
        if self._script.named:
            headers["x-kilburn-session"] = f"load-{self._script.number}"
        return headers

    async def _asked(self, *, stream: bool, leaves: int, began: float) -> tuple[HeardReply, float]:
        """Ask once, the next gateway; the answer, and the seconds from `began` to its first byte.

        Raises:
            Broken: it did not come, or not to its end. _Left: as many characters were heard as wanted.
        """
        self._at = (self._at + 1) % len(self._crowd.urls)
        self._crowd.requests += 1
        url = self._crowd.urls[self._at] + PATHS[self._form]
        started = False
        try:
            async with self._http.post(url, data=self._body(stream=stream), headers=self._headers()) as answer:
                if answer.status != 200:
                    raise _refusal(answer.status, answer.headers, await answer.read())
                first, started = time.monotonic() - began, stream
                name = answer.headers.get("x-kilburn-session", "")
                if stream:
                    heard = await _READ_STREAM[self._form](_events(answer), leaves)
                else:
                    heard = _READ[self._form](json.loads(await answer.read()))
        except (aiohttp.ClientError, OSError, TimeoutError) as error:
            # In the middle of a stream an SDK raises; before it, and of an answer that is not streamed, it asks again.
            raise Broken(f"{'stream' if started else 'connection'}: {type(error).__name__}", asks_again=not started) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise Broken(f"unreadable: {type(error).__name__}: {error}", hopeless=True) from error
        self._name = name or self._name
        return heard, first


def _refusal(status: int, headers: Mapping[str, str], body: bytes) -> Broken:
    after = headers.get("retry-after")
    try:
        said = json.loads(body)["error"]
        code = said.get("code") or said.get("type") or ""
    except (ValueError, KeyError, TypeError, AttributeError):
        code = ""
    again = status in AGAIN or status >= 500
    why = f"{status} {code}".strip() + (", retry-after" if after is not None else "")
    return Broken(why, asks_again=again, after=float(after) if after and after.isdigit() else None, hopeless=not again)


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[Any]:
    """The data of a stream's events, in JSON; "[DONE]" as it is."""
    held = b""
    async for piece in answer.content.iter_any():
        *whole, held = (held + piece).split(b"\n\n")
        for event in whole:
            lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
            if lines:
                data = b"\n".join(lines)
                yield "[DONE]" if data == b"[DONE]" else json.loads(data)


def _leave_at(leaves: int, heard: str) -> None:
    if leaves and len(heard) >= leaves:
        raise _Left


def _sorted(arguments: str) -> str:
    return json.dumps(json.loads(arguments), sort_keys=True)


def _read_chat(body: Any) -> HeardReply:
    message = body["choices"][0]["message"]
    return _chat(body["id"], message.get("content"), message.get("tool_calls"))


def _chat(number: str, content: str | None, calls: list[dict[str, Any]] | None) -> HeardReply:
    message: dict[str, Any] = {"role": "assistant", "content": content or None}
    call = None
    if calls:
        message["tool_calls"] = calls
        call = calls[0]["id"], _sorted(calls[0]["function"]["arguments"])
    return HeardReply(content or "", call, [message], number)


async def _stream_chat(events: AsyncIterator[Any], leaves: int) -> HeardReply:
    text, calls, ended = "", dict[int, dict[str, Any]](), False
    async for event in events:
        if event == "[DONE]":
            if not ended:
                break
            return _chat("", text, [calls[at] for at in sorted(calls)])
        if "error" in event:
            raise Broken("stream: an error event")
        for choice in event["choices"]:
            delta = choice["delta"]
            text += delta.get("content") or ""
            _leave_at(leaves, text)
            for part in delta.get("tool_calls") or ():
                known = calls.setdefault(part["index"], {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
                known["id"] += part.get("id") or ""
                for name in ("name", "arguments"):
                    known["function"][name] += part.get("function", {}).get(name) or ""
            ended = ended or choice.get("finish_reason") is not None
    raise Broken("stream: no end")


def _read_messages(body: Any) -> HeardReply:
    content = body["content"]
    text = "".join(block["text"] for block in content if block["type"] == "text")
    calls = [block for block in content if block["type"] == "tool_use"]
    call = (calls[0]["id"], json.dumps(calls[0]["input"], sort_keys=True)) if calls else None
    return HeardReply(text, call, [{"role": "assistant", "content": content}], body["id"])


async def _stream_messages(events: AsyncIterator[Any], leaves: int) -> HeardReply:
    blocks, partial, number = list[dict[str, Any]](), list[str](), ""
    async for event in events:
        match event["type"]:
            case "error":
                raise Broken("stream: an error event")
            case "message_start":
                number = event["message"]["id"]
            case "content_block_start":
                blocks.append(dict(event["content_block"]))
                partial.append("")
            case "content_block_delta":
                delta = event["delta"]
                if delta["type"] == "text_delta":
                    blocks[event["index"]]["text"] += delta["text"]
                    _leave_at(leaves, blocks[event["index"]]["text"])
                else:
                    partial[event["index"]] += delta["partial_json"]
            case "content_block_stop":
                if partial[event["index"]]:
                    blocks[event["index"]]["input"] = json.loads(partial[event["index"]])
            case "message_stop":
                return _read_messages({"content": blocks, "id": number})
    raise Broken("stream: no end")


def _read_responses(body: Any) -> HeardReply:
    output = body["output"]
    text = "".join(part["text"] for item in output if item["type"] == "message" for part in item["content"])
    calls = [item for item in output if item["type"] == "function_call"]
    call = (calls[0]["call_id"], _sorted(calls[0]["arguments"])) if calls else None
    return HeardReply(text, call, output, body["id"])


async def _stream_responses(events: AsyncIterator[Any], leaves: int) -> HeardReply:
    text = ""
    async for event in events:
        match event["type"]:
            case "error" | "response.failed":
                raise Broken("stream: an error event")
            case "response.output_text.delta":
                text += event["delta"]
                _leave_at(leaves, text)
            case "response.completed":
                heard = _read_responses(event["response"])
                if text and text != heard.text:
                    raise ValueError("the pieces of a stream are not its whole")
                return heard
    raise Broken("stream: no end")


_READ = {"chat": _read_chat, "messages": _read_messages, "responses": _read_responses}
_READ_STREAM = {"chat": _stream_chat, "messages": _stream_messages, "responses": _stream_responses}

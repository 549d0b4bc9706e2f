"""Both ends of the load on a gateway: a stub that answers at once, and a client that measures.

A client's latest message says what the stub has to answer: `mark-NUMBER-EVENTS-PAUSE`, the pause in milliseconds.
`python -m kilburn_lab.evals.gateway_load` is the stub; it prints its port.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from kilburn.errors import Unavailable

if TYPE_CHECKING:
    import aiohttp
    from aiohttp import web

MARK = re.compile(rb"mark-(\d+)-(\d+)-(\d+)")
HEADERS = {"authorization": "Bearer none", "content-type": "application/json"}
LARGEST = 1 << 26
WORDS = [
    *("agent", "bind", "call", "error", "fetch", "file", "gap", "line", "merge", "of", "page"),
    *("parse", "prompt", "read", "store", "test", "the", "token", "trace", "value", "window"),
]


def said(number: int, events: int) -> str:
    """The text of the stub's answer."""
    return "".join(f"{number}:{at} " for at in range(events))


async def answer_all(announce: Callable[[int], None]) -> None:
    """Serve as the stub until cancelled. `announce` gets the port."""
    from aiohttp import web  # it is in an extra

    application = web.Application(client_max_size=LARGEST)
    application.router.add_post("/{path:.*}", _serve)
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0, backlog=1024)
        await site.start()
        announce(runner.addresses[0][1])
        await asyncio.Event().wait()
    finally:
        await runner.cleanup()


async def _serve(request: web.Request) -> web.StreamResponse:
    from aiohttp import web

    body = await request.read()
    mark = MARK.match(body, max(body.rfind(b"mark-"), 0))
    number, events, pause = map(int, mark.groups()) if mark else (0, 1, 0)
    if b'"stream":true' not in body and b'"stream": true' not in body:
        return web.Response(body=_whole(number, events), content_type="application/json")
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    for event in _events(number, events):
        await response.write(event)
        if pause:
            await asyncio.sleep(pause / 1000)
    return response


def _answer(kind: str, choice: dict[str, Any], **more: Any) -> bytes:
    head = {"id": "chatcmpl-stub", "object": kind, "created": 1767225600, "model": "scripted"}
    return json.dumps({**head, "choices": [{"index": 0, **choice}], **more}, separators=(",", ":")).encode()


def _whole(number: int, events: int) -> bytes:
    message = {"role": "assistant", "content": said(number, events), "refusal": None}
    usage = {"prompt_tokens": 1, "completion_tokens": events, "total_tokens": events + 1}
    return _answer("chat.completion", {"message": message, "finish_reason": "stop"}, usage=usage)


def _events(number: int, events: int) -> list[bytes]:
    deltas = [{"role": "assistant", "content": ""}, *({"content": f"{number}:{at} "} for at in range(events))]
    chunks = [_answer("chat.completion.chunk", {"delta": delta, "finish_reason": None}) for delta in deltas]
    chunks.append(_answer("chat.completion.chunk", {"delta": {}, "finish_reason": "stop"}))
    return [b"data: " + chunk + b"\n\n" for chunk in (*chunks, b"[DONE]")]


class Heard(NamedTuple):
    """An answer: its status, the text that it says, whether it came to its end, and the seconds to its first byte."""

    status: int
    text: str
    whole: bool
    first: float


class ClientConnection:
    """One connection of a client, kept open.

    Args:
        port: on the loopback.
    """

    def __init__(self, port: int) -> None:
        self.port = port
        self._http: aiohttp.ClientSession | None = None

    async def ask(self, body: bytes) -> Heard:
        """Send one request.

        Raises:
            Unavailable: the connection broke.
        """
        import aiohttp  # it is in an extra

        if self._http is None:
            connector, timeout = aiohttp.TCPConnector(limit=1), aiohttp.ClientTimeout(total=None)
            self._http = aiohttp.ClientSession(connector=connector, timeout=timeout, headers=HEADERS)
        began, first, pieces = time.perf_counter(), 0.0, list[bytes]()
        try:
            async with self._http.post(f"http://127.0.0.1:{self.port}/v1/chat/completions", data=body) as answer:
                async for piece in answer.content.iter_any():
                    if not pieces or answer.content_type == "application/json":
                        first = time.perf_counter() - began
                    pieces.append(piece)
        except (aiohttp.ClientError, OSError) as error:
            raise Unavailable(f"the connection to port {self.port} broke: {error}") from error
        return Heard(answer.status, *_text(b"".join(pieces)), first)

    async def close(self) -> None:
        """Hang up."""
        if self._http is not None:
            await self._http.close()
            self._http = None


def _text(body: bytes) -> tuple[str, bool]:
    if not body.startswith((b"data:", b"event:", b":")):
        choices = json.loads(body).get("choices") if body.startswith(b"{") else None
        return (choices[0]["message"].get("content") or "", True) if choices else (body[:200].decode("utf-8", "replace"), False)
    said, ended, done = [], False, False
    for event in body.split(b"\n\n"):
        if event.startswith(b"data: [DONE]"):
            done = True
        elif event.startswith(b"data: "):
            for choice in json.loads(event[6:]).get("choices") or ():
                said.append(choice["delta"].get("content") or "")
                ended = ended or choice.get("finish_reason") is not None
    return "".join(said), ended and done


class ClientConversation:
    """A client that resends everything: texts of `words` words, made up from a seed. `streamed` is what it asks for."""

    def __init__(self, seed: int, words: int, before: int = 0, *, streamed: bool = True) -> None:
        self.streamed = streamed
        self._chance = random.Random(f"{seed}/{words}")
        self._words = words
        self._bodies: list[bytes] = []
        self.number = self.events = 0
        roles = ("user", "assistant")
        for at in range(before):
            self._add(roles[at % 2], f"{seed} {at} {self._made()}")
        if before % 2:
            self._add("assistant", self._made())

    def __len__(self) -> int:
        return len(self._bodies)

    @property
    def letters(self) -> int:
        """Characters of all messages."""
        return sum(map(len, self._bodies))

    def _made(self) -> str:
        return " ".join(self._chance.choices(WORDS, k=self._words))

    def _add(self, role: str, content: str) -> None:
        self._bodies.append(json.dumps({"role": role, "content": content}).encode())

    def next(self, number: int, events: int, pause: int = 0, *, stream: bool = True) -> bytes:
        """The body of the next request: all messages, and a new one."""
        self.number, self.events = number, events
        self._add("user", f"{self._made()} mark-{number}-{events}-{pause}")
        flag = b"true" if stream else b"false"
        return b'{"model":"scripted","stream":%s,"messages":[%s]}' % (flag, b",".join(self._bodies))

    def hear(self, heard: Heard) -> bool:
        """Take the answer into the conversation. Returns whether it was the one that the stub gave, to its end."""
        self._add("assistant", heard.text)
        return heard.status == 200 and heard.whole and heard.text == said(self.number, self.events)


if __name__ == "__main__":
    asyncio.run(answer_all(lambda port: print(port, flush=True)))

"""Both ends of the load on a gateway: a stub that answers at once, and a client that measures. Plain sockets, so that they take
little of the machine that the gateway runs on.

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
from contextlib import suppress
from typing import Any, NamedTuple

from kilburn.errors import Unavailable

MARK = re.compile(rb"mark-(\d+)-(\d+)-(\d+)")
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n"
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
    server = await asyncio.start_server(_serve, "127.0.0.1", 0, limit=LARGEST, backlog=1024)
    announce(server.sockets[0].getsockname()[1])
    await server.serve_forever()


async def _serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, asyncio.IncompleteReadError):
        while True:
            head = await reader.readuntil(b"\r\n\r\n")
            body = await _body(reader, head)
            found = MARK.match(body, max(body.rfind(b"mark-"), 0))
            number, events, pause = map(int, found.groups()) if found else (0, 1, 0)
            if b'"stream":true' in body or b'"stream": true' in body:
                writer.write(HEAD % b"text/event-stream" + b"transfer-encoding: chunked\r\n\r\n")
                for event in _events(number, events):
                    writer.write(b"%x\r\n%s\r\n" % (len(event), event))
                    if pause:
                        await writer.drain()
                        await asyncio.sleep(pause / 1000)
                writer.write(b"0\r\n\r\n")
            else:
                whole = _whole(number, events)
                writer.write(HEAD % b"application/json" + b"content-length: %d\r\n\r\n" % len(whole) + whole)
            await writer.drain()
    writer.close()
    with suppress(OSError):
        await writer.wait_closed()


async def _body(reader: asyncio.StreamReader, head: bytes) -> bytes:
    lowered = head.lower()
    if (at := lowered.find(b"\r\ncontent-length:")) >= 0:
        return await reader.readexactly(int(lowered[at + 17 : lowered.index(b"\r\n", at + 2)]))
    if b"\r\ntransfer-encoding: chunked" not in lowered:
        return b""
    pieces = []
    while True:
        size = int(await reader.readuntil(b"\r\n"), 16)
        pieces.append((await reader.readexactly(size + 2))[:-2])
        if not size:
            return b"".join(pieces)


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
        self._ends: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, body: bytes) -> Heard:
        """Send one request.

        Raises:
            Unavailable: the connection broke.
        """
        if self._ends is None:
            self._ends = await asyncio.open_connection("127.0.0.1", self.port, limit=LARGEST)
        reader, writer = self._ends
        head = (
            f"POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\nauthorization: Bearer none\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        try:
            began = time.perf_counter()
            writer.write(head.encode() + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            first, pieces = 0.0, []
            lowered = answer.lower()
            if b"\r\ntransfer-encoding: chunked" in lowered:
                while size := int(await reader.readuntil(b"\r\n"), 16):
                    first = first or time.perf_counter() - began
                    pieces.append((await reader.readexactly(size + 2))[:-2])
                await reader.readexactly(2)
            else:
                pieces.append(await _body(reader, answer))
                first = time.perf_counter() - began
        except (OSError, asyncio.IncompleteReadError) as error:
            raise Unavailable(f"the connection to port {self.port} broke: {error}") from error
        if b"\r\nconnection: close" in lowered:
            await self.close()
        return Heard(int(answer.split(b" ", 2)[1]), *_text(b"".join(pieces)), first)

    async def close(self) -> None:
        """Hang up."""
        if self._ends is not None:
            writer, self._ends = self._ends[1], None
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


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

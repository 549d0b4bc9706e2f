"""Requests that wait for a slow upstream: they hold no thread, and what a client leaves is left upstream too."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

from kilburn.gateway.app import Settings, build
from kilburn.model import Delta, Reply, Request
from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import serving
from waiting import until

HELD = 60
"""Requests that wait at once: more than the gateway has threads."""
COMPUTED = 140
"""Requests to a model of this process: more than twice its threads."""
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
EVENTS = {
    "chat": [
        {"choices": [{"index": 0, "delta": {"role": "assistant", "content": "Late."}}]},
        {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": {"prompt_tokens": 1, "completion_tokens": 1}},
    ],
    "messages": [
        {"type": "message_start", "message": {"usage": {"input_tokens": 1, "output_tokens": 0}}},
        {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}},
        {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Late."}},
        {"type": "content_block_stop", "index": 0},
        {"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}},
        {"type": "message_stop"},
    ],
}  # fmt: skip


class Slow:
    """A provider of one form that lets everybody wait, but who asks for the model "quick"; `begun` of the others have been
    answered with headers and a first event, where that is wanted."""

    def __init__(self, form: str, *, begins: bool) -> None:
        self.form, self.begins = form, begins
        self.waiting = self.most = self.left = 0
        self.go = asyncio.Event()
        self.loop: asyncio.AbstractEventLoop | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        self.loop = asyncio.get_running_loop()
        raw = b""
        while (message := await receive()).get("more_body"):
            raw += message["body"]
        asked = json.loads(raw + message.get("body", b""))
        events = [f"event: {e.get('type', 'x')}\ndata: {json.dumps(e)}\n\n".encode() for e in EVENTS[self.form]]
        start = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]}
        if asked["model"] != "quick":
            self.waiting += 1
            self.most = max(self.most, self.waiting)
            if self.begins:
                await send(start)
                await send({"type": "http.response.body", "body": events.pop(0), "more_body": True})
            gone = asyncio.ensure_future(receive())
            go = asyncio.ensure_future(self.go.wait())
            done, _ = await asyncio.wait({gone, go}, return_when=asyncio.FIRST_COMPLETED)
            go.cancel()
            self.waiting -= 1
            if gone in done:
                self.left += 1
                return
            gone.cancel()
        if not (self.begins and asked["model"] != "quick"):
            await send(start)
        await send({"type": "http.response.body", "body": b"".join(events)})

    def open(self) -> None:
        """Let them all go on."""
        assert self.loop is not None
        self.loop.call_soon_threadsafe(self.go.set)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as made:
        yield made


def body(form: str, model: str, number: int, *, streamed: bool) -> dict[str, Any]:
    key = "input" if form == "responses" else "messages"
    return {"model": model, "max_tokens": 9, "stream": streamed, key: [{"role": "user", "content": f"Question {number}"}]}


async def held(url: str, form: str, *, streamed: bool, far: Slow, near: str) -> tuple[list[int], int]:
    """Statuses of many requests that are answered at last, and threads while all of them wait and a native one is answered."""
    async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:

        async def ask(number: int) -> httpx2.Response:
            return await client.post(f"{url}/v1/{PATHS[form]}", json=body(form, "slow", number, streamed=streamed))

        before = threading.active_count()
        tasks = [asyncio.create_task(ask(number)) for number in range(HELD)]
        while far.waiting < HELD:
            assert not any(task.done() for task in tasks), next(task.result().text for task in tasks if task.done())
            await asyncio.sleep(0.01)
        native = await client.post(f"{url}/v1/{PATHS[near]}", json=body(near, "quick", 0, streamed=True))
        other = await client.post(f"{url}/v1/{PATHS[form]}", json=body(form, "quick", 0, streamed=streamed))
        assert (native.status_code, other.status_code) == (200, 200)
        assert "Late." in native.text
        assert "Late." in other.text
        assert far.waiting == HELD, "they were answered while all the others waited"
        threads = threading.active_count() - before
        # Half of the clients leave: nothing of them is left upstream.
        for task in tasks[::2]:
            task.cancel()
        while far.waiting > HELD // 2:
            await asyncio.sleep(0.01)
        assert far.left == HELD // 2
        far.open()
        return [reply.status_code for reply in await asyncio.gather(*tasks[1::2])], threads


@pytest.mark.parametrize(
    ("form", "far", "streamed", "begins"),
    [
        ("messages", "chat", True, False),
        ("messages", "chat", False, True),
        ("chat", "messages", True, True),
        ("chat", "messages", False, False),
        ("responses", "messages", True, False),
    ],
)
def test_translated_requests_hold_no_thread_while_they_wait(
    tmp_path: Path, stack: ExitStack, form: str, far: str, streamed: bool, begins: bool
) -> None:
    slow = Slow(far, begins=begins)
    upstream = stack.enter_context(serving(slow))
    settings = Settings(
        db=str(tmp_path / "slow.db"),
        upstream=upstream if far == "messages" else f"{upstream}/v1",
        tokenizer="chars/4",
        embedder=None,
    )
    url = stack.enter_context(serving(build(settings)))
    statuses, threads = asyncio.run(held(url, form, streamed=streamed, far=slow, near=far))
    assert statuses == [200] * (HELD // 2)
    assert threads <= 40 + 2, "those of the gateway's own work, however many requests wait"
    assert slow.most >= HELD


class Blocking(Scripted):
    """A model of this process that computes until it is let go."""

    def __init__(self) -> None:
        super().__init__(["Late."] * COMPUTED)
        self.go = threading.Event()
        self.lock = threading.Lock()
        self.asked = self.closed = 0

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        with self.lock:
            self.asked += 1
        try:
            self.go.wait()
            yield from super().stream(request)
        finally:
            with self.lock:
                self.closed += 1


async def ended(client: httpx2.AsyncClient, url: str) -> float:
    """Requests of chat completions that the gateway has done with."""
    lines = (await client.get(f"{url}/metrics")).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("kilburn_requests_total{") and "/chat/" in line)


def test_a_model_that_computes_here_has_threads_of_its_own(tmp_path: Path, stack: ExitStack) -> None:
    model = Blocking()
    stack.callback(model.go.set)
    url = stack.enter_context(
        serving(build(Settings(db=str(tmp_path / "here.db"), upstream=None, model=model, tokenizer="chars/4", embedder=None)))
    )

    async def work() -> list[int]:
        async with httpx2.AsyncClient(timeout=600, limits=httpx2.Limits(max_connections=None)) as client:
            before = threading.active_count()
            tasks = [
                asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body("chat", "m", number, streamed=False)))
                for number in range(COMPUTED)
            ]
            while model.asked < 64:
                await asyncio.sleep(0.01)
            # What asks no model is answered, all of it by the gateway's other threads.
            for _ in range(50):
                assert (await client.get(f"{url}/health")).status_code == 200
                assert (await client.get(f"{url}/v1/models")).status_code == 200
            assert model.asked == 64, "the others wait for their turn"
            assert threading.active_count() - before <= 64 + 40 + 2
            for task in tasks[: COMPUTED // 2]:
                task.cancel()
            while await ended(client, url) < COMPUTED // 2:
                await asyncio.sleep(0.05)
            model.go.set()
            return [reply.status_code for reply in await asyncio.gather(*tasks[COMPUTED // 2 :])]

    assert asyncio.run(work()) == [200] * (COMPUTED // 2)
    until(lambda: model.closed == model.asked)
    assert model.asked < COMPUTED, "a client that left before its turn is not asked for"

"""A request that is made again while it is being answered, at another gateway over the store: nothing is doubled."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx2
import pytest

from gateway.talk import said, user
from kilburn.testing.upstream import Upstream
from waiting import until

Gateways = Callable[..., Any]
PATHS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")


class Slow:
    """A provider whose answers wait until `go` is set, and are different each time."""

    def __init__(self, reply: Callable[[int], Any] = lambda number: f"answer {number}") -> None:
        self.reply, self.go, self.calls = reply, threading.Event(), 0
        self.upstream = Upstream(otherwise=self.answer, piece=100)

    def answer(self, sent: Any) -> Any:
        self.calls += 1
        number = self.calls
        self.go.wait(600)
        return self.reply(number)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(8) as made:
        yield made


@pytest.fixture
def place(tmp_path: Any) -> str:
    """The store of both gateways."""
    return str(tmp_path / "gateway.db")


def pair(gateway: Gateways, place: str, slow: Slow, **settings: Any) -> list[Any]:
    return [gateway(upstream=slow.upstream, db=place, **settings) for _ in range(2)]


def ask(setup: Any, talk: list[Any], path: str = PATHS[0], **more: Any) -> httpx2.Response:
    key = "input" if path == PATHS[2] else "messages"
    body = {"model": "m", key: talk, **({"max_tokens": 99} if path == PATHS[1] else {}), **more}
    return httpx2.post(f"{setup.url}{path}", json=body, timeout=600)


def waits(setup: Any) -> Callable[[], bool]:
    """Whether a request waits there for an equal one."""
    return lambda: "kilburn_requests_waiting 1" in httpx2.get(f"{setup.url}/metrics", timeout=600).text


def conversations(setup: Any) -> list[list[str]]:
    with setup.store() as store:
        return [
            ["".join(part.text for part in message.parts) for message in store.session(info.name).originals()]
            for info in store.sessions()
        ]


@pytest.mark.parametrize(("path", "stream"), [(PATHS[0], True), (PATHS[0], False), (PATHS[1], True), (PATHS[2], False)])
def test_the_second_try_gets_the_reply_of_the_first(
    gateway: Gateways, place: str, pool: ThreadPoolExecutor, path: str, stream: bool
) -> None:
    slow = Slow()
    first, second = pair(gateway, place, slow)
    tries: list[Future[httpx2.Response]] = [pool.submit(ask, first, [user("a")], path, stream=stream)]
    until(lambda: slow.calls)
    tries.append(pool.submit(ask, second, [user("a")], path, stream=stream))
    until(waits(second))
    slow.go.set()
    answers = [each.result() for each in tries]
    assert [answer.status_code for answer in answers] == [200, 200]
    assert all("answer 1" in answer.text for answer in answers)
    assert slow.calls == 1
    assert len({answer.headers["x-kilburn-session"] for answer in answers}) == 1
    talk = [user("a"), said("answer 1"), user("b")]
    assert "answer 2" in ask(first, talk, path).text
    assert conversations(first) == [["a", "answer 1", "b", "answer 2"]]

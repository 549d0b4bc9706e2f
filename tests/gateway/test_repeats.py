"""A request that is made again while it is being answered, at another gateway over the store: nothing is doubled."""

from __future__ import annotations

import random
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import apsw
import httpx2
import pytest

import kilburn
from gateway.talk import said, user
from gateway.test_crash import FILLER, MOMENTS, interrupted
from gateway.test_crash import Setup as Crashing
from gateway.test_crash import setup as setup
from kilburn.gateway.limits import RequestBounds
from kilburn.testing.upstream import Refusal, Upstream, calling
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
def place(tmp_path: Path) -> str:
    """The store of both gateways."""
    return str(tmp_path / "gateway.db")


@pytest.fixture
def lock(place: str) -> Iterator[Callable[[], Callable[[], None]]]:
    """Holds the store as another writer does; returns what ends that."""
    with closing(apsw.Connection(place)) as db:

        def hold() -> Callable[[], None]:
            db.execute("BEGIN IMMEDIATE")
            return lambda: db.execute("ROLLBACK").close()

        yield hold


@pytest.fixture
def lapse(place: str) -> Callable[[], None]:
    """Ends all leases by the store's clock."""

    def end() -> None:
        with closing(apsw.Connection(f"{place}-requests")) as counted:
            counted.execute("UPDATE running SET until = 0")

    return end


def pair(gateway: Gateways, place: str, slow: Slow, **settings: Any) -> list[Any]:
    return [gateway(upstream=slow.upstream, db=place, **settings) for _ in range(2)]


def ask(setup: Any, talk: list[Any], path: str = PATHS[0], **more: Any) -> httpx2.Response:
    key = "input" if path == PATHS[2] else "messages"
    body = {"model": "m", key: talk, **({"max_tokens": 99} if path == PATHS[1] else {}), **more}
    return httpx2.post(f"{setup.url}{path}", json=body, timeout=600)


def waits(setup: Any) -> Callable[[], bool]:
    """Whether a request waits there for an equal one."""
    return lambda: "kilburn_requests_waiting 1" in httpx2.get(f"{setup.url}/metrics", timeout=600).text


def conversations(place: str) -> list[list[str]]:
    """What each session of the store says."""
    with kilburn.open(place, readonly=True, embedder=None, tokenizer="chars/4") as store:
        return sorted(
            ["".join(part.text for part in message.parts) for message in store.session(info.name).contents.originals()]
            for info in store.sessions()
        )


FORMS = [(PATHS[0], True), (PATHS[0], False), (PATHS[1], True), (PATHS[2], False)]


@pytest.mark.parametrize(("path", "stream"), FORMS)
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
    assert "answer 2" in ask(first, [user("a"), said("answer 1"), user("b")], path).text
    assert conversations(place) == [["a", "answer 1", "b", "answer 2"]]


def test_a_reply_with_a_call_is_repeated_with_its_call(gateway: Gateways, place: str, pool: ThreadPoolExecutor) -> None:
    slow = Slow(lambda number: calling(("look", {"at": str(number)}, f"call_{number}"), text="I look."))
    first, second = pair(gateway, place, slow)
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    tries = [pool.submit(ask, first, [user("a")], tools=tools)]
    until(lambda: slow.calls)
    tries.append(pool.submit(ask, second, [user("a")], tools=tools))
    until(waits(second))
    slow.go.set()
    choices = [each.result().json()["choices"][0] for each in tries]
    assert [choice["finish_reason"] for choice in choices] == ["tool_calls"] * 2
    assert choices[0]["message"]["tool_calls"][0]["id"] == choices[1]["message"]["tool_calls"][0]["id"] == "call_1"
    assert choices[1]["message"]["content"] == "I look."


def test_where_nobody_waits_the_second_try_is_refused(gateway: Gateways, place: str, pool: ThreadPoolExecutor) -> None:
    slow = Slow()
    first, second = pair(gateway, place, slow, limits=RequestBounds(repeat=0))
    answer = pool.submit(ask, first, [user("a")])
    until(lambda: slow.calls)
    refused = ask(second, [user("a")])
    assert (refused.status_code, refused.json()["error"]["code"]) == (409, "request_in_progress")
    assert refused.headers["retry-after"] == "1"
    # Another body is another request.
    other = pool.submit(ask, second, [user("c")])
    until(lambda: slow.calls == 2)
    slow.go.set()
    assert answer.result().status_code == other.result().status_code == 200
    assert len(conversations(place)) == 2


def test_a_first_try_that_failed_leaves_the_turn_to_the_second(gateway: Gateways, place: str, pool: ThreadPoolExecutor) -> None:
    slow = Slow(lambda number: Refusal(status=500) if number == 1 else "answer")
    first, second = pair(gateway, place, slow)
    tries = [pool.submit(ask, first, [user("a")])]
    until(lambda: slow.calls)
    tries.append(pool.submit(ask, second, [user("a")]))
    until(waits(second))
    slow.go.set()
    assert [each.result().status_code for each in tries] == [500, 200]
    assert conversations(place) == [["a", "answer"]]


def test_both_tries_wait_for_whoever_holds_the_session(
    gateway: Gateways, place: str, pool: ThreadPoolExecutor, lock: Callable[[], Callable[[], None]]
) -> None:
    slow = Slow()
    slow.go.set()
    both = pair(gateway, place, slow)
    talk = [user("a")]
    talk.append(said(ask(both[0], talk).json()["choices"][0]["message"]["content"]))
    talk.append(user("b"))
    unlock = lock()
    try:
        tries = [pool.submit(patient, each, talk) for each in both]
        until(lambda: any(waits(each)() for each in both))
    finally:
        unlock()
    texts = {each.result().json()["choices"][0]["message"]["content"] for each in tries}
    assert len(texts) == 1
    [conversation] = conversations(place)
    assert conversation[:3] == ["a", "answer 1", "b"]
    assert conversation[3:] == [*texts]


def test_a_turn_that_another_gateway_took_over_takes_no_reply_of_the_first(
    gateway: Gateways, place: str, pool: ThreadPoolExecutor, lapse: Callable[[], None]
) -> None:
    """The lease ended by the store's clock alone: the first gateway's machine slept, or a clock was set."""
    slow = Slow()
    first, second = pair(gateway, place, slow)
    talk = [user("a")]
    late = pool.submit(ask, first, talk)
    until(lambda: slow.calls)
    lapse()
    early = pool.submit(ask, second, talk)
    until(lambda: slow.calls == 2)
    slow.go.set()
    assert (late.result().status_code, early.result().status_code) == (503, 200)
    talk += [said(early.result().json()["choices"][0]["message"]["content"]), user("b")]
    assert ask(first, talk).status_code == 200
    assert conversations(place) == [["a", talk[1]["content"], "b", "answer 3"]]


def test_another_request_of_the_same_history_leaves_the_turn_to_the_first(
    gateway: Gateways, place: str, pool: ThreadPoolExecutor
) -> None:
    slow = Slow()
    tries = [pool.submit(ask, each, [user("a")], seed=seed) for seed, each in enumerate(pair(gateway, place, slow))]
    until(lambda: slow.calls == 2)
    slow.go.set()
    assert [each.result().status_code for each in tries] == [200, 200]
    assert sorted(len(texts) for texts in conversations(place)) == [2, 2]


def patient(setup: Any, talk: list[Any]) -> httpx2.Response:
    """Ask again as long as the store is held."""
    while (answer := ask(setup, talk)).status_code == 503:
        pass
    return answer


@pytest.mark.parametrize("moment", ["before the reply", *(pytest.param(each, marks=pytest.mark.slow) for each in MOMENTS[2:])])
def test_the_second_try_goes_on_where_a_gateway_was_killed(setup: Crashing, moment: str) -> None:
    """The lease of a gateway that was killed ends by itself."""
    chance = random.Random(moment)
    other, talk = setup.serve(), list[Any]()
    for _ in range(7):
        talk.append(user(f"q{len(talk)} {FILLER}"))
        talk.append(said(other.ask(talk)[0]))
    talk.append(user(f"q{len(talk)} {FILLER}"))
    answer = interrupted(setup, setup.serve(), talk, moment, chance) or other.ask(talk)
    assert f"r{len(talk) - 1} " in answer[0]
    talk.append(said(answer[0]))
    [texts] = setup.sessions().values()
    assert [text.strip() for text in texts] == [message["content"].strip() for message in talk]


@pytest.mark.slow
def test_a_gateway_that_was_stopped_for_longer_than_its_lease_doubles_nothing(setup: Crashing, pool: ThreadPoolExecutor) -> None:
    stopped, other = setup.serve(), setup.serve()
    talk = [user(f"q0 {FILLER}")]
    talk += [said(stopped.ask(talk)[0]), user(f"q2 {FILLER}")]
    calls = list[int]()

    def reply(sent: Any) -> str:
        calls.append(len(calls))
        return f"answer {len(calls)}"

    setup.upstream.otherwise, setup.upstream.delay = reply, 1.0
    first = pool.submit(stopped.ask, talk)
    until(lambda: calls)
    stopped.process.send_signal(signal.SIGSTOP)
    setup.upstream.delay = 0.0
    try:
        text, name = other.ask(talk)
        talk += [said(text), user("q4")]
        _, later = other.ask(talk)
    finally:
        stopped.process.send_signal(signal.SIGCONT)
    with suppress(AssertionError):
        first.result()
    assert later == name
    [texts] = setup.sessions().values()
    assert len(texts) == 6

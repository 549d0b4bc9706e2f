"""Clients that do not just append: passages in the newest message alone, and a history of which the client keeps the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from gateway.talk import said, user
from kilburn.gateway.app import Settings, build
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.limits import RequestBounds
from kilburn.testing.upstream import Refusal, Upstream, serving

Talk = list[dict[str, Any]]


class Client:
    """A client with a history of its own, and the gateway that it talks to."""

    def __init__(self, folder: Path, stack: ExitStack, reply: str = "Answer {} is what you asked for.", **settings: Any) -> None:
        self.db, self.stack = str(folder / "g.db"), stack
        self.upstream = Upstream(otherwise=lambda sent: reply.format(len(self.upstream.sent)))
        far = stack.enter_context(serving(self.upstream))
        given = {"db": self.db, "upstream": f"{far}/v1", "tokenizer": "chars/4", "embedder": None, "window": 8000}
        self.settings = Settings(**{**given, **settings})
        self.http = stack.enter_context(httpx2.Client(timeout=600))
        self.history: Talk = []
        self.start()

    def start(self) -> None:
        self._running = ExitStack()
        self.stack.push(self._running)
        self.url = self._running.enter_context(serving(build(self.settings), **uvicorn_options(RequestBounds())))

    def restart(self) -> None:
        self._running.close()
        self.start()

    def post(self, messages: Talk, **headers: str) -> httpx2.Response:
        answer = self.http.post(f"{self.url}/v1/chat/completions", json={"model": "m", "messages": messages}, headers=headers)
        assert answer.status_code == 200, answer.text
        return answer

    def ask(self, question: str, passages: str = "", keep: int = 10_000, **headers: str) -> str:
        """Ask with passages that the history does not keep; return the session's name."""
        shown = f"Use these passages:\n{passages}\n\nQuestion: {question}" if passages else question
        answer = self.post([*self.history, user(shown)], **headers)
        reply = answer.json()["choices"][0]["message"]["content"]
        self.history = [*self.history, user(question), said(reply)][-keep:]
        return str(answer.headers["x-kilburn-session"])

    def sessions(self) -> list[str]:
        self._running.close()
        with kilburn.open(self.db, window=8000, policy="fifo", embedder=None, readonly=True) as store:
            return [info.name for info in store.sessions()]


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Callable[..., Client]]:
    with ExitStack() as stack:
        yield lambda **settings: Client(tmp_path, stack, **settings)


def passages(turn: int) -> str:
    return f"Passage {turn}: the drum of Atlas held {turn * 512} words. " * 10


def test_passages_in_the_newest_message_alone_are_one_session(client: Callable[..., Client]) -> None:
    at = client()
    names = {at.ask(f"How many words were there in test {turn}?", passages(turn)) for turn in range(12)}
    at.restart()
    names |= {at.ask(f"And how many in test {turn}?", passages(turn)) for turn in range(12, 24)}
    assert len(names) == 1
    # What the model saw stays in front, so the provider's cache has it.
    kept = [after.shared / before.tokens for before, after in zip(at.upstream.sent, at.upstream.sent[1:], strict=False)]
    assert sum(kept) / len(kept) > 0.8
    assert at.sessions() == [*names]


def test_a_history_that_the_client_cuts_continues_its_session(client: Callable[..., Client]) -> None:
    at = client(reply="Answer {} is what you asked for: " + "the drum turns at 3,000 revolutions a minute. " * 5)
    names = {at.ask(f"Question {turn} about the drum?", keep=9) for turn in range(20)}
    assert len(names) == 1
    assert at.sessions() == [*names]


def test_the_same_request_again_is_no_second_turn(client: Callable[..., Client]) -> None:
    at = client(reply="It is the same.")
    name = at.ask("Question 0?", passages(0))
    at.ask("Question 1?", passages(1))
    asked = [*at.history, user(f"{passages(2)}\nQuestion 2?")]
    assert {at.post(asked).headers["x-kilburn-session"] for _ in range(3)} == {name}
    assert at.sessions() == [name]


def test_conversations_that_began_with_the_same_words_are_never_joined(client: Callable[..., Client]) -> None:
    at = client(reply="Noted.")
    ana, bo, names = list[dict[str, Any]](), list[dict[str, Any]](), list[list[str]]([[], []])
    for turn in range(4):
        for number, (who, talk) in enumerate((("Ana", ana), ("Bo", bo))):
            at.history = list(talk)
            names[number].append(at.ask(f"Question {turn} of {who if turn else 'mine'}?", f"{who} has {turn + 12} drums."))
            talk[:] = at.history
            other = "Bo" if who == "Ana" else "Ana"
            assert f"{other} has" not in str(at.upstream.sent[-1].body), turn
    assert not {*names[0]} & {*names[1]}
    # Each has one session from the second turn on.
    assert [len({*each[1:]}) for each in names] == [1, 1]


def test_a_turn_that_failed_is_asked_again_in_its_session(client: Callable[..., Client]) -> None:
    at = client()
    name = at.ask("Question 0?", passages(0))
    asked = {"model": "m", "messages": [*at.history, user(f"{passages(1)}\nQuestion 1?")]}
    at.upstream.enqueue(Refusal(status=500))
    assert at.http.post(f"{at.url}/v1/chat/completions", json=asked).status_code == 500
    assert at.post(asked["messages"]).headers["x-kilburn-session"] == name
    assert at.sessions() == [name]


def test_what_was_really_changed_is_a_branch(client: Callable[..., Client]) -> None:
    at = client()
    name = at.ask("Where is the drum?", passages(1))
    at.ask("How large is it?", passages(2))
    changed = [user("Where was the core?"), *at.history[1:]]
    assert at.post([*changed, user("And then?")]).headers["x-kilburn-session"] != name


def test_people_behind_one_key_are_never_taken_for_each_other(client: Callable[..., Client], tmp_path: Path) -> None:
    key = add_key(tmp_path / "keys.json", Key(name="app", tenant="default"))[1]
    at = client(keys=str(tmp_path / "keys.json"))
    first = at.ask("What is my balance?", "Ana has 12,000 shillings.", **{"x-api-key": key})
    at.ask("Thanks. And my number?", "Bo has the number 7.", **{"x-api-key": key})
    assert len(set(at.sessions())) == 2
    assert "Ana" not in str(at.upstream.sent[-1].body)
    assert first

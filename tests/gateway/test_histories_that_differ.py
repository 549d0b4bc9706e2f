"""Clients that do not just append: passages in the newest message alone, and a history of which the client keeps the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import msgspec
import pytest

import kilburn
from gateway.talk import said, user
from gateway.test_compaction import CHAT, Gateway
from kilburn.gateway.app import Settings, build
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.form import ParsedRequest
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.limits import RequestBounds
from kilburn.testing.upstream import Refusal, Upstream, serving
from kilburn.wire.form import parse

Talk = list[dict[str, Any]]


class Client:
    """A client with a history of its own, and the gateway that it talks to."""

    def __init__(
        self, folder: Path, stack: ExitStack, reply: str = "Answer {} is what you asked for.", name: str = "g", **settings: Any
    ) -> None:
        self.db, self.stack = str(folder / f"{name}.db"), stack
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

    def kept(self) -> float:
        """How much of a prompt the next one begins with, on average."""
        sent = self.upstream.sent
        return sum(after.shared / before.tokens for before, after in pairwise(sent)) / (len(sent) - 1)

    def size(self) -> int:
        """Bytes of the store of a gateway that has shut down."""
        return sum(file.stat().st_size for file in Path(self.db).parent.glob(f"{Path(self.db).name}*"))

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


def test_passages_in_the_newest_message_alone_cost_what_they_cost_in_every_message(client: Callable[..., Client]) -> None:
    """The session, the store and the provider's cache are those of a client that only appends, also after a restart."""
    at, appending = client(), client(name="appending")
    names = set()
    for turn in range(40):
        if turn in (1, 2, 20):
            at.restart()
        names.add(at.ask(f"How many words were there in test {turn}?", passages(turn)))
        appending.ask(f"How many words were there in test {turn}? {passages(turn)}")
    assert (at.sessions(), len(appending.sessions())) == ([*names], 1)
    assert at.size() <= 1.5 * appending.size()
    assert at.kept() >= 0.9 * appending.kept()


def test_a_history_that_the_client_cuts_continues_its_session(client: Callable[..., Client]) -> None:
    at = client(reply="Answer {} is what you asked for: " + "the drum turns at 3,000 revolutions a minute. " * 5)
    names = set()
    for turn in range(40):
        if turn in (12, 20):
            at.restart()
        names.add(at.ask(f"Question {turn} about the drum?", passages(turn) * (turn % 3 == 0), keep=9))
    assert at.sessions() == [*names]
    assert at.kept() > 0.9


def test_a_turn_of_a_cut_history_that_failed_is_asked_again_in_its_session(client: Callable[..., Client]) -> None:
    at = client(reply="Answer {} is what you asked for: " + "the drum turns at 3,000 revolutions a minute. " * 5)
    [name] = {at.ask(f"Question {turn} about the drum?", keep=9) for turn in range(9)}
    at.upstream.enqueue(Refusal(status=500))
    asked = {"model": "m", "messages": [*at.history, user("And now?")]}
    assert at.http.post(f"{at.url}/v1/chat/completions", json=asked).status_code == 500
    at.restart()
    assert at.post(asked["messages"]).headers["x-kilburn-session"] == name
    assert at.sessions() == [name]


Q = "Which machine had a drum,\nand how large was it?"
WAYS: dict[str, Callable[[str, str], Talk]] = {
    "before": lambda q, p: [user(f"Use these pieces of context.\n\n{p}\n\nQuestion: {q}\nHelpful answer:")],
    "behind": lambda q, p: [user(f"{q}\n\n[Sources]\n{p}\n\nCite the sources.")],
    "in tags": lambda q, p: [user(f"<context>\n{p}\n</context>\n<question>{q}</question>")],
    "set anew": lambda q, p: [user(f"{p} {' '.join(q.split())}")],
    "a part before": lambda q, p: [{"role": "user", "content": [{"type": "text", "text": p}, {"type": "text", "text": q}]}],
    "a part behind": lambda q, p: [{"role": "user", "content": [{"type": "text", "text": q}, {"type": "text", "text": p}]}],
    "a message before": lambda q, p: [user(p), user(q)],
    "a system message before": lambda q, p: [{"role": "system", "content": p}, user(q)],
    "a system message behind": lambda q, p: [user(q), {"role": "system", "content": p}],
}


def test_passages_may_stand_anywhere_beside_the_question(client: Callable[..., Client]) -> None:
    at = client()
    for way, shown in WAYS.items():
        names, history = list[str](), list[dict[str, Any]]()
        for turn in range(4):
            if turn == 2:
                at.restart()
            question = f"{Q} Of {way}, in {turn}?"
            answer = at.post([user(f"Hello, {way}."), said("Hello."), *history, *shown(question, passages(turn))])
            assert passages(turn).strip() in str(at.upstream.sent[-1].body), way
            names.append(answer.headers["x-kilburn-session"])
            history += [user(question), said(answer.json()["choices"][0]["message"]["content"])]
        assert len({*names}) == 1, way


def test_what_a_client_writes_in_other_words_is_what_the_model_sees(client: Callable[..., Client]) -> None:
    at = client()
    answer = at.post([user("Stand-alone question: how large was the drum of Atlas?")]).json()["choices"][0]["message"]["content"]
    for words in ("How large was it?", "how large was the dru"):
        at.post([user(words), said(answer), user("And the core?")])
        assert at.upstream.sent[-1].body["messages"][0]["content"] == words
    assert len(at.sessions()) == 3


def test_what_was_said_to_another_user_is_never_continued(client: Callable[..., Client]) -> None:
    at = client()
    mine = {"authorization": "Bearer mine"}
    first = at.ask("Where is the drum?", passages(1), **mine)
    talk = [*at.history, user("And the core?")]
    assert at.post(talk, authorization="Bearer other").headers["x-kilburn-session"] != first
    assert "Passage 1" not in str(at.upstream.sent[-1].body)
    assert at.post(talk, **mine).headers["x-kilburn-session"] == first
    assert at.post(talk, **mine, **{"x-kilburn-session": "named"}).headers["x-kilburn-session"] == "named"


def test_two_gateways_go_on_with_one_session(client: Callable[..., Client]) -> None:
    at = client()
    with serving(build(at.settings), **uvicorn_options(RequestBounds())) as other:
        urls, names = [at.url, other], set()
        for turn in range(8):
            at.url = urls[turn // 2 % 2]
            names.add(at.ask(f"How many words were there in test {turn}?", passages(turn)))
    assert at.sessions() == [*names]


def with_passages(turn: int) -> dict[str, Any]:
    return user(f"{passages(turn)}\nQuestion {turn}?")


def turns(count: int) -> Talk:
    """What a client keeps of so many turns."""
    words = "the drum turns at 3,000 revolutions a minute. " * 8
    return [message for turn in range(count) for message in (user(f"Question {turn}?"), said(f"{turn}: {words}"))]


class Counting(ChatForm):
    """Counts the histories that are taken apart."""

    count = 0

    def split(self, asked: ParsedRequest) -> None:
        self.count += 1
        super().split(asked)


def test_a_long_history_is_not_taken_apart_for_each_turn(tmp_path: Path) -> None:
    gateway, form, talk, counts = Gateway(tmp_path), Counting(), turns(12), []
    for turn in range(12):
        gateway.turn([*talk[: 2 * turn], with_passages(turn)], talk[2 * turn + 1], form=form)
        counts.append(form.count)
    assert counts[2:] == [counts[2]] * 10
    [info] = gateway.store.sessions()
    assert gateway.store.session(info.name).window.turn == 24
    gateway.store.close()


def test_a_request_that_is_made_twice_at_once_has_one_session(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    talk = turns(3)
    for turn in range(3):
        first = gateway.turn([*talk[: 2 * turn], with_passages(turn)], talk[2 * turn + 1])
    body = msgspec.json.encode({"model": "m", "messages": [*talk, with_passages(3)]})
    one, two = (gateway.histories.take(CHAT, CHAT.open(body), None, "") for _ in range(2))
    assert (one.name, two.name) == (first.name, first.name)
    for each in (one, two):
        gateway.histories.said(each, parse(said("The same.")))
        gateway.histories.give(each)
    after = gateway.turn([*talk, user("Question 3?"), said("The same."), with_passages(4)], said("And the next."))
    assert after.name == first.name
    assert [info.name for info in gateway.store.sessions()] == [first.name]
    gateway.store.close()


def test_a_forgotten_page_does_not_end_the_session(tmp_path: Path) -> None:
    gateway = Gateway(tmp_path)
    talk = turns(4)
    for turn in range(3):
        first = gateway.turn([*talk[: 2 * turn], with_passages(turn)], talk[2 * turn + 1])
    gateway.store.forget(session=first.name, address="p3")
    after = gateway.turn([*talk[:6], with_passages(3)], talk[7])
    assert after.name == first.name
    assert passages(1) not in str(after.session.contents.messages())
    other = turns(3)
    other[1] = said("Nothing of the kind.")
    assert gateway.turn([*other, user("And now?")], said("Yes.")).name != first.name
    gateway.store.close()


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

"""A request that is asked again after its reply was kept: what has left the window by then is in its prompt again.

A client whose connection broke, or whose gateway was killed, does so. The reply may have made the policy fold what it answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from gateway.test_without_tools import RIVERS
from kilburn.event import Act
from kilburn.testing.upstream import Sent, Upstream, calling

EXCHANGES = 12
"""In so many the window of the test is full several times."""


def question(number: int) -> str:
    return f"question {number}: " + "where does the river go from here? " * 3


def output(number: int) -> str:
    return f"output {number}: " + "the river goes to the sea by way of the weir. " * (4 + number % 5)


def reply(number: int) -> str:
    return f"reply {number}: " + "it goes over the weir. " * (3 + number % 4)


def answer(sent: Sent) -> Any:
    """What the tool said if that is in the prompt whole, and else a call of the tool."""
    texts = [message["content"] for message in sent.body["messages"] if isinstance(message["content"], str)]
    number = max(number for number in range(EXCHANGES) if question(number) in texts)
    if output(number) in texts:
        return reply(number)
    return calling(("look", {"at": str(number)}, f"call_{number}"))


def prompt(sent: Sent) -> list[tuple[str, str, str]]:
    """Who says what in it, and with which call."""
    messages = sent.body["messages"]
    return [
        (each["role"], each["content"] or "", str([call["id"] for call in each.get("tool_calls") or ()])) for each in messages
    ]


def test_the_prompt_of_a_request_that_is_asked_again_is_that_of_the_first_time(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=Upstream(otherwise=answer), window=1000)
    sent, talk = setup.upstream.sent, list[dict[str, Any]]()
    look = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]

    def ask() -> Any:
        whole, headers = setup.chat(talk, tools=look, extra_headers={"x-kilburn-session": "work"})
        assert headers["x-kilburn-session"] == "work"
        return whole.choices[0].message

    def ask_twice() -> Any:
        first = ask()
        assert ask() == first
        assert prompt(sent[-1]) == prompt(sent[-2])
        return first

    for number in range(EXCHANGES):
        talk.append({"role": "user", "content": question(number)})
        [called] = ask_twice().tool_calls
        talk.append({"role": "assistant", "content": None, "tool_calls": [called.model_dump()]})
        talk.append({"role": "tool", "tool_call_id": called.id, "content": output(number)})
        said = ask_twice().content
        assert said == reply(number)
        talk.append({"role": "assistant", "content": said})

    with setup.store() as store:
        [info] = store.sessions()
        session = store.session(info.name)
        assert len(session.contents.messages()) == len(talk)
        moves = [event for event in session.ledger.events() if event.act in (Act.FOLD, Act.EVICT)]
    # One part each: the page before a reply, which is the output that it is about, left the window as the reply was kept.
    assert any(event.turn - 1 in event.pages for event in moves)


def ferry(number: int) -> str:
    """Words of its own, so that what a search finds best is no matter of how often others use a word."""
    cargo = " ".join(f"{RIVERS[number % len(RIVERS)]}{at}" for at in range(40))
    return f"The ferry on the {RIVERS[number % len(RIVERS)]} costs {number + 11} pence. It carries {cargo}."


@pytest.mark.parametrize("policy", ["cost", "fifo"])
def test_what_is_searched_for_is_that_of_the_first_time(gateway: Callable[..., Any], policy: str) -> None:
    """The model is offered no tools: what has left the window is searched for the user's words, as it had left it then. What the
    reply says, and what left the window as it was kept, is nothing that this prompt misses."""
    prices = Upstream(otherwise=lambda sent: f"You asked: {sent.body['messages'][-1]['content'][:60]} " + "Noted down. " * 40)
    setup = gateway(upstream=prices, window=1000, memory_tools="off", policy=policy)
    sent, talk = setup.upstream.sent, list[dict[str, Any]]()
    brought = 0
    for number in range(24):
        of = RIVERS[number * 5 // 7 % len(RIVERS)]
        words = f"What did the ferry on the {of} cost?" if number > 8 and number % 2 else ferry(number)
        talk.append({"role": "user", "content": words})
        whole, headers = setup.chat(talk, extra_headers={"x-kilburn-session": "work"})
        first = whole.choices[0].message.content
        again, later = setup.chat(talk, extra_headers={"x-kilburn-session": "work"})
        assert prompt(sent[-1]) == prompt(sent[-2]), number
        assert again.choices[0].message.content == first
        assert headers["x-kilburn-session"] == later["x-kilburn-session"] == "work"
        brought += "<recalled-" in str(sent[-1].body)
        talk.append({"role": "assistant", "content": first})
    assert brought > 5
    with setup.store() as store:
        [info] = store.sessions()
        assert len(store.session(info.name).contents.messages()) == len(talk)

"""A request that is asked again after its reply was kept: what has left the window by then is in its prompt again.

A client whose connection broke, or whose gateway was killed, does so. The reply may have made the policy fold what it answers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

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
        assert len(session.messages()) == len(talk)
        moves = [event for event in session.events() if event.act in (Act.FOLD, Act.EVICT)]
    # One part each: the page before a reply, which is the output that it is about, left the window as the reply was kept.
    assert any(event.turn - 1 in event.pages for event in moves)

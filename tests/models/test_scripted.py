"""The public fakes say what they are told, and keep to the contract."""

from __future__ import annotations

import pytest

from kilburn.errors import RateLimited, Refused, Unavailable
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Delta, Reply, Request, Tokens, complete
from kilburn.models.echo import Echo
from kilburn.models.scripted import Scripted
from kilburn.testing.models import check_model

HELLO = Request(messages=[{"role": "user", "content": "hello there"}])


def said(text: str) -> Message:
    return Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.TEXT, text=text),))


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_fakes_keep_the_contract(form: str) -> None:
    check_model(lambda: Scripted(["Red, of course."] * 8, form=form, piece=3))
    check_model(lambda: Echo(form=form))


def test_script_is_followed_in_order() -> None:
    reply = Reply(message=said("third"), finish="length", usage=Tokens(prompt=3, reply=1))
    model = Scripted(["first", said("second"), reply, lambda request: f"{len(request.messages)} message"])
    assert [complete(model, HELLO).text for _ in range(4)] == ["first", "second", "third", "1 message"]
    assert model.left == 0
    assert model.requests == [HELLO] * 4


def test_script_that_has_run_out_is_unavailable() -> None:
    model = Scripted(["only"])
    complete(model, HELLO)
    with pytest.raises(Unavailable, match="run out after 1 replies"):
        complete(model, HELLO)
    model.enqueue("more")
    assert complete(model, HELLO).text == "more"


def test_script_raises_the_errors_in_it() -> None:
    model = Scripted([RateLimited("slow down", retry_after=2.0), lambda request: Refused("no")])
    with pytest.raises(RateLimited) as caught:
        complete(model, HELLO)
    assert caught.value.retry_after == 2.0
    with pytest.raises(Refused):
        complete(model, HELLO)


def test_calls_and_reasoning_of_a_message_come_through() -> None:
    message = Message(
        role=Role.ASSISTANT,
        parts=(
            Part(kind=Kind.REASONING, text="hm"),
            Part(kind=Kind.TEXT, text="I look"),
            Part(kind=Kind.CALL, text='{"a": 1}', call="c1", name="look"),
        ),
    )
    pieces = list(Scripted([message], piece=2).stream(HELLO))
    assert pieces[:-1] == [Delta("hm", True), Delta("I "), Delta("lo"), Delta("ok")]
    assert isinstance(pieces[-1], Reply)
    assert pieces[-1].finish == "calls"
    assert pieces[-1].calls[0].name == "look"


def test_script_refuses_what_is_no_answer() -> None:
    with pytest.raises(TypeError, match="not int"):
        complete(Scripted([lambda request: 5]), HELLO)
    with pytest.raises(ValueError, match="holds no letter"):
        Scripted(piece=0)


def test_echo_repeats_the_last_user_message_within_its_cap() -> None:
    request = Request(
        messages=[
            {"role": "user", "content": "one"},
            {"role": "user", "content": [{"type": "text", "text": "four letters a token"}]},
            {"role": "assistant", "content": "aside"},
        ],
        max_tokens=3,
    )
    reply = complete(Echo(), request)
    assert (reply.text, reply.finish) == ("four letters", "length")
    assert reply.usage == Tokens(prompt=7, reply=3)

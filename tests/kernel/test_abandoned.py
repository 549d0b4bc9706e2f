"""Calls whose result does not come: they may leave after a while, and a late result is valid all the same."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import LawBroken, OrphanResult
from kilburn.kernel.resolve import names
from kilburn.kernel.session import Session
from kilburn.kernel.window import PATIENCE
from kilburn.move import Evict, Fold, Load, Move, Retire
from kilburn.policy import Cause, View
from kilburn.testing import check_laws
from kilburn.wire.validity import validate_chat, validate_messages

POLICIES = [name for name in names("policies") if name != "chain"]


def opened(window: int = 2000, policy: Any = "fifo") -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")


def abandon(session: Session, calls: int) -> None:
    for number in range(calls):
        session.append(assistant(None, call_of(f"c{number}", path="src/" + "x" * 40)), user(f"never mind, take {number}"))


def abandoned(window: int = 2000) -> Session:
    """A session whose first call is abandoned and out of the window."""
    session = opened(window)
    session.append(
        user("the task"),
        assistant("I look at it, and at what calls it, and at the tests that it has. " * 2, call_of("slow", path="a.py")),
    )
    for number in range(PATIENCE):
        session.append(user(f"and {number}") if number % 2 else assistant(f"then {number}"))
    session.edits.apply(Evict((3,)))
    return session


def valid(session: Session) -> str:
    prompt = session.render()
    validate_chat(prompt)
    validate_messages(list(session.render("messages")))
    assert prompt.tokens <= session.prompts.capacity
    return json.dumps(prompt)


@pytest.mark.parametrize("policy", POLICIES)
def test_a_hundred_and_five_abandoned_calls(policy: str) -> None:
    session = opened(policy=policy)
    session.append(user("the task"))
    abandon(session, 105)
    assert "take 104" in valid(session)
    session.append(tool("c3", "late words"))
    assert "late words" in valid(session)
    check_laws(session)


@pytest.mark.parametrize("parallel", [1, 12])
def test_the_kernel_takes_open_calls_where_nothing_else_makes_room(parallel: int) -> None:
    """Fewer messages than `PATIENCE` and more calls than the window holds."""
    session = opened(400)
    session.append(user("the task"))
    for step in range(PATIENCE - 2):
        session.append(assistant(None, *(call_of(f"c{step}-{n}", path="x" * (300 // parallel)) for n in range(parallel))))
        shown = valid(session)
        assert all(f"c{step}-{n}" in shown for n in range(parallel)), "the latest message's calls never leave"
    check_laws(session)


class Asked:
    """A policy that counts how it was asked."""

    def __init__(self) -> None:
        self.causes: list[Cause] = []
        self.open: list[int] = []

    def plan(self, view: View) -> Sequence[Move]:
        self.causes.append(view.cause)
        self.open.append(len(view.open))
        return []


def test_an_abandoned_call_does_not_keep_the_policy_from_being_asked() -> None:
    policy = Asked()
    session = opened(policy=policy)
    session.append(user("the task"), assistant(None, call_of("slow")))
    policy.causes.clear()
    for number in range(PATIENCE - 1):
        session.append(user(f"and {number}"))
    assert policy.causes == [], "it may still come"
    for number in range(3):
        session.append(user(f"and still {number}"))
    assert policy.causes == [Cause.ADMIT] * 3
    assert policy.open == [0] * len(policy.open)


def test_results_of_siblings_do_not_make_a_call_abandoned() -> None:
    session = opened(8000)
    session.append(user("go"), assistant(None, *(call_of(f"c{number}") for number in range(3 * PATIENCE))))
    for number in range(3 * PATIENCE - 1):
        session.append(tool(f"c{number}", "done"))
    assert len(session.edits.view().open) == 1
    with pytest.raises(LawBroken, match="without a result yet"):
        session.edits.apply(Evict((3 * PATIENCE + 1,)))


def test_a_late_result_brings_its_call_back() -> None:
    session = abandoned()
    assert "slow" not in valid(session)
    session.append(tool("slow", "late words"))
    shown = valid(session)
    assert "late words" in shown
    assert '"slow"' in shown
    check_laws(session)


def test_a_late_result_of_a_call_in_a_summary() -> None:
    session = abandoned()
    session.edits.apply(Load((3,)))
    (fold,) = session.edits.apply(Fold((2, 3, 4), text="looked"))
    valid(session)
    session.append(tool("slow", "late words"))
    shown = valid(session)
    assert "late words" in shown
    assert "looked" in shown, fold
    check_laws(session)


def test_a_late_result_whose_call_cannot_come_back_goes_below() -> None:
    """A call of its thinking message has lost its result, so the message cannot be shown again."""
    session = opened()
    thought = {"type": "thinking", "thinking": "hm", "signature": "s" * 40}
    uses = [{"type": "tool_use", "id": name, "name": "read", "input": {}} for name in ("slow", "quick")]
    session.append(user("the task"), {"role": "assistant", "content": [thought, *uses]})
    session.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "quick", "content": "no"}]})
    for number in range(PATIENCE):
        session.append(user(f"and {number}") if number % 2 else assistant(f"then {number}"))
    session.edits.apply(Evict((2, 3, 4, 5)))
    session.edits.apply(Retire((5,)))
    session.append(tool("slow", "late words"))
    shown = valid(session)
    assert "late words" not in shown
    late = session.contents.pages()[-1][0].address
    assert f"{late} out" in shown
    assert session.recall(late) == "late words"
    check_laws(session)


def test_a_late_result_of_a_forgotten_call_is_refused() -> None:
    session = abandoned()
    session.forget("p3")
    with pytest.raises(OrphanResult):
        session.append(tool("slow", "late words"))
    check_laws(session)


def test_a_call_that_waits_cannot_be_retired() -> None:
    session = abandoned()
    session.edits.apply(Load((3,)))
    with pytest.raises(LawBroken):
        session.edits.apply(Retire((3,)))
    check_laws(session)


def test_abandoned_calls_in_one_summary_cost_nothing_more() -> None:
    session = opened(8000)
    session.append(user("the task"))
    abandon(session, 30)
    session.edits.apply(Fold(tuple(range(2, 50)), text="all of it"))
    prompt = session.render()
    assert len(session.window.waiting()) == 30 - 24
    assert prompt.tokens == session.prompts.use
    check_laws(session)

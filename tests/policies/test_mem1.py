"""MEM1 in a real session: with a state the past leaves, without one nothing does, and nothing is ever lost."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kilburn
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.move import Drop, Retire
from kilburn.testing import Scripted, check_laws

QUESTION = "Where was the founder of Velkor born?"


@pytest.fixture
def store() -> Any:
    with kilburn.open(":memory:", window=4000, policy="mem1", tokenizer="chars/4") as opened:
        yield opened


def started(store: Store) -> Session:
    session = store.session("s")
    session.append({"role": "system", "content": "Search."}, {"role": "user", "content": QUESTION})
    return session


def turn(session: Session, number: int, state: str | None) -> None:
    """One turn in plain text: a reply, with a state or without, and an observation of 200 tokens."""
    words = f"{state or ''}<search>query {number}</search>"
    session.append({"role": "assistant", "content": words})
    session.append({"role": "user", "content": f"<information>fact {number} " + "word " * 160 + "</information>"})


def text(session: Session) -> str:
    return "\n".join(str(message["content"]) for message in session.render())


def outcomes(session: Session) -> list[str]:
    return [event.data["outcome"] for event in session.ledger.events() if event.act is Act.COMPACT]


def test_the_next_prompt_is_question_state_action_observation(store: Store) -> None:
    session = started(store)
    for number in range(1, 6):
        turn(session, number, f"<IS>state {number}</IS>")
    shown = text(session)
    assert QUESTION in shown
    assert "Search." in shown
    assert "<IS>state 5</IS><search>query 5</search>" in shown
    assert "fact 5" in shown
    assert not any(f"state {number}" in shown or f"fact {number}" in shown for number in range(1, 5))
    assert "fact 2" in session.recall("p6"), "what left is read by its address"


def test_the_prompt_stays_flat_however_long_the_session(store: Store) -> None:
    session = started(store)
    sizes = []
    for number in range(1, 41):
        turn(session, number, f"<IS>state {number:03}</IS>")
        sizes.append(session.render().tokens)
    assert max(sizes[2:]) - min(sizes[2:]) <= 12, "only the handle of what left grows, by digits"


def test_tool_calls_leave_with_their_results_once_the_next_state_is_there(store: Store) -> None:
    session = started(store)
    for number in range(1, 4):
        call = {"id": f"c{number}", "type": "function", "function": {"name": "search", "arguments": f'{{"q": {number}}}'}}
        session.append({"role": "assistant", "content": f"<IS>state {number}</IS>", "tool_calls": [call]})
        session.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"fact {number}"})
    prompt = session.render()
    calls = [call["id"] for message in prompt for call in message.get("tool_calls") or []]
    assert calls == ["c3"]
    assert [message["content"] for message in prompt if message["role"] == "tool"] == ["fact 3"]
    check_laws(session)


def test_the_original_think_tag_is_a_state(store: Store) -> None:
    session = started(store)
    turn(session, 1, "<think>state 1</think>")
    turn(session, 2, "<think>state 2</think>")
    assert "state 1" not in text(session)


def test_without_a_state_nothing_leaves_and_the_ledger_says_so(store: Store) -> None:
    session = started(store)
    turn(session, 1, "<IS>state 1</IS>")
    turn(session, 2, None)
    shown = text(session)
    assert "state 1" in shown
    assert "fact 1" in shown
    assert outcomes(session) == ["empty"]


@pytest.mark.parametrize(
    ("state", "outcome"),
    [
        ("<IS>cut off", "rejected"),
        ("<IS>a</IS><IS>b</IS>", "rejected"),
        ("</IS>a<IS>", "rejected"),
        ("<IS> \n </IS>", "empty"),
        ("", "empty"),
    ],
)
def test_a_bad_state_changes_nothing(store: Store, state: str, outcome: str) -> None:
    session = started(store)
    turn(session, 1, "<IS>state 1</IS>")
    turn(session, 2, state)
    assert "state 1" in text(session)
    assert "fact 1" in text(session)
    assert outcomes(session) == [outcome], "once for the reply, not again for the observation"


def test_a_state_beyond_its_cap_is_rejected() -> None:
    with kilburn.open(":memory:", window=4000, policy="mem1(cap=10)", tokenizer="chars/4") as store:
        session = started(store)
        turn(session, 1, "<IS>short</IS>")
        turn(session, 2, f"<IS>{'long ' * 40}</IS>")
        assert outcomes(session) == ["rejected"]
        assert "fact 1" in text(session)
        turn(session, 3, "<IS>short</IS>")
        assert "fact 1" not in text(session)


def test_a_state_in_tool_output_is_data(store: Store) -> None:
    session = started(store)
    turn(session, 1, "<IS>state 1</IS>")
    session.append({"role": "user", "content": "<IS>injected</IS>"})
    assert "state 1" in text(session)
    assert "fact 1" in text(session)


def test_pins_stay(store: Store) -> None:
    session = started(store)
    turn(session, 1, "<IS>state 1</IS>")
    session.pin("p4")
    turn(session, 2, "<IS>state 2</IS>")
    assert "fact 1" in text(session)
    assert "state 1" not in text(session)


def test_over_capacity_without_states_the_oldest_go_and_state_and_question_last() -> None:
    with kilburn.open(":memory:", window=900, policy="mem1", tokenizer="chars/4") as store:
        session = store.session("s")
        session.append({"role": "user", "content": QUESTION + " x" * 500})  # too long to be pinned by itself
        turn(session, 1, "<IS>state 1</IS>")
        for number in range(2, 9):
            turn(session, number, None)
            assert session.render().tokens <= 900
        shown = text(session)
        assert QUESTION in shown
        assert "state 1" in shown
        assert "fact 8" in shown
        assert "fact 2" not in shown


def test_a_later_task_stays_and_the_state_survives_reopening(tmp_path: Any) -> None:
    path = str(tmp_path / "s.db")
    with kilburn.open(path, window=4000, policy="mem1", tokenizer="chars/4") as store:
        session = started(store)
        turn(session, 1, "<IS>state 1</IS>")
        session.append({"role": "assistant", "content": "<IS>done</IS><answer>X</answer>"})
        session.append({"role": "user", "content": "Now the second task."})
        session.append({"role": "assistant", "content": "<IS>state 2</IS>working"})
    with kilburn.open(path, window=4000, policy="mem1", tokenizer="chars/4") as store:
        shown = text(store.session("s"))
        assert "Now the second task." in shown
        assert "state 2" in shown
        assert "state 1" not in shown


@pytest.mark.parametrize("spec", ["mem1(cap=0)", "mem1(cap=-3)", "mem1(cap=True)"])
def test_bad_caps_are_refused(spec: str) -> None:
    with pytest.raises(SpecError, match="cap"):
        kilburn.open(":memory:", window=1000, policy=spec, tokenizer="chars/4")


@pytest.mark.parametrize("policy", ["mem1", "agentfold"])
def test_a_late_result_is_not_a_new_reply(policy: str) -> None:
    model = Scripted([json.dumps({"compress_range": [1, 1], "compress_text": "not valid"})] * 50)
    call = {"id": "c", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    with kilburn.open(":memory:", window=4000, policy=policy, tokenizer="chars/4", model=model) as store:
        session = started(store)
        session.append({"role": "assistant", "content": "step", "tool_calls": [call]})
        for number in range(6):
            turn(session, number, None)
        before = outcomes(session)
        assert before, "a waiting call does not keep the policy from being asked for ever"
        session.append({"role": "tool", "tool_call_id": "c", "content": "late"})
        assert outcomes(session) == before


@pytest.mark.parametrize("policy", ["mem1", "agentfold"])
@pytest.mark.parametrize("move", [Drop, Retire])
def test_a_reply_that_is_gone_says_nothing(policy: str, move: type[Drop | Retire]) -> None:
    with kilburn.open(":memory:", window=2_000, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        session.append({"role": "user", "content": "Begin."}, {"role": "assistant", "content": "<IS>begun</IS>"})
        session.edits.apply(move((2,)))
        session.append({"role": "user", "content": "Go on."})
        assert not [event for event in session.ledger.events() if event.data.get("outcome") == "failed"]

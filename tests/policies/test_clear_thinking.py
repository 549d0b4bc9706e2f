"""`clear_thinking`: only the last turns keep their thinking, and no call loses its result over it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.policies.clear_thinking import ClearThinking
from kilburn.testing import FakeClock, check_laws


def opened(policy: str) -> Session:
    return Store(Sqlite(":memory:"), Budget(20_000), policy, tokenizer="chars/4", clock=FakeClock()).session("a")


def thinking(number: int) -> dict[str, Any]:
    return {
        "type": "thinking",
        "thinking": f"thought {number} begins here\n" + f"and goes on {number} " * 30,
        "signature": "c2ln",
    }


def turn(session: Session, number: int, *, tools: bool = False) -> None:
    session.append({"role": "user", "content": f"question {number}"})
    if tools:
        use = {"type": "tool_use", "id": f"t{number}", "name": "look", "input": {}}
        session.append({"role": "assistant", "content": [thinking(number), use]})
        result = {"type": "tool_result", "tool_use_id": f"t{number}", "content": f"result {number}"}
        session.append({"role": "user", "content": [result]})
    session.append({"role": "assistant", "content": [thinking(100 + number), {"type": "text", "text": f"answer {number}"}]})


def thoughts(session: Session) -> list[int]:
    said = json.dumps(session.render("messages"))
    return [number for number in range(200) if f"and goes on {number} " in said]


@pytest.mark.parametrize(("policy", "left"), [("", [102]), ("(keep=2)", [101, 102]), ("(keep='all')", [100, 101, 102])])
def test_the_last_turns_keep_their_thinking(policy: str, left: list[int]) -> None:
    session = opened(f"clear_thinking{policy}")
    for number in range(3):
        turn(session, number)
    assert thoughts(session) == left
    assert "answer 0" in json.dumps(session.render("messages"))
    assert session.recall("p2").startswith("thought 100")
    check_laws(session)


def test_a_turn_is_all_between_two_messages_of_the_user() -> None:
    session = opened("clear_thinking")
    turn(session, 0, tools=True)
    assert thoughts(session) == [0, 100]
    turn(session, 1, tools=True)
    assert thoughts(session) == [1, 101]
    said = json.dumps(session.render("messages"))
    assert "thought 0 begins here" not in said
    assert "result 0" in said, "what was called with it stays"
    figures = [event.data for event in session.ledger.events() if event.act is Act.COMPACT]
    assert figures[-1]["cleared_thinking_turns"] == 1
    assert figures[-1]["cleared_input_tokens"] > 0
    check_laws(session)


def test_pinned_thinking_stays() -> None:
    session = opened("clear_thinking")
    turn(session, 0)
    session.pin("p2")
    turn(session, 1)
    turn(session, 2)
    assert thoughts(session) == [100, 102]


@pytest.mark.parametrize("keep", ["0", "'none'", "True", "{'type': 'tool_uses', 'value': 3}"])
def test_bad_settings_are_refused(keep: str) -> None:
    with pytest.raises(SpecError):
        resolve("policies", f"clear_thinking(keep={keep})")


def test_the_providers_objects_are_taken() -> None:
    assert ClearThinking(keep={"type": "thinking_turns", "value": 2}) == ClearThinking(keep=2)
    assert ClearThinking(keep={"type": "all"}) == ClearThinking(keep="all")

"""`clear_tool_uses`: old results become handles, calls stay, and a clearing that is not worth it waits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.policies.clear_tool_uses import ClearToolUses
from kilburn.testing import FakeClock, check_laws


def opened(policy: str, window: int = 10_000) -> Session:
    session = Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4", clock=FakeClock()).session("a")
    session.append(user("Fix it."))
    return session


def output(number: int) -> str:
    return f"output {number} " + "x " * 200


def use(session: Session, number: int, name: str = "read", **arguments: Any) -> None:
    session.append(assistant(None, call_of(f"c{number}", name, **(arguments or {"path": f"f{number}.py"}))))
    session.append(tool(f"c{number}", output(number)))


def whole(session: Session) -> list[int]:
    """Numbers of the results that stand whole in the prompt."""
    said = [str(message["content"]) for message in session.render() if message["role"] == "tool"]
    return [number for number in range(100) if output(number) in said]


def cleared(session: Session) -> list[dict[str, Any]]:
    return [event.data for event in session.ledger.events() if event.act is Act.COMPACT]


def test_at_the_trigger_all_but_the_last_three_go_once() -> None:
    session = opened("clear_tool_uses(trigger={'type': 'tool_uses', 'value': 6})")
    for number in range(6):
        use(session, number)
    assert whole(session) == [0, 1, 2, 3, 4, 5]
    use(session, 6)
    assert whole(session) == [4, 5, 6]
    (figures,) = cleared(session)
    assert (figures["outcome"], figures["cleared_tool_uses"]) == ("done", 4)
    assert figures["cleared_input_tokens"] <= figures["freed"]
    for number in range(7, 10):
        use(session, number)
    assert len(cleared(session)) == 1, "the prefix is broken once for several uses"
    assert session.recall("p3") == output(0)
    check_laws(session)


def test_every_call_keeps_a_result_that_says_what_it_was() -> None:
    session = opened("clear_tool_uses(trigger=500)")
    for number in range(8):
        use(session, number)
    prompt = session.render()
    calls = [call["id"] for message in prompt for call in message.get("tool_calls") or ()]
    assert calls == [message["tool_call_id"] for message in prompt if message["role"] == "tool"]
    assert "f0.py" in next(str(message["content"]) for message in prompt if message["role"] == "tool")


def test_clear_at_least_waits_until_it_is_worth_it() -> None:
    session = opened("clear_tool_uses(trigger=500, keep=1, clear_at_least=400)")
    for number in range(6):
        use(session, number)
    frees = [figures["cleared_input_tokens"] for figures in cleared(session)]
    assert frees
    assert min(frees) >= 400
    never = opened("clear_tool_uses(trigger=500, keep=1, clear_at_least=100000)")
    for number in range(6):
        use(never, number)
    assert whole(never) == [0, 1, 2, 3, 4, 5]
    assert not cleared(never)


def test_excluded_tools_pins_and_unread_results_stay() -> None:
    session = opened("clear_tool_uses(trigger=300, keep=0, exclude_tools=['plan'])")
    use(session, 0, "plan")
    use(session, 1)
    session.pin("p5")
    assert whole(session) == [0, 1]
    session.append(assistant(None, *(call_of(f"c{number}") for number in (2, 3))))
    session.append(tool("c2", output(2)), tool("c3", output(3)))
    assert whole(session) == [0, 1, 2, 3], "no reply has read the last two yet"
    use(session, 4)
    assert whole(session) == [0, 1, 4]
    check_laws(session)


def test_inputs_are_cut_for_the_tools_named() -> None:
    session = opened("clear_tool_uses(trigger=300, keep=0, clear_tool_inputs=['write'])")
    for number, name in enumerate(["write", "read", "read"]):
        use(session, number, name, path=f"f{number}.py", content="y" * 900)
    said = [call["function"]["arguments"] for message in session.render() for call in message.get("tool_calls") or ()]
    assert len(said[0]) < 150
    assert "f0.py" in json.loads(said[0])["excerpt"]
    assert "y" * 900 in said[1]
    assert "y" * 900 in session.recall("p2")
    check_laws(session)


def test_a_window_smaller_than_the_trigger_is_cleared_when_it_is_full() -> None:
    session = opened("clear_tool_uses", 1000)
    for number in range(12):
        use(session, number)
    assert whole(session)[-3:] == [9, 10, 11]
    assert cleared(session)


@pytest.mark.parametrize(
    "arguments",
    [
        "trigger=0",
        "keep=-1",
        "keep='3'",
        "clear_at_least=0",
        "exclude_tools='read'",
        "clear_tool_inputs=[3]",
        "trigger={'type': 'days', 'value': 3}",
    ],
)
def test_bad_settings_are_refused(arguments: str) -> None:
    with pytest.raises(SpecError):
        resolve("policies", f"clear_tool_uses({arguments})")


def test_the_providers_objects_are_taken() -> None:
    assert ClearToolUses(
        keep={"type": "tool_uses", "value": 5}, clear_at_least={"type": "input_tokens", "value": 9}
    ) == ClearToolUses(keep=5, clear_at_least=9)

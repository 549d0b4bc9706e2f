"""`clear_tool_uses`: old results become handles, calls stay, and a clearing that is not worth it waits."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn.budget import Budget
from kilburn.errors import SpecError
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import resolve
from kilburn.policies.clear_tool_uses import ClearToolUses
from kilburn.testing import FakeClock, Memory, check_laws


def opened(policy: str, window: int = 10_000) -> Process:
    process = Hierarchy(Memory(), Budget(window), policy, tokenizer="chars/4", clock=FakeClock()).process("a")
    process.append(user("Fix it."))
    return process


def output(number: int) -> str:
    return f"output {number} " + "x " * 200


def use(process: Process, number: int, name: str = "read", **arguments: Any) -> None:
    process.append(assistant(None, call_of(f"c{number}", name, **(arguments or {"path": f"f{number}.py"}))))
    process.append(tool(f"c{number}", output(number)))


def whole(process: Process) -> list[int]:
    """Numbers of the results that stand whole in the prompt."""
    said = [str(message["content"]) for message in process.render() if message["role"] == "tool"]
    return [number for number in range(100) if output(number) in said]


def cleared(process: Process) -> list[dict[str, Any]]:
    return [event.data for event in process.events() if event.act is Act.COMPACT]


def test_at_the_trigger_all_but_the_last_three_go_once() -> None:
    process = opened("clear_tool_uses(trigger={'type': 'tool_uses', 'value': 6})")
    for number in range(6):
        use(process, number)
    assert whole(process) == [0, 1, 2, 3, 4, 5]
    use(process, 6)
    assert whole(process) == [4, 5, 6]
    (figures,) = cleared(process)
    assert (figures["outcome"], figures["cleared_tool_uses"]) == ("done", 4)
    assert figures["cleared_input_tokens"] <= figures["freed"]
    for number in range(7, 10):
        use(process, number)
    assert len(cleared(process)) == 1, "the prefix is broken once for several uses"
    assert process.recall("p3") == output(0)
    check_laws(process)


def test_every_call_keeps_a_result_that_says_what_it_was() -> None:
    process = opened("clear_tool_uses(trigger=500)")
    for number in range(8):
        use(process, number)
    prompt = process.render()
    calls = [call["id"] for message in prompt for call in message.get("tool_calls") or ()]
    assert calls == [message["tool_call_id"] for message in prompt if message["role"] == "tool"]
    assert "f0.py" in next(str(message["content"]) for message in prompt if message["role"] == "tool")


def test_clear_at_least_waits_until_it_is_worth_it() -> None:
    process = opened("clear_tool_uses(trigger=500, keep=1, clear_at_least=400)")
    for number in range(6):
        use(process, number)
    frees = [figures["cleared_input_tokens"] for figures in cleared(process)]
    assert frees
    assert min(frees) >= 400
    never = opened("clear_tool_uses(trigger=500, keep=1, clear_at_least=100000)")
    for number in range(6):
        use(never, number)
    assert whole(never) == [0, 1, 2, 3, 4, 5]
    assert not cleared(never)


def test_excluded_tools_pins_and_unread_results_stay() -> None:
    process = opened("clear_tool_uses(trigger=300, keep=0, exclude_tools=['plan'])")
    use(process, 0, "plan")
    use(process, 1)
    process.pin("p5")
    assert whole(process) == [0, 1]
    process.append(assistant(None, *(call_of(f"c{number}") for number in (2, 3))))
    process.append(tool("c2", output(2)), tool("c3", output(3)))
    assert whole(process) == [0, 1, 2, 3], "no reply has read the last two yet"
    use(process, 4)
    assert whole(process) == [0, 1, 4]
    check_laws(process)


def test_inputs_are_cut_for_the_tools_named() -> None:
    process = opened("clear_tool_uses(trigger=300, keep=0, clear_tool_inputs=['write'])")
    for number, name in enumerate(["write", "read", "read"]):
        use(process, number, name, path=f"f{number}.py", content="y" * 900)
    said = [call["function"]["arguments"] for message in process.render() for call in message.get("tool_calls") or ()]
    assert len(said[0]) < 150
    assert "f0.py" in json.loads(said[0])["excerpt"]
    assert "y" * 900 in said[1]
    assert "y" * 900 in process.recall("p2")
    check_laws(process)


def test_a_window_smaller_than_the_trigger_is_cleared_when_it_is_full() -> None:
    process = opened("clear_tool_uses", 1000)
    for number in range(12):
        use(process, number)
    assert whole(process)[-3:] == [9, 10, 11]
    assert cleared(process)


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

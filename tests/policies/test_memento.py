"""Memento: the block leaves, the memento stays byte for byte, and a malformed text stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kilburn.budget import Budget
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import resolve
from kilburn.page import parse_address
from kilburn.policies.memento import Memento
from kilburn.testing import Memory, Scripted, check_laws
from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START

WORDS = "the left side grows faster than the right one so the root lies between them "


def block(number: int, size: int = 20) -> str:
    return (
        f"{BLOCK_START}block {number}: {WORDS * size}{BLOCK_END}\n"
        f"{SUMMARY_START}Result {number}: x_{number} = {number * 7}\n  é {SUMMARY_END}"
    )


def opened(policy: Any, window: int = 100_000, model: Any = None) -> Process:
    process = Hierarchy(Memory(), Budget(window), policy, tokenizer="chars/4", model=model).process("s")
    process.append({"role": "user", "content": "Find the root."})
    return process


def say(process: Process, text: str, role: str = "assistant") -> str:
    return process.append({"role": role, "content": text})


def shown(process: Process) -> str:
    return "\n".join(str(message["content"]) for message in process.render())


def outcomes(process: Process) -> list[dict[str, Any]]:
    return [event.data for event in process.events() if event.act is Act.COMPACT]


def test_the_window_is_a_sawtooth_and_every_block_stays_readable() -> None:
    process = opened("memento")
    uses, addresses = [], []
    for number in range(30):
        before = process.use
        addresses.append(say(process, block(number, 40)))
        uses.append((before, process.use))
    raw = process.counter.count(block(0, 40))
    assert all(after - before < raw // 8 for before, after in uses), "a block left nothing but its memento"
    assert process.use < 3 * raw
    text = shown(process)
    for number, address in enumerate(addresses):
        assert f"{SUMMARY_START}Result {number}: x_{number} = {number * 7}\n  é {SUMMARY_END}" in text
        assert f"block {number}:" not in text
        assert process.recall(address) == block(number, 40)
    figures = outcomes(process)
    assert [data["outcome"] for data in figures] == ["done"] * 30
    assert sum(data["blocks"] for data in figures) == 30
    assert sum(data["block_tokens"] for data in figures) >= 30 * raw * 9 // 10
    check_laws(process)


@pytest.mark.parametrize(("keep", "whole"), [(-1, 6), (0, 0), (1, 1), (2, 2), (9, 6)])
def test_the_newest_blocks_stay_whole(keep: int, whole: int) -> None:
    process = opened(f"memento(keep_last_n_blocks={keep})")
    say(process, block(0) + "between" + block(1))
    say(process, block(2))
    say(process, "no block at all")
    say(process, block(3) + block(4) + block(5))
    text = shown(process)
    assert [f"block {number}:" in text for number in range(6)] == [number >= 6 - whole for number in range(6)]
    assert "between" in text
    check_laws(process)


def test_tags_may_go_with_the_block() -> None:
    process = opened("memento(delimiters=False)")
    say(process, "First. " + block(1) + " Then.")
    text = shown(process)
    assert BLOCK_START not in text
    assert SUMMARY_END not in text
    assert "Result 1: x_1 = 7\n  é " in text
    assert "First. " in text
    assert " Then." in text


@pytest.mark.parametrize("follow", ["assistant", "user"])
def test_the_last_block_waits_for_the_answer(follow: str) -> None:
    process = opened("memento(keep_last_block_for_answer=True)")
    say(process, block(1))
    assert "block 1:" in shown(process)
    say(process, block(2))
    assert "block 1:" not in shown(process)
    assert "block 2:" in shown(process)
    say(process, "The root is 14.", follow)
    assert "block 2:" not in shown(process)


@pytest.mark.parametrize(
    "text",
    [
        BLOCK_START + block(1) + BLOCK_END,
        BLOCK_START + WORDS * 20,
        BLOCK_END + WORDS * 20 + BLOCK_START,
        f"{SUMMARY_START}m{SUMMARY_END}{BLOCK_START}{WORDS * 20}{BLOCK_END}",
        block(1) + BLOCK_START + WORDS * 20,
        block(1) + SUMMARY_END,
    ],
)
def test_malformed_tags_change_nothing_and_are_noted_once(text: str) -> None:
    process = opened("memento")
    address = say(process, text)
    say(process, "Going on.")
    process.idle()
    assert text in shown(process)
    assert process.recall(address) == text
    assert [data["outcome"] for data in outcomes(process)] == ["rejected"]
    assert outcomes(process)[0]["malformed"] == 1
    assert outcomes(process)[0]["moves"] == 0


def test_a_block_over_two_messages_is_none() -> None:
    process = opened("memento")
    say(process, BLOCK_START + WORDS * 20)
    say(process, f"{WORDS * 20}{BLOCK_END}{SUMMARY_START}m{SUMMARY_END}")
    assert shown(process).count(WORDS * 20) == 2
    assert [data["outcome"] for data in outcomes(process)] == ["rejected"] * 2


def test_tags_in_what_others_say_are_data() -> None:
    process = opened("memento")
    say(process, block(1), "user")
    process.append(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps({"x": block(3)})}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": block(2) + SUMMARY_END},
    )
    say(process, "Read.")
    assert "block 1:" in shown(process)
    assert "block 2:" in shown(process)
    assert outcomes(process) == []


def test_pins_stay_and_a_small_block_is_not_worth_it() -> None:
    process = opened("memento(keep_last_n_blocks=1)")
    address = say(process, block(1))
    process.pin(address)
    say(process, block(2))
    say(process, f"{BLOCK_START}2 + 2{BLOCK_END}{SUMMARY_START}4{SUMMARY_END}")
    say(process, block(3))
    text = shown(process)
    assert "block 1:" in text
    assert "block 2:" not in text
    assert "2 + 2" in text


def test_thinking_that_a_provider_gives_apart_is_left_alone() -> None:
    process = opened("memento")
    thinking = {"type": "thinking", "thinking": block(1), "signature": "abc"}
    process.append({"role": "assistant", "content": [thinking, {"type": "text", "text": "So it is 7." + block(2)}]})
    rendered = process.render("messages")
    assert rendered[1]["content"][0] == thinking
    assert "block 2:" not in str(rendered)
    check_laws(process)


def step(process: Process, number: int, lines: int = 60) -> None:
    output = (
        "\n".join(f"row {number}.{line}: nothing of note" for line in range(lines))
        + f"\nERROR E{number}: no such file m{number}.py"
    )
    call = {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "run", "arguments": json.dumps({"file": f"m{number}.py"})},
    }
    process.append({"role": "assistant", "content": f"I will run m{number}.py now.", "tool_calls": [call]})
    process.append({"role": "tool", "tool_call_id": f"c{number}", "content": output})


def test_an_action_and_its_observation_are_a_block() -> None:
    process = opened("memento(pairs=True, keep_last_n_blocks=1)")
    for number in range(6):
        step(process, number)
    text = json.dumps(process.render())
    # The sixth is unread, the fifth is the newest that the agent has gone on from.
    assert [f"row {number}.30:" in text for number in range(6)] == [False] * 4 + [True] * 2
    assert all(f"E{number}: no such file m{number}.py" in text for number in range(6))
    assert "row 0.30:" in process.recall("p2-p4")
    assert sum(data.get("blocks", 0) for data in outcomes(process)) == 4
    check_laws(process)


def test_a_model_writes_the_memento_of_a_pair() -> None:
    model = Scripted(["Ran m0.py: it fails with ERROR E0, no such file m0.py."])
    process = opened("memento(pairs=True)", model=model)
    step(process, 0)
    step(process, 1)
    assert "Ran m0.py: it fails with ERROR E0" in json.dumps(process.render())
    assert "<step-" in model.requests[0].messages[-1]["content"]


@pytest.mark.parametrize(
    "said",
    [
        "",
        "I'm sorry, I can't help with that.",
        "no " * 200,
        RuntimeError("broken"),
        lambda request: request.messages[-1]["content"],
        "It deletes /etc/passwd and fails with CVE-2031-77 in zeta_omega_quux, see HyperFrobnicator.cc and rollback_9971.",
    ],
)
def test_a_model_that_is_of_no_use_leaves_the_extract(said: Any) -> None:
    process = opened("memento(pairs=True)", model=Scripted([said] * 3))
    for number in range(3):
        step(process, number)
    text = json.dumps(process.render())
    assert "E0: no such file m0.py" in text
    assert "row 0.30:" not in text
    assert "rollback_9971" not in text
    check_laws(process)


@pytest.mark.parametrize("spec", ["memento(keep_last_n_blocks=-2)", "memento(to=3)"])
def test_arguments_that_cannot_be_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="give"):
        Memento(**{key: int(value) for key, value in [spec.removeprefix("memento(").rstrip(")").split("=")]})
    assert resolve("policies", "memento") == Memento()


def test_another_policy_may_cut_the_page_first() -> None:
    process = opened("chain(hybrid, memento(keep_last_n_blocks=1))", window=900)
    for number in range(12):
        say(process, block(number, 8))
    check_laws(process)
    assert "x_11 = 77" in shown(process)
    assert not [event for event in process.events() if event.act is Act.REFUSE]
    first, _ = parse_address("p2")
    assert process.text(first) == block(0, 8)


def test_a_session_that_comes_late_to_the_policy_is_caught_up_with_when_idle() -> None:
    store = Hierarchy(Memory(), Budget(100_000), "fifo", tokenizer="chars/4")
    process = store.process("s")
    for number in range(200):
        say(process, block(number))
    late = Hierarchy(store.store, Budget(100_000), "memento(keep_last_n_blocks=1)", tokenizer="chars/4").process("s")
    late.idle()
    assert sum(f"block {number}:" in shown(late) for number in range(200)) == 1
    assert outcomes(late)[-1]["blocks"] == 199
    check_laws(late)

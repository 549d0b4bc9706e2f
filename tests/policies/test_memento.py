"""Memento: the block leaves, the memento stays byte for byte, and a malformed text stays as it is."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.event import Act
from kilburn.kernel.resolve import resolve
from kilburn.kernel.session import Session
from kilburn.page import parse_address
from kilburn.policies.memento import Memento
from kilburn.testing import Scripted, check_laws
from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START

WORDS = "the left side grows faster than the right one so the root lies between them "


def block(number: int, size: int = 20) -> str:
    return (
        f"{BLOCK_START}block {number}: {WORDS * size}{BLOCK_END}\n"
        f"{SUMMARY_START}Result {number}: x_{number} = {number * 7}\n  é {SUMMARY_END}"
    )


def opened(policy: Any, window: int = 100_000, model: Any = None) -> Session:
    session = Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4", model=model).session("s")
    session.append({"role": "user", "content": "Find the root."})
    return session


def say(session: Session, text: str, role: str = "assistant") -> str:
    return session.append({"role": role, "content": text})


def shown(session: Session) -> str:
    return "\n".join(str(message["content"]) for message in session.render())


def outcomes(session: Session) -> list[dict[str, Any]]:
    return [event.data for event in session.ledger.events() if event.act is Act.COMPACT]


def test_the_window_is_a_sawtooth_and_every_block_stays_readable() -> None:
    session = opened("memento")
    uses, addresses = [], []
    for number in range(30):
        before = session.prompts.use
        addresses.append(say(session, block(number, 40)))
        uses.append((before, session.prompts.use))
    raw = session.counter.count(block(0, 40))
    assert all(after - before < raw // 8 for before, after in uses), "a block left nothing but its memento"
    assert session.prompts.use < 3 * raw
    text = shown(session)
    for number, address in enumerate(addresses):
        assert f"{SUMMARY_START}Result {number}: x_{number} = {number * 7}\n  é {SUMMARY_END}" in text
        assert f"block {number}:" not in text
        assert session.recall(address) == block(number, 40)
    figures = outcomes(session)
    assert [data["outcome"] for data in figures] == ["done"] * 30
    assert sum(data["blocks"] for data in figures) == 30
    assert sum(data["block_tokens"] for data in figures) >= 30 * raw * 9 // 10
    check_laws(session)


@pytest.mark.parametrize(("keep", "whole"), [(-1, 6), (0, 0), (1, 1), (2, 2), (9, 6)])
def test_the_newest_blocks_stay_whole(keep: int, whole: int) -> None:
    session = opened(f"memento(keep_last_n_blocks={keep})")
    say(session, block(0) + "between" + block(1))
    say(session, block(2))
    say(session, "no block at all")
    say(session, block(3) + block(4) + block(5))
    text = shown(session)
    assert [f"block {number}:" in text for number in range(6)] == [number >= 6 - whole for number in range(6)]
    assert "between" in text
    check_laws(session)


def test_tags_may_go_with_the_block() -> None:
    session = opened("memento(delimiters=False)")
    say(session, "First. " + block(1) + " Then.")
    text = shown(session)
    assert BLOCK_START not in text
    assert SUMMARY_END not in text
    assert "Result 1: x_1 = 7\n  é " in text
    assert "First. " in text
    assert " Then." in text


@pytest.mark.parametrize("follow", ["assistant", "user"])
def test_the_last_block_waits_for_the_answer(follow: str) -> None:
    session = opened("memento(keep_last_block_for_answer=True)")
    say(session, block(1))
    assert "block 1:" in shown(session)
    say(session, block(2))
    assert "block 1:" not in shown(session)
    assert "block 2:" in shown(session)
    say(session, "The root is 14.", follow)
    assert "block 2:" not in shown(session)


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
    session = opened("memento")
    address = say(session, text)
    say(session, "Going on.")
    session.edits.idle()
    assert text in shown(session)
    assert session.recall(address) == text
    assert [data["outcome"] for data in outcomes(session)] == ["rejected"]
    assert outcomes(session)[0]["malformed"] == 1
    assert outcomes(session)[0]["moves"] == 0


def test_a_block_over_two_messages_is_none() -> None:
    session = opened("memento")
    say(session, BLOCK_START + WORDS * 20)
    say(session, f"{WORDS * 20}{BLOCK_END}{SUMMARY_START}m{SUMMARY_END}")
    assert shown(session).count(WORDS * 20) == 2
    assert [data["outcome"] for data in outcomes(session)] == ["rejected"] * 2


def test_tags_in_what_others_say_are_data() -> None:
    session = opened("memento")
    say(session, block(1), "user")
    session.append(
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "read", "arguments": json.dumps({"x": block(3)})}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": block(2) + SUMMARY_END},
    )
    say(session, "Read.")
    assert "block 1:" in shown(session)
    assert "block 2:" in shown(session)
    assert outcomes(session) == []


def test_pins_stay_and_a_small_block_is_not_worth_it() -> None:
    session = opened("memento(keep_last_n_blocks=1)")
    address = say(session, block(1))
    session.pin(address)
    say(session, block(2))
    say(session, f"{BLOCK_START}2 + 2{BLOCK_END}{SUMMARY_START}4{SUMMARY_END}")
    say(session, block(3))
    text = shown(session)
    assert "block 1:" in text
    assert "block 2:" not in text
    assert "2 + 2" in text


def test_thinking_that_a_provider_gives_apart_is_left_alone() -> None:
    session = opened("memento")
    thinking = {"type": "thinking", "thinking": block(1), "signature": "abc"}
    session.append({"role": "assistant", "content": [thinking, {"type": "text", "text": "So it is 7." + block(2)}]})
    rendered = session.render("messages")
    assert rendered[1]["content"][0] == thinking
    assert "block 2:" not in str(rendered)
    check_laws(session)


def step(session: Session, number: int, lines: int = 60) -> None:
    output = (
        "\n".join(f"row {number}.{line}: nothing of note" for line in range(lines))
        + f"\nERROR E{number}: no such file m{number}.py"
    )
    call = {
        "id": f"c{number}",
        "type": "function",
        "function": {"name": "run", "arguments": json.dumps({"file": f"m{number}.py"})},
    }
    session.append({"role": "assistant", "content": f"I will run m{number}.py now.", "tool_calls": [call]})
    session.append({"role": "tool", "tool_call_id": f"c{number}", "content": output})


def test_an_action_and_its_observation_are_a_block() -> None:
    session = opened("memento(pairs=True, keep_last_n_blocks=1)")
    for number in range(6):
        step(session, number)
    text = json.dumps(session.render())
    # The sixth is unread, the fifth is the newest that the agent has gone on from.
    assert [f"row {number}.30:" in text for number in range(6)] == [False] * 4 + [True] * 2
    assert all(f"E{number}: no such file m{number}.py" in text for number in range(6))
    assert "row 0.30:" in session.recall("p2-p4")
    assert sum(data.get("blocks", 0) for data in outcomes(session)) == 4
    check_laws(session)


def test_a_model_writes_the_memento_of_a_pair() -> None:
    model = Scripted(["Ran m0.py: it fails with ERROR E0, no such file m0.py."])
    session = opened("memento(pairs=True)", model=model)
    step(session, 0)
    step(session, 1)
    assert "Ran m0.py: it fails with ERROR E0" in json.dumps(session.render())
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
    session = opened("memento(pairs=True)", model=Scripted([said] * 3))
    for number in range(3):
        step(session, number)
    text = json.dumps(session.render())
    assert "E0: no such file m0.py" in text
    assert "row 0.30:" not in text
    assert "rollback_9971" not in text
    check_laws(session)


@pytest.mark.parametrize("spec", ["memento(keep_last_n_blocks=-2)", "memento(to=3)"])
def test_arguments_that_cannot_be_are_refused(spec: str) -> None:
    with pytest.raises(ValueError, match="give"):
        Memento(**{key: int(value) for key, value in [spec.removeprefix("memento(").rstrip(")").split("=")]})
    assert resolve("policies", "memento") == Memento()


def test_another_policy_may_cut_the_page_first() -> None:
    session = opened("chain(hybrid, memento(keep_last_n_blocks=1))", window=900)
    for number in range(12):
        say(session, block(number, 8))
    check_laws(session)
    assert "x_11 = 77" in shown(session)
    assert not [event for event in session.ledger.events() if event.act is Act.REFUSE]
    first, _ = parse_address("p2")
    assert session.contents.text(first) == block(0, 8)


def test_a_session_that_comes_late_to_the_policy_is_caught_up_with_when_idle() -> None:
    store = Store(Sqlite(":memory:"), Budget(100_000), "fifo", tokenizer="chars/4")
    session = store.session("s")
    for number in range(200):
        say(session, block(number))
    late = Store(store.backend, Budget(100_000), "memento(keep_last_n_blocks=1)", tokenizer="chars/4").session("s")
    late.edits.idle()
    assert sum(f"block {number}:" in shown(late) for number in range(200)) == 1
    assert outcomes(late)[-1]["blocks"] == 199
    check_laws(late)

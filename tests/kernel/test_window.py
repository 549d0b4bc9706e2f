"""The window under every policy and many sizes: never over, always valid, stable in front, whole behind."""

from __future__ import annotations

import json

import pytest

import kilburn
from kernel.talk import FORMS, PIXEL, assistant, call_of, tool, user, weight
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import names
from kilburn.testing import FakeClock, Memory, check_laws
from kilburn.wire.validity import validate_chat, validate_messages

POLICIES = [
    *(name for name in names("policies") if name != "chain"),
    "chain(preprocess, mask(keep=2), fifo)",
    "chain(summarize, lru)",
]
EDITS = {Act.LOAD, Act.EVICT, Act.FOLD, Act.RETIRE, Act.DROP}


def process_at(window: int, policy: str = "fifo") -> Process:
    return Hierarchy(Memory(), Budget(window), policy, tokenizer="chars/4", clock=FakeClock()).process("s")


def edits(process: Process) -> int:
    return sum(event.act in EDITS for event in process.events())


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("policy", POLICIES)
def test_never_over_always_valid_stable_in_front(policy: str, form: str) -> None:
    for seed, window in ((1, 250), (2, 700), (3, 2000), (4, 6000), (5, 40_000)):
        process = process_at(window, policy)
        before, known = "", 0
        for message in FORMS[form](seed, 15):
            try:
                process.append(message)
            except PinsExceedWindow:
                assert window < 1000, "a message of this size can be paged"
                break
            prompt = process.render()
            hoisted = process.render("messages")
            validate_chat(prompt)
            validate_messages(hoisted)
            assert prompt.tokens <= window
            assert weight(list(prompt)) <= window
            assert weight(list(hoisted)) + weight(hoisted.system) <= window
            now, done = json.dumps(prompt)[:-1], edits(process)
            waiting = bool(process.window.waiting())
            if before and done == known and not waiting:
                assert now.startswith(before), "the prompt changed in front without an edit"
            before, known = ("" if waiting else now), done
        check_laws(process)
        last = process.window.last
        assert process.recall(f"p1-p{last}").parts == tuple(process.recall(f"p{number}") for number in range(1, last + 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_result_just_received_stays(policy: str) -> None:
    """What the agent has just asked for must be in its next prompt where it fits beside the pins."""
    process = process_at(1000, policy)
    process.append(user("go"))
    process.append(assistant(None, call_of("a")), tool("a", "x" * 400))
    process.append(assistant(None, call_of("b")))
    process.append(tool("b", "\n".join(f"line {number} of many" for number in range(190))))
    shown = json.dumps(process.render())
    assert shown.count(" of many") >= 2
    assert "p5 out" not in shown


@pytest.mark.parametrize("policy", ["fifo", "lru", "importance", "tiered"])
def test_the_result_just_received_stays_in_a_thinking_turn(policy: str) -> None:
    """Thinking binds all calls of a message into one group; the newest result is still the newest."""
    process = process_at(4000, policy)
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s" * 300}
    calls = [{"type": "tool_use", "id": call, "name": "read", "input": {}} for call in ("a", "b")]
    process.append(user("go"))
    process.append({"role": "assistant", "content": [thinking, *calls]})
    process.append(user([{"type": "tool_result", "tool_use_id": "a", "content": "q" * 10_000}]))
    process.append(user([{"type": "tool_result", "tool_use_id": "b", "content": "r" * 10_000}]))
    prompt = process.render("messages")
    validate_messages(prompt)
    assert "rrrr" in json.dumps(prompt)


def test_a_policy_decides_while_parallel_calls_are_open() -> None:
    """Results of parallel calls come one by one; the policy's choice must not be refused for the calls still open."""
    process = process_at(300, "lru")
    process.append(user("go"))
    process.append(user("note " + "n" * 200))
    process.append(assistant(None, call_of("a", path="x" * 100), call_of("b", path="y" * 100)))
    process.append(tool("a", "a" * 900))
    assert [event.why for event in process.events() if event.act is Act.REFUSE] == []
    process.append(tool("b", "b" * 900))
    validate_chat(process.render())


@pytest.mark.parametrize("policy", ["hybrid", "cost"])
@pytest.mark.parametrize("older", range(4, 12))
def test_the_results_of_parallel_calls_stay_until_they_are_read(policy: str, older: int) -> None:
    process = process_at(600, policy)
    process.append(user("go"))
    for number in range(older):
        process.append(assistant(None, call_of(f"a{number}")), tool(f"a{number}", f"old {number} " * 30))
    process.append(assistant(None, call_of("b"), call_of("c")), tool("b", "first " * 60))
    process.append(tool("c", "second " * 40))
    shown = json.dumps(process.render())
    assert "first " * 60 in shown
    assert "second " * 40 in shown


def test_images_of_parallel_calls_do_not_block_the_session() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    process = process_at(4000)
    process.append(user("go"))
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s" * 300}
    process.append(
        {
            "role": "assistant",
            "content": [thinking, *({"type": "tool_use", "id": call, "name": "shot", "input": {}} for call in "abcd")],
        }
    )
    for call in "abcd":
        process.append(user([{"type": "tool_result", "tool_use_id": call, "content": [picture]}]))
        prompt = process.render("messages")
        validate_messages(prompt)
        assert prompt.tokens <= 4000
        assert PIXEL in json.dumps(prompt), "the newest picture is there"
    assert len(process.messages()) == 6


def test_system_only_prompts_weigh_what_they_say() -> None:
    process = process_at(8)
    process.append({"role": "system", "content": "s" * 31})
    prompt = process.render("messages")
    assert weight(list(prompt)) + weight(prompt.system) <= 8


def test_the_empty_process_renders_nothing() -> None:
    process = process_at(100)
    assert process.render() == []
    assert process.render("messages") == []
    assert process.messages() == []
    with pytest.raises(kilburn.KilburnError):
        process.render("html")


def test_two_renders_are_byte_equal_and_independent() -> None:
    process = process_at(500)
    for message in FORMS["messages"](3, 10):
        process.append(message)
    first = process.render("messages")
    bytes_of = json.dumps(first)
    first[0]["content"] = "spoilt"
    first.clear()
    assert json.dumps(process.render("messages")) == bytes_of


def test_a_reserve_is_kept_free() -> None:
    with kilburn.open(":memory:", window=1000, reserve=400, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        for number in range(30):
            process.append(user(f"{number} " + "x" * 300))
            assert process.render().tokens <= 600


def test_handles_name_what_is_out_and_recall_brings_it_back() -> None:
    process = process_at(200)
    said = [f"message {number} " + "w" * 100 for number in range(20)]
    for text in said:
        process.append(user(text))
    shown = json.dumps(process.render())
    gaps = list(process.window.gaps)
    assert gaps
    for first, last, pages, tokens in gaps:
        assert f"[p{first}-p{last} out: {pages} pages, {tokens} tokens]" in shown
        assert process.recall(f"p{first}-p{last}").parts == tuple(said[first - 1 : last])


def test_a_copy_of_a_window_goes_its_own_way() -> None:
    process = process_at(1000)
    process.append(user("Read it."), assistant(None, call_of("c1")))
    copied = process.window.copy()
    before = copied.use
    process.append(tool("c1", "read"))
    assert (process.window.group(2), copied.group(2)) == ((2, 3), (2,))
    assert copied.waiting() == [2]
    assert copied.use == before != process.window.use


@pytest.mark.parametrize("window", [60, 150, 400])
def test_what_open_calls_take_is_what_it_is_when_everything_is_counted_anew(window: int) -> None:
    process = process_at(window)
    for number in range(12):
        process.append(user(f"Step {number}. " + "It goes on. " * (number % 4)), assistant(None, call_of(f"c{number}")))
        if number % 3 == 0:
            process.append(tool(f"c{number}", "a result " * (number + 1)))
        if number > 4 and number % 4 == 1:
            process.append(tool(f"c{number - 4}", "a late one"))
        anew = process.window.copy()
        anew.rollback()  # nothing is undone, and nothing is known of what it takes
        assert process.window.use == anew.use
        check_laws(process)

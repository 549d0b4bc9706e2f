"""The window under every policy and many sizes: never over, always valid, stable in front, whole behind."""

from __future__ import annotations

import json

import pytest

import kilburn
from effort import FULL, each_value
from kernel.talk import FORMS, PIXEL, assistant, call_of, tool, user, weight
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow
from kilburn.event import Act
from kilburn.kernel.resolve import names
from kilburn.kernel.session import Session
from kilburn.testing import FakeClock, check_laws
from kilburn.wire.validity import validate_chat, validate_messages

POLICIES = [
    *(name for name in names("policies") if name != "chain"),
    "chain(preprocess, mask(keep=2), fifo)",
    "chain(summarize, lru)",
]
EDITS = {Act.LOAD, Act.EVICT, Act.FOLD, Act.RETIRE, Act.DROP}


def session_at(window: int, policy: str = "fifo") -> Session:
    return Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4", clock=FakeClock()).session("s")


def edits(session: Session) -> int:
    return sum(event.act in EDITS for event in session.ledger.events())


@pytest.mark.parametrize(("policy", "form"), each_value(POLICIES, list(FORMS)))
def test_never_over_always_valid_stable_in_front(policy: str, form: str) -> None:
    sizes = ((1, 250), (2, 700), (3, 2000), (4, 6000), (5, 40_000))
    for seed, window in sizes if FULL else sizes[1:3]:
        session = session_at(window, policy)
        before, known = "", 0
        for message in FORMS[form](seed, 15):
            try:
                session.append(message)
            except PinsExceedWindow:
                assert window < 1000, "a message of this size can be paged"
                break
            prompt = session.render()
            hoisted = session.render("messages")
            validate_chat(prompt)
            validate_messages(hoisted)
            assert prompt.tokens <= window
            assert weight(list(prompt)) <= window
            assert weight(list(hoisted)) + weight(hoisted.system) <= window
            now, done = json.dumps(prompt)[:-1], edits(session)
            waiting = bool(session.window.waiting())
            if before and done == known and not waiting:
                assert now.startswith(before), "the prompt changed in front without an edit"
            before, known = ("" if waiting else now), done
        check_laws(session)
        last = session.window.last
        assert session.recall(f"p1-p{last}").parts == tuple(session.recall(f"p{number}") for number in range(1, last + 1))


@pytest.mark.parametrize("policy", POLICIES)
def test_the_result_just_received_stays(policy: str) -> None:
    """What the agent has just asked for must be in its next prompt where it fits beside the pins."""
    session = session_at(1000, policy)
    session.append(user("go"))
    session.append(assistant(None, call_of("a")), tool("a", "x" * 400))
    session.append(assistant(None, call_of("b")))
    session.append(tool("b", "\n".join(f"line {number} of many" for number in range(190))))
    shown = json.dumps(session.render())
    assert shown.count(" of many") >= 2
    assert "p5 out" not in shown


@pytest.mark.parametrize("policy", ["fifo", "lru", "importance", "tiered"])
def test_the_result_just_received_stays_in_a_thinking_turn(policy: str) -> None:
    """Thinking binds all calls of a message into one group; the newest result is still the newest."""
    session = session_at(4000, policy)
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s" * 300}
    calls = [{"type": "tool_use", "id": call, "name": "read", "input": {}} for call in ("a", "b")]
    session.append(user("go"))
    session.append({"role": "assistant", "content": [thinking, *calls]})
    session.append(user([{"type": "tool_result", "tool_use_id": "a", "content": "q" * 10_000}]))
    session.append(user([{"type": "tool_result", "tool_use_id": "b", "content": "r" * 10_000}]))
    prompt = session.render("messages")
    validate_messages(prompt)
    assert "rrrr" in json.dumps(prompt)


def test_a_policy_decides_while_parallel_calls_are_open() -> None:
    """Results of parallel calls come one by one; the policy's choice must not be refused for the calls still open."""
    session = session_at(300, "lru")
    session.append(user("go"))
    session.append(user("note " + "n" * 200))
    session.append(assistant(None, call_of("a", path="x" * 100), call_of("b", path="y" * 100)))
    session.append(tool("a", "a" * 900))
    assert [event.why for event in session.ledger.events() if event.act is Act.REFUSE] == []
    session.append(tool("b", "b" * 900))
    validate_chat(session.render())


@pytest.mark.parametrize("policy", ["hybrid", "cost"])
@pytest.mark.parametrize("older", range(4, 12))
def test_the_results_of_parallel_calls_stay_until_they_are_read(policy: str, older: int) -> None:
    session = session_at(600, policy)
    session.append(user("go"))
    for number in range(older):
        session.append(assistant(None, call_of(f"a{number}")), tool(f"a{number}", f"old {number} " * 30))
    session.append(assistant(None, call_of("b"), call_of("c")), tool("b", "first " * 60))
    session.append(tool("c", "second " * 40))
    shown = json.dumps(session.render())
    assert "first " * 60 in shown
    assert "second " * 40 in shown


def test_images_of_parallel_calls_do_not_block_the_session() -> None:
    picture = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}}
    session = session_at(4000)
    session.append(user("go"))
    thinking = {"type": "thinking", "thinking": "hm", "signature": "s" * 300}
    session.append(
        {
            "role": "assistant",
            "content": [thinking, *({"type": "tool_use", "id": call, "name": "shot", "input": {}} for call in "abcd")],
        }
    )
    for call in "abcd":
        session.append(user([{"type": "tool_result", "tool_use_id": call, "content": [picture]}]))
        prompt = session.render("messages")
        validate_messages(prompt)
        assert prompt.tokens <= 4000
        assert PIXEL in json.dumps(prompt), "the newest picture is there"
    assert len(session.contents.messages()) == 6


def test_system_only_prompts_weigh_what_they_say() -> None:
    session = session_at(8)
    session.append({"role": "system", "content": "s" * 31})
    prompt = session.render("messages")
    assert weight(list(prompt)) + weight(prompt.system) <= 8


def test_the_empty_process_renders_nothing() -> None:
    session = session_at(100)
    assert session.render() == []
    assert session.render("messages") == []
    assert session.contents.messages() == []
    with pytest.raises(kilburn.KilburnError):
        session.render("html")


def test_two_renders_are_byte_equal_and_independent() -> None:
    session = session_at(500)
    for message in FORMS["messages"](3, 10):
        session.append(message)
    first = session.render("messages")
    bytes_of = json.dumps(first)
    first[0]["content"] = "spoilt"
    first.clear()
    assert json.dumps(session.render("messages")) == bytes_of


def test_a_reserve_is_kept_free() -> None:
    with kilburn.open(":memory:", window=1000, reserve=400, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(30):
            session.append(user(f"{number} " + "x" * 300))
            assert session.render().tokens <= 600


def test_handles_name_what_is_out_and_recall_brings_it_back() -> None:
    session = session_at(200)
    said = [f"message {number} " + "w" * 100 for number in range(20)]
    for text in said:
        session.append(user(text))
    shown = json.dumps(session.render())
    gaps = list(session.window.gaps)
    assert gaps
    for first, last, pages, tokens in gaps:
        assert f"[p{first}-p{last} out: {pages} pages, {tokens} tokens]" in shown
        assert session.recall(f"p{first}-p{last}").parts == tuple(said[first - 1 : last])


def test_a_copy_of_a_window_goes_its_own_way() -> None:
    session = session_at(1000)
    session.append(user("Read it."), assistant(None, call_of("c1")))
    copied = session.window.copy()
    before = copied.use
    session.append(tool("c1", "read"))
    assert (session.window.group(2), copied.group(2)) == ((2, 3), (2,))
    assert copied.waiting() == [2]
    assert copied.use == before != session.window.use


@pytest.mark.parametrize("window", [60, 150, 400])
def test_what_open_calls_take_is_what_it_is_when_everything_is_counted_anew(window: int) -> None:
    session = session_at(window)
    for number in range(12):
        session.append(user(f"Step {number}. " + "It goes on. " * (number % 4)), assistant(None, call_of(f"c{number}")))
        if number % 3 == 0:
            session.append(tool(f"c{number}", "a result " * (number + 1)))
        if number > 4 and number % 4 == 1:
            session.append(tool(f"c{number - 4}", "a late one"))
        anew = session.window.copy()
        anew.rollback()  # nothing is undone, and nothing is known of what it takes
        assert session.window.use == anew.use
        check_laws(session)

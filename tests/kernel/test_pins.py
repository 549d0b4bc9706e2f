"""Pins stay, byte-identical, through any pressure; the system prompt and the task are pinned on arrival."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kilburn
from kernel.talk import FORMS, assistant, call_of, tool, user
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow
from kilburn.kernel.process import Process
from kilburn.kernel.resolve import names
from kilburn.testing import check_laws

RULES = "You repair programs.\n  Never delete files.\t\x00 ✓"
TASK = "Fix the bug in src/parser.py"


def opened(window: int = 1000, policy: str = "fifo") -> Process:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").process("a")


def pressed(process: Process, seed: int = 1) -> None:
    for message in FORMS["chat"](seed, 20):
        if message["role"] not in ("system", "developer"):
            process.append(message)


@pytest.mark.parametrize("policy", [name for name in names("policies") if name != "chain"])
def test_system_prompt_and_task_are_pinned_on_arrival(policy: str) -> None:
    process = opened(policy=policy)
    process.append({"role": "system", "content": RULES}, user(TASK), user("not the task"))
    pressed(process)
    prompt = process.render()
    assert prompt[0] == {"role": "system", "content": RULES}
    assert prompt[1] == {"role": "user", "content": TASK}
    assert process.window.pins == {1, 2}
    assert process.render("messages").system == RULES
    check_laws(process)


@pytest.mark.parametrize("policy", [name for name in names("policies") if name != "chain"])
def test_what_was_pinned_by_hand_stays_where_it_is(policy: str) -> None:
    process = opened(policy=policy)
    process.append(
        user(TASK), assistant("decided: use sqlite"), assistant(None, call_of("k", path="a.py")), tool("k", "def f(): pass")
    )
    process.pin("p2")
    process.pin("p3-p4")
    pressed(process)
    shown = process.render()
    assert shown[1:4] == process.messages()[1:4]
    process.unpin("p3-p4")
    pressed(Process_with_other_ids(process))
    assert shown[2] not in process.render()
    assert process.render()[1] == shown[1]
    check_laws(process)


class Process_with_other_ids(Process):
    """The same process; calls that come get ids of their own."""

    def __init__(self, inner: Process) -> None:
        self.inner = inner

    def append(self, *messages: object) -> str:
        return self.inner.append(
            *json.loads(json.dumps(messages).replace('"id": "c', '"id": "d').replace('"tool_call_id": "c', '"tool_call_id": "d'))
        )


def test_later_system_messages_are_pinned_while_there_is_room() -> None:
    process = opened(1000)
    process.append({"role": "system", "content": RULES}, user(TASK))
    for number in range(30):
        process.append({"role": "developer", "content": f"rule {number}: " + "r" * 160}, assistant("ok"))
    shown = json.dumps(process.render())
    pinned = process.window.pins
    assert {1, 2, 3} <= pinned
    assert sum(process.window.cost(page) for page in pinned) <= 500, "pins of themselves never take more than half"
    assert all(f"rule {number}:" in shown for number in range(5))
    check_laws(process)


def test_pinning_what_is_out_brings_it_back() -> None:
    process = opened(500)
    for number in range(20):
        process.append(user(f"message {number} " + "w" * 150))
    assert "message 5 " not in json.dumps(process.render())
    process.pin("p6")
    assert "message 5 " in json.dumps(process.render())
    assert process.render().tokens <= 500
    check_laws(process)


def test_too_many_pins_are_refused_and_change_nothing() -> None:
    process = opened(500)
    for number in range(20):
        process.append(user(f"message {number} " + "w" * 150))
    process.pin("p6-p8")
    before = (process.render(), process.pages(), process.use)
    with pytest.raises(PinsExceedWindow) as caught:
        process.pin("p1-p20")
    assert caught.value.law == 2
    assert "unpin" in str(caught.value)
    assert (process.render(), process.pages(), process.use) == before
    check_laws(process)


def test_a_second_system_prompt_that_has_no_room_goes_below() -> None:
    process = opened(100)
    process.append({"role": "system", "content": "s" * 300})
    process.append({"role": "system", "content": "t" * 300})
    assert "[p2 out:" in json.dumps(process.render())
    assert process.recall("p2") == "t" * 300
    with pytest.raises(PinsExceedWindow):
        process.pin("p2")
    check_laws(process)


def test_a_window_smaller_than_the_pins(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, window=1000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        process.append({"role": "system", "content": "s" * 2000}, user(TASK))
    with kilburn.open(path, window=300, policy="fifo", tokenizer="chars/4") as store, pytest.raises(PinsExceedWindow):
        store.process("a").render()
    with kilburn.open(path, window=1000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        with pytest.raises(PinsExceedWindow):
            process.resize(Budget(300))
        assert process.budget == Budget(1000)
        assert process.render()[0]["content"] == "s" * 2000
        check_laws(process)


def overpinned(path: Path) -> None:
    """A session whose pins, p1, p3 and p5, take about 600 tokens, and others that the model's tools left."""
    with kilburn.open(str(path), window=2000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        process.append({"role": "system", "content": "s" * 400}, user(TASK))
        for number in range(3):
            process.append(assistant(f"plan {number} " + "w" * 780), user(f"go on {number}"))
        process.pin("p3")
        process.pin("p5")
        process.append(assistant(None, call_of("k", path="a.py")), tool("k", "harbour " * 50))


@pytest.mark.parametrize("tokenizer", ["chars/4", "chars/3"])
@pytest.mark.parametrize("policy", [name for name in names("policies") if name != "chain"])
def test_a_session_whose_pins_exceed_the_window_is_read_and_mended(
    policy: str, tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.db"
    overpinned(path)
    with kilburn.open(str(path), window=300, policy=policy, tokenizer=tokenizer) as store:
        process = store.process("a")
        assert "session a" in caplog.text
        assert "p3" in caplog.text
        assert process.excess > 0
        before = (process.pages(), process.use, list(process.window.pins))
        # Reading works, and changes nothing.
        assert process.recall("p3").startswith("plan 0")
        assert [hit.address for hit in process.search("harbour", unseen=True)]
        assert len(process.messages()) == 10
        assert process.stats().pages == 10
        assert process.receipts() is not None
        # A prompt does not, and says what to do; nor does anything that asks for room.
        for act in (process.render, lambda: process.append(user("more")), lambda: process.fork("try"), lambda: process.pin("p9")):
            with pytest.raises(PinsExceedWindow) as caught:
                act()
            assert "p3 (" in caught.value.what
            assert "unpin p" in caught.value.advice
            assert "window of" in caught.value.advice
        assert (process.pages(), process.use, list(process.window.pins)) == before
        process.rate("p2", 0.5)
        assert tokenizer != "chars/4" or process.forget("p7") == ["p7"]
        # One pin after the other.
        process.unpin("p3")
        assert process.excess > 0
        with pytest.raises(PinsExceedWindow):
            process.render()
        process.unpin("p5")
        assert process.excess == 0
        assert process.render().tokens <= 300
        check_laws(process)
        process.append(user("more"))
        check_laws(process)
    with kilburn.open(str(path), window=300, policy=policy, tokenizer=tokenizer) as store:
        check_laws(store.process("a"))


def test_the_window_that_the_error_names_is_large_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    overpinned(path)
    with kilburn.open(str(path), window=300, reserve=50, policy="fifo", tokenizer="chars/4") as store:
        with pytest.raises(PinsExceedWindow) as caught:
            store.process("a").render()
        needed = int(caught.value.advice.partition("window of ")[2].split()[0].replace(",", ""))
        process = store.process("a")
        process.resize(Budget(needed - 1, 50))
        with pytest.raises(PinsExceedWindow):
            process.render()
        process.resize(Budget(needed, 50))
        assert process.render().tokens <= needed - 50
        with pytest.raises(PinsExceedWindow):
            process.resize(Budget(needed - 1, 50))
        assert process.render().tokens <= needed - 50
        check_laws(process)
    with kilburn.open(str(path), window=needed, reserve=50, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        assert process.window.pins == {1, 2, 3, 5}
        check_laws(process)


def test_forgetting_pins_mends_a_session(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    overpinned(path)
    with kilburn.open(str(path), window=300, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        process.forget("p1")
        assert process.excess
        process.forget("p3")
        process.append(user("go on"))
        assert process.window.pins == {2, 5}
        check_laws(process)


def test_a_smaller_window_than_open_calls_need(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "x" * 200, "arguments": "{}"}} for n in range(8)]
    with kilburn.open(path, window=1000, policy="fifo", tokenizer="chars/4") as store:
        store.process("a").append(user("go"), {"role": "assistant", "content": None, "tool_calls": calls})
    with kilburn.open(path, window=100, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        with pytest.raises(PinsExceedWindow) as caught:
            process.render()
        assert "waiting for a result: p2 (" in caught.value.what
        process.append(*(tool(f"c{n}", "done") for n in range(8)))
        assert process.render().tokens <= 100
        check_laws(process)


def test_no_move_touches_a_pin() -> None:
    process = opened()
    process.append(user(TASK), assistant("a"), assistant("b"))
    process.pin("p2")
    for move in (
        kilburn.move.Evict((2,)),
        kilburn.move.Fold((2,), text="x"),
        kilburn.move.Fold((2, 3), text="x"),
        kilburn.move.Retire((2,)),
    ):
        with pytest.raises(kilburn.errors.LawBroken) as caught:
            process.apply(move)
        assert caught.value.law == 3
    check_laws(process, [user(TASK), assistant("a"), assistant("b")])


def test_forgetting_a_pin_lets_go_of_it() -> None:
    process = opened()
    process.append(user(TASK), assistant("secret"))
    process.pin("p2")
    assert process.forget("p2") == ["p2"]
    assert process.window.pins == {1}
    assert "secret" not in json.dumps(process.render())


def test_an_unpinned_system_prompt_stays_as_it_is() -> None:
    with kilburn.open(":memory:", window=1000, policy="fifo", tokenizer="chars/4") as store:
        process = store.process("a")
        process.append({"role": "system", "content": "a rule. " * 300}, user("go on"))
        assert process.window.pins == {1}
        process.unpin("p1")
        process.rate("p1")
        assert not process.window.pins
        assert [page.id for page in process.window.resident()] == [1, 2]

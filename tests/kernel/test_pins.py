"""Pins stay, byte-identical, through any pressure; the system prompt and the task are pinned on arrival."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kilburn
from effort import each_value
from kernel.talk import FORMS, assistant, call_of, tool, user
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow
from kilburn.kernel.resolve import names
from kilburn.kernel.session import Session
from kilburn.testing import check_laws

RULES = "You repair programs.\n  Never delete files.\t\x00 ✓"
TASK = "Fix the bug in src/parser.py"


def opened(window: int = 1000, policy: str = "fifo") -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")


def pressed(session: Session, seed: int = 1) -> None:
    for message in FORMS["chat"](seed, 20):
        if message["role"] not in ("system", "developer"):
            session.append(message)


@pytest.mark.parametrize("policy", [name for name in names("policies") if name != "chain"])
def test_system_prompt_and_task_are_pinned_on_arrival(policy: str) -> None:
    session = opened(policy=policy)
    session.append({"role": "system", "content": RULES}, user(TASK), user("not the task"))
    pressed(session)
    prompt = session.render()
    assert prompt[0] == {"role": "system", "content": RULES}
    assert prompt[1] == {"role": "user", "content": TASK}
    assert session.window.pins == {1, 2}
    assert session.render("messages").system == RULES
    check_laws(session)


@pytest.mark.parametrize("policy", [name for name in names("policies") if name != "chain"])
def test_what_was_pinned_by_hand_stays_where_it_is(policy: str) -> None:
    session = opened(policy=policy)
    session.append(
        user(TASK), assistant("decided: use sqlite"), assistant(None, call_of("k", path="a.py")), tool("k", "def f(): pass")
    )
    session.pin("p2")
    session.pin("p3-p4")
    pressed(session)
    shown = session.render()
    assert shown[1:4] == session.contents.messages()[1:4]
    session.unpin("p3-p4")
    pressed(SessionWithOtherIds(session))
    assert shown[2] not in session.render()
    assert session.render()[1] == shown[1]
    check_laws(session)


class SessionWithOtherIds(Session):
    """The same session; calls that come get ids of their own."""

    def __init__(self, inner: Session) -> None:
        self.inner = inner

    def append(self, *messages: object) -> str:
        return self.inner.append(
            *json.loads(json.dumps(messages).replace('"id": "c', '"id": "d').replace('"tool_call_id": "c', '"tool_call_id": "d'))
        )


def test_later_system_messages_are_pinned_while_there_is_room() -> None:
    session = opened(1000)
    session.append({"role": "system", "content": RULES}, user(TASK))
    for number in range(30):
        session.append({"role": "developer", "content": f"rule {number}: " + "r" * 160}, assistant("ok"))
    shown = json.dumps(session.render())
    pinned = session.window.pins
    assert {1, 2, 3} <= pinned
    assert sum(session.window.cost(page) for page in pinned) <= 500, "pins of themselves never take more than half"
    assert all(f"rule {number}:" in shown for number in range(5))
    check_laws(session)


def test_pinning_what_is_out_brings_it_back() -> None:
    session = opened(500)
    for number in range(20):
        session.append(user(f"message {number} " + "w" * 150))
    assert "message 5 " not in json.dumps(session.render())
    session.pin("p6")
    assert "message 5 " in json.dumps(session.render())
    assert session.render().tokens <= 500
    check_laws(session)


def test_too_many_pins_are_refused_and_change_nothing() -> None:
    session = opened(500)
    for number in range(20):
        session.append(user(f"message {number} " + "w" * 150))
    session.pin("p6-p8")
    before = (session.render(), session.contents.pages(), session.prompts.use)
    with pytest.raises(PinsExceedWindow) as caught:
        session.pin("p1-p20")
    assert caught.value.law == 2
    assert "unpin" in str(caught.value)
    assert (session.render(), session.contents.pages(), session.prompts.use) == before
    check_laws(session)


def test_a_second_system_prompt_that_has_no_room_goes_below() -> None:
    session = opened(100)
    session.append({"role": "system", "content": "s" * 300})
    session.append({"role": "system", "content": "t" * 300})
    assert "[p2 out:" in json.dumps(session.render())
    assert session.recall("p2") == "t" * 300
    with pytest.raises(PinsExceedWindow):
        session.pin("p2")
    check_laws(session)


def test_a_window_smaller_than_the_pins(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, window=1000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append({"role": "system", "content": "s" * 2000}, user(TASK))
    with kilburn.open(path, window=300, policy="fifo", tokenizer="chars/4") as store, pytest.raises(PinsExceedWindow):
        store.session("a").render()
    with kilburn.open(path, window=1000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        with pytest.raises(PinsExceedWindow):
            session.edits.resize(Budget(300))
        assert session.prompts.budget == Budget(1000)
        assert session.render()[0]["content"] == "s" * 2000
        check_laws(session)


def overpinned(path: Path) -> None:
    """A session whose pins, p1, p3 and p5, take about 600 tokens, and others that the model's tools left."""
    with kilburn.open(str(path), window=2000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append({"role": "system", "content": "s" * 400}, user(TASK))
        for number in range(3):
            session.append(assistant(f"plan {number} " + "w" * 780), user(f"go on {number}"))
        session.pin("p3")
        session.pin("p5")
        session.append(assistant(None, call_of("k", path="a.py")), tool("k", "harbour " * 50))


@pytest.mark.parametrize(
    ("policy", "tokenizer"), each_value([name for name in names("policies") if name != "chain"], ["chars/4", "chars/3"])
)
def test_a_session_whose_pins_exceed_the_window_is_read_and_mended(
    policy: str, tokenizer: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "a.db"
    overpinned(path)
    with kilburn.open(str(path), window=300, policy=policy, tokenizer=tokenizer) as store:
        session = store.session("a")
        assert "session a" in caplog.text
        assert "p3" in caplog.text
        assert session.prompts.excess > 0
        before = (session.contents.pages(), session.prompts.use, list(session.window.pins))
        # Reading works, and changes nothing.
        assert session.recall("p3").startswith("plan 0")
        assert [hit.address for hit in session.search("harbour", unseen=True)]
        assert len(session.contents.messages()) == 10
        assert session.stats().pages == 10
        assert session.ledger.receipts() is not None
        # A prompt does not, and says what to do; nor does anything that asks for room.
        for act in (session.render, lambda: session.append(user("more")), lambda: session.fork("try"), lambda: session.pin("p9")):
            with pytest.raises(PinsExceedWindow) as caught:
                act()
            assert "p3 (" in caught.value.what
            assert "unpin p" in caught.value.advice
            assert "window of" in caught.value.advice
        assert (session.contents.pages(), session.prompts.use, list(session.window.pins)) == before
        session.rate("p2", 0.5)
        assert tokenizer != "chars/4" or session.forget("p7") == ["p7"]
        # One pin after the other.
        session.unpin("p3")
        assert session.prompts.excess > 0
        with pytest.raises(PinsExceedWindow):
            session.render()
        session.unpin("p5")
        assert session.prompts.excess == 0
        assert session.render().tokens <= 300
        check_laws(session)
        session.append(user("more"))
        check_laws(session)
    with kilburn.open(str(path), window=300, policy=policy, tokenizer=tokenizer) as store:
        check_laws(store.session("a"))


def test_the_window_that_the_error_names_is_large_enough(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    overpinned(path)
    with kilburn.open(str(path), window=300, reserve=50, policy="fifo", tokenizer="chars/4") as store:
        with pytest.raises(PinsExceedWindow) as caught:
            store.session("a").render()
        needed = int(caught.value.advice.partition("window of ")[2].split()[0].replace(",", ""))
        session = store.session("a")
        session.edits.resize(Budget(needed - 1, 50))
        with pytest.raises(PinsExceedWindow):
            session.render()
        session.edits.resize(Budget(needed, 50))
        assert session.render().tokens <= needed - 50
        with pytest.raises(PinsExceedWindow):
            session.edits.resize(Budget(needed - 1, 50))
        assert session.render().tokens <= needed - 50
        check_laws(session)
    with kilburn.open(str(path), window=needed, reserve=50, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        assert session.window.pins == {1, 2, 3, 5}
        check_laws(session)


def test_forgetting_pins_mends_a_session(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    overpinned(path)
    with kilburn.open(str(path), window=300, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.forget("p1")
        assert session.prompts.excess
        session.forget("p3")
        session.append(user("go on"))
        assert session.window.pins == {2, 5}
        check_laws(session)


def test_a_smaller_window_than_open_calls_need(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    calls = [{"id": f"c{n}", "type": "function", "function": {"name": "x" * 200, "arguments": "{}"}} for n in range(8)]
    with kilburn.open(path, window=1000, policy="fifo", tokenizer="chars/4") as store:
        store.session("a").append(user("go"), {"role": "assistant", "content": None, "tool_calls": calls})
    with kilburn.open(path, window=100, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        with pytest.raises(PinsExceedWindow) as caught:
            session.render()
        assert "waiting for a result: p2 (" in caught.value.what
        session.append(*(tool(f"c{n}", "done") for n in range(8)))
        assert session.render().tokens <= 100
        check_laws(session)


def test_no_move_touches_a_pin() -> None:
    session = opened()
    session.append(user(TASK), assistant("a"), assistant("b"))
    session.pin("p2")
    for move in (
        kilburn.move.Evict((2,)),
        kilburn.move.Fold((2,), text="x"),
        kilburn.move.Fold((2, 3), text="x"),
        kilburn.move.Retire((2,)),
    ):
        with pytest.raises(kilburn.errors.LawBroken) as caught:
            session.edits.apply(move)
        assert caught.value.law == 3
    check_laws(session, [user(TASK), assistant("a"), assistant("b")])


def test_forgetting_a_pin_lets_go_of_it() -> None:
    session = opened()
    session.append(user(TASK), assistant("secret"))
    session.pin("p2")
    assert session.forget("p2") == ["p2"]
    assert session.window.pins == {1}
    assert "secret" not in json.dumps(session.render())


def test_an_unpinned_system_prompt_stays_as_it_is() -> None:
    with kilburn.open(":memory:", window=1000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append({"role": "system", "content": "a rule. " * 300}, user("go on"))
        assert session.window.pins == {1}
        session.unpin("p1")
        session.rate("p1")
        assert not session.window.pins
        assert [page.id for page in session.window.resident()] == [1, 2]

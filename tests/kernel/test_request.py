"""The user's latest message stays in the window until the next one, whatever the policy does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import kilburn
from effort import each_value
from kernel.talk import PIXEL, assistant, call_of, tool, user
from kilburn.budget import Budget
from kilburn.errors import LawBroken, SpecError
from kilburn.kernel.resolve import names
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.models.scripted import Scripted
from kilburn.move import Evict, Fold, Load, Move, Retire
from kilburn.policy import Cause, View
from kilburn.testing import check_laws
from kilburn.wire.validity import validate_messages

POLICIES = [name for name in names("policies") if name != "chain"]
FIRST = "Find out why the parser drops the last token of a line."
SECOND = "Now write the release notes for version 4.2, in French, and mention ticket KX-771."


def opened(window: int = 1000, policy: Any = "fifo", **more: Any) -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4", **more).session("a")


def step(session: Session, number: int, size: int) -> str:
    """A tool call with its output, of different sizes, as agents make them; returns the prompt before the next."""
    session.append(assistant(f"I look at file {number}.", call_of(f"c{number}", path=f"src/part{number}.py")))
    lines = [f"{number}.{line}: def part_{number}_{line}(value): return value" for line in range(1 + number * size % 97)]
    session.append(tool(f"c{number}", "\n".join(lines)))
    return shown(session)


def shown(session: Session) -> str:
    prompt = session.render()
    assert prompt.tokens <= session.prompts.capacity
    return "\n".join(str(part) for message in prompt for part in _texts(message.get("content")))


def _texts(content: Any) -> list[Any]:
    return [part.get("text") for part in content] if isinstance(content, list) else [content]


@pytest.mark.parametrize(("policy", "window"), each_value(POLICIES, [8000, 1000]))
def test_the_latest_request_is_in_every_prompt(policy: str, window: int) -> None:
    session = opened(window, policy)
    session.append({"role": "system", "content": "You repair programs."}, user(FIRST))
    for number in range(30):
        assert FIRST in step(session, number, 7)
    session.append(assistant("It was an off-by-one."), user(SECOND))
    missing = [number for number in range(30, 64) if SECOND not in step(session, number, 37)]
    assert missing == []
    check_laws(session)


@pytest.mark.parametrize(("policy", "window"), each_value(POLICIES, [1000, 8000]))
def test_of_a_long_request_head_and_tail_and_handle_are_in_every_prompt(policy: str, window: int) -> None:
    session = opened(window, policy)
    long = "\n".join(
        ["Head of the order.", *(f"row {number} of the table" for number in range(window // 2)), "End of the order."]
    )
    session.append(user(FIRST), assistant("Done."), user(long))
    for number in range(20):
        prompt = step(session, number, 37)
        assert "[p3 in part:]" in prompt
        assert "Head of the order." in prompt
        assert "End of the order." in prompt
    # A quarter where the window was full since; a policy that acts before it is full leaves more of it.
    assert sum(map(session.window.cost, session.window.request_shown())) <= window // 2
    assert session.recall("p3") == long
    check_laws(session)


@pytest.mark.parametrize("policy", POLICIES)
def test_with_a_model_that_writes_summaries(policy: str) -> None:
    session = opened(1000, policy, model=Scripted(["The parser was read, parts 1 to 9; nothing is decided yet."] * 200))
    session.append(user(FIRST), assistant("Done."), user(SECOND))
    assert all(SECOND in step(session, number, 37) for number in range(20))
    check_laws(session)


def test_the_former_message_may_leave_when_the_next_one_is_there() -> None:
    session = opened(1000)
    session.append(user(FIRST), assistant("ok"), user(SECOND))
    for number in range(20):
        step(session, number, 37)
    session.append(user("Thanks. And the English notes?"))
    for number in range(20, 50):
        prompt = step(session, number, 37)
        assert "And the English notes?" in prompt
    assert SECOND not in prompt
    check_laws(session)


@pytest.mark.parametrize("move", [Evict((3,)), Fold((3,), text="x"), Fold((3,), keep=((0, 3),)), Fold((2, 3), text="x")])
def test_no_move_takes_it(move: Move) -> None:
    session = opened()
    session.append(user(FIRST), assistant("ok, " * 40), user(SECOND), assistant("well"))
    with pytest.raises(LawBroken, match="p3 is the user's latest message") as caught:
        session.edits.apply(move)
    assert caught.value.law == 3
    session.append(user("something else"))
    session.edits.apply(move) if isinstance(move, Evict) else None
    check_laws(session)


class Watching:
    """A policy that evicts all that the view says may leave, and the latest message where it is told so."""

    def plan(self, view: View) -> Sequence[Move]:
        chosen = view.free(view.pages, view.use)
        assert all(page not in view.pins for page in chosen)
        assert view.task_page in view.held()
        assert not view.is_movable(view.page(view.task_page))
        return [Evict(chosen)] if chosen else []


def test_the_view_says_that_it_is_held() -> None:
    session = opened(policy=Watching())
    session.append(user(FIRST), assistant("ok"), user(SECOND))
    for number in range(5):
        assert SECOND in step(session, number, 37)
    assert session.stats().refused_moves == 0


def test_results_and_pictures_are_no_request() -> None:
    """Anthropic's results come in user messages; so may a picture alone."""
    session = opened(500)
    session.append({"role": "user", "content": [{"type": "text", "text": FIRST}]}, assistant("ok"), user(SECOND))
    for number in range(12):
        use = {"type": "tool_use", "id": f"t{number}", "name": "read", "input": {}}
        session.append({"role": "assistant", "content": [use]})
        session.append(
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": f"t{number}", "content": "out " * 90}]}
        )
        assert SECOND in shown(session)
    session.append(user([{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}]))
    assert session.window.request == [3]
    validate_messages(list(session.render("messages")))
    check_laws(session)


def test_of_text_and_picture_the_text_stays() -> None:
    session = opened(1000)
    picture = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}"}}
    session.append(user(FIRST), user([{"type": "text", "text": SECOND}, picture, {"type": "text", "text": "(see above)"}]))
    for number in range(10):
        prompt = step(session, number, 37)
        assert SECOND in prompt
        assert "(see above)" in prompt
    assert session.window.request == [2, 4]
    check_laws(session)


def test_what_is_marked_as_a_tools_is_no_request() -> None:
    session = opened(1000)
    session.append(user(FIRST), assistant("ok"), user(SECOND))
    for number in range(10):
        observed = Part(kind=Kind.TEXT, text=f"observed {number} " + "w" * 400)
        session.append(assistant(f"thought {number}"), Message(role=Role.USER, parts=(observed,), trust=Trust.TOOL))
        assert SECOND in shown(session)
    assert session.edits.view().task == SECOND
    check_laws(session)


def test_of_many_parts_the_short_ones_stay_whole() -> None:
    session = opened(2000)
    session.append(user(FIRST), user([{"type": "text", "text": SECOND}, {"type": "text", "text": "attachment line\n" * 400}]))
    for number in range(10):
        prompt = step(session, number, 37)
        assert SECOND in prompt
    assert "[p3 in part:]" in prompt
    check_laws(session)


def test_it_yields_before_a_pin_does_and_comes_back() -> None:
    session = opened(1000)
    session.append(user(FIRST), assistant("a " * 700), user(SECOND * 8))
    session.append(assistant("b " * 900))
    session.pin("p4")
    session.pin("p1")
    assert session.prompts.use <= 1000
    session.append(assistant("more"))
    assert "p4" not in [line["content"] for line in session.render()]
    session.pin("p2") if session.window.cost(2) + 500 < 900 else None
    session.unpin("p4")
    session.append(assistant("and more"))
    assert SECOND[:40] in shown(session)
    check_laws(session)


def test_pins_may_take_all_but_a_handle() -> None:
    session = opened(400)
    session.append(user("t"), assistant("x" * 1240), user(SECOND * 3), assistant("well"))
    session.pin("p2")
    assert session.prompts.use <= 400
    session.append(assistant("next"), user("u" * 300))
    assert session.prompts.use <= 400
    session.unpin("p2")
    session.append(assistant("then"))
    assert session.render().tokens <= 400
    assert "uuuu" in shown(session)
    check_laws(session)


def test_a_person_may_forget_or_retire_it() -> None:
    for verb in ("forget", "retire"):
        session = opened()
        session.append(user(FIRST), assistant("ok"), user(SECOND), assistant("well"))
        if verb == "forget":
            session.forget("p3")
        else:
            session.edits.apply(Retire((3,)))
        assert SECOND not in shown(session)
        for number in range(10):
            step(session, number, 37)
        check_laws(session)


class Retiring:
    def plan(self, view: View) -> Sequence[Move]:
        return [Retire((view.task_page,))] if view.cause is Cause.ADMIT and view.task_page > 1 else []


@pytest.mark.parametrize("name", ["Kernel", "User"])
def test_no_policy_passes_for_the_kernel_or_a_person(name: str) -> None:
    with pytest.raises(SpecError, match="rename it"):
        opened(policy=type(name, (Retiring,), {})())


def test_a_policy_may_not_retire_it() -> None:
    session = opened(policy=Retiring())
    session.append(user(FIRST), assistant("ok"), user(SECOND))
    assert SECOND in shown(session)
    assert session.stats().refused_moves == 1


def test_in_a_smaller_window_head_and_tail_are_left(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    order = "Head of it.\n" + "\n".join(f"point {number}" for number in range(300)) + "\nEnd of it."
    with kilburn.open(path, window=8000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user(FIRST), assistant("ok"), user(order), assistant("well"))
        assert session.window.request_shown() == [3]
        session.edits.resize(Budget(2000))
        assert "Head of it." in shown(session)
        assert "End of it." in shown(session)
        session.append(*(assistant("on and on " * 60) for _ in range(9)))
        assert "End of it." in shown(session)
        assert session.window.cost(session.window.request_shown()[0]) <= 500
        session.edits.resize(Budget(8000))
        session.edits.apply(Load((3,)))
        check_laws(session)
    with kilburn.open(path, window=1200, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        assert "Head of it." in shown(session)
        assert session.window.cost(session.window.request_shown()[0]) <= 300
        check_laws(session)


class Idle:
    """A policy that leaves all to the kernel."""

    def plan(self, view: View) -> Sequence[Move]:
        return []


def test_the_kernel_takes_tool_output_before_the_users_words() -> None:
    session = opened(2000, Idle())
    session.append(user(FIRST))
    for number in range(12):
        session.append(user(f"Standing order {number}: never touch module {number}."))
        step(session, number, 37)
    prompt = shown(session)
    assert all(f"Standing order {number}:" in prompt for number in range(12))
    assert "p3-p" in prompt or "p4" in prompt
    for number in range(12, 80):
        session.append(user(f"Standing order {number}: never touch module {number}. " + "w" * 80))
        step(session, number, 37)
    words = [page for page in session.edits.view().pages if page.role == "user"]
    assert sum(page.tokens for page in words) <= 1000, "and not more than their share"
    check_laws(session)

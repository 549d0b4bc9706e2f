"""What an open tool loop needs stands, where it fits: its thinking, its calls, and the request that it works on."""

from __future__ import annotations

import json
from typing import Any

import pytest

import kilburn
from kernel.talk import assistant, user
from kilburn.kernel.session import Session
from kilburn.testing import check_laws

THINKING = {"type": "thinking", "thinking": "I think hard", "signature": "sig"}


def opened(window: int, policy: str = "lru") -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")


def words(tokens: float) -> str:
    return "word " * int(tokens * 4 / 5)


def use(name: str, tokens: float = 0) -> dict[str, Any]:
    return {"type": "tool_use", "id": name, "name": "read", "input": {"c": words(tokens)}}


def result(name: str, text: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "tool_result", "tool_use_id": name, "content": text}]}


def last_said(session: Session) -> list[dict[str, Any]]:
    said = [message["content"] for message in session.render("messages") if message["role"] == "assistant"]
    return said[-1] if isinstance(said[-1], list) else []


@pytest.mark.parametrize("policy", ["lru", "mask", "hybrid"])
@pytest.mark.parametrize(("window", "old", "call", "late"), [(8000, 0.5, 0.6, 0.5), (1000, 0.9, 0.4, 0.5), (1000, 0.2, 0.5, 0.9)])
def test_a_late_result_leaves_an_open_loop_its_thinking(policy: str, window: int, old: float, call: float, late: float) -> None:
    session = opened(window, policy)
    session.append(user("the task"))
    session.append({"role": "assistant", "content": [{**THINKING, "thinking": "old"}, use("a", window * old), use("b")]})
    session.append(result("a", "ok"))
    for number in range(12):
        session.append(user(f"next {number} " + words(window / 10)), assistant("ok " + words(window / 10)))
    session.append(user("LATEST please"))
    loop = [THINKING, {"type": "text", "text": "reading"}, use("n1", window * call), use("n2")]
    session.append({"role": "assistant", "content": loop}, result("n1", "n1 says"))
    session.append(result("b", "late " + words(window * late)))
    assert last_said(session) == loop
    assert "LATEST please" in json.dumps(session.render("messages"))
    assert session.recall(f"p{session.window.last}").startswith("late")
    check_laws(session)


@pytest.mark.parametrize("window", [300, 400, 600])
def test_thinking_leaves_an_open_loop_only_where_nothing_else_makes_room(window: int) -> None:
    """With every size of the thinking and of the call: where it went, it would not have fitted."""
    for size in range(10, 100, 15):
        for call in range(5, 100 - size, 15):
            session = opened(window)
            session.append(user("the task"), assistant("ok " + words(window * 0.4)), user("LATEST " + words(window * 0.3)))
            thinking = {**THINKING, "thinking": words(window * size / 100)}
            session.append({"role": "assistant", "content": [thinking, use("n1", window * call / 100), use("n2")]})
            session.append(result("n1", "says " + words(window * 0.5)))
            prompt = session.render("messages")
            if not any(block["type"] == "thinking" for block in last_said(session)):
                free = window - prompt.tokens
                assert session.window.cost(4) > free, (size, call, free)
            check_laws(session)


@pytest.mark.parametrize("blank", ["", "  \n ", [{"type": "text", "text": " "}]])
def test_a_blank_message_is_no_request(blank: Any) -> None:
    session = opened(1000, "fifo")
    session.append(user("the task"), assistant("ok"), user("Write the notes for KX-771."), user(blank))
    for _ in range(6):
        session.append(assistant(words(300)))
        assert "KX-771" in json.dumps(session.render())
    assert session.window.request == [3]
    session.append(user(" " * 2000 + "And the English ones?"))
    assert session.window.request == [session.window.last]
    check_laws(session)


@pytest.mark.parametrize("size", [40, 80, 150, 300])
@pytest.mark.parametrize("calls", [60, 100, 130, 200])
@pytest.mark.parametrize("thinks", [False, True])
def test_in_a_small_window_an_excerpt_of_the_request_stays_beside_open_calls(size: int, calls: int, thinks: bool) -> None:
    session = opened(300)
    session.append(user("the task " + words(60)), assistant("ok"), user("LATEST " + words(size)))
    content = [THINKING] * thinks + [use("n1", calls), use("n2", calls)]
    session.append({"role": "assistant", "content": content})
    assert "LATEST" in json.dumps(session.render("messages"))
    session.append(result("n1", "says " + words(200)))
    assert "LATEST" in json.dumps(session.render("messages"))
    check_laws(session)

"""Ids of calls that repeat in every turn, as some models give them: appended, reopened, and answered late."""

from __future__ import annotations

from pathlib import Path

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import DuplicateCall, OrphanResult
from kilburn.testing import check_laws
from kilburn.wire.validity import validate_chat


def turn(number: int) -> list[dict[str, object]]:
    calls = [call_of("call_0", path=f"{number}.py"), call_of("call_1", path=f"{number}.txt")]
    return [user(f"Turn {number}."), assistant(None, *calls), tool("call_1", f"text {number}"), tool("call_0", f"code {number}")]


def test_each_result_belongs_to_the_call_of_its_turn(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    for first, last in ((0, 3), (3, 6)):
        with kilburn.open(path, window=100_000, policy="lru", tokenizer="chars/4") as store:
            session = store.session("a")
            for number in range(first, last):
                session.append(*turn(number))
            messages = list(session.render())
            validate_chat(messages)
            check_laws(session)
    results = {message["tool_call_id"]: message["content"] for message in messages if message["role"] == "tool"}
    for message in messages:
        for call in message.get("tool_calls", ()):
            kind = "code" if ".py" in call["function"]["arguments"] else "text"
            assert results[call["id"]].startswith(kind)
            assert results[call["id"]].split()[1] in call["function"]["arguments"]
    assert len(results) == 12


def test_a_late_result_belongs_to_the_call_that_waits() -> None:
    session = kilburn.open(":memory:", window=100_000, policy="lru", tokenizer="chars/4").session("a")
    session.append(*turn(0), user("And now?"), assistant(None, call_of("call_0", path="late.py")))
    session.append(tool("call_0", "late"))
    assert session.render()[-1]["content"] == "late"
    with pytest.raises(OrphanResult):
        session.append(tool("call_0", "once more"))
    with pytest.raises(DuplicateCall):
        session.append(assistant(None, call_of("twice"), call_of("twice")))

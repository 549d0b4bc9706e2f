"""One compaction on demand, whatever the process's policy is: swapped in whole, or nothing changed."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn.agents.compaction import compact
from kilburn.budget import Budget
from kilburn.errors import LawBroken, Unavailable
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.message import Kind
from kilburn.model import Request
from kilburn.testing import FakeClock, Memory, Scripted, check_laws

GOOD = "The parser drops the last line; decided to keep the cache; next: run the tests."


def opened() -> Process:
    process = Hierarchy(Memory(), Budget(8000), "fifo", tokenizer="chars/4", clock=FakeClock()).process("a")
    process.append({"role": "system", "content": "Never touch the lock file."}, user("Fix the parser."))
    for number in range(6):
        process.append(assistant(f"step {number}", call_of(f"c{number}")), tool(f"c{number}", f"line {number} " * 40))
    return process


def outcomes(process: Process) -> list[str]:
    return [event.data["outcome"] for event in process.events() if event.act is Act.COMPACT]


def test_the_window_is_summarised_now() -> None:
    process, model = opened(), Scripted([GOOD])
    done = compact(process, model, instructions="Only the facts.")
    assert (done.outcome, done.address) == ("done", "f1")
    assert done.freed > 300
    assert str(model.requests[0].messages[-1]["content"]).endswith("Only the facts.")
    assert GOOD in str(process.render())
    assert "line 5 " in str(process.render())
    assert process.recall("p5").startswith("line 0 ")
    check_laws(process)


def test_the_second_one_replaces_the_first() -> None:
    process = opened()
    compact(process, Scripted([GOOD]))
    for number in range(6, 12):
        process.append(assistant(f"step {number}", call_of(f"c{number}")), tool(f"c{number}", f"line {number} " * 40))
    model = Scripted(["Second. " + GOOD])
    assert compact(process, model).outcome == "done"
    assert GOOD not in str(model.requests[0].messages)
    assert [page.kind for page in process.window.resident()].count(Kind.FOLD) == 1


@pytest.mark.parametrize(("said", "outcome"), [("", "empty"), (Unavailable("gone"), "failed"), (ZeroDivisionError(), "failed")])
def test_failure_changes_nothing(said: Any, outcome: str) -> None:
    process = opened()
    before = process.render()
    assert compact(process, Scripted([said])).outcome == outcome
    assert process.render() == before
    assert outcomes(process) == [outcome]


def test_nothing_to_summarise_is_said() -> None:
    process = Hierarchy(Memory(), Budget(8000), "fifo", tokenizer="chars/4").process("a")
    process.append(user("Hello."))
    assert compact(process, Scripted([])).outcome == "no progress"


def test_a_call_without_its_result_is_refused() -> None:
    process = opened()
    process.append(assistant(None, call_of("late")))
    with pytest.raises(LawBroken, match="without a result"):
        compact(process, Scripted([GOOD]))
    assert outcomes(process) == ["rejected"]


def test_turns_that_come_meanwhile_stay_and_two_at_once_leave_one_summary() -> None:
    process = opened()
    speaking, speak = threading.Event(), threading.Event()

    def slowly(request: Request) -> str:
        speaking.set()
        assert speak.wait(600)
        return GOOD

    first: list[str] = []
    thread = threading.Thread(target=lambda: first.append(compact(process, Scripted([slowly])).outcome))
    thread.start()
    assert speaking.wait(600)
    process.append(assistant("meanwhile one"), user("meanwhile two"))
    assert compact(process, Scripted(["Quick. " + GOOD])).outcome == "done"
    speak.set()
    thread.join(600)
    assert not thread.is_alive()
    assert first[0] in ("done", "no progress", "illegal")
    said = str(process.render())
    assert "meanwhile two" in said
    assert [page.kind for page in process.window.resident()].count(Kind.FOLD) == 1
    check_laws(process)


def test_without_a_model_the_lines_are_verbatim() -> None:
    process = opened()
    done = compact(process, None)
    assert done.outcome == "done"
    kept = [line for line in process.recall(done.address).splitlines()[1:] if "line " in line]
    assert kept
    assert all(any(line in text for text in (f"line {number} " * 40 for number in range(6))) for line in kept)

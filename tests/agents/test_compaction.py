"""One compaction on demand, whatever the process's policy is: swapped in whole, or nothing changed."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn.agents.compaction import compact, compact_at_provider
from kilburn.agents.loop import Agent
from kilburn.budget import Budget
from kilburn.errors import Forgotten, LawBroken, Unavailable
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.message import Kind, Message
from kilburn.model import Request
from kilburn.testing import FakeClock, Memory, Scripted, check_laws
from kilburn.wire.form import parse

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


def block(words: str, *beside: dict[str, Any]) -> Message:
    summary = {"type": "compaction", "content": words, "encrypted_content": words}
    return parse({"role": "assistant", "content": [summary, *beside]})[0]


def test_a_providers_summary_goes_with_each_page_that_it_was_made_from() -> None:
    for page in ("p2", "p5", "p20"):
        process = opened()
        done = compact_at_provider(process, Scripted([block("line 0, line 5")], form="messages"))
        assert (done.outcome, done.address) == ("done", "p21")
        assert "line 0, line 5" in str(process.render("messages"))
        assert process.forget(page)[-1] == "p21"
        assert "line 0, line 5" not in str(process.render("messages"))
        assert "line 1 " in process.recall("p8"), "what it stood for is there"
        check_laws(process)


def test_the_next_summary_of_a_provider_is_made_from_the_one_before() -> None:
    process = opened()
    compact_at_provider(process, Scripted([block("first")], form="messages"))
    process.append(user("And now?"), assistant("Now this."))
    compact_at_provider(process, Scripted([block("second")], form="messages"))
    assert {"p21", "p24"} <= set(process.forget("p5"))


def test_a_providers_summary_of_a_fold_goes_with_what_the_fold_is_from() -> None:
    process = opened()
    assert compact(process, Scripted([GOOD])).outcome == "done"
    compact_at_provider(process, Scripted([block("first")], form="messages"))
    assert "p21" in process.forget("p5")


def test_a_providers_summary_of_what_was_forgotten_meanwhile_is_not_kept() -> None:
    process = opened()

    def forget(_: Request) -> Message:
        process.forget("p5")
        return block("line 0")

    done = compact_at_provider(process, Scripted([forget], form="messages"))
    assert (done.outcome, done.address) == ("failed", "")
    assert "line 0" not in str(process.messages())
    with pytest.raises(Forgotten):
        process.append(msgspec.structs.replace(block("line 0"), sources=(5,)))


def test_a_compaction_within_a_run_goes_with_what_the_agent_was_shown() -> None:
    process = opened()
    whole = block("line 0", {"type": "text", "text": "It is done."})
    Agent(Scripted([whole], form="messages"), [], process).run("Go on.")
    assert process.forget("p5") == ["p5", "p22"]
    assert process.recall("p23") == "It is done."

"""One compaction on demand, whatever the session's policy is: swapped in whole, or nothing changed."""

from __future__ import annotations

import threading
from typing import Any

import msgspec
import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn import Store
from kilburn.agents.by_hand import POLICY, decider
from kilburn.agents.compaction import compact, compact_at_provider
from kilburn.agents.loop import Agent
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten, LawBroken, Unavailable
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message
from kilburn.model import Request
from kilburn.testing import FakeClock, Scripted, check_laws
from kilburn.wire.form import parse

GOOD = "The parser drops the last line; decided to keep the cache; next: run the tests."


def opened() -> Session:
    session = Store(Sqlite(":memory:"), Budget(8000), "fifo", tokenizer="chars/4", clock=FakeClock()).session("a")
    session.append({"role": "system", "content": "Never touch the lock file."}, user("Fix the parser."))
    for number in range(6):
        session.append(assistant(f"step {number}", call_of(f"c{number}")), tool(f"c{number}", f"line {number} " * 40))
    return session


def outcomes(session: Session) -> list[str]:
    return [event.data["outcome"] for event in session.ledger.events() if event.act is Act.COMPACT]


def test_the_window_is_summarised_now() -> None:
    session, model = opened(), Scripted([GOOD])
    done = compact(session, model, instructions="Only the facts.")
    assert (done.outcome, done.address) == ("done", "f1")
    assert done.freed > 300
    assert str(model.requests[0].messages[-1]["content"]).endswith("Only the facts.")
    assert GOOD in str(session.render())
    assert "line 5 " in str(session.render())
    assert session.recall("p5").startswith("line 0 ")
    check_laws(session)


def test_the_second_one_replaces_the_first() -> None:
    session = opened()
    compact(session, Scripted([GOOD]))
    for number in range(6, 12):
        session.append(assistant(f"step {number}", call_of(f"c{number}")), tool(f"c{number}", f"line {number} " * 40))
    model = Scripted(["Second. " + GOOD])
    assert compact(session, model).outcome == "done"
    assert GOOD not in str(model.requests[0].messages)
    assert [page.kind for page in session.window.resident()].count(Kind.FOLD) == 1


@pytest.mark.parametrize(("said", "outcome"), [("", "empty"), (Unavailable("gone"), "failed"), (ZeroDivisionError(), "failed")])
def test_failure_changes_nothing(said: Any, outcome: str) -> None:
    session = opened()
    before = session.render()
    assert compact(session, Scripted([said])).outcome == outcome
    assert session.render() == before
    assert outcomes(session) == [outcome]


def test_nothing_to_summarise_is_said() -> None:
    session = Store(Sqlite(":memory:"), Budget(8000), "fifo", tokenizer="chars/4").session("a")
    session.append(user("Hello."))
    assert compact(session, Scripted([])).outcome == "no progress"


def test_a_call_without_its_result_is_refused() -> None:
    session = opened()
    session.append(assistant(None, call_of("late")))
    with pytest.raises(LawBroken, match="without a result"):
        compact(session, Scripted([GOOD]))
    assert outcomes(session) == ["rejected"]


def test_turns_that_come_meanwhile_stay_and_two_at_once_leave_one_summary() -> None:
    session = opened()
    speaking, speak = threading.Event(), threading.Event()

    def slowly(request: Request) -> str:
        speaking.set()
        assert speak.wait(600)
        return GOOD

    first: list[str] = []
    thread = threading.Thread(target=lambda: first.append(compact(session, Scripted([slowly])).outcome))
    thread.start()
    assert speaking.wait(600)
    session.append(assistant("meanwhile one"), user("meanwhile two"))
    assert compact(session, Scripted(["Quick. " + GOOD])).outcome == "done"
    speak.set()
    thread.join(600)
    assert not thread.is_alive()
    assert first[0] in ("done", "no progress", "illegal")
    said = str(session.render())
    assert "meanwhile two" in said
    assert [page.kind for page in session.window.resident()].count(Kind.FOLD) == 1
    check_laws(session)


def test_without_a_model_the_lines_are_verbatim() -> None:
    session = opened()
    done = compact(session, None)
    assert done.outcome == "done"
    kept = [line for line in session.recall(done.address).splitlines()[1:] if "line " in line]
    assert kept
    assert all(any(line in text for text in (f"line {number} " * 40 for number in range(6))) for line in kept)


def block(words: str, *beside: dict[str, Any]) -> Message:
    summary = {"type": "compaction", "content": words, "encrypted_content": words}
    return parse({"role": "assistant", "content": [summary, *beside]})[0]


def test_a_providers_summary_goes_with_each_page_that_it_was_made_from() -> None:
    for page in ("p2", "p5", "p20"):
        session = opened()
        done = compact_at_provider(session, Scripted([block("line 0, line 5")], form="messages"))
        assert (done.outcome, done.address) == ("done", "p21")
        assert "line 0, line 5" in str(session.render("messages"))
        assert session.forget(page)[-1] == "p21"
        assert "line 0, line 5" not in str(session.render("messages"))
        assert "line 1 " in session.recall("p8"), "what it stood for is there"
        check_laws(session)


def test_the_policy_that_decided_last_is_found_behind_changes_by_hand() -> None:
    policy = "hybrid(low=300, tail=100)"
    session = Store(Sqlite(":memory:"), Budget(600), policy, tokenizer="chars/4", clock=FakeClock()).session("a")
    assert decider(session.ledger.receipts()) == POLICY
    for number in range(20):
        session.append(user(f"{number}: " + "More was said. " * 8))
    session.edits.evict(session.window.resident()[2].address)
    assert compact(session, None, keep=1).outcome == "done"
    assert [receipt.policy for receipt in session.ledger.receipts()[-2:]] == ["user", "compact on demand"]
    assert decider(session.ledger.receipts()) == policy


def test_what_a_providers_summary_freed_counts_once() -> None:
    session = opened()
    before = session.prompts.use
    done = compact_at_provider(session, Scripted([block("line 0, line 5")], form="messages"))
    grown = session.window.cost(session.window.last)
    receipts = session.ledger.receipts()
    assert [(receipt.policy, receipt.freed) for receipt in receipts] == [("user", done.freed), ("compact on demand", 0)]
    assert session.prompts.use == before + grown - done.freed


def test_the_next_summary_of_a_provider_is_made_from_the_one_before() -> None:
    session = opened()
    compact_at_provider(session, Scripted([block("first")], form="messages"))
    session.append(user("And now?"), assistant("Now this."))
    compact_at_provider(session, Scripted([block("second")], form="messages"))
    assert {"p21", "p24"} <= set(session.forget("p5"))


def test_a_providers_summary_of_a_fold_goes_with_what_the_fold_is_from() -> None:
    session = opened()
    assert compact(session, Scripted([GOOD])).outcome == "done"
    compact_at_provider(session, Scripted([block("first")], form="messages"))
    assert "p21" in session.forget("p5")


def test_a_providers_summary_of_what_was_forgotten_meanwhile_is_not_kept() -> None:
    session = opened()

    def forget(_: Request) -> Message:
        session.forget("p5")
        return block("line 0")

    done = compact_at_provider(session, Scripted([forget], form="messages"))
    assert (done.outcome, done.address) == ("failed", "")
    assert "line 0" not in str(session.contents.messages())
    with pytest.raises(Forgotten):
        session.append(msgspec.structs.replace(block("line 0"), sources=(5,)))


def test_a_compaction_within_a_run_goes_with_what_the_agent_was_shown() -> None:
    session = opened()
    whole = block("line 0", {"type": "text", "text": "It is done."})
    Agent(Scripted([whole], form="messages"), [], session).run("Go on.")
    assert session.forget("p5") == ["p5", "p22"]
    assert session.recall("p23") == "It is done."


def test_a_compaction_within_a_run_stays_in_the_prompts_that_follow() -> None:
    session = opened()
    model = Scripted([block("line 0 to 5", {"type": "text", "text": "It is done."}), *["Noted."] * 30], form="messages")
    agent = Agent(model, [], session)
    for number in range(31):
        agent.run(f"Go on with {number}. " + "It matters. " * 100)
    assert session.window.last > len(session.window.resident())
    assert all("line 0 to 5" in str(request.messages) for request in model.requests[1:])

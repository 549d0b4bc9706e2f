"""A provider's newest compaction stays in the prompt: it is all that the provider knows of what was before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message
from kilburn.move import Evict, Move
from kilburn.page import Place
from kilburn.policy import View
from kilburn.testing.laws import check_laws
from kilburn.wire.form import parse
from kilburn.wire.responses import read, together
from tokens.test_media import document, pdf

FORMS = {
    "messages": {"type": "compaction", "content": "They fixed the parser. " * 10, "encrypted_content": "x" * 40},
    "responses": {"type": "compaction", "encrypted_content": "gAAAAB" + "k3Jx" * 60},
}
GOING_ON = {
    "messages": {"type": "text", "text": "Going on."},
    "responses": {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Going on."}]},
}
POLICIES = ["cost", "fifo", "hybrid", "importance", "lru", "summarize", "tiered"]


def opened(policy: Any, path: Path | str = ":memory:", window: int = 4000) -> Session:
    store = kilburn.open(str(path), window=window, policy=policy, tokenizer="chars/4", embedder=None)
    return store.session("s")


def summary(form: str, number: int = 1, size: int = 1) -> dict[str, Any]:
    """A compaction, each with bytes of its own."""
    return {key: f"{number} {text}" * size if key != "type" else text for key, text in FORMS[form].items()}


def said(form: str, *items: dict[str, Any]) -> Message:
    """What the assistant says, as the form's door reads it."""
    if form == "messages":
        return parse(assistant(list(items)))[0]
    return together(parse([read(item) for item in items]))[0]


def talk(session: Session, turns: int, first: int = 0) -> None:
    for turn in range(first, first + turns):
        session.append(
            user(f"Question {turn}. " + "And what follows? " * 15),
            assistant(None, call_of(f"c{turn}")),
            tool(f"c{turn}", f"Line {turn} of the file. " * 20),
            assistant(f"Answer {turn}. " + "It follows from that. " * 15),
        )


def shown(session: Session, block: dict[str, Any], form: str) -> bool:
    return json.dumps(block) in json.dumps(list(session.render(form)))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("form", FORMS)
def test_the_newest_stays_until_a_newer_one_replaces_it(policy: str, form: str) -> None:
    session = opened(policy)
    talk(session, 2)
    first, second = summary(form, 1), summary(form, 2)
    session.append(said(form, first, GOING_ON[form]))
    for turn in range(2, 22):
        talk(session, 1, turn)
        assert shown(session, first, form), turn
    assert session.window.at(3) is not Place.IN
    session.append(said(form, second, GOING_ON[form]))
    for turn in range(22, 42):
        talk(session, 1, turn)
        assert shown(session, second, form), turn
    assert not shown(session, first, form)
    check_laws(session)


@pytest.mark.parametrize("form", FORMS)
def test_it_stays_in_a_reopened_session_and_in_a_branch(form: str, tmp_path: Path) -> None:
    block = summary(form)
    session = opened("fifo", tmp_path / "a.db")
    talk(session, 2)
    session.append(said(form, block))
    talk(session, 10, 2)
    session.store.close()
    session = opened("fifo", tmp_path / "a.db")
    # Many events after a checkpoint, and few.
    for first in (12, 50):
        branch = session.fork(f"branch {first}")
        for each in (session, branch):
            talk(each, 10, first)
            assert shown(each, block, form)
            check_laws(each)
        session.store.close()
        session = opened("fifo", tmp_path / "a.db")
    talk(session, 10, 70)
    assert shown(session, block, form)


@pytest.mark.parametrize(
    "block",
    [
        {"type": "compaction", "content": None},
        {"type": "compaction_trigger"},
        document(pdf(1), title="compaction by the provider"),
    ],
)
def test_what_is_no_compaction_leaves_like_any_page(block: dict[str, Any]) -> None:
    session = opened("fifo")
    session.append(user("Hello."), assistant([block]))
    talk(session, 20)
    assert session.window.compaction is None
    assert not shown(session, block, "messages")


class Presumptuous:
    """Evicts all it sees, whatever is pinned."""

    def plan(self, view: View) -> list[Move]:
        return [Evict((page.id,)) for page in view.pages if page.kind is Kind.OPAQUE] if view.excess else []


def test_no_policy_can_move_it_and_a_person_can() -> None:
    session = opened(Presumptuous())
    session.append(user("Hello."), said("responses", summary("responses")))
    talk(session, 20)
    compaction = session.window.compaction
    assert compaction is not None
    assert any("is the provider's newest compaction" in event.why for event in session.ledger.events())
    assert shown(session, summary("responses"), "responses")
    session.edits.evict(f"p{compaction}")
    talk(session, 3, 20)
    assert not shown(session, summary("responses"), "responses")
    check_laws(session)


def test_one_that_leaves_no_room_leaves_before_anything_that_fits() -> None:
    session = opened("fifo")
    session.append(user("The task."))
    talk(session, 3)
    before = [page.id for page in session.window.resident()]
    huge = summary("messages", size=60)
    session.append(assistant([huge]))
    assert not shown(session, huge, "messages")
    assert [page.id for page in session.window.resident()][: len(before)] == before
    check_laws(session)


def test_one_that_was_forgotten_gives_its_place_to_the_one_before(tmp_path: Path) -> None:
    session = opened("fifo", tmp_path / "a.db")
    session.append(
        user("Hello."), said("responses", summary("responses", 1)), user("On."), said("responses", summary("responses", 2))
    )
    session.forget("p4")
    for each in (session, opened("fifo", tmp_path / "a.db")):
        assert each.window.compaction == 2


def test_pins_and_handles_stand_behind_it_because_the_provider_ignores_what_is_before_it() -> None:
    session = opened("fifo")
    session.append({"role": "system", "content": "Be brief."}, user("The task: fix the parser."))
    talk(session, 3)
    session.pin("p5")
    block = summary("messages")
    session.append(said("messages", block, GOING_ON["messages"]))
    talk(session, 12, 3)
    prompt = session.render("messages")
    contents = [json.dumps(message) for message in prompt]
    [at] = [at for at, text in enumerate(contents) if json.dumps(block) in text]
    before, behind = "".join(contents[:at]), "".join(contents[at:])
    assert prompt.system == "Be brief."
    assert "out: " not in before
    assert "The task: fix the parser." not in before
    for words in ("The task: fix the parser.", "Line 0 of the file.", "out: "):
        assert words in behind
    results = [block["tool_use_id"] for message in prompt for block in message["content"] if "tool_use_id" in block]
    assert len(results) == len(set(results))
    assert list(session.render("messages")) == list(prompt)
    check_laws(session)

"""The prompt as it was after a turn: to the byte, whatever the policy has moved since, and without what is forgotten by now."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

import kilburn
from kernel.talk import chat, meddle, user
from kilburn.cli.shipments import shipments
from kilburn.errors import Forgotten
from kilburn.event import Act
from kilburn.message import Kind, Message, Part, Role
from kilburn.testing import check_laws


def opened(path: Path, policy: str = "cost", window: int = 1500) -> kilburn.Store:
    return kilburn.open(str(path / "a.db"), window=window, policy=policy, tokenizer="chars/4", embedder=None)


@pytest.mark.parametrize("policy", ["cost", "fifo", "mask"])
def test_it_is_what_was_rendered_then_and_leaves_no_trace(tmp_path: Path, policy: str) -> None:
    with opened(tmp_path, policy) as store:
        session, then, moved = store.session("a"), dict[int, tuple[str, int]](), 0
        for message in chat(3, 25):
            session.append(message)
            then[session.window.turn] = json.dumps(session.render()), session.ledger.head
            now = json.dumps(session.render()), dict(session.window.states)
            for turn in [*then][-4::3]:
                prompt, head = then[turn]
                moved += any(event.act in (Act.FOLD, Act.EVICT) for event in session.ledger.events(head))
                assert json.dumps(session.prompts.render_from(turn)) == prompt
            assert (json.dumps(session.render()), session.window.states) == now
        assert moved
        check_laws(session)


def test_what_is_forgotten_or_retired_since_is_not_in_it(tmp_path: Path) -> None:
    with opened(tmp_path, "fifo", 20_000) as store:
        session = store.session("a")
        for number in range(6):
            session.append(user(f"the word {number} is said"))
        session.forget("p2")
        session.edits.take_back([3])
        session.append(user("and now?"))
        said = json.dumps(session.prompts.render_from(4))
        assert [f"the word {number}" in said for number in range(6)] == [True, False, False, True, False, False]
        assert json.dumps(session.prompts.render_from(4, [])) == said
        check_laws(session)


def test_whatever_was_done_by_hand_since_it_can_be_made(tmp_path: Path) -> None:
    chance = random.Random(1)
    with opened(tmp_path) as store:
        session = store.session("a")
        for message in chat(5, 20):
            session.append(message)
            meddle(session, chance)
            before = json.dumps(session.render()), dict(session.window.states), set(session.window.pins)
            session.prompts.render_from(max(1, session.window.turn - chance.randrange(4)))
            assert (json.dumps(session.render()), session.window.states, session.window.pins) == before
        check_laws(session)


def test_what_was_shipped_is_told_as_of_then(tmp_path: Path) -> None:
    with opened(tmp_path, "fifo", 20_000) as store:
        session = store.session("a")
        session.append(user("which word is it?"))
        session.append(user("it is a long one. " * 12))
        session.render(request={"id": "first"})
        session.append(user("say it"))
        session.edits.evict("p2")
        session.prompts.render_from(2, request={"id": "again"})
        session.ledger.flush()

        def told(request: str) -> Any:
            [found] = shipments(store.backend, store.counter, request)
            return found.turn, found.pages, found.out, found.tokens

        assert 2 not in session.window.shown
        assert told("again") == told("first") == (2, ("p1-p2",), (), told("first")[3])


def test_what_a_message_was_made_from_may_have_come_since(tmp_path: Path) -> None:
    with opened(tmp_path, "fifo", 20_000) as store:
        session = store.session("a")
        session.append(user("the first word"))
        turn = session.window.turn
        session.append(user("the second word"), {"role": "assistant", "content": "a third"})
        brought = Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="p2 says: the second word"),), sources=(2,))
        said = json.dumps(session.prompts.render_from(turn, [brought]))
        assert "p2 says" in said
        assert "a third" not in said
        session.forget("p2")
        with pytest.raises(Forgotten):
            session.prompts.render_from(turn, [brought])
        check_laws(session)

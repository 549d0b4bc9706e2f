"""The rivals keep what they say they keep, and are not worse than they must be."""

from __future__ import annotations

from pathlib import Path

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.demo.answers import answer
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.library import Library
from kilburn.demo.questions import questions
from kilburn.demo.rivals import Transcript, summarised, truncated

ALL = 10**9


def transcript(root: Path) -> tuple[Transcript, dict[str, int], kilburn.Store]:
    store = kilburn.open(":memory:", window=8000, policy="lru")
    session = store.session("s")
    library = Library(root)
    Agent(Explorer(), library.tools(), session, limits=Limits(steps=None, reply=0)).run(TASK)
    said = [(page, session.contents.text(page.id)) for page, _ in session.contents.pages() if page.id > 0]
    return said, library.covered, store


def test_with_room_for_everything_both_answer_everything(shared_tree: Path) -> None:
    said, covered, store = transcript(shared_tree)
    with store:
        asked = questions(shared_tree, covered, number=30, seed=2)
        for name, keep in (("truncation", truncated), ("summarisation", summarised)):
            memory = store.session(name)
            memory.append(*({"role": "user", "content": text} for text in keep(said, ALL, store.counter.count)))
            assert [question for question in asked if answer(question.question, memory).text != question.expected] == []


def test_truncation_keeps_the_end_within_the_window(shared_tree: Path) -> None:
    said, _, store = transcript(shared_tree)
    with store:
        for capacity in (50, 500, 5000):
            kept = "\n".join(truncated(said, capacity, store.counter.count))
            assert store.counter.count(kept) <= capacity
            assert "\n".join(text for _, text in said).endswith(kept)


def test_a_rolling_summary_stays_within_the_window_and_keeps_the_end(shared_tree: Path) -> None:
    said, _, store = transcript(shared_tree)
    with store:
        for capacity in (1000, 4000):
            seen: list[int] = []
            kept = summarised(said, capacity, store.counter.count, seen.append)
            assert store.counter.count("\n".join(kept)) <= capacity
            assert said[-1][1] == kept[-1]
            assert seen == [page.id for page, _ in said]
            assert not any(text.startswith(kept[0]) for _, text in said)

"""The rivals keep what they say they keep, and are not worse than they must be."""

from __future__ import annotations

from pathlib import Path

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.demo.answers import answer
from kilburn.demo.explorer import TASK, Explorer
from kilburn.demo.questions import questions
from kilburn.demo.rivals import Said, summarised, truncated
from kilburn.demo.workshop import Workshop

ALL = 10**9


def transcript(root: Path) -> tuple[list[Said], dict[str, int], kilburn.Hierarchy]:
    store = kilburn.open(":memory:", window=8000, policy="lru")
    process = store.process("s")
    workshop = Workshop(root)
    Agent(Explorer(errands=False), workshop.tools(), process, limits=Limits(steps=None, reply=0)).run(TASK)
    said = [(page, process.text(page.id)) for page, _ in process.pages() if page.id > 0]
    return said, workshop.covered, store


def test_with_room_for_everything_both_answer_everything(shared_tree: Path) -> None:
    said, covered, store = transcript(shared_tree)
    with store:
        asked = questions(shared_tree, covered, number=30, seed=2)
        for kept in (truncated(said, ALL, store.counter.count), summarised(said, ALL, store.counter.count)):
            assert [question for question in asked if answer(question.text, kept).text != question.answer] == []


def test_truncation_keeps_the_end_within_the_window(shared_tree: Path) -> None:
    said, _, store = transcript(shared_tree)
    with store:
        for capacity in (50, 500, 5000):
            kept = truncated(said, capacity, store.counter.count)
            assert store.counter.count(kept.text) <= capacity
            assert "\n".join(text for _, text in said).endswith(kept.text)


def test_a_rolling_summary_stays_within_the_window_and_keeps_the_end(shared_tree: Path) -> None:
    said, _, store = transcript(shared_tree)
    with store:
        for capacity in (1000, 4000):
            seen: list[int] = []
            kept = summarised(said, capacity, store.counter.count, seen.append)
            assert store.counter.count(kept.text) <= capacity
            assert said[-1][1] in kept.text
            assert seen == [page.id for page, _ in said]
            assert not kept.recall("s1").startswith("error:")


def test_what_is_gone_is_said_to_be_gone(shared_tree: Path) -> None:
    said, _, store = transcript(shared_tree)
    with store:
        kept = truncated(said, 500, store.counter.count)
    assert kept.recall("p1").startswith("error:")
    assert kept.search_memory("zzzz") == "nothing found"

"""Excerpts fill the window at any size, keep what the user said first, and prefer passages near the newest thought."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

import kilburn
from kilburn.event import Act
from kilburn.selection.excerpts import CITED
from kilburn.selection.selection import focus_words, page_candidates, select


def telling(seed: int, size: int) -> Iterator[dict[str, Any]]:
    """A user's request, and outputs of about `size` characters in which each line names something new."""
    rng = random.Random(seed)
    yield {"role": "user", "content": "Find the fault."}
    step = 0
    while True:
        step += 1
        call = {"id": f"c{step}", "type": "function", "function": {"name": "read", "arguments": f'{{"path": "part{step}.py"}}'}}
        yield {"role": "assistant", "content": f"Look at part{step}.py next.", "tool_calls": [call]}
        lines = [f"handler_{rng.randrange(10**9)} calls worker_{rng.randrange(10**9)} in zone {n}" for n in range(size // 48)]
        yield {"role": "tool", "tool_call_id": f"c{step}", "content": "\n".join(lines)}


ACTIONS = {8000: 5, 32_000: 5, 64_000: 4, 128_000: 2, 200_000: 2}
"""Actions of the policy to look at, by the size of the window."""


@pytest.mark.parametrize("window", list(ACTIONS))
def test_after_an_action_of_hybrid_three_fifths_of_the_window_are_used(window: int) -> None:
    with kilburn.open(":memory:", window=window, policy="hybrid", tokenizer="chars/4") as store:
        session = store.session("a")
        fills: list[float] = []
        for message in telling(window, max(1000, window // 10)):
            before = session.window.last_derived
            session.append(message)
            if session.window.last_derived < before:
                fills.append(session.prompts.use / window)
                if len(fills) == ACTIONS[window]:
                    break
        assert min(fills) >= 0.6, fills
        assert max(fills) <= 0.9, fills
        assert not [event for event in session.ledger.events() if event.act is Act.REFUSE]


@pytest.mark.parametrize("policy", ["hybrid", pytest.param("cost", marks=pytest.mark.slow)])
def test_what_the_user_said_first_outlives_the_pages_that_one_excerpt_cites(policy: str) -> None:
    rule = "Never restart the gateway of zuvoka before Friday."
    with kilburn.open(":memory:", window=4000, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        work = telling(3, 300)
        session.append(next(work), {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": rule})
        while session.window.last < 2 * CITED:
            session.append(next(work), next(work))
        assert rule in "".join(str(message["content"]) for message in session.render())
        cited = [len(page.sources) for page, _ in session.contents.pages() if page.depth]
        assert max(cited) <= CITED + 64, "of old pages of which nothing is kept, none is cited for ever"
        assert not [event for event in session.ledger.events() if event.act is Act.REFUSE]


@pytest.mark.parametrize("seed", range(4))
def test_of_passages_alike_those_near_to_the_thought_are_chosen_and_else_the_newest(seed: int) -> None:
    rng = random.Random(seed)
    words = ["".join(rng.choices("bdfgklmnprstvz", k=7)) for _ in range(120)]
    passages = [
        passage
        for at in range(60)
        for passage in page_candidates(f"the {words[2 * at]} calls a {words[2 * at + 1]} there", at + 1, at + 1, "tool", 150)
    ]
    wanted = {at + 1 for at in rng.sample(range(46, 56), 3)}
    focus = focus_words([("Look at " + " and ".join(words[2 * (page - 1)] for page in sorted(wanted)), 1.0)])
    kept = {page for page, _ in select(passages, [], focus, 160, lambda text: len(text) // 4)}
    assert wanted <= kept
    newest = {page for page, _ in select(passages, [], {}, 160, lambda text: len(text) // 4)}
    assert newest - {1} == set(range(62 - len(newest), 61)), "and the session's first message"

"""A page that a person brings back stands beside the fold that was made of it: no policy stumbles over that."""

from __future__ import annotations

import random
from itertools import cycle, islice

import pytest

import kilburn
from effort import FULL, rounds
from kernel.talk import meddle
from kilburn.event import Act
from kilburn.testing import Scripted, check_laws
from kilburn.testing.policies import trace

SPECS = [
    "hybrid",
    "cost",
    "cost(tail=100, trigger=500)",
    "summarize",
    "recursive",
    "compact(trigger=None, share=0.5)",
    "agentfold",
    "memento(pairs=True, to=16)",
    "comem(every=1)",
    "free(every=100, least=0)",
    "chain(mask, hybrid)",
]


@pytest.mark.parametrize("spec", SPECS)
def test_pages_that_are_pinned_and_loaded_again_break_no_move(spec: str) -> None:
    for seed in range(1, rounds(1, 3) + 1):
        rng = random.Random(seed)
        with kilburn.open(":memory:", window=900, policy=spec, tokenizer="chars/4") as store:
            session = store.session("s")
            for message in trace(seed, 24):
                session.append(message)
                meddle(session, rng)
            check_laws(session, list(trace(seed, 24)))
            assert [event.why for event in session.ledger.events() if event.act is Act.REFUSE] == []


@pytest.mark.parametrize("spec", ["summarize", "summarize(to=16, keep=0, tail=0)", "recursive", "recursive(to=16, tail=0)"])
def test_a_summary_that_is_as_long_as_what_it_replaces_is_not_made(spec: str) -> None:
    replies = ["read src/m1.py failed: error 4096 in the parser. " * size for size in (1, 2, 3, 4, 6)]
    for window in (200, 300) if FULL else (200,):
        with kilburn.open(
            ":memory:", window=window, policy=spec, tokenizer="chars/4", model=Scripted(list(islice(cycle(replies), 900)))
        ) as store:
            session = store.session("s")
            for message in trace(window, 40):
                session.append(message)
            check_laws(session, list(trace(window, 40)))
            assert [event.why for event in session.ledger.events() if event.act is Act.REFUSE] == []


@pytest.mark.parametrize("spec", ["clear_tool_uses(trigger=50, keep=1, clear_tool_inputs=True)", "hybrid", "agentfold(to=20)"])
def test_a_chain_of_one_does_what_that_one_does(spec: str) -> None:
    seen = []
    for policy in (spec, f"chain({spec})"):
        with kilburn.open(":memory:", window=900, policy=policy, tokenizer="chars/4") as store:
            session = store.session("s")
            for number in range(12):
                call = {"name": "write", "arguments": f'{{"path": "m{number}.py", "text": "{"word " * 60}"}}'}
                session.append(
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"id": f"c{number}", "type": "function", "function": call}],
                    }
                )
                session.append({"role": "tool", "tool_call_id": f"c{number}", "content": f"{number}: written, and so on. " * 12})
            check_laws(session)
            seen.append([(event.act, event.pages) for event in session.ledger.events()])
    assert seen[0] == seen[1]
    assert any(act in (Act.FOLD, Act.EVICT) for act, _ in seen[0])

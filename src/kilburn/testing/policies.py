"""The conformance kit for policies: the contract of every policy.

`check_policy(make)` streams seeded traces through small windows with the policy, and checks the laws. Now and then passages
are brought from outside, so that it meets copies. It does not measure how good a policy is.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from typing import Any

from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.move import Bring
from kilburn.opening import Store
from kilburn.page import Place
from kilburn.policy import Policy
from kilburn.testing.clock import FakeClock
from kilburn.testing.laws import check_laws

WORDS = ["parser", "token", "window", "cache", "error", "fix", "test", "path", "loop", "decided", "because", "TODO", "12", "4096"]


def trace(seed: int, steps: int = 40) -> Iterator[dict[str, Any]]:
    """Return a seeded run of an agent as chat messages: talk, calls, parallel calls, outputs of all sizes."""
    rng = random.Random(seed)
    yield {"role": "system", "content": "You repair programs. Never delete files."}
    yield {"role": "user", "content": f"Fix issue {seed} in src/parser.py"}
    for step in range(steps):
        calls = rng.choice([0, 1, 1, 1, 2, 3])
        text = " ".join(rng.choices(WORDS, k=rng.randint(1, 30)))
        if not calls:
            yield {"role": "assistant", "content": text}
            yield {"role": "user", "content": " ".join(rng.choices(WORDS, k=rng.randint(1, 60)))}
            continue
        messages = [
            {
                "id": f"c{seed}-{step}-{n}",
                "type": "function",
                "function": {"name": "read", "arguments": json.dumps({"path": f"src/m{n}.py"})},
            }
            for n in range(calls)
        ]
        yield {"role": "assistant", "content": text or None, "tool_calls": messages}
        for call in messages:
            lines = rng.choice([1, 5, 20, 60, 400])
            output = "\n".join(f"{n}: " + " ".join(rng.choices(WORDS, k=8)) for n in range(lines))
            yield {"role": "tool", "tool_call_id": call["id"], "content": output}


def check_policy(
    make: Callable[[], Policy],
    *,
    windows: tuple[int, ...] = (300, 1000, 4000),
    seeds: tuple[int, ...] = (1, 2),
    model: Any = None,
) -> None:
    """Assert that a policy keeps the laws, is pure, never fails, and never has its moves refused.

    Args:
        make: a fresh policy; two of them must plan alike.
        windows: sizes in tokens of four characters.
        model: who answers its `Ask`s, or None.
    """
    for window in windows:
        for seed in seeds:
            runs = [_run(make(), window, seed, model) for _ in range(2)]
            assert runs[0] == runs[1], f"window {window}, seed {seed}: the same trace gave other moves"


def _run(policy: Policy, window: int, seed: int, model: Any) -> list[Any]:
    with Store(Sqlite(":memory:"), Budget(window), policy, tokenizer="chars/4", model=model, clock=FakeClock()) as store:
        session = store.session("check")
        rng = random.Random(seed)
        for message in trace(seed):
            session.append(message)
            if rng.random() < 0.2:
                _bring(session, rng)
            prompt = session.render()
            assert prompt.tokens <= window, f"a prompt of {prompt.tokens} tokens in a window of {window}"
        check_laws(session, list(trace(seed)))
        refused = [event.why for event in session.ledger.events() if event.act is Act.REFUSE]
        assert not refused, f"moves were refused: {refused[:3]}"
        failures = session.stats().policy_failures
        assert not failures, f"the policy raised, or returned no list of moves, {failures} times; the log has the traceback"
        return _moves(session)


def _bring(session: Session, rng: random.Random) -> None:
    """Bring a passage of an evicted page, as another policy might."""
    window = session.window
    out = [page for page in range(1, window.last + 1) if window.at(page) in (Place.OUT, Place.STUB, Place.FOLDED)]
    if out and not window.awaited():
        page = rng.choice(out)
        if text := session.contents.text(page):
            session.edits.apply(Bring(((page, ((0, min(len(text), 200)),)),)))


def _moves(session: Session) -> list[Any]:
    observed = (Act.ASK, Act.COMPACT)
    return [(event.act, event.pages, event.policy, event.data) for event in session.ledger.events() if event.act not in observed]

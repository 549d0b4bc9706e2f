"""Policies over many resident pages: they look at what is near the border, and keep their promises all the same."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kernel.talk import assistant, call_of, tool, user
from kilburn.budget import Budget
from kilburn.event import Act
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.message import Kind
from kilburn.move import Evict
from kilburn.policies.summarize import READ
from kilburn.policy import View
from kilburn.testing import FakeClock, Memory, check_policy

WINDOW = 60_000
"""Tokens of four characters: some 800 pages of the sizes below."""


def opened(policy: str) -> Process:
    process = Hierarchy(Memory(), Budget(WINDOW), policy, tokenizer="chars/4", clock=FakeClock()).process("a")
    process.append({"role": "system", "content": "You read logs."}, user("Find the leak in src/pool.py"))
    return process


def fill(process: Process, until: Act, most: int = 3000) -> None:
    """Turns of an agent, until the policy has moved something."""
    while process.kernel.tier.last < most:
        if any(event.act is until for event in process.events()):
            return
        batch = []
        for at in range(20):
            name = f"c{len(process.kernel.tier.pages)}-{at}"
            batch += [assistant(f"Looking at part {name}", call_of(name)), tool(name, _log(name))]
        process.append(*batch)
    raise AssertionError("the policy never acted")


def _log(name: str) -> str:
    return "\n".join(f"{name} line {line} value_{name}_{line} read from /srv/{name}/{line}.log" for line in range(5))


def refused(process: Process) -> list[str]:
    return [event.why for event in process.events() if event.act is Act.REFUSE]


def test_a_summary_of_much_text_is_written_from_the_newest_of_it_and_from_what_the_user_said() -> None:
    process = opened("summarize(ask=False)")
    process.append(user("Decided: never restart the service on host zeppelin."))
    fill(process, Act.FOLD)
    fold = next(page for page in process.kernel.tier.resident() if page.kind is Kind.FOLD)
    text = process.kernel.text(fold.id)
    assert "never restart the service on host zeppelin" in text
    newest = max(page for page in fold.sources if process.kernel.tier.pages[page].kind is Kind.RESULT)
    assert f"p{newest} " in text
    assert len(fold.sources) > 300, "it stands for all that is old, read or not"
    assert sum(len(process.kernel.text(page)) for page in fold.sources) > 2 * READ
    assert not refused(process)


def test_hybrid_reaches_the_newest_of_what_leaves_and_the_rest_stays_below() -> None:
    process = opened("hybrid")
    fill(process, Act.FOLD)
    fold = next(page for page in process.kernel.tier.resident() if page.depth)
    gone = [page for event in process.events() if event.act is Act.EVICT for page in event.pages]
    assert 64 <= len(fold.sources) <= 128
    assert max(gone) < min(fold.sources)
    assert "Looking at" in process.recall(f"p{min(gone)}") or "line 3" in process.recall(f"p{min(gone)}")
    assert process.render().tokens <= WINDOW
    assert not refused(process)


def test_importance_among_many_pages_keeps_what_was_marked_and_frees_what_it_must() -> None:
    process = opened("importance")
    process.append(assistant("the deploy key lives in vault seven"))
    process.remember("p3", 1.0)
    fill(process, Act.EVICT)
    resident = {page.id for page in process.kernel.tier.resident()}
    assert {1, 2, 3} <= resident, "the system's, the user's and the marked page are the oldest of all"
    assert process.kernel.use <= WINDOW * 9 // 10
    gone = [page for event in process.events() if event.act is Act.EVICT for page in event.pages]
    assert max(gone) < process.kernel.tier.last // 2, "of much that is equally old and of no use, the oldest leaves"
    assert not refused(process)


class Compared:
    """Evicts the oldest, and compares the quick answer with the slow one at every look."""

    looks = 0

    def plan(self, view: View) -> Sequence[Evict]:
        held = view.held()
        for page in view.pages:
            if not view.is_latest(page):
                assert (page.id in held) is not view.is_movable(page)
                Compared.looks += 1
        assert view.latest() == [page for page in view.pages if view.is_latest(page)]
        older = [page for page in view.pages if not view.is_latest(page)]
        chosen = view.free(older, view.excess + view.handle) if view.excess else ()
        return [Evict(chosen)] if chosen else []


@pytest.mark.parametrize("window", [300, 1200])
def test_what_is_held_is_what_may_not_move(window: int) -> None:
    check_policy(Compared, windows=(window,), seeds=(1, 2))
    assert Compared.looks > 100

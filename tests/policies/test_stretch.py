"""`View.stretch` names what a fold may stand for: whatever pages a policy means, the kernel refuses none of it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

import kilburn
from kernel.talk import assistant, call_of, meddle, tool, user
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.move import Evict, Move
from kilburn.policy import View
from kilburn.testing import check_laws
from kilburn.testing.policies import trace


@dataclass
class Arbitrary:
    """Folds or evicts pages that it draws at random, those that are out and those that may not leave among them."""

    seed: int
    moved: int = 0

    def plan(self, view: View) -> Sequence[Move]:
        rng = random.Random(f"{self.seed} {view.turn} {view.use}")
        last = max([page.id for page in view.pages], default=1)
        named = {page.id for page in view.pages if rng.random() < 0.6}
        low = rng.randint(1, max(1, last))
        named |= set(range(low, min(last, low + rng.randint(0, 12)))) if rng.random() < 0.5 else set()
        within = {number for number in range(1, last + 1) if rng.random() < 0.8} if rng.random() < 0.3 else None
        stretch = view.stretch(named, within)
        assert {page.id for page in stretch.pages} <= named
        assert list(stretch.pages) == [page for page in view.pages if page in stretch.pages]
        assert within is None or within.issuperset(stretch.sources)
        if rng.random() < 0.2:
            leaving = tuple(page.id for page in stretch.pages)
            return [Evict(pages=leaving)] if leaving else []
        if not stretch.sources or stretch.freed < 60 + 2 * view.handle:
            return []
        self.moved += 1
        if rng.random() < 0.5:
            return stretch.fold("drawn", text="in short: nothing", torn="torn")
        parts = tuple((page, ((0, 4),)) for page in stretch.sources[:3] if len(view.text(page)) >= 4)
        return stretch.fold("drawn", parts=parts, torn="torn") if parts else []


@pytest.mark.parametrize("seed", range(6))
def test_whatever_pages_are_named_the_laws_allow_the_stretch(seed: int) -> None:
    policy, rng = Arbitrary(seed), random.Random(seed)
    with kilburn.open(":memory:", window=900, policy=policy, tokenizer="chars/4") as store:
        session = store.session("s")
        for message in trace(seed, 30):
            session.append(message)
            meddle(session, rng)
        check_laws(session, list(trace(seed, 30)))
        assert [event.why for event in session.ledger.events() if event.act is Act.REFUSE] == []
        assert policy.moved > 3


def talk() -> Session:
    """A request, two calls with their results (p2-p4, p5-p7), and the next request, which is held."""
    session = kilburn.open(":memory:", window=2000, policy="fifo", tokenizer="chars/4").session("s")
    session.append(user("Find the fault."), assistant("looking", call_of("c1")), tool("c1", "one " * 60))
    session.append(assistant("again", call_of("c2")), tool("c2", "two " * 60), user("Go on."), assistant("Done."))
    session.unpin("p1")
    return session


def test_a_stretch_takes_whole_groups_and_passes_over_what_is_held() -> None:
    session = talk()
    assert session.edits.view().stretch([4, 6]).pages == (), "the call of p4 stays, and the result of p6"
    everything = range(1, 10)
    assert session.edits.view().stretch(everything).sources == (1, 2, 3, 4, 5, 6, 7), "all but the request and what is newest"
    session.pin("p7")
    assert session.edits.view().stretch(everything).sources == (1, 2, 3, 4, 5), "a call stays with its result"


def test_a_stretch_cites_results_that_stand_as_handles_and_what_is_out_already() -> None:
    session = talk()
    session.edits.apply(Evict((4,)))
    assert session.edits.view().stretch([2, 3]).sources == (2, 3, 4)
    session.edits.apply(Evict((2, 3)))
    assert session.edits.view().stretch([1, 2, 3]).sources == (1, 2, 3)
    beside = session.edits.view().stretch([2, 3])
    assert beside.sources == (2, 3)
    assert not beside.leaving, "a fold of them would take the place of nothing"
    assert session.edits.view().stretch([1, 2, 3], within={1, 3}).sources == (1, 3)


def test_a_derived_page_is_replaced_whole_or_torn() -> None:
    session = talk()
    session.edits.apply(*session.edits.view().stretch(range(1, 5)).fold("a try", text="nothing found", torn=""))
    remade = session.edits.view().stretch([-1, 5, 6, 7])
    assert remade.sources == (1, 2, 3, 4, 5, 6, 7)
    assert not remade.torn
    session.pin("p2")
    came_back = session.edits.view().stretch([-1, 5, 6, 7])
    assert came_back.torn == {-1}, "it also tells of p2, which stays"
    assert 2 not in came_back.sources
    session.unpin("p2")
    less = session.edits.view().stretch([-1, 5, 6, 7], within={3, 4, 5, 6, 7})
    assert less.torn == {-1}
    session.edits.apply(*less.fold("again", text="two looks, nothing found", torn="more than it may cite"))
    assert not [event for event in session.ledger.events() if event.act is Act.REFUSE]


def test_a_group_of_which_not_all_may_be_cited_is_torn_and_not_cited_at_all() -> None:
    stretch = talk().edits.view().stretch([1, 2, 3, 4], within={1, 2, 3})
    assert stretch.torn == {3, 4}
    assert stretch.sources == (1, 2), "the call leaves with its result, ahead of the fold"

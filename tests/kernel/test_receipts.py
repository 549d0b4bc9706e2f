"""Receipts: what left, why, by which policy, how it went, and how to get it back."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import kilburn
from kernel.talk import assistant, user
from kilburn.effect import Note
from kilburn.errors import Unavailable
from kilburn.event import Act, Event
from kilburn.kernel.receipts import ranges, receipts
from kilburn.move import Evict, Fold, Load, Move
from kilburn.policy import Plan, View
from kilburn.testing import Scripted


class Noting:
    """Says that nothing useful came, twice, and moves nothing."""

    def plan(self, view: View) -> Plan:
        yield Note(outcome="rejected", why="overlap", figures={"unmatched": 2})
        yield Note(figures={"unmatched": 1, "ambiguous": 4})
        return []


class Illegal:
    """Wants to evict a page that does not exist."""

    def plan(self, view: View) -> Sequence[Move]:
        return [Evict(pages=(999,))]


class Longer:
    """Replaces a message by more words than it had."""

    def plan(self, view: View) -> Sequence[Move]:
        first = view.pages[-1]
        return [] if first.id in view.pins else [Fold(pages=(first.id,), text="word " * 400)]


def test_every_page_that_left_is_on_a_receipt_and_can_be_recalled(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=400, policy="lru", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(40):
            session.append(user(f"{number} " + "word " * 30))
        found = session.receipts()
        out = {page.id for page, state in session.pages() if state.at == "out"}
        assert out
        left: set[int] = set()
        for receipt in found:
            assert (receipt.policy, receipt.outcome, receipt.why) == ("lru", "done", "least recently used")
            assert receipt.freed > 0
            for address in receipt.left:
                left |= {page.id for page in session.recall(address).pages}
        assert left == out
    with kilburn.open(str(tmp_path / "a.db"), window=400, policy="lru", tokenizer="chars/4") as store:
        assert store.session("a").receipts() == found


def test_moves_of_a_person_have_receipts_too() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(*(user(f"{number} " + "word " * 30) for number in range(4)))
        session.apply(Fold(pages=(2, 3), text="two and three"))
        session.apply(Load(pages=(2,)))
        fold, load = session.receipts()
        assert (fold.policy, fold.left, fold.folds) == ("user", ("p2-p3",), ("f1",))
        assert fold.freed > 40
        assert load.back == ("p2",)
        assert load.freed < 0


def test_what_changed_nothing_says_why() -> None:
    for policy, outcome in ((Noting(), "rejected"), (Illegal(), "illegal"), (Longer(), "no progress")):
        with kilburn.open(":memory:", window=4000, policy=policy, tokenizer="chars/4") as store:
            session = store.session("a")
            session.append(user("one"))
            session.append(assistant("two"))
            last = session.receipts()[-1]
            assert (last.outcome, last.left, last.freed) == (outcome, (), 0)
            assert all(state.at == "in" for _, state in session.pages())
            if outcome == "rejected":
                assert last.figures == {"unmatched": 3, "ambiguous": 4}
                assert last.why == "overlap"


def test_a_compaction_whose_model_failed_says_so() -> None:
    model = Scripted([Unavailable("no connection")] * 100)
    with kilburn.open(":memory:", window=800, policy="summarize", tokenizer="chars/4", model=model) as store:
        session = store.session("a")
        for number in range(30):
            session.append(user(f"{number} decided to keep src/m{number}.py " + "word " * 30))
        first = session.receipts()[0]
        assert (first.outcome, first.asked) == ("done", ("failed",))
        assert "failed" in first.why
        assert len(first.folds) == 1


def test_a_turn_at_which_the_policy_did_nothing_leaves_no_event() -> None:
    with kilburn.open(":memory:", window=4000, policy="hybrid", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("one"))
        assert [event.act for event in session.events() if event.act is Act.COMPACT] == []


def test_ranges_are_as_short_as_they_can_be() -> None:
    assert ranges([3, 1, 2, 7, -2, -1]) == ("f2", "f1", "p1-p3", "p7")
    assert ranges([]) == ()


def test_what_the_kernel_cut_before_it_asked_is_on_a_receipt_of_its_own() -> None:
    with kilburn.open(":memory:", window=400, policy=Illegal(), tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("word " * 1000))
        cut, *rest = session.receipts()
        assert (cut.policy, cut.outcome, cut.left, cut.folds) == ("kernel", "done", ("p1",), ("f1",))
        assert cut.freed >= 0
        assert all(receipt.policy != "kernel" and not receipt.left for receipt in rest)
        assert [receipt.outcome for receipt in rest] == ["illegal"] * len(rest)
        assert rest


def test_an_outcome_that_another_version_wrote_is_shown_as_it_is() -> None:
    event = Event(number=1, act=Act.COMPACT, time=0.0, turn=1, policy="own", cause="admit", data={"outcome": "skipped"})
    assert [receipt.outcome for receipt in receipts([event])] == ["skipped"]

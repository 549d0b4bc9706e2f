"""Receipts: what left, why, by which policy, how it went, and how to get it back."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

import kilburn
from kernel.talk import FORMS, assistant, call_of, meddle, tool, user
from kilburn.agents.compaction import compact
from kilburn.budget import Budget
from kilburn.effect import Note
from kilburn.errors import InvalidBudget, KernelError, LawBroken, Unavailable, UnknownAddress
from kilburn.event import Act, Event
from kilburn.kernel.receipts import ranges, receipts
from kilburn.kernel.render import Item, items
from kilburn.kernel.replay import rebuild
from kilburn.kernel.session import Session
from kilburn.move import Bring, Evict, Fold, Load, Move
from kilburn.page import Kind, parse_address
from kilburn.policy import Plan, View
from kilburn.testing import Scripted, check_laws


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


class Raising:
    """Has a fault."""

    def plan(self, view: View) -> Sequence[Move]:
        raise ZeroDivisionError


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
        found = session.ledger.receipts()
        out = {page.id for page, state in session.contents.pages() if state.at == "out"}
        assert out
        left: set[int] = set()
        for receipt in found:
            assert (receipt.policy, receipt.outcome, receipt.why) == ("lru", "done", "least recently used")
            assert receipt.freed > 0
            for address in receipt.left:
                left |= {page.id for page in session.recall(address).pages}
        assert left == out
    with kilburn.open(str(tmp_path / "a.db"), window=400, policy="lru", tokenizer="chars/4") as store:
        assert store.session("a").ledger.receipts() == found


def test_moves_of_a_person_have_receipts_too() -> None:
    with kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(*(user(f"{number} " + "word " * 30) for number in range(4)))
        session.edits.apply(Fold(pages=(2, 3), text="two and three"))
        session.edits.apply(Load(pages=(2,)))
        fold, load = session.ledger.receipts()
        assert (fold.policy, fold.left, fold.folds) == ("user", ("p2-p3",), ("f1",))
        assert fold.freed > 40
        assert load.back == ("p2",)
        assert load.freed == 0 < load.added


def test_what_changed_nothing_says_why() -> None:
    for policy, outcome in ((Noting(), "rejected"), (Illegal(), "illegal"), (Longer(), "no progress")):
        with kilburn.open(":memory:", window=4000, policy=policy, tokenizer="chars/4") as store:
            session = store.session("a")
            session.append(user("one"))
            session.append(assistant("two"))
            last = session.ledger.receipts()[-1]
            assert (last.outcome, last.left, last.freed) == (outcome, (), 0)
            assert all(state.at == "in" for _, state in session.contents.pages())
            if outcome == "rejected":
                assert last.figures == {"unmatched": 3, "ambiguous": 4}
                assert last.why == "overlap"


def test_a_compaction_whose_model_failed_says_so() -> None:
    model = Scripted([Unavailable("no connection")] * 100)
    with kilburn.open(":memory:", window=800, policy="summarize", tokenizer="chars/4", model=model) as store:
        session = store.session("a")
        for number in range(30):
            session.append(user(f"{number} decided to keep src/m{number}.py " + "word " * 30))
        first = session.ledger.receipts()[0]
        assert (first.outcome, first.asked) == ("done", ("failed",))
        assert "failed" in first.why
        assert len(first.folds) == 1


def test_a_turn_at_which_the_policy_did_nothing_leaves_no_event() -> None:
    with kilburn.open(":memory:", window=4000, policy="hybrid", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("one"))
        assert [event.act for event in session.ledger.events() if event.act is Act.COMPACT] == []


def test_ranges_are_as_short_as_they_can_be() -> None:
    assert ranges([3, 1, 2, 7, -2, -1]) == ("f2", "f1", "p1-p3", "p7")
    assert ranges([]) == ()


def test_what_the_kernel_cut_before_it_asked_is_on_a_receipt_of_its_own() -> None:
    with kilburn.open(":memory:", window=400, policy=Illegal(), tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("word " * 1000))
        cut, *rest = session.ledger.receipts()
        assert (cut.policy, cut.outcome, cut.left, cut.folds) == ("kernel", "done", ("p1",), ("f1",))
        assert cut.freed >= 0
        assert all(receipt.policy != "kernel" and not receipt.left for receipt in rest)
        assert [receipt.outcome for receipt in rest] == ["illegal"] * len(rest)
        assert rest


def test_an_outcome_that_another_version_wrote_is_shown_as_it_is() -> None:
    event = Event(number=1, act=Act.COMPACT, time=0.0, turn=1, policy="own", cause="admit", data={"outcome": "skipped"})
    assert [receipt.outcome for receipt in receipts([event])] == ["skipped"]


POLICIES = [
    "fifo",
    "lru",
    "hybrid",
    "cost",
    "mask",
    "summarize",
    "compact(trigger=None)",
    "chain(preprocess,mask(keep=3),hybrid)",
]


def prompt(session: Session) -> tuple[int, list[Item]]:
    return session.prompts.use, session.contents.shown()


@pytest.mark.parametrize("policy", POLICIES)
def test_each_compaction_is_taken_back_exactly_the_newest_first(policy: str, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(30):
            session.append(user(f"{number}: keep src/m{number}.py. " + "More was said. " * 8))
            session.append(assistant(None, call_of(f"c{number}", path=f"src/m{number}.py")))
            session.append(tool(f"c{number}", f"line of {number}\n" * (number % 9)))
    with kilburn.open(str(tmp_path / "a.db"), window=100_000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        for receipt in reversed([one for one in session.ledger.receipts() if one.left or one.folds or one.brought]):
            assert session.edits.undo() == receipt
            was = rebuild(store.backend, session.info, store.counter, until=receipt.events[0] - 1).window
            assert [one for one in session.contents.shown() if one[1] is None or was.last >= one[1].id] == items(was)
        assert session.ledger.receipts()
        with pytest.raises(KernelError, match="to take back"):
            session.edits.undo()
        assert [page.id for _, page, _ in session.contents.shown() if page] == list(range(1, session.window.last + 1))
        now = prompt(session)
    with kilburn.open(str(tmp_path / "a.db"), window=100_000, policy="fifo", tokenizer="chars/4") as store:
        assert prompt(store.session("a")) == now


def test_what_does_not_fit_or_was_forgotten_does_not_come_back(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy="summarize", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(20):
            session.append(user(f"{number}: keep src/m{number}.py. " + "More was said. " * 8))
        before, newest, head = prompt(session), session.ledger.receipts()[-1], session.ledger.head
        for dry in (True, False):
            with pytest.raises(LawBroken, match="more than the window has"):
                session.edits.undo(tokens=session.prompts.use, dry=dry)
        assert session.edits.undo(tokens=2_000, dry=True) == newest
        assert (prompt(session), session.ledger.receipts()[-1], session.ledger.head) == (before, newest, head)
        session.forget(newest.left[0].partition("-")[0])
        session.edits.undo()
        assert before != prompt(session)
        assert "forgotten" not in str(session.render())
        gone = parse_address(newest.left[0])[0]
        assert gone not in session.window.shown
        assert gone + 1 in session.window.shown


def test_a_pinned_summary_is_not_taken_back(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy="summarize", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(20):
            session.append(user(f"{number}: keep src/m{number}.py. " + "More was said. " * 8))
        session.pin(session.ledger.receipts()[-1].folds[0])
        before = prompt(session)
        with pytest.raises(LawBroken, match="pinned"):
            session.edits.undo()
        assert prompt(session) == before


@pytest.mark.parametrize("policy", POLICIES)
def test_a_preview_says_what_then_happens_and_changes_nothing(policy: str, tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(11):
            session.append(assistant(f"{number}: kept src/m{number}.py. " + "More was said. " * 8))
        before, head = prompt(session), session.ledger.head
        assert session.edits.preview().receipts == ()
        found = session.edits.preview(300)
        assert (prompt(session), session.ledger.head, list(session.ledger.events())[-1].number) == (before, head, head)
        assert found.use == session.prompts.use
        assert found.after <= 300
        assert found.use - found.after == sum(receipt.freed for receipt in found.receipts)
        assert 0 < found.again <= found.after
        left = {page for receipt in found.receipts for address in receipt.left for page in session.contents.resolve(address)}
        session.edits.resize(Budget(300))
        real = {
            page
            for receipt in session.ledger.receipts()
            for address in receipt.left
            for page in session.contents.resolve(address)
        }
        assert left == real
        with pytest.raises(InvalidBudget):
            session.edits.preview(10_000)


def test_a_preview_asks_no_model(tmp_path: Path) -> None:
    model = Scripted(["a summary"] * 9)
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy="summarize", tokenizer="chars/4", model=model) as store:
        session = store.session("a")
        for _ in range(9):
            session.append(user("More was said. " * 8))
        asked = len(model.requests)
        assert session.edits.preview(300).asks == 1
        assert len(model.requests) == asked


def test_the_difference_of_two_prompts_names_what_left_and_what_came(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy="summarize", tokenizer="chars/4") as store:
        session = store.session("a")
        prompts = {}
        for number in range(1, 21):
            session.append(user(f"{number}: keep src/m{number}.py. " + "More was said. " * 8))
            prompts[number] = prompt(session)
        same = session.ledger.difference(7, 8)
        assert (same.left, same.came, same.kept) == ((), ("p8",), same.before)
        for earlier, later in ((1, 20), (12, 13), (5, 19)):
            found = session.ledger.difference(earlier, None if later == 20 else later)
            old, new = ({page.id for _, page, _ in prompts[each][1] if page} for each in (earlier, later))
            assert (found.before, found.after) == (prompts[earlier][0], prompts[later][0])
            assert found.left == ranges(old - new)
            assert found.came == ranges(new - old)
        branch = session.fork("Look into it.")
        branch.append(assistant("It is there. " * 9))
        for earlier in (1, 12, 20):
            found = branch.ledger.difference(earlier)
            old, new = ({page.id for _, page, _ in some if page} for some in (prompts[earlier][1], branch.contents.shown()))
            assert (found.before, found.left, found.came) == (prompts[earlier][0], ranges(old - new), ranges(new - old))
        with pytest.raises(UnknownAddress):
            session.ledger.difference(21)


def test_a_result_that_was_cut_and_then_left_comes_back_whole(tmp_path: Path) -> None:
    """The excerpt belongs to the call and its result; it counted as a page that came since, and nothing came back."""
    with kilburn.open(str(tmp_path / "a.db"), window=500, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(assistant(None, call_of("c1", path="x" * 500)))
        session.append(tool("c1", "\n".join(f"line {number} of 11" for number in range(11))))
        before = prompt(session)
        session.edits.resize(Budget(60))
        assert [page for _, page, _ in session.contents.shown()] == [None]
        with pytest.raises(LawBroken, match="more than the window has"):
            session.edits.undo()
        session.edits.undo(tokens=500)
        assert prompt(session) == before


def test_a_call_that_a_late_result_brought_back_is_not_taken_away_from_it(tmp_path: Path) -> None:
    """The call came back cut. Both moves were on one receipt, so an undo took the call out and left the result."""
    with kilburn.open(str(tmp_path / "a.db"), window=150, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(assistant(None, call_of("c1", path="x" * 500)), user("line of text " * 60))
        assert 1 not in session.window.shown
        session.append(tool("c1", "done"))
        brought, cut = session.ledger.receipts()[-2:]
        assert (brought.back, brought.cause, cut.folds, cut.cause) == (("p1",), "admit", ("f2",), "pressure")
        with pytest.raises(LawBroken, match="more than the window has"):
            session.edits.undo()
        session.edits.undo(tokens=1_000)
        assert [page.id for _, page, _ in session.contents.shown() if page and page.kind is not Kind.EXCERPT] == [1, 3]
        session.edits.undo(tokens=1_000)
        session.contents.messages()
        assert {1, 3} <= session.window.shown


def test_a_result_that_came_since_comes_back_with_its_call(tmp_path: Path) -> None:
    """It left with its call, and the undo did nothing."""
    with kilburn.open(str(tmp_path / "a.db"), window=150, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(assistant(None, call_of("c1", path="x" * 500)))
        session.append(assistant(None, *(call_of(f"c{number}", path="") for number in (2, 3, 4))))
        assert session.window.shown == {2, 3, 4}
        session.append(tool("c1", "x"))
        assert session.window.shown == {2, 3, 4}
        session.edits.undo(tokens=1_000)
        assert session.window.shown == {1, 2, 3, 4, 5}


def test_a_fold_lists_what_it_moved_and_not_what_it_cites(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=10_000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(1, 9):
            session.append(user(f"{number}: " + "More was said. " * 8))
        session.edits.apply(Fold((2, 3), text="Two of them."))
        session.edits.apply(Fold((2, 3, 4, 5), text="Four of them."))
        session.edits.apply(Bring(((4, ((0, 2),)),)))
        first, second, copy = session.ledger.receipts()
        assert (first.left, first.folds) == (("p2-p3",), ("f1",))
        assert (second.left, second.folds) == (("f1", "p4-p5"), ("f2",))
        assert (copy.left, copy.folds, copy.brought, copy.freed) == ((), (), ("f3",), 0)
        assert copy.added > 0
        session.edits.undo()
        session.edits.undo()
        assert session.ledger.receipts()[-1].back == ("f1", "p4-p5")
        assert [page.id for _, page, _ in session.contents.shown() if page] == [1, -1, *range(4, 9)]


def test_pages_that_were_retired_are_not_undone(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=10_000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(1, 9):
            session.append(user(f"{number}: " + "More was said. " * 8))
        session.edits.take_back([6, 7])
        with pytest.raises(KernelError, match="to take back"):
            session.edits.undo()
        session.edits.evict("p2")
        session.edits.apply(Fold((3, 4), text="Two of them."))
        session.edits.take_back([4])
        assert session.edits.undo().folds == ("f1",)
        assert session.window.shown == {1, 3, 5, 8}
        assert session.edits.undo().left == ("p2",)
        assert session.window.shown == {1, 2, 3, 5, 8}
        check_laws(session)


def test_the_kind_of_an_error_is_not_a_count(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=400, policy=Raising(), tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("one"))
        (receipt,) = session.ledger.receipts()
        assert (receipt.outcome, receipt.figures) == ("failed", {})


def test_a_page_let_go_by_hand_leaves_with_its_call_and_comes_back(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=10_000, policy="hybrid", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("Read it."), assistant(None, call_of("c1", path="a.py")), tool("c1", "text " * 50), user("Thanks."))
        before = prompt(session)
        with pytest.raises(LawBroken):
            session.edits.evict("p4")
        assert prompt(session) == before
        assert session.edits.evict("p3") == ["p2-p3"]
        assert session.prompts.use < before[0]
        assert session.recall("p3") == "text " * 50
        with pytest.raises(KernelError, match="not in the window"):
            session.edits.evict("p2-p3")
        session.edits.undo()
        assert prompt(session) == before


def test_a_range_is_compacted_and_the_rest_stays(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=10_000, policy="hybrid", tokenizer="chars/4") as store:
        session = store.session("a")
        for number in range(1, 13):
            session.append(user(f"{number}: keep src/m{number}.py. " + "More was said. " * 8))
        before = prompt(session)
        done = compact(session, None, pages="p3-p8", to=40)
        assert done.outcome == "done"
        assert session.ledger.receipts()[-1].left == ("p3-p8",)
        assert [page.id for _, page, _ in session.contents.shown() if page] == [1, 2, -1, *range(9, 13)]
        session.edits.undo()
        assert prompt(session) == before


def test_every_earlier_prompt_is_found_in_a_long_ledger(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=500, policy="summarize", tokenizer="chars/4", embedder=None) as store:
        session, uses = store.session("s"), {0: 0}
        for number in range(40):
            session.append(user(f"{number}: decided to keep src/m{number}.py. " + "More was said. " * (number % 7)))
            session.render()
            if number % 3 == 0:
                session.recall("p1")
            if number % 5 == 4:
                session.edits.evict(session.window.resident()[2].address)
            if number % 10 == 9:
                session.edits.undo()
            uses[session.window.turn] = session.prompts.use
        assert {turn: session.ledger.difference(turn).before for turn in uses} == uses
        branch = session.fork("Look into it.")
        assert {turn: branch.ledger.difference(turn).before for turn in uses} == uses


@pytest.mark.parametrize(("seed", "policy"), [(3, "summarize"), (30, "hybrid"), (43, "hybrid"), (56, "agentfold")])
def test_what_folds_stand_for_is_right_after_taking_back_beside_changes_by_hand(seed: int, policy: str) -> None:
    """A fold that comes back may stand for some of its pages still."""
    chance, taken_back = random.Random(seed), 0
    with kilburn.open(":memory:", window=1500, policy=policy, tokenizer="chars/4", embedder=None) as store:
        session = store.session("a")
        for message in FORMS["chat"](seed, 40):
            session.append(message)
            if chance.random() < 0.5:
                meddle(session, chance)
            if chance.random() < 0.4:
                with suppress(KernelError, LawBroken):
                    session.edits.undo(5000)
                    taken_back += 1
        assert taken_back
        check_laws(session)

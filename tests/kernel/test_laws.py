"""Every law refuses by its number the move that would break it, and what is refused changes nothing."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

import kilburn
from kernel.talk import assistant, call_of, tool, user
from kilburn.errors import InvalidMessage, KernelError, LawBroken
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.move import Bring, Drop, Evict, Fold, Load, Move, Retire
from kilburn.page import Place, Span
from kilburn.policy import View
from kilburn.testing import check_laws


def opened() -> Session:
    """p1 the task, pinned; p2, p3 and p6 texts; p4 a call and p5 its result; p7 a call that waits."""
    session = kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4").session("a")
    session.append(
        user("Fix the bug."),
        assistant("the first thought " * 9),
        assistant("the second thought " * 9),
        assistant(None, call_of("k", path="a.py")),
        tool("k", "def f(): pass"),
        assistant("the third thought " * 9),
        assistant(None, call_of("w", path="b.py")),
    )
    return session


ILLEGAL: list[tuple[int, str, list[Move], Move]] = [
    (2, "no progress", [], Fold((6,), text="the third thought " * 9)),
    (3, "p1 is pinned", [], Evict((1,))),
    (4, "a fold of a fold", [Fold((2, 3), text="two thoughts")], Fold((-1, 6), text="thoughts")),
    (4, "overlaps f1", [Fold((2, 3), text="two thoughts")], Fold((3, 6), text="thoughts")),
    (4, "does not cite", [], Fold((2,), parts=((2, ((0, 9),)), (3, ((0, 9),))))),
    (4, "f1 is made from others", [Fold((2, 3), text="two thoughts")], Bring(((-1, ((0, 9),)),))),
    (5, "an empty summary", [], Fold((2, 3), text=" \n\t")),
    (6, "would leave p5 behind", [], Evict((4,))),
    (6, "would leave p5 behind", [], Fold((2, 4), text="a thought and a call")),
    (6, "without a result yet", [], Evict((7,))),
    (6, "between a call and its result", [], Bring(((2, ((0, 9),)),))),
    (6, "without a result yet", [], Fold((6, 7), text="a thought and a call")),
    (9, "p2 is retired", [Retire((2,))], Load((2,))),
    (9, "p2 is retired", [Retire((2,))], Fold((2, 3), text="two thoughts")),
    (9, "p2 is retired", [Retire((2,))], Bring(((2, ((0, 9),)),))),
]
"""The law, what the error says, the moves before, and the move that breaks it."""


@pytest.mark.parametrize(("law", "says", "before", "move"), ILLEGAL, ids=[f"{law}-{says}" for law, says, _, _ in ILLEGAL])
def test_a_move_that_breaks_a_law_is_refused_by_its_number(law: int, says: str, before: list[Move], move: Move) -> None:
    session = opened()
    for each in before:
        session.edits.apply(each)
    events, prompt = list(session.ledger.events()), session.render()
    with pytest.raises(LawBroken, match=says) as caught:
        session.edits.apply(move)
    assert caught.value.law == law
    assert list(session.ledger.events())[: len(events)] == events
    assert [event.act for event in list(session.ledger.events())[len(events) :] if event.act is not Act.SHIP] == []
    assert session.render() == prompt
    check_laws(session)


@pytest.mark.parametrize(
    ("says", "move"),
    [
        ("exactly one of text, keep and parts", Fold((2,))),
        ("exactly one of text, keep and parts", Fold((2,), text="short", keep=((0, 9),))),
        ("one fold a page", Fold((2, 3), keep=((0, 9),))),
        ("sorted, disjoint spans", Fold((2,), keep=((5, 9), (0, 4)))),
        ("sorted, disjoint spans", Fold((2,), keep=((0, 9_999),))),
        ("give its spans", Bring(((2, ()),))),
        ("name each page once", Bring(((2, ((0, 4),)), (2, ((5, 9),))))),
        ("name each page once", Evict((2, 2))),
        ("no move at all", Evict(())),
        ("view.pages only", Evict((-1,))),
    ],
)
def test_a_move_that_makes_no_sense_says_what_to_give(says: str, move: Move) -> None:
    session = opened()
    session.edits.apply(Fold((6,), text="a thought"))
    session.edits.apply(Evict((-1,)))
    with pytest.raises(KernelError) as caught:
        session.edits.apply(move)
    assert says in caught.value.advice
    check_laws(session)


@pytest.mark.parametrize(
    ("keep", "shown"),
    [
        (((0, 18),), "the first thought \n…\n"),
        (((4, 9), (144, 162)), "…\nfirst\n…\nthe first thought "),
        (((0, 3), (153, 161)), "the\n…\n thought\n…\n"),
    ],
)
def test_an_excerpt_is_its_spans_and_says_where_something_is_left_out(keep: tuple[Span, ...], shown: str) -> None:
    session = opened()
    session.edits.apply(Fold((2,), keep=keep))
    heading, _, kept = str(session.recall("f1")).partition("\n")
    assert heading == "[p2 in part:]"
    assert kept == shown
    check_laws(session)


class Planned:
    """A policy that plans these moves when the third message comes, and nothing else."""

    def __init__(self, *moves: Move) -> None:
        self.moves = moves

    def plan(self, view: View) -> Sequence[Move]:
        return self.moves if view.turn == 3 else []


@pytest.mark.parametrize(
    ("moves", "reason"),
    [
        ([Drop((2,))], "may not forget"),
        ([Evict((2,)), Fold((2, 3), text=" ")], "an empty summary"),
        ([Fold((2,), keep=((0, 9),)), Evict((1,))], "p1 is pinned"),
    ],
)
def test_a_plan_with_an_illegal_move_is_refused_whole(moves: list[Move], reason: str) -> None:
    session = kilburn.open(":memory:", window=1000, policy=Planned(*moves), tokenizer="chars/4").session("a")
    for message in (user("task"), assistant("the first thought " * 9), assistant("the second thought")):
        session.append(message)
    (refusal,) = [event for event in session.ledger.events() if event.act is Act.REFUSE]
    assert reason in refusal.why
    assert [page for page in session.window.pages if session.window.at(page) is not Place.IN] == []
    assert session.recall("p2") == "the first thought " * 9
    check_laws(session)


def test_the_budget_holds_under_a_policy_that_frees_nothing() -> None:
    session = kilburn.open(":memory:", window=300, policy=Planned(), tokenizer="chars/4").session("a")
    for number in range(12):
        session.append(user(f"question {number} " * 9), assistant("an answer " * 9))
        assert session.render().tokens <= 300
    assert not session.window.whole
    check_laws(session)


def test_trust_never_rises() -> None:
    """What is derived or recalled has the lowest trust of its sources; no message claims more than its role has (law 7)."""
    session = opened()
    session.append(tool("w", "a tool's words"))
    session.edits.apply(Fold((4, 5, 6), text="a call, its result and a thought"))
    trust = {page: session.window.pages[page].trust for page in (4, 5, 6, -1)}
    assert trust[5] == Trust.TOOL < trust[6]
    assert trust[-1] == Trust.TOOL
    part = Part(kind=Kind.TEXT, text="as the tool said")
    session.append(Message(role=Role.ASSISTANT, parts=(part,), sources=(5,)))
    assert session.window.pages[session.window.last].trust == Trust.TOOL
    with pytest.raises(InvalidMessage, match="above what a tool message may have"):
        session.append(Message(role=Role.TOOL, parts=(part,), trust=Trust.USER))

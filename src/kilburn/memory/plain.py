"""Learning without a model: statements that patterns find in what the user says.

Preferences, identities, family, places, work, dates, quantities, habits, standing instructions, what is to be remembered,
corrections, and what is true no longer. Only texts of the user are read. A statement about the same thing supersedes the
earlier one (see `kilburn.memory.conflict`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import msgspec

from kilburn.claims import contradict, plain_name, same_claim
from kilburn.effect import Answer, Effect, Find, Note
from kilburn.memory.conflict import Verdict, settle
from kilburn.memory.statements import USER, Statement, statements
from kilburn.memory.view import MemoryView, Said
from kilburn.message import Role
from kilburn.move import Add, Retire
from kilburn.page import Claim

__all__ = ["Plain"]

_OPPOSITE = {"likes": "dislikes", "dislikes": "likes"}


@dataclass(frozen=True)
class Plain:
    """Learn what patterns find, without a model. The same session gives the same facts."""

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """The facts that the user's texts state, and what they supersede."""
        found: list[tuple[Said, Statement]] = []
        for said in view.new:
            if said.role is not Role.USER:
                continue
            for statement in statements(said.text, said.page.time):
                if not statement.claim.relation:
                    statement = yield from _corrected(statement, view, found)
                if statement is not None:
                    found = [*(pair for pair in found if not _is_undone(pair[1], statement)), (said, statement)]
        moves: list[Add | Retire] = []
        retired: set[int] = set()
        same = 0
        for said, statement in found:
            if statement.over:
                moves += _ended(said, statement, view, retired)
                continue
            claim = statement.claim
            add = Add(
                text=statement.text,
                claim=claim,
                cites=(said.cite,),
                since=said.page.time if statement.since is None else statement.since,
                until=statement.until,
                importance=statement.importance,
            )
            place = sum(isinstance(move, Add) for move in moves)
            standing = view.about(claim.subject, claim.relation)
            settled = settle(add, standing, now=said.page.time, trust=said.page.trust, place=place)
            same += settled.verdict is Verdict.SAME
            moves += [move for move in settled.moves if not (isinstance(move, Retire) and retired.intersection(move.pages))]
            retired.update(page for move in settled.moves if isinstance(move, Retire) for page in move.pages)
            if claim.relation in _OPPOSITE and Add in map(type, settled.moves):
                opposite = msgspec.structs.replace(statement, claim=msgspec.structs.replace(claim, relation=_OPPOSITE[claim.relation]))
                moves += _ended(said, opposite, view, retired, place)
        if same:
            yield Note(figures={"unchanged": same})
        return moves


def _is_undone(earlier: Statement, later: Statement) -> bool:
    """Whether a statement of the same plan takes an earlier one back: it corrects it, or says that it is over."""
    if later.over:
        return same_claim(earlier.claim, later.claim)
    return later.claim.correction and contradict(earlier.claim, later.claim)


def _corrected(
    statement: Statement, view: MemoryView, found: Sequence[tuple[Said, Statement]]
) -> Generator[Effect, Answer, Statement | None]:
    """ "It's Lisbon, not Porto": the fact with the wrong object, with the right one; None if not exactly one has it."""
    wrong = plain_name(statement.instead)
    claims = {claim.subject + "\n" + claim.relation: (text, claim) for text, claim in _said(found) if _has(claim, wrong)}
    if not claims:
        answer = yield Find(query=statement.instead, limit=20)
        for page in dict.fromkeys(hit.page for hit in answer.hits):
            claim = view.page(page).claim
            if claim is not None and _has(claim, wrong) and not claim.many and claim.subject.startswith(USER):
                claims[claim.subject + "\n" + claim.relation] = (view.text(page), claim)
    if len(claims) != 1:
        return None
    text, claim = next(iter(claims.values()))
    right = statement.claim.object
    return msgspec.structs.replace(
        statement,
        text=text.replace(claim.object, right),
        claim=msgspec.structs.replace(claim, object=right, correction=True),
    )


def _said(found: Sequence[tuple[Said, Statement]]) -> list[tuple[str, Claim]]:
    return [(statement.text, statement.claim) for _, statement in found]


def _has(claim: Claim, thing: str) -> bool:
    return plain_name(claim.object) == thing


def _ended(said: Said, statement: Statement, view: MemoryView, retired: set[int], place: int | None = None) -> list[Retire]:
    """Close what the user says is true no longer, or the opposite of (`place` is the `Add` that says so)."""
    claim = statement.claim
    pages = [
        page.id
        for page, _ in view.about(claim.subject, claim.relation)
        if page.id not in retired and page.trust <= said.page.trust and page.claim is not None and same_claim(page.claim, claim)
    ]
    if not pages:
        return []
    retired.update(pages)
    return [Retire(pages=tuple(pages), refers=place, until=said.page.time, why="no longer true")]

"""Learning without a model: statements that patterns find in what the user says.

Preferences, identities, family, places, work, dates, quantities, habits, standing instructions, what is to be remembered,
corrections, and what is true no longer. Only texts of the user are read. A statement about the same thing supersedes the
earlier one (see `kilburn.memory.conflict`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import msgspec

from kilburn.claims import plain_name, same_claim
from kilburn.effect import Answer, Effect, Find, Note
from kilburn.memory.conflict import Standing, settle
from kilburn.memory.doubt import doubted, doubts_of, with_doubts
from kilburn.memory.statements import USER, Statement, statements
from kilburn.memory.view import MemoryView, Utterance
from kilburn.message import Role
from kilburn.move import Add, Retire
from kilburn.page import Claim

_OPPOSITE = {"likes": "dislikes", "dislikes": "likes"}


@dataclass(frozen=True)
class Plain:
    """Learn what patterns find, without a model. The same session gives the same facts."""

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """The facts that the user's texts state, and what they supersede."""
        found: list[tuple[Utterance, Statement]] = []
        for said in view.new:
            for statement in statements(said.text, said.page.time) if said.role is Role.USER else ():
                meant = statement if statement.claim.relation else (yield from _corrected(statement, view, found))
                if meant is not None:
                    # What was said later in the same exchange holds.
                    found = [(by, one) for by, one in found if one.over == meant.over or not same_claim(one.claim, meant.claim)]
                    found.append((said, meant))
        new = [(_add(said, one), said.page.trust) for said, one in found if not one.over]
        standing = {page.id: (page, state) for _, one in found for page, state in view.standing(one.claim)}
        spoken = [said.page.time for said, one in found if not one.over]
        settled = settle(new, standing.values(), now=view.now, said=spoken)
        retired = {page for move in settled.moves if isinstance(move, Retire) for page in move.pages}
        moves = [*settled.moves]
        for said, statement in found:
            ended = _ended(said, statement, view, retired)
            if ended:
                retired.update(ended)
                moves.append(Retire(pages=ended, until=said.page.time, why="no longer true"))
        again = {
            page for how, pages in zip(settled.standings, settled.rivals, strict=True) if how is Standing.SAME for page in pages
        }
        for said in view.new:
            moves = with_doubts(moves, (yield from doubted(view, said, moves, again)))
        # What is over, or was said again, is doubted no longer.
        moot = {page for known in (*retired, *again) for page in doubts_of(view, (known,))}
        if moot:
            moves = with_doubts(moves, [Retire(tuple(sorted(moot)), until=view.new[-1].page.time, why="settled")])
        if unchanged := settled.standings.count(Standing.SAME):
            yield Note(figures={"unchanged": unchanged})
        return moves


def _add(said: Utterance, statement: Statement) -> Add:
    return Add(
        text=statement.text,
        claim=statement.claim,
        cites=(said.cite,),
        since=said.page.time if statement.since is None else statement.since,
        until=statement.until,
        importance=statement.importance,
    )


def _corrected(
    statement: Statement, view: MemoryView, found: Sequence[tuple[Utterance, Statement]]
) -> Generator[Effect, Answer, Statement | None]:
    """ "It's Lisbon, not Porto": the fact with the wrong object, with the right one; None if not exactly one has it."""
    wrong = plain_name(statement.instead)
    if wrong:
        known = _said(found)
    else:
        known = _said(found) or _before(view)
        known = [(text, claim) for text, claim in known if not claim.many and claim.object[:1].isupper()]
    claims = {claim.subject + "\n" + claim.relation: (text, claim) for text, claim in known if not wrong or _has(claim, wrong)}
    if wrong and not claims:
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


def _before(view: MemoryView) -> list[tuple[str, Claim]]:
    """What the user stated last before these messages; corrections alone ("no, I meant Braga") are of what came before them."""
    for said in reversed(view.earlier):
        if said.role is Role.USER:
            stated = statements(said.text, said.page.time)
            known = [(one.text, one.claim) for one in stated if one.claim.relation]
            if known or not stated:
                return known
    return []


def _said(found: Sequence[tuple[Utterance, Statement]]) -> list[tuple[str, Claim]]:
    return [(statement.text, statement.claim) for _, statement in found]


def _has(claim: Claim, thing: str) -> bool:
    return plain_name(claim.object) == thing


def _ended(said: Utterance, statement: Statement, view: MemoryView, retired: set[int]) -> tuple[int, ...]:
    """The pages in force of what somebody says is over, of the opposite of what they say, or of what was moved."""
    claim = statement.claim
    if statement.instead and claim.relation and plain_name(statement.instead) != plain_name(claim.object):
        wrong = msgspec.structs.replace(claim, object=statement.instead)
        return tuple(
            page.id
            for page, _ in view.standing(wrong)
            if page.id not in retired
            and page.trust <= said.page.trust
            and page.claim is not None
            and same_claim(page.claim, wrong)
        )
    if not (statement.over or statement.replaces):
        if claim.relation not in _OPPOSITE:
            return ()
        claim = msgspec.structs.replace(claim, relation=_OPPOSITE[claim.relation])
    return tuple(
        page.id
        for page, _ in view.standing(claim)
        if page.id not in retired
        and page.trust <= said.page.trust
        and page.claim is not None
        and same_claim(page.claim, claim) is not statement.replaces
    )

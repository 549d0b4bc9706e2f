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
        pairs: list[tuple[Utterance, Statement]] = []
        for utterance in view.new:
            for statement in statements(utterance.text, utterance.page.time) if utterance.role is Role.USER else ():
                resolved = statement if statement.claim.relation else (yield from _corrected(statement, view, pairs))
                if resolved is not None:
                    # What was said later in the same exchange holds.
                    pairs = [
                        (by, stated)
                        for by, stated in pairs
                        if stated.over == resolved.over or not same_claim(stated.claim, resolved.claim)
                    ]
                    pairs.append((utterance, resolved))
        new = [(_add(utterance, stated), utterance.page.trust) for utterance, stated in pairs if not stated.over]
        standing = {page.id: (page, state) for _, stated in pairs for page, state in view.standing(stated.claim)}
        spoken = [utterance.page.time for utterance, stated in pairs if not stated.over]
        settled = settle(new, standing.values(), now=view.now, said_times=spoken)
        retired = {page for move in settled.moves if isinstance(move, Retire) for page in move.pages}
        moves = [*settled.moves]
        for utterance, statement in pairs:
            ended = _ended(utterance, statement, view, retired)
            if ended:
                retired.update(ended)
                moves.append(Retire(pages=ended, until=utterance.page.time, why="no longer true"))
        repeated = {
            page for how, pages in zip(settled.standings, settled.rivals, strict=True) if how is Standing.SAME for page in pages
        }
        for utterance in view.new:
            moves = with_doubts(moves, (yield from doubted(view, utterance, moves, repeated)))
        # What is over, or was said again, is doubted no longer.
        moot = {page for fact in (*retired, *repeated) for page in doubts_of(view, (fact,))}
        if moot:
            moves = with_doubts(moves, [Retire(tuple(sorted(moot)), until=view.new[-1].page.time, why="settled")])
        if unchanged := settled.standings.count(Standing.SAME):
            yield Note(figures={"unchanged": unchanged})
        return moves


def _add(utterance: Utterance, statement: Statement) -> Add:
    return Add(
        text=statement.text,
        claim=statement.claim,
        cites=(utterance.cite,),
        since=utterance.page.time if statement.since is None else statement.since,
        until=statement.until,
        importance=statement.importance,
    )


def _corrected(
    statement: Statement, view: MemoryView, pairs: Sequence[tuple[Utterance, Statement]]
) -> Generator[Effect, Answer, Statement | None]:
    """ "It's Lisbon, not Porto": the fact with the wrong object, with the right one; None if not exactly one has it."""
    wrong = plain_name(statement.instead)
    if wrong:
        candidates = _said(pairs)
    else:
        candidates = _said(pairs) or _before(view)
        candidates = [(text, claim) for text, claim in candidates if not claim.many and claim.object[:1].isupper()]
    claims = {
        claim.subject + "\n" + claim.relation: (text, claim) for text, claim in candidates if not wrong or _has(claim, wrong)
    }
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
    for utterance in reversed(view.earlier):
        if utterance.role is Role.USER:
            stated = statements(utterance.text, utterance.page.time)
            claims = [(statement.text, statement.claim) for statement in stated if statement.claim.relation]
            if claims or not stated:
                return claims
    return []


def _said(pairs: Sequence[tuple[Utterance, Statement]]) -> list[tuple[str, Claim]]:
    return [(statement.text, statement.claim) for _, statement in pairs]


def _has(claim: Claim, thing: str) -> bool:
    return plain_name(claim.object) == thing


def _ended(utterance: Utterance, statement: Statement, view: MemoryView, retired: set[int]) -> tuple[int, ...]:
    """The pages in force of what somebody says is over, of the opposite of what they say, or of what was moved."""
    claim = statement.claim
    if statement.instead and claim.relation and plain_name(statement.instead) != plain_name(claim.object):
        wrong = msgspec.structs.replace(claim, object=statement.instead)
        return tuple(
            page.id
            for page, _ in view.standing(wrong)
            if page.id not in retired
            and page.trust <= utterance.page.trust
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
        and page.trust <= utterance.page.trust
        and page.claim is not None
        and same_claim(page.claim, claim) is not statement.replaces
    )

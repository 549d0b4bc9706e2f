"""Learning without a model: patterns find statements in the messages of the user.

They find preferences, identities, family, places, work, dates, quantities, habits, standing instructions, things to remember,
corrections, and facts that are no longer true. Only texts of the user are read. A statement about the same thing supersedes the
earlier one (see `kilburn.memory.conflict`).
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import msgspec

from kilburn.claims import plain_name, same_claim
from kilburn.effect import Answer, Effect, Find, Note
from kilburn.memory.conflict import Standing, settle
from kilburn.memory.doubt import combine_moves, find_doubts, raise_doubts
from kilburn.memory.statements import USER, Statement, statements
from kilburn.memory.view import MemoryView, Utterance
from kilburn.message import Role
from kilburn.move import Add, Retire
from kilburn.page import Claim

_OPPOSITE = {"likes": "dislikes", "dislikes": "likes"}


@dataclass(frozen=True)
class Plain:
    """Learn the statements that patterns find, without a model. The same session gives the same facts."""

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """Return the facts that the user's texts state, and what they supersede."""
        pairs: list[tuple[Utterance, Statement]] = []
        for utterance in view.new:
            for statement in statements(utterance.text, utterance.page.time) if utterance.role is Role.USER else ():
                resolved = statement if statement.claim.relation else (yield from _correct(statement, view, pairs))
                if resolved is not None:
                    # The later of two statements in the same exchange holds.
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
            ended = _ended_pages(utterance, statement, view, retired)
            if ended:
                retired.update(ended)
                moves.append(Retire(pages=ended, until=utterance.page.time, why="no longer true"))
        repeated = {
            page for how, pages in zip(settled.standings, settled.rivals, strict=True) if how is Standing.SAME for page in pages
        }
        for utterance in view.new:
            moves = combine_moves(moves, (yield from raise_doubts(view, utterance, moves, repeated)))
        # Ended and repeated facts are no longer doubted.
        moot = {page for fact in (*retired, *repeated) for page in find_doubts(view, (fact,))}
        if moot:
            moves = combine_moves(moves, [Retire(tuple(sorted(moot)), until=view.new[-1].page.time, why="settled")])
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


def _correct(
    statement: Statement, view: MemoryView, pairs: Sequence[tuple[Utterance, Statement]]
) -> Generator[Effect, Answer, Statement | None]:
    """Return the fact with the right object for a correction such as "It's Lisbon, not Porto"; None unless exactly one fact has
    the wrong object."""
    wrong = plain_name(statement.instead)
    if wrong:
        candidates = _stated_claims(pairs)
    else:
        candidates = _stated_claims(pairs) or _earlier_claims(view)
        candidates = [(text, claim) for text, claim in candidates if not claim.many and claim.object[:1].isupper()]
    claims = {
        claim.subject + "\n" + claim.relation: (text, claim)
        for text, claim in candidates
        if not wrong or _has_object(claim, wrong)
    }
    if wrong and not claims:
        answer = yield Find(query=statement.instead, limit=20)
        for page in dict.fromkeys(hit.page for hit in answer.hits):
            claim = view.page(page).claim
            if claim is not None and _has_object(claim, wrong) and not claim.many and claim.subject.startswith(USER):
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


def _earlier_claims(view: MemoryView) -> list[tuple[str, Claim]]:
    """Return what the user stated last before these messages; a bare correction ("no, I meant Braga") refers to that."""
    for utterance in reversed(view.earlier):
        if utterance.role is Role.USER:
            stated = statements(utterance.text, utterance.page.time)
            claims = [(statement.text, statement.claim) for statement in stated if statement.claim.relation]
            if claims or not stated:
                return claims
    return []


def _stated_claims(pairs: Sequence[tuple[Utterance, Statement]]) -> list[tuple[str, Claim]]:
    return [(statement.text, statement.claim) for _, statement in pairs]


def _has_object(claim: Claim, thing: str) -> bool:
    return plain_name(claim.object) == thing


def _ended_pages(utterance: Utterance, statement: Statement, view: MemoryView, retired: set[int]) -> tuple[int, ...]:
    """Return the pages in force that a statement ends: the same claim, the opposite, or the appointment that was moved."""
    claim, differs = statement.claim, statement.replaces
    if statement.instead and claim.relation and plain_name(statement.instead) != plain_name(claim.object):
        claim, differs = msgspec.structs.replace(claim, object=statement.instead), False
    elif not (statement.over or statement.replaces):
        if claim.relation not in _OPPOSITE:
            return ()
        claim = msgspec.structs.replace(claim, relation=_OPPOSITE[claim.relation])
    return tuple(
        page.id
        for page, _ in view.standing(claim)
        if page.id not in retired
        and page.trust <= utterance.page.trust
        and page.claim is not None
        and same_claim(page.claim, claim) is not differs
    )

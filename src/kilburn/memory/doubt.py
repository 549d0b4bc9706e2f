"""Doubts: sentences that may make a fact untrue, where neither a rule nor a model decides.

A sentence with a sign of change ("moved", "not any more", "instead") that speaks of the same matter as a fact in force *doubts*
that fact. Nothing is retired. A page of the memory stores the sentence; it cites the message and has the fact as its source, so
it is forgotten with either. A search that finds the fact returns the newest doubt before it and marks the fact (`Found.doubted`).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence

import msgspec

from kilburn.claims import DOUBTS, SPEAKER
from kilburn.effect import Answer, Effect, Find
from kilburn.memory.clauses import clauses
from kilburn.memory.resemblance import MAX_DOUBTED_FACTS, doubted_facts, resemblance_test
from kilburn.memory.view import MemoryView, Utterance
from kilburn.memory.words import is_sign
from kilburn.message import Kind, Role
from kilburn.move import Add, Retire
from kilburn.page import Claim
from kilburn.search.confidence import is_english
from kilburn.search.dates import grounded

MAX_DOUBTS_PER_FACT = 3
"""Doubts about the same facts that stay in force; older ones are retired."""

MAX_SENTENCE_CHARS = 400
"""Characters of a sentence; longer ones raise no doubt."""


def raise_doubts(
    view: MemoryView, utterance: Utterance, moves: Sequence[Add | Retire], excluded: Iterable[int] = ()
) -> Generator[Effect, Answer, list[Add | Retire]]:
    """Return the doubts that a message raises, and the retirement of the oldest doubts about the same facts.

    Args:
        moves: moves of the same plan so far. Facts that they add for earlier messages can be doubted; facts that they retire
            are not.
        excluded: facts that are not doubted, because the message repeats them.
    """
    changes: list[Add | Retire] = []
    if utterance.role is not Role.USER or not is_english(utterance.text):
        return changes
    settled = {page for move in moves if isinstance(move, Retire) for page in move.pages} | set(excluded)
    adds = [move for move in moves if isinstance(move, Add)]
    new = [at for at, add in enumerate(adds) if add.kind is Kind.FACT and add.cites and max(add.cites)[1] < utterance.page.id]
    for sentence in _sentences(utterance.text):
        answer = yield Find(query=sentence, limit=20)
        candidates = {hit.page: view.page(hit.page) for hit in answer.hits}
        candidates |= {page.id: page for page, _ in view.about(SPEAKER, "")}
        facts = [page for number, page in candidates.items() if page.kind is Kind.FACT and number not in settled]
        resembles = resemblance_test(sentence)
        pages = tuple(page.id for page in facts if resembles(view.text(page.id), page.claim))
        refers = tuple(at for at in new if resembles(adds[at].text, adds[at].claim))
        if not 0 < len(pages) + len(refers) <= MAX_DOUBTED_FACTS:
            continue
        changes.append(
            Add(
                text=f"The user said: {grounded(sentence, utterance.page.time)[0]}",
                kind=Kind.TEXT,
                claim=Claim(subject=SPEAKER, relation=DOUBTS, confidence=0.5, many=True),
                sources=pages,
                refers=refers,
                cites=(utterance.cite,),
                since=utterance.page.time,
                why="may have changed",
            )
        )
        # Some older doubts stay: if the newest is forgotten, a search shows the one before it.
        if older := sorted(find_doubts(view, pages))[: 1 - MAX_DOUBTS_PER_FACT]:
            changes.append(Retire(tuple(older), until=utterance.page.time, why="newer doubts"))
        settled.update(pages)
    return changes


def find_doubts(view: MemoryView, pages: Sequence[int]) -> tuple[int, ...]:
    """Return the doubts in force about some facts and no others."""
    facts = set(pages)
    return tuple(
        page.id
        for page in (view.made_from(pages) if pages else ())
        if page.claim is not None and page.claim.relation == DOUBTS and doubted_facts(page) <= facts
    )


def combine_moves(moves: Sequence[Add | Retire], more: Sequence[Add | Retire]) -> list[Add | Retire]:
    """Append moves to others so that no page is retired twice."""
    retired = {page for move in moves if isinstance(move, Retire) for page in move.pages}
    combined = list(moves)
    for move in more:
        if isinstance(move, Retire):
            remaining = tuple(page for page in move.pages if page not in retired)
            retired.update(remaining)
            if remaining:
                combined.append(msgspec.structs.replace(move, pages=remaining))
        else:
            combined.append(move)
    return combined


def _sentences(text: str) -> Iterator[str]:
    """Yield the sentences with a sign of change that somebody says in their own name."""
    previous = ""
    for clause in clauses(text):
        whole, rest = previous, clause.rest
        if whole.endswith(rest):
            continue  # the next clause of the same sentence
        previous = rest
        if len(rest) <= MAX_SENTENCE_CHARS and is_sign(rest):
            yield rest

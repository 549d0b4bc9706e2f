"""Learning facts with a model, with one decision per fact (Mem0, arXiv 2504.19413).

A model lists the facts of an exchange, given the earlier messages and a running summary. For each fact it sees the ten nearest
known facts and decides: ADD, UPDATE, DELETE or NOOP. If the message has a sign of change, other facts about the same subject are
among them. Clear cases (a repeated fact, another object of a relation that has one) are decided without the model. A decision
counts only for a fact that the model was shown, that is trusted no more than the speaker, and that the decision fits. A person
can undo it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Sequence
from dataclasses import dataclass

import msgspec

from kilburn.claims import SPEAKER, plain_name, topic
from kilburn.effect import Answer, Ask, Effect, Find, Note
from kilburn.memory.conflict import Standing, settle
from kilburn.memory.doubt import combine_moves, raise_doubts
from kilburn.memory.extraction import Extracted, Failed, ask_for, extract_facts
from kilburn.memory.prompts import prompt
from kilburn.memory.view import SUMMARY, MemoryView
from kilburn.memory.words import agreement, is_known, is_sign
from kilburn.message import Kind, Trust
from kilburn.model import object_schema
from kilburn.move import Add, Retire
from kilburn.page import Claim
from kilburn.search.confidence import is_english
from kilburn.wire.quotation import with_headings

REPETITION = 0.95
"""The share of a fact's words that a known fact must have for the fact to count as repeated."""

MIN_AGREEMENT = 0.5
"""The agreement (see `words.agreement`) at which a fact may update another of any subject."""

SUMMARY_INTERVAL = 10
"""Texts of the session between two summaries."""

_DECIDE = prompt("decide")
_SUMMARISE = prompt("summarise")


class _Decision(msgspec.Struct):
    op: str
    id: int = 0


@dataclass(frozen=True)
class Facts:
    """Learn facts with a model.

    Args:
        nearest: known facts in the question about one fact.
        summary: whether a running summary of the session is kept.
        tokens: cap of the reply that lists facts.
        timeout: seconds for one reply.
    """

    nearest: int = 10
    summary: bool = True
    tokens: int = 1024
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.nearest < 0 or self.tokens < 1 or self.timeout <= 0:
            raise ValueError(f"{self}: nearest is 0 or more, tokens and timeout above 0")

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """Return the facts of the exchange, with what they supersede."""
        facts = yield from extract_facts(view, tokens=self.tokens, timeout=self.timeout)
        if isinstance(facts, Failed):
            yield Note(outcome=facts.outcome, why=f"no list of facts: {facts.why}")
            return ()
        moves: list[Add | Retire] = []
        retired: set[int] = set()
        figures = Counter[str]()
        for fact in facts:
            place = sum(isinstance(move, Add) for move in moves)
            for move in (yield from self._decided(fact, view, place, retired, figures, moves)):
                if isinstance(move, Retire):
                    retired.update(move.pages)
                moves.append(move)
        for utterance in view.new:
            # Facts that the model does not mention may still be doubted.
            moves = combine_moves(moves, (yield from raise_doubts(view, utterance, moves)))
        if figures:
            yield Note(figures=dict(figures))
        if self.summary:
            moves += yield from self._summarised(view)
        return moves

    def _decided(
        self,
        fact: Extracted,
        view: MemoryView,
        place: int,
        retired: set[int],
        figures: Counter[str],
        moves: Sequence[Add | Retire],
    ) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """Return the moves for one fact."""
        add, trust = fact.add, min(fact.utterance.page.trust, fact.add.trust or Trust.OPERATOR)
        answer = yield Find(query=add.text, limit=self.nearest)
        changed = is_sign(fact.utterance.text)
        listed = [hit.page for hit in answer.hits if changed or agreement(add.text, hit.text) > 0]
        if changed:
            # The fact may be known in other words.
            listed += [page.id for page, _ in view.about(add.claim.subject if add.claim is not None else SPEAKER, "")]
        facts = [page for page in dict.fromkeys(listed) if page not in retired and view.page(page).kind is Kind.FACT]
        near = {page: view.text(page) for page in facts[: self.nearest]}
        if any(is_known(add.text, text, REPETITION) for text in near.values()) or any(
            isinstance(move, Add) and plain_name(move.text) == plain_name(add.text) for move in moves
        ):
            figures["unchanged"] += 1
            return ()
        if add.claim is not None:
            standing = [row for row in view.standing(add.claim) if row[0].id not in retired]
            settled = settle([(add, trust)], standing, now=view.now, said_times=[fact.utterance.page.time], offset=place)
            if settled.standings[0] is Standing.SAME:
                figures["unchanged"] += 1
                return ()
            if settled.standings[0] in (Standing.SUPERSEDES, Standing.EARLIER):
                return settled.moves
        if not near:
            return (add,)
        numbered = dict(enumerate(near, 1))
        decision = yield from ask_for(self._question(add, [near[page] for page in numbered.values()]), _Decision)
        if isinstance(decision, Failed) or decision.op not in ("ADD", "UPDATE", "DELETE", "NOOP"):
            figures["undecided"] += 1
            return (add,)
        if decision.op == "ADD":
            return (add,)
        page = numbered.get(decision.id)
        if page is None:
            figures["unmatched"] += 1
            return (add,)
        if not _is_fit(decision.op, fact, near[page], view.page(page).claim):
            figures["spared"] += 1
            return (add,)
        if decision.op == "NOOP":
            figures["unchanged"] += 1
            return ()
        if view.page(page).trust > trust:
            figures["spared"] += 1
            return (add,)
        why = "updated" if decision.op == "UPDATE" else "no longer true"
        return (add, Retire((page,), refers=place, until=fact.utterance.page.time, why=why))

    def _question(self, add: Add, near: Sequence[str]) -> Ask:
        listed = "\n".join(f"{at}. {text}" for at, text in enumerate(near, 1))
        fields = {"op": {"enum": ["ADD", "UPDATE", "DELETE", "NOOP"]}, "id": {"enum": list(range(len(near) + 1))}}
        return Ask(
            prompt=with_headings([("known facts", listed), ("new fact", add.text)]),
            system=_DECIDE,
            max_tokens=48,
            schema=object_schema(fields),
            purpose="one fact against what is known",
            timeout=self.timeout,
        )

    def _summarised(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """Return the next running summary, when enough was said since the last. If the model fails, the last one stays."""
        last = max((page for _, page in view.page(view.summary_page).cites), default=0) if view.summary_page else 0
        texts = [utterance for utterance in (*view.earlier, *view.new) if utterance.page.id > last]
        if len(texts) < SUMMARY_INTERVAL or view.taint < Trust.AGENT:
            return ()
        parts = [("summary so far", view.summary)] if view.summary else []
        parts += [(f"{utterance.role}", utterance.text[:2000]) for utterance in texts]
        answer = yield Ask(
            prompt=with_headings(parts), system=_SUMMARISE, max_tokens=256, purpose="running summary", timeout=self.timeout
        )
        if not answer.ok:
            yield Note(figures={"unsummarised": 1})
            return ()
        claim = Claim(subject=f"session {view.session}", relation=SUMMARY, object=texts[-1].address)
        text = f"Summary of session {view.session}: {' '.join(answer.text.split())}"
        sources = (view.summary_page,) if view.summary_page else ()
        add = Add(text=text, kind=Kind.TEXT, claim=claim, sources=sources, cites=tuple(utterance.cite for utterance in texts))
        return (add, *([Retire(sources, why="a newer summary")] if sources else []))


def _is_fit(op: str, fact: Extracted, known_text: str, claim: Claim | None) -> bool:
    """Return whether a decision may be right: a fact that says nothing new has words of the known one, one that ends it a sign of
    that, and an update the same subject and relation or most of the words; with a sign of change, the same subject or half of the
    words."""
    changed = is_sign(fact.add.text) or is_sign(fact.utterance.text)
    if op == "DELETE":
        return changed
    common = agreement(fact.add.text, known_text)
    if op == "NOOP":
        return common > 0 or not is_english(fact.utterance.text)
    new_claim = fact.add.claim
    parts = 2 if changed else 3
    alike = claim is not None and new_claim is not None and topic(claim)[:parts] == topic(new_claim)[:parts]
    return alike or (common >= MIN_AGREEMENT if changed else common > MIN_AGREEMENT)

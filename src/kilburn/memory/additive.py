"""Learning facts with a model, in one pass that only adds facts (as newer versions of Mem0 do).

The model sees the nearest known facts and lists only what is new. Nothing is retired: both sides of a
contradiction are kept, and a search marks them. A fact that is known in nearly the same words is not written again.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

from kilburn.claims import same_claim
from kilburn.effect import Answer, Effect, Find, Note
from kilburn.memory.extraction import Failed, extract_facts
from kilburn.memory.view import MemoryView
from kilburn.memory.words import is_known
from kilburn.message import Kind
from kilburn.move import Add


@dataclass(frozen=True)
class Additive:
    """Learn facts with a model, adding only.

    Args:
        nearest: known facts that the model sees.
        alike: the share of a fact's words that a known fact must have for the fact to count as known, 0 to 1.
        tokens: cap of the reply.
        timeout: seconds for the reply.
    """

    nearest: int = 10
    alike: float = 0.8
    tokens: int = 1024
    timeout: float = 120.0

    def __post_init__(self) -> None:
        if self.nearest < 0 or not 0 <= self.alike <= 1 or self.tokens < 1 or self.timeout <= 0:
            raise ValueError(f"{self}: nearest is 0 or more, alike 0 to 1, tokens and timeout above 0")

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add]]:
        """Return the facts of the exchange that are not known yet."""
        answer = yield Find(query="\n".join(utterance.text for utterance in view.new)[:2000], limit=self.nearest)
        known_facts = [hit.text for hit in answer.hits if view.page(hit.page).kind is Kind.FACT]
        facts = yield from extract_facts(view, tokens=self.tokens, timeout=self.timeout, known_facts=known_facts)
        if isinstance(facts, Failed):
            yield Note(outcome=facts.outcome, why=f"no list of facts: {facts.why}")
            return ()
        adds: list[Add] = []
        for fact in facts:
            answer = yield Find(query=fact.add.text, limit=self.nearest)
            near = [Add(text=hit.text, claim=view.page(hit.page).claim) for hit in answer.hits]
            if not any(self._is_known(fact.add, known_fact) for known_fact in (*near, *adds)):
                adds.append(fact.add)
        if unchanged := len(facts) - len(adds):
            yield Note(figures={"unchanged": unchanged})
        return adds

    def _is_known(self, add: Add, known_fact: Add) -> bool:
        if add.claim is not None and known_fact.claim is not None and same_claim(add.claim, known_fact.claim):
            return True
        return is_known(add.text, known_fact.text, self.alike)

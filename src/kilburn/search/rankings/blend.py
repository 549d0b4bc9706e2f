"""Sums words and meaning, and adds what stands around a page, who said it and when.

Scores are summed and not ranks, because a rank does not say by how much one is better. Neighbours and the whole session
count, because evidence comes in stretches: an answer stands next to its question. Weights were chosen on half of the
developers' half of LoCoMo, BEAM and CRD3, and are the same for all three.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from kilburn.backend import SegmentKind
from kilburn.collections.collecting import since_of
from kilburn.message import Role
from kilburn.retrieval import Candidate, Query, Scored, best_first
from kilburn.search.dates import closeness, times_in

TURNS = ((1, 1.0), (2, 0.7), (3, 0.5), (4, 0.3))
"""How far away a neighbour is, and how much it counts."""

SHORT = 100
"""Tokens of a page whose length does not matter."""


class Blend:
    """The default ranking. A weight of 0 switches a term off.

    Args:
        words: BM25, divided by that of the best candidate.
        meaning: cosine to the query.
        near: the better neighbour before or after, and less of those further away.
        session: the best page of the same session or document.
        speaker: whether somebody said it whom the query names.
        length: taken off for each time that a message is e times longer than `SHORT`: a long answer matches anything a
            little. What a tool returned is long by nature, and nothing is taken off.
        time: how well its time fits the one that the query names.
        importance: what a person or policy set.
    """

    def __init__(
        self,
        words: float = 0.4,
        meaning: float = 0.6,
        near: float = 0.4,
        session: float = 0.4,
        speaker: float = 0.15,
        length: float = 0.2,
        time: float = 0.3,
        importance: float = 0.1,
    ) -> None:
        self.words, self.meaning, self.near, self.session = words, meaning, near, session
        self.speaker, self.length, self.time, self.importance = speaker, length, time, importance
        if below := [f"{name}={weight}" for name, weight in vars(self).items() if weight < 0]:
            raise ValueError(f"{', '.join(below)}: a weight is 0 or more")

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> list[Scored]:
        """All candidates, best first; of equals, the newer one."""
        best = max((candidate.words for candidate in candidates), default=0.0) or 1.0
        own = [(self.words * one.words / best, self.meaning * max(0.0, one.meaning or 0.0)) for one in candidates]
        # Of each segment, what each page has itself.
        sums: dict[int, dict[int, float]] = {}
        for one, (words, meaning) in zip(candidates, own, strict=True):
            sums.setdefault(one.segment, {})[one.page.id] = words + meaning
        sessions = {segment: max(0.0, *of.values()) for segment, of in sums.items()}
        times = times_in(query.text, query.now) if self.time else []
        scored = []
        for index, (one, (words, meaning)) in enumerate(zip(candidates, own, strict=True)):
            page = one.page
            terms = {"words": words, "meaning": meaning}
            if one.kind in (SegmentKind.MEMORY, SegmentKind.NOTES):
                # A fact or a note stands alone: as well as it matches itself, it would match in its session.
                terms["session"] = self.session * (words + meaning)
            else:
                terms["session"] = self.session * sessions[one.segment]
                terms["near"] = self.near * _near(sums[one.segment], page.id)
            if query.speakers and page.speaker in query.speakers:
                terms["speaker"] = self.speaker
            if page.tokens > SHORT and page.role is not Role.TOOL:
                terms["length"] = -self.length * math.log(page.tokens / SHORT)
            if times:
                terms["time"] = self.time * closeness(times, since_of(page))
            if one.state.importance:
                terms["importance"] = self.importance * one.state.importance
            terms = {name: value for name, value in terms.items() if value}
            scored.append(Scored(index=index, score=sum(terms.values()), terms=terms))
        return best_first(scored, candidates)


def _near(sums: Mapping[int, float], page: int) -> float:
    """What the pages beside a page add; of two that are as far away, the better one."""
    near = 0.0
    for turns, weight in TURNS:
        before, after = sums.get(page - turns, 0.0), sums.get(page + turns, 0.0)
        near += weight * (before if before > after else after)
    return near

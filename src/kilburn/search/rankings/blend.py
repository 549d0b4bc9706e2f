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

FOLLOWING, WORDS_POWER, WORDS_CONTEXT = 0.6, 1.5, 1.5
"""If no candidate has a vector: weight of the neighbour after a page relative to the neighbour before it, because an answer
follows its question; exponent of the share of words; factor of the neighbours and the speaker. Chosen on conversations of LoCoMo
and chats of BEAM."""

SHORT = 100
"""Tokens of a page whose length does not matter."""

ALONE = (SegmentKind.MEMORY, SegmentKind.NOTES)
"""Segments whose pages have no neighbours."""


class Blend:
    """The default ranking. A weight of 0 switches a term off.

    Args:
        words: BM25, divided by that of the best candidate; to the power 1.5 where no candidate has a vector.
        meaning: cosine to the query.
        near: score of the better neighbour at each distance, with weights that decrease with the distance.
        session: score of the best page of the same session or document.
        speaker: whether the query names the speaker.
        length: penalty times the natural logarithm of a message's length relative to `SHORT`, because a long answer matches every
            query a little. Results of tools have no penalty.
        time: how well the page's time matches the time in the query.
        importance: as set by a person or policy.
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
        """Return all candidates, best first; of equals, the newer one."""
        best = max([candidate.words for candidate in candidates], default=0.0) or 1.0
        by_words = all(candidate.meaning is None for candidate in candidates)
        power, following, context = (WORDS_POWER, FOLLOWING, WORDS_CONTEXT) if by_words else (1, 1.0, 1.0)
        matches: list[tuple[float, float]] = []
        # Of each segment whose pages have neighbours, what each page has itself.
        sums: dict[int, dict[int, float]] = {}
        for candidate in candidates:
            cosine = candidate.meaning
            words, meaning = (
                self.words * (candidate.words / best) ** power,
                self.meaning * cosine if cosine is not None and cosine > 0 else 0.0,
            )
            matches.append((words, meaning))
            if candidate.kind not in ALONE:
                sums.setdefault(candidate.segment, {})[candidate.page.id] = words + meaning
        sessions = {segment: self.session * max(0.0, *of.values()) for segment, of in sums.items()}
        near = {segment: _near(of, following) for segment, of in sums.items()} if self.near else {}
        times = times_in(query.text, query.now) if self.time else []
        speakers = query.speakers if self.speaker else frozenset()
        scored = []
        for index, candidate in enumerate(candidates):
            (words, meaning), page = matches[index], candidate.page
            terms = {}
            if words:
                terms["words"] = words
            if meaning:
                terms["meaning"] = meaning
            if candidate.kind in ALONE:
                # A fact or a note stands alone: as well as it matches itself, it would match in its session.
                session, beside = self.session * (words + meaning), 0.0
            else:
                session, beside = sessions[candidate.segment], near[candidate.segment][page.id] if near else 0.0
            if session:
                terms["session"] = session
            if beside:
                terms["near"] = context * self.near * beside
            if speakers and page.speaker in speakers:
                terms["speaker"] = context * self.speaker
            if page.tokens > SHORT and page.role is not Role.TOOL and self.length:
                terms["length"] = -self.length * math.log(page.tokens / SHORT)
            if times and (time := self.time * closeness(times, since_of(page))):
                terms["time"] = time
            if (importance := candidate.state.importance) and self.importance:
                terms["importance"] = self.importance * importance
            scored.append(Scored(index=index, score=sum(terms.values()), terms=terms))
        return best_first(scored, candidates)


def _near(sums: Mapping[int, float], weight_after: float) -> dict[int, float]:
    """Return the score that the neighbours of each page add. Of two neighbours at the same distance, the better counts;
    `weight_after` weights the neighbour after the page."""
    near: dict[int, float] = {}
    score = sums.get
    for page in sums:
        total = 0.0
        for turns, weight in TURNS:
            previous, following = score(page - turns, 0.0), weight_after * score(page + turns, 0.0)
            total += weight * (previous if previous > following else following)
        near[page] = total
    return near

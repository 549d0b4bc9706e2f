"""Reciprocal rank fusion (Cormack et al. 2009): the sum of 1 / (60 + rank) over words and meaning.

It is here to be compared with. On our data it loses to the better of its two arms, because it throws the scores away.
"""

from __future__ import annotations

from collections.abc import Sequence

from kilburn.retrieval import Candidate, Query, Scored, best_first


class Rrf:
    """Fuses by ranks.

    Args:
        k: the larger, the less the first places count; 0 or more.
    """

    def __init__(self, k: int = 60) -> None:
        if k < 0:
            raise ValueError(f"k={k} is below 0")
        self.k = k

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> list[Scored]:
        """Return the candidates, best first; of equals, the newer one."""
        terms: dict[int, dict[str, float]] = {}
        arms = {
            "words": [candidate.words for candidate in candidates],
            "meaning": [candidate.meaning or 0.0 for candidate in candidates],
        }
        for name, scores in arms.items():
            order = sorted((index for index, score in enumerate(scores) if score > 0), key=lambda index: -scores[index])
            for place, index in enumerate(order, 1):
                terms.setdefault(index, {})[name] = 1 / (self.k + place)
        scored = (Scored(index=index, score=sum(parts.values()), terms=parts) for index, parts in terms.items())
        return best_first(scored, candidates)

"""By words alone: BM25 as the store's index computes it."""

from __future__ import annotations

from collections.abc import Sequence

from kilburn.retrieval import Candidate, Query, Scored, best_first


class Words:
    """Only pages that share a word with the query. The baseline that every other ranking has to beat."""

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> list[Scored]:
        """Best first; of equals, the newer one."""
        scored = (
            Scored(index=index, score=candidate.words, terms={"words": candidate.words})
            for index, candidate in enumerate(candidates)
            if candidate.words > 0
        )
        return best_first(scored, candidates)

"""By meaning alone: the cosine of a passage's vector to the query's."""

from __future__ import annotations

from collections.abc import Sequence

from kilburn.retrieval import Candidate, Query, Scored, best_first


class Meaning:
    """Only pages that have a vector."""

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> list[Scored]:
        """Best first; of equals, the newer one."""
        scored = (
            Scored(index=index, score=candidate.meaning, terms={"meaning": candidate.meaning})
            for index, candidate in enumerate(candidates)
            if candidate.meaning is not None
        )
        return best_first(scored, candidates)

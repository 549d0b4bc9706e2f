"""By meaning alone: the cosine of a passage's vector to the query's."""

from __future__ import annotations

from collections.abc import Sequence

from kilburn.retrieval import Candidate, Query, Scored, best_first


class Meaning:
    """Only pages that have a vector."""

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> list[Scored]:
        """Best first; of equals, the newer one."""
        found = (
            Scored(index=index, score=one.meaning, terms={"meaning": one.meaning})
            for index, one in enumerate(candidates)
            if one.meaning is not None
        )
        return best_first(found, candidates)

"""How likely it is that what was found contains an answer.

A logistic model of two figures, fitted on LoCoMo's questions: asked of their own conversation, and, with the names
exchanged, of another one, in which nobody spoke of it. It knows nothing of what a text says, so a passage that is about
the same thing and answers something else passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kilburn.retrieval import Candidate

__all__ = ["ENOUGH", "confidence"]

ENOUGH = 0.25
"""Below this a recall abstains."""

MEANING, WORDS, BASE = 13.2, 1.2, -7.6
"""Weights of the best cosine, and of the best page's words for each long word of the query."""

ALONE, LONG, ALONE_BASE = 2.2, 0.3, -5.0
"""Without vectors: of the best page's words for each long word of the query, and of the number of long words."""

_LONG = re.compile(r"\w{4,}")


def confidence(query: str, candidates: Sequence[Candidate]) -> float:
    """The probability, 0 to 1, that an answer is among these candidates; 0 where there is none."""
    if not candidates:
        return 0.0
    long = max(1, len(_LONG.findall(query)))
    words = max(one.words for one in candidates) / long
    cosines = [one.meaning for one in candidates if one.meaning is not None]
    sum_ = MEANING * max(cosines) + WORDS * words + BASE if cosines else ALONE * words + LONG * min(long, 8) + ALONE_BASE
    return 1 / (1 + math.exp(-max(-50.0, min(50.0, sum_))))

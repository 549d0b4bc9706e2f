"""How likely it is that what was found contains an answer.

A logistic model of few figures, fitted on half of LoCoMo's conversations: questions asked of their own conversation, and
of another one, in which nobody spoke of it. It counts which words of the question occur in what was found, and not how
rare they are, so a store of one fact is judged as a store of a million. It knows nothing of what a text says: a passage
that is about the same thing and answers something else passes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from kilburn.retrieval import STOP
from kilburn.search.found import Found

ENOUGH = 0.25
"""Below this a search that may abstain does."""

HITS = 10
"""Hits that are looked at, the best first."""

BEST, ALL, WORDS, COSINE, BASE = 5.26, 3.97, 0.09, 11.45, -9.47
"""Weights of the share of the query's words in one hit and in all of them, of the number of its words (8 at most), and of
the best cosine."""

ALONE_BEST, ALONE_ALL, ALONE_WORDS, ALONE_BASE = 8.19, 5.0, 0.18, -7.05
"""The same without vectors."""

STEM = 5
"""Letters by which words are the same: endings change."""

SHORT = 3
"""Letters of a word that counts; shorter ones, and the commonest, count where a query has no other."""

_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff]|[^\W\u3040-\u30ff\u3400-\u9fff]+")
"""A word; of scripts without blanks, a sign."""


def confidence(query: str, hits: Sequence[Found], cosine: float | None) -> float:
    """The probability, 0 to 1, that an answer is among these hits; 0 where there is none.

    Args:
        hits: best first.
        cosine: the best of any candidate to the query; None without vectors.
    """
    if not hits:
        return 0.0
    words = _stems(query)
    asked = {word for word in words if word not in COMMON and (len(word) >= SHORT or not word.isascii())} or words
    if not asked:
        return 0.0
    said = [_stems(hit.text) for hit in hits[:HITS]]
    best = max(len(asked & one) for one in said) / len(asked)
    every = len(asked & set().union(*said)) / len(asked)
    number = min(len(asked), 8)
    if cosine is None:
        total = ALONE_BEST * best + ALONE_ALL * every + ALONE_WORDS * number + ALONE_BASE
    else:
        total = BEST * best + ALL * every + WORDS * number + COSINE * cosine + BASE
    return 1 / (1 + math.exp(-total))


def _stems(text: str) -> set[str]:
    return {_stem(word) for word in set(_WORD.findall(text.casefold()))}


def _stem(word: str) -> str:
    return word.rstrip("s")[:STEM]


COMMON = {_stem(word) for word in STOP}

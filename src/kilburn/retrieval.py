"""What a search asks for, what it may find, and what puts it in order.

The kernel gathers candidates from the store, a ranking gives each a score, and the kernel returns the best within a
token budget. A ranking is a policy: pure, without I/O and without a clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from kilburn.page import Page, Span
from kilburn.store import State

__all__ = ["Candidate", "Embedder", "Query", "Ranking", "Scored"]


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the past.

    Args:
        text: as it was asked.
        now: the kernel's time, in seconds since the epoch.
        times: the interval that the text names ("last May"), in seconds since the epoch, or None.
    """

    text: str
    now: float
    times: tuple[float, float] | None = None


class Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """A passage that may be an answer.

    Args:
        span: the best passage of the page's text; `text` is that passage.
        words: how well its words match (BM25, not normalised); 0 if none does.
        meaning: cosine of its vector to the query's; None without vectors.
        near: whether it is here only as the neighbour of another candidate.
    """

    process: int
    page: Page
    state: State
    span: Span
    text: str
    words: float = 0.0
    meaning: float | None = None
    near: bool = False


class Scored(msgspec.Struct, frozen=True, kw_only=True):
    """A candidate's score: `index` among the candidates, `score` (higher is better), and its `terms`, which sum to it."""

    index: int
    score: float
    terms: Mapping[str, float] = {}


@runtime_checkable
class Ranking(Protocol):
    """Puts candidates in order."""

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        """The candidates worth returning, best first."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """Makes vectors of texts.

    Args:
        name: with the version of its weights; vectors of different names are never compared.
        dimensions: numbers in a vector.
    """

    name: str
    dimensions: int

    def embed(self, texts: Sequence[str]) -> Any:
        """A NumPy array of float32 with one row of length 1 for each text.

        Raises:
            ModelError: it failed; Unavailable: its weights or its endpoint cannot be reached.
        """
        ...

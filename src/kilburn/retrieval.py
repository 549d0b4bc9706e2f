"""Queries, candidates, and the protocols of rankings and embedders.

The kernel gathers candidates from the store, a ranking gives each a score, and the kernel returns the best within a
token budget. A ranking is a policy: pure, without I/O and without a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from kilburn.backend import Passage, SegmentKind, State
from kilburn.page import Page, Span

__all__ = ["Candidate", "Embedder", "Query", "Ranking", "Scored"]

_STOP_WORDS = """
a about after all also am an and any are as at be been before but by can could did do does for from get got had has have he
her here him his how i if in into is it its just like ll me more my no not now of on one or our out over re said say she so
some such than that the their them then there these they this those to too up us ve very was we well were what when where
which while who why will with would you your let need see should may
"""

EXACT = 20_000
"""Up to this many vectors are compared with a query exactly; of more, only those that a faster scan selects."""

STOP = frozenset(_STOP_WORDS.split())
"""Common English words, which a query ignores unless it has no others."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the past.

    Args:
        text: the text of the question.
        now: the time of the question, in seconds since the epoch; "yesterday" is relative to it.
        speakers: names in the text that are names of speakers. They name the author of the answer, so they are not searched for
            in its words or meaning.
    """

    text: str
    now: float
    speakers: frozenset[str] = frozenset()


# A search makes hundreds of these two: none can be part of a cycle, and the garbage collector passes over them.
class Candidate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A page that may be an answer.

    Args:
        kind: kind of its segment. Only in sessions and documents do neighbouring pages belong together.
        span: the best passage.
        also: further passages whose words match; they are returned with it.
        words: how well its words match (BM25, not normalised); 0 if none does.
        meaning: cosine of its vector to the query's; None without one.
    """

    segment: int
    kind: SegmentKind
    page: Page
    state: State
    span: Span
    also: tuple[Span, ...] = ()
    words: float = 0.0
    meaning: float | None = None


class Scored(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A candidate's score: `index` among the candidates, `score` (higher is better), and its `terms`, which sum to it."""

    index: int
    score: float
    terms: Mapping[str, float] = {}


def best_first(scored: Iterable[Scored], candidates: Sequence[Candidate]) -> list[Scored]:
    """Sort by score, best first; of equals, the newer page first."""
    return sorted(scored, key=lambda entry: (entry.score, candidates[entry.index].page.time), reverse=True)


@runtime_checkable
class Ranking(Protocol):
    """Puts candidates in order."""

    def rank(self, query: Query, candidates: Sequence[Candidate]) -> Sequence[Scored]:
        """Return the candidates worth returning, best first. Pages that only stand beside one that matches are among them where
        there are vectors, or where they are asked for."""
        ...


class Meanings(Protocol):
    """Finds passages by their vectors: `kilburn.search.vectors.Vectors`.

    Args:
        trouble: why new texts get no vectors at present, in words; "" if nothing is wrong.
    """

    trouble: str

    def nearest(self, query: str, segments: Collection[int] | None, limit: int) -> list[tuple[Passage, float]]:
        """Return the passages whose vectors are nearest to the query's, with their cosines; all of them are still there."""
        ...

    def similar(self, query: str, entries: Collection[int]) -> dict[int, float]:
        """Return the cosines of those of these passages (entries of the store's index) that have a vector."""
        ...

    def close(self) -> None:
        """End what works in the background; the store is closed afterwards."""
        ...


@runtime_checkable
class Embedder(Protocol):
    """Makes vectors of texts.

    Args:
        name: name and version of the weights; vectors of different names are never compared.
        dimensions: numbers in a vector.
    """

    name: str
    dimensions: int

    def embed(self, texts: Sequence[str]) -> Any:
        """Return a NumPy array of float32 with one row of length 1 for each text.

        Raises:
            ModelError: it failed; Unavailable: its weights or its endpoint cannot be reached.
        """
        ...

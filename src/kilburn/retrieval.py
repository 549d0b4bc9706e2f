"""What a search asks for, what it may find, and what puts it in order.

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
"""Vectors that are all compared with a query's; of more, those that a quicker look has found."""

STOP = frozenset(_STOP_WORDS.split())
"""Common English words, which are left out of a query unless it has no others."""


class Query(msgspec.Struct, frozen=True, kw_only=True):
    """A question to the past.

    Args:
        text: as it was asked.
        now: the time that it asks about, in seconds since the epoch; "yesterday" is relative to it.
        speakers: names in the text that are those of people who spoke. They say who said it, so that neither words nor
            meaning were searched for them.
    """

    text: str
    now: float
    speakers: frozenset[str] = frozenset()


# A search makes hundreds of these two: none can be part of a cycle, and the garbage collector passes over them.
class Candidate(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A page that may be an answer.

    Args:
        kind: of its segment. Only in sessions and documents are pages with neighbouring numbers about the same.
        span: its best passage.
        also: passages of it whose words match as well; they are found with it.
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
        trouble: why what is new gets no vectors at present, in words; "" if nothing is wrong.
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
        name: with the version of its weights; vectors of different names are never compared.
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

"""What a sequence's keys and values follow from: its tokens, what was evicted when, and what else was done to it.

Keys and values follow from the tokens before them and from what had been evicted by the time each was computed,
until something was inserted, blended or compressed. From there on only a copy brings them back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kilburn.kv.prefixes import Key

__all__ = ["Alteration", "Eviction", "Lineage", "context"]


class Alteration(StrEnum):
    """Why the KV of a sequence is not what its tokens alone would give; all but `EVICTED` need more than a replay."""

    EVICTED = "evicted"
    FOLDED = "folded"
    """Tokens were inserted over those that were evicted."""
    BLENDED = "blended"
    """It came from elsewhere."""
    COMPRESSED = "compressed"
    """Each head kept entries of its own."""


class Eviction(NamedTuple):
    """Positions `start` to `stop` (half-open) went when the sequence had `at` positions."""

    at: int
    start: int
    stop: int


class Lineage(msgspec.Struct, frozen=True):
    """All that a table says of its positions but which of them are cached: what outlives its blocks.

    Append `tokens` in order, run them, and repeat each of `evictions` when the sequence has its `at` positions: the
    cache of a `recomputable` sequence is then what it was. Any other needs a copy of its keys and values, which an
    engine has to make before it lets `Tables.reserve` take the blocks; `Tables.victims` tells it of which.

    Args:
        number: the sequence's name among its `Tables`.
        key: under which it shares prefixes, or None.
        tokens: by logical position.
        evictions: see `Table.evictions`.
        pages: page -> range.
        altered: see `Table.altered`.
        stood: see `Table.stood`.
    """

    number: int
    key: Key | None
    tokens: array[int]
    evictions: tuple[Eviction, ...]
    pages: Mapping[int, tuple[int, int]]
    altered: Mapping[Alteration, int]
    stood: Mapping[int, int] = {}

    @property
    def recomputable(self) -> bool:
        """Whether `tokens` and `evictions` give the same cache."""
        return not self.altered.keys() - {Alteration.EVICTED}


def context(tokens: array[int], evictions: tuple[Eviction, ...]) -> str:
    """The SHA-256, hex, of what tokens were computed from, themselves the last: those before them, and what had left by then."""
    early = [eviction for eviction in evictions if eviction.at < len(tokens)]
    return hashlib.sha256(msgspec.json.encode((tokens.tolist(), early))).hexdigest()

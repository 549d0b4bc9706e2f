"""What the keys and values of a sequence follow from: its tokens, and what was evicted when.

They follow from the tokens before them, and from what had been evicted when each was computed. After an insertion, a
blend or a press this is no longer so, and only a copy brings them back.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Mapping
from enum import StrEnum
from typing import NamedTuple

import msgspec

from kilburn_kv.prefixes import PrefixKey


class Alteration(StrEnum):
    """Why the KV of a sequence is not what its tokens alone would give; all but `EVICTED` need more than a replay."""

    EVICTED = "evicted"
    FOLDED = "folded"
    """Tokens were inserted where others had been evicted."""
    BLENDED = "blended"
    """It came from elsewhere."""
    COMPRESSED = "compressed"
    """Each head kept entries of its own."""


class Eviction(NamedTuple):
    """Positions `start` to `stop` (half-open) were evicted when the sequence had `at` positions."""

    at: int
    start: int
    stop: int


class TableLineage(msgspec.Struct, frozen=True):
    """The state of a table, except which positions are cached: what is needed to compute it again, if that is possible.

    Append `tokens` in order, run them, and repeat each of `evictions` when the sequence has its `at` positions. The
    cache of a `recomputable` sequence is then what it was. Other sequences cannot be computed again. An engine has to copy
    their KV before it lets `Tables.reserve` take the blocks; `Tables.victims` says which sequences these are.

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
    key: PrefixKey | None
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
    """What tokens were computed from: the tokens up to and including them, and what had been evicted by then."""
    early = [eviction for eviction in evictions if eviction.at < len(tokens)]
    return hashlib.sha256(msgspec.json.encode((tokens.tolist(), early))).hexdigest()

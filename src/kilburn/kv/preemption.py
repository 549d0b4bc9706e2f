"""Which sequences to free when blocks run out: the newest, to be computed again later (arXiv 2309.06180)."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping

import msgspec

from kilburn.kv.blocks import Pool
from kilburn.kv.prefixes import Key
from kilburn.kv.table import Alteration, Eviction, Table

__all__ = ["Preempted", "preempted", "victims"]


class Preempted(msgspec.Struct, frozen=True):
    """What is needed to compute a freed sequence again, if that is possible.

    Append `tokens` in order, run them, and repeat each of `evictions` when the sequence has its `at` positions. The
    cache of a `recomputable` sequence is then what it was. Other sequences cannot be computed again: tokens were
    inserted (folded), or their KV came from elsewhere (blended, compressed). An engine has to copy their KV before it
    lets `Tables.reserve` take the blocks; `Tables.victims` says which sequences these are.
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
        return not self.altered.keys() - {"evicted"}


def preempted(table: Table) -> Preempted:
    """The record of a sequence that outlives its blocks."""
    return Preempted(
        table.number, table.key, table.tokens, table.evictions, table.pages.items(), table.altered, dict(table.stood)
    )


def victims(pool: Pool, newest_first: Iterable[Table], need: int) -> list[Table] | None:
    """The sequences to free, in the given order, until `need` blocks are free; None if all of them are not enough.

    A block is freed with its last owner. Sequences that would free nothing are not chosen.
    """
    missing = need - pool.free
    chosen: list[Table] = []
    left: dict[int, int] = {}
    references = pool.references
    for table in newest_first:
        if missing <= 0:
            break
        chosen.append(table)
        for block in table.blocks:
            owners = left.get(block, references[block]) - 1
            left[block] = owners
            missing -= not owners
    if missing > 0:
        return None
    return [table for table in chosen if any(not left[block] for block in table.blocks)]

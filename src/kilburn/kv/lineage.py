"""Decides whether a page that comes back is the same as if it had never left, from tokens and evictions alone.

Keys and values follow from the tokens before them, and from what had been evicted when each was computed. After an
insertion or a press this is no longer so. Whatever cannot be decided counts as a difference.
"""

from __future__ import annotations

import hashlib
from array import array

import msgspec

from kilburn.kv.spill_file import PageHeader
from kilburn.kv.table import Eviction, Table

__all__ = ["context", "difference"]


def context(tokens: array[int], evictions: tuple[Eviction, ...]) -> str:
    """What tokens were computed from: the tokens up to and including them, and what had been evicted by then."""
    early = [eviction for eviction in evictions if eviction.at < len(tokens)]
    return hashlib.sha256(msgspec.json.encode((tokens.tolist(), early))).hexdigest()


def difference(part: PageHeader, table: Table, start: int) -> str:
    """Why a page that is put there would differ from one that had never left; empty if it would not."""
    if start != part.start:
        return f"its keys were rotated by {start - part.start} positions, and it attended to what was before it there"
    if not part.context:
        return "something was inserted or compressed in its sequence before it was saved: what it attended to cannot be told"
    taints = sorted(why for why, since in table.altered.items() if why != "evicted" and since < start)
    if taints:
        return f"the sequence was {' and '.join(taints)} before it: what it would attend to cannot be told"
    if context(table.tokens[:start] + array("i", part.tokens), table.evictions) != part.context:
        return "it was computed behind other tokens, or other evictions"
    return ""

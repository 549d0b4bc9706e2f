"""Quotas: the size limit of a memory, and what makes room for new facts.

What a quota retires is in the ledger. Pinned facts are never retired by a quota.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kilburn.arguments import check_fields
from kilburn.backend import State
from kilburn.collections.collection import Collection
from kilburn.errors import QuotaExceeded, SpecError
from kilburn.message import Kind
from kilburn.move import Add, Retire
from kilburn.page import Page, Place
from kilburn.search.dates import DAY

HALF_LIFE = 30 * DAY
"""Seconds in which a fact without importance loses half of its value."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """The size limit of a user's memory. Pages in force and proposed pages count, retired ones do not.

    Args:
        facts: pages at most. tokens: tokens of their texts at most. None for no limit.
        evict: whether the least valuable facts are retired to make room; otherwise the addition is refused.
    """

    facts: int | None = None
    tokens: int | None = None
    evict: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for limit in (self.facts, self.tokens):
            if limit is not None and limit < 0:
                raise SpecError(f"a quota of {limit}", advice="give 0 or more, or None for no limit")


def worth(page: Page, state: State, now: float) -> float:
    """Return how valuable a fact is, 0 to 1: its importance, or how recent it is, whichever is more."""
    return max(state.importance, math.exp2(-max(0.0, now - page.time) / HALF_LIFE))


def make_room(quota: Quota | None, memory: Collection, changes: Sequence[Add | Retire], now: float) -> list[Add | Retire]:
    """Return the changes, with the retirements that make room for them.

    Raises:
        QuotaExceeded: there is no room, or the pinned facts leave none.
    """
    adds = [change for change in changes if isinstance(change, Add)]
    limits = {} if quota is None else {"facts": quota.facts, "tokens": quota.tokens}
    bounds = {unit: limit for unit, limit in limits.items() if limit is not None}
    if quota is None or not adds or not bounds:
        return list(changes)
    more = {"facts": len(adds), "tokens": sum(memory.counter.count(add.text) for add in adds)}

    def over(have: Mapping[str, int]) -> list[str]:
        return [unit for unit, limit in bounds.items() if have[unit] + more[unit] > limit]

    if not over({"facts": memory.info.pages, "tokens": memory.info.tokens}):
        return list(changes)  # even if retired pages counted
    leaving = {page for change in changes if isinstance(change, Retire) for page in change.pages}
    rows = [(page, state) for page, state in memory.pages(proposed=True) if page.id not in leaving]
    have = {"facts": len(rows), "tokens": sum(page.tokens for page, _ in rows)}
    spare = [row for row in rows if row[0].kind is Kind.FACT and row[1].at is Place.OUT and not row[1].pinned]
    spare.sort(key=lambda row: (worth(row[0], row[1], now), row[0].time), reverse=True)
    evicted: list[int] = []
    while units := over(have):
        if not quota.evict or not spare:
            unit = units[0]
            raise QuotaExceeded(unit, have=have[unit], more=more[unit], limit=bounds[unit], user=memory.info.user)
        page, _ = spare.pop()
        evicted.append(page.id)
        have = {"facts": have["facts"] - 1, "tokens": have["tokens"] - page.tokens}
    return [*changes, *([Retire(pages=tuple(evicted), why="over the quota: the least valuable")] if evicted else [])]

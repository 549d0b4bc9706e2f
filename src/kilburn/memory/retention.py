"""How long a memory is kept, and how much of it: quotas, and the sweep of what has expired.

A fact with an end (`until`) is not found any more when it has passed; the sweep forgets it when it has been over for as long
as its retention. Nothing leaves silently: what a quota retires and what a sweep forgets is in the ledger and in a receipt.
What is pinned is never swept and never retired by a quota.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import msgspec

from kilburn.arguments import check_fields
from kilburn.backend import SegmentKind, State
from kilburn.collections.collection import Collection
from kilburn.errors import QuotaExceeded, SpecError
from kilburn.forgetting.erasure import Erasure
from kilburn.kernel.ending import rule_time
from kilburn.kernel.receipts import ranges
from kilburn.kernel.store import Store
from kilburn.message import Kind
from kilburn.move import Add, Retire
from kilburn.page import Page, Place
from kilburn.search.dates import DAY

HALF_LIFE = 30 * DAY
"""Seconds in which a fact that nobody marked as important loses half of its worth."""


class Quota(msgspec.Struct, frozen=True, kw_only=True):
    """What a user's memory may hold: what is in force or proposed counts, and what is retired does not.

    Args:
        facts: pages. tokens: of their texts. None for no limit.
        evict: whether the least valuable facts are retired to make room; else the addition is refused.
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
        QuotaExceeded: there is no room, or what is pinned leaves none.
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
        return list(changes)  # even with all that was ever written
    leaving = {page for change in changes if isinstance(change, Retire) for page in change.pages}
    rows = [(page, state) for page, state in memory.pages(proposed=True) if page.id not in leaving]
    have = {"facts": len(rows), "tokens": sum(page.tokens for page, _ in rows)}
    spare = [row for row in rows if row[0].kind is Kind.FACT and row[1].at is Place.OUT and not row[1].pinned]
    spare.sort(key=lambda row: (worth(row[0], row[1], now), row[0].time), reverse=True)
    evicted: list[int] = []
    while units := over(have):
        if not quota.evict or not spare:
            unit = units[0]
            raise QuotaExceeded(unit, have=have[unit], more=more[unit], most=bounds[unit], user=memory.info.user)
        page, _ = spare.pop()
        evicted.append(page.id)
        have = {"facts": have["facts"] - 1, "tokens": have["tokens"] - page.tokens}
    return [*changes, *([Retire(pages=tuple(evicted), why="over the quota: the least valuable")] if evicted else [])]


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What a sweep forgot.

    Args:
        receipt: what went, from which places.
        kept: name of a memory -> addresses of what is over and stays, because it is pinned, or something that is pinned was
            made from it.
    """

    receipt: Erasure
    kept: dict[str, tuple[str, ...]] = {}


def sweep(
    store: Store, user: str | None = None, *, retention: float = 30 * DAY, history: float | None = None, dry: bool = False
) -> Swept:
    """Forget the facts that are over for longer than their retention, and what was made from them.

    Args:
        user: whose memory; None for all memories.
        retention: seconds after the end that a fact was written with (`until`).
        history: the same after the end of what was superseded or retired; None keeps that for ever, for searches as of an
            earlier time.
        dry: only say what would go.

    Raises:
        SpecError: a negative length of time. ClockSkew: nobody knows what is over. StoreError: trying again goes on.
    """
    if not min(retention, history or 0.0) >= 0:
        raise SpecError("a retention that is no length of time", advice="give seconds, 0 or more")
    now = rule_time(store)
    roots: dict[int, list[int]] = {}
    pinned: dict[str, tuple[str, ...]] = {}
    for memory in store.collections():
        if memory.info.kind is SegmentKind.MEMORY and user in (None, memory.info.user):
            rows = {page.id: (page, state) for page, state in memory.pages(history=True, proposed=True)}
            over = [number for number, row in rows.items() if _is_over(*row, now, retention, history)]
            holding = _holding_pins(memory, over, {number for number, (_, state) in rows.items() if state.pinned})
            roots[memory.number] = [number for number in over if number not in holding]
            pinned |= {memory.name: ranges(holding)} if holding else {}
    receipt = store.forget_pages(roots, asked={"sweep": user or ""}, why="over for longer than its retention", dry=dry)
    return Swept(receipt=receipt, kept=pinned)


def _is_over(page: Page, state: State, now: float, retention: float, history: float | None) -> bool:
    if page.until is not None and page.until + retention <= now:
        return True
    return history is not None and state.until is not None and state.until + history <= now


def _holding_pins(memory: Collection, over: Sequence[int], pinned: set[int]) -> list[int]:
    """Return the pages that are pinned, or from which something pinned was made."""
    holding = []
    for number in over if pinned else ():
        family, fresh = {number}, [number]
        while fresh:
            more = {page for segment, page in memory.backend.citing(memory.number, fresh) if segment == memory.number} - family
            family |= more
            fresh = list(more)
        if family & pinned:
            holding.append(number)
    return holding

"""The sweep of expired facts.

A fact with an end (`until`) is no longer found after it; the sweep forgets it after a further time, its retention. The receipt
lists what a sweep forgets. Pinned facts are never swept.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import msgspec

from kilburn.backend import SegmentKind, State
from kilburn.collections.collection import Collection
from kilburn.errors import ClockSkew, ClockWarning, SpecError
from kilburn.forgetting.erasure import Erasure
from kilburn.kernel.receipts import ranges
from kilburn.kernel.store import Store
from kilburn.page import Page, address_of
from kilburn.search.dates import DAY

MINUTE, HOUR = 60.0, 3600.0
"""Differences between two clocks: above the first there is a warning, and above the second no rule decides."""


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a sweep.

    Args:
        receipt: the forgotten pages and the places that were erased.
        kept: name of a memory -> addresses of expired facts that stay, because they are pinned, or something pinned was made
            from them.
    """

    receipt: Erasure
    kept: dict[str, tuple[str, ...]] = {}


def rule_time(store: Store) -> float:
    """Return the time by which rules decide, in seconds since the epoch: that of the store's clock, which is the database's where
    there is one. A store in a file has the clock of its machine, which nothing but the events of the file can check.

    Raises:
        ClockSkew: this program's clock differs by more than an hour.
    """
    now = store.backend.now()
    difference = abs(store.clock() - now)
    if difference > HOUR:
        what = f"the clocks of this machine and of the database differ by {difference:,.0f} seconds"
        raise ClockSkew(what, advice="set the clock that is wrong; until then no rule archives or forgets anything")
    if difference > MINUTE:
        warnings.warn("the clocks of this machine and of the database differ by more than a minute", ClockWarning, stacklevel=2)
    return now


def sweep(
    store: Store, user: str | None = None, *, retention: float = 30 * DAY, history: float | None = None, dry: bool = False
) -> Swept:
    """Forget the facts that are over for longer than their retention, and what was made from them.

    Args:
        user: owner of the memory; None for all memories.
        retention: seconds after the end that a fact was written with (`until`).
        history: seconds after a fact was superseded or retired; None keeps these facts for ever, for searches as of an earlier
            time.
        dry: only return the receipt; nothing is forgotten.

    Raises:
        SpecError: a negative duration. ClockSkew: the clock cannot be trusted. StoreError: call again to continue.
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
    closures = {number: memory.contents.closure(address_of(number)) for number in (over if pinned else ())}
    return [
        number for number, closure in closures.items() if any(name == memory.name and page.id in pinned for name, page in closure)
    ]

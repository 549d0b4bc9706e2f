"""Whether edits of a prompt paid: the price of what was read again because of each, against what it saved.

What is read again has its price less that from the cache. What is not shipped any more saves, with each prompt, its price from
the cache.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from kilburn.event import Act, Event
from kilburn.kernel.receipts import Receipt
from kilburn.prices import PRICES, Prices

TABLE = "hosted"
"""The table of prices that this is worked out by."""


class WeighedEdit(msgspec.Struct, frozen=True, kw_only=True):
    """A compaction that freed tokens: the prompts until the next one, or until now; tokens that were read again for it; the price
    of these, and what it saved. `over` says whether another one came since, so that it saves no more by itself."""

    receipt: Receipt
    prompts: int
    again: int
    price: float
    saved: float
    over: bool

    @property
    def paid(self) -> bool:
        """Whether it has saved its price."""
        return self.saved >= self.price


def edits_in(receipts: Sequence[Receipt], events: Sequence[Event], prices: Prices | None = None) -> Iterator[WeighedEdit]:
    """The edits among some receipts, newest first as these are.

    Args:
        events: all that came after the first of them.
    """
    table = prices or PRICES[TABLE]
    ships = [event for event in events if event.act is Act.SHIP]
    until = None
    for receipt in receipts:
        if receipt.freed <= 0:
            continue
        end = receipt.events[1]
        prompts = [event for event in ships if end < event.number and (until is None or event.number < until)]
        told = prompts[0].data.get("again", 0) if prompts else 0
        again = told if isinstance(told, int) else 0
        yield WeighedEdit(
            receipt=receipt,
            prompts=len(prompts),
            again=again,
            price=again * (table.written - table.cached) / 1e6,
            saved=receipt.freed * len(prompts) * table.cached / 1e6,
            over=until is not None,
        )
        until = end

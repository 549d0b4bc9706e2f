"""The default: excerpts in front that change seldom, and what is asked behind them.

When the window is full, everything older than the latest message becomes an excerpt: whole passages, verbatim, each under the
address of its page. They are chosen by their likeness to the latest words and the request, by their nearness in time, and by
what they show that is not shown yet. The next excerpt is put after it, so the beginning of the prompt stays as it is. When the
excerpts take half of the window, they are remade as one, from the originals, so nothing drifts. Pages of which nothing is kept
leave, and have a handle. What a question needs beside that, or the agent's latest words, is brought to before the last message.
It needs no model. This policy is ours; the figures are in docs/explanation/policies.md.

It is the plan of `cost` without a bar: what is kept has no price, and the room is filled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilburn.policies.parameters import check_tokens
from kilburn.policy import Acts, Plan, View
from kilburn.prices import PRICES
from kilburn.selection.bringing import largeness
from kilburn.selection.keeping import UNCACHED, WindowShape, keep, max_copy_tokens, middleness, min_window_tokens

SPARE_SHARE, EXTRA_SPARE_SHARE = 0.1, 0.1
"""Share of the window that an edit leaves free, for the next messages and for what is brought; what is added in a large one."""

ADDED, LESS_ADDED = 0.35, 0.1
"""Share of the window of one excerpt at most; what is taken off in a large one."""

EXCERPT_SHARE, EXTRA_EXCERPT_SHARE, REMADE_SHARE = 0.5, 0.05, 0.4
"""Shares of the window: of all excerpts before they are remade, what is added from 4,000 tokens on; of the remade one."""

WHOLE, MORE_WHOLE = 0.25, 0.08
"""Share of the window up to which the latest message stays whole, and what is added in one of 4,000 tokens: a usual view of a
file does not fit into one of 2,000 in any case, and fits into one of 8,000 without."""


@dataclass(frozen=True)
class Hybrid:
    """Excerpt what is old when the window is full, and bring what is asked.

    Args:
        low: tokens in the window after an edit; None leaves a tenth of a small window free, and a fifth of one of
            8,000 or more.
        tail: tokens of newest pages, before what the agent has not read, that stay whole; None for none.
    """

    low: int | None = None
    tail: int | None = None

    acts: ClassVar[Acts] = Acts.FOLDED

    def __post_init__(self) -> None:
        check_tokens(low=self.low, tail=self.tail)

    def plan(self, view: View) -> Plan:
        """Edit the front of the window if it is full, and bring passages relevant to the newest request."""
        capacity = view.budget.capacity
        large = largeness(capacity)
        middle = middleness(capacity)
        spare, added, excerpts, remade = (
            SPARE_SHARE + EXTRA_SPARE_SHARE * large,
            ADDED - LESS_ADDED * large,
            EXCERPT_SHARE + EXTRA_EXCERPT_SHARE * middle,
            REMADE_SHARE,
        )
        whole = WHOLE + MORE_WHOLE * middle * (1 - large)
        if capacity <= UNCACHED:
            spare, excerpts, remade = 0.05, 0.35, 0.6
        shape = WindowShape(
            capacity=capacity,
            tail=self.tail or 0,
            whole=int(whole * capacity),
            spare=int(spare * capacity) if self.low is None else max(0, capacity - self.low),
            added=int(added * capacity),
            excerpts=int(excerpts * capacity),
            remade=int(remade * capacity),
            copy=max_copy_tokens(capacity),
            floor=min_window_tokens(capacity),
        )
        return keep(view, shape, PRICES["hosted"])

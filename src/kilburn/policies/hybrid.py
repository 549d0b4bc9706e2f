"""The default: the newest pages and important pages stay whole; of everything else, the passages that are worth most stay.

When the window is over its capacity, or the user asks something, everything older than the tail becomes one excerpt: whole
passages, verbatim, each under the address of its page. They are chosen by their likeness to the latest words and the request,
by their nearness in time, and by what they show that is not shown yet. The excerpt is chosen from the originals each time,
never from its own text, so nothing drifts. Pages of which nothing is kept leave, and have a handle. It needs no model. This
policy is ours; the figures are in docs/explanation/policies.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilburn.policies.parameters import check_tokens
from kilburn.policy import Acts, Plan, View
from kilburn.prices import PRICES
from kilburn.selection.keeping import WindowShape, copy_of, floor_of, keep

TAIL, SPARE, LASTING = 0.0, 0.2, 0.6
ADDED, HELD, REMADE = 0.25, 0.5, 0.4
"""Shares of the window: of one excerpt at most, of all excerpts before they are remade, and of the remade one."""


@dataclass(frozen=True)
class Hybrid:
    """Keep a tail and a core whole, and excerpt the rest, when the window is over capacity.

    Args:
        low: tokens in the window after it acted; None leaves a tenth of a small window free, and nearly a quarter of a
            large one. Every action edits the prefix, and a large window can afford to act less often.
        tail: tokens of newest pages, before what the agent has not read, that stay whole; None for a tenth of the capacity.
        core: tokens of important pages ("remember this") that stay whole; None for a quarter.
        whole: tokens up to which the latest message stays whole, and to which it is excerpted beyond;
            None for a quarter of the capacity.
    """

    low: int | None = None
    tail: int | None = None
    core: int | None = None
    whole: int | None = None

    acts: ClassVar[Acts] = Acts.FOLDED

    def __post_init__(self) -> None:
        check_tokens(low=self.low, tail=self.tail, core=self.core, whole=self.whole)

    def plan(self, view: View) -> Plan:
        """An edit in front if the window is full, and passages behind for what was asked."""
        capacity = view.budget.capacity
        shape = WindowShape(
            capacity=capacity,
            tail=int(TAIL * capacity) if self.tail is None else self.tail,
            core=capacity // 4 if self.core is None else self.core,
            whole=capacity // 4 if self.whole is None else self.whole,
            spare=int(SPARE * capacity) if self.low is None else max(0, capacity - self.low),
            added=int(ADDED * capacity),
            held=int(HELD * capacity),
            remade=int(REMADE * capacity),
            copy=copy_of(capacity),
            floor=floor_of(capacity),
            recent=LASTING,
        )
        return keep(view, shape, PRICES["hosted"])

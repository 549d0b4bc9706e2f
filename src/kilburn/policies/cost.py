"""Cache-aware excerpts: an edit makes the cached prefix behind it void, so it must be worth that.

When pages leave the window, the passages that are worth their tokens stay, as an excerpt in their place. Excerpts are
left alone. The next one is put after them, so everything before it is read from the cache. When they take too much of
the window, they are remade as one. What a passage must be worth follows from the prices: writing it to the cache
once and reading it with each prompt until the next edit, against the chance that it is needed and the price of a
miss. A large window is filled to some two thirds whatever the price. If pages were recalled recently, more is kept. It
edits only when the window is full, because each edit costs money, and then everything older than the latest message,
because whatever follows an edit is re-prefilled anyway. What is asked is brought to before the last message, where it makes
nothing void. It needs no model. This policy is ours; the figures are in docs/mechanisms/cost.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.page import Page
from kilburn.policies.parameters import check_tokens
from kilburn.policy import Acts, Plan, View
from kilburn.prices import Prices, prices_of
from kilburn.selection.excerpts import flow_of
from kilburn.selection.keeping import WindowShape, copy_of, floor_of, keep

__all__ = ["Cost"]

CHANCE = 1000.0
"""Worth that a passage must have for each token of fresh input that keeping it costs, if a miss costs one token. Fitted on
recorded runs, where one of 20 prompts needs a line that is older than the last output."""

LATELY = 20
"""A recall of a page within this many messages means that too little was kept."""

ADDED, HELD, REMADE = 0.3, 0.7, 0.5
"""Shares of the window: of one excerpt at most, of all excerpts before they are remade, and of the remade one."""


@dataclass(frozen=True)
class Cost:
    """Keep what is worth its price in excerpts that are added at the end and seldom remade.

    Args:
        prices: the name of a table of `kilburn.prices`, or a table.
        miss: tokens of fresh input that a missing passage costs, besides one more reading of the prompt from the cache:
            the words of a recall, or a wrong step. A larger number keeps more.
        trigger: tokens in the window from which on it acts, and from which its shares are taken; None for the
            capacity.
        tail: tokens of newest pages, before what the agent has not read, that stay whole, and are read again at each
            edit; None for none.
        core: tokens of important pages ("remember this") that stay whole; None for a quarter of the capacity.
        whole: tokens up to which the latest message stays whole, and to which it is excerpted beyond;
            None for half of the capacity.
    """

    prices: str | Prices = "hosted"
    miss: float = 900.0
    trigger: int | None = None
    tail: int | None = None
    core: int | None = None
    whole: int | None = None

    def __post_init__(self) -> None:
        if not self._table().input > 0:
            raise ValueError(f"prices={self.prices!r} has no price of input: nothing can be weighed against it")
        if not self.miss > 0:
            raise ValueError(f"miss={self.miss} must be above 0")
        check_tokens(trigger=self.trigger, tail=self.tail, core=self.core, whole=self.whole)

    @property
    def acts(self) -> Acts:
        """Where something is out that may be asked, or only in a full window; unless it is to act sooner."""
        return Acts.FOLDED if self.trigger is None else Acts.ALWAYS

    def plan(self, view: View) -> Plan:
        """An excerpt after the existing ones, or one in place of all of them, if the window is full; and what was asked."""
        capacity = view.budget.capacity if self.trigger is None else min(view.budget.capacity, self.trigger)
        shape = WindowShape(
            capacity=capacity,
            tail=self.tail or 0,
            core=capacity // 4 if self.core is None else self.core,
            whole=capacity // 2 if self.whole is None else self.whole,
            spare=capacity // 8,
            added=int(ADDED * capacity),
            held=int(HELD * capacity),
            remade=int(REMADE * capacity),
            copy=copy_of(capacity),
            floor=floor_of(capacity),
        )
        return keep(view, shape, self._table(), lambda leaving: self._least(view, leaving, capacity))

    def _least(self, view: View, leaving: Sequence[Page], capacity: int) -> float:
        """The worth that a passage must have: its price until the next edit, divided by the price of a miss."""
        table = self._table()
        stay = max(1.0, capacity / 2 / flow_of(view))
        price = (table.written / stay + table.cached) / table.input
        # A recall is one more call of the model, which reads the whole prompt from the cache again.
        miss = self.miss + capacity * table.cached / table.input
        return CHANCE / miss * price / (1 + _recalled(view, leaving))

    def _table(self) -> Prices:
        return self.prices if isinstance(self.prices, Prices) else prices_of(self.prices)


def _recalled(view: View, pages: Sequence[Page]) -> int:
    """How many of these pages, or of the originals of the excerpts among them, were recalled lately."""
    near = {source for page in [*pages[:1], *pages[-64:]] for source in (page.sources or (page.id,))}
    uses = [view.uses[page] for page in near if page in view.uses]
    return sum(1 for use in uses if use.count and view.turn - use.turn <= LATELY)

"""Cache-aware excerpts: an edit makes the cached prefix behind it void, so it must be worth that.

When the window is full, everything older than the latest message leaves in one edit, because whatever follows an edit is
prefilled again anyway. The passages that are worth their tokens stay, as an excerpt behind the earlier excerpts, so that all
before it is read from the cache. The prices decide how much stays: a token is written to the cache once, is read with each
prompt, and makes the next edit come sooner. They also decide whether the earlier excerpts are remade: whichever plan makes the
prompts until the next edit cheaper. If the provider's cache has expired, an edit costs nothing, and comes sooner. What is asked
is brought before the last message, where it makes nothing void. It needs no model. This policy is ours; the figures are in
docs/mechanisms/cost.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.page import Page
from kilburn.policies.parameters import check_tokens
from kilburn.policy import Acts, Plan, View
from kilburn.prices import Prices, find_prices
from kilburn.selection.bringing import is_chat, largeness
from kilburn.selection.excerpts import mean_message_tokens
from kilburn.selection.keeping import Economy, WindowShape, keep, max_copy_tokens

__all__ = ["Cost"]

CHANCE = 1.0
"""Worth that a passage must have for each token of fresh input that it costs, if a miss costs as many tokens as the window holds.
A prompt needs about one old line, however large the window is, so the chance that a given token is needed falls with the
window. Fitted on chats and recorded runs at 1,000 to 16,000 tokens."""

EXTRA_CHAT_CHANCE = 0.5
"""Added to `CHANCE` in a conversation between people and the model, in a window of 8,000 tokens or more. There a question brings
passages that the excerpts omit, so excerpts are needed less."""

RECENT_MESSAGES = 20
"""A recall of a page within this many messages means that too little was kept."""


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
    """

    prices: str | Prices = "hosted"
    miss: float = 900.0
    trigger: int | None = None
    tail: int | None = None

    def __post_init__(self) -> None:
        if not self._table().input > 0:
            raise ValueError(f"prices={self.prices!r} has no price of input: nothing can be weighed against it")
        if not self.miss > 0:
            raise ValueError(f"miss={self.miss} must be above 0")
        check_tokens(trigger=self.trigger, tail=self.tail)

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
            whole=capacity // 2,
            spare=capacity // 8,
            copy=max_copy_tokens(capacity),
        )
        return keep(view, shape, self._table(), lambda leaving: self._economy(view, leaving, capacity))

    def _economy(self, view: View, leaving: Sequence[Page], capacity: int) -> Economy:
        """A passage must be worth what it costs until the next edit, divided by the price of a miss."""
        table = self._table()
        # A recall is one more call of the model, which reads the whole prompt from the cache again.
        miss = self.miss + capacity * table.cached / table.input
        # A message of the user or a tool, and one of the agent, come between two prompts.
        chance = CHANCE + EXTRA_CHAT_CHANCE * largeness(capacity) * is_chat(view)
        return Economy(table, 2 * mean_message_tokens(view), capacity, chance * capacity / miss / (1 + _recalled(view, leaving)))

    def _table(self) -> Prices:
        return self.prices if isinstance(self.prices, Prices) else find_prices(self.prices)


def _recalled(view: View, pages: Sequence[Page]) -> int:
    """How many of these pages, or of the originals of the excerpts among them, were recalled lately."""
    near = {source for page in [*pages[:1], *pages[-64:]] for source in (page.sources or (page.id,))}
    uses = [view.uses[page] for page in near if page in view.uses]
    return sum(1 for use in uses if use.count and view.turn - use.turn <= RECENT_MESSAGES)

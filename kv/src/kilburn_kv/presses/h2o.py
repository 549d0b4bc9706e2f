"""H2O (Zhang et al., arXiv 2306.14048): the tokens that drew the most attention so far, and the last ones, for each head.

The released code derives both shares from the first prompt's length, and keeps them however long the sequence grows.
Here they are shares of the budget of each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation, Selection
from kilburn_kv.presses.choice import BudgetPress, check_flag, check_number, require, top_indices, with_window


@dataclass(frozen=True)
class H2o(BudgetPress):
    """Keep heavy hitters and the last tokens.

    Args:
        heavy: share of the budget for heavy hitters, rounded down to tokens; the rest is the last tokens.
        normalise: divide the attention that a token received by the number of queries that could see it, as kvpress
            does. The paper does not, and so prefers early tokens, which more queries could see.
    """

    heavy: float = 0.5
    normalise: bool = False

    def __post_init__(self) -> None:
        check_number("h2o", "heavy", self.heavy, 0.0, 1.0)
        check_flag("h2o", "normalise", self.normalise)

    @property
    def needs(self) -> frozenset[str]:
        """Accumulated attention."""
        return frozenset({"attention"})

    def choose(self, seen: Observation, budget: int) -> Selection:
        """For each head its heaviest tokens outside the window, and the window."""
        count, heavy = seen.count, int(budget * self.heavy)
        start = count - (budget - heavy)
        scores = require(seen, "attention", self.name)[..., :start]
        if self.normalise:
            scores = scores / require(seen, "queries", self.name)[:start].clamp(min=1)
        return Selection(with_window(top_indices(scores, heavy), start, count))

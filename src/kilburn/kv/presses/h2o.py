"""H2O (Zhang et al., arXiv 2306.14048): the tokens that drew the most attention so far, and the last ones, for each head.

The released code derives both shares from the first prompt's length, and keeps them however long the sequence grows.
Here they are shares of the budget of each call.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilburn.errors import MissingExtra
from kilburn.kv.observation import Selection
from kilburn.kv.presses.choice import afford, behind, flag, given, number, top

try:
    import torch
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "kv") from error

if TYPE_CHECKING:
    from kilburn.kv.observation import Observation

__all__ = ["H2o"]


@dataclass(frozen=True)
class H2o:
    """Keep heavy hitters and the last tokens.

    Args:
        heavy: share of the budget for heavy hitters, rounded down to tokens; the rest is the last tokens.
        normalise: divide the attention that a token received by the number of queries that could see it, as kvpress
            does. The paper does not, and so prefers early tokens, which more queries could see.
    """

    heavy: float = 0.5
    normalise: bool = False

    def __post_init__(self) -> None:
        number("h2o", "heavy", self.heavy, 0.0, 1.0)
        flag("h2o", "normalise", self.normalise)

    @property
    def needs(self) -> frozenset[str]:
        """Accumulated attention."""
        return frozenset({"attention"})

    @property
    def recent(self) -> int:
        """No query."""
        return 0

    def keep(self, seen: Observation, budget: int) -> Selection:
        """For each head its heaviest tokens outside the window, and the window.

        Raises:
            BudgetTooSmall: it is no positive number.
        """
        afford("h2o", budget)
        count = seen.count
        if budget >= count:
            return Selection(torch.arange(count, device=seen.positions.device))
        heavy = int(budget * self.heavy)
        start = count - (budget - heavy)
        scores = given(seen, "attention", "h2o")[..., :start]
        if self.normalise:
            scores = scores / given(seen, "queries", "h2o")[:start].clamp(min=1)
        return Selection(behind(top(scores, heavy), start, count))

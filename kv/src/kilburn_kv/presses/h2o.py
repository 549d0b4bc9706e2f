"""H2O (Zhang et al., arXiv 2306.14048): the tokens that drew the most attention so far, and the last ones, for each head.

The released code derives both shares from the first prompt's length, and keeps them however long the sequence grows.
Here they are shares of the budget of each call.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation
from kilburn_kv.presses.choice import ScoringPress, check_flag, check_number, require
from kilburn_kv.tensors import Tensor


@dataclass(frozen=True)
class H2o(ScoringPress):
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

    def last(self, budget: int) -> int:
        """What heavy hitters leave of the budget."""
        return budget - int(budget * self.heavy)

    def score(self, seen: Observation) -> Tensor:
        """The attention that each token received."""
        scores = require(seen, "attention", self.name)
        return scores / require(seen, "queries", self.name).clamp(min=1) if self.normalise else scores

"""SnapKV (Li et al., arXiv 2404.14469): what the last queries look at, with its neighbours, for each key-value head.

The released code repeats keys and values for the query heads of a group, and stores a choice for each. This loses
what grouping saves, so here each key-value head chooses once.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation
from kilburn_kv.presses.choice import ScoringPress, check_integer, check_word, pool_neighbours, require
from kilburn_kv.tensors import Tensor


@dataclass(frozen=True)
class Snapkv(ScoringPress):
    """Keep what the last queries attend to, and their own tokens.

    Args:
        window: how many of the last queries vote, and how many of the last tokens stay.
        kernel: over how many neighbours their attention is pooled, odd; 1 for not at all.
        pool: "avg" or "max". The released code has 5 and "avg" as defaults, and runs LongBench with 7 and "max".
    """

    window: int = 32
    kernel: int = 5
    pool: str = "avg"

    def __post_init__(self) -> None:
        check_integer("snapkv", "window", self.window, 1)
        check_integer("snapkv", "kernel", self.kernel, 1, odd=True)
        check_word("snapkv", "pool", self.pool, ("avg", "max"))

    @property
    def needs(self) -> frozenset[str]:
        """Attention of the last queries."""
        return frozenset({"recent"})

    @property
    def recent(self) -> int:
        """As many queries as the window has tokens."""
        return self.window

    def last(self, budget: int) -> int:
        """The window."""
        return self.window

    def score(self, seen: Observation) -> Tensor:
        """What the last queries attend to, pooled."""
        votes = require(seen, "recent", self.name)[:, :, -self.window :].sum(dim=2)
        return pool_neighbours(votes, self.kernel, self.pool)

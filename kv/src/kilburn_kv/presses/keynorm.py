"""Key norms (Devoto et al., arXiv 2406.11430): keys of a low L2 norm tend to be attended to, so they stay; a baseline.

It needs no attention, which fused kernels do not return. The released code skips the first two layers; here the
budget is the same for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation, Selection
from kilburn_kv.presses.choice import BudgetPress, afford, check_integer, require, top_indices, with_window
from kilburn_kv.tensors import torch


@dataclass(frozen=True)
class Keynorm(BudgetPress):
    """Keep for each head the tokens whose keys are shortest.

    Args:
        window: how many of the last tokens stay whatever their norm is; the paper keeps none.
    """

    window: int = 0

    def __post_init__(self) -> None:
        check_integer("keynorm", "window", self.window, 0)

    @property
    def needs(self) -> frozenset[str]:
        """Keys; rotation does not change their norm."""
        return frozenset({"keys"})

    def choose(self, seen: Observation, budget: int) -> Selection:
        """For each head the tokens of the lowest key norm before the window, and the window.

        Raises:
            BudgetTooSmall: it does not hold the window.
        """
        room = afford(self.name, budget, in_the_window=self.window)
        count = seen.count
        start = count - self.window
        keys = require(seen, "keys", self.name)[..., :start, :].to(torch.float32)
        return Selection(with_window(top_indices(-torch.linalg.vector_norm(keys, dim=-1), room), start, count))

"""Everything stays: what the other presses are measured against.

It is the one press that a budget does not bind.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn.kv.observation import Observation, Selection
from kilburn.kv.presses.choice import BudgetPress
from kilburn.kv.tensors import torch

__all__ = ["Full"]


@dataclass(frozen=True)
class Full(BudgetPress):
    """Keep every token, **however small the budget is**: an upper bound to compare with, not a way to save room."""

    def choose(self, seen: Observation, budget: int) -> Selection:
        """All tokens, unshifted."""
        return Selection(torch.arange(seen.count, device=seen.positions.device))

"""Keeps everything, as an upper bound for the other presses. It is the only press that ignores its budget."""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation, Selection
from kilburn_kv.presses.choice import BudgetPress
from kilburn_kv.tensors import torch


@dataclass(frozen=True)
class Full(BudgetPress):
    """Keep every token, **however small the budget is**: for comparison, not to save room."""

    def choose(self, seen: Observation, budget: int) -> Selection:
        """All tokens, unshifted."""
        return Selection(torch.arange(seen.count, device=seen.positions.device))

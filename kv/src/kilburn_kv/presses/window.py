"""The last tokens stay, and nothing else: the plain sliding window.

Without sinks, a model that was not trained for it produces bad text; `streaming` keeps the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation, Selection
from kilburn_kv.presses.choice import BudgetPress
from kilburn_kv.tensors import torch


@dataclass(frozen=True)
class Window(BudgetPress):
    """Keep the last tokens, as many as the budget holds."""

    def choose(self, seen: Observation, budget: int) -> Selection:
        """The last `budget` tokens, for all heads."""
        return Selection(torch.arange(seen.count - budget, seen.count, device=seen.positions.device))

"""The last tokens stay, and nothing else: the plain sliding window.

Without sinks, a model that was not trained for it produces bad text; `streaming` keeps the sinks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilburn.errors import MissingExtra
from kilburn.kv.observation import Selection
from kilburn.kv.presses.choice import afford

try:
    import torch
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "kv") from error

if TYPE_CHECKING:
    from kilburn.kv.observation import Observation

__all__ = ["Window"]


@dataclass(frozen=True)
class Window:
    """Keep the last tokens, as many as the budget holds."""

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    @property
    def recent(self) -> int:
        """No query."""
        return 0

    def keep(self, seen: Observation, budget: int) -> Selection:
        """The last `budget` tokens, for all heads.

        Raises:
            BudgetTooSmall: it is no positive number.
        """
        afford("window", budget)
        count = seen.count
        return Selection(torch.arange(max(0, count - budget), count, device=seen.positions.device))

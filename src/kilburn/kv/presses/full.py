"""Keeps everything, as an upper bound for the other presses. It is the only press that ignores its budget."""

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

__all__ = ["Full"]


@dataclass(frozen=True)
class Full:
    """Keep every token, **however small the budget is**: for comparison, not to save room."""

    @property
    def needs(self) -> frozenset[str]:
        """Nothing."""
        return frozenset()

    @property
    def recent(self) -> int:
        """No query."""
        return 0

    def keep(self, seen: Observation, budget: int) -> Selection:
        """All tokens, unshifted.

        Raises:
            BudgetTooSmall: it is no positive number.
        """
        afford("full", budget)
        return Selection(torch.arange(seen.count, device=seen.positions.device))

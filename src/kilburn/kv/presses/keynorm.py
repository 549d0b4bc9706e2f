"""Key norms (Devoto et al., arXiv 2406.11430): keys of a low L2 norm tend to be attended to, so they stay; a baseline.

It needs no attention, which fused kernels do not return. The released code skips the first two layers; here the
budget is the same for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kilburn.errors import MissingExtra
from kilburn.kv.observation import Selection
from kilburn.kv.presses.choice import afford, behind, given, integer, top

try:
    import torch
except ModuleNotFoundError as error:  # pragma: no cover - the tests install the extra
    raise MissingExtra("torch", "kv") from error

if TYPE_CHECKING:
    from kilburn.kv.observation import Observation

__all__ = ["Keynorm"]


@dataclass(frozen=True)
class Keynorm:
    """Keep for each head the tokens whose keys are shortest.

    Args:
        window: how many of the last tokens stay whatever their norm is; the paper keeps none.
    """

    window: int = 0

    def __post_init__(self) -> None:
        integer("keynorm", "window", self.window, 0)

    @property
    def needs(self) -> frozenset[str]:
        """Keys; rotation does not change their norm."""
        return frozenset({"keys"})

    @property
    def recent(self) -> int:
        """No query."""
        return 0

    def keep(self, seen: Observation, budget: int) -> Selection:
        """For each head the tokens of the lowest key norm before the window, and the window.

        Raises:
            BudgetTooSmall: it does not hold the window.
        """
        afford("keynorm", budget)
        count = seen.count
        if budget >= count:
            return Selection(torch.arange(count, device=seen.positions.device))
        room = afford("keynorm", budget, in_the_window=self.window)
        start = count - self.window
        keys = given(seen, "keys", "keynorm")[..., :start, :].to(torch.float32)
        return Selection(behind(top(-torch.linalg.vector_norm(keys, dim=-1), room), start, count))

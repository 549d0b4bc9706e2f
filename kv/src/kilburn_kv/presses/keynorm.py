"""Key norms (Devoto et al., arXiv 2406.11430): keys of a low L2 norm tend to be attended to, so they stay; a baseline.

It needs no attention, which fused kernels do not return. The released code skips the first two layers; here the
budget is the same for every layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation
from kilburn_kv.presses.choice import ScoringPress, check_integer, require
from kilburn_kv.tensors import Tensor, torch


@dataclass(frozen=True)
class Keynorm(ScoringPress):
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

    def last(self, budget: int) -> int:
        """The window."""
        return self.window

    def score(self, seen: Observation) -> Tensor:
        """How short each token's key is."""
        norms: Tensor = torch.linalg.vector_norm(require(seen, "keys", self.name).to(torch.float32), dim=-1)
        return -norms

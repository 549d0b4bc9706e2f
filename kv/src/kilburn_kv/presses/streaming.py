"""StreamingLLM (Xiao et al., arXiv 2309.17453): the first tokens and the last, as if nothing had been between them.

The released code caches keys unrotated, and rotates all of them by their index in the cache at each step. Here keys
are cached rotated, and attention depends only on distances. So it is enough to rotate the tokens before the gap to
the positions just before the window. Earlier rotations are read from the observation.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn_kv.observation import Observation, Selection
from kilburn_kv.presses.choice import BudgetPress, afford, check_flag, check_integer
from kilburn_kv.tensors import torch


@dataclass(frozen=True)
class Streaming(BudgetPress):
    """Keep the first tokens (attention sinks) and the last, rotated by index in the cache.

    Args:
        sinks: how many of the first cached tokens stay.
        rotate: whether kept keys are rotated so that all gaps close: the gap before the window, and gaps inside the
            window that evicted pages left. Without it the distances grow beyond what the model was trained on.
    """

    sinks: int = 4
    rotate: bool = True

    def __post_init__(self) -> None:
        check_integer("streaming", "sinks", self.sinks, 0)
        check_flag("streaming", "rotate", self.rotate)

    def choose(self, seen: Observation, budget: int) -> Selection:
        """The first `sinks` tokens and the last `budget - sinks`, for all heads.

        Raises:
            BudgetTooSmall: it leaves no token besides the sinks.
        """
        count, device = seen.count, seen.positions.device
        window = 1 + afford(self.name, budget, sinks=self.sinks, recent_token=1)
        kept = torch.cat((torch.arange(self.sinks, device=device), torch.arange(count - window, count, device=device)))
        if not self.rotate:
            return Selection(kept)
        # By index in the cache: the last kept token just before the next one, each other one before its successor.
        return Selection(kept, torch.arange(seen.end - budget, seen.end, device=device) - seen.positions[kept])

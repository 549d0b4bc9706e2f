"""Priority with aging: the highest priority first, and who waits rises, so that nobody waits for ever."""

from __future__ import annotations

import math
from dataclasses import dataclass

from kilburn.errors import SpecError
from kilburn.models.queue import Job, Line


@dataclass(frozen=True)
class Priority:
    """The highest priority; of equal ones the job that came first.

    Args:
        aging: by how much a waiting job's priority rises in a second, until it runs. 0 lets a low priority wait for as
            long as higher ones come.
        slice: tokens after which a running job is compared with the waiting ones, on a model that can be interrupted;
            None for never.

    Raises:
        SpecError: an aging or a slice that cannot be.
    """

    aging: float = 0.1
    slice: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.aging < math.inf or (self.slice is not None and self.slice < 1):
            raise SpecError(f"{self}", advice="give an aging of 0 or more, and a slice of 1 or more")

    def choose(self, line: Line) -> Job:
        """Return the job of the highest rank. All jobs age alike, so how long a job waits already says how far it has risen in
        comparison with the others."""
        ranks = [self.aging * job.since - job.priority for job in line.waiting]
        return line.waiting[ranks.index(min(ranks))]

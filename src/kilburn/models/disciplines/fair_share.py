"""Fair share: tenants get tokens in the ratio of their weights, however many agents and jobs each has."""

from __future__ import annotations

from dataclasses import dataclass

from kilburn.errors import SpecError
from kilburn.models.queue import Job, Line


@dataclass(frozen=True)
class FairShare:
    """The first job of the tenant that was served least, by its weight. Who was idle has saved nothing up.

    Args:
        slice: tokens after which a running job is compared with the waiting ones, on a model that can be interrupted;
            None for never.

    Raises:
        SpecError: a slice of nothing.
    """

    slice: int | None = None

    def __post_init__(self) -> None:
        if self.slice is not None and self.slice < 1:
            raise SpecError(f"a slice of {self.slice} tokens serves nobody", advice="give 1 or more")

    def choose(self, line: Line) -> Job:
        """Of a tenant's jobs, first those that gave way; of tenants that were served alike, the one whose job is first."""
        heads: dict[str, Job] = {}
        for job in line.waiting:
            head = heads.get(job.tenant)
            if head is None or (job.slices and not head.slices):
                heads[job.tenant] = job
        return heads[min(heads, key=line.used.__getitem__)]

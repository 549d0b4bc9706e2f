"""Round robin: each agent in its place for one slice, then the next agent.

Scheduling of LLM agents by round robin is from "AIOS: LLM Agent Operating System" (arXiv 2403.16971). Its slice is a
time; here it is tokens or steps, so that the same jobs always run in the same order.
"""

from __future__ import annotations

from dataclasses import dataclass

from kilburn.errors import SpecError
from kilburn.models.queue import Job, Line


@dataclass(frozen=True)
class RoundRobin:
    """The agent that was not served for longest. An agent that comes new is behind those that wait already.

    Args:
        slice: tokens after which a job gives way, on a model that can be interrupted; None for never.
        steps: jobs of one agent in a row.

    Raises:
        SpecError: a slice of nothing.
    """

    slice: int | None = None
    steps: int = 1

    def __post_init__(self) -> None:
        if self.steps < 1 or (self.slice is not None and self.slice < 1):
            raise SpecError(f"a slice of {self.slice} tokens or {self.steps} steps serves nobody", advice="give 1 or more")

    def choose(self, line: Line) -> Job:
        """Return the first job of the agent whose place is next."""
        if line.in_a_row < self.steps:
            for job in line.waiting:
                if job.agent == line.holder:
                    return job
        best = line.waiting[0]
        best_place = max(best.place, line.last.get(best.agent, 0))
        for job in line.waiting:
            if job.place >= best_place:  # all others came later still
                break
            place = max(job.place, line.last.get(job.agent, 0))
            if place < best_place:
                best, best_place = job, place
        return best

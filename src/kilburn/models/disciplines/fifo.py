"""First in, first out: jobs run in the order in which they came, each to its end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kilburn.models.queue import Job, Line


@dataclass(frozen=True)
class Fifo:
    """The job that came first. A long job delays everything that came after it."""

    slice: ClassVar[int | None] = None

    def choose(self, line: Line) -> Job:
        """Return the head of the line."""
        return line.waiting[0]

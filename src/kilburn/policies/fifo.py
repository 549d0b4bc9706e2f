"""First in, first out: the oldest pages leave first, whole groups at a time.

The baseline that every framework ships. It knows nothing about meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kilburn.move import Evict, Move
from kilburn.policy import Acts, View


@dataclass(frozen=True)
class Fifo:
    """Evict the oldest unpinned groups when the window is over capacity.

    Args:
        spare: tokens to free beyond the excess, so that the prompt's prefix is edited less often;
            None for an eighth of the capacity.
    """

    spare: int | None = None

    acts: ClassVar[Acts] = Acts.FULL

    def __post_init__(self) -> None:
        if self.spare is not None and self.spare < 0:
            raise ValueError(f"spare={self.spare} is not a number of tokens; give 0 or more, or None")

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction, or nothing while the window has room."""
        if not view.excess:
            return []
        spare = view.budget.capacity // 8 if self.spare is None else self.spare
        older = (page for page in view.pages if page.message != view.turn)
        chosen = view.free(older, view.excess + spare + view.handle)
        return [Evict(pages=chosen, why="oldest first")] if chosen else []

"""Least recently used: what was neither admitted nor recalled for longest leaves first.

Recency is not importance: this is the classic for comparisons. Pin a constraint that must not leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kilburn.move import Evict, Move
from kilburn.policy import Acts, View


@dataclass(frozen=True)
class Lru:
    """Evict the least recently used unpinned groups when the window is over capacity.

    A page is used when it is admitted, loaded, or recalled by address.

    Args:
        spare: tokens to free beyond the excess; None for an eighth of the capacity.
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
        older = [page for page in view.pages if page.message != view.turn]
        last = view.uses.get
        # By turn, then by time: two keys of numbers make no pair for each of ten thousand pages.
        older.sort(key=lambda page: use.time if (use := last(page.id)) else 0.0)
        older.sort(key=lambda page: use.turn if (use := last(page.id)) else 0)
        chosen = view.free(older, view.excess + spare + view.handle)
        return [Evict(pages=chosen, why="least recently used")] if chosen else []

"""Least recently used: what was neither admitted nor recalled for longest leaves first.

Recency is not importance: this is the classic to measure against, not the one to trust with a
constraint that matters (pin that).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.move import Evict, Move
from kilburn.policy import View

__all__ = ["Lru"]


@dataclass(frozen=True)
class Lru:
    """Evict the least recently used unpinned groups when the window is over capacity.

    A page is used when it is admitted, loaded, or recalled by address.

    Args:
        spare: tokens to free beyond the excess; None for an eighth of the capacity.
    """

    spare: int | None = None

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction, or nothing while the window has room."""
        if not view.excess:
            return []
        spare = view.budget.capacity // 8 if self.spare is None else self.spare
        uses = view.uses
        older = [page for page in view.pages if not view.is_latest(page)]
        older.sort(key=lambda page: (uses[page.id].turn, uses[page.id].time) if page.id in uses else (0, 0.0))
        chosen = view.free(older, view.excess + spare + view.handle)
        return [Evict(pages=chosen, why="least recently used")] if chosen else []

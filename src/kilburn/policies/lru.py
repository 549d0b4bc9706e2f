"""Least recently used: what was neither admitted nor recalled for longest leaves first.

Recency is not importance: this is the classic for comparisons. Pin a constraint that must not leave.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kilburn.page import Page
from kilburn.policies.order import EvictInOrder
from kilburn.policy import View


@dataclass(frozen=True)
class Lru(EvictInOrder):
    """Evict the least recently used unpinned groups when the window is over capacity.

    A page is used when it is admitted, loaded, or recalled by address.

    Args:
        spare: tokens to free beyond the excess; None for an eighth of the capacity.
    """

    spare: int | None = None

    why = "least recently used"

    def order(self, view: View, tokens: int) -> Iterable[Page]:
        """All but the newest message, by their last use."""
        older = [page for page in view.pages if page.message != view.turn]
        last = view.uses.get
        # By turn, then by time: two keys of numbers make no pair for each of ten thousand pages.
        older.sort(key=lambda page: use.time if (use := last(page.id)) else 0.0)
        older.sort(key=lambda page: use.turn if (use := last(page.id)) else 0)
        return older

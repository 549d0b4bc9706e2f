"""First in, first out: the oldest pages leave first, whole groups at a time.

The baseline that every framework ships. It knows nothing about meaning.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kilburn.page import Page
from kilburn.policies.order import EvictInOrder
from kilburn.policy import View


@dataclass(frozen=True)
class Fifo(EvictInOrder):
    """Evict the oldest unpinned groups when the window is over capacity.

    Args:
        spare: tokens to free beyond the excess, so that the prompt's prefix is edited less often;
            None for an eighth of the capacity.
    """

    spare: int | None = None

    why = "oldest first"

    def order(self, view: View, tokens: int) -> Iterable[Page]:
        """All but the newest message, as it came."""
        return (page for page in view.pages if page.message != view.turn)

"""Three tiers in the window's budget: core, recent, archive.

The core has important pages and the user's words; recent has the newest pages. Everything else is archive: out of the
window, found by address or search. From MemGPT's main context (arXiv 2310.08560); unlike there, no page is rewritten
when it leaves.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar

from kilburn.message import Kind, Role
from kilburn.move import Evict, Move
from kilburn.policy import Acts, View


@dataclass(frozen=True)
class Tiered:
    """Keep a core and the recent pages when the window is over capacity; evict the rest.

    Args:
        core: tokens for important pages and the user's words, newest first;
            None for a quarter of the capacity. Pinned pages are not counted.
        spare: tokens to free beyond the excess; None for an eighth of the capacity.
    """

    core: int | None = None
    spare: int | None = None

    acts: ClassVar[Acts] = Acts.FULL

    def __post_init__(self) -> None:
        for name in ("core", "spare"):
            value = getattr(self, name)
            if value is not None and value < 0:
                raise ValueError(f"{name}={value} is not a number of tokens; give 0 or more, or None")

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction: the oldest pages outside of the core, then the core's own oldest."""
        if not view.excess:
            return []
        capacity = view.budget.capacity
        core = self.members(view, capacity // 4 if self.core is None else self.core)
        older = [page for page in view.pages if page.message != view.turn]
        outside = (page for page in older if page.id not in core)
        inside = (page for page in older if page.id in core)
        spare = capacity // 8 if self.spare is None else self.spare
        chosen = view.free(chain(outside, inside), view.excess + spare + view.handle)
        return [Evict(pages=chosen, why="archived")] if chosen else []

    def members(self, view: View, tokens: int) -> set[int]:
        """The pages of the core: important ones by their importance, then the user's words, newest first."""
        said = [page for page in view.pages if page.id in view.importance or (page.role is Role.USER and page.kind is Kind.TEXT)]
        ranked = sorted(said, key=lambda page: (-view.importance.get(page.id, 0.0), -page.id))
        chosen: set[int] = set()
        for page in ranked:
            if page.id not in view.pins and page.tokens <= tokens:
                tokens -= page.tokens
                chosen.add(page.id)
        return chosen

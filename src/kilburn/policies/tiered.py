"""Three tiers in the window's budget: core, recent, archive.

The core has important pages and the user's words; recent has the newest pages. Everything else is archive: out of the
window, found by address or search. From MemGPT's main context (arXiv 2310.08560); unlike there, no page is rewritten
when it leaves.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain

from kilburn.message import Kind, Role
from kilburn.page import Page
from kilburn.policies.order import EvictInOrder
from kilburn.policies.parameters import check_tokens
from kilburn.policy import View


@dataclass(frozen=True)
class Tiered(EvictInOrder):
    """Keep a core and the recent pages when the window is over capacity; evict the rest.

    Args:
        core: tokens for pages with an importance or spoken by the user, newest first;
            None for a quarter of the capacity. Pinned pages are not counted.
        spare: tokens to free beyond the excess; None for an eighth of the capacity.
    """

    core: int | None = None
    spare: int | None = None

    why = "archived"

    def __post_init__(self) -> None:
        check_tokens(core=self.core, spare=self.spare)

    def order(self, view: View, tokens: int) -> Iterable[Page]:
        """The oldest pages outside of the core, then the core's own oldest."""
        core = self.members(view, view.budget.capacity // 4 if self.core is None else self.core)
        older = [page for page in view.pages if page.message != view.turn]
        return chain((page for page in older if page.id not in core), (page for page in older if page.id in core))

    def members(self, view: View, tokens: int) -> set[int]:
        """Return the pages of the core: those with an importance, by importance, then the user's messages, newest first."""
        eligible = [
            page for page in view.pages if page.id in view.importance or (page.role is Role.USER and page.kind is Kind.TEXT)
        ]
        ranked = sorted(eligible, key=lambda page: (-view.importance.get(page.id, 0.0), -page.id))
        chosen: set[int] = set()
        for page in ranked:
            if page.id not in view.pins and page.tokens <= tokens:
                tokens -= page.tokens
                chosen.add(page.id)
        return chosen

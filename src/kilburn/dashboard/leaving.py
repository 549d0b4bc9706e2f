"""The pages that a policy could evict now, and the price of evicting them: by group, and by the reason why they are in the
window."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from kilburn.dashboard.strip import PromptItem
from kilburn.kernel.session import Session
from kilburn.page import Page
from kilburn.prices import PRICES

HANDLE = "handle of evicted pages"
STAYS = {
    "pinned": "after you unpin it",
    "the user's latest message": "after the user's next message",
    "an open call": "after its result",
    HANDLE: "when its pages come back",
}
"""When a policy may evict pages that it may not evict now, by the reason why they are in the window."""


def reason(page: Page, piece: PromptItem, pinned: bool, request: Set[int], awaited: Set[int]) -> str:
    """Return the reason why a page is in the window.

    Args:
        request: pages of the user's latest message. awaited: pages of calls without a result.
    """
    if pinned:
        return "pinned"
    if page.id in request:
        return "the user's latest message"
    if page.id in awaited:
        return "an open call"
    if piece.shade == "handle":
        return HANDLE
    return "made by a policy" if page.id < 0 else "not evicted"


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that leave together, the tokens that they free, and the tokens behind them that a provider has to process again."""

    pages: tuple[Page, ...]
    freed: int
    reprocessed: int

    @property
    def price(self) -> float:
        """Return what it costs more to process the tokens behind the pages again, once, than to read them from the cache."""
        return PRICES["hosted"].again(self.reprocessed)

    @property
    def prompts(self) -> int:
        """Return the number of prompts after which the saved tokens are worth the price."""
        table = PRICES["hosted"]
        return -int(-self.price // max(1e-12, self.freed * table.cached / 1e6))


def could_leave(session: Session, pieces: Sequence[PromptItem]) -> list[Leaving]:
    """Return the groups of pages that a policy may evict now, the cheapest first."""
    view = session.edits.view()
    movable = {page.id for page in view.movable(view.pages)}
    begins, tokens, total = _places(pieces)
    groups: dict[tuple[int, ...], Leaving] = {}
    for page in view.pages:
        if page.id not in movable:
            continue
        members = tuple(member for member in view.group(page.id) if member in tokens)
        if not members or members in groups:
            continue
        freed = sum(tokens[member] for member in members)
        groups[members] = Leaving(
            pages=tuple(view.page(member) for member in members),
            freed=freed,
            reprocessed=total - min(begins[member] for member in members) - freed,
        )
    return sorted(groups.values(), key=lambda group: group.reprocessed / max(1, group.freed))


def by_reason(
    reasons: Sequence[tuple[str, int]], why: Mapping[int, str], groups: Sequence[Leaving], pieces: Sequence[PromptItem]
) -> Iterator[dict[str, Any]]:
    """Yield each reason with its tokens, and what evicting all of its movable pages would free, or when they become movable.

    A group counts for the reason of its first page.
    """
    begins, tokens, total = _places(pieces)
    leaving: dict[str, list[int]] = {}
    for group in groups:
        leaving.setdefault(why.get(group.pages[0].id, ""), []).extend(page.id for page in group.pages)
    for name, count in reasons:
        pages = leaving.get(name, [])
        freed = sum(tokens[page] for page in pages)
        first = min((begins[page] for page in pages), default=total)
        whole = Leaving(pages=(), freed=freed, reprocessed=total - first - freed) if pages else None
        yield {"why": name, "tokens": count, "all": whole, "when": "" if pages else STAYS.get(name, "not now")}


def _places(pieces: Sequence[PromptItem]) -> tuple[dict[int, int], dict[int, int], int]:
    """Return the offset of each page in the prompt, its tokens, and the sum, all in tokens."""
    at, begins, tokens = 0, dict[int, int](), dict[int, int]()
    for piece in pieces:
        begins[piece.page], tokens[piece.page] = at, piece.tokens
        at += piece.tokens
    return begins, tokens, at

"""What could leave the window now, at which price: group by group, and for each reason why something is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from typing import Any

import msgspec

from kilburn.dashboard.strip import PromptItem
from kilburn.kernel.session import Session
from kilburn.page import Page
from kilburn.prices import PRICES

HANDLE = "stands for what is out"
STAYS = {
    "pinned": "after you unpin it",
    "the user's latest message": "after the user's next message",
    "an open call": "after its result",
    HANDLE: "with what it stands for, when that comes back",
}
"""When something could leave that a policy may not touch now, by why it is there."""


def reason(page: Page, piece: PromptItem, pinned: bool, held: Set[int], awaited: Set[int]) -> str:
    """Why something is in the window."""
    if pinned:
        return "pinned"
    if page.id in held:
        return "the user's latest message"
    if page.id in awaited:
        return "an open call"
    if piece.shade == "handle":
        return HANDLE
    return "made by a policy" if page.id < 0 else "has not left"


class Leaving(msgspec.Struct, frozen=True, kw_only=True):
    """Pages that leave together: the tokens that they free, and those behind them that a provider has to read again."""

    pages: tuple[Page, ...]
    freed: int
    again: int
    turns: int | None = None

    @property
    def price(self) -> float:
        """Of reading again, once."""
        table = PRICES["hosted"]
        return self.again * (table.written - table.cached) / 1e6

    @property
    def prompts(self) -> int:
        """After how many prompts it has saved its price."""
        table = PRICES["hosted"]
        return -int(-self.price // max(1e-12, self.freed * table.cached / 1e6))


def could_leave(session: Session, pieces: Sequence[PromptItem]) -> list[Leaving]:
    """What a policy may evict now, the cheapest first."""
    view = session.view()
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
            again=total - min(begins[member] for member in members) - freed,
            turns=view.turn - page.message if page.message else None,
        )
    return sorted(groups.values(), key=lambda group: group.again / max(1, group.freed))


def by_reason(
    reasons: Sequence[tuple[str, int]], why: Mapping[int, str], groups: Sequence[Leaving], pieces: Sequence[PromptItem]
) -> Iterator[dict[str, Any]]:
    """For each reason, with its tokens: what of it could leave, all of it at once; or when the rest could.

    A group with several reasons is counted by that of its first page.
    """
    begins, tokens, total = _places(pieces)
    leaving: dict[str, list[int]] = {}
    for group in groups:
        leaving.setdefault(why.get(group.pages[0].id, ""), []).extend(page.id for page in group.pages)
    for words, held in reasons:
        pages = leaving.get(words, [])
        freed = sum(tokens[page] for page in pages)
        first = min((begins[page] for page in pages), default=total)
        all_of_it = Leaving(pages=(), freed=freed, again=total - first - freed) if pages else None
        yield {"why": words, "tokens": held, "all": all_of_it, "when": "" if pages else STAYS.get(words, "not now")}


def _places(pieces: Sequence[PromptItem]) -> tuple[dict[int, int], dict[int, int], int]:
    """Where each page begins in the prompt, its tokens, and the tokens of all."""
    at, begins, tokens = 0, dict[int, int](), dict[int, int]()
    for piece in pieces:
        begins[piece.page], tokens[piece.page] = at, piece.tokens
        at += piece.tokens
    return begins, tokens, at

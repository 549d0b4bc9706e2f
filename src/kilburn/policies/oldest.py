"""The fallback: what leaves a window whose own policy freed too little. The oldest groups, the user's newest words last.

The kernel finds it by name, carries out its moves one after the other, and stops when the window fits; then it frees an eighth of
the capacity more, with `spare`, so that the beginning of the prompt does not change with every message. As a policy of its own,
without that, it edits the prefix at every message; `fifo` frees more at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from kilburn.message import Role
from kilburn.move import Evict, Move
from kilburn.page import Page
from kilburn.policy import Acts, View


@dataclass(frozen=True)
class Oldest:
    """Evict the oldest groups, each by a move of its own, when the window is over capacity. As many of the newest messages of
    the user as take at most a quarter of the capacity leave last.

    Args:
        spare: tokens to free beyond the excess; these newest messages stay then.
    """

    spare: int = 0

    acts: ClassVar[Acts] = Acts.FULL

    def __post_init__(self) -> None:
        if self.spare < 0:
            raise ValueError(f"spare={self.spare} must be 0 or more")

    def plan(self, view: View) -> Sequence[Move]:
        """As many groups as are over the capacity. Of a window of twice its capacity or more, most leaves in one move."""
        excess, capacity = view.excess, view.budget.capacity
        if not excess + self.spare:
            return []
        late = set(_late(view))
        order = [*(page for page in view.pages if page.id not in late), *(page for page in view.pages if page.id in late)]
        older = [page for page in order if not view.is_latest(page)]
        if excess > capacity and (chosen := view.free(older, excess - capacity // 8)):
            return [Evict(pages=chosen, why="over capacity")]
        moves: list[Move] = []
        for group in _groups(view, older):
            if excess + (0 if late.intersection([page.id for page in group]) else self.spare) <= 0:
                break
            moves.append(Evict(pages=tuple(page.id for page in group), why="over capacity"))
            excess -= sum(page.tokens for page in group)
        return moves


def _groups(view: View, pages: Sequence[Page]) -> Iterator[list[Page]]:
    """The groups of some pages that may leave, or the parts of them that may, in order."""
    resident = {page.id: page for page in view.pages}
    # Groups that stay: of such a one, which may have thousands of pages, results alone may leave.
    stays: set[int] = set()
    for page in pages:
        if page.id not in resident or (page.group in stays and not page.answers):
            continue
        group = [resident[member] for member in view.group(page.id) if member in resident]
        leaving = replace(view, pages=group).free([page], 1)
        if leaving:
            yield [resident.pop(member) for member in leaving]
        elif page.group:
            stays.add(page.group)


def _late(view: View) -> list[int]:
    """The user's newest messages, which leave last."""
    room = view.budget.capacity // 4
    words: list[int] = []
    for page in reversed(view.pages):
        if page.role is Role.USER and page.message and not page.is_atomic:
            room -= page.tokens
            if room < 0:
                break
            words.append(page.id)
    return words

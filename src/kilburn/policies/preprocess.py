"""Shortens a long tool output when it arrives: the most informative lines stay, and the original is in the store.

What stays is cut from the original, line by line and byte-identical (head, tail, errors, test states, definitions,
what the call asked for). The kept spans are recorded, and the heading has the address of the whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

from kilburn.message import Kind, Role
from kilburn.move import Fold, Move
from kilburn.page import Page
from kilburn.policy import Cause, View
from kilburn.selection.extract import condense


@dataclass(frozen=True)
class Preprocess:
    """Put an excerpt in place of every newly admitted tool output that is too long.

    Args:
        limit: tokens from which on an output counts as long; None for a quarter of the capacity.
        to: tokens of the excerpt; None for half of the limit.
        exclude: names of tools whose outputs are never touched.
    """

    limit: int | None = None
    to: int | None = None
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        for name in ("limit", "to"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name}={value} is not a number of tokens; give 1 or more, or None")
        if self.limit is not None and self.to is not None and self.to >= self.limit:
            raise ValueError(f"to={self.to} must be less than limit={self.limit}")

    def plan(self, view: View) -> Sequence[Move]:
        """One excerpt for each long output among the pages that just came."""
        if view.cause is not Cause.ADMIT:
            return []
        limit = max(1, view.budget.capacity // 4) if self.limit is None else self.limit
        to = max(1, limit // 2) if self.to is None else self.to
        long = [
            page
            for page in self._came(view)
            if page.kind is Kind.RESULT and page.role is Role.TOOL and page.tokens > limit and page.id not in view.pins
        ]
        folds = [
            self._condensed(view, page, to)
            for page in long
            if not page.answers or view.page(page.answers).name not in self.exclude
        ]
        return [fold for fold in folds if fold is not None]

    @staticmethod
    def _came(view: View) -> list[Page]:
        """Return the resident pages among the newly appended ones; they stand at the end, in order."""
        first = min(view.wanted, default=0)
        newest = list(takewhile(lambda page: not 0 < page.id < first, reversed(view.pages)))
        new_ids = set(view.wanted)
        return [page for page in reversed(newest) if page.id in new_ids]

    @staticmethod
    def _condensed(view: View, page: Page, to: int) -> Fold | None:
        spans = condense(view.text(page.id), to, view.count, query=page.label)
        return Fold(pages=(page.id,), keep=spans, why=f"{page.tokens} tokens condensed on the way in") if spans else None

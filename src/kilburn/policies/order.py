"""What the policies share that only put pages in an order: when to act, how much to free, whole groups at a time.

Such a policy adds its order, and nothing else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import ClassVar

from kilburn.move import Evict, Move
from kilburn.page import Page
from kilburn.policies.parameters import check_tokens
from kilburn.policy import Acts, View


class EvictInOrder(ABC):
    """Evicts unpinned groups, the first of an order first, when the window is over capacity.

    Attributes:
        spare: tokens to free beyond the excess, so that the prompt's prefix is edited less often; None for an eighth of the
            capacity.
        why: the reason in the ledger.
    """

    spare: int | None
    why: ClassVar[str]

    acts: ClassVar[Acts] = Acts.FULL

    def __post_init__(self) -> None:
        check_tokens(spare=self.spare)

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction, or nothing while the window has room."""
        if not view.excess:
            return []
        tokens = view.excess + (view.budget.capacity // 8 if self.spare is None else self.spare) + view.handle
        chosen = view.free(self.order(view, tokens), tokens)
        return [Evict(pages=chosen, why=self.why)] if chosen else []

    @abstractmethod
    def order(self, view: View, tokens: int) -> Iterable[Page]:
        """The pages that may leave, in the order in which they should, of which the first leave that take so many tokens."""

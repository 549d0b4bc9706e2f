"""What a press sees of one sequence: which tokens are cached, what attention they got, to which pages they belong.

Tensors are on the engine's device, one entry per cached token in the order of the sequence. Attention is averaged
over the query heads that share a key-value head *before* anything is chosen, so that a choice never needs more heads
than the cache has. Only what the press `needs` is there; the rest is None.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CachedPage", "Observation"]


@dataclass(frozen=True)
class CachedPage:
    """A page's tokens in the cache, and what the store knows about it.

    Args:
        page: its id; 0 for tokens that belong to no page (the chat template's).
        start: index of its first cached token, not its logical position.
        stop: index after its last cached token.
        pinned: must stay.
        folded: a memento or an excerpt of it is in the cache too.
        stale: a later page superseded it: an older output of the same call, a retired fact.
        distance: expected turns until it is read again, or None if unknown.
    """

    page: int
    start: int
    stop: int
    pinned: bool = False
    folded: bool = False
    stale: bool = False
    distance: float | None = None


@dataclass(frozen=True)
class Observation:
    """One sequence with `n` cached tokens, over `layers` layers and `heads` key-value heads.

    Args:
        positions: logical position of each cached token, ascending; shape [n], int64.
        end: the logical position that the next token gets.
        keys: as cached, rotated to `positions`, or to `positions + shifts`; shape [layers, heads, n, dim].
        attention: what each token received from all queries since it was cached, averaged over the query heads of
            its group; shape [layers, heads, n], float32.
        queries: how many queries each token could be seen by so far, itself included; shape [n], int64.
        recent: attention of the last queries on every token, averaged over the query heads of the group;
            shape [layers, heads, queries, n], float32; the last row is of the last token.
        pages: in order; tokens that none covers belong to no page.
        shifts: by how many positions in total each cached key was rotated since it was computed; shape [n], int64, or
            None if none was.
    """

    positions: Tensor
    end: int
    keys: Tensor | None = None
    attention: Tensor | None = None
    queries: Tensor | None = None
    recent: Tensor | None = None
    pages: tuple[CachedPage, ...] = ()
    shifts: Tensor | None = None

    @property
    def count(self) -> int:
        """Cached tokens."""
        return int(self.positions.shape[0])

    def before(self, stop: int) -> Observation:
        """The first `stop` cached tokens alone, without pages: what all queries asked of them."""

        def part(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[..., :stop]

        return Observation(
            positions=self.positions[:stop],
            end=self.end,
            keys=None if self.keys is None else self.keys[..., :stop, :],
            attention=part(self.attention),
            queries=part(self.queries),
            recent=part(self.recent),
            shifts=part(self.shifts),
        )


class Selection(NamedTuple):
    """What stays, as indices of cached tokens, ascending and without repetition.

    Args:
        keep: shape [k] if all heads keep the same tokens, or [layers, heads, k] if each chooses for itself; then the
            kept entries are packed together and no longer stand for single tokens.
        shift: by how many positions in total the kept keys are to be rotated from their logical positions. It
            includes what `Observation.shifts` says was done already. Shape [k], int64, or None for no rotation. Only
            possible if all heads keep the same tokens. `turn` is what is left to do. In half precision it is better
            to keep the unrotated keys and to rotate those by `shift`.
    """

    keep: Tensor
    shift: Tensor | None = None

    def turn(self, seen: Observation) -> Tensor | None:
        """By how many positions to rotate the kept keys of `seen` now, shape [k], or None for no rotation.

        The engine passes `shift` back in the next observation.
        """
        if self.shift is None or seen.shifts is None:
            return self.shift
        return self.shift - seen.shifts[self.keep]


class Press(Protocol):
    """Chooses which cached tokens stay. A frozen dataclass; pure: it sees one observation, owns nothing."""

    @property
    def needs(self) -> frozenset[str]:
        """Which of "keys", "attention" and "recent" it has to see; positions and pages are always there."""
        ...

    @property
    def recent(self) -> int:
        """How many of the last queries it has to see, if it needs "recent"."""
        ...

    def keep(self, seen: Observation, budget: int) -> Selection:
        """At most `budget` tokens; all of them, unshifted, if there are no more than that.

        Raises:
            BudgetTooSmall: it is smaller than what this press must keep (its sinks, its window). Nothing was chosen.
        """
        ...

"""The default: the newest pages and important pages stay whole; of everything else, the passages that are worth most stay.

When the window is over its capacity, or the user asks something, everything older than the tail becomes one excerpt: whole
passages, verbatim, each under the address of its page. They are chosen by their likeness to the latest words and the request,
by their nearness in time, and by what they show that is not shown yet. The excerpt is chosen from the originals each time,
never from its own text, so nothing drifts. Pages of which nothing is kept leave, and have a handle. It needs no model. This
policy is ours; the figures are in docs/explanation/policies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from kilburn.move import Move
from kilburn.policies.parameters import check_tokens
from kilburn.policy import Acts, Cause, View
from kilburn.selection.excerpts import cited_stretch, excerpt_moves, is_asked, old_pages, parts_of, shorten_latest, unread


@dataclass(frozen=True)
class Hybrid:
    """Keep a tail and a core whole, and excerpt the rest, when the window is over capacity.

    Args:
        low: tokens in the window after it acted; None leaves a tenth of a small window free, and nearly a quarter of a
            large one. Every action edits the prefix, and a large window can afford to act less often.
        tail: tokens of newest pages, before what the agent has not read, that stay whole; None for a tenth of the capacity.
        core: tokens of important pages ("remember this") that stay whole; None for a quarter.
        whole: tokens up to which the latest message stays whole, and to which it is excerpted beyond;
            None for a quarter of the capacity.
    """

    low: int | None = None
    tail: int | None = None
    core: int | None = None
    whole: int | None = None

    acts: ClassVar[Acts] = Acts.FOLDED

    def __post_init__(self) -> None:
        check_tokens(low=self.low, tail=self.tail, core=self.core, whole=self.whole)

    def plan(self, view: View) -> Sequence[Move]:
        """One excerpt in place of everything older than the tail, or nothing while there is room and no question."""
        if not view.excess and not _is_asked_anew(view):
            return []
        capacity = view.budget.capacity
        low = min(capacity - view.handle, capacity - _spare(capacity) if self.low is None else self.low)
        whole = capacity // 4 if self.whole is None else self.whole
        newest = sum([page.tokens for page in view.latest()])
        tail = max(newest, min(unread(view), whole)) + (capacity // 10 if self.tail is None else self.tail)
        leaving = old_pages(view, tail, capacity // 4 if self.core is None else self.core)
        latest, saved = shorten_latest(view, whole)
        if not leaving:
            return latest
        stretch = cited_stretch(view, leaving)
        room = low - (view.use - saved - sum([page.tokens for page in leaving])) - 2 * view.handle
        parts = parts_of(view, stretch, room)
        return [*latest, *excerpt_moves(stretch, parts, f"passages of {len(parts)} pages", nothing="no room for an excerpt")]


def _is_asked_anew(view: View) -> bool:
    """Whether the user just asked something, and older pages may have the answer."""
    return view.cause is Cause.ADMIT and is_asked(view) and any(page.depth and not page.message for page in view.pages)


def _spare(capacity: int) -> int:
    return max(min(capacity // 10, 64 + capacity // 20), min(capacity, capacity - 4000) // 4)

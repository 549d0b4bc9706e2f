"""Importance-weighted eviction: what matters least leaves first.

A page's score joins what was said about it ("remember this", its speaker), how recently and how
often it was used, and how near it is to the task. Decay is a function of age, not a factor applied
again at every pass; the newest page is never the victim of its own arrival; the context is really
looked at (three defects of the usual snippet, see docs/explanation/policies.md).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from kilburn.message import Kind, Role
from kilburn.move import Evict, Move
from kilburn.page import Page
from kilburn.policy import View

__all__ = ["Importance", "scores"]

BY_ROLE = {Role.SYSTEM: 0.9, Role.USER: 0.7, Role.ASSISTANT: 0.4, Role.TOOL: 0.3}
LONG = 20_000
"""Characters of a page that are compared with the task, at most."""

_WORD = re.compile(r"[^\W\d]\w{3,}")


@lru_cache(maxsize=8192)
def words_of(text: str) -> frozenset[str]:
    """The words of a text that can tell it from others: four letters or more, lower case."""
    return frozenset(_WORD.findall(text[:LONG].lower()))


def scores(view: View, weights: Sequence[float], half_life: float, turns: float) -> dict[int, float]:
    """Score of every resident page; a group has the best of its members'.

    Args:
        weights: of explicit importance, recency, frequency, and nearness to the task.
        half_life: seconds after which recency is halved; `turns` the same in turns.
    """
    explicit, recency, frequency, nearness = weights
    focus = words_of(view.task) | _latest_words(view)
    found: dict[int, float] = {}
    for page in view.pages:
        use = view.uses.get(page.id)
        age = (view.now - use.time) / half_life + (view.turn - use.turn) / turns if use else (view.turn - page.message) / turns
        base = view.marks.get(page.id, 0.6 if page.kind is Kind.FOLD else BY_ROLE[page.role])
        near = _overlap(words_of(view.text(page.id)), focus) if nearness and page.kind is not Kind.IMAGE else 0.0
        count = min((use.count if use else 0) / 10, 1.0)
        found[page.id] = explicit * base + recency * 0.5 ** max(0.0, age) + frequency * count + nearness * near
    best: dict[int, float] = {}
    for page in view.pages:
        if page.group:
            best[page.group] = max(best.get(page.group, 0.0), found[page.id])
    return {page.id: best[page.group] if page.group else found[page.id] for page in view.pages}


def _latest_words(view: View) -> frozenset[str]:
    latest: frozenset[str] = frozenset()
    for page in reversed(view.pages):
        if page.message and page.message < view.turn - 1:
            break
        if page.kind in (Kind.TEXT, Kind.CALL, Kind.REASONING):
            latest |= words_of(view.text(page.id))
    return latest


def _overlap(page: frozenset[str], focus: frozenset[str]) -> float:
    """Share of the focus's words that a page has, 0 to 1, its size notwithstanding."""
    return len(page & focus) / len(focus) if focus else 0.0


def by_score(view: View, found: dict[int, float]) -> list[Page]:
    """Pages that may leave, worst first; of equal scores the older."""
    return sorted((page for page in view.pages if not view.is_latest(page)), key=lambda page: (found[page.id], page.place))


@dataclass(frozen=True)
class Importance:
    """Evict the least important groups when the window is over capacity.

    Args:
        explicit, recency, frequency, nearness: weights of the four terms.
        half_life: seconds after which an unused page's recency is halved.
        turns: messages after which it is halved.
        spare: tokens to free beyond the excess; None for an eighth of the capacity.
    """

    explicit: float = 1.0
    recency: float = 1.0
    frequency: float = 0.5
    nearness: float = 0.5
    half_life: float = 3600.0
    turns: float = 20.0
    spare: int | None = None

    def __post_init__(self) -> None:
        if self.half_life <= 0 or self.turns <= 0:
            raise ValueError(f"half_life={self.half_life} and turns={self.turns} must be above 0")

    def plan(self, view: View) -> Sequence[Move]:
        """One eviction, or nothing while the window has room."""
        if not view.excess:
            return []
        spare = view.budget.capacity // 8 if self.spare is None else self.spare
        weights = (self.explicit, self.recency, self.frequency, self.nearness)
        order = by_score(view, scores(view, weights, self.half_life, self.turns))
        chosen = view.free(order, view.excess + spare + view.handle)
        return [Evict(pages=chosen, why="least important")] if chosen else []

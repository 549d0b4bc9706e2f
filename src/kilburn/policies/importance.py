"""Importance-weighted eviction: what matters least leaves first.

A page's score combines its importance ("remember this") and speaker, how recently and how often it was used, and how
similar it is to the user's request. Decay is a function of age, not a factor that is applied again at every pass. The
newest page is never evicted. The request is really compared. (The usual code gets these three wrong, see
docs/explanation/policies.md.)
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from sys import getsizeof

from kilburn.message import Kind, Role
from kilburn.page import Page
from kilburn.policies.order import EvictInOrder
from kilburn.policy import View
from kilburn.remembered import remembered

BY_ROLE = {Role.SYSTEM: 0.9, Role.USER: 0.7, Role.ASSISTANT: 0.4, Role.TOOL: 0.3}
LONG = 20_000
"""Characters of a page that are compared with the task, at most."""

LOOKED = 512
"""Pages that are scored one by one, at most, besides those that must leave anyway."""
MARGIN = 128
"""Of a window with more: pages on each side of the border between leaving and staying that are read."""
FORGOTTEN = 50.0
"""Halvings after which recency counts as 0."""

_WORD = re.compile(r"[^\W\d]\w{3,}")


@remembered(lambda words: getsizeof(words) + 65 * len(words))
def significant_words(text: str) -> frozenset[str]:
    """Return the words that distinguish a text from others: four letters or more, in lower case."""
    return frozenset(_WORD.findall(text[:LONG].lower()))


def scores(view: View, pages: Sequence[Page], weights: Sequence[float], half_life: float, turns: float) -> dict[int, float]:
    """Score of each of these resident pages; a group has the best of its members' among them.

    Args:
        weights: of explicit importance, recency, frequency, and nearness to the task.
        half_life: seconds after which recency is halved; `turns` the same in turns.
    """
    explicit, recency, frequency, nearness = weights
    focus = significant_words(view.task) | _latest_words(view) if nearness else frozenset()
    importances, uses, now, turn = view.importance, view.uses, view.now, view.turn
    page_scores: dict[int, float] = {}
    best: dict[int, float] = {}
    for page in pages:
        number, group = page.id, page.group
        use = uses.get(number)
        base = importances.get(number) if importances else None
        if base is None:
            base = 0.6 if page.kind is Kind.FOLD else BY_ROLE[page.role]
        score = explicit * base
        if use is None:
            age = (turn - page.message) / turns
        else:
            age = (now - use.time) / half_life + (turn - use.turn) / turns
            score += frequency * min(use.count / 10, 1.0)
        if age < FORGOTTEN:
            score += recency * 0.5 ** max(0.0, age)
        if nearness and not page.is_atomic:
            score += nearness * _overlap(significant_words(view.text(number)), focus)
        page_scores[number] = score
        if group and score > best.get(group, 0.0):
            best[group] = score
    if not best:
        return page_scores
    return {page.id: best.get(page.group, 0.0) if page.group else page_scores[page.id] for page in pages}


def _latest_words(view: View) -> frozenset[str]:
    latest: frozenset[str] = frozenset()
    for page in reversed(view.pages):
        if page.message and page.message < view.turn - 1:
            break
        if page.kind in (Kind.TEXT, Kind.CALL, Kind.REASONING):
            latest |= significant_words(view.text(page.id))
    return latest


def _overlap(page: frozenset[str], focus: frozenset[str]) -> float:
    """Share of the focus's words that a page has, 0 to 1, whatever its size."""
    return len(page & focus) / len(focus) if focus else 0.0


@dataclass(frozen=True)
class Importance(EvictInOrder):
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

    why = "least important"

    def __post_init__(self) -> None:
        if self.half_life <= 0 or self.turns <= 0:
            raise ValueError(f"half_life={self.half_life} and turns={self.turns} must be above 0")
        if min(self.explicit, self.recency, self.frequency, self.nearness, self.spare or 0) < 0:
            raise ValueError(f"{self}: the weights and spare must be 0 or more")

    def order(self, view: View, tokens: int) -> list[Page]:
        """Return the pages that may leave, worst first; of equal scores the older first.

        In a window with more than `LOOKED` pages, only the oldest are compared, as many as are enough to choose from.
        Nearness, for which texts must be read, is computed only for pages for which it may change the decision.
        """
        weights = (self.explicit, self.recency, self.frequency, self.nearness)
        pages = list(view.pages)
        if len(pages) > LOOKED:
            older = [page for page in pages if page.message != view.turn]
            first = _enough(older, tokens)
            rough = _sorted(older[:first], scores(view, older[:first], (*weights[:3], 0.0), self.half_life, self.turns))
            cut = _enough(rough, tokens, 0)
            low, high = max(0, cut - MARGIN), cut + MARGIN
            near = rough[low:high]
            fine = _sorted(near, scores(view, near, weights, self.half_life, self.turns))
            return [*rough[:low], *fine, *rough[high:], *older[first:]]
        page_scores = scores(view, pages, weights, self.half_life, self.turns)
        return _sorted([page for page in pages if not view.is_latest(page)], page_scores)


def _sorted(pages: Sequence[Page], page_scores: Mapping[int, float]) -> list[Page]:
    """Sort pages, worst first; pages of one score stay in the window's order, oldest first."""
    return sorted(pages, key=lambda page: page_scores[page.id])


def _enough(pages: Sequence[Page], tokens: int, spare: int = LOOKED) -> int:
    """Return how many of the first pages have `tokens` tokens together, plus `spare` pages."""
    for at, total in enumerate(accumulate(page.tokens for page in pages)):
        if total >= tokens:
            return min(len(pages), at + 1 + spare)
    return len(pages)

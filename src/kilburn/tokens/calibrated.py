"""A counter that learns from what providers report.

A page's count never changes after the page was admitted. Pages keep the inner counter's numbers, and one factor
corrects the window as a whole.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterable
from typing import Any

from kilburn.budget import Counter

KEEP = 32
MIN_TOKENS = 256

LOWEST, HIGHEST = 0.25, 8.0
"""Ratios of reported to counted tokens that are plausible. The extremes that were measured are 0.6, for prose under the
over-estimating counters, and 4.8, for text that was made to mislead one."""


def is_plausible(counted: int, reported: int) -> bool:
    """Return whether a prompt counted here as `counted` tokens can have cost `reported`. Numbers below 256 are treated as 256,
    so two small numbers are always plausible, and a small and a large one never."""
    return LOWEST * counted <= max(reported, MIN_TOKENS) and reported <= HIGHEST * max(counted, MIN_TOKENS)


MARGIN = 0.05
"""Share that the factor stays above the largest recent ratio."""

EASE = 0.05
"""Largest share that one prompt takes off the factor."""


class Calibrated:
    """A counter with a correction factor for windows.

    A window of `capacity` real tokens holds pages of `room(capacity)` counted tokens, that is capacity / `factor`.
    The factor starts at 1. It rises at once to `1 + MARGIN` times the largest ratio of actual to estimated tokens
    among the last 32 prompts; it falls towards that by at most `EASE` for each prompt, and only once four prompts
    were seen. So it is never below any recent ratio, and one cheap prompt cannot widen the window.

    The same observations in the same order give the same factor: replaying the ledger's USAGE events rebuilds it.

    Args:
        inner: the counter that counts pages.
    """

    def __init__(self, inner: Counter) -> None:
        self.inner = inner
        self.name = inner.name
        self.envelope = inner.envelope
        self.family = str(getattr(inner, "family", ""))
        self.factor = 1.0
        self._ratios: deque[float] = deque(maxlen=KEEP)

    def __repr__(self) -> str:
        return f"Calibrated({self.inner!r}, factor={self.factor:.3f})"

    def copy(self) -> Calibrated:
        """Return a counter with the same factor, which learns by itself."""
        duplicate = copy.copy(self)
        duplicate._ratios = self._ratios.copy()
        return duplicate

    def state(self) -> dict[str, Any]:
        """Return what `adopt` takes, as plain numbers."""
        return {"factor": self.factor, "ratios": list(self._ratios)}

    def adopt(self, factor: float, ratios: Iterable[float]) -> None:
        """Go on from another one's state."""
        self.factor = factor
        self._ratios = deque(ratios, maxlen=KEEP)

    def count(self, text: str) -> int:
        """Return the inner counter's tokens, uncorrected."""
        return self.inner.count(text)

    def observe(self, estimated: int, actual: int) -> float:
        """Learn that a prompt counted here as `estimated` tokens cost `actual`; return the new factor.

        Both numbers must be of the whole prompt, tool schemas included. Prompts below 256 tokens, by either number,
        are ignored, because they say more about envelopes than about text. Implausible numbers (`is_plausible`) are
        ignored too, so that one wrong report cannot close the window.
        """
        if min(estimated, actual) < MIN_TOKENS or not is_plausible(estimated, actual):
            return self.factor
        self._ratios.append(actual / estimated)
        target = max(self._ratios) * (1 + MARGIN)
        if target >= self.factor:
            self.factor = target
        elif len(self._ratios) >= 4:
            self.factor = max(target, self.factor * (1 - EASE))
        return self.factor

    def room(self, capacity: int) -> int:
        """Counted tokens that fit `capacity` real ones."""
        return int(capacity / self.factor)

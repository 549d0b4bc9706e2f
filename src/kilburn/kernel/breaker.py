"""Stops asking a model that does not answer, or whose answers free nothing, so that not every turn waits for it and pays.

It counts turns, not seconds, so that the same session always behaves in the same way.
"""

from __future__ import annotations

from kilburn.effect import Outcome

FAILURES = 3
"""Failures in a row after which it opens."""

REST = 8
"""Turns for which it stays open at first; doubled each time the next question fails too."""

VAIN = 2
"""Turns after a compaction that asked a model and freed nothing, until a model is asked again; doubled each time the next one
frees nothing either."""

MAX_DOUBLINGS = 6
"""Doublings at most."""


class Breaker:
    """Opens after some failures in a row, lets one question through after a rest."""

    def __init__(self) -> None:
        self._failed = self._vain = 0
        self._until = 0

    def is_open(self, turn: int) -> bool:
        """Whether to spare the model at this turn."""
        return turn < self._until

    def note(self, outcome: Outcome, turn: int) -> None:
        """Count the outcome of a question."""
        if outcome != Outcome.FAILED:
            self._failed = 0
            return
        self._failed += 1
        if self._failed >= FAILURES:
            self._until = max(self._until, turn + REST * 2 ** min(self._failed - FAILURES, MAX_DOUBLINGS))

    def note_freed(self, freed: int, turn: int) -> None:
        """Count what a compaction freed for which a model was asked."""
        if freed > 0:
            self._vain = 0
            return
        self._until = max(self._until, turn + VAIN * 2 ** min(self._vain, MAX_DOUBLINGS))
        self._vain += 1

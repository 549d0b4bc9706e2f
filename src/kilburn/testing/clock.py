"""A clock that moves when told: the public fake for tests that depend on time."""

from __future__ import annotations


class FakeClock:
    """Seconds since the epoch; each look moves it on by `tick`.

    Args:
        now: where it starts.
        tick: seconds that pass between two looks.
    """

    def __init__(self, now: float = 1_700_000_000.0, tick: float = 1.0) -> None:
        self.now, self.tick = now, tick

    def __call__(self) -> float:
        """Let a tick pass and return the time."""
        self.now += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

"""A clock that a test moves."""

from __future__ import annotations


class FakeClock:
    """A clock in seconds since the epoch. Each reading moves it on by `tick`.

    Args:
        time: the first time, in seconds since the epoch.
        tick: seconds between two readings.
    """

    def __init__(self, time: float = 1_700_000_000.0, tick: float = 1.0) -> None:
        self.now, self.tick = time, tick

    def __call__(self) -> float:
        """Advance by one tick and return the time."""
        self.now += self.tick
        return self.now

    def advance(self, seconds: float) -> None:
        """Advance by some seconds."""
        self.now += seconds

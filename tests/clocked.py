"""A store in a file whose own clock a test moves."""

from __future__ import annotations

import os
from collections.abc import Callable

from kilburn.backends.sqlite import Sqlite
from kilburn.testing import FakeClock


class Clocked(Sqlite):
    """A store with this clock."""

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] | None = None) -> None:
        super().__init__(path)
        self.clock = FakeClock() if clock is None else clock

    def now(self) -> float:
        """Return what the clock shows."""
        return self.clock()

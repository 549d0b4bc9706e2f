"""How tests wait: for what comes about, and for minutes at most, so that no test fails by a clock."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

__all__ = ["MINUTES", "until"]

MINUTES = 600.0
"""After so many seconds what a test waits for hangs, however busy the machine is."""
GLANCE = 0.01

Found = TypeVar("Found")


def until(look: Callable[[], Found]) -> Found:
    """What `look` returns, once that is true."""
    end = time.monotonic() + MINUTES
    while not (found := look()):
        assert time.monotonic() < end, "it did not come about"
        time.sleep(GLANCE)
    return found

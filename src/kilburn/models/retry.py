"""When a failed call is repeated: exponential back-off with full jitter, and the provider's own `retry-after`.

A reply is not repeated once a piece of it was handed on, because the caller would get its beginning twice. The clock,
the sleep and the source of randomness are arguments, so tests need not wait.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import TypeVar

from kilburn.errors import RateLimited, Unavailable

__all__ = ["Retry"]

Piece = TypeVar("Piece")


@dataclass(frozen=True)
class Retry:
    """How often, and how long apart.

    Args:
        attempts: calls in total, including the first; 1 never repeats.
        first: upper bound of the first pause, in seconds; it doubles each time.
        cap: the longest pause, in seconds. If a provider asks for a longer one, the call is not repeated, and its
            error goes to the caller, with `retry_after`.
        sleep: waits so many seconds.
        dice: a number in [0, 1).
        clock: seconds, monotonic.
    """

    attempts: int = 4
    first: float = 0.5
    cap: float = 30.0
    sleep: Callable[[float], None] = time.sleep
    dice: Callable[[], float] = random.random
    clock: Callable[[], float] = time.monotonic

    def pause(self, failed: int, error: RateLimited | Unavailable) -> float | None:
        """Return the seconds to wait after the `failed`-th failure in a row (from 1), or None to give up."""
        if failed >= self.attempts:
            return None
        requested = error.retry_after if isinstance(error, RateLimited) else None
        if requested is not None:
            return requested if requested <= self.cap else None
        ceiling: float = min(self.cap, self.first * 2 ** (failed - 1))
        return ceiling * self.dice()

    def stream(self, call: Callable[[float | None], Generator[Piece, None, None]], timeout: float | None) -> Iterator[Piece]:
        """Yield the pieces of a call, which is repeated if it fails before its first piece.

        Args:
            call: starts one try; its argument is the seconds left, or None.
            timeout: seconds for all tries and pauses together, or None.

        Raises:
            RateLimited, Unavailable: the last try's error.
        """
        end = None if timeout is None else self.clock() + timeout
        failed = 0
        while True:
            started = False
            remaining = None if end is None else max(end - self.clock(), 0.001)
            try:
                with closing(call(remaining)) as pieces:
                    for piece in pieces:
                        started = True
                        yield piece
                return
            except (RateLimited, Unavailable) as error:
                failed += 1
                wait = None if started else self.pause(failed, error)
                if wait is None or (end is not None and self.clock() + wait >= end):
                    raise
            self.sleep(wait)


def seconds_to_wait(retry_after: str | None, milliseconds: str | None, time: float) -> float | None:
    """Return what the headers `retry-after` (seconds or an HTTP date) and `retry-after-ms` ask for, in seconds.

    `time` is the time since the epoch, to which a date is compared. None if they are missing or cannot be read.
    """
    try:
        if milliseconds is not None:
            return max(float(milliseconds) / 1000, 0.0)
        if retry_after is None:
            return None
        if retry_after.strip().replace(".", "", 1).isdigit():
            return float(retry_after)
        return max(parsedate_to_datetime(retry_after).timestamp() - time, 0.0)
    except ValueError:
        return None

"""Who goes on: threads take turns at every call into the kernel and at every lock, as a seed says.

One thread runs at a time; at each point the turn may go to another. Where whoever has the turn waits for a lock that
another holds, the turn is taken from it. What is scheduled is not changed: a profile function looks on.
"""

from __future__ import annotations

import random
import sys
import threading
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

__all__ = ["take_turns"]

STUCK = 0.002
"""Seconds without a step after which whoever has the turn is taken to wait for a lock."""


POINTS = 2000
"""Points after which the threads run as they like: by then all that is worth interleaving has been."""


class _Turns:
    def __init__(self, seed: int, share: float, count: int) -> None:
        self.rng, self.share = random.Random(seed), share
        self.alive = set(range(count))
        self.blocked: set[int] = set()
        """Had the turn and made no step: they wait for a lock, until they are at a point again."""
        self.turn, self.steps = 0, 0
        self.changed = threading.Condition()

    def leave(self, me: int) -> None:
        with self.changed:
            self.alive.discard(me)
            self._pass_on()

    def point(self, me: int) -> None:
        with self.changed:
            self.steps += 1
            self.blocked.discard(me)
            if self.turn == me and self.rng.random() < self.share:
                self._pass_on()
            while self.turn != me and self.steps < POINTS:
                before = self.steps
                if not self.changed.wait(STUCK) and self.steps == before and self.turn != me:
                    self.blocked.add(self.turn)
                    self._pass_on()

    def _pass_on(self) -> None:
        free = self.alive - self.blocked or self.alive
        if free:
            self.turn = self.rng.choice(sorted(free))
        self.changed.notify_all()


def take_turns(works: Sequence[Callable[[], None]], seed: int, share: float = 0.1) -> list[BaseException]:
    """Run each in a thread of its own, one at a time; returns what they raised.

    Args:
        share: how often the turn goes to another at a point, 0 to 1.
    """
    turns, raised = _Turns(seed, share, len(works)), list[BaseException]()

    def run(me: int, work: Callable[[], None]) -> None:
        def watch(frame: FrameType, event: str, argument: Any) -> None:
            inside = "/kilburn/kernel/" in frame.f_code.co_filename
            if inside and (event in ("call", "return") or getattr(argument, "__name__", "") in ("acquire", "release")):
                turns.point(me)

        turns.point(me)
        sys.setprofile(watch)
        try:
            work()
        except BaseException as error:
            raised.append(error)
            if not isinstance(error, Exception):
                raise
        finally:
            sys.setprofile(None)
            turns.leave(me)

    threads = [threading.Thread(target=run, args=(me, work), name=f"torture-{me}") for me, work in enumerate(works)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return raised

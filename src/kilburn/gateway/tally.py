"""Limits and leases that several gateways share.

One gateway counts in its memory (`kilburn.gateway.access`, `kilburn.gateway.users`), at no cost. Several gateways over one store
ask a turnstile before each request: the database, or a file of the machine. Requests that arrive during a question are asked
about together in the next one, along with the finished ones. A gateway that is silent for some time loses its leases.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress

from kilburn.backends.counting import LEASE, Demand, Ruling, Turnstile
from kilburn.errors import StoreError
from kilburn.gateway.threads import in_thread

log = logging.getLogger("kilburn.gateway")


RETRY_SECONDS = 1.0
"""Seconds between two attempts to reach a turnstile that does not answer."""


class Tally:
    """Admits requests within limits that gateways share. It is used in one event loop alone.

    Args:
        turnstile: where it is counted.
        opens: whether a request is let in when it cannot be counted.
    """

    def __init__(self, turnstile: Turnstile, *, opens: bool = False) -> None:
        self._turnstile, self._opens = turnstile, opens
        self._waiting: list[tuple[Sequence[Demand], asyncio.Future[Ruling]]] = []
        self._held: Counter[bytes] = Counter()
        """Number of running requests by the name of a demand."""
        self._changed: set[bytes] = set()
        """Names whose numbers the turnstile does not have yet."""
        self._answered = 0.0
        """Start of the last question that was answered, by `time.monotonic`."""
        self._lapses = 0
        self._asking: asyncio.Task[None] | None = None
        self._beat: asyncio.TimerHandle | None = None

    async def take(self, demands: Sequence[Demand]) -> Ruling:
        """Take all of a request's demands, if none is over its limit; `give` gives them back.

        Raises:
            StoreError: it cannot be counted.
        """
        future: asyncio.Future[Ruling] = asyncio.get_running_loop().create_future()
        self._waiting.append((demands, future))
        self._ask()
        try:
            ruling: Ruling = await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None and future.result().refused < 0:
                self.give(demands)
            raise
        return ruling

    @property
    def lapses(self) -> int:
        """Number of times this gateway was silent for so long that others may have taken over its leases."""
        return self._lapses + (time.monotonic() - self._answered > LEASE)

    def give(self, demands: Sequence[Demand]) -> None:
        """Give back a finished request's demands, except its share of the rate."""
        self._held.subtract(demand.name for demand in demands)
        self._changed.update(demand.name for demand in demands)
        self._ask()

    def _ask(self) -> None:
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask_all())

    async def _ask_all(self) -> None:
        try:
            answered = True
            while self._waiting or (self._changed and answered):
                answered = await self._ask_once()
            if self._beat is None and (self._held or not answered):
                self._beat = asyncio.get_running_loop().call_later(LEASE / 3 if answered else RETRY_SECONDS, self._go_on)
        finally:
            self._asking = None

    async def _ask_once(self) -> bool:
        """Ask the turnstile once; return whether it answered."""
        requests, self._waiting = self._waiting, []
        changed, self._changed = self._changed, set()
        counts, began = {name: self._held[name] for name in changed}, time.monotonic()
        self._held -= Counter()  # removes zero counts
        try:
            rulings = await in_thread(self._turnstile.count, [demands for demands, _ in requests], counts)
        except StoreError as error:
            # It is not known whether it was counted: the next question sends the actual numbers.
            self._changed |= changed | {demand.name for demands, _ in requests for demand in demands}
            self._answer_failed(requests, error)
            return False
        self._lapses += bool(self._held) and began - self._answered > LEASE
        self._answered = began
        for (demands, future), ruling in zip(requests, rulings, strict=True):
            self._answer(demands, future, ruling)
        return True

    def _answer(self, demands: Sequence[Demand], future: asyncio.Future[Ruling], ruling: Ruling) -> None:
        if ruling.refused < 0:
            self._held.update(demand.name for demand in demands)
            if future.cancelled():
                self.give(demands)
        if not future.cancelled():
            future.set_result(ruling)

    def _answer_failed(self, requests: Sequence[tuple[Sequence[Demand], asyncio.Future[Ruling]]], error: StoreError) -> None:
        log.warning("requests cannot be counted: %s", error)
        for demands, future in requests:
            if self._opens:
                self._answer(demands, future, Ruling())
            elif not future.cancelled():
                future.set_exception(error)

    def _go_on(self) -> None:
        """Renew this gateway's leases while it answers requests."""
        self._beat = None
        self._changed.update(self._held)
        if self._changed:
            self._ask()

    async def close(self) -> None:
        """Give up all leases."""
        if self._beat is not None:
            self._beat.cancel()
        asking = self._asking
        if asking is not None:
            asking.cancel()
            with suppress(asyncio.CancelledError, StoreError):
                await asking
        with suppress(StoreError):
            await in_thread(self._turnstile.close)

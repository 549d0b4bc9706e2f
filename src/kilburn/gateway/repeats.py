"""Requests that are made again while they are being answered, at this gateway or at another one over the same store.

A client or a load balancer repeats a request when the first attempt takes too long. Every gateway over the store knows which
requests are being answered (`kilburn.gateway.tally`), so the second attempt waits, and gets the reply of the first.

A lease ends by the store's clock, and its holder may not notice: its machine slept, or a clock was set. So the gateway that takes
over a turn records it in the session's ledger (`kilburn.gateway.history`), in the transaction that reserves the turn. The first
gateway can then no longer append its reply, whatever its own clock says.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from kilburn.backends.counting import Demand
from kilburn.gateway.problems import Problem
from kilburn.gateway.tally import Tally

PAUSES = (0.05, 0.1, 0.2, 0.4, 1.0)
"""Seconds between two checks whether the first attempt has ended; the last pause repeats."""


class Hold:
    """The lease of one request on its answer: no equal request is answered meanwhile.

    Args:
        tally: where the lease is counted.
        key: digest of what equal requests have in common.
        waited: whether this request waited for an equal one.
    """

    def __init__(self, tally: Tally, key: bytes, *, waited: bool) -> None:
        self._tally, self._lapses, self._waited, self.key = tally, tally.lapses, waited, key.hex()

    @property
    def repeated(self) -> bool:
        """Whether an equal request may have been answered since this one arrived: it waited for one, or has lost its lease."""
        return self._waited or self.lost

    def note_answer(self) -> None:
        """Note that another gateway answered an equal request after its lease had ended."""
        self._waited = True

    @property
    def lost(self) -> bool:
        """Whether another gateway may have accepted an equal request, because this one was silent for too long."""
        return self._tally.lapses != self._lapses


class Repeats:
    """Answers equal requests one after another. It is used in one event loop alone.

    Args:
        tally: counts the requests that the gateways over the store are answering.
        patience: maximum seconds that a request waits for an equal one.
    """

    def __init__(self, tally: Tally, patience: float) -> None:
        self._tally, self._patience = tally, patience
        self.waiting = 0
        """Number of requests that wait for an equal one."""

    @asynccontextmanager
    async def alone(self, *identity: str | bytes) -> AsyncIterator[Hold]:
        """Hold the lease of a request until it is answered.

        Args:
            identity: the parts that equal requests have in common.

        Raises:
            Problem: 409, an equal request is still being answered. StoreError: the lease cannot be stored.
        """
        key = _digest(identity)
        demands = (Demand(key, 0, 1),)
        clock = asyncio.get_running_loop().time
        attempts, end = 0, clock() + self._patience
        try:
            while (await self._tally.take(demands)).refused >= 0:
                if clock() >= end:
                    message = "the same request is being answered; ask again to get its reply"
                    raise Problem(409, "request_in_progress", message, retry_after=1)
                self.waiting += not attempts
                attempts += 1
                await asyncio.sleep(PAUSES[min(attempts, len(PAUSES)) - 1])
        finally:
            self.waiting -= attempts > 0
        try:
            yield Hold(self._tally, key, waited=attempts > 0)
        finally:
            self._tally.give(demands)


def _digest(identity: tuple[str | bytes, ...]) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    for part in identity:
        data = part.encode() if isinstance(part, str) else part
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()

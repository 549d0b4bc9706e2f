"""What the prompts of a run cost: the prefix that each shares with the previous prompt, and the rest.

The shared prefix is read at the price of a cache; the rest is processed and written to it. Replies are
the same for every policy on recorded runs, so they are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from kilburn.errors import SpecError
from kilburn.prices import Prices, prices_of

__all__ = ["PER", "UNITS", "Rates", "cost_of", "rates_of"]

PER = 1000
"""Prompts that a cost is given for."""

UNITS = {"hosted": "$", "automatic": "$", "local": "s"}
"""What a price table counts in."""


class Rates(msgspec.Struct, frozen=True, kw_only=True):
    """How prompts are priced: by which tables, and how long the agent pauses between two prompts.

    Args:
        tables: price tables by name.
        pause: seconds between a prompt and the next; None if a cached prefix never expires.
    """

    tables: dict[str, Prices]
    pause: float | None = None


def rates_of(names: Sequence[str] = ("hosted", "local"), pause: float | None = None) -> Rates:
    """Rates by the names of their tables.

    Raises:
        SpecError: no such table, or a pause below 0.
    """
    if pause is not None and not pause >= 0:
        raise SpecError(f"a pause of {pause:g} s", advice="give 0 or more seconds")
    return Rates(tables={name: prices_of(name) for name in dict.fromkeys(names)}, pause=pause)


def cost_of(shipped: int, cached: int, prices: Prices, pause: float | None = None) -> float:
    """Cost of prompts of `shipped` tokens, of which `cached` are in the prefix shared with the previous prompt, in the
    table's unit.

    If the pause is longer than a cached prefix lives, all of them are fresh.
    """
    known = 0 if pause is not None and pause > prices.ttl else cached
    return (known * prices.cached + (shipped - known) * prices.written) / 1e6

"""What tokens cost: fresh input, cached reads, cache writes, output, and how long a cache lives.

A table is in money of a provider or in seconds of a local engine. The shipped tables are not kept up to date: give
your own figures where they matter.
"""

from __future__ import annotations

import math
import sys

import msgspec

from kilburn.errors import SpecError
from kilburn.model import Tokens

__all__ = ["PRICES", "Prices"]


def is_amount(value: object) -> bool:
    """Whether a value is a number, 0 or more, with an end."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= sys.float_info.max


class Prices(msgspec.Struct, frozen=True, kw_only=True):
    """Cost per million tokens, in any unit.

    Args:
        input: fresh prompt tokens that are not written to a cache.
        cached: prompt tokens that are read from the cache.
        written: prompt tokens that are processed and written to the cache.
        output: reply tokens.
        ttl: seconds that a cached prefix lives after its last use.

    Raises:
        SpecError: a cost that is no number, is less than 0, or has no end.
    """

    input: float = 0.0
    cached: float = 0.0
    written: float = 0.0
    output: float = 0.0
    ttl: float = float("inf")

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if not is_amount(value) and not (name == "ttl" and value == math.inf):
                raise SpecError(f"{name}={value!r} is no price"[:200], advice="give 0 or more, per million tokens")

    @property
    def known(self) -> bool:
        """Whether tokens cost anything. A table of zeros is that of somebody who gave none."""
        return any((self.input, self.cached, self.written, self.output))

    def again(self, tokens: int) -> float:
        """Return what it costs more to write so many tokens to the cache than to read them from it."""
        return tokens * (self.written - self.cached) / 1e6

    def cost(self, usage: Tokens) -> float:
        """Return the cost of one reply, including the provider's own compaction."""
        fresh = usage.prompt - usage.cached - usage.written
        cost = fresh * self.input + usage.cached * self.cached + usage.written * self.written + usage.reply * self.output
        return cost / 1e6 + (self.cost(usage.beside) if usage.beside is not None else 0.0)


PRICES = {
    "hosted": Prices(input=3.0, cached=0.3, written=3.75, output=15.0, ttl=300.0),
    "automatic": Prices(input=1.25, cached=0.125, written=1.25, output=10.0, ttl=600.0),
    "local": Prices(input=1000.0, cached=1.0, written=1000.0, output=20_000.0),
}
"""Tables by name. "hosted" is in dollars, and writing to the cache costs more than plain input: the figures of
Anthropic's middle model with a cache of five minutes, at the time of writing. "automatic" is in dollars, and writing
to the cache is free, as with OpenAI. "local" is in seconds of an engine that reads 1,000 tokens a second and writes
50."""


def find_prices(name: str) -> Prices:
    """Return the price table of that name.

    Raises:
        SpecError: there is none.
    """
    try:
        return PRICES[name]
    except KeyError:
        raise SpecError(f"no price table {name!r}", advice=f"there are: {', '.join(PRICES)}") from None

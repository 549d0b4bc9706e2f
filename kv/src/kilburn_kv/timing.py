"""What tokens cost on this engine, measured: prices for policies that weigh them, in seconds.

This takes a moment, because it prefills and decodes some tokens. The result is valid for this machine.
"""

from __future__ import annotations

import time

from kilburn.errors import OutOfBlocks, SpecError
from kilburn.prices import Prices
from kilburn_kv.engine import Engine
from kilburn_kv.sequence import CachedSequence

STEPS = 8


def measure_prices(engine: Engine, tokens: int = 512, reply: int = 100) -> Prices:
    """Prices in seconds per million tokens, for `cost(prices=...)` and others.

    A cached token is not free, because each token of a reply attends to it. `cached` is this price for a reply of
    `reply` tokens.

    Args:
        tokens: length of the prompt that is measured; a longer one gives a steadier figure.

    Raises:
        SpecError: the engine does not hold a little more than twice as many. OutOfBlocks: other sequences use them;
            none is preempted for a measurement.
    """
    pool = engine.pool
    whole = 2 * tokens + 2 * (STEPS + 1) + 2
    if tokens < 2 or reply < 0 or whole > pool.capacity * pool.size:
        raise SpecError(f"measuring with {tokens} tokens, reply={reply}, takes an engine of {whole}", advice="measure with fewer")
    if (blocks := -(-whole // pool.size)) > pool.free:
        raise OutOfBlocks(
            f"measuring takes {blocks} blocks and {pool.free} are free", needed=blocks, advice="free some sequences"
        )
    sequence = engine.open([1, 2])
    try:
        # The first passes are slower: memory is touched for the first time.
        engine.prefill(sequence, [5] * (tokens // 4))
        engine.truncate(sequence, 2)
        began = time.perf_counter()
        engine.prefill(sequence, [3 + place % 7 for place in range(tokens)])
        fresh = (time.perf_counter() - began) / tokens
        short = _decoded(engine, sequence)
        engine.prefill(sequence, [3 + place % 7 for place in range(tokens)])
        long = _decoded(engine, sequence)
    finally:
        engine.free(sequence)
    look = max(0.0, long - short) / tokens * reply
    return Prices(input=fresh * 1e6, written=fresh * 1e6, cached=min(look, fresh) * 1e6, output=short * 1e6)


def _decoded(engine: Engine, sequence: CachedSequence) -> float:
    """Seconds for one token."""
    engine.step([(sequence, [4])])
    times = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step([(sequence, [4])])
        times.append(time.perf_counter() - began)
    return sorted(times)[STEPS // 2]

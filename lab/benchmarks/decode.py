"""One decoded token: slots in a row, slots in scattered blocks, and transformers' own caches, in turn.

"in a row" is the contiguous cache on the same engine: its slots follow one another and are read in place.
"scattered" has every block elsewhere, so that each layer gathers before it attends: the worst that paging
can cost. Both run the same code on the same weights, a step of one, a step of the other, and so on.
"""

from __future__ import annotations

import random
import time

import torch
from transformers import DynamicCache

from figures import Row, emit, median, parser
from kilburn.models.weights import pull
from kilburn_kv.engine import Engine
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.weights import Weights, load


def scattered(engine: Engine, tokens: list[int], seed: int) -> CachedSequence:
    """A sequence whose blocks lie anywhere in the pool."""
    pool = engine.pool
    blocks = pool.take(pool.free)
    random.Random(seed).shuffle(blocks)
    pool.release(blocks)
    return engine.open(tokens)


def plain(weights: Weights, tokens: list[int]) -> DynamicCache:
    """transformers' cache, prefilled."""
    cache = DynamicCache(config=weights.model.config)
    with torch.inference_mode():
        for start in range(0, len(tokens), 512):
            chunk = torch.tensor([tokens[start : start + 512]], device=weights.device)
            weights.model(input_ids=chunk, cache=cache, use_cache=True, logits_to_keep=1)
    return cache


def measure(weights: Weights, length: int, steps: int, batch: int) -> list[Row]:
    """A row for each cache at one length."""
    tokens = [3 + (7 * place) % 1000 for place in range(length)]
    room = (length + steps + 64) * (batch + 1)
    row, blocks = Engine(weights, room, share=False), Engine(weights, room, share=False)
    straight = [row.open(tokens)] + [row.fork(row.open(tokens)) for _ in range(batch - 1)]
    torn = [scattered(blocks, tokens, seed) for seed in range(batch)]
    times: dict[str, list[float]] = {"in a row": [], "scattered": [], "transformers": []}
    weights.model.set_attn_implementation("sdpa")
    cache = plain(weights, tokens)
    for _ in range(steps):
        for name, work in (
            ("in a row", lambda: row.step([(sequence, [5]) for sequence in straight])),
            ("scattered", lambda: blocks.step([(sequence, [5]) for sequence in torn])),
            ("transformers", lambda: _plain_step(weights, cache)),
        ):
            began = time.perf_counter()
            work()
            if weights.device.type == "cuda":
                torch.cuda.synchronize()
            times[name].append(time.perf_counter() - began)
    base = median(times["in a row"])
    made: list[Row] = []
    for name, found in times.items():
        took = median(found)
        many = 1 if name == "transformers" else batch
        made.append({"tokens": length, "batch": many, "cache": name, "ms": took * 1e3, "tokens/s": many / took, "x": took / base})
    return made


def _plain_step(weights: Weights, cache: DynamicCache) -> None:
    with torch.inference_mode():
        weights.model(input_ids=torch.tensor([[5]], device=weights.device), cache=cache, use_cache=True)


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--tokens", type=int, action="append", help="lengths; 512, 2048 and 4096 where none is given")
    options.add_argument("--steps", type=int, default=24)
    options.add_argument("--batch", type=int, default=1)
    options.add_argument("--model", default="smollm2")
    options.add_argument("--device", default="cpu")
    options.add_argument("--dtype", default="float32")
    asked = options.parse_args()
    weights = load(pull(asked.model), dtype=asked.dtype, device=asked.device)
    rows = [row for length in asked.tokens or [512, 2048, 4096] for row in measure(weights, length, asked.steps, asked.batch)]
    note = f"{asked.model}, {asked.dtype} on {asked.device}, {torch.get_num_threads()} threads; medians of {asked.steps} steps."
    if asked.device == "cuda":
        note += f" Peak memory {torch.cuda.max_memory_allocated() / 1e9:.2f} GB."
    emit("decode", rows, asked.json, note)


if __name__ == "__main__":
    main()

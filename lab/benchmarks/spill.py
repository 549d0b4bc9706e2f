"""What a spilled sequence takes on disk, and what bringing it back costs against prefilling it again.

Each length is prefilled in an engine of its own, saved, freed, and restored: `warm` from the system's page
cache, `cold` after the file was dropped from it. Saving includes the sync to disk, restoring includes
the checksum of every byte. The restored logits are compared with those before; rows are printed only if they
are equal, bit for bit. Times are medians; `x` is against prefilling. It needs the extra `torch`.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from figures import Row, emit, median, parser, peak_megabytes
from kilburn.models.weights import pull
from kilburn_kv.engine import Engine
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.spill import Spill
from kilburn_kv.spill_file import Miss
from kilburn_kv.weights import Weights, load, weights_of


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - start)


def forgotten(path: Path) -> None:
    """Have the system read it from the disk again."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


def rows_of(weights: Weights, length: int, rounds: int, folder: str) -> list[Row]:
    engine = Engine(weights, length + 16, share=False)
    dice = random.Random(length)
    prompt = [dice.randrange(weights.model.config.vocab_size) for _ in range(length)]
    spill = Spill(folder)
    held: list[CachedSequence] = []
    times: dict[str, list[float]] = {"prefill": [], "save": [], "restore warm": [], "restore cold": []}
    size = 0
    for _ in range(rounds):
        times["prefill"].append(timed(lambda: held.append(engine.open(prompt))))
        logits = held[0].logits
        start = time.perf_counter()
        spilled = spill.save(engine, held[0])
        times["save"].append(1000 * (time.perf_counter() - start))
        size = spilled.bytes
        for kind in ("restore warm", "restore cold"):
            engine.free(held.pop())
            if kind == "restore cold":
                forgotten(spill.shelf.folder / f"{spilled.address}.kv")
            start = time.perf_counter()
            found = spill.restore(engine, spilled)
            times[kind].append(1000 * (time.perf_counter() - start))
            if isinstance(found, Miss) or found.logits is None or logits is None or not torch.equal(found.logits, logits):
                raise SystemExit(f"what came back is not what was saved: {found}")
            held.append(found)
        engine.free(held.pop())
        spill.shelf.drop(spilled.address)
    base = median(times["prefill"])
    kind = str(weights.dtype).removeprefix("torch.")
    return [
        {"what": name, "dtype": kind, "tokens": length, "MB": size / 1e6, "ms": median(found), "x": median(found) / base}
        for name, found in times.items()
    ]


def quick() -> Weights:
    """Random weights, so that only the script is tested."""
    config = LlamaConfig(vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2)
    return weights_of(LlamaForCausalLM(config))


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192], help="tokens")
    made.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    made.add_argument("--rounds", type=int, default=1)
    made.add_argument("--weights", default="", help="a GGUF file or a folder; none for SmolLM2-135M")
    made.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    made.add_argument("--quick", action="store_true", help="tiny random weights and two lengths")
    made.add_argument("--threads", type=int, default=torch.get_num_threads(), help="1 where others use the machine too")
    made.add_argument("--folder", default=None, help="where to spill to; none for the system's temporary one")
    asked = made.parse_args()
    torch.set_num_threads(asked.threads)
    rows: list[Row] = []
    for dtype in ["float32"] if asked.quick else asked.dtypes:
        weights = quick() if asked.quick else load(asked.weights or pull("smollm2"), dtype=dtype, device=asked.device)
        for length in [16, 32] if asked.quick else asked.lengths:
            with TemporaryDirectory(dir=asked.folder) as folder:
                rows += rows_of(weights, length, asked.rounds, folder)
    note = f"{asked.device}, {torch.get_num_threads()} threads, {asked.rounds} rounds, peak {peak_megabytes():.0f} MB"
    emit("spill", rows, asked.json, note)


if __name__ == "__main__":
    main()

"""What a window's edits cost a cache that follows it: edits in place against computing anew behind each edit.

Recorded runs are replayed into a window; after every step the cache follows. The same run is followed three
times: in place, anew, and by the cheaper of the two. Counts of tokens do not depend on the model, so a tiny
one stands in unless a model is named; seconds are of the model that ran.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kilburn
from figures import Row, emit, parser
from kilburn.models.weights import pull
from kilburn.policies.cost import Cost
from kilburn.wire.trajectory import Trajectory
from kilburn_kv.engine import Engine
from kilburn_kv.residence import Residence
from kilburn_kv.timing import measure_prices
from kilburn_kv.weights import Weights, load, weights_of
from kilburn_lab.evals.trajectories import read, synthetic


def speaker(model: str) -> Weights:
    """A model by name, or a tiny random one that reads SmolLM2's tokens."""
    real = load(pull("smollm2" if model == "tiny" else model))
    if model != "tiny":
        return real
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(real.tokenizer),
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=1 << 20,
    )
    return weights_of(LlamaForCausalLM(config), real.tokenizer)


def followed(engine: Engine, runs: list[Trajectory], window: int, policy: object, how: str) -> Row:
    """All runs, one after the other, each in a window of its own."""
    total: Row = {"policy": policy if isinstance(policy, str) else "cost, measured prices", "how": how}
    seen = prefilled = edits = anew = peak = 0
    seconds = 0.0
    for run in runs:
        with kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4") as store:
            session = store.session("run")
            residence = Residence(engine, session, how=how)
            for turn in run.head:
                session.append({"role": turn.role, "content": turn.content})
            for step in run.steps:
                session.append({"role": "assistant", "content": f"{step.thought}\n{step.action}"})
                session.append({"role": "user", "content": step.observation})
                began = time.perf_counter()
                made = residence.follow()
                seconds += time.perf_counter() - began
                edits += made.how == "edit"
                anew += made.how == "prefill"
                peak = max(peak, made.cached)
            seen += session.window.seen
            prefilled += residence.prefilled
            residence.close()
    return {**total, "seen": seen, "prefilled": prefilled, "edits": edits, "anew": anew, "peak cached": peak, "s": seconds}


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument(
        "--data", help="recorded runs, in any form that `kilburn replay` reads; made-up ones where none are given"
    )
    options.add_argument("--runs", type=int, default=20, help="how many of them")
    options.add_argument("--window", type=int, default=2000)
    options.add_argument("--model", default="tiny", help="tiny, smollm2, or a GGUF file")
    options.add_argument(
        "--policy", action="append", help="policies of the window; fifo, summarize, hybrid and cost where none is given"
    )
    asked = options.parse_args()
    runs = list(read(asked.data) if asked.data else synthetic(asked.runs, 0))[: asked.runs]
    engine = Engine(speaker(asked.model), 8 * asked.window, share=False)
    policies: list[object] = asked.policy or ["fifo", "summarize", "hybrid", Cost(prices=measure_prices(engine))]
    rows = []
    for policy in policies:
        of_policy = [followed(engine, runs, asked.window, policy, how) for how in ("prefill", "edit", "auto")]
        for row in of_policy:
            row["x"] = row["prefilled"] / of_policy[0]["prefilled"]
        rows += of_policy
    note = f"{len(runs)} runs, a window of {asked.window} tokens of four characters; the cache counts in the model's own."
    emit("residence", rows, asked.json, note)


if __name__ == "__main__":
    main()

"""What an engine's logits must be: one forward pass of plain transformers over everything that ever ran, with a mask.

A token that was evicted before a query ran is masked for it. This is the definition that eviction, forks
and preemption are held against; it shares no code with the engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from kilburn_kv.weights import Weights


def masked_logits(weights: Weights, tokens: Sequence[int], evictions: Sequence[tuple[int, int, int]]) -> Tensor:
    """The logits behind the last token; an eviction (at, start, stop) hides start to stop from all queries from `at` on."""
    count = len(tokens)
    seen = torch.ones((count, count), dtype=torch.bool).tril()
    for at, start, stop in evictions:
        seen[at:, start:stop] = False
    return seen_logits(weights, tokens, range(count), seen)


def seen_logits(weights: Weights, tokens: Sequence[int], places: Sequence[int], seen: Tensor) -> Tensor:
    """The logits behind the last of tokens that ran in this order at these positions; row i of `seen` is what i sees."""
    count, device = len(tokens), weights.device
    mask = torch.zeros((1, 1, count, count), dtype=weights.dtype, device=device)
    mask.masked_fill_(~seen.to(device), torch.finfo(weights.dtype).min)
    model = weights.model
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            out = model(
                input_ids=torch.tensor([list(tokens)], device=device),
                position_ids=torch.tensor([list(places)], device=device),
                attention_mask=mask,
                use_cache=False,
            )
    finally:
        model.set_attn_implementation(before)
    logits: Tensor = out.logits[0, -1]
    return logits


def gap(left: Tensor, right: Tensor) -> float:
    """The greatest difference of two rows of logits."""
    return float((left - right).abs().max())

"""Attention over slots, which the engine's model calls in place of transformers' own.

It is registered under `NAME`, and runs while a `ForwardPass` is entered. Each segment of the pass is the new tokens
of one sequence. Their keys and values are first written to their slots; then they attend to the cached tokens before
them. Everything beyond plain causal attention raises: masks, windows, sinks, caps on scores, dropout.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import Any

from kilburn.errors import UnsupportedModel
from kilburn_kv.storage import Span, Storage, length_of, part_of
from kilburn_kv.tensors import Tensor, torch
from kilburn_kv.watch import AttentionWatch

NAME = "kilburn_slots"

PROBE = "kilburn_slots_probe"
"""The same, but transformers passes it every mask that a layer would use, so a window in a mask is found on the shortest
prompt."""

ALLOWED = frozenset(
    ("is_causal", "position_ids", "position_embeddings", "cache_position", "use_cache", "return_dict", "logits_to_keep")
)
"""Arguments that models pass to their attention and that change nothing."""

PART = 1024
"""Cached tokens that one decoded token attends to at a time, so that what was gathered stays in the processor's cache."""

ROWS = 128
"""Queries whose attention is computed at a time if it is observed."""


@dataclass(frozen=True)
class ForwardSegment:
    """One sequence's part of a step.

    Args:
        start: of its new tokens among all tokens of the step.
        stop: the end of its new tokens.
        span: the slots that they may see, in order, their own last.
        watch: observes the attention; None for no observation.
    """

    start: int
    stop: int
    span: Span
    watch: AttentionWatch | None = None


@dataclass
class ForwardPass:
    """One forward pass: where the new keys and values go, and which tokens see which.

    Attributes:
        seen: how often each layer attended so far.
    """

    storage: Storage
    written: Span
    segments: Sequence[ForwardSegment]
    seen: list[int] = field(init=False)
    _outer: Token[ForwardPass | None] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.seen = [0] * self.storage.shape.layers

    def __enter__(self) -> ForwardPass:
        self._outer = _RUNNING.set(self)
        return self

    def __exit__(self, *_: object) -> None:
        _RUNNING.reset(self._outer)


_RUNNING: ContextVar[ForwardPass | None] = ContextVar("_RUNNING", default=None)
"""Not an argument of the model's: some architectures hand theirs on to no layer."""


def register() -> None:
    """Make both names known to transformers."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionInterface.register(PROBE, _attend)
    AttentionMaskInterface.register(PROBE, _mask)


def _mask(*args: Any, local_size: int | None = None, use_vmap: bool = False, **others: Any) -> Tensor | None:
    """None if a layer attends to all earlier tokens; otherwise a mask, which `_attend` refuses."""
    return torch.ones((1, 1, 1, 1), dtype=torch.bool) if local_size is not None or use_vmap else None


def _refusal(module: torch.nn.Module, reason: str) -> UnsupportedModel:
    config = getattr(module, "config", None)
    family = str(getattr(config, "model_type", type(module).__name__))
    return UnsupportedModel(family, f"a layer wants {reason}; the engine has plain causal attention only")


def _attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    step = _RUNNING.get()
    if step is None:
        raise _refusal(module, "to run outside of a step")
    _check_layer(module, attention_mask, others)
    layer, storage, shape = getattr(module, "layer_idx", None), step.storage, step.storage.shape
    if not isinstance(layer, int) or not 0 <= layer < shape.layers:
        raise _refusal(module, f"to be number {layer} of {shape.layers}")
    told = (1, shape.heads, query.shape[2], shape.dim)
    if key.shape != told or value.shape != told or query.shape != (1, shape.heads * shape.groups, query.shape[2], shape.dim):
        raise _refusal(
            module,
            f"queries of {tuple(query.shape)}, keys of {tuple(key.shape)} and values of {tuple(value.shape)},"
            f" though its config says {shape}",
        )
    step.seen[layer] += 1
    storage.write(layer, step.written, key[0], value[0])
    out = torch.empty((1, query.shape[2], query.shape[1], query.shape[3]), dtype=query.dtype, device=query.device)
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    for segment in step.segments:
        asked = query[:, :, segment.start : segment.stop]
        if segment.watch is not None:
            made = _attend_watched(asked, *storage.read(layer, segment.span), scale, layer, segment.watch)
        elif asked.shape[2] == 1 and _is_slow_to_gather(asked) and length_of(segment.span) > PART:
            made = _attend_in_parts(asked, storage, layer, segment.span, scale)
        else:
            made = _attend_plainly(asked, *storage.read(layer, segment.span), scale)
        out[:, segment.start : segment.stop] = made.transpose(1, 2)
    return out, None


def _check_layer(module: torch.nn.Module, mask: Tensor | None, others: dict[str, Any]) -> None:
    """Raise if a layer needs something that this attention does not have."""
    if mask is not None:
        raise _refusal(module, "a mask: a window, chunks or a bias")
    for name, value in others.items():
        # Arguments that are absent or off change nothing; `is_causal` is checked below.
        if value is not None and value is not False and name not in ALLOWED and not (name == "dropout" and not value):
            raise _refusal(module, f"{name}={value if isinstance(value, int | float | str) else type(value).__name__}")
    causal = others.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise _refusal(module, "to look ahead (is_causal=False)")


def _is_slow_to_gather(query: Tensor) -> bool:
    """Whether parts pay: not on a GPU, and in half precision the products between would be rounded."""
    return query.device.type == "cpu" and query.dtype == torch.float32


def _attend_plainly(query: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
    """[1, query heads, n, dim] over [heads, m, dim], where the n are the last of the m."""
    _, heads, count, dim = query.shape
    attend = torch.nn.functional.scaled_dot_product_attention
    if count == 1:
        # The query heads of a group as rows of one product: the keys are read once, not once per query head.
        grouped = query.view(1, keys.shape[0], -1, dim)
        return attend(grouped, keys[None], values[None], scale=scale).reshape(1, heads, 1, dim)
    length = keys.shape[1]
    if count == length:
        return attend(query, keys[None], values[None], is_causal=True, scale=scale, enable_gqa=True)
    mask = torch.ones((count, length), dtype=torch.bool, device=query.device).tril(length - count)
    return attend(query, keys[None], values[None], attn_mask=mask, scale=scale, enable_gqa=True)


def _attend_in_parts(query: Tensor, storage: Storage, layer: int, span: Span, scale: float) -> Tensor:
    """One decoded token over many cached ones, some at a time: the same sums wherever the slots lie."""
    grouped = (query * scale).view(storage.shape.heads, -1, query.shape[3])
    parts = [part_of(span, start, start + PART) for start in range(0, length_of(span), PART)]
    scores = torch.cat([torch.matmul(grouped, storage.part(storage.keys[layer], part).transpose(1, 2)) for part in parts], dim=2)
    weights = torch.softmax(scores, dim=2)
    made = torch.zeros_like(grouped)
    for start, part in enumerate(parts):
        made.baddbmm_(weights[:, :, start * PART : start * PART + PART], storage.part(storage.values[layer], part))
    return made.view(query.shape)


def _attend_watched(query: Tensor, keys: Tensor, values: Tensor, scale: float, layer: int, watch: AttentionWatch) -> Tensor:
    """The same with the attention written out, some rows at a time."""
    _, heads, count, dim = query.shape
    shared, length = keys.shape[0], keys.shape[1]
    grouped = query[0].view(shared, heads // shared, count, dim)
    made = torch.empty_like(grouped)
    turned = keys.transpose(1, 2)[:, None]
    order = torch.arange(length, device=query.device)
    for start in range(0, count, ROWS):
        stop = min(count, start + ROWS)
        last = order[length - count + start : length - count + stop]
        scores = torch.matmul(grouped[:, :, start:stop], turned).float() * scale
        weights = torch.softmax(scores.masked_fill(order > last[:, None], float("-inf")), dim=-1)
        watch.add(layer, start, count, weights.mean(dim=1))
        made[:, :, start:stop] = torch.matmul(weights.to(values.dtype), values[:, None])
    return made.view(1, heads, count, dim)

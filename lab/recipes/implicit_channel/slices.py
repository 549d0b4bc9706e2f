"""A transformers cache in one piece, out of which ranges can be cut: the plainest eviction that is right.

Tokens that stay keep their keys and values and their logical positions, so nothing is rotated again. It is slow,
because each cut copies, and serves to check faster engines.

    slices = Slices(model)
    slices.feed(prompt)
    slices.cut(40, 120)
    logits = slices.feed(question)[:, -1]
"""

from __future__ import annotations

from typing import Any

from kilburn.errors import InvalidRange, MissingExtra

try:
    import torch
    from torch import Tensor
    from transformers import DynamicCache
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "torch", "torch") from error


class Slices:
    """One cache for a batch of equally long sequences.

    Args:
        model: a causal model of transformers that takes `position_ids` and a mask of four dimensions.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.logical: list[int] = []
        """The position of each token whose keys and values are held, ascending."""
        self.next = 0
        """The position of the next token."""
        self._cache: Any = DynamicCache()

    def feed(self, ids: Tensor) -> Tensor:
        """Logits [rows, tokens, vocabulary] of these tokens [rows, tokens], which see all that is held, and then are held.

        Raises:
            InvalidRange: no tokens, or not as many rows as before.
        """
        if ids.ndim != 2 or not ids.numel() or (self.logical and len(ids) != len(self._cache.layers[0].keys)):
            raise InvalidRange(f"tokens of the shape {tuple(ids.shape)}", advice="feed a row for each sequence, all equally long")
        rows, count = ids.shape
        held = len(self.logical)
        positions = torch.arange(self.next, self.next + count, device=ids.device)
        later = torch.arange(count, device=ids.device)
        seen = torch.ones(count, held + count, dtype=torch.bool, device=ids.device)
        seen[:, held:] = later[:, None] >= later
        with torch.inference_mode():
            out = self.model(
                ids,
                attention_mask=additive(seen, self.model.dtype),
                position_ids=positions.expand(rows, -1),
                cache=self._cache,
                use_cache=True,
            )
        self.logical += range(self.next, self.next + count)
        self.next += count
        logits: Tensor = out.logits
        return logits

    def cut(self, start: int, stop: int) -> int:
        """Evict the logical positions from `start` up to `stop`; returns how many tokens that were.

        Raises:
            InvalidRange: a range that is empty or not wholly held; nothing was cut then.
        """
        leaves = [at for at, position in enumerate(self.logical) if start <= position < stop]
        if stop <= start or len(leaves) != stop - start:
            raise InvalidRange(f"[{start}, {stop}) is not held", advice="cut a range that was fed and not yet cut")
        first, last = leaves[0], leaves[-1] + 1
        for layer in self._cache.layers:
            layer.keys = torch.cat((layer.keys[..., :first, :], layer.keys[..., last:, :]), dim=-2)
            layer.values = torch.cat((layer.values[..., :first, :], layer.values[..., last:, :]), dim=-2)
        del self.logical[first:last]
        return last - first

    def repeat(self, rows: int) -> None:
        """Go on with so many copies of each row."""
        self._cache.batch_repeat_interleave(rows)

    def held(self, start: int, stop: int) -> list[Tensor]:
        """Keys and values of a range, a tensor [rows, features] a layer.

        Raises:
            InvalidRange: a range that is empty or not wholly held.
        """
        at = [at for at, position in enumerate(self.logical) if start <= position < stop]
        if stop <= start or len(at) != stop - start:
            raise InvalidRange(f"[{start}, {stop}) is not held", advice="ask for a range that was fed and not yet cut")
        return [
            torch.cat((layer.keys[..., at, :].flatten(1), layer.values[..., at, :].flatten(1)), dim=-1)
            for layer in self._cache.layers
        ]

    @property
    def bytes(self) -> int:
        """Of the keys and values that are held."""
        layers = self._cache.layers if self.logical else []
        return sum(part.nbytes for layer in layers for part in (layer.keys, layer.values))


def additive(seen: Tensor, dtype: torch.dtype) -> Tensor:
    """A mask [1, 1, queries, keys] as transformers adds it, from what each query sees."""
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(~seen, torch.finfo(dtype).min)[None, None]

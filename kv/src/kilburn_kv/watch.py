"""Observes the attention that the cached tokens of one sequence receive, for presses that need it.

It is summed over all queries so far and averaged over the query heads that share a key-value head, in float32. Only
sums and the rows of the last queries are kept, not whole attention maps.
"""

from __future__ import annotations

from kilburn_kv.storage import CacheShape
from kilburn_kv.tensors import Tensor, torch


class AttentionWatch:
    """Attention received by `n` cached tokens, updated by the engine.

    Attributes:
        received: shape [layers, heads, n], or None if only `recent` is needed.
        queries: how many queries could see each token, shape [n].
        recent: the last `rows` queries' attention, shape [layers, heads, up to rows, n].
    """

    def __init__(self, shape: CacheShape, device: torch.device, *, sums: bool, rows: int) -> None:
        self.rows, self.sums = rows, sums
        self._shape, self._device = shape, device
        self.received = torch.zeros((shape.layers, shape.heads, 0), device=device)
        self.queries = torch.zeros(0, dtype=torch.int64, device=device)
        self.recent = torch.zeros((shape.layers, shape.heads, 0, 0), device=device)

    def make_room(self, at: int, count: int) -> None:
        """`count` tokens are about to be cached at index `at`; they see those before them, and themselves."""
        layers, heads, kept, length = self.recent.shape
        seen = torch.arange(count, 0, -1, dtype=torch.int64, device=self._device)
        self.put(at, torch.zeros((layers, heads, count), device=self._device), seen)
        self.queries = torch.cat((self.queries[:at] + count, self.queries[at:]))
        more = min(self.rows, count)
        rows = torch.zeros((layers, heads, more, length + count), device=self._device)
        self.recent = torch.cat((self.recent[:, :, max(0, kept + more - self.rows) :], rows), dim=2)

    def put(self, at: int, received: Tensor, queries: Tensor) -> None:
        """Tokens are cached at index `at` that are not computed: with what they received from so many queries, and nothing from
        the last ones."""
        blank = torch.zeros((*self.recent.shape[:3], len(queries)), device=self._device)
        self.received = torch.cat((self.received[..., :at], received, self.received[..., at:]), dim=-1)
        self.queries = torch.cat((self.queries[:at], queries, self.queries[at:]))
        self.recent = torch.cat((self.recent[..., :at], blank, self.recent[..., at:]), dim=-1)

    def state(self) -> tuple[Tensor, Tensor, Tensor]:
        """A snapshot for `restore` after a failed step; later observations do not affect it."""
        return self.received, self.queries, self.recent

    def restore(self, state: tuple[Tensor, Tensor, Tensor]) -> None:
        """Restore a snapshot of `state`, taken before `make_room`."""
        self.received, self.queries, self.recent = state

    def add(self, layer: int, start: int, count: int, weights: Tensor) -> None:
        """Rows `start` on of `count` new queries: `weights` is [heads, rows, n'], averaged over the group.

        `n'` is as many of the first cached tokens as the queries can see.
        """
        length = weights.shape[-1]
        if self.sums:
            self.received[layer, :, :length] += weights.sum(dim=1)
        if not self.rows:
            return
        # Of the new queries only the last rows are kept; they are the last rows of `recent`.
        first = count - min(self.rows, count)
        skip = max(0, first - start)
        rows = weights[:, skip:]
        if rows.shape[1]:
            put = self.recent.shape[2] - (count - start - skip)
            self.recent[layer, :, put : put + rows.shape[1], :length] = rows

    def select(self, keep: Tensor) -> None:
        """Keep these tokens only: indices of shape [k], or [layers, heads, k]."""
        if keep.dim() == 1:
            self.received, self.recent = self.received[..., keep], self.recent[..., keep]
            self.queries = self.queries[keep]
            return
        self.received = self.received.gather(2, keep)
        self.recent = self.recent.gather(3, keep[:, :, None].expand(-1, -1, self.recent.shape[2], -1))
        # Each head keeps other tokens, so the count is an average.
        self.queries = self.queries[keep].to(torch.float32).mean(dim=(0, 1)).round().to(torch.int64)

    def copy(self) -> AttentionWatch:
        """An independent copy."""
        made = AttentionWatch(self._shape, self._device, sums=self.sums, rows=self.rows)
        made.received, made.queries, made.recent = self.received.clone(), self.queries.clone(), self.recent.clone()
        return made

"""The memory behind the blocks: keys and values of every slot, of all layers.

There is one tensor for keys and one for values, of shape [layers, heads, slots, dim], so that the keys of a head lie
together. A run of neighbouring slots is read in place; any other order is gathered into scratch memory first.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from kilburn.errors import SpecError
from kilburn_kv.blocks import Copies
from kilburn_kv.tensors import Tensor, torch

Span = slice | Tensor
"""Slots: a run of neighbours, or their numbers."""


@dataclass(frozen=True)
class CacheShape:
    """What one cached token is made of.

    Args:
        layers: of the model.
        heads: key-value heads of a layer.
        groups: query heads that share a key-value head.
        dim: of a head.
    """

    layers: int
    heads: int
    groups: int
    dim: int

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one token's keys and values over all layers."""
        return 2 * self.layers * self.heads * self.dim * dtype.itemsize


def span_of(slots: array[int], device: torch.device) -> Span:
    """A slice where the slots follow one another, else their numbers as a tensor on the device."""
    count = len(slots)
    if not count:
        return slice(0, 0)
    if slots[-1] - slots[0] == count - 1:
        numbers = torch.frombuffer(slots, dtype=torch.int64)
        if bool((numbers[1:] - numbers[:-1] == 1).all()):
            return slice(slots[0], slots[-1] + 1)
    return numbers_of(slots, device)


def numbers_of(numbers: array[int], device: torch.device) -> Tensor:
    """An array of type "q" as a tensor. Converting it number by number would take hundreds of times as long."""
    if not numbers:
        return torch.zeros(0, dtype=torch.int64, device=device)
    seen = torch.frombuffer(numbers, dtype=torch.int64)
    return seen.clone() if device.type == "cpu" else seen.to(device)


def length_of(span: Span) -> int:
    """How many slots."""
    return span.stop - span.start if isinstance(span, slice) else int(span.shape[0])


def part_of(span: Span, start: int, stop: int) -> Span:
    """Some of the slots, by index; fewer if they end before `stop`."""
    if isinstance(span, slice):
        return slice(span.start + start, min(span.start + stop, span.stop))
    return span[start:stop]


class Storage:
    """Keys and values of `slots` slots.

    Raises:
        SpecError: there is not enough memory.
    """

    def __init__(self, shape: CacheShape, slots: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape, self.slots, self.dtype, self.device = shape, slots, dtype, device
        size = (shape.layers, shape.heads, slots, shape.dim)
        try:
            # Zeros, not uninitialised memory: for a masked slot, 0 times NaN would be NaN.
            self.keys = torch.zeros(size, dtype=dtype, device=device)
            self.values = torch.zeros(size, dtype=dtype, device=device)
        except RuntimeError as error:
            want = slots * shape.bytes(dtype) / 1e9
            raise SpecError(f"{slots} slots take {want:.1f} GB: {error}", advice="open the engine with fewer tokens") from error
        self._few = torch.empty((shape.heads, 0, shape.dim), dtype=dtype, device=device)
        self._scratch = torch.empty((2, shape.heads, 0, shape.dim), dtype=dtype, device=device)

    def perform(self, copies: Copies) -> None:
        """Carry out the copies of the tables; call it before anything is written or read."""
        if not len(copies):
            return
        sources, targets = copies.take()
        read, write = numbers_of(sources, self.device), numbers_of(targets, self.device)
        for kind in (self.keys, self.values):
            kind[:, :, write] = kind[:, :, read]

    def write(self, layer: int, span: Span, keys: Tensor, values: Tensor) -> None:
        """Put one layer's keys and values, shape [heads, n, dim], into slots."""
        if isinstance(span, slice):
            self.keys[layer, :, span] = keys
            self.values[layer, :, span] = values
        else:
            self.keys[layer].index_copy_(1, span, keys)
            self.values[layer].index_copy_(1, span, values)

    def read(self, layer: int, span: Span) -> tuple[Tensor, Tensor]:
        """One layer's keys and values of slots, shape [heads, n, dim]; good until the next read."""
        if isinstance(span, slice):
            return self.keys[layer, :, span], self.values[layer, :, span]
        count = int(span.shape[0])
        if self._scratch.shape[2] < count:
            shape = self.shape
            room = 1 << (count - 1).bit_length()
            self._scratch = torch.empty((2, shape.heads, room, shape.dim), dtype=self.dtype, device=self.device)
        keys, values = self._scratch[0, :, :count], self._scratch[1, :, :count]
        torch.index_select(self.keys[layer], 1, span, out=keys)
        torch.index_select(self.values[layer], 1, span, out=values)
        return keys, values

    def part(self, kind: Tensor, span: Span) -> Tensor:
        """Keys or values of one layer, shape [heads, slots, dim], of a few slots: [heads, n, dim], good until the next call."""
        if isinstance(span, slice):
            return kind[:, span]
        count = int(span.shape[0])
        if self._few.shape[1] < count:
            self._few = torch.empty((self.shape.heads, count, self.shape.dim), dtype=self.dtype, device=self.device)
        return torch.index_select(kind, 1, span, out=self._few[:, :count])

    def gather(self, span: Span) -> tuple[Tensor, Tensor]:
        """All layers' keys and values of slots as tensors of their own, shape [layers, heads, n, dim]."""
        if isinstance(span, slice):
            return self.keys[:, :, span].clone(), self.values[:, :, span].clone()
        return self.keys.index_select(2, span), self.values.index_select(2, span)

    def scatter(self, span: Span, keys: Tensor, values: Tensor) -> None:
        """The reverse of `gather`."""
        if isinstance(span, slice):
            self.keys[:, :, span] = keys
            self.values[:, :, span] = values
        else:
            self.keys.index_copy_(2, span, keys)
            self.values.index_copy_(2, span, values)

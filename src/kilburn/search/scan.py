"""Vectors in memory, and the nearest of them: exactly, or of very many by one pass over the signs of all, and exact products of
the best.

A vector takes D bytes (its numbers as int8, with one scale) and D/8 more for its signs. The signs of a block lie number by
number, not vector by vector, so that NumPy compares 64 numbers of many vectors at once: 12 ms for a million of 384 numbers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

from kilburn.errors import MissingExtra
from kilburn.retrieval import EXACT

try:
    import numpy as np
except ModuleNotFoundError as error:
    raise MissingExtra("numpy", "embed") from error


Array = np.ndarray[Any, Any]

BLOCK = 1 << 16
"""Vectors of a block. Its signs and distances fit the processor's cache, and a store that grows copies nothing."""

MIN_CANDIDATES = 256
"""Candidates by signs, at least, where not all are compared exactly."""

CHUNK = 512
"""Vectors that are multiplied at once: as float32 they fit the processor's cache."""

RECENT = 1024
"""Entries that may be outside of the order, besides an eighth of all."""

WIDE, SHARE = 8, 256
"""Candidates by signs: this many for each requested vector, and one in this many of all vectors."""


def vector_bytes(dimensions: int) -> int:
    """Return the size of a stored vector in bytes: a float32 and its int8 numbers."""
    return 4 + dimensions


def pack(vectors: Array) -> list[bytes]:
    """Vectors as they are stored: the scale as a float32, then each number as an int8; a row of zeros has the scale 0."""
    scales = (np.abs(vectors).max(1) / 127).astype("<f4")
    whole = np.rint(vectors / np.where(scales > 0, scales, 1)[:, None]).astype(np.int8)
    return [scale.tobytes() + row.tobytes() for scale, row in zip(scales, whole, strict=True)]


def unpack(rows: Sequence[bytes], dimensions: int) -> tuple[Array, Array]:
    """Scales and numbers of stored vectors."""
    raw = np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), vector_bytes(dimensions))
    return raw[:, :4].copy().view("<f4")[:, 0], raw[:, 4:].view(np.int8)


class _Block:
    """At most `BLOCK` vectors. What is not used yet takes address space and no memory."""

    def __init__(self, dimensions: int, words: int) -> None:
        self.count = 0
        self.entries = np.empty(BLOCK, np.int64)
        self.segments = np.empty(BLOCK, np.int32)
        self.scales = np.empty(BLOCK, np.float32)
        self.numbers = np.empty((BLOCK, dimensions), np.int8)
        self.signs = np.empty((words, BLOCK), np.uint64)


class Scan:
    """Vectors of passages by entry. Not thread-safe: its owner locks.

    Args:
        dimensions: numbers in a vector.
    """

    def __init__(self, dimensions: int) -> None:
        self.dimensions = dimensions
        self._words = -(-dimensions // 64)
        self._blocks: list[_Block] = []
        self._count = 0
        # Where an entry is: in two arrays that are ordered by entry, or, if it came since, in the dictionary.
        self._order, self._places = np.empty(0, np.int64), np.empty(0, np.int32)
        self._recent: dict[int, int] = {}
        self._left, self._bits = np.empty(BLOCK, np.uint64), np.empty(BLOCK, np.uint8)

    def __len__(self) -> int:
        return self._count

    def add(self, entries: Sequence[int], rows: Sequence[bytes]) -> None:
        """Add stored vectors (see `pack`); a vector of a known entry replaces the old one."""
        scales, numbers = unpack(rows, self.dimensions)
        # Of two vectors of one entry the later one counts.
        last = dict(zip(entries, range(len(entries)), strict=True))
        chosen = np.fromiter(last.values(), np.int64, len(last))
        keys = np.fromiter(last, np.int64, len(last))
        places = self._find(keys)
        new = np.flatnonzero(places < 0)
        places[new] = np.arange(self._count, self._count + len(new))
        self._recent.update(zip(keys[new].tolist(), places[new].tolist(), strict=True))
        self._count += len(new)
        while len(self._blocks) * BLOCK < self._count:
            self._blocks.append(_Block(self.dimensions, self._words))
        for number in np.unique(places // BLOCK):
            block, mine = self._blocks[number], np.flatnonzero(places // BLOCK == number)
            within, source = places[mine] % BLOCK, chosen[mine]
            block.count = min(BLOCK, self._count - int(number) * BLOCK)
            block.entries[within], block.segments[within] = keys[mine], keys[mine] >> 32
            block.scales[within], block.numbers[within] = scales[source], numbers[source]
            block.signs[:, within] = self._signs(numbers[source] > 0).T
        if len(self._recent) > RECENT + self._count // 8:
            self._sort()

    def remove(self, entries: Collection[int]) -> None:
        """Forget vectors; the last ones take their places. Entries that are not here are no error."""
        keys = list(entries)
        places = [int(place) for place in self._find(keys) if place >= 0]
        if not places:
            return
        for place in sorted(places, reverse=True):
            self._count -= 1
            last = self._blocks[self._count // BLOCK]
            last.count -= 1
            if place != self._count:
                block, within = self._blocks[place // BLOCK], place % BLOCK
                for name in ("entries", "segments", "scales", "numbers"):
                    getattr(block, name)[within] = getattr(last, name)[last.count]
                block.signs[:, within] = last.signs[:, last.count]
            # Nothing of it stays in memory.
            last.numbers[last.count] = 0
            last.signs[:, last.count] = 0
            if not last.count:
                self._blocks.pop()
        self._sort()

    def nearest(self, vector: Array, limit: int, segments: Collection[int] | None = None) -> list[tuple[int, float]]:
        """The nearest of these segments, or of all, as (entry, cosine), best first; of equals, the lower entry. `vector` has
        length 1."""
        masks = None if segments is None else self._masks(segments)
        total = self._count if masks is None else int(sum(np.count_nonzero(mask) for mask in masks))
        if not total or limit < 1:
            return []
        wide = max(MIN_CANDIDATES, WIDE * limit, total // SHARE)
        if total <= max(EXACT, wide):
            places = np.arange(self._count) if masks is None else np.flatnonzero(np.concatenate(masks))
        else:
            places = _least(self._distances(vector, masks), wide)
        entries, cosines = self._products(vector, places)
        best = np.lexsort((entries, -cosines))[:limit]
        return list(zip(entries[best].tolist(), cosines[best].tolist(), strict=True))

    def similar(self, vector: Array, entries: Iterable[int]) -> dict[int, float]:
        """Return the cosines of the known ones of these entries. `vector` has length 1."""
        places = self._find(list(entries))
        keys, cosines = self._products(vector, places[places >= 0])
        return dict(zip(keys.tolist(), cosines.tolist(), strict=True))

    def holds(self, entries: Sequence[int]) -> list[bool]:
        """Whether each is here."""
        return [bool(place >= 0) for place in self._find(entries)]

    def _products(self, vector: Array, places: Array) -> tuple[Array, Array]:
        entries, cosines = np.empty(len(places), np.int64), np.empty(len(places), np.float32)
        for number, block in enumerate(self._blocks):
            mine = np.flatnonzero(places // BLOCK == number) if len(self._blocks) > 1 else np.arange(len(places))
            if len(mine):
                within = places[mine] % BLOCK
                entries[mine] = block.entries[within]
                for start in range(0, len(within), CHUNK):
                    part = within[start : start + CHUNK]
                    # Not `@`: so few numbers are not worth the threads of BLAS, which wait for each other on a busy machine.
                    products = np.einsum("ij,j->i", block.numbers.take(part, axis=0).astype(np.float32), vector)
                    cosines[mine[start : start + CHUNK]] = products * block.scales[part]
        return entries, cosines

    def _distances(self, vector: Array, masks: list[Array] | None) -> Array:
        """Return the number of signs in which each vector differs from `vector`; a masked vector has more than all."""
        query_signs = self._signs(vector[None] > 0)[0]
        distances = np.empty(self._count, np.uint16)
        start = 0
        for number, block in enumerate(self._blocks):
            count = block.count
            part, differences, bits = distances[start : start + count], self._left[:count], self._bits[:count]
            part[:] = 0
            for word in range(self._words):
                np.bitwise_xor(block.signs[word, :count], query_signs[word], out=differences)
                np.bitwise_count(differences, out=bits)
                part += bits
            if masks is not None:
                np.putmask(part, ~masks[number], self._words * 64 + 1)
            start += count
        return distances

    def _masks(self, segments: Collection[int]) -> list[Array]:
        numbers = np.fromiter(segments, np.int64, len(segments)).astype(np.int32)
        if len(numbers) == 1:
            return [block.segments[: block.count] == numbers[0] for block in self._blocks]
        return [np.isin(block.segments[: block.count], numbers) for block in self._blocks]

    def _signs(self, positive: Array) -> Array:
        bits = np.zeros((len(positive), self._words * 8), np.uint8)
        packed = np.packbits(positive, axis=1)
        bits[:, : packed.shape[1]] = packed
        return bits.view(np.uint64)

    def _find(self, entries: Any) -> Array:
        """Return the place of each entry, or -1."""
        keys = np.asarray(entries, np.int64)
        if len(self._order):
            at = np.minimum(np.searchsorted(self._order, keys), len(self._order) - 1)
            places = np.where(self._order[at] == keys, self._places[at], -1).astype(np.int64)
        else:
            places = np.full(len(keys), -1, np.int64)
        if self._recent:
            for row in np.flatnonzero(places < 0):
                places[row] = self._recent.get(int(keys[row]), -1)
        return places

    def _sort(self) -> None:
        entries = np.concatenate([block.entries[: block.count] for block in self._blocks] or [np.empty(0, np.int64)])
        order = np.argsort(entries, kind="stable")
        self._order, self._places = entries[order], order.astype(np.int32)
        self._recent.clear()


def _least(distances: Array, count: int) -> Array:
    """Return the places of the smallest distances: at least `count`, with all that equal the last of them, up to twice as
    many."""
    # A sample says where to cut. Only if it is wrong are all counted.
    cut = _cut(distances[:: max(1, len(distances) // 16_384)], count * 1.2 / len(distances))
    nearest = np.flatnonzero(distances <= cut)
    if not count <= len(nearest) <= 2 * count:
        nearest = np.flatnonzero(distances <= _cut(distances, count / len(distances)))
    return nearest[np.argsort(distances[nearest], kind="stable")[: 2 * count]] if len(nearest) > 2 * count else nearest


def _cut(distances: Array, share: float) -> int:
    """The least distance that this share of them does not exceed."""
    return int(np.searchsorted(np.cumsum(np.bincount(distances)), min(share, 1.0) * len(distances)))

"""Vectors in fewer bytes: int8, signs, principal components, product and residual quantisation.

All codecs have three verbs: `fit` learns from a sample, `encode` gives rows of bytes, `scores` compares a query with
encoded rows, higher is nearer. Their scores choose candidates; exact products with the originals put these in order.

A codec needs enough vectors to learn from (`least`). `codec_for` says so and gives one that needs none.
"""

from __future__ import annotations

from typing import Any, Protocol

from kilburn.errors import MissingExtra, SpecError

try:
    import numpy as np
except ModuleNotFoundError as error:
    raise MissingExtra("numpy", "embed") from error


Array = np.ndarray[Any, Any]

CENTROIDS = 256
"""What one byte can name."""
ROUNDS = 8
"""Of k-means; after these the centroids hardly move."""


class Codec(Protocol):
    """A way to keep vectors in fewer bytes.

    Args:
        name: of the codec and its settings.
        least: vectors that it needs to learn from.
    """

    name: str
    least: int

    def fit(self, vectors: Array, seed: int = 0) -> None:
        """Learn from a sample of vectors of length 1, in rows.

        Raises:
            SpecError: fewer than `least`, or of dimensions that do not fit the codec.
        """
        ...

    def encode(self, vectors: Array) -> Array:
        """Rows of bytes.

        Raises:
            SpecError: the codec was not fitted, or to vectors of other dimensions.
        """
        ...

    def scores(self, codes: Array, query: Array) -> Array:
        """How near each encoded row is to a vector of length 1, in float32."""
        ...


class _Fitted:
    """Whether a codec was fitted, and to what.

    Args:
        name: of the codec.
        least: vectors that it needs.
    """

    def __init__(self, name: str, least: int) -> None:
        self.name, self.least = name, least
        self._dimensions = 0

    def _begin(self, vectors: Array) -> None:
        if vectors.ndim != 2 or len(vectors) < self.least:
            what = f"{self.name} learns from {self.least} vectors or more, and got {len(vectors)}"
            raise SpecError(what, advice="use int8 or binary, which learn nothing, until there are more")
        self._dimensions = vectors.shape[1]

    def _check(self, vectors: Array) -> Array:
        if vectors.shape[-1] != self._dimensions:
            what = f"{self.name} is fitted to {self._dimensions or 'no'} dimensions, not {vectors.shape[-1]}"
            raise SpecError(what, advice="fit it to vectors of this embedder")
        return np.atleast_2d(vectors)


class Int8(_Fitted):
    """Each number as an int8, with one scale a vector: D + 4 bytes. It learns nothing but the dimensions."""

    def __init__(self) -> None:
        super().__init__("int8", 0)

    def fit(self, vectors: Array, seed: int = 0) -> None:
        """Note the dimensions."""
        self._begin(vectors)

    def encode(self, vectors: Array) -> Array:
        """The scale as a float32, then the numbers."""
        vectors = self._check(vectors)
        scales = (np.abs(vectors).max(1, keepdims=True) / 127).astype(np.float32)
        whole = np.rint(vectors / np.where(scales > 0, scales, 1)).astype(np.int8)
        return np.concatenate([scales.view(np.uint8), whole.view(np.uint8)], axis=1)

    def scores(self, codes: Array, query: Array) -> Array:
        """Cosines."""
        scales = codes[:, :4].copy().view(np.float32)[:, 0]
        found: Array = (codes[:, 4:].view(np.int8).astype(np.float32) @ query) * scales
        return found


class Binary(_Fitted):
    """The signs: a bit a number. It learns nothing but the dimensions."""

    def __init__(self) -> None:
        super().__init__("binary", 0)

    def fit(self, vectors: Array, seed: int = 0) -> None:
        """Note the dimensions."""
        self._begin(vectors)

    def encode(self, vectors: Array) -> Array:
        """The signs, padded to whole 64-bit words."""
        packed = np.packbits(self._check(vectors) > 0, axis=1)
        return np.pad(packed, ((0, 0), (0, -packed.shape[1] % 8)))

    def scores(self, codes: Array, query: Array) -> Array:
        """The share of equal signs, from -1 to 1."""
        wanted = self.encode(query)[0].view(np.uint64)
        # Word by word: the words of all rows are compared at once.
        words = np.ascontiguousarray(codes).view(np.uint64)
        differing = np.zeros(len(codes), np.uint16)
        for word in range(len(wanted)):
            differing += np.bitwise_count(words[:, word] ^ wanted[word])
        found: Array = 1 - differing.astype(np.float32) * (2 / self._dimensions)
        return found


class Components(_Fitted):
    """The principal components, each as an int8: as many bytes as components.

    Args:
        components: at most the vectors' dimensions.
    """

    def __init__(self, components: int = 96) -> None:
        if components < 1:
            raise SpecError(f"{components} components", advice="give 1 or more")
        # Of fewer vectors there are not so many directions: the rest would be 0, or noise.
        super().__init__(f"pca({components})", 4 * components)
        self._components = components

    def fit(self, vectors: Array, seed: int = 0) -> None:
        """Find the directions in which the vectors differ most, and how far they reach in each."""
        self._begin(vectors)
        if vectors.shape[1] < self._components:
            raise SpecError(f"{self.name} of {vectors.shape[1]} dimensions", advice="keep at most all dimensions")
        self._mean = vectors.mean(0, dtype=np.float64).astype(np.float32)
        centred = vectors - self._mean
        _, directions = np.linalg.eigh((centred.T @ centred).astype(np.float64))
        self._axes = directions[:, ::-1][:, : self._components].astype(np.float32)
        # What one vector in a thousand exceeds is cut off.
        reach = np.quantile(np.abs(centred @ self._axes), 0.999, axis=0)
        self._scale = (np.maximum(reach, 1e-12) / 127).astype(np.float32)

    def encode(self, vectors: Array) -> Array:
        """The components, each in steps of its own."""
        parts = (self._check(vectors) - self._mean) @ self._axes / self._scale
        codes: Array = np.clip(np.rint(parts), -127, 127).astype(np.int8).view(np.uint8)
        return codes

    def scores(self, codes: Array, query: Array) -> Array:
        """Approximate cosines."""
        found: Array = codes.view(np.int8).astype(np.float32) @ ((query @ self._axes) * self._scale)
        found += query @ self._mean
        return found


class Quantised(_Fitted):
    """Product quantisation, and with more than one stage residual quantisation: each part of a vector becomes the number
    of the nearest of 256 centroids, and each further stage does the same with what the earlier ones left over.

    Args:
        parts: into which a vector is cut; they divide its dimensions. 1 with many stages is plain residual quantisation.
        stages: how often.
    """

    def __init__(self, parts: int = 96, stages: int = 1) -> None:
        if parts < 1 or stages < 1:
            raise SpecError(f"{parts} parts, {stages} stages", advice="give 1 or more")
        super().__init__(f"pq({parts})" if stages == 1 else f"rq({stages}x{parts})", 4 * CENTROIDS)
        self._parts, self._stages = parts, stages

    def fit(self, vectors: Array, seed: int = 0) -> None:
        """Find the centroids of each stage and part, by k-means from vectors chosen by `seed`."""
        self._begin(vectors)
        if vectors.shape[1] % self._parts:
            raise SpecError(f"{self.name}: {vectors.shape[1]} dimensions", advice="give a number of parts that divides them")
        dice = np.random.default_rng(seed)
        left = self._cut(vectors).copy()
        self._centroids = np.empty((self._stages, self._parts, CENTROIDS, left.shape[2]), np.float32)
        for stage in range(self._stages):
            for part in range(self._parts):
                found = _means(left[:, part], dice)
                self._centroids[stage, part] = found
                left[:, part] -= found[_nearest(left[:, part], found)]

    def encode(self, vectors: Array) -> Array:
        """A byte for each stage and part."""
        left = self._cut(self._check(vectors)).copy()
        codes = np.empty((len(left), self._stages, self._parts), np.uint8)
        for stage in range(self._stages):
            for part in range(self._parts):
                codes[:, stage, part] = _nearest(left[:, part], self._centroids[stage, part])
                left[:, part] -= self._centroids[stage, part][codes[:, stage, part]]
        return codes.reshape(len(left), -1)

    def scores(self, codes: Array, query: Array) -> Array:
        """Approximate cosines: the sum of the centroids' products with the query, which are looked up."""
        pieces = query.reshape(self._parts, -1)
        table = np.einsum("spcd,pd->spc", self._centroids, pieces).reshape(-1, CENTROIDS)
        found = np.zeros(len(codes), np.float32)
        for at in range(len(table)):
            found += table[at][codes[:, at]]
        return found

    def _cut(self, vectors: Array) -> Array:
        return np.asarray(vectors, np.float32).reshape(len(vectors), self._parts, -1)


def _nearest(points: Array, centroids: Array) -> Array:
    """The nearest centroid of each point."""
    half = (centroids**2).sum(1) / 2
    found: Array = np.argmax(points @ centroids.T - half, axis=1)
    return found


def _means(points: Array, dice: np.random.Generator) -> Array:
    centroids = points[dice.choice(len(points), CENTROIDS, replace=len(points) < CENTROIDS)]
    for _ in range(ROUNDS):
        nearest = _nearest(points, centroids)
        counts = np.bincount(nearest, minlength=CENTROIDS)
        sums = np.stack([np.bincount(nearest, points[:, axis], CENTROIDS) for axis in range(points.shape[1])], axis=1)
        # A centroid that nobody is near takes the place of some point.
        empty = counts == 0
        sums[empty], counts[empty] = points[dice.choice(len(points), int(empty.sum()))], 1
        centroids = (sums / counts[:, None]).astype(np.float32)
    return centroids


def codecs() -> list[Codec]:
    """Those that are measured: two that learn nothing, and three of 50 to 100 bytes for 384 dimensions."""
    return [Int8(), Binary(), Components(96), Quantised(96), Quantised(48, 2)]


def codec_for(codec: Codec, vectors: Array, seed: int = 0) -> tuple[Codec, str]:
    """The codec, fitted; or int8 if there are too few vectors, or they do not fit the codec, with the reason in words."""
    try:
        codec.fit(vectors, seed)
    except SpecError as error:
        instead = Int8()
        instead.fit(vectors, seed)
        return instead, f"{error.what}; int8 instead"
    return codec, ""

"""Vectors of words and their pieces by hashing: no weights, no meaning, and the same numbers everywhere. For tests."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any

from kilburn.errors import MissingExtra, SpecError


class Hashing:
    """Texts are near if they share words, and a little if they share pieces of words.

    Args:
        dimensions: numbers in a vector.

    Raises:
        SpecError: less than 8 dimensions. MissingExtra: NumPy is not installed.
    """

    def __init__(self, dimensions: int = 256) -> None:
        if not isinstance(dimensions, int) or dimensions < 8:
            raise SpecError(f"{dimensions!r} dimensions", advice="give 8 or more")
        try:
            self._numpy = import_module("numpy")
        except ModuleNotFoundError as error:
            raise MissingExtra("numpy", "embed") from error
        self.name, self.dimensions = f"hashing({dimensions})", dimensions

    def embed(self, texts: Sequence[str]) -> Any:
        """A row of length 1 for each text."""
        np = self._numpy
        vectors = np.zeros((len(texts), self.dimensions), np.float32)
        for row, text in enumerate(texts):
            for feature, weight in _features(text):
                number = int.from_bytes(hashlib.blake2b(feature.encode("utf-8", "replace"), digest_size=8).digest(), "little")
                vectors[row, (number >> 1) % self.dimensions] += weight if number & 1 else -weight
            if not vectors[row].any():
                vectors[row, 0] = 1
        return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def _features(text: str) -> Iterator[tuple[str, float]]:
    for word in re.findall(r"\w+", text.lower()):
        yield word, 1.0
        edged = f" {word} "
        for start in range(len(edged) - 2):
            yield edged[start : start + 3], 0.25

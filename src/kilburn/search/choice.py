"""Which vectors serve a store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

from kilburn.backend import Backend
from kilburn.errors import KilburnError
from kilburn.kernel.resolve import resolve
from kilburn.retrieval import Embedder

_embedders: WeakValueDictionary[str, Embedder] = WeakValueDictionary()
"""By name: the stores of a program share the weights."""


def usual_embedder(names: Sequence[str] = ()) -> Embedder:
    """Return the embedder of a store with vectors of these embedders; `minilm` for a store without vectors.

    Raises:
        MissingExtra, Unavailable: it is not installed, or not on this machine; nothing is downloaded.
        SpecError: no such embedder here.
    """
    # Of two, one is being changed for the other, which came later.
    embedder: Embedder = resolve("search.embedders", (names or ["minilm"])[-1], foreign=False)
    return _embedders.setdefault(embedder.name, embedder)


def vectors_for(backend: Backend, embedder: Any = "auto", *, foreign: bool = True) -> Any:
    """The `Vectors` of a store, or None for search by words alone.

    Args:
        backend: an open backend.
        embedder: a spec or an object; None or "none" for none; "auto" for the one that made the store's vectors, in a
            store without vectors for `minilm`, and for none where that one is not installed or not on this machine.
        foreign: see `kilburn.open`.

    Raises:
        SpecError: it is no embedder. MissingExtra, Unavailable: it is named, and cannot be made.
    """
    if embedder is None or embedder == "none":
        return None
    if embedder == "auto":
        try:
            embedder = usual_embedder(backend.vectors.embedders())
        except KilburnError:
            return None
    else:
        embedder = resolve("search.embedders", embedder, foreign=foreign)
    from kilburn.search.vectors import Vectors  # it needs NumPy, an extra

    return Vectors(backend, embedder)

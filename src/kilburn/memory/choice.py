"""Which vectors serve a store."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from kilburn.errors import KilburnError
from kilburn.kernel.resolve import resolve
from kilburn.store import Store

__all__ = ["vectors_for"]


def vectors_for(store: Store, embedder: Any = "auto", *, foreign: bool = True) -> Any:
    """The `Vectors` of a store, or None for search by words alone.

    Args:
        store: an open store.
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
            # Of two, one is being changed for the other, which came later.
            embedder = resolve("memory.embedders", (store.embedders() or ["minilm"])[-1], foreign=False)
        except KilburnError:
            return None
    else:
        embedder = resolve("memory.embedders", embedder, foreign=foreign)
    # By name, because it imports NumPy, which only those need who embed.
    return import_module("kilburn.memory.vectors").Vectors(store, embedder)

"""A cache of page texts in front of the store, by digest.

The store verifies what it reads. Texts in the window stay cached; all others are removed when the cache is full.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from sys import getsizeof
from weakref import WeakMethod, ref

from kilburn.backend import Backend

CACHE = 8_000_000
"""Bytes that are cached before texts that the window does not need are removed."""


class Contents:
    """Texts by digest.

    Args:
        needed_digests: a method that returns the digests that must stay cached; it is held weakly.
    """

    def __init__(self, backend: Backend, needed_digests: Callable[[], set[str]]) -> None:
        # A session that nobody holds any more is freed at once, with its tables, and not when the garbage collector runs.
        self._backend, self._needed = backend, WeakMethod(needed_digests)
        self._texts: dict[str, str] = {}
        self._shared: Callable[[], Contents | None] = lambda: None
        self._held = 0
        self._limit = CACHE

    @property
    def size(self) -> int:
        """Bytes of the texts."""
        return self._held

    def get(self, digest: str) -> str:
        """The text of a digest; "" for none.

        Raises:
            StoreCorrupt: altered, or missing.
        """
        if not digest:
            return ""
        if digest not in self._texts:
            self.fetch([digest])
        return self._texts[digest]

    def fetch(self, digests: Iterable[str]) -> None:
        """Read texts into the cache in one query."""
        missing = {digest for digest in digests if digest and digest not in self._texts}
        shared_cache = self._shared()
        shared = {} if shared_cache is None else shared_cache._texts
        texts = {digest: text for digest in missing if (text := shared.get(digest)) is not None}
        missing.difference_update(texts)
        if missing:
            texts |= self._backend.contents.texts(missing)
        for digest, text in texts.items():
            self._texts[digest] = text
            self._held += _size_of(text)
        if self._held > self._limit:
            self._trim(set(texts))

    def texts(self, digests: Collection[str]) -> dict[str, str]:
        """Return texts by digest, with one query for those that are not cached. Raises what `get` raises."""
        self.fetch(digests)
        return {digest: self.get(digest) for digest in digests}

    def keep(self, digest: str, text: str) -> None:
        """Cache a text that is about to be written."""
        if digest not in self._texts:
            self._texts[digest] = text
            self._held += getsizeof(text) if text.isascii() else _size_of(text)
            if self._held > self._limit:
                self._trim({digest})

    def share(self, cache: Contents) -> None:
        """Look for texts in another cache of this store, before the store is asked. What that one removes is not kept here."""
        self._shared = ref(cache)

    def clear(self) -> None:
        """Empty the cache."""
        self._texts.clear()
        self._shared, self._held = lambda: None, 0

    def _trim(self, latest: set[str]) -> None:
        needed_by = self._needed()
        retained = latest if needed_by is None else needed_by() | latest
        self._texts = {digest: text for digest, text in self._texts.items() if digest in retained}
        self._held = sum(map(_size_of, self._texts.values()))
        self._limit = max(CACHE, 2 * self._held)


def _size_of(text: str) -> int:
    """Bytes that a text takes in memory. One that is not ASCII has its UTF-8 beside it once a prompt was written with it."""
    return getsizeof(text) if text.isascii() else getsizeof(text) + 3 * len(text)

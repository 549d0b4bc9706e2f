"""Caches the results of functions of texts; all functions share one bound in bytes.

A bound in entries says nothing about memory if an entry may be a line or a file. The least recently used entries are evicted,
about half of all at once, so a hit costs only a lookup.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any, Generic, ParamSpec, TypeVar

Params = ParamSpec("Params")
Result = TypeVar("Result")
Key = TypeVar("Key")
Value = TypeVar("Value")

MAX_BYTES = 64 << 20
"""Bytes of the results of all functions together."""

ENTRY = 300
"""Bytes of an entry besides its texts and its result."""


MAX_STEP_SECONDS = 10.0
"""How long `clear` waits for a step of another thread in the cache; a step takes microseconds."""


class Recent(Generic[Key, Value]):
    """The most recently used values by key, up to a number of bytes. Safe to use from several threads.

    Args:
        max_bytes: bytes of all values, by the sizes given to `keep`.
    """

    def __init__(self, max_bytes: int) -> None:
        self.most = max_bytes
        # An interrupt between a `with` statement and its block leaves a lock held for ever. So no thread waits for this lock: it
        # goes without the cache, and the interrupted thread gets its own lock again.
        self._lock = threading.RLock()
        self._young: dict[Key, tuple[Value, int]] = {}
        self._old: dict[Key, tuple[Value, int]] = {}
        """Entries that were not used since the young generation began; dropped when the young would exceed half of the bound."""
        self._taken = self._left = 0
        """Bytes of the young and of the old generation."""

    def __len__(self) -> int:
        return len(self._young) + len(self._old)

    @property
    def taken(self) -> int:
        """Bytes of what is here."""
        return self._taken + self._left

    def get(self, key: Key) -> Value | None:
        """Return the value of a key, if it is here."""
        entry = self._young.get(key)
        if entry is not None:
            return entry[0]
        if not self._lock.acquire(blocking=False):
            return None
        try:
            entry = self._old.pop(key, None)
            if entry is None:
                return None
            self._left -= entry[1]
            self._add(key, entry)
            return entry[0]
        finally:
            self._lock.release()

    def keep(self, key: Key, value: Value, size: int) -> None:
        """Keep a value of so many bytes. One that is more than a quarter of all is not kept."""
        if 4 * size > self.most or not self._lock.acquire(blocking=False):
            return
        try:
            if (entry := self._old.pop(key, None)) is not None:
                self._left -= entry[1]
            self._add(key, (value, size))
        finally:
            self._lock.release()

    def clear(self) -> None:
        """Drop everything. A lock that a thread holds longer than any of its steps takes is replaced."""
        is_held = self._lock.acquire(timeout=MAX_STEP_SECONDS)
        try:
            self._young, self._old, self._taken, self._left = {}, {}, 0, 0
        finally:
            if is_held:
                self._lock.release()
            else:
                self._lock = threading.RLock()

    def _add(self, key: Key, entry: tuple[Value, int]) -> None:
        if (previous := self._young.get(key)) is not None:
            self._taken -= previous[1]
        if 2 * (self._taken + entry[1]) > self.most:
            self._old, self._left, self._young, self._taken = self._young, self._taken, {}, 0
        self._young[key] = entry
        self._taken += entry[1]


texts: Recent[tuple[Any, ...], Any] = Recent(MAX_BYTES)
"""The results of all functions."""


def remembered(size: Callable[[Any], int]) -> Callable[[Callable[Params, Result]], Callable[Params, Result]]:
    """Cache the results of a function of texts. The function must return the same for the same arguments, and never None.

    Args:
        size: approximate bytes of a result, besides the texts that the function was given.
    """

    def made(function: Callable[Params, Result]) -> Callable[Params, Result]:
        get, keep = texts.get, texts.keep

        @wraps(function)
        def asked(*arguments: Params.args, **keywords: Params.kwargs) -> Result:
            key = (function, *arguments, *keywords.items()) if keywords else (function, *arguments)
            result: Result | None = get(key)
            if result is None:
                result = function(*arguments, **keywords)
                long = sum(map(sys.getsizeof, arguments))
                keep(key, result, ENTRY + long + size(result))
            return result

        return asked

    return made

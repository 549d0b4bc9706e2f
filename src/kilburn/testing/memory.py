"""The store for tests: without a file, and gone with its object."""

from __future__ import annotations

from kilburn.backends.sqlite import Sqlite


class MemoryBackend(Sqlite):
    """`Sqlite(":memory:")` under a short name: the real store, which a test may extend. Another object shares nothing with it."""

    def __init__(self, tenant: str = "default") -> None:
        super().__init__(":memory:", tenant=tenant)

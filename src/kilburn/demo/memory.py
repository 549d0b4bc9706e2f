"""What an answerer may use: two functions, and nothing else.

`OfProcess` gives them from a process, through the same system calls that a model makes. It refuses
to offer anything else of it.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from kilburn.kernel import syscall
from kilburn.kernel.process import Process

__all__ = ["Memory", "OfProcess"]


class Memory(Protocol):
    """The memory tools of a process as a model sees them: text in, text out."""

    def recall(self, address: str, offset: int = 0, limit: int | None = None) -> str:
        """Pages of an address under a line each that says what they are, or a line beginning "error:"."""
        ...

    def search_memory(self, query: str, tokens: int = 1000) -> str:
        """Passages for a query, best first, under a line each that says where they are from."""
        ...


class OfProcess:
    """The memory of a process; `recalls` and `searches` count what was asked."""

    def __init__(self, process: Process) -> None:
        self.recalls = self.searches = 0
        self._process = process

    def recall(self, address: str, offset: int = 0, limit: int | None = None) -> str:
        """See `Memory`."""
        self.recalls += 1
        arguments = {"address": address, "offset": offset, "limit": limit}
        return syscall.call(self._process, "recall", msgspec.json.encode(arguments).decode()).text

    def search_memory(self, query: str, tokens: int = 1000) -> str:
        """See `Memory`."""
        self.searches += 1
        arguments = {"query": query, "tokens": tokens}
        return syscall.call(self._process, "search_memory", msgspec.json.encode(arguments).decode()).text

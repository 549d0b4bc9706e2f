"""Long-term memory: what is learned from sessions, and how it is found. One policy a file.

A store gets its memories and notes from here: `kilburn.opening` registers this package with the kernel.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilburn.memory.view import MemoryPolicy
from kilburn.submodules import attach

if TYPE_CHECKING:
    from kilburn.collections.collection import Collection
    from kilburn.kernel.store import Store
    from kilburn.memory.notes import Notes
    from kilburn.memory.user_memory import UserMemory

KIND = MemoryPolicy
"""What a policy of the memory is; each is in a file here."""

attach(__name__)


def make_memory(store: Store, collection: Collection) -> UserMemory:
    """Return the memory whose facts a collection holds."""
    from kilburn.memory.user_memory import UserMemory  # many modules, and not every program has memories

    return UserMemory(store, collection)


def make_notes(store: Store, owner: str) -> Notes:
    """Return the notes of an owner."""
    from kilburn.memory.notes import Notes

    return Notes(store, owner)

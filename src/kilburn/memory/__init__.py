"""Long-term memory: what is learned from sessions, and how it is found. One policy a file.

A store gets its memories and notes from here: `kilburn.open` imports this package, and the kernel does not.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kilburn.backend import SegmentInfo, SegmentKind
from kilburn.kernel.store import Store, register
from kilburn.memory.view import MemoryPolicy
from kilburn.submodules import attach

if TYPE_CHECKING:
    from kilburn.memory.notes import Notes
    from kilburn.memory.user_memory import UserMemory

KIND = MemoryPolicy
"""What a policy of the memory is; each is in a file here."""

attach(__name__)


def _make_memory(store: Store, info: SegmentInfo) -> UserMemory:
    from kilburn.memory.user_memory import UserMemory  # many modules, and not every program has memories

    return UserMemory(store, info)


def _make_notes(store: Store, owner: str) -> Notes:
    from kilburn.memory.notes import Notes

    return Notes(store, owner)


register(SegmentKind.MEMORY, _make_memory)
register(SegmentKind.NOTES, _make_notes)

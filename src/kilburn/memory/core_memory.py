"""Core memory: notes that stand in every prompt, as MemGPT's core memory does: who the user is, who the agent is, what it is at.

A block is a note as any. That it stands in the prompt, how large it may be and whether the agent may change it are settings of
the view, and not of the note.

    core = CoreMemory(store.notes("ana"), "core/human", CoreBlock("core/rules", limit=500, readonly=True))
    agent = Agent(model, [], session, notes=core, recall=500)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

import msgspec

from kilburn.arguments import checked
from kilburn.collections.names import LARGEST_NOTE, checked_name
from kilburn.errors import SpecError
from kilburn.kernel.brought import StandingNote, day_of
from kilburn.memory.notes import Notes, NoteVersion
from kilburn.message import Trust

__all__ = ["CoreBlock", "CoreMemory"]

LIMIT = 2_000
"""Characters of a block where nothing else is said."""


_PLAIN = re.compile(r"[\w./ -]+")


class CoreBlock(msgspec.Struct, frozen=True):
    """How a note stands in a prompt.

    Args:
        name: of the note; with those below it, as `core` is of `core/human`.
        limit: characters that an agent may make of each. A person may write more; the prompt says so.
        readonly: whether an agent may not change it.

    Raises:
        KernelError: no name of a note. SpecError: no limit.
    """

    name: str
    limit: int = LIMIT
    readonly: bool = False

    def __post_init__(self) -> None:
        msgspec.structs.force_setattr(self, "name", checked_name(self.name))
        if isinstance(self.limit, bool) or not isinstance(self.limit, int) or not 1 <= self.limit <= LARGEST_NOTE:
            raise SpecError(
                f"limit={self.limit!r} of the block {self.name!r}"[:200], advice=f"give 1 to {LARGEST_NOTE:,} characters"
            )

    def has(self, name: str) -> bool:
        """Whether it is this note, or one below it."""
        return name == self.name or name.startswith(f"{self.name}/")


@checked
class CoreMemory:
    """Notes of one owner that stand in every prompt, in this order.

    Args:
        notes: whose they are among.
        blocks: which, by name, or as a `CoreBlock`.
    """

    def __init__(self, notes: Notes, *blocks: CoreBlock | str) -> None:
        self.notes = notes
        self.blocks = tuple(block if isinstance(block, CoreBlock) else CoreBlock(block) for block in blocks)

    def of(self, name: str) -> CoreBlock | None:
        """The block that a note is, by the first that has it; None for no block."""
        return next((block for block in self.blocks if block.has(name)), None)

    def shown(self) -> Sequence[StandingNote]:
        """The notes as they stand in a prompt: each under its name, with its address, who wrote it and when, how full it is, and
        whether a tool's text got into it; also those that say nothing yet.

        Raises:
            StoreError.
        """
        return [_standing(self.notes, block, name, note) for block, name, note in self._found()]

    def _found(self) -> Iterator[tuple[CoreBlock, str, NoteVersion | None]]:
        there = self.notes.list()
        for block in self.blocks:
            found = [note for note in there if self.of(note.name) is block]
            yield from ((block, note.name, note) for note in found)
            if not found:
                yield block, block.name, None


def _standing(notes: Notes, block: CoreBlock, name: str, note: NoteVersion | None) -> StandingNote:
    only = ["read-only"] if block.readonly else []
    if note is None:
        return StandingNote(heading=", ".join([_told(name), "empty", f"0 of {block.limit:,} characters", *only]))
    text, collection = note.text, notes.collection
    age = max(0.0, collection.clock() - note.time)
    reference = f"{collection.name} {note.address}"
    full = f"{len(text):,} of {block.limit:,} characters"
    marks = [_told(name), reference, str(note.role), day_of(note.time), f"{age / 86400:.0f} days ago", full, *only]
    marks += ["has a tool's text in it"] if note.trust <= Trust.TOOL else []
    return StandingNote(
        heading=", ".join(marks), text=text, page=(collection.number, note.page), name=reference, trust=note.trust
    )


def _told(name: str) -> str:
    """A name as a heading has it: an agent chooses names, and none may look like the marks behind it."""
    return name if _PLAIN.fullmatch(name) else msgspec.json.encode(name).decode()

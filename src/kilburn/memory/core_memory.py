"""Core memory as in MemGPT: notes that are part of every prompt, such as who the user is and what the agent works on.

Such a note, a *block*, is a note like any other. Its place in the prompt and its size limit are settings of this view. Write
protection holds for all views of the notes (`Notes.protect`).

    core = CoreMemory(store.notes("ana"), "core/human", "core/rules", limits={"core/rules": 500}, readonly=["core/rules"])
    agent = Agent(model, [], session, notes=core, recall=500)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec

from kilburn.arguments import checked
from kilburn.collections.names import LARGEST_NOTE, checked_name
from kilburn.errors import KernelError, NoteConflict, SpecError
from kilburn.memory.brought import StandingNote, format_day
from kilburn.memory.notes import Notes, NoteVersion, is_at
from kilburn.memory.secrets import Secrets
from kilburn.message import Trust

__all__ = ["CoreMemory"]

DEFAULT_LIMIT = 2_000
"""Characters of a block by default."""

MAX_EDIT_ATTEMPTS = 20
"""How often an edit is repeated because another writer was faster."""

_PLAIN = re.compile(r"[\w./ -]+")


@checked
class CoreMemory:
    """Notes of one owner that are part of every prompt, in this order.

    Args:
        notes: the notes of the owner.
        names: names of the blocks; a name also means the notes below it: `core` includes `core/human`.
        limit: characters that an agent may write into each block. A person may write more; the prompt says so.
        limits: limits of single blocks, by name. readonly: names of blocks that no agent may change; see `Notes.protect`.

    Raises:
        KernelError: invalid name of a note. SpecError: an invalid limit, or a limit of a note that is no block.
    """

    def __init__(
        self,
        notes: Notes,
        *names: str,
        limit: int = DEFAULT_LIMIT,
        limits: Mapping[str, int] | None = None,
        readonly: Collection[str] = (),
    ) -> None:
        self.notes, self.names = notes, tuple(map(checked_name, names))
        self.cut: dict[int, frozenset[tuple[int, int]]] = {}
        """The blocks that the last prompt of a session had only in part, as pages by the number of the session."""
        self._limit = limit
        self._limits = {checked_name(name): size for name, size in (limits or {}).items()}
        for size in (limit, *self._limits.values()):
            if not 1 <= size <= LARGEST_NOTE:
                raise SpecError(f"a limit of {size:,} characters", advice=f"give 1 to {LARGEST_NOTE:,}")
        if strange := [name for name in (*self._limits, *map(checked_name, readonly)) if not self.has(name)]:
            raise SpecError(f"the note {strange[0]!r} is not among them", advice="give its name, too")
        notes.protect(*readonly)

    def has(self, name: str) -> bool:
        """Return whether the note of that name is one of them."""
        return any(is_at(name, block) for block in self.names)

    def limit(self, name: str) -> int:
        """Return how many characters an agent may write into a note."""
        near = [block for block in self._limits if is_at(name, block)]
        return self._limits[max(near, key=len)] if near else self._limit

    def shown(self) -> Sequence[StandingNote]:
        """Return the notes as a prompt shows them: each under its name, with its address, its writer and time, its size and
        limit, and a warning if a tool's text got into it. Empty notes are included.

        Raises:
            StoreError.
        """
        versions, blocks = self.notes.list(accepts=self.has), dict[str, NoteVersion | None]()
        for name in self.names:
            notes: dict[str, NoteVersion | None] = {note.name: note for note in versions if is_at(note.name, name)}
            blocks |= notes or {name: None}
        texts = self.notes.texts([note for note in blocks.values() if note is not None])
        return [self._standing(name, note, texts[note.digest] if note else "") for name, note in blocks.items()]

    def edit(
        self,
        name: str,
        change: Callable[[str], str],
        *,
        seen: str | None = None,
        policy: str = "agent",
        tainted: bool = False,
        cites: Sequence[tuple[int, int]] = (),
        secrets: Secrets = None,
    ) -> int:
        """Edit a note as an agent, and return its new length in characters. An edit that leaves no text deletes the note.

        Args:
            change: maps the old text to the new one; the old text of a missing note is "". Called again if another writer was
                faster.
            seen: the digest of the version that the edit is based on, if it is valid for that version only; "" for a new note.
            policy, tainted, cites, secrets: see `Notes.write`.

        Raises:
            KernelError: no block of this name, it is read-only, it would exceed its limit, or `change` raised it.
            NoteConflict: the note was changed since `seen`. SecretFound, MissingExtra, StoreError. Nothing was changed.
        """
        if not self.has(name):
            raise KernelError(f"there is no block {name[:80]!r}", advice=f"there is {', '.join(self.names) or 'none'}")
        self.notes.check([name], policy=policy, tainted=tainted)
        for attempts in reversed(range(MAX_EDIT_ATTEMPTS)):
            note = self.notes.find(name)
            old_text = "" if note is None else note.text
            text, max_chars = change(old_text), max(self.limit(name), len(old_text) - 1)
            if len(text) > max_chars:
                reason = f"{name!r} would have {len(text):,} of {self.limit(name):,} characters"
                raise KernelError(reason, advice="nothing was written: say it shorter, or leave out what matters less")
            digest = "" if note is None else note.digest
            if seen is not None and seen != digest:
                raise NoteConflict(
                    f"{name!r} was changed meanwhile", advice="nothing was written: edit what it says now", note=note
                )
            try:
                if text.strip():
                    write = partial(self.notes.write, name, text, seen=digest, policy=policy)
                    return len(write(tainted=tainted, cites=cites, secrets=secrets).text)
                if note is not None:
                    self.notes.delete(name, seen=digest, policy=policy, tainted=tainted)
                return 0
            except NoteConflict:
                if not attempts:
                    raise
        raise AssertionError

    def _standing(self, name: str, note: NoteVersion | None, text: str) -> StandingNote:
        limit, only = f"of {self.limit(name):,} characters", ["read-only"] if self.notes.readonly(name) else []
        if note is None:
            return StandingNote(heading=", ".join([_quoted_name(name), "empty", f"0 {limit}", *only]))
        collection = self.notes.collection
        age = max(0.0, collection.clock() - note.time)
        reference = f"{collection.name} {note.address}"
        marks = [_quoted_name(name), reference, str(note.role), format_day(note.time), f"{age / 86400:.0f} days ago"]
        marks += [f"{len(text):,} {limit}", *only, *(["has a tool's text in it"] if note.trust <= Trust.TOOL else [])]
        page = (collection.number, note.page)
        return StandingNote(heading=", ".join(marks), text=text, page=page, name=reference, trust=note.trust)


def _quoted_name(name: str) -> str:
    """Return a name as a heading has it: an agent chooses names, and none may look like the marks behind it."""
    return name if _PLAIN.fullmatch(name) else msgspec.json.encode(name).decode()

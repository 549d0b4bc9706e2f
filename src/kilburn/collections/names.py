"""The names of notes: what may be one, and which page has it at the moment."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping

from kilburn.backend import Backend, State
from kilburn.errors import KernelError, LawBroken
from kilburn.event import STATE
from kilburn.page import Page, Place, address_of

LONGEST_NAME = 200
"""Characters of a name."""

LONGEST_PART = 200
"""Bytes in UTF-8 of a part of it between slashes, which is the name of a file in an export."""

LARGEST_NOTE = 100_000
"""Characters of a note."""

_ODD = re.compile(r"[\\\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff]")
"""What no part of a name may have: backslashes, and characters that cannot be seen or turn the direction of a line."""


def checked_name(name: str) -> str:
    """A name of a note in the one form in which it is kept: composed Unicode (NFC).

    Raises:
        KernelError: it cannot be one; the advice says why.
    """
    if not isinstance(name, str) or not name:
        raise KernelError("a note without a name", advice="name it like core/human or workflows/release")
    excerpt = ascii(name[:80])
    if len(name) > LONGEST_NAME:
        raise KernelError(f"a name of {len(name):,} characters", advice=f"{LONGEST_NAME} at most")
    if odd := _ODD.search(name):
        raise KernelError(f"the name {excerpt} has the character U+{ord(odd[0]):04X}", advice="leave it out")
    name = unicodedata.normalize("NFC", name)
    for part in name.split("/"):
        if not part:
            raise KernelError(f"the name {excerpt} has an empty part", advice="no slash at an end, and none beside another")
        if part in (".", ".."):
            raise KernelError(f"the name {excerpt} leads elsewhere", advice="names have no . and no .. between slashes")
        if part.startswith(".") or part != part.strip() or part.endswith("."):
            raise KernelError(f"the name {excerpt} has the part {part!a}", advice="no dot or blank at its ends")
        if len(part.encode("utf-8")) > LONGEST_PART:
            raise KernelError(f"the name {excerpt} has a part of over {LONGEST_PART} bytes", advice="make it shorter")
    return name


class NoteNames:
    """Which page of a collection has which name, of the pages that are in force. It follows the ledger: only the pages that
    events touched are read again."""

    def __init__(self) -> None:
        self._head = 0
        self._pages: dict[str, int] = {}
        self._names: dict[int, str] = {}

    def follow(self, backend: Backend, number: int, head: int) -> Mapping[str, int]:
        """The pages in force by their names, as they are after event `head`."""
        if head > self._head:
            touched = {page for event in backend.events(number, self._head) if event.act in STATE for page in event.pages}
            for page, state in backend.read((number, page) for page in touched).values():
                self._see(page, state)
            self._head = head
        return self._pages

    def _see(self, page: Page, state: State) -> None:
        name = self._names.pop(page.id, None)
        if name is not None and self._pages.get(name) == page.id:
            del self._pages[name]
        if state.at is Place.OUT and page.name is not None:
            self._pages[page.name] = page.id
            self._names[page.id] = page.name


def check_one_of_each(note_pages: Mapping[str, int], pages: Iterable[tuple[Page, State]]) -> None:
    """Check that of each name one page is in force after a change.

    Args:
        note_pages: the pages in force before it, by name.
        pages: those that it touches, as they are after it.

    Raises:
        LawBroken: two would be, or one has no name.
    """
    touched = {page.id: (page, state) for page, state in pages}
    holders = {name: page for name, page in note_pages.items() if page not in touched}
    for page, state in touched.values():
        if state.at is not Place.OUT:
            continue
        if page.name is None:
            raise LawBroken(9, f"the note {address_of(page.id)} has no name", advice="give an Add of a note its name")
        holder = holders.setdefault(page.name, page.id)
        if holder != page.id:
            message = f"{address_of(holder)} and {address_of(page.id)} would both be the note {page.name!r}"
            raise LawBroken(9, message, advice="retire the one in the same change")

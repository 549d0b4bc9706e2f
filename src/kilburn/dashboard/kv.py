"""Keys and values of a session, as its ledger tells of them: what is on the device, and what was computed again for each edit.

The ledger has what Kilburn's own engine did for the session. Which blocks are free, and which files are spilled, only the engine
knows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.dashboard.reading import LedgerReader
from kilburn.event import Act, Event
from kilburn.kernel.session import Session
from kilburn.page import Place

DEEDS = {
    "edit": "edited in place",
    "prefill": "computed again from the first difference",
    "": "left the device to make room",
}
"""What happened to keys and values, by the word of the ledger."""

READ = 5_000
"""Newest events of this kind that are summed up."""


class Cached(msgspec.Struct, frozen=True, kw_only=True):
    """One line: what was done, the tokens that were computed again, those whose keys and values left, and those that are cached
    after it."""

    event: Event
    what: str
    again: int
    gone: int
    cached: int
    refused: bool


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """All lines together: how many edits, the tokens that were computed again for them, and pages of the window whose keys and
    values left the device to make room and were not computed since; `off` are their tokens, as the window counts them. `cached`
    is counted by the model's own tokenizer."""

    edits: int
    again: int
    largest: int
    relieved: int
    missing: tuple[int, ...]
    off: int
    cached: int
    more: bool


def lines_of(events: Sequence[Event]) -> list[Cached]:
    """Events of the act `cache`, told."""
    found = []
    for event in events:
        how, said = str(event.data.get("how", "")), event.data
        found.append(
            Cached(
                event=event,
                what="refused" if said.get("refused") else DEEDS.get(how, how),
                again=_count(said.get("prefilled", 0)),
                gone=_count(said.get("evicted", 0)),
                cached=event.tokens,
                refused=bool(said.get("refused")),
            )
        )
    return found


def held_of(reading: LedgerReader, session: Session) -> Held | None:
    """What the newest events say together; None where there are none."""
    newest, older = reading.of_act(session.number, Act.CACHE, session.ledger.head, READ)
    if not newest:
        return None
    edits = again = largest = relieved = 0
    missing: dict[int, None] = {}
    for line in reversed(lines_of(newest)):
        if "how" in line.event.data:
            edits, again, largest = edits + 1, again + line.again, max(largest, line.again)
            if line.event.data["how"] == "prefill":
                # From the first page that left on, all was computed again.
                cut = min((page for page in line.event.pages if page > 0), default=0)
                missing = {page: None for page in missing if 0 < page < cut}
        elif not line.refused:
            relieved += 1
            missing |= dict.fromkeys(line.event.pages)
    states = session.window.states
    there = tuple(page for page in missing if page in states and states[page].at is Place.IN)
    return Held(
        edits=edits, again=again, largest=largest, relieved=relieved, missing=there, off=sum(map(session.window.cost, there)),
        cached=newest[0].tokens, more=bool(older),
    )  # fmt: skip


def removed_files(reading: LedgerReader, session: Session) -> int:
    """Spilled files that were removed because something in them was forgotten."""
    notes, _ = reading.of_act(session.number, Act.NOTE, session.ledger.head, READ)
    said: list[Any] = [event.data["files"] for event in notes if "files" in event.data]
    return sum(len(files) for files in said if isinstance(files, list | tuple))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

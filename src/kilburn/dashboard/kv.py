"""The KV cache of a session, from its ledger: the tokens on the device, and those that were computed again for each edit.

The ledger records what Kilburn's own engine did for the session. Only the engine knows its free blocks and spilled files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.dashboard.reading import LedgerReader
from kilburn.event import Act, Event
from kilburn.kernel.session import Session
from kilburn.page import Place

DEEDS = {"edit": "edited in place", "prefill": "computed again from the first difference", "": "left the device to make room"}
"""Descriptions of what happened to keys and values, by the ledger's `how`."""

MAX_EVENTS = 5_000
"""Newest events that are summed up."""


class CacheOperation(msgspec.Struct, frozen=True, kw_only=True):
    """A change of the cache: its description, and the tokens that it computed again, evicted, and left in the cache."""

    event: Event
    description: str
    recomputed: int
    evicted: int
    cached: int
    refused: bool


class CacheSummary(msgspec.Struct, frozen=True, kw_only=True):
    """The sum of the changes: edits, and the tokens that were computed again for them. `missing` are pages of the window that
    were evicted from the device and not computed again; `off` are their tokens by the window's counter. `cached` is counted by
    the model's own tokenizer."""

    edits: int
    recomputed: int
    largest: int
    relieved: int
    missing: tuple[int, ...]
    off: int
    cached: int
    more: bool


def cache_changes(events: Sequence[Event]) -> list[CacheOperation]:
    """Return the changes that events of the act `cache` record."""
    return [
        CacheOperation(
            event=event,
            description="refused" if event.data.get("refused") else DEEDS.get(how := str(event.data.get("how", "")), how),
            recomputed=_count(event.data.get("prefilled", 0)),
            evicted=_count(event.data.get("evicted", 0)),
            cached=event.tokens,
            refused=bool(event.data.get("refused")),
        )
        for event in events
    ]


def cache_summary(reading: LedgerReader, session: Session) -> CacheSummary | None:
    """Sum up the newest changes; None if there are none."""
    newest, older = reading.of_act(session.number, Act.CACHE, session.ledger.head, MAX_EVENTS)
    if not newest:
        return None
    edits = recomputed = largest = relieved = 0
    missing: dict[int, None] = {}
    for change in reversed(cache_changes(newest)):
        if "how" in change.event.data:
            edits, recomputed, largest = edits + 1, recomputed + change.recomputed, max(largest, change.recomputed)
            if change.event.data["how"] == "prefill":
                # Everything from the first evicted page on was computed again.
                cut = min((page for page in change.event.pages if page > 0), default=0)
                missing = {page: None for page in missing if 0 < page < cut}
        elif not change.refused:
            relieved += 1
            missing |= dict.fromkeys(change.event.pages)
    states = session.window.states
    off_device = tuple(page for page in missing if page in states and states[page].at is Place.IN)
    return CacheSummary(
        edits=edits, recomputed=recomputed, largest=largest, relieved=relieved, missing=off_device,
        off=sum(map(session.window.cost, off_device)), cached=newest[0].tokens, more=bool(older),
    )  # fmt: skip


def removed_files(reading: LedgerReader, session: Session) -> int:
    """Return the number of spilled files that were removed because they contained forgotten pages."""
    notes, _ = reading.of_act(session.number, Act.NOTE, session.ledger.head, MAX_EVENTS)
    values: list[Any] = [event.data["files"] for event in notes if "files" in event.data]
    return sum(len(files) for files in values if isinstance(files, list | tuple))


def _count(value: object) -> int:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else 0

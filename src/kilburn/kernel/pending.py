"""What a batch has gathered so far: events, new pages and their texts, and what to write of them.

It becomes one `Batch`, or is undone back to a savepoint. It does not touch the tier.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from kilburn.budget import Budget
from kilburn.event import STATE, Act, Event
from kilburn.message import Kind
from kilburn.page import Page
from kilburn.store import Batch, State

__all__ = ["START", "Pending", "Savepoint"]

INDEXED = frozenset({Kind.TEXT, Kind.RESULT, Kind.CALL, Kind.REASONING})
NOT_INDEXED = frozenset({"recall", "search_memory", "pin"})
"""Calls of memory tools: a query must never be found as if it were a fact."""


class Savepoint(NamedTuple):
    """A point inside a batch: how far the tier's journal, the events, the new pages and the un-indexing had come."""

    mark: int
    events: int
    new: int
    unindex: frozenset[int]


START = Savepoint(0, 0, 0, frozenset())


class Pending:
    """A transaction in the making. `head` is the last event that is written."""

    def __init__(self) -> None:
        self.head = 0
        self.clear()

    def clear(self) -> None:
        """Start a new one."""
        self.events: list[Event] = []
        self.new: list[Page] = []
        self.texts: dict[str, str] = {}
        self.touched: set[int] = set()
        self.unindex: set[int] = set()
        self.budget: Budget | None = None

    @property
    def next(self) -> int:
        """Number of the next event."""
        return self.head + len(self.events) + 1

    def savepoint(self, mark: int) -> Savepoint:
        """A point to undo to; `mark` is the tier's."""
        return Savepoint(mark, len(self.events), len(self.new), frozenset(self.unindex))

    def undo(self, point: Savepoint) -> list[Page]:
        """Go back to a savepoint; what was only observed stays noted. Returns the pages that are gone."""
        self.unindex = set(point.unindex)
        gone = self.new[point.new :]
        observed = [event for event in self.events[point.events :] if event.act not in STATE]
        del self.events[point.events :], self.new[point.new :]
        for event in observed:
            self.events.append(msgspec.structs.replace(event, number=self.next))
        return gone

    def take(self) -> Pending:
        """Take the whole batch out; an empty one stays."""
        taken = Pending()
        taken.events, taken.new, taken.texts = self.events, self.new, self.texts
        taken.touched, taken.unindex, taken.budget = self.touched, self.unindex, self.budget
        self.clear()
        return taken

    def put(self, taken: Pending) -> None:
        """Put a batch that was taken out behind what has been gathered since."""
        for event in taken.events:
            self.events.append(msgspec.structs.replace(event, number=self.next))
        self.new += taken.new
        self.texts |= taken.texts
        self.touched |= taken.touched
        self.unindex |= taken.unindex

    def batch(self, states: Mapping[int, State], *, wait: bool = True) -> Batch:
        """The transaction, with the states of all pages that were touched."""
        digests = {digest for page in self.new for digest in (page.digest, page.extra) if digest}
        return Batch(
            head=self.head,
            events=self.events,
            pages=self.new,
            texts={digest: self.texts[digest] for digest in digests},
            states={page: states[page] for page in self.touched if page in states},
            index=[page.id for page in self.new if _is_indexed(page)],
            unindex=sorted(self.unindex),
            erase=[page for event in self.events if event.act is Act.DROP for page in event.pages],
            wait=wait,
        )


def _is_indexed(page: Page) -> bool:
    """Originals only, and nothing that was recalled or asked for (law 7)."""
    return page.id > 0 and page.kind in INDEXED and not page.sources and page.name not in NOT_INDEXED

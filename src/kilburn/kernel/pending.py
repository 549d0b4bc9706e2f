"""The contents of a batch so far: events, new pages and their texts.

It becomes one transaction of the store, or is undone back to a savepoint. It does not touch the window.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import msgspec

from kilburn.backend import Batch, Digests, Pieces, SegmentInfo, State
from kilburn.budget import Budget
from kilburn.event import STATE, Act, Event, in_order
from kilburn.message import Kind, Role
from kilburn.page import Page, searchable_words

GATHERED = 256
"""Observations that wait for a commit at most."""

INDEXED = frozenset({Kind.TEXT, Kind.RESULT, Kind.CALL, Kind.REASONING})
NOT_INDEXED = frozenset({"recall", "search_memory", "pin"})
"""Calls of memory tools are not indexed: a query must never be found as if it were a fact."""


class Savepoint(NamedTuple):
    """A point inside a batch: the lengths of the window's journal, the events and the new pages."""

    journal: int
    events: int
    new: int


START = Savepoint(0, 0, 0)


class Pending:
    """A transaction that is being prepared.

    Args:
        head: the last event that is written.
        latest: no event is before this time, in seconds since the epoch: when the segment was used last, by its row.
        used: the same, where the row is known to be that of `head`; None if not.
    """

    def __init__(self, head: int = 0, latest: float = 0.0, used: float | None = None) -> None:
        self.head, self.latest, self.used = head, latest, used
        self.clear()

    def clear(self) -> None:
        """Start a new one."""
        self.events: list[Event] = []
        self.new: list[Page] = []
        self.texts: dict[str, str] = {}
        # Of texts that are excerpts, the pieces that they are made from.
        self.pieces: dict[str, Pieces] = {}
        self.budget: Budget | None = None
        # Of a branch that begins: the session that it forks from, and that one's last event.
        self.above: tuple[int, int] | None = None
        # Digests of the session's messages with the new pages; see `Batch`.
        self.digests: Digests | None = None

    @property
    def next(self) -> int:
        """Number of the next event."""
        return self.head + len(self.events) + 1

    def follows(self, info: SegmentInfo) -> bool:
        """Whether it is what comes next in the session that the store has. A store that was killed may have lost the last events,
        and have got as many others since."""
        return info.head == self.head and self.used in (None, info.used)

    @property
    def changes_state(self) -> bool:
        """Whether it has more than observations."""
        return any(event.act in STATE for event in self.events)

    @property
    def observations(self) -> Iterator[Event]:
        """Its events that change no state."""
        return (event for event in self.events if event.act not in STATE)

    def add(self, events: Iterable[Event]) -> None:
        """Append events, with the next numbers, and at times that do not run backwards."""
        self.events += in_order(events, self.next - 1, self.events[-1].time if self.events else self.latest)

    def continue_from(self, info: SegmentInfo) -> None:
        """Continue the ledger after its last event instead: others have written no more than observations, or there are only
        observations here."""
        self.latest = info.used
        if self.used is not None:
            self.used = info.used
        if info.head != self.head:
            self.head, waiting, self.events = info.head, self.events, []
            self.add(waiting)

    def halve(self) -> tuple[int, list[Event]]:
        """Remove the events, all of them observations: how many were lost by losing the older half, and the newer half."""
        old, newer, self.events = self.events[: GATHERED // 2], self.events[GATHERED // 2 :], []
        return sum(int(event.data.get("lost", 1)) if event.act is Act.NOTE else 1 for event in old), newer

    def undo(self, point: Savepoint, turn: int) -> list[Page]:
        """Undo to a savepoint. Returns the pages that are gone.

        Observations stay, as of the message `turn` that is now the last one. A compaction whose moves are undone did not
        happen.
        """
        undone = self.new[point.new :]
        observed = [
            msgspec.structs.replace(event, turn=min(event.turn, turn))
            for event in self.events[point.events :]
            if event.act not in STATE and not (event.act is Act.COMPACT and event.data.get("moves"))
        ]
        del self.events[point.events :], self.new[point.new :]
        self.add(observed)
        if not self.new:
            self.digests = None
        return undone

    def take(self) -> Pending:
        """Remove and return the whole batch; an empty one stays."""
        batch = Pending()
        batch.events, batch.new, batch.texts, batch.budget = self.events, self.new, self.texts, self.budget
        batch.pieces, batch.above, batch.digests = self.pieces, self.above, self.digests
        self.clear()
        return batch

    def put(self, batch: Pending) -> None:
        """Append a batch that was taken out to what came since."""
        self.add(batch.events)
        self.new += batch.new
        self.texts |= batch.texts
        self.pieces |= batch.pieces
        self.above, self.digests = batch.above, batch.digests

    def batch(
        self, pages: Mapping[int, Page], changed: Mapping[int, State], owns: Callable[[int], bool], *, wait: bool = True
    ) -> Batch:
        """The transaction, with the states of all pages that were moved.

        Args:
            pages: those of the window.
            changed: the states of those that the batch has moved.
            owns: whether a page has its row in this session. What became of an inherited page only the ledger says.
        """
        new = {page.id for page in self.new}
        digests = {digest for page in self.new for digest in (page.digest, page.extra) if digest}
        retired = {page for event in self.events if event.act is Act.RETIRE for page in event.pages if page > 0 and owns(page)}
        dropped = [page for event in self.events if event.act is Act.DROP for page in event.pages]
        return Batch(
            head=self.head,
            used=self.used,
            above=self.above,
            events=self.events,
            pages=self.new,
            texts={digest: self.texts[digest] for digest in digests},
            pieces={page.digest: self.pieces[page.digest] for page in self.new if page.digest in self.pieces},
            states={page: state for page, state in changed.items() if page in new or owns(page)},
            index=[page.id for page in self.new if _is_indexed(page, self.texts)],
            unindex=sorted(retired),
            erase=[page for page in dropped if owns(page)],
            inherited=[pages[page] for page in dropped if not owns(page)],
            digests=self.digests,
            wait=wait,
        )


def _is_indexed(page: Page, texts: Mapping[str, str]) -> bool:
    """Originals with words only, and nothing that was recalled or asked for (law 7). What a model wrote is new, whatever it
    cites."""
    recalled = (page.sources or page.cites) and page.role is not Role.ASSISTANT
    has_words = page.kind in INDEXED or bool(page.extra and searchable_words(texts[page.extra]))
    return page.id > 0 and has_words and not recalled and page.name not in NOT_INDEXED

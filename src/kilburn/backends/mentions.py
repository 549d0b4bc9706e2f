"""The index of mentions: which events of a ledger may name a page, and which events may have made pages from it.

An event names the pages that it happened to, a fold's are its sources, and an admission's the pages that were quoted. Thousands
of pages are a few stretches, and a stretch is a few blocks: the first level's have 64 ids, each further level's twice as many.
To find the events of one page, one block of each level is looked up. It finds some events that do not name the page, which the
caller passes over, and none too few. Sources have nodes of their own, so that the events that made pages from a page are
found without those that only happened to it or to its neighbours.

It is derived from the ledger and the pages.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set

import apsw

from kilburn.backends.connection import listed, rows, rows_of_each
from kilburn.backends.records import UNREADABLE, decode_event, decode_page
from kilburn.event import Act, Event
from kilburn.page import Page, stretches

SELECT = "SELECT node, event FROM mention WHERE segment = ?"

INSERT = "INSERT INTO mention(segment, node, event) VALUES(?, ?, ?) ON CONFLICT DO NOTHING"

LEAF = 6
"""Bits of the ids in a block of the first level."""

LEVELS = 48
"""More than enough for the largest id that a page can have."""

SHIFT = 56
"""Bits of a node's number below its level."""

SOURCE = 1 << 62
"""The bit of a node whose pages are sources."""


def event_nodes(event: Event, pages: Mapping[int, Page]) -> set[int]:
    """Return the nodes under which an event is indexed.

    Args:
        pages: the pages that were admitted with it, by id.
    """
    ids_named, sources = set[int](), set[int]()
    (sources if event.act is Act.FOLD else ids_named).update(event.pages)
    if event.act is Act.ADMIT:
        sources.update(source for page in event.pages if page in pages for source in pages[page].sources)
    by = event.data.get("by")
    if isinstance(by, int):
        ids_named.add(by)
    nodes = set[int]()
    for ids, bit in ((ids_named, 0), (sources, SOURCE)):
        for sign in (1, -1):
            if same := sorted([sign * page for page in ids if sign * page > 0]):
                nodes.update(sign * (node | bit) for node in _nodes(stretches(same)))
    return nodes


def _nodes(runs: list[int]) -> Iterator[int]:
    """Yield the fewest blocks that cover stretches of ids."""
    # A node is never 0, so that a page and its negative differ.
    for first, last in zip(runs[::2], runs[1::2], strict=True):
        level, low, high = 0, first >> LEAF, (last >> LEAF) + 1
        while low < high:
            if low & 1:
                yield (level << SHIFT | low) + 1
                low += 1
            if high & 1:
                high -= 1
                yield (level << SHIFT | high) + 1
            level, low, high = level + 1, low >> 1, high >> 1


def mentions_in(db: apsw.Connection, segment: int) -> tuple[set[tuple[int, int]], set[int]]:
    """Return the rows that the index must have according to a segment's ledger and pages, and the numbers of the unreadable
    events."""
    mentions, unread = set[tuple[int, int]](), set[int]()
    for number, body in rows(db, "SELECT number, body FROM event WHERE segment = ?", segment):
        try:
            event = decode_event(body)
            pages = _admitted(db, segment, event) if event.act is Act.ADMIT else {}
        except UNREADABLE:
            unread.add(number)
            continue
        mentions.update((node, number) for node in event_nodes(event, pages))
    return mentions, unread


def _admitted(db: apsw.Connection, segment: int, event: Event) -> dict[int, Page]:
    select = "SELECT record FROM page WHERE segment = ? AND id = ?"
    pages = [decode_page(record) for (record,) in rows_of_each(db, select, [(segment, page) for page in event.pages])]
    return {page.id: page for page in pages}


def fill(db: apsw.Connection, segments: Iterable[int]) -> None:
    """Rebuild the index of these segments."""
    for segment in segments:
        db.execute("DELETE FROM mention WHERE segment = ?", (segment,))
        db.executemany(INSERT, [(segment, *mention) for mention in sorted(mentions_in(db, segment)[0])])


def events_with_nodes(db: apsw.Connection, segment: int, nodes: Iterable[int]) -> list[int]:
    """Return the numbers of the events with any of these nodes, in order."""
    select = "SELECT DISTINCT event FROM json_each(?) CROSS JOIN mention ON segment = ? AND node = value ORDER BY event"
    return [event for (event,) in rows(db, select, listed(nodes), segment)]


def page_nodes(pages: Iterable[int]) -> list[int]:
    """Return the nodes of events that may name any of these pages."""
    sources = source_nodes(pages)
    return sorted([*sources, *(node - SOURCE if node > 0 else node + SOURCE for node in sources)])


def source_nodes(pages: Iterable[int]) -> list[int]:
    """Return the nodes of events that may have derived pages from any of these pages."""
    nodes: list[int] = []
    ids = list(pages)
    for sign in (1, -1):
        # Many pages lie in few blocks, and in fewer of each further level.
        blocks = {sign * page >> LEAF for page in ids if sign * page > 0}
        for level in range(LEVELS if blocks else 0):
            first = (level << SHIFT) + 1 | SOURCE  # see `_nodes`
            nodes += [sign * (first + block) for block in blocks]
            blocks = {block >> 1 for block in blocks}
    return sorted(nodes)


def made_by(events: Iterable[Event], pages: Set[int]) -> set[int]:
    """Return the pages that these events admitted or folded from any of these pages, without these pages themselves."""
    derived = set[int]()
    for event in events:
        if event.act is Act.ADMIT:
            derived.update(event.pages)
        elif event.act is Act.FOLD and "fold" in event.data and not pages.isdisjoint(event.pages):
            derived.add(event.data["fold"])
    return derived - pages

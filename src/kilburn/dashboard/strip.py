"""The window over time: a column for each prompt, with its pages stacked in the order of the prompt.

A page at the same place in the next prompt continues as the same block, so a stable prefix gives a quiet picture.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import msgspec

from kilburn.dashboard.marks import TooFar, weight
from kilburn.dashboard.reading import MAX_MOVED, LedgerReader
from kilburn.event import Act, Event
from kilburn.kernel.prompts import in_common, pieces
from kilburn.kernel.render import items
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.message import Kind, Role
from kilburn.page import Page

SHADES = {
    "system": "system",
    "user": "user",
    "assistant": "assistant",
    "reasoning": "reasoning",
    "call": "tool call",
    "result": "tool result",
    "fold": "summary",
    "excerpt": "excerpt",
    "other": "other",
    "handle": "handle or stub of evicted pages",
    "plain": "not drawn page by page",
}
"""The meanings of the colours."""

PROMPTS = (20, 60, 120)
"""Choices for the number of prompts in a picture."""

MAX_SAMPLES = 120
"""Columns in the overview of a whole session."""

MAX_BLOCKS = 1_200
"""Blocks in a picture. Small neighbours of one colour are joined until there are no more."""

MIN_SHARE = 1 / 160
"""Share of the picture's height below which a block is joined with its neighbours."""

MAX_ITEMS = 60_000
"""Prompt items that one picture reads. Of very wide windows, only the newest prompts are drawn page by page."""

MAX_UNMIXED = 400
"""Items of one prompt above which small neighbours of different colours are joined, too."""


def page_shade(page: Page | None, instead: str = "") -> str:
    """Return the colour of an item, a key of `SHADES`."""
    if page is None or instead:
        return "handle"
    if page.kind is Kind.REASONING:
        return "reasoning"
    if page.kind in (Kind.CALL, Kind.RESULT, Kind.FOLD, Kind.EXCERPT):
        return str(page.kind)
    if page.kind is Kind.TEXT:
        return "result" if page.role is Role.TOOL else str(page.role)
    return "other"


class PromptItem(msgspec.Struct, frozen=True, gc=False):
    """An item of a prompt. `page` is its page number, 0 for a handle; `text` describes a handle."""

    key: tuple[int, int, int]
    page: int
    shade: str
    tokens: int
    text: str = ""


class Column(msgspec.Struct, kw_only=True):
    """One prompt. `cached` are the tokens that a prefix cache had of it, None if unknown."""

    event: int
    turn: int
    time: float
    tokens: int
    window: int
    reprocessed: int
    cached: int | None = None
    pieces: tuple[PromptItem, ...] = ()


class Rectangle(msgspec.Struct, kw_only=True):
    """A rectangle that covers the columns `left` to `right`, exclusive, and `low` to `high` tokens, with its first and last
    page."""

    left: int
    right: int
    low: int
    high: int
    shade: str
    pages: tuple[int, int]
    tokens: int
    text: str


class Strip(msgspec.Struct, kw_only=True):
    """A picture of height `top`, in tokens. `split` tells whether the items of the prompts are known, `share` how much of the
    replay for that is done; `older` and `newer` are events for the pages before and after."""

    columns: list[Column]
    blocks: list[Rectangle]
    top: int
    split: bool = True
    share: float = 1.0
    older: int = 0
    newer: int = 0


def prompt_items(window: WindowState) -> tuple[PromptItem, ...]:
    """Return the items of the prompt of a window, in order."""
    prompt = items(window)
    result = []
    for (key, page, instead), (_, tokens) in zip(prompt, pieces(window, prompt), strict=True):
        number = page.id if page is not None else 0
        result.append(PromptItem(key, number, page_shade(page, instead), tokens, instead if page is None else ""))
    return tuple(result)


def strip(reading: LedgerReader, session: Session, until: int = 0, limit: int = PROMPTS[1]) -> Strip:
    """Return the picture of up to `limit` prompts before an event; 0 for the newest."""
    until = min(until or session.ledger.head, session.ledger.head)
    events, begin = _prompts(reading, session, until, limit + 1)
    ships = [event for event in events if event.act is Act.SHIP]
    columns = [_column(event) for event in ships]
    picture = Strip(columns=columns, blocks=[], top=0)
    if ships:
        try:
            first, last = _first_drawn(session, events, ships), ships[-1].number
            windows = reading.windows(session, first - 1, last) if first <= last else ()
            items_by_event = {event.number: prompt_items(window) for event, window in windows if event.act is Act.SHIP}
            for column in columns:
                column.pieces = items_by_event.get(column.event) or _undrawn(column)
            for previous, column in pairwise(columns):
                if previous.event in items_by_event:
                    column.cached = kept(previous.pieces, column.pieces)
        except TooFar as far:
            picture.split, picture.share = False, far.share
    if len(columns) > limit or (columns and begin > 0):
        picture.older = columns[-limit:][0].event - 1
    picture.columns = columns = columns[-limit:]
    picture.newer = until if until < session.ledger.head else 0
    picture.top = max((max(column.tokens, min(column.window, 2 * column.tokens)) for column in columns), default=0)
    picture.blocks = list(blocks(columns, picture.top)) if picture.split else []
    return picture


def _first_drawn(session: Session, events: Sequence[Event], ships: Sequence[Event]) -> int:
    """Return the event of the first prompt that is drawn page by page, so that neither the items nor the moved pages are too
    many. It is after the last prompt if even that has too many items."""
    drawn, moved_pages = MAX_ITEMS // max(1, len(session.window.shown)), 0
    first = ships[-1].number + (not drawn)
    for event in reversed(events):
        if event.act is Act.SHIP and drawn:
            first, drawn = event.number, drawn - 1
        moved_pages += weight(event)
        if moved_pages > MAX_MOVED:
            break
    return first


def _undrawn(column: Column) -> tuple[PromptItem, ...]:
    """Return the item that represents a prompt that is not drawn page by page."""
    return (PromptItem((0, 0, 0), 0, "plain", column.tokens),)


def _prompts(reading: LedgerReader, session: Session, until: int, limit: int) -> tuple[list[Event], int]:
    """Return the events up to `until` with up to `limit` prompts, and the event before the first of them."""
    stretch: list[Event] = []
    end, size = until, 4 * limit
    while end > 0 and sum(event.act is Act.SHIP for event in stretch) < limit:
        begin = max(0, end - size)
        stretch = [*reading.stretch(session.number, begin, end), *stretch]
        end, size = begin, min(2 * size, 2_000)
        if len(stretch) > 20_000:
            break
    ships = [at for at, event in enumerate(stretch) if event.act is Act.SHIP]
    start = ships[-limit] if len(ships) > limit else 0
    return stretch[start:], end + start


def _column(event: Event) -> Column:
    reprocessed, window = event.data.get("again", 0), event.data.get("window", 0)
    return Column(
        event=event.number,
        turn=event.turn,
        time=event.time,
        tokens=event.tokens,
        window=window if isinstance(window, int) else 0,
        reprocessed=reprocessed if isinstance(reprocessed, int) else 0,
    )


def kept(previous: Sequence[PromptItem], current: Sequence[PromptItem]) -> int:
    """Return the tokens of the common prefix of two prompts."""
    return sum(piece.tokens for piece in current[: in_common(previous, current)])


def blocks(columns: Sequence[Column], top: int) -> Iterator[Rectangle]:
    """Yield the items of all columns as rectangles. An item at the same place in consecutive columns is one rectangle."""
    min_height = max(1.0, top * MIN_SHARE)
    mixed = any(len(column.pieces) > MAX_UNMIXED for column in columns)
    while True:
        rectangles = list(_blocks(columns, min_height, mixed=mixed))
        if len(rectangles) <= MAX_BLOCKS or min_height > top:
            return iter(rectangles)
        min_height, mixed = 2 * min_height, True


def _blocks(columns: Sequence[Column], min_height: float, *, mixed: bool) -> Iterator[Rectangle]:
    going: dict[tuple[int, int, str, int, int], Rectangle] = {}
    for at, column in enumerate(columns):
        current = {}
        for low, high, shade, first, last, text in _joined(column.pieces, min_height, mixed=mixed):
            key = low, high, shade, first, last
            rectangle = going.pop(key, None)
            if rectangle is None:
                rectangle = Rectangle(
                    left=at, right=at + 1, low=low, high=high, shade=shade, pages=(first, last), tokens=high - low, text=text
                )
            else:
                rectangle.right = at + 1
            current[key] = rectangle
        yield from going.values()
        going = current
    yield from going.values()


def _joined(pieces: Sequence[PromptItem], min_height: float, *, mixed: bool) -> Iterator[tuple[int, int, str, int, int, str]]:
    """Yield the items of a column from the bottom up, small neighbours of one colour as one. With `mixed`, neighbours of
    several colours are joined, too, and get the colour of most of their tokens."""
    low = high = 0
    shade, first, last, text = "", 0, 0, ""
    sizes: dict[str, int] = {}
    for piece in pieces:
        joins = (mixed or piece.shade == shade) and high > low and high - low < min_height and piece.tokens < min_height
        if not joins:
            if high > low:
                yield low, high, max(sizes, key=sizes.__getitem__), first, last, "and others" if len(sizes) > 1 else text
            low, shade, first, text, sizes = high, piece.shade, piece.page, piece.text, {}
        high, last = high + piece.tokens, piece.page
        sizes[piece.shade] = sizes.get(piece.shade, 0) + piece.tokens
    if high > low:
        yield low, high, max(sizes, key=sizes.__getitem__), first, last, "and others" if len(sizes) > 1 else text


def overview(reading: LedgerReader, session: Session) -> list[Column]:
    """Return a sample of a session's prompts, evenly distributed, without replaying the ledger."""
    head = session.ledger.head
    if head <= 8 * MAX_SAMPLES:
        ships = [event for event in reading.stretch(session.number, 0, head) if event.act is Act.SHIP]
        every = max(1, -(-len(ships) // MAX_SAMPLES))
        return [_column(event) for event in ships[every - 1 :: every]]
    samples: dict[int, Column] = {}
    for at in range(1, MAX_SAMPLES + 1):
        near = islice(reading.backend.events(session.number, max(0, head * at // MAX_SAMPLES - 12)), 12)
        ship = next((event for event in near if event.act is Act.SHIP), None)
        if ship is not None:
            samples[ship.number] = _column(ship)
    return list(samples.values())

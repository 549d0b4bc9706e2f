"""The window over time: a column for each prompt, pages from the bottom up in the order of the prompt.

A page that stands at the same place in the next prompt goes on as the same block: where the prefix is kept, the picture is calm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, pairwise

import msgspec

from kilburn.dashboard.marks import TooFar, weight
from kilburn.dashboard.reading import MOVED, LedgerReader
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
    "handle": "handle or stub of what is out",
    "plain": "not drawn page by page",
}
"""What the colours of a picture mean."""

PROMPTS = (20, 60, 120)
"""How many prompts a picture may have."""

SAMPLES = 120
"""Columns of the picture of a whole session."""

BLOCKS = 1_200
"""Blocks that a picture has at most; smaller neighbours of one colour become one before."""

SMALL = 1 / 160
"""The share of the picture's height under which a block is joined with its neighbours."""

PIECES = 60_000
"""Pieces of prompts that one picture looks at. Of very wide windows only the newest prompts are drawn page by page."""

CROWD = 400
"""Pieces of one prompt from which on small neighbours are joined whatever their colours."""


def shade_of(page: Page | None, instead: str = "") -> str:
    """The colour of something in a prompt: a key of `SHADES`."""
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
    """What stands in one prompt: `page` is its number, 0 for a handle; `text` names it without its words."""

    key: tuple[int, int, int]
    page: int
    shade: str
    tokens: int
    text: str = ""


class Column(msgspec.Struct, kw_only=True):
    """One prompt. `cached` is what a cache of the prefix had of it; None where that is not known."""

    event: int
    turn: int
    time: float
    tokens: int
    window: int
    again: int
    cached: int | None = None
    pieces: tuple[PromptItem, ...] = ()


class Rectangle(msgspec.Struct, kw_only=True):
    """A rectangle: from column `left` up to `right`, from `low` up to `high` tokens; its first and last page."""

    left: int
    right: int
    low: int
    high: int
    shade: str
    pages: tuple[int, int]
    tokens: int
    text: str


class Strip(msgspec.Struct, kw_only=True):
    """A picture: `top` is its height in tokens; `split` says whether it is known what stood in the prompts, `share` how much of
    the work for that is done; `older` and `newer` are events to look up to."""

    columns: list[Column]
    blocks: list[Rectangle]
    top: int
    split: bool = True
    share: float = 1.0
    older: int = 0
    newer: int = 0


def pieces_of(window: WindowState) -> tuple[PromptItem, ...]:
    """What stands in the prompt now, in order."""
    shown = items(window)
    found = []
    for (key, page, instead), (_, tokens) in zip(shown, pieces(window, shown), strict=True):
        number = page.id if page is not None else 0
        found.append(PromptItem(key, number, shade_of(page, instead), tokens, instead if page is None else ""))
    return tuple(found)


def strip(reading: LedgerReader, session: Session, until: int = 0, many: int = PROMPTS[1]) -> Strip:
    """The last so many prompts up to an event; 0 for the last one of all."""
    until = min(until or session.ledger.head, session.ledger.head)
    events, begin = _prompts(reading, session, until, many + 1)
    ships = [event for event in events if event.act is Act.SHIP]
    columns = [_column(event) for event in ships]
    made = Strip(columns=columns, blocks=[], top=0)
    if ships:
        try:
            first, last = _first_drawn(session, events, ships), ships[-1].number
            windows = reading.windows(session, first - 1, last) if first <= last else ()
            shown = {event.number: pieces_of(window) for event, window in windows if event.act is Act.SHIP}
            for column in columns:
                column.pieces = shown.get(column.event) or _undrawn(column)
            for before, column in pairwise(columns):
                if before.event in shown:
                    column.cached = kept(before.pieces, column.pieces)
        except TooFar as far:
            made.split, made.share = False, far.share
    if len(columns) > many or (columns and begin > 0):
        made.older = columns[-many:][0].event - 1
    made.columns = columns = columns[-many:]
    made.newer = until if until < session.ledger.head else 0
    made.top = max((max(column.tokens, min(column.window, 2 * column.tokens)) for column in columns), default=0)
    made.blocks = list(blocks(columns, made.top)) if made.split else []
    return made


def _first_drawn(session: Session, events: Sequence[Event], ships: Sequence[Event]) -> int:
    """The event of the first prompt that is drawn page by page: of so few that neither their pieces nor the pages that came
    between them are too many. It is behind all of them where one prompt has too many."""
    drawn, moved = PIECES // max(1, len(session.window.shown)), 0
    first = ships[-1].number + (not drawn)
    for event in reversed(events):
        if event.act is Act.SHIP and drawn:
            first, drawn = event.number, drawn - 1
        moved += weight(event)
        if moved > MOVED:
            break
    return first


def _undrawn(column: Column) -> tuple[PromptItem, ...]:
    """What stands for a prompt that is not drawn page by page."""
    return (PromptItem((0, 0, 0), 0, "plain", column.tokens),)


def _prompts(reading: LedgerReader, session: Session, until: int, many: int) -> tuple[list[Event], int]:
    """Events up to one, so that so many prompts are among them, as far as there are; and the event before the first."""
    found: list[Event] = []
    after, size = until, 4 * many
    while after > 0 and sum(event.act is Act.SHIP for event in found) < many:
        begin = max(0, after - size)
        found = [*reading.stretch(session.number, begin, after), *found]
        after, size = begin, min(2 * size, 2_000)
        if len(found) > 20_000:
            break
    ships = [at for at, event in enumerate(found) if event.act is Act.SHIP]
    start = ships[-many] if len(ships) > many else 0
    return found[start:], after + start


def _column(event: Event) -> Column:
    again, window = event.data.get("again", 0), event.data.get("window", 0)
    return Column(
        event=event.number,
        turn=event.turn,
        time=event.time,
        tokens=event.tokens,
        window=window if isinstance(window, int) else 0,
        again=again if isinstance(again, int) else 0,
    )


def kept(before: Sequence[PromptItem], now: Sequence[PromptItem]) -> int:
    """Tokens that two prompts have in common at their beginning."""
    return sum(piece.tokens for piece in now[: in_common(before, now)])


def blocks(columns: Sequence[Column], top: int) -> Iterator[Rectangle]:
    """The pieces of all columns as rectangles, each as wide as it stands at the same place."""
    least = max(1.0, top * SMALL)
    mixed = any(len(column.pieces) > CROWD for column in columns)
    while True:
        found = list(_blocks(columns, least, mixed=mixed))
        if len(found) <= BLOCKS or least > top:
            return iter(found)
        least, mixed = 2 * least, True


def _blocks(columns: Sequence[Column], least: float, *, mixed: bool) -> Iterator[Rectangle]:
    going: dict[tuple[int, int, str, int, int], Rectangle] = {}
    for at, column in enumerate(columns):
        now = {}
        for low, high, shade, first, last, text in _joined(column.pieces, least, mixed=mixed):
            key = low, high, shade, first, last
            known = going.pop(key, None)
            if known is None:
                known = Rectangle(
                    left=at, right=at + 1, low=low, high=high, shade=shade, pages=(first, last), tokens=high - low, text=text
                )
            else:
                known.right = at + 1
            now[key] = known
        yield from going.values()
        going = now
    yield from going.values()


def _joined(pieces: Sequence[PromptItem], least: float, *, mixed: bool) -> Iterator[tuple[int, int, str, int, int, str]]:
    """Pieces from the bottom up; small neighbours of one colour are one. Where they are `mixed`, so are those of several colours,
    and what they become has the colour of most of it."""
    low = high = 0
    shade, first, last, text = "", 0, 0, ""
    most: dict[str, int] = {}
    for piece in pieces:
        joins = (mixed or piece.shade == shade) and high > low and high - low < least and piece.tokens < least
        if not joins:
            if high > low:
                yield low, high, max(most, key=most.__getitem__), first, last, "and others" if len(most) > 1 else text
            low, shade, first, text, most = high, piece.shade, piece.page, piece.text, {}
        high, last = high + piece.tokens, piece.page
        most[piece.shade] = most.get(piece.shade, 0) + piece.tokens
    if high > low:
        yield low, high, max(most, key=most.__getitem__), first, last, "and others" if len(most) > 1 else text


def overview(reading: LedgerReader, session: Session) -> list[Column]:
    """Prompts of the whole session, so many at most, evenly spread; nothing is replayed."""
    head = session.ledger.head
    if head <= 8 * SAMPLES:
        ships = [event for event in reading.stretch(session.number, 0, head) if event.act is Act.SHIP]
        every = max(1, -(-len(ships) // SAMPLES))
        return [_column(event) for event in ships[every - 1 :: every]]
    found: dict[int, Column] = {}
    for at in range(1, SAMPLES + 1):
        near = islice(reading.backend.events(session.number, max(0, head * at // SAMPLES - 12)), 12)
        ship = next((event for event in near if event.act is Act.SHIP), None)
        if ship is not None:
            found[ship.number] = _column(ship)
    return list(found.values())

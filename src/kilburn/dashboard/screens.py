"""The screens: for each, the name of its template and what that shows. A screen takes a reading of the store and a query.

Each shows at most `SHOWN` rows, and links to the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.backend import SegmentKind
from kilburn.dashboard.calls import calls_in, code_in, run_of, tree_of
from kilburn.dashboard.changes import ahead
from kilburn.dashboard.kv import held_of, lines_of, removed_files
from kilburn.dashboard.leaving import HANDLE, by_reason, could_leave, reason
from kilburn.dashboard.marks import TooFar
from kilburn.dashboard.memories import collection_of, facts_of
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.strip import PROMPTS, SHADES, Column, blocks, kept, overview, pieces_of, shade_of, strip
from kilburn.errors import Forgotten, SpecError, UnknownAddress
from kilburn.event import Act, Event
from kilburn.kernel.receipts import Receipt
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.message import Trust
from kilburn.page import Page, Place, address_of, parse_address
from kilburn.prices import PRICES

SHOWN = 50
"""Rows of one screen."""

LETTERS = 20_000
"""Characters of one text that a screen shows."""

BRIEF = 600
"""Characters of a text that stands among others."""

CANDIDATES = 25
"""Groups of pages that could leave, which the screen of a window lists."""

Query = Mapping[str, str]
Screen = Callable[[LedgerReader, Query], tuple[str, dict[str, Any]]]


def number_in(query: Query, name: str, otherwise: int) -> int:
    """A whole number of a query, 0 or more; `otherwise` where it is none."""
    given = query.get(name, "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) < 16 else otherwise


def _opened(reading: LedgerReader, query: Query) -> tuple[Session, dict[str, Any]]:
    """The session that a query names, and what every screen of a session shows."""
    session = reading.session(query.get("name", ""))
    return session, {"session": session, "row": reading.row(reading.info(session.name)), "name": session.name}


def sessions(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """All sessions, those with an alarm first."""
    infos = reading.sessions()
    words = query.get("q", "").casefold()
    chosen = [info for info in infos if words in info.name.casefold()]
    rows, waiting = reading.rows(chosen)
    begin = number_in(query, "from", 0)
    return "sessions.html", {
        "rows": rows[begin : begin + SHOWN],
        "begin": begin,
        "shown": SHOWN,
        "found": len(rows),
        "alarmed": sum(bool(row.alarms) for row in rows),
        "pages": sum(row.stats.pages for row in rows if row.stats is not None),
        "tokens": sum(row.stats.tokens_seen for row in rows if row.stats is not None),
        "all": len(infos),
        "waiting": waiting,
        "words": query.get("q", ""),
    }


def over_time(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """The window over time."""
    session, shown = _opened(reading, query)
    many = number_in(query, "many", PROMPTS[1])
    many = many if many in PROMPTS else PROMPTS[1]
    until = number_in(query, "until", 0)
    picture = strip(reading, session, until, many)
    whole = overview(reading, session)
    columns = picture.columns
    return "strip.html", shown | {
        "picture": picture,
        "legend": legend(columns),
        "whole": whole,
        "whole_top": max((max(column.tokens, min(column.window, 2 * column.tokens)) for column in whole), default=1),
        "many": many,
        "choices": PROMPTS,
        "until": until,
        "moves": moves_between(reading, session, columns),
    }


def legend(columns: Sequence[Column]) -> list[tuple[str, str]]:
    """The colours that a picture has, with their meaning."""
    there = {piece.shade for column in columns for piece in column.pieces}
    return [(shade, words) for shade, words in SHADES.items() if shade in there]


def moves_between(reading: LedgerReader, session: Session, columns: Sequence[Column]) -> list[Receipt]:
    """The receipts of what happened between the prompts of a picture, newest first."""
    if not columns:
        return []
    found, _ = reading.receipts(session.number, columns[-1].event, SHOWN)
    return [receipt for receipt in found if receipt.events[1] > columns[0].event]


def window(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """The window now, or as it was in a prompt: by kind, by age and by reason; what could leave now, at which price."""
    session, shown = _opened(reading, query)
    # Another request may bring the session up to date meanwhile.
    with session.lock:
        return _window_of(reading, session, query, shown)


def _window_of(reading: LedgerReader, session: Session, query: Query, shown: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    at = number_in(query, "at", 0)
    at = at if 0 < at < session.head else 0
    event: Event | None = None
    if at:
        try:
            found = next(iter(reading.windows(session, at - 1, at)), None)
        except TooFar as far:
            return "later.html", shown | {"share": far.share}
        if found is None:
            raise SpecError(f"no window is known at event {at} of {session.name!r}", advice="look at a later one")
        event, there = found
    else:
        there = session.window
    pieces = pieces_of(there)
    pages = {piece.page: there.priced(piece.page) for piece in pieces if piece.page}
    use, turn = sum(piece.tokens for piece in pieces), there.turn
    kinds = Counter[str]()
    reasons = Counter[str]()
    ages = Counter[str]()
    why: dict[int, str] = {}
    held = set(there.held())
    awaited = {member for call in there.awaited() for member in there.group(call)}
    for piece in pieces:
        kinds[piece.shade] += piece.tokens
        if not piece.page:
            reasons[HANDLE] += piece.tokens
            continue
        page = pages[piece.page]
        why[piece.page] = words = reason(page, piece, there.states[page.id].pinned, held, awaited)
        reasons[words] += piece.tokens
        ages[_age(turn - page.message if page.message else None)] += piece.tokens
    begin = number_in(query, "from", 0)
    groups = [] if at else could_leave(session, pieces)
    return "window.html", shown | {
        "at": at,
        "event": event,
        "turn": turn,
        "use": use,
        "fill": shown["row"].fill if event is None else _fill_of(event, use),
        "kinds": [(shade, SHADES[shade], kinds[shade]) for shade in SHADES if kinds[shade]],
        "reasons": list(by_reason(reasons.most_common(), why, groups, pieces)),
        "ages": [(words, ages[words]) for words in AGES if ages[words]],
        "rows": [(piece, pages.get(piece.page), why.get(piece.page, "")) for piece in pieces[begin : begin + SHOWN]],
        "begin": begin,
        "shown": SHOWN,
        "found": len(pieces),
        "leaving": groups[:CANDIDATES],
        "groups": len(groups),
        "whys": why,
        "whats": {number: what(there, page) for number, page in pages.items()},
    }


AGES = ("the newest message", "up to 10 messages", "up to 100 messages", "older", "made, of any age")


def _age(messages: int | None) -> str:
    if messages is None:
        return AGES[4]
    return AGES[0] if messages <= 0 else AGES[1] if messages <= 10 else AGES[2] if messages <= 100 else AGES[3]


def what(window: WindowState, page: Page) -> str:
    """One line on a page: its label, or that of the call that it answers."""
    if page.label or not page.answers:
        return page.label
    asked = window.pages.get(page.answers)
    return asked.label if asked is not None else ""


def _fill_of(event: Event, use: int) -> float | None:
    """The share of the room for pages that they took after an event; None where it was no prompt."""
    room = event.data.get("window")
    return use / room if isinstance(room, int) and room else None


def receipts(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """What each compaction took out, newest first."""
    session, shown = _opened(reading, query)
    until = min(number_in(query, "until", session.head), session.head)
    found, older = reading.receipts(session.number, until, SHOWN)
    return "receipts.html", shown | {"receipts": found, "older": older, "until": until}


def receipt(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """One receipt: the window before and after, side by side, and the pages that left."""
    session, shown = _opened(reading, query)
    at = number_in(query, "event", 0)
    if not 0 < at <= session.head:
        raise SpecError(f"there is no event {at} in {session.name!r}", advice="see its receipts")
    made = next(iter(reading.receipts(session.number, at, 1)[0]), None)
    if made is None or made.events[1] != at:
        raise SpecError(f"event {at} of {session.name!r} ends no compaction", advice="see its receipts")
    begin = made.events[0] - 1
    sides: list[Column] = []
    share = None
    try:
        for event, there in reading.windows(session, max(0, begin - 1), at):
            if event.number in (begin, at):
                pieces = pieces_of(there)
                sides.append(
                    Column(
                        event=event.number,
                        turn=event.turn,
                        time=event.time,
                        tokens=sum(piece.tokens for piece in pieces),
                        window=0,
                        again=0,
                        pieces=pieces,
                    )
                )
    except TooFar as far:
        share = far.share
    left, folds = _named(session, made.left), _named(session, made.folds + made.brought)
    top = max((side.tokens for side in sides), default=1)
    gone = {page.id for page in left}
    pictures = [list(blocks([side], top)) for side in sides]
    return "receipt.html", shown | {
        "receipt": made,
        "sides": list(zip(("before", "after"), sides, pictures, strict=False)),
        "share": share,
        "top": top,
        "gone": gone,
        "same": kept(sides[0].pieces, sides[1].pieces) if len(sides) == 2 else None,
        "legend": legend(sides),
        "left": [
            (page, session.window.states[page.id].at, what(session.window, page), text_of(session, page, BRIEF))
            for page in left[:SHOWN]
        ],
        "more": len(left) - SHOWN,
        "folds": [(page, text_of(session, page, BRIEF * 4)) for page in folds[:SHOWN]],
    }


def _named(session: Session, addresses: Sequence[str]) -> list[Page]:
    """The pages at some addresses, those that were forgotten too, so many at most as a screen needs."""
    found: list[Page] = []
    for address in addresses:
        first, last = parse_address(address)
        for number in range(first, last + 1):
            if number in session.window.pages:
                found.append(session.window.pages[number])
    return found


def text_of(session: Session, page: Page, most: int) -> tuple[str, int]:
    """The beginning of a page's text, and how many characters there are more; -1 where it was forgotten."""
    try:
        text = session.text(page.id)
    except Forgotten:
        return "", -1
    return text[:most], max(0, len(text) - most)


def transcript(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """All that was said, whole, wherever it is now; the newest pages unless a first one is named."""
    session, shown = _opened(reading, query)
    window = session.window
    begin = number_in(query, "from", 0) or max(1, window.last - SHOWN + 1)
    numbers = [number for number in range(begin, min(begin + SHOWN, window.last + 1)) if number in window.states]
    window.pages.fetch(numbers)
    there = [window.pages[number] for number in numbers]
    session.fetch(one for one in there if window.at(one.id) is not Place.DROPPED)
    return "transcript.html", shown | {
        "rows": [(one, window.at(one.id), what(window, one), text_of(session, one, BRIEF * 4)) for one in there],
        "begin": begin,
        "last": window.last,
        "shown": SHOWN,
    }


def page(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """A page's life: what it says, where it is, and all that happened to it."""
    session, shown = _opened(reading, query)
    number = _numbered(session, query.get("address", ""))
    there, state = session.window.pages[number], session.window.states[number]
    begin = number_in(query, "from", 0)
    text, more = _part(session, there, begin)
    events = reading.naming(session, number, there.sources)
    owner = session.owner(number)
    cited = reading.backend.citing(owner, [number])
    names = {info.number: info.name for info in reading.backend.segments()} if cited or there.cites else {}
    return "page.html", shown | {
        "page": there,
        "state": state,
        "trust": Trust(there.trust).name.lower(),
        "shade": shade_of(there),
        "text": text,
        "begin": begin,
        "more": more,
        "letters": LETTERS,
        "events": [(event, deed(event, number)) for event in events[-SHOWN * 2 :]],
        "earlier": max(0, len(events) - SHOWN * 2),
        "life": life(events, number, session.turn),
        "made": [(names.get(segment, "?"), address_of(other), segment == session.number) for segment, other in cited[:SHOWN]],
        "cites": [(names.get(segment, "?"), address_of(other)) for segment, other in there.cites[:SHOWN]],
        "sources": [address_of(source) for source in there.sources[:SHOWN]],
        "before": _beside(session, number, -1),
        "after": _beside(session, number, 1),
    }


def _numbered(session: Session, address: str) -> int:
    first, last = parse_address(address)
    if first != last:
        raise UnknownAddress(f"{address[:80]!r} names several pages", advice="give one, such as p17")
    if first not in session.window.pages or first not in session.window.states:
        raise UnknownAddress(f"there is no page {address[:80]!r} in {session.name!r}", advice="see its window")
    return first


def _part(session: Session, page: Page, begin: int) -> tuple[str, int]:
    """A part of a page's text, and how many characters come behind it; -1 where it was forgotten."""
    try:
        text = session.text(page.id)
    except Forgotten:
        return "", -1
    return text[begin : begin + LETTERS], max(0, len(text) - begin - LETTERS)


def _beside(session: Session, number: int, step: int) -> str:
    """The address of the page before or behind, or ""."""
    other = number + (step if number > 0 else -step)
    return address_of(other) if other and (other > 0) == (number > 0) and other in session.window.states else ""


DEEDS = {
    Act.ADMIT: "admitted",
    Act.LOAD: "came back",
    Act.EVICT: "evicted",
    Act.FOLD: "folded",
    Act.RETIRE: "retired",
    Act.RESTORE: "accepted",
    Act.DROP: "forgotten",
    Act.PIN: "pinned",
    Act.UNPIN: "unpinned",
    Act.RATE: "rated",
    Act.SEARCH: "found by a search",
}


def deed(event: Event, page: int) -> str:
    """What an event did to a page, in words."""
    if event.act is Act.FAULT:
        return "recalled, a fault" if page in _asked(event)["missed"] else "recalled, a hit"
    if event.act is Act.FOLD and event.data.get("fold") == page:
        return "made"
    if event.act is Act.FOLD and not event.data.get("cover", event.pages):
        return "shown again in a copy"
    to = next((place for place, pages in event.data.get("to", {}).items() if page in pages), "")
    words = DEEDS.get(event.act, str(event.act))
    return f"{words}, a stub stays" if to == Place.STUB else words


class Stay(msgspec.Struct, frozen=True):
    """Where a page was, from one turn to another."""

    place: str
    begin: int
    end: int


def life(events: Sequence[Event], page: int, turn: int) -> list[Stay]:
    """Where a page was, over the turns of its session."""
    found: list[tuple[str, int]] = []
    for event in events:
        places = event.data.get("to", {})
        to = next((place for place, pages in places.items() if page in pages), None)
        if event.act is Act.FOLD and event.data.get("fold") == page:
            to = "in"
        if to is not None and (not found or found[-1][0] != to):
            found.append((str(to), event.turn))
    if not found:
        return []
    ends = [*(begin for _, begin in found[1:]), max(turn, found[-1][1] + 1)]
    return [Stay(place, begin, max(end, begin)) for (place, begin), end in zip(found, ends, strict=True)]


def faults(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """What was recalled and searched, newest first."""
    session, shown = _opened(reading, query)
    until = min(number_in(query, "until", session.head), session.head)
    found, older = reading.faults(session.number, until, SHOWN)
    return "faults.html", shown | {
        "rows": [(event, _asked(event)) for event in found],
        "older": older if older and found else 0,
        "until": until,
    }


def _asked(event: Event) -> dict[str, Any]:
    missed = event.data.get("missed", ())
    return {
        "missed": {page for page in missed if isinstance(page, int)} if isinstance(missed, list | tuple) else set(),
        "pages": [address_of(page) for page in event.pages[:12]],
        "more": max(0, len(event.pages) - 12),
    }


def prices(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """The tokens that a session's prompts took, and their price by each table."""
    _, shown = _opened(reading, query)
    stats = shown["row"].stats
    again, fresh = (stats.tokens_reprefilled, stats.tokens_new) if stats else (0, 0)
    cached = max(0, stats.tokens_shipped - again - fresh) if stats else 0
    return "prices.html", shown | {
        "cached": cached,
        "tables": [
            (name, (cached * table.cached + (again + fresh) * table.written) / 1e6, again * (table.written - table.cached) / 1e6)
            for name, table in PRICES.items()
        ],
    }


def branches(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """The branches of a session, as a tree: what they may spend, what they spent, and what they returned."""
    session, shown = _opened(reading, query)
    rows, found = tree_of(reading, session, SHOWN)
    fork = session.branches.forked
    return "branches.html", shown | {
        "rows": rows,
        "more": found - len(rows),
        "parent": session.name.rpartition("/")[0] if fork is not None else "",
        "run": run_of(reading, session, 0, 1) is not None,
    }


def calls(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """A run of a recursive model: its question, its steps, and how it ended; or the calls of one of its cells."""
    session, shown = _opened(reading, query)
    cell, begin = query.get("cell", ""), number_in(query, "from", 0)
    shown |= {"cell": cell, "begin": begin, "shown": SHOWN}
    if cell:
        return "cell.html", shown | calls_in(reading, session, cell, begin, SHOWN, BRIEF * 4)
    run = run_of(reading, session, begin, SHOWN)
    texts = {}
    for one in run["steps"] if run else ():
        for each in (one.code, one.output):
            if each is not None:
                texts[each.id] = code_in(session, each, BRIEF * 4)
    for each in (run["question"], run["answer"]) if run else ():
        if each is not None:
            texts[each.id] = text_of(session, each, BRIEF * 4)
    return "calls.html", shown | {"run": run, "texts": texts}


def cache(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Keys and values of a session: what is on the device, and what was computed again for each edit, newest first."""
    session, shown = _opened(reading, query)
    until = min(number_in(query, "until", session.head), session.head)
    found, older = reading.of_act(session.number, Act.CACHE, until, SHOWN)
    return "cache.html", shown | {
        "rows": lines_of(found),
        "older": older if found else 0,
        "until": until,
        "held": held_of(reading, session),
        "files": removed_files(reading, session),
        "use": session.use,
    }


def memory(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Facts with their validity, of one user or of all; what waits for a person; documents and notes."""
    return "memory.html", facts_of(reading, query, SHOWN)


def collection(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """The pages of a document, or of notes."""
    return "collection.html", collection_of(reading, query, SHOWN) | {"letters": BRIEF * 4}


def change(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """What would leave, two prompts compared, and what a change by hand would do."""
    session, shown = _opened(reading, query)
    return "change.html", shown | ahead(reading, session, query)


def search(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """One search over everything."""
    words = query.get("q", "")[:500]
    began = time.perf_counter()
    found: Any = reading.store().search(words, 4_000, SHOWN) if words.strip() else []
    return "search.html", {
        "words": words,
        "hits": found,
        "kinds": {info.name: info.kind for info in reading.backend.segments()} if found else {},
        "session_kind": SegmentKind.SESSION,
        "seconds": time.perf_counter() - began,
        "letters": BRIEF,
    }


SCREENS: dict[str, Screen] = {
    "/": sessions,
    "/session": over_time,
    "/window": window,
    "/transcript": transcript,
    "/receipts": receipts,
    "/receipt": receipt,
    "/page": page,
    "/faults": faults,
    "/prices": prices,
    "/branches": branches,
    "/calls": calls,
    "/cache": cache,
    "/change": change,
    "/memory": memory,
    "/collection": collection,
    "/search": search,
}
"""Each path, and its screen."""

TABS = (
    ("/session", "Over time"),
    ("/window", "Window now"),
    ("/transcript", "Transcript"),
    ("/receipts", "Receipts"),
    ("/faults", "Faults and searches"),
    ("/branches", "Branches"),
    ("/prices", "Prices"),
    ("/cache", "KV cache"),
    ("/change", "Preview and change"),
)
"""The screens of a session."""

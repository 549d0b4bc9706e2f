"""The screens. A screen takes a reader and a query, and returns the name of its template and the template's context.

Each shows at most `MAX_ROWS` rows, and links to the rest.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from kilburn.backend import SegmentKind
from kilburn.dashboard.calls import branch_tree, read_calls, read_code, read_run
from kilburn.dashboard.changes import change_screen
from kilburn.dashboard.kv import cache_changes, cache_summary, removed_files
from kilburn.dashboard.leaving import HANDLE, by_reason, could_leave, reason
from kilburn.dashboard.marks import TooFar
from kilburn.dashboard.memories import collection_screen, memory_screen
from kilburn.dashboard.reading import LedgerReader, read_text
from kilburn.dashboard.strip import PROMPTS, SHADES, Column, blocks, kept, overview, page_shade, prompt_items, strip
from kilburn.errors import SpecError, UnknownAddress
from kilburn.event import Act, Event
from kilburn.kernel.receipts import Receipt
from kilburn.kernel.session import Session
from kilburn.kernel.window import WindowState
from kilburn.message import Trust
from kilburn.page import Page, Place, address_of, parse_address
from kilburn.prices import PRICES

MAX_ROWS = 50
"""Rows of a screen."""

MAX_TEXT = 20_000
"""Characters of a single text."""

BRIEF = 600
"""Characters of a text in a list."""

CANDIDATES = 25
"""Groups of pages that the screen of a window lists as candidates for eviction."""

Query = Mapping[str, str]
Screen = Callable[[LedgerReader, Query], tuple[str, dict[str, Any]]]


def number_in(query: Query, name: str, default: int) -> int:
    """Return an integer of a query, 0 or more, or `default` if it is not one."""
    text = query.get(name, "")
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 16 else default


def last_event(query: Query, session: Session) -> int:
    """Return the event up to which a query lists events; by default the newest one."""
    return min(number_in(query, "until", session.ledger.head), session.ledger.head)


def _opened(reading: LedgerReader, query: Query) -> tuple[Session, dict[str, Any]]:
    """Open the session that a query names, and return the context of every screen of a session."""
    session = reading.session(query.get("name", ""))
    return session, {"session": session, "row": reading.row(reading.info(session.name)), "name": session.name}


def sessions(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """List all sessions, those with an alarm first."""
    infos = reading.sessions()
    words = query.get("q", "").casefold()
    chosen = [info for info in infos if words in info.name.casefold()]
    rows, waiting = reading.rows(chosen)
    begin = number_in(query, "from", 0)
    return "sessions.html", {
        "rows": rows[begin : begin + MAX_ROWS],
        "begin": begin,
        "shown": MAX_ROWS,
        "found": len(rows),
        "alarmed": sum(bool(row.alarms) for row in rows),
        "pages": sum(row.stats.pages for row in rows if row.stats is not None),
        "tokens": sum(row.stats.tokens_seen for row in rows if row.stats is not None),
        "all": len(infos),
        "waiting": waiting,
        "words": query.get("q", ""),
    }


def over_time(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the window over time."""
    session, context = _opened(reading, query)
    prompts = number_in(query, "many", PROMPTS[1])
    prompts = prompts if prompts in PROMPTS else PROMPTS[1]
    until = number_in(query, "until", 0)
    picture = strip(reading, session, until, prompts)
    whole = overview(reading, session)
    columns = picture.columns
    return "strip.html", context | {
        "picture": picture,
        "legend": legend(columns),
        "whole": whole,
        "whole_top": max((max(column.tokens, min(column.window, 2 * column.tokens)) for column in whole), default=1),
        "many": prompts,
        "choices": PROMPTS,
        "until": until,
        "moves": moves_between(reading, session, columns),
    }


def legend(columns: Sequence[Column]) -> list[tuple[str, str]]:
    """Return the colours of a picture, with their meanings."""
    shades = {piece.shade for column in columns for piece in column.pieces}
    return [(shade, words) for shade, words in SHADES.items() if shade in shades]


def moves_between(reading: LedgerReader, session: Session, columns: Sequence[Column]) -> list[Receipt]:
    """Return the receipts of compactions between the prompts of a picture, newest first."""
    if not columns:
        return []
    receipts, _ = reading.receipts(session.number, columns[-1].event, MAX_ROWS)
    return [receipt for receipt in receipts if receipt.events[1] > columns[0].event]


def window(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the window now, or after an event: by kind, age and reason, and the pages that could be evicted with their
    prices."""
    session, context = _opened(reading, query)
    # Another request may refresh the session at the same time.
    with session.lock:
        return _window_screen(reading, session, query, context)


def _window_screen(reading: LedgerReader, session: Session, query: Query, context: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    at = number_in(query, "at", 0)
    at = at if 0 < at < session.ledger.head else 0
    event: Event | None = None
    if at:
        try:
            step = next(iter(reading.windows(session, at - 1, at)), None)
        except TooFar as far:
            return "later.html", context | {"share": far.share}
        if step is None:
            raise SpecError(f"no window is known at event {at} of {session.name!r}", advice="look at a later one")
        event, state = step
    else:
        state = session.window
    pieces = prompt_items(state)
    pages = {piece.page: state.priced(piece.page) for piece in pieces if piece.page}
    use, turn = sum(piece.tokens for piece in pieces), state.turn
    kinds = Counter[str]()
    reasons = Counter[str]()
    ages = Counter[str]()
    why: dict[int, str] = {}
    request = set(state.request_shown())
    awaited = {member for call in state.awaited() for member in state.group(call)}
    for piece in pieces:
        kinds[piece.shade] += piece.tokens
        if not piece.page:
            reasons[HANDLE] += piece.tokens
            continue
        page = pages[piece.page]
        why[piece.page] = words = reason(page, piece, state.states[page.id].pinned, request, awaited)
        reasons[words] += piece.tokens
        ages[_age(turn - page.message if page.message else None)] += piece.tokens
    begin = number_in(query, "from", 0)
    groups = [] if at else could_leave(session, pieces)
    return "window.html", context | {
        "at": at,
        "event": event,
        "turn": turn,
        "use": use,
        "fill": context["row"].fill if event is None else _fill_share(event, use),
        "kinds": [(shade, SHADES[shade], kinds[shade]) for shade in SHADES if kinds[shade]],
        "reasons": list(by_reason(reasons.most_common(), why, groups, pieces)),
        "ages": [(words, ages[words]) for words in AGES if ages[words]],
        "rows": [(piece, pages.get(piece.page), why.get(piece.page, "")) for piece in pieces[begin : begin + MAX_ROWS]],
        "begin": begin,
        "shown": MAX_ROWS,
        "found": len(pieces),
        "leaving": groups[:CANDIDATES],
        "groups": len(groups),
        "whys": why,
        "whats": {number: what(state, page) for number, page in pages.items()},
    }


AGES = ("the newest message", "up to 10 messages", "up to 100 messages", "older", "made, of any age")


def _age(messages: int | None) -> str:
    if messages is None:
        return AGES[4]
    return AGES[0] if messages <= 0 else AGES[1] if messages <= 10 else AGES[2] if messages <= 100 else AGES[3]


def what(window: WindowState, page: Page) -> str:
    """Describe a page in one line, by its label or that of the call that it answers."""
    if page.label or not page.answers:
        return page.label
    call = window.pages.get(page.answers)
    return call.label if call is not None else ""


def _fill_share(event: Event, use: int) -> float | None:
    """Return the share of the room for pages that they took after an event; None if the event is no prompt."""
    room = event.data.get("window")
    return use / room if isinstance(room, int) and room else None


def receipts(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """List compactions, newest first."""
    session, context = _opened(reading, query)
    until = last_event(query, session)
    newest, older = reading.receipts(session.number, until, MAX_ROWS)
    return "receipts.html", context | {"receipts": newest, "older": older, "until": until}


def receipt(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show a compaction: the window before and after it, and the evicted pages."""
    session, context = _opened(reading, query)
    at = number_in(query, "event", 0)
    if not 0 < at <= session.ledger.head:
        raise SpecError(f"there is no event {at} in {session.name!r}", advice="see its receipts")
    compaction = next(iter(reading.receipts(session.number, at, 1)[0]), None)
    if compaction is None or compaction.events[1] != at:
        raise SpecError(f"event {at} of {session.name!r} ends no compaction", advice="see its receipts")
    begin = compaction.events[0] - 1
    sides: list[Column] = []
    share = None
    try:
        for event, state in reading.windows(session, max(0, begin - 1), at):
            if event.number in (begin, at):
                pieces = prompt_items(state)
                sides.append(
                    Column(
                        event=event.number,
                        turn=event.turn,
                        time=event.time,
                        tokens=sum(piece.tokens for piece in pieces),
                        window=0,
                        reprocessed=0,
                        pieces=pieces,
                    )
                )
    except TooFar as far:
        share = far.share
    evicted_pages, folds = _named(session, compaction.left), _named(session, compaction.folds + compaction.brought)
    top = max((side.tokens for side in sides), default=1)
    evicted = {page.id for page in evicted_pages}
    pictures = [list(blocks([side], top)) for side in sides]
    return "receipt.html", context | {
        "receipt": compaction,
        "sides": list(zip(("before", "after"), sides, pictures, strict=False)),
        "share": share,
        "top": top,
        "gone": evicted,
        "same": kept(sides[0].pieces, sides[1].pieces) if len(sides) == 2 else None,
        "legend": legend(sides),
        "left": [
            (page, session.window.states[page.id].at, what(session.window, page), read_text(session, page, BRIEF))
            for page in evicted_pages[:MAX_ROWS]
        ],
        "more": len(evicted_pages) - MAX_ROWS,
        "folds": [(page, read_text(session, page, BRIEF * 4)) for page in folds[:MAX_ROWS]],
    }


def _named(session: Session, addresses: Sequence[str]) -> list[Page]:
    """Return the pages at some addresses, including forgotten ones."""
    pages: list[Page] = []
    for address in addresses:
        first, last = parse_address(address)
        for number in range(first, last + 1):
            if number in session.window.pages:
                pages.append(session.window.pages[number])
    return pages


def transcript(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show all pages of a session in order; by default the newest."""
    session, context = _opened(reading, query)
    window = session.window
    begin = number_in(query, "from", 0) or max(1, window.last - MAX_ROWS + 1)
    numbers = [number for number in range(begin, min(begin + MAX_ROWS, window.last + 1)) if number in window.states]
    window.pages.fetch(numbers)
    pages = [window.pages[number] for number in numbers]
    session.contents.fetch(page for page in pages if window.at(page.id) is not Place.DROPPED)
    return "transcript.html", context | {
        "rows": [(page, window.at(page.id), what(window, page), read_text(session, page, BRIEF * 4)) for page in pages],
        "begin": begin,
        "last": window.last,
        "shown": MAX_ROWS,
    }


def page(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show a page: its text, its state, and the events that concern it."""
    session, context = _opened(reading, query)
    number = _numbered(session, query.get("address", ""))
    page, state = session.window.pages[number], session.window.states[number]
    begin = number_in(query, "from", 0)
    text, more = read_text(session, page, MAX_TEXT, begin)
    events = reading.naming(session, number, page.sources)
    owner = session.contents.owner(number)
    cited = reading.backend.citing(owner, [number])
    names = {info.number: info.name for info in reading.backend.segments()} if cited or page.cites else {}
    return "page.html", context | {
        "page": page,
        "state": state,
        "trust": Trust(page.trust).name.lower(),
        "shade": page_shade(page),
        "text": text,
        "begin": begin,
        "more": more,
        "letters": MAX_TEXT,
        "events": [(event, deed(event, number)) for event in events[-MAX_ROWS * 2 :]],
        "earlier": max(0, len(events) - MAX_ROWS * 2),
        "life": life(events, number, session.window.turn),
        "made": [
            (names.get(segment, "?"), address_of(address), segment == session.number) for segment, address in cited[:MAX_ROWS]
        ],
        "cites": [(names.get(segment, "?"), address_of(address)) for segment, address in page.cites[:MAX_ROWS]],
        "sources": [address_of(source) for source in page.sources[:MAX_ROWS]],
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


def _beside(session: Session, number: int, step: int) -> str:
    """Return the address of the previous or next page, or ""."""
    neighbour = number + (step if number > 0 else -step)
    return address_of(neighbour) if neighbour and (neighbour > 0) == (number > 0) and neighbour in session.window.states else ""


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
    """Describe what an event did to a page."""
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
    """A place of a page, from one turn to another."""

    place: str
    begin: int
    end: int


def life(events: Sequence[Event], page: int, turn: int) -> list[Stay]:
    """Return the places of a page over the turns of its session."""
    stays: list[tuple[str, int]] = []
    for event in events:
        places = event.data.get("to", {})
        to = next((place for place, pages in places.items() if page in pages), None)
        if event.act is Act.FOLD and event.data.get("fold") == page:
            to = "in"
        if to is not None and (not stays or stays[-1][0] != to):
            stays.append((str(to), event.turn))
    if not stays:
        return []
    ends = [*(begin for _, begin in stays[1:]), max(turn, stays[-1][1] + 1)]
    return [Stay(place, begin, max(end, begin)) for (place, begin), end in zip(stays, ends, strict=True)]


def faults(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """List recalls and searches, newest first."""
    session, context = _opened(reading, query)
    until = last_event(query, session)
    events, older = reading.faults(session.number, until, MAX_ROWS)
    return "faults.html", context | {
        "rows": [(event, _asked(event)) for event in events],
        "older": older if older and events else 0,
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
    """Show the tokens of a session's prompts, and their price by each table."""
    _, context = _opened(reading, query)
    stats = context["row"].stats
    reprocessed, fresh = (stats.tokens_reprefilled, stats.tokens_new) if stats else (0, 0)
    cached = max(0, stats.tokens_shipped - reprocessed - fresh) if stats else 0
    return "prices.html", context | {
        "cached": cached,
        "tables": [
            (name, (cached * table.cached + (reprocessed + fresh) * table.written) / 1e6, table.again(reprocessed))
            for name, table in PRICES.items()
        ],
    }


def branches(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the branches of a session as a tree, with their limits, spending and results."""
    session, context = _opened(reading, query)
    rows, total = branch_tree(reading, session, MAX_ROWS)
    fork = session.branches.forked
    return "branches.html", context | {
        "rows": rows,
        "more": total - len(rows),
        "parent": session.name.rpartition("/")[0] if fork is not None else "",
        "run": read_run(reading, session, 0, 1) is not None,
    }


def calls(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show a run of a recursive model with its question, steps and answer; or the sub-calls of one of its cells."""
    session, context = _opened(reading, query)
    cell, begin = query.get("cell", ""), number_in(query, "from", 0)
    context |= {"cell": cell, "begin": begin, "shown": MAX_ROWS}
    if cell:
        return "cell.html", context | read_calls(reading, session, cell, begin, MAX_ROWS, BRIEF * 4)
    run = read_run(reading, session, begin, MAX_ROWS)
    texts = {}
    for step in run["steps"] if run else ():
        for page in (step.code, step.output):
            if page is not None:
                texts[page.id] = read_code(session, page, BRIEF * 4)
    for page in (run["question"], run["answer"]) if run else ():
        if page is not None:
            texts[page.id] = read_text(session, page, BRIEF * 4)
    return "calls.html", context | {"run": run, "texts": texts}


def cache(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the KV cache of a session, and its changes, newest first."""
    session, context = _opened(reading, query)
    until = last_event(query, session)
    events, older = reading.of_act(session.number, Act.CACHE, until, MAX_ROWS)
    return "cache.html", context | {
        "rows": cache_changes(events),
        "older": older if events else 0,
        "until": until,
        "held": cache_summary(reading, session),
        "files": removed_files(reading, session),
        "use": session.prompts.use,
    }


def memory(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the facts of one user or of all, with their validity; proposed facts; documents and notes."""
    return "memory.html", memory_screen(reading, query, MAX_ROWS)


def collection(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the pages of a document, or of notes."""
    return "collection.html", collection_screen(reading, query, MAX_ROWS) | {"letters": BRIEF * 4}


def change(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Show the preview of an eviction, the difference of two prompts, and the forms of changes by hand."""
    session, context = _opened(reading, query)
    return "change.html", context | change_screen(reading, session, query)


def search(reading: LedgerReader, query: Query) -> tuple[str, dict[str, Any]]:
    """Search sessions, facts, documents and notes."""
    words = query.get("q", "")[:500]
    began = time.perf_counter()
    hits: Any = reading.store().search(words, 4_000, MAX_ROWS) if words.strip() else []
    return "search.html", {
        "words": words,
        "hits": hits,
        "kinds": {info.name: info.kind for info in reading.backend.segments()} if hits else {},
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
"""The screens by their paths."""

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
"""The screens of a session, with their titles."""

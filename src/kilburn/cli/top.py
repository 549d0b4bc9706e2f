"""`top`: a live screen of all sessions, read from a store or from a running gateway."""

from __future__ import annotations

import http.client
import os
import sys
import time
from collections.abc import Callable
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from typer import Option

from kilburn.cli.access import WIDE, StorePlace
from kilburn.cli.screen import bar, count, grid, many, progress, terminal_width
from kilburn.cli.session import LESS_QUEUES, QUEUES, queue_cells, session_cells, session_row
from kilburn.cli.shell import app
from kilburn.errors import SpecError, Unavailable
from kilburn.gateway.exchange import Rows, SessionTotals
from kilburn.opening import Store
from kilburn.page import Place
from kilburn.terminal import Styled, age, console, emit, tell_lines

MAX_REPLY_BYTES = 64 << 20

WIDE_SCREEN = 140
"""Columns of a terminal on which numbers are written in full."""

LESS = ("stub", "folded", "in", "evictions", "refaults", "seen", "folds", "faults", "out", "of", "in window", "hit rate")
"""Columns that a narrow terminal omits, the first one first."""

LESS_TRAFFIC = ("replied", "again", "cached", "requests", "tenant", "shipped", "saved", "sent", "faults")

PLACES = (Place.IN, Place.STUB, Place.FOLDED, Place.OUT, Place.RETIRED, Place.DROPPED)


class Watch:
    """Reads the figures of all sessions. A session is read again only if its ledger has grown."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[int, tuple[int, dict[str, Any]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """Return a row for each session, the most recently used first."""
        for info in self._store.sessions():
            cached = self._known.get(info.number)
            if cached is None or cached[0] != info.head:
                fresh = Store(self._store.backend, self._store.budget, "fifo", tokenizer=self._store.counter)
                self._known[info.number] = (info.head, session_row(fresh, info))
        return sorted((row for _, row in self._known.values()), key=lambda row: -row["used"])


@app.command()
def top(where: StorePlace, single: bool = False, every: Annotated[float, Option(min=0.2)] = 1.0, url: str | None = None) -> None:
    """Watch the windows of all sessions live: the pages in each window and out of it, hit rates, faults, folds, and the queues of
    sessions that a scheduler serves. Ctrl-C stops it.

    With --url, the screen shows the traffic of a running gateway since its start: tokens sent, shipped, cached and processed
    again, faults, hit rates and savings.

    Examples:

        kilburn top --once

        kilburn top --url http://127.0.0.1:8000

    Args:
        single --once: Print the screen once, and exit.
        every: Update the screen after this many seconds.
        url URL: Watch the gateway at this URL; its key is read from $KILBURN_KEY.
    """
    if url is not None:
        _watch(lambda: fetch_sessions(url), traffic, single, every, where.json)
        return
    with where.reading() as store:
        _watch(Watch(store).rows, lambda rows, *size: frame(rows, where.tenant or "default", *size), single, every, where.json)


def _watch(rows: Callable[[], list[Any]], draw: Callable[..., list[Styled]], single: bool, every: float, json: bool) -> None:
    with progress("reading the ledgers"):
        first = rows()
    if json:
        emit({"time": time.time(), "sessions": first})
        return
    if single or not sys.stdout.isatty():
        tell_lines(draw(first, terminal_width() or 160))
        return
    from rich.live import Live
    from rich.text import Text

    screen = console()

    def fitted(rows: list[Any]) -> Text:
        return Text("\n").join(Text(text, style) for text, style in draw(rows, screen.width, screen.height))

    with Live(fitted(first), console=screen, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(every)
            live.update(fitted(rows()), refresh=True)


def fetch_sessions(url: str) -> list[SessionTotals]:
    """Request the sessions of a running gateway, the most recently used first, without proxies and redirects.

    Raises:
        SpecError: invalid address, or the key is refused. Unavailable: no gateway answers.
    """
    try:
        parts = urlsplit(url)
        kind = {"http": http.client.HTTPConnection, "https": http.client.HTTPSConnection}[parts.scheme]
        if not parts.hostname:
            raise ValueError(url)
        connection = kind(parts.hostname, parts.port, timeout=10)
    except (ValueError, KeyError, http.client.InvalidURL):
        raise SpecError(f"{url} is no address of a gateway", advice="give one such as http://127.0.0.1:8000") from None
    key = os.environ.get("KILBURN_KEY")
    try:
        connection.request("GET", "/sessions", headers={"authorization": f"Bearer {key}"} if key else {})
        reply = connection.getresponse()
        data = reply.read(MAX_REPLY_BYTES)
        if reply.status in (401, 403):
            raise SpecError("the gateway refuses the key", advice="put one in KILBURN_KEY; see `kilburn keys list`")
        if reply.status != 200:
            raise Unavailable(f"the server at {url} has no sessions: {reply.status}", advice="is it a gateway?")
        return msgspec.json.decode(data, type=Rows).sessions
    except (OSError, http.client.HTTPException, msgspec.DecodeError, ValueError) as error:
        raise Unavailable(f"no gateway answers at {url}: {type(error).__name__}", advice="see `kilburn serve`") from error
    finally:
        connection.close()


def traffic(rows: list[SessionTotals], width: int, height: int | None = None) -> list[Styled]:
    """Return the lines of the screen of a gateway. A low hit rate is marked."""
    requests, money = sum(row.requests for row in rows), sum(row.saved for row in rows)
    title = f"kilburn top: {many(len(rows), 'session')}, {many(requests, 'request')}, saved {money:.2f}"
    cells = [_traffic(row) for row in rows] or [_traffic(SessionTotals(tenant="", session=""))]
    heads = [head for head in cells[0] if head != "tenant" or len({row.tenant for row in rows}) > 1]
    body = ([cell[head] for head in heads] for cell in cells[: len(rows)])
    return grid(heads, body, title=title, width=width, height=height, less=LESS_TRAFFIC)


def _traffic(row: SessionTotals) -> dict[str, Any]:
    return {
        "session": row.session,
        "tenant": row.tenant,
        "window": f"{row.fill or 0:.0%} of {short(row.window)}",
        "requests": row.requests,
        "sent": short(row.sent),
        "shipped": short(row.shipped),
        "cached": short(row.cached),
        "again": short(row.reprefilled),
        "replied": short(row.replied),
        "faults": row.faults,
        "hit rate": "-" if row.hit_rate is None else f"{row.hit_rate:.1%}" + (" low" if row.alarm else ""),
        "saved": f"{row.saved:.2f}",
        "last use": f"{age(row.used)} ago",
    }


def short(number: int) -> str:
    """Format a number of tokens with three or four digits: 95.5k."""
    for size, mark in ((10**9, "G"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f}{mark}"
    return str(number)


def frame(rows: list[dict[str, Any]], tenant: str, width: int, height: int | None = None) -> list[Styled]:
    """Return the lines of the screen of a store: the sessions, and in at most half of it the queues."""
    places = {place: sum(row["places"].get(place, 0) for row in rows) for place in PLACES}
    title = f"kilburn top: tenant {tenant}, {many(len(rows), 'session')}, {many(sum(row['pages'] for row in rows), 'page')}"
    separator = ": "
    for place, pages in places.items():
        entry = f"{separator}{count(pages)} {place}"
        if pages and len(title + entry) <= width:
            title, separator = title + entry, ", "
    figures = "in window", "of", "seen", "in", "stub", "folded", "out", "hit rate", "faults", "refaults", "evictions", "folds"
    heads = ("session", "window", "", *figures, "last use")
    served = [queue_cells(row) for row in rows if row["jobs"]]
    below = 0 if height is None or not served else min(height // 2, len(served) + 3)
    room = None if height is None else height - below
    levels = grid(heads, (_row(row, width) for row in rows), title=title, width=width, height=room, less=LESS)
    if not served:
        return levels
    return levels + grid(QUEUES, served, title="queues", width=width, height=below or None, less=LESS_QUEUES)


def _row(row: dict[str, Any], width: int) -> list[Any]:
    window, tokens_in_window = row["window"], row["tokens_in_window"]
    share = row["fill"] or 0.0
    name, *figures = session_cells(row, "tokens", "hit_rate", "faults", "refaults", "evictions", "folds")
    places = [row["places"].get(place, 0) for place in PLACES[:4]]
    filled = row["fill"] if window and window < WIDE else None
    if width >= WIDE_SCREEN:
        return [name, bar(share), filled, tokens_in_window, window, figures[0], *places, *figures[1:]]
    tokens = (short(tokens_in_window), None if window is None else short(window), short(figures[0]))
    return [name, bar(share, 10), filled, *tokens, *places, *figures[1:]]

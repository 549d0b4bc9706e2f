"""`top`: a live screen of the levels, read beside the agents that work. It refuses to write."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from kilburn.cli.access import WIDE, reading
from kilburn.cli.screen import age, bar, count, grid, many
from kilburn.cli.session import percent, row_of
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.page import Place
from kilburn.terminal import console, emit

__all__ = ["top"]

PLACES = (Place.IN, Place.STUB, Place.FOLDED, Place.OUT, Place.RETIRED, Place.DROPPED)


class Watch:
    """The figures of all sessions; a session is read again only when its ledger has grown."""

    def __init__(self, store: Hierarchy) -> None:
        self._store = store
        self._known: dict[int, tuple[int, dict[str, Any]]] = {}

    def rows(self) -> list[dict[str, Any]]:
        """One row a session, the last used first."""
        for info in self._store.processes():
            known = self._known.get(info.number)
            if known is None or known[0] != info.head:
                fresh = Hierarchy(self._store.store, self._store.budget, "fifo", tokenizer=self._store.counter)
                self._known[info.number] = (info.head, row_of(fresh, info))
        return sorted((row for _, row in self._known.values()), key=lambda row: -row["used"])


@app.command()
def top(
    once: Annotated[bool, typer.Option("--once", help="One frame, then end.")] = False,
    every: Annotated[float, typer.Option(min=0.2, help="Seconds between frames.")] = 1.0,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Watch the levels live: what is in each window and below it, hit rates, faults, folds. Ctrl-C ends it.

    Example:

        kilburn top --once
    """
    with reading(db, tenant) as store:
        watch = Watch(store)
        if json:
            emit({"time": time.time(), "sessions": watch.rows()})
            return
        from rich.live import Live

        shown = console()
        if once or not sys.stdout.isatty():
            if not shown.is_terminal:
                shown.width = 160
            shown.print(frame(watch.rows(), tenant or "default"))
            return
        with Live(frame(watch.rows(), tenant or "default"), console=shown, screen=True, auto_refresh=False) as live:
            while True:
                time.sleep(every)
                live.update(frame(watch.rows(), tenant or "default"), refresh=True)


def frame(rows: list[dict[str, Any]], tenant: str) -> Any:
    """One screenful."""
    places = {place: sum(row["places"].get(place, 0) for row in rows) for place in PLACES}
    title = f"kilburn top: tenant {tenant}, {many(len(rows), 'session')}, {many(sum(places.values()), 'page')}: " + ", ".join(
        f"{count(number)} {place}" for place, number in places.items() if number
    )
    heads = (
        "session",
        "window",
        "",
        "in window",
        "of",
        "seen",
        Place.IN,
        Place.STUB,
        Place.FOLDED,
        Place.OUT,
        "hit rate",
        "faults",
        "refaults",
        "evictions",
        "folds",
        "last use",
    )
    return grid(heads, (_row(row) for row in rows), numbers=(*heads[3:-1],), title=title.rstrip(": "))


def _row(row: dict[str, Any]) -> tuple[str, ...]:
    window = row["window"]
    share = row["tokens_in_window"] / window if window else 0.0
    return (
        row["session"] + (" (damaged)" if row["damaged"] else ""),
        bar(share),
        f"{share:.0%}" if window and window < WIDE else "-",
        count(row["tokens_in_window"]),
        count(window) if window else "-",
        count(row["tokens"]),
        *(count(row["places"].get(place, 0)) for place in PLACES[:4]),
        percent(row["hit_rate"]),
        *(count(row[key]) for key in ("faults", "refaults", "evictions", "folds")),
        f"{age(row['used'])} ago",
    )

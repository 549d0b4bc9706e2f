"""`top`: a live screen of the levels, while agents work. The store is opened for reading."""

from __future__ import annotations

import sys
import time
from typing import Annotated, Any

import typer

from kilburn.cli.access import WIDE, reading
from kilburn.cli.screen import bar, count, grid, many
from kilburn.cli.session import cells_of, row_of
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
    figures = "in window", "of", "seen", "in", "stub", "folded", "out", "hit rate", "faults", "refaults", "evictions", "folds"
    heads = ("session", "window", "", *figures, "last use")
    return grid(heads, (_row(row) for row in rows), title=title.rstrip(": "))


def _row(row: dict[str, Any]) -> list[Any]:
    window, used = row["window"], row["tokens_in_window"]
    share = used / window if window else 0.0
    name, *figures = cells_of(row, "tokens", "hit_rate", "faults", "refaults", "evictions", "folds")
    places = [row["places"].get(place, 0) for place in PLACES[:4]]
    filled = share if window and window < WIDE else None
    return [name, bar(share), filled, used, window, figures[0], *places, *figures[1:]]

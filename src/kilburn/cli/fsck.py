"""`fsck`: is everything in a store what it was when it was acknowledged?

The store checks its own file, every seal, every hash, and its index; here each session is opened as its
reader opens it, and every derived page is held against its sources. It refuses to repair by guessing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any

import typer

from kilburn.cli.access import existing
from kilburn.cli.screen import many, progress
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import KernelError, StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreReadOnly
from kilburn.event import Act
from kilburn.kernel.folding import keeps_its_spans
from kilburn.kernel.replay import rebuild
from kilburn.kernel.window import Window
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of
from kilburn.store import Batch, ProcessInfo, State
from kilburn.stores.sealed import QUARANTINED
from kilburn.stores.sqlite import Sqlite
from kilburn.terminal import emit, line, say, tell

__all__ = ["fsck"]

TRIES = 5
"""Checks of a store that others write to, until one finds it at rest or in order."""

Finding = dict[str, Any]


class Ruler:
    """Counts as little as it can under the name of a session's own counter: no page is counted anew."""

    envelope = 0
    exact = True

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self, text: str) -> int:
        """Characters."""
        return len(text)


@app.command()
def fsck(
    repair: Annotated[
        bool, typer.Option("--repair", help="Rebuild what is derived; put what cannot be read out of the way.")
    ] = False,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Check a store: every seal and hash, every fold's sources, index against pages, ledger against states.

    --repair rebuilds the text index, counters and states, puts a note in the place of an observation that
    cannot be read, and puts a session that cannot be opened into quarantine under another name. It deletes nothing
    that was said; an altered text stays reported.

    Exit status 1 where something is wrong (after --repair: where something stays wrong).

    Example:

        kilburn fsck --repair
    """
    path = existing(db)
    found: list[Finding] = []
    left: list[Finding] = []
    infos: list[ProcessInfo] = []
    try:
        with Sqlite(path, tenant=tenant or "default", readonly=not repair, restore=repair) as store:
            found = left = _check(store)
            if repair and found:
                left = _repair(store, found)
            infos = store.processes()
    except (StoreBusy, StoreFull, StoreReadOnly):
        raise
    except StoreError as error:
        broken = {"kind": "file", "session": None, "page": None, "what": error.what, "derived": False}
        found, left = [*found, broken], [*left, broken]
    quarantined = [info.name for info in infos if info.damaged == QUARANTINED]
    sessions, pages = len(infos), sum(info.pages for info in infos)
    if json:
        report = {"db": path, "sessions": sessions, "pages": pages, "findings": found, "left": left if repair else None}
        emit(report | ({"quarantined": quarantined} if quarantined else {}))
    else:
        for finding in found:
            place = " ".join(str(finding[key]) for key in ("session", "page") if finding[key])
            tell(line(f"{finding['kind']}: {place + ': ' if place else ''}{finding['what']}"))
        for name in quarantined:
            tell(line(f"quarantined: {name}"))
        state = "all is well" if not found else "repaired" if repair and not left else many(len(left), "finding")
        tell(f"{line(path)}: {many(sessions, 'session')}, {many(pages, 'page')}: {state}")
        if left and not repair:
            tell("kilburn fsck --repair makes good what is derived, and quarantines what cannot be read")
    if left:
        raise typer.Exit(1)


def _check(store: Sqlite) -> list[Finding]:
    """All findings; again where an agent wrote meanwhile, since a store in motion disagrees with itself."""
    found: list[Finding] = []
    for _ in range(TRIES):
        before = store.processes()
        found = _check_once(store, {info.number: info for info in before})
        if not found or store.processes() == before:
            return found
    say("kilburn: others wrote to this store all the while; run it again when they rest")
    return found


def _check_once(store: Sqlite, infos: dict[int, ProcessInfo]) -> list[Finding]:
    found = []
    mendable: set[int] = set()
    for finding in store.findings():
        name = infos[finding.process].name if finding.process in infos else None
        page = address_of(finding.page) if finding.page else None
        found.append({"kind": finding.kind, "session": name, "page": page, "what": finding.what, "derived": finding.derived})
        if finding.derived and finding.kind in ("state", "session", "ledger"):
            mendable.add(finding.process)
    whole = [info for info in infos.values() if not info.damaged]
    with progress("replaying ledgers", len(whole)) as done:
        for number, info in enumerate(whole, start=1):
            found += _check_session(store, info, mendable=info.number in mendable)
            done(number)
    return found


def _opened(store: Sqlite, info: ProcessInfo) -> Window:
    """The window of a session as its reader opens it, under its own counter's name.

    Raises:
        StoreCorrupt: it cannot be read.
    """
    ruler = ""
    for event in store.events(info.number):
        if event.act is Act.NOTE:
            ruler = str(event.data.get("tokenizer", ruler))
    return rebuild(store, info, Ruler(ruler)).window


def _check_session(store: Sqlite, info: ProcessInfo, *, mendable: bool) -> Iterator[Finding]:
    def finding(kind: str, page: int, what: str, derived: bool = False) -> Finding:
        return {"kind": kind, "session": info.name, "page": address_of(page) if page else None, "what": what, "derived": derived}

    try:
        window = _opened(store, info)
        rows = list(store.pages(info.number))
    except StoreCorrupt as error:
        if not mendable:
            yield finding("ledger", 0, f"it cannot be replayed: {error.what}")
        return
    pages = {page.id: page for page, _ in rows}
    for page, state in rows:
        again = window.states.get(page.id)
        if again is None:
            yield finding("ledger", page.id, "the ledger does not know this page")
        elif again != state:
            yield finding("state", page.id, f"stored as {_said(state)}, the ledger says {_said(again)}", derived=True)
        if page.id < 0 and state.at != Place.DROPPED:
            for what in _wrong_with(store, page, pages, lambda number: window.states[number].at):
                yield finding("fold", page.id, what)


def _said(state: State) -> str:
    return f"{state.at}{', pinned' if state.pinned else ''}{f', mark {state.mark:g}' if state.mark else ''}"


def _wrong_with(store: Sqlite, fold: Page, pages: dict[int, Page], at: Callable[[int], str]) -> Iterator[str]:
    """A derived page cites sources that exist, trusts them no more than they deserve, and quotes them exactly."""
    sources = [pages[source] for source in fold.sources if source in pages]
    if not fold.sources or len(sources) != len(fold.sources):
        yield f"it cites {len(fold.sources)} sources, {len(sources)} of them exist"
        return
    dropped = [source.address for source in sources if at(source.id) == Place.DROPPED]
    if dropped:
        yield f"its source {dropped[0]} was forgotten"
        return
    if fold.trust > min(source.trust for source in sources):
        yield "it is trusted more than its sources"
    if fold.kind is Kind.EXCERPT:
        try:
            (text,) = store.texts([fold.digest]).values()
            exact = keeps_its_spans(fold, text, lambda page: store.texts([pages[page].digest])[pages[page].digest])
        except (StoreCorrupt, KernelError, KeyError) as error:
            yield f"its kept spans cannot be checked: {getattr(error, 'what', None) or f'{error} is no page'}"
            return
        if not exact:
            yield f"it is not what its spans keep of {' '.join(source.address for source in sources[:3])}"


def _repair(store: Sqlite, found: list[Finding]) -> list[Finding]:
    """Rebuild what is derived and quarantine what cannot be read; returns what is still wrong."""
    try:
        store.repair()
    except StoreCorrupt as error:
        return [*found, {"kind": "file", "session": None, "page": None, "what": f"not repaired: {error.what}", "derived": False}]
    for info in store.processes():
        if not info.number or info.damaged == QUARANTINED:
            continue
        try:
            if info.damaged:
                raise StoreCorrupt(info.damaged)
            window, rows = _opened(store, info), list(store.pages(info.number))
        except StoreCorrupt as error:
            name = store.quarantine(info.number)
            say(line(f"kilburn: session {info.name!r} is now {name!r}, nothing of it is deleted: {error.what}"))
            continue
        known = {page.id: (state, window.states[page.id]) for page, state in rows if page.id in window.states}
        states = {number: again for number, (state, again) in known.items() if again != state}
        if states:
            store.commit(info.number, Batch(head=info.head, states=states))
    return _check(store)

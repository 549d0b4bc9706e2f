"""`fsck`: is everything in a store what it was when it was acknowledged?

The store checks its own file, every hash, and its index; here the ledger is replayed against the
stored states, and every derived page is held against its sources. It refuses to repair by guessing.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec
import typer

from kilburn.cli.access import existing
from kilburn.cli.screen import many, progress
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import KernelError, StoreCorrupt
from kilburn.kernel.folding import cut
from kilburn.kernel.ledger import replay
from kilburn.kernel.tier import Tier
from kilburn.message import Kind
from kilburn.page import Page, address_of
from kilburn.store import Batch, ProcessInfo, State
from kilburn.stores.sqlite import Sqlite
from kilburn.terminal import emit, line, say, tell

__all__ = ["fsck"]

TRIES = 5
"""Checks of a store that others write to, until one finds it at rest or in order."""


@app.command()
def fsck(
    repair: Annotated[bool, typer.Option("--repair", help="Rebuild what is derived: text index, counters, states.")] = False,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Check a store: every hash, every fold's sources, index against pages, ledger against states.

    Exit status 1 where something is wrong (after --repair: where something stays wrong).

    Example:

        kilburn fsck --repair
    """
    path = existing(db)
    try:
        with Sqlite(path, tenant=tenant or "default", readonly=not repair) as store:
            found = _check(store)
            left = _repair(store, found) if repair and found else found
            sessions, pages = len(store.processes()), sum(info.pages for info in store.processes())
    except StoreCorrupt as error:
        found = left = [{"kind": "file", "session": None, "page": None, "what": error.what, "derived": False}]
        sessions = pages = 0
    if json:
        emit({"db": path, "sessions": sessions, "pages": pages, "findings": found, "left": left if repair else None})
    else:
        for finding in found:
            place = " ".join(str(finding[key]) for key in ("session", "page") if finding[key])
            tell(line(f"{finding['kind']}: {place + ': ' if place else ''}{finding['what']}"))
        state = "all is well" if not found else "repaired" if repair and not left else many(len(left), "finding")
        tell(f"{line(path)}: {many(sessions, 'session')}, {many(pages, 'page')}: {state}")
        if left and not repair and any(finding["derived"] for finding in left):
            tell("kilburn fsck --repair makes good what is derived")
    if left:
        raise typer.Exit(1)


def _check(store: Sqlite) -> list[dict[str, Any]]:
    """All findings; again where an agent wrote meanwhile, since a store in motion disagrees with itself."""
    found: list[dict[str, Any]] = []
    for _ in range(TRIES):
        before = store.processes()
        found = _check_once(store, {info.number: info for info in before})
        if not found or store.processes() == before:
            return found
    say("kilburn: others wrote to this store all the while; run it again when they rest")
    return found


def _check_once(store: Sqlite, infos: dict[int, ProcessInfo]) -> list[dict[str, Any]]:
    found = []
    for finding in store.findings():
        name = infos[finding.process].name if finding.process in infos else None
        page = address_of(finding.page) if finding.page else None
        found.append({"kind": finding.kind, "session": name, "page": page, "what": finding.what, "derived": finding.derived})
    with progress("replaying ledgers", len(infos)) as done:
        for number, info in enumerate(infos.values(), start=1):
            found += _check_session(store, info)
            done(number)
    return found


def _check_session(store: Sqlite, info: ProcessInfo) -> Iterator[dict[str, Any]]:
    def finding(kind: str, page: int, what: str, derived: bool = False) -> dict[str, Any]:
        return {"kind": kind, "session": info.name, "page": address_of(page) if page else None, "what": what, "derived": derived}

    try:
        events = list(store.events(info.number))
        rows = list(store.pages(info.number))
        pages = {page.id: page for page, _ in rows}
        tier = replay(events, pages, Tier(len))
    except (StoreCorrupt, KernelError, KeyError, ValueError, msgspec.DecodeError) as error:
        yield finding("ledger", 0, f"it cannot be replayed: {getattr(error, 'what', None) or repr(error)}")
        return
    for page, state in rows:
        again = tier.states.get(page.id)
        if again is None:
            yield finding("ledger", page.id, "the ledger does not know this page")
        elif again != state:
            yield finding("state", page.id, f"stored as {_said(state)}, the ledger says {_said(again)}", derived=True)
        if page.id < 0 and state.at != "dropped":
            for what in _wrong_with(store, page, pages, tier):
                yield finding("fold", page.id, what)


def _said(state: State) -> str:
    return f"{state.at}{', pinned' if state.pinned else ''}{f', mark {state.mark:g}' if state.mark else ''}"


def _wrong_with(store: Sqlite, fold: Page, pages: dict[int, Page], tier: Tier) -> Iterator[str]:
    """A derived page cites sources that exist, trusts them no more than they deserve, and quotes them exactly."""
    sources = [pages[source] for source in fold.sources if source in pages]
    if not fold.sources or len(sources) != len(fold.sources):
        yield f"it cites {len(fold.sources)} sources, {len(sources)} of them exist"
        return
    dropped = [source.address for source in sources if tier.at(source.id) == "dropped"]
    if dropped:
        yield f"its source {dropped[0]} was forgotten"
        return
    if fold.trust > min(source.trust for source in sources):
        yield "it is trusted more than its sources"
    if fold.kind is Kind.EXCERPT:
        try:
            texts = store.texts([fold.digest, sources[0].digest])
            if cut(texts[sources[0].digest], fold.spans) not in texts[fold.digest]:
                yield f"it is not what its spans keep of {sources[0].address}"
        except (StoreCorrupt, KernelError) as error:
            yield f"its kept spans cannot be checked: {error.what}"


def _repair(store: Sqlite, found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rebuild what is derived; returns what is still wrong."""
    store.repair()
    broken = {finding["session"] for finding in found if finding["kind"] == "state"}
    for info in store.processes():
        if info.name in broken:
            rows = list(store.pages(info.number))
            tier = replay(store.events(info.number), {page.id: page for page, _ in rows}, Tier(len))
            states = {
                page.id: tier.states[page.id] for page, state in rows if page.id in tier.states and tier.states[page.id] != state
            }
            store.commit(info.number, Batch(head=info.head, states=states))
    return _check(store)

"""`fsck`: checks that everything in a store is as it was written.

The store checks its own file, every seal, every hash, and its index. Here each session is opened as usual, and every
derived page is compared with its sources. A repair never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Annotated, Any

import typer
from typer import Argument, Option

from kilburn.backend import Backend, Batch, SegmentInfo, State
from kilburn.backends.anchor import Anchor
from kilburn.backends.findings import Finding
from kilburn.backends.places import anchor_of, is_url, open_backend, shown
from kilburn.backends.sealed import QUARANTINED
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, quarantine_segment, repair_store
from kilburn.cli.access import existing
from kilburn.cli.screen import many, progress
from kilburn.cli.shell import Db, Json, Tenant, app
from kilburn.errors import KernelError, SpecError, StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreVersion
from kilburn.kernel.folding import keeps_its_spans
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.replay import rebuild
from kilburn.kernel.window import WindowState
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of
from kilburn.terminal import emit, line, say, tell

TRIES = 5
"""How often a store is checked at most, if others write to it meanwhile."""


class Ruler:
    """A cheap counter under the name of a session's own counter, so that no page is counted again."""

    envelope = 0
    exact = True

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self, text: str) -> int:
        """Characters."""
        return len(text)


@app.command()
def fsck(
    place: Annotated[
        str | None, Argument(metavar="STORE", help="A file, or the URL of a database; else --db.", show_default=False)
    ] = None,
    repair: Annotated[bool, Option("--repair", help="Rebuild what is derived; put what cannot be read out of the way.")] = False,
    db: Db = None,
    tenant: Tenant = None,
    json: Json = False,
) -> None:
    """Check a store: every seal and hash, every fold's sources, index against pages, ledger against states and checkpoints.

    --repair rebuilds the text index, counters and states, replaces an observation that cannot be read by a note, and
    quarantines a session that cannot be opened, under another name. It deletes nothing that was said. An altered text
    is still reported afterwards. A store in PostgreSQL is checked, and not repaired. With $KILBURN_ANCHOR, it is also
    said in what the store is older than its anchor.

    Exit status 1 if something is wrong (after --repair: if something is still wrong).

    Examples:

        kilburn fsck agent.db

        kilburn fsck --repair
    """
    path = existing(place or db)
    if is_url(path) and repair:
        problem = "a database is checked, and not repaired"
        raise SpecError(problem, advice="restore it from a backup; `kilburn copy` makes what is derived anew in another place")
    found: list[Finding] = []
    remaining: list[Finding] = []
    infos: list[SegmentInfo] = []
    names: dict[int, str] = {}
    try:
        with closing(_opened(path, tenant or "default", repair=repair)) as backend:
            names = {info.number: info.name for info in backend.segments() if info.number}
            anchor = anchor_of(path, tenant or "default")
            found = remaining = _check(backend, anchor)
            if repair and found and isinstance(backend, Sqlite):
                remaining = _repair(backend, found, anchor)
            infos = list(backend.segments())
    except (StoreBusy, StoreFull, StoreReadOnly, StoreVersion, SpecError):
        raise
    except StoreError as error:
        if is_url(path) and not isinstance(error, StoreCorrupt):
            raise
        broken = Finding(kind="file", what=error.what)
        found, remaining = [*found, broken], [*remaining, broken]
    quarantined = [info.name for info in infos if info.damaged == QUARANTINED]
    sessions, pages = len(infos), sum(info.pages for info in infos)
    if json:
        rows, rows_left = ([_row(finding, names) for finding in findings] for findings in (found, remaining))
        report = {
            "db": shown(path),
            "sessions": sessions,
            "pages": pages,
            "findings": rows,
            "left": rows_left if repair else None,
        }
        emit(report | ({"quarantined": quarantined} if quarantined else {}))
    else:
        for finding in found:
            row = _row(finding, names)
            place = " ".join(row[key] for key in ("session", "page") if row[key])
            tell(line(f"{finding.kind}: {place + ': ' if place else ''}{finding.what}"))
        for name in quarantined:
            tell(line(f"quarantined: {name}"))
        state = "all is well" if not found else "repaired" if repair and not remaining else many(len(remaining), "finding")
        tell(f"{line(shown(path))}: {many(sessions, 'session')}, {many(pages, 'page')}: {state}")
        if remaining and not repair and not is_url(path):
            tell("kilburn fsck --repair makes good what is derived, and quarantines what cannot be read")
    if remaining:
        raise typer.Exit(1)


def _opened(path: str, tenant: str, *, repair: bool) -> Backend:
    if is_url(path):
        return open_backend(path, tenant=tenant, readonly=True)
    return Sqlite(path, tenant=tenant, readonly=not repair, restore=repair)


def _row(finding: Finding, names: Mapping[int, str]) -> dict[str, Any]:
    """A finding with the names that a person knows."""
    session, page = names.get(finding.segment), address_of(finding.page) if finding.page else None
    return {"kind": finding.kind, "session": session, "page": page, "what": finding.what, "derived": finding.derived}


def _check(backend: Backend, anchor: Anchor) -> list[Finding]:
    """All findings. The check is repeated if an agent wrote meanwhile, because it then sees a mixture of states."""
    findings: list[Finding] = []
    for _ in range(TRIES):
        infos = backend.segments()
        with progress("checking pages"):
            findings = [*inspect_store(backend), *(anchor.findings(backend) if anchor.file else ())]
        # What the store can mend: no second finding says that such a session cannot be replayed.
        mendable = {finding.segment for finding in findings if finding.derived and finding.kind in ("state", "session", "ledger")}
        whole = [info for info in infos if not info.damaged]
        with progress("replaying ledgers", len(whole)) as report:
            for number, info in enumerate(whole, start=1):
                findings += _check_session(backend, info, mendable=info.number in mendable)
                report(number)
        if not findings or backend.segments() == infos:
            return findings
    say("kilburn: others wrote to this store all the while; run it again when they rest")
    return findings


def _replayed(backend: Backend, info: SegmentInfo) -> WindowState:
    """The window of a session as its ledger says, opened as its reader opens it.

    Raises:
        StoreCorrupt: it cannot be read.
    """
    return rebuild(backend, info, Ruler(counter_of(backend, info.number)), recount=False, whole=True).window


def _check_session(backend: Backend, info: SegmentInfo, *, mendable: bool) -> Iterator[Finding]:
    try:
        window, rows = _replayed(backend, info), list(backend.pages(info.number))
    except StoreCorrupt as error:
        if not mendable:
            yield Finding(kind="ledger", what=f"it cannot be replayed: {error.what}", segment=info.number)
        return
    states = window.states
    if not mendable and _differs(backend, info, window):
        problem = "its checkpoint is not what the ledger says"
        yield Finding(kind="checkpoint", what=problem, derived=True, segment=info.number)
    for page, state in rows:
        replayed = states.get(page.id)
        if replayed is None:
            yield Finding(kind="ledger", what="the ledger does not know this page", segment=info.number, page=page.id)
        elif replayed != state:
            problem = f"stored as {_described(state)}, the ledger says {_described(replayed)}"
            yield Finding(kind="state", what=problem, derived=True, segment=info.number, page=page.id)
        if page.id < 0 and state.at != Place.DROPPED:
            for problem in _wrong_with(backend, page, window.pages, lambda number: states[number].at):
                yield Finding(kind="fold", what=problem, segment=info.number, page=page.id)


def _differs(backend: Backend, info: SegmentInfo, window: WindowState) -> bool:
    """Whether a session that is read from its checkpoint is another than from its whole ledger (law 8)."""
    try:
        short = rebuild(backend, info, Ruler(counter_of(backend, info.number)), recount=False).window
    except StoreCorrupt:
        return True
    # What handles cost is left out: they are counted otherwise here.
    return any(
        getattr(short, name) != getattr(window, name)
        for name in ("states", "groups", "open", "request", "turn", "said", "seen", "last", "last_derived", "stand_ins")
    ) or [page.id for page in short.visible()] != [page.id for page in window.visible()]


def _described(state: State) -> str:
    importance = f", importance {state.importance:g}" if state.importance else ""
    until = f", until {state.until:.0f}" if state.until is not None else ""
    return f"{state.at}{', pinned' if state.pinned else ''}{importance}{until}"


def _wrong_with(backend: Backend, fold: Page, pages: Mapping[int, Page], at: Callable[[int], str]) -> Iterator[str]:
    """What is wrong with a derived page: missing sources, a trust above that of its sources, or an inexact quotation."""
    sources = [pages[source] for source in fold.sources if source in pages]
    if not (fold.sources or fold.cites) or len(sources) != len(fold.sources):
        yield f"it cites {len(fold.sources)} sources, {len(sources)} of them exist"
        return
    try:
        # Those that are not there are reported by the store.
        cited = [page for page, _ in backend.read(fold.cites).values() if page.digest]
    except StoreCorrupt as error:
        yield f"what it cites cannot be read: {error.what}"
        return
    dropped = [source.address for source in sources if at(source.id) == Place.DROPPED]
    if dropped:
        yield f"its source {dropped[0]} was forgotten"
        return
    # An entity is only a name, and no evidence of anything.
    evidence = [source.trust for source in [*sources, *cited] if source.kind is not Kind.ENTITY]
    if fold.trust > min(evidence, default=fold.trust):
        yield "it is trusted more than its sources"
    if fold.kind is Kind.EXCERPT:
        try:
            (text,) = backend.contents.texts([fold.digest]).values()
            exact = keeps_its_spans(fold, text, lambda page: backend.contents.texts([pages[page].digest])[pages[page].digest])
        except (StoreCorrupt, KernelError, KeyError) as error:
            yield f"its kept spans cannot be checked: {getattr(error, 'what', None) or f'{error} is no page'}"
            return
        if not exact:
            yield f"it is not what its spans keep of {' '.join(source.address for source in sources[:3])}"


def _repair(backend: Sqlite, findings: list[Finding], anchor: Anchor) -> list[Finding]:
    """Rebuild what is derived and quarantine what cannot be read; returns what is still wrong."""
    try:
        repair_store(backend)
    except StoreCorrupt as error:
        return [*findings, Finding(kind="file", what=f"not repaired: {error.what}")]
    for info in backend.segments():
        if not info.number or info.damaged == QUARANTINED:
            continue
        try:
            if info.damaged:
                raise StoreCorrupt(info.damaged)
            replayed, rows = _replayed(backend, info).states, list(backend.pages(info.number))
        except StoreCorrupt as error:
            name = quarantine_segment(backend, info.number)
            say(line(f"kilburn: session {info.name!r} is now {name!r}, nothing of it is deleted: {error.what}"))
            continue
        states = {page.id: replayed[page.id] for page, state in rows if replayed.get(page.id, state) != state}
        if states:
            backend.commit(info.number, Batch(head=info.head, states=states))
    return _check(backend, anchor)

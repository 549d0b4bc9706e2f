"""`fsck`: checks that everything in a store is as it was written.

The backend checks its file, every seal, every hash, and its index. This module opens each session as usual, and compares every
derived page with its sources. A repair never guesses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from typing import Any

import typer

from kilburn.backend import Backend, Batch, Finding, SegmentInfo, State
from kilburn.backends.anchor import Anchor
from kilburn.backends.places import is_url, open_backend, place_anchor, shown
from kilburn.backends.sealed import QUARANTINED
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, quarantine_segment, repair_store
from kilburn.cli.access import StorePlace, existing
from kilburn.cli.screen import many, progress
from kilburn.cli.shell import app
from kilburn.errors import KernelError, SpecError, StoreBusy, StoreCorrupt, StoreError, StoreFull, StoreReadOnly, StoreVersion
from kilburn.kernel.folding import keeps_its_spans
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.replay import rebuild
from kilburn.kernel.window import WindowState
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of
from kilburn.terminal import line, say

MAX_CHECKS = 5
"""Checks of a store while other programs write to it."""


class CheapCounter:
    """A cheap token counter with the name of a session's counter, so that no page is counted again."""

    envelope = 0
    exact = True

    def __init__(self, name: str) -> None:
        self.name = name

    def count(self, text: str) -> int:
        """Return the number of characters."""
        return len(text)


@app.command()
def fsck(where: StorePlace, place: str | None = None, repair: bool = False) -> None:
    """Check a store: every seal and hash, the sources of every fold, the index against the pages, the ledger against states and
    checkpoints.

    --repair rebuilds the text index, counters and states, replaces an unreadable observation by a note, and quarantines a session
    that cannot be opened, under another name. It deletes no message. An altered text is still reported afterwards. A store in
    PostgreSQL is checked, but not repaired. With $KILBURN_ANCHOR, the command also reports where the store is older than its
    anchor.

    The exit status is 1 if something is wrong; after --repair, if something is still wrong.

    Examples:

        kilburn fsck agent.db

        kilburn fsck --repair

    Args:
        place [STORE]: The file or URL of the store; by default that of --db.
        repair: Rebuild derived data, and quarantine sessions that cannot be read.
    """
    path = existing(place or where.db)
    if is_url(path) and repair:
        problem = "a database is checked, but not repaired"
        raise SpecError(problem, advice="restore it from a backup; `kilburn copy` rebuilds derived data in another place")
    findings: list[Finding] = []
    remaining: list[Finding] = []
    infos: list[SegmentInfo] = []
    names: dict[int, str] = {}
    try:
        with closing(_opened(path, where.tenant or "default", repair=repair)) as backend:
            names = {info.number: info.name for info in backend.segments() if info.number}
            anchor = place_anchor(path, where.tenant or "default")
            findings = remaining = _check(backend, anchor)
            if repair and findings and isinstance(backend, Sqlite):
                remaining = _repair(backend, findings, anchor)
            infos = list(backend.segments())
    except (StoreBusy, StoreFull, StoreReadOnly, StoreVersion, SpecError):
        raise
    except StoreError as error:
        if is_url(path) and not isinstance(error, StoreCorrupt):
            raise
        broken = Finding(kind="file", what=error.what)
        findings, remaining = [*findings, broken], [*remaining, broken]
    quarantined = [info.name for info in infos if info.damaged == QUARANTINED]
    sessions, pages = len(infos), sum(info.pages for info in infos)
    rows, remaining_rows = ([_row(finding, names) for finding in group] for group in (findings, remaining))
    report = {"db": shown(path), "sessions": sessions, "pages": pages, "findings": rows}
    report |= {"left": remaining_rows if repair else None} | ({"quarantined": quarantined} if quarantined else {})
    lines = []
    for row in rows:
        place = " ".join(row[key] for key in ("session", "page") if row[key])
        lines.append(line(f"{row['kind']}: {place + ': ' if place else ''}{row['what']}"))
    lines += [line(f"quarantined: {name}") for name in quarantined]
    state = "all is well" if not findings else "repaired" if repair and not remaining else many(len(remaining), "finding")
    lines.append(f"{line(shown(path))}: {many(sessions, 'session')}, {many(pages, 'page')}: {state}")
    if remaining and not repair and not is_url(path):
        lines.append("kilburn fsck --repair rebuilds derived data, and quarantines sessions that cannot be read")
    where.show(report, lines)
    if remaining:
        raise typer.Exit(1)


def _opened(path: str, tenant: str, *, repair: bool) -> Backend:
    if is_url(path):
        return open_backend(path, tenant=tenant, readonly=True)
    return Sqlite(path, tenant=tenant, readonly=not repair, restore=repair)


def _row(finding: Finding, names: Mapping[int, str]) -> dict[str, Any]:
    """Return a finding with the names of its session and page."""
    session, page = names.get(finding.segment), address_of(finding.page) if finding.page else None
    return {"kind": finding.kind, "session": session, "page": page, "what": finding.what, "derived": finding.derived}


def _check(backend: Backend, anchor: Anchor) -> list[Finding]:
    """Return all findings. If an agent wrote meanwhile, the check has seen a mixture of states, and is repeated."""
    findings: list[Finding] = []
    for _ in range(MAX_CHECKS):
        infos = backend.segments()
        with progress("checking pages"):
            findings = [*inspect_store(backend), *(anchor.findings(backend) if anchor.file else ())]
        # The store can repair these sessions, so they get no second finding that they cannot be replayed.
        repairable = {
            finding.segment for finding in findings if finding.derived and finding.kind in ("state", "session", "ledger")
        }
        whole = [info for info in infos if not info.damaged]
        with progress("replaying ledgers", len(whole)) as report:
            for number, info in enumerate(whole, start=1):
                findings += _check_session(backend, info, repairable=info.number in repairable)
                report(number)
        if not findings or backend.segments() == infos:
            return findings
    say("kilburn: other programs wrote to this store during every check; run fsck again when they are idle")
    return findings


def _replayed(backend: Backend, info: SegmentInfo) -> WindowState:
    """Rebuild the window of a session from its whole ledger.

    Raises:
        StoreCorrupt: the ledger cannot be read.
    """
    return rebuild(backend, info, CheapCounter(counter_of(backend, info.number)), recount=False, whole=True).window


def _check_session(backend: Backend, info: SegmentInfo, *, repairable: bool) -> Iterator[Finding]:
    try:
        window, rows = _replayed(backend, info), list(backend.pages(info.number))
    except StoreCorrupt as error:
        if not repairable:
            yield Finding(kind="ledger", what=f"it cannot be replayed: {error.what}", segment=info.number)
        return
    states = window.states
    if not repairable and _differs(backend, info, window):
        problem = "its checkpoint differs from the ledger"
        yield Finding(kind="checkpoint", what=problem, derived=True, segment=info.number)
    for page, state in rows:
        replayed = states.get(page.id)
        if replayed is None:
            yield Finding(kind="ledger", what="the ledger does not contain this page", segment=info.number, page=page.id)
        elif replayed != state:
            problem = f"stored as {_describe(state)}, the ledger says {_describe(replayed)}"
            yield Finding(kind="state", what=problem, derived=True, segment=info.number, page=page.id)
        if page.id < 0 and state.at != Place.DROPPED:
            for problem in _fold_problems(backend, page, window.pages, lambda number: states[number].at):
                yield Finding(kind="fold", what=problem, segment=info.number, page=page.id)


COMPARED = ("states", "groups", "open", "request", "stand_ins", "turn", "spoken_messages", "seen", "last", "last_derived")
"""Attributes of a window by which the one of a checkpoint is compared. The costs of handles are not among them, because
`CheapCounter` counts them differently."""


def _differs(backend: Backend, info: SegmentInfo, window: WindowState) -> bool:
    """Return whether a session rebuilt from its checkpoint differs from one rebuilt from its whole ledger (law 8)."""
    try:
        short = rebuild(backend, info, CheapCounter(counter_of(backend, info.number)), recount=False).window
    except StoreCorrupt:
        return True
    return any(getattr(short, name) != getattr(window, name) for name in COMPARED) or [page.id for page in short.visible()] != [
        page.id for page in window.visible()
    ]


def _describe(state: State) -> str:
    importance = f", importance {state.importance:g}" if state.importance else ""
    until = f", until {state.until:.0f}" if state.until is not None else ""
    return f"{state.at}{', pinned' if state.pinned else ''}{importance}{until}"


def _fold_problems(backend: Backend, fold: Page, pages: Mapping[int, Page], at: Callable[[int], str]) -> Iterator[str]:
    """Yield the problems of a derived page: missing sources, a trust above that of its sources, or an inexact quotation."""
    sources = [pages[source] for source in fold.sources if source in pages]
    if not (fold.sources or fold.cites) or len(sources) != len(fold.sources):
        yield f"it cites {len(fold.sources)} sources, {len(sources)} of them exist"
        return
    try:
        # The backend reports cited pages that do not exist.
        cited = [page for page, _ in backend.read(fold.cites).values() if page.digest]
    except StoreCorrupt as error:
        yield f"a cited page cannot be read: {error.what}"
        return
    dropped = [source.address for source in sources if at(source.id) == Place.DROPPED]
    if dropped:
        yield f"its source {dropped[0]} was forgotten"
        return
    # An entity is only a name, and proves nothing.
    evidence = [source.trust for source in [*sources, *cited] if source.kind is not Kind.ENTITY]
    if fold.trust > min(evidence, default=fold.trust):
        yield "its trust is higher than that of its sources"
    if fold.kind is Kind.EXCERPT:
        try:
            (text,) = backend.contents.texts([fold.digest]).values()
            exact = keeps_its_spans(fold, text, lambda page: backend.contents.texts([pages[page].digest])[pages[page].digest])
        except (StoreCorrupt, KernelError, KeyError) as error:
            yield f"its spans cannot be checked: {getattr(error, 'what', None) or f'{error} is no page'}"
            return
        if not exact:
            yield f"it differs from its spans of {' '.join(source.address for source in sources[:3])}"


def _repair(backend: Sqlite, findings: list[Finding], anchor: Anchor) -> list[Finding]:
    """Rebuild derived data, quarantine sessions that cannot be read, and return the remaining findings."""
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

"""`ps`, `show` and `stats` print sessions. The store is opened for reading."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from typing import Annotated, Any

import msgspec
from typer import Argument

from kilburn.backend import SegmentInfo, State, root_name
from kilburn.cli.access import StorePlace, open_session, session
from kilburn.cli.screen import Columns, count, progress, show_records, table
from kilburn.cli.shell import app
from kilburn.errors import SpecError, StoreCorrupt
from kilburn.event import Act
from kilburn.kernel.ledger import Stats
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Trust
from kilburn.models.queue import Stage
from kilburn.models.scheduler import JobNote
from kilburn.page import Page, address_of
from kilburn.terminal import age, emit, line, say, tell

SessionName = Annotated[str, Argument(metavar="SESSION", help="The name of a session in `kilburn ps`.", show_default=False)]


MAX_FORKS = 5
"""Forks of a session that are listed without --all."""


def newest_forks(infos: Sequence[SegmentInfo]) -> tuple[list[SegmentInfo], Counter[str]]:
    """Return the most recently used forks of each session, and the numbers of omitted forks by the session's name."""
    families: dict[str, list[SegmentInfo]] = {}
    for info in sorted(infos, key=lambda info: -info.used):
        families.setdefault(root_name(info.name), []).append(info)
    omitted = Counter({root: len(family) - MAX_FORKS for root, family in families.items() if len(family) > MAX_FORKS})
    numbers = {info.number for family in families.values() for info in family[:MAX_FORKS]}
    return [info for info in infos if info.number in numbers or info.damaged], omitted


def session_row(store: Store, info: SegmentInfo) -> dict[str, Any]:
    """Return the figures of a session for `ps` and `top`. If it cannot be read, `damaged` has the reason."""
    figures, places, damaged, jobs = Stats(), Counter[str](), None, None
    try:
        if info.damaged:
            raise StoreCorrupt(info.damaged)
        session = open_session(store, info.number, info.name)
        figures, jobs = session.stats(), session_jobs(session)
        places = Counter(
            state.at
            for page, state in session.contents.pages()
            if page.id > 0 and session.contents.owner(page.id) == session.number
        )
    except StoreCorrupt as error:
        damaged = error.what
    keys = ("hit_rate", "faults", "refaults", "evictions", "folds")
    return {
        "session": info.name,
        "pages": figures.pages,
        "derived": figures.derived,
        "tokens": figures.tokens_seen,
        "tokens_in_window": figures.tokens_in_window,
        "window": figures.window or None,
        "fill": figures.fill,
        "places": dict(places),
        **{key: figures[key] for key in keys},
        "jobs": jobs,
        "created": info.created,
        "used": info.used,
        "damaged": damaged,
    }


def session_cells(row: dict[str, Any], *keys: str) -> list[Any]:
    """Return the cells of a table for a row of `session_row`: the session's name, the figures `keys`, and the last use."""
    name = row["session"] + (" (damaged)" if row["damaged"] else "")
    return [name, *(row[key] for key in keys), f"{age(row['used'])} ago"]


def session_jobs(session: Session) -> dict[str, Any] | None:
    """Return the jobs of a session that a scheduler served: the state of the last one, and the seconds that all finished ones
    waited and ran."""
    last, since = None, 0.0
    finished: list[JobNote] = []
    for event in session.ledger.events(act=Act.NOTE):
        if "job" not in event.data:
            continue
        try:
            last, since = msgspec.convert(event.data["job"], JobNote), event.time
        except msgspec.ValidationError:  # written by another version
            continue
        if last.stage not in (Stage.WAITING, Stage.RUNNING):
            finished.append(last)
    if last is None:
        return None
    return {
        "stage": str(last.stage),
        "since": since,
        "ahead": last.ahead,
        "tenant": last.tenant,
        "discipline": last.discipline,
        "slice": last.slice,
        "finished": len(finished),
        "waited": sum(job.waited for job in finished),
        "longest": max((job.waited for job in finished), default=0.0),
        "ran": sum(job.ran for job in finished),
    }


LESS = ("folds", "faults", "of", "in window", "pages")
"""Columns of `ps` that a narrow terminal omits, the first one first."""

LESS_QUEUES = ("slice", "discipline", "mean turnaround", "since", "longest wait", "finished", "ahead")

QUEUES = ("session", "job", "since", "ahead", "discipline", "slice", "finished", "mean wait", "longest wait", "mean turnaround")


def queue_cells(row: dict[str, Any]) -> list[Any]:
    """Return a row of the table of queues, for a session that a scheduler served."""
    jobs = row["jobs"]
    finished = max(1, jobs["finished"])
    wait, turnaround = jobs["waited"] / finished, (jobs["waited"] + jobs["ran"]) / finished
    slice = "-" if jobs["slice"] is None else f"{jobs['slice']} tokens"
    stage = [row["session"], jobs["stage"], f"{age(jobs['since'])} ago", jobs["ahead"], jobs["discipline"], slice]
    return [*stage, jobs["finished"], f"{wait:.2f} s", f"{jobs['longest']:.2f} s", f"{turnaround:.2f} s"]


@app.command()
def ps(where: StorePlace, every: bool = False) -> None:
    """List the sessions of a store with their pages, tokens, window, hit rate and last use. A second table lists sessions that a
    scheduler serves: the state of the last job, the slice, and how long jobs waited.

    If a session has many forks (`NAME~2`, ...), only the newest ones are listed.

    Example:

        kilburn ps --db agent.db

    Args:
        every --all: List all forks of a session.
    """
    with where.reading() as store:
        infos = store.sessions()
        omitted: Counter[str] = Counter()
        if not (every or where.json):
            infos, omitted = newest_forks(infos)
        with progress("reading the ledgers", len(infos)) as report:
            rows = []
            for number, info in enumerate(infos, start=1):
                rows.append(session_row(store, info))
                report(number)
    if where.json:
        emit(rows)
        return
    heads = ("session", "pages", "tokens", "in window", "of", "hit rate", "faults", "folds", "last use")
    keys = ("pages", "tokens", "tokens_in_window", "window", "hit_rate", "faults", "folds")
    table(heads, [session_cells(row, *keys) for row in rows], less=LESS)
    if served := [row for row in rows if row["jobs"]]:
        tell("")
        table(QUEUES, map(queue_cells, served), less=LESS_QUEUES)
    for root, number in omitted.items():
        say(f"and {count(number)} older forks of {line(root)}: kilburn ps --all")
    for row in rows:
        if row["damaged"]:
            say(line(f"kilburn: {row['session']!r} is damaged: {row['damaged']}; see kilburn fsck"))


@app.command()
def stats(where: StorePlace, name: SessionName) -> None:
    """Show the figures of one session, from its ledger.

    Example:

        kilburn stats session-1 --json
    """
    with where.reading() as store:
        opened = session(store, name)
        figures = dict(opened.stats())
    if where.json:
        emit(figures)
        return
    warnings = figures.pop("warnings")
    table(("figure", "value"), [(key.replace("_", " "), value) for key, value in figures.items()])
    for warning in warnings:
        tell(f"warning: {warning}")


@app.command()
def show(where: StorePlace, name: SessionName, address: str | None = None) -> None:
    """Show the page table of a session, or all data of some pages, including their text.

    Examples:

        kilburn show session-1

        kilburn show session-1 p17

    Args:
        address [ADDRESS]: A page p17, a range p17-p42, or a fold f3; by default all pages.
    """
    with where.reading() as store:
        opened = session(store, name)
        pages = dict(enumerate(opened.contents.pages()))
        cited = citing(page for page, _ in pages.values())
        if address is None:
            described = [describe(page, state, cited) for page, state in pages.values()]
            if where.json:
                emit({"session": name, "pages": described})
            else:
                show_records(described, PAGE_COLUMNS, json=False)
            return
        numbers = set(opened.contents.resolve(address))
        chosen = [(page, state) for page, state in pages.values() if page.id in numbers]
        opened.contents.fetch(page for page, _ in chosen)
        described = [describe(page, state, cited) | {"text": opened.contents.text(page.id)} for page, state in chosen]
    if not described:
        raise SpecError(f"{address} names no page of {name!r}", advice="`kilburn show SESSION` lists the addresses")
    where.show({"session": name, "address": address, "pages": described}, "\n\n".join(map(_card, described)))


def citing(pages: Any) -> dict[int, list[str]]:
    """Return the addresses of the pages derived from each page, by its id."""
    cited: dict[int, list[str]] = {}
    for page in pages:
        for source in page.sources:
            cited.setdefault(source, []).append(page.address)
    return cited


def describe(page: Page, state: State, cited: dict[int, list[str]]) -> dict[str, Any]:
    """Return all data of a page except its text."""
    return {
        "address": page.address,
        "kind": str(page.kind),
        "role": str(page.role),
        "tokens": page.tokens,
        "time": page.time,
        "trust": Trust(page.trust).name.lower(),
        "at": state.at,
        "pinned": state.pinned,
        "importance": state.importance,
        "message": page.message,
        "group": address_of(page.group) if page.group else None,
        "call": page.call,
        "name": page.name,
        "sources": [address_of(source) for source in page.sources],
        "spans": [list(span) for span in page.spans],
        "folds": cited.get(page.id, []),
        "digest": page.digest,
        "label": page.label,
    }


def _marks(row: dict[str, Any]) -> str:
    return ", ".join((["pinned"] if row["pinned"] else []) + ([f"importance {row['importance']:g}"] if row["importance"] else []))


PAGE_COLUMNS: Columns = {
    **{key: key for key in ("address", "kind", "role", "tokens")},
    "age": lambda row: age(row["time"]),
    **{key: key for key in ("trust", "at")},
    "": _marks,
    "what": "label",
}
"""The columns of the page table."""


def _card(row: dict[str, Any]) -> str:
    when = datetime.fromtimestamp(row["time"]).astimezone().isoformat(sep=" ", timespec="seconds")
    lines = [
        f"{row['address']}  {row['kind']}, {row['role']}, {count(row['tokens'])} tokens, trust {row['trust']}",
        f"  admitted  {when} ({age(row['time'])} ago), message {row['message']}",
        f"  is        {', '.join(filter(None, (row['at'], _marks(row))))}",
    ]
    for key, title in (("call", "call"), ("name", "tool"), ("group", "group")):
        if row[key]:
            lines.append(f"  {title:<9} {line(str(row[key]))}")
    if row["sources"]:
        lines.append(f"  made from {' '.join(row['sources'])}{' spans ' + str(row['spans']) if row['spans'] else ''}")
    if row["folds"]:
        lines.append(f"  folded in {' '.join(row['folds'])}")
    lines.append(f"  sha256    {row['digest']}")
    return "\n".join([*lines, "", row["text"]])

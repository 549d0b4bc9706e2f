"""Forgets what a person asks for, and writes a receipt: forgotten pages, places they were erased from, places out of reach.

A request is turned into pages of sessions; pages that were made from them, in any session, are forgotten first. A session that is
forgotten as a whole loses its name, its user and its ledger too. A crash in the middle leaves no dangling citation, and a second
request goes on.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import msgspec

from kilburn.backend import Backend, SegmentInfo, SegmentKind, State
from kilburn.errors import StoreCorrupt, StoreStale
from kilburn.event import Act
from kilburn.forgetting.closure import Home, Key, forget
from kilburn.kernel.branches import fork_of, named_in, origin_in
from kilburn.kernel.receipts import ranges
from kilburn.message import Kind, Trust
from kilburn.page import Page, Place, parse_address
from kilburn.search.found import DamageWarning

UNREACHED = (
    "copies and backups made elsewhere",
    "file-system snapshots and blocks that the disk has freed",
    "caches and logs of providers that were sent a prompt with it",
    "other programs that have the store open, until they read it again",
)

Rows = Mapping[Key, tuple[Page, State]]

MAX_ATTEMPTS = 20
"""Attempts at forgetting a segment that another writer adds to."""


class Export(msgspec.Struct, frozen=True, kw_only=True):
    """Is a copy that Kilburn made and does not erase: its session, its destination, and its time in seconds since the epoch."""

    session: str
    to: str
    time: float


class Erasure(msgspec.Struct, frozen=True, kw_only=True):
    """The receipt of a forget. It lists what was there at the beginning; what others add meanwhile is forgotten too.

    Args:
        asked: the request: what to forget.
        time: seconds since the epoch.
        pages: the addresses of the forgotten pages, in ranges, by the name of their segment.
        whole: names of the segments that are gone, with their ledgers.
        places: counts of what was erased: originals, folds, facts, entities, chunks, notes, and entries of the index of words. An
            entry takes its vectors with it, and its place in the queue of those without one.
        told: places outside the store that erased their copies, such as spilled keys and values.
        exports: copies that Kilburn knows of.
        left: (name, reason) of segments that are left alone (unlike in `Receipt.left`): they are damaged, or somebody else's,
            and what goes was made from them.
        concerned: names of notes that may hold some of it, by the name of their segment: agents wrote them since, and nobody said
            in which session. They stay.
        unreached: where the text may still be: places that the store knows of, and `UNREACHED`.
    """

    asked: dict[str, str]
    time: float
    pages: dict[str, tuple[str, ...]] = {}
    whole: tuple[str, ...] = ()
    places: dict[str, int] = {}
    told: tuple[str, ...] = ()
    exports: tuple[Export, ...] = ()
    left: tuple[tuple[str, str], ...] = ()
    concerned: dict[str, tuple[str, ...]] = {}
    unreached: tuple[str, ...] = UNREACHED


def unreached(backend: Backend) -> tuple[str, ...]:
    """Return the places that may still hold erased text: those that the store knows of, and those that no program can look at."""
    return (*backend.contents.unreached(), *UNREACHED)


def made_from(backend: Backend, info: SegmentInfo) -> dict[int, list[int]]:
    """Return the pages of other segments that were made from pages of a segment: segment -> pages."""
    derived: dict[int, list[int]] = {}
    pages = [page.id for page, _ in backend.pages(info.number)]
    for number, page in backend.citing(info.number, pages) if pages else ():
        if number != info.number:
            derived.setdefault(number, []).append(page)
    return derived


def made_by(backend: Backend, tool: str) -> dict[int, list[int]]:
    """Return the results of a tool, in every session: segment -> pages."""
    results: dict[int, list[int]] = {}
    for info in backend.segments():
        if info.kind is SegmentKind.SESSION and not info.damaged:
            calls: dict[int, str | None] = {}
            for page, state in backend.pages(info.number):
                calls[page.id] = page.name if page.kind is Kind.CALL else None
                if page.answers and calls.get(page.answers) == tool and state.at is not Place.DROPPED:
                    results.setdefault(info.number, []).append(page.id)
    return results


def make_receipt(home: Home, keys: Sequence[Key], receipt: Erasure) -> Erasure:
    """Return the receipt for forgetting these pages; change nothing.

    Args:
        keys: all pages to forget; see `closure`.
        receipt: the receipt so far.
    """
    backend, places = home.backend, Counter[str]()
    pages: dict[int, list[int]] = {}
    # The row of an inherited page is in the parent's segment.
    touched: dict[int, list[int]] = {}
    for number, page in keys:
        touched.setdefault(number, []).append(page)
    names = {info.number: info.name for info in backend.segments()}
    kinds = {info.number: info.kind for info in backend.segments()}
    rows = backend.read(keys)
    for (number, page), (page_row, _) in rows.items():
        pages.setdefault(number, []).append(page)
        places[_describe_place(page_row, kinds[number])] += 1
    places["index entries"] = sum(map(len, backend.words.entries(keys).values()))
    cited = {segment for page_row, _ in rows.values() for segment, _ in page_row.cites} - pages.keys()
    stays = [(names[number], "what goes was made from it") for number in sorted(cited) if number in names]
    erasers = {name for number in touched for name in getattr(home.segment(number), "erasers", ())}
    exports = [export for number in sorted(touched) for export in _exports(backend, number, names[number], touched[number])]
    creation_times = {info.name: info.created for info in backend.segments()}
    for to, time in copied_to(backend).items():
        exports += [
            Export(session=names[number], to=to, time=time) for number in sorted(touched) if creation_times[names[number]] <= time
        ]
    return msgspec.structs.replace(
        receipt,
        pages={names[number]: ranges(page_ids) for number, page_ids in sorted(pages.items())},
        places={place: count for place, count in places.items() if count},
        told=tuple(sorted(erasers)),
        exports=tuple(exports),
        left=(*receipt.left, *stays),
        concerned=_concerned(backend, rows),
        unreached=unreached(backend),
    )


def _concerned(backend: Backend, going: Rows) -> dict[str, tuple[str, ...]]:
    """Return the names of the notes that agents wrote in no known session after a message that goes, by their segment."""
    infos = {info.number: info for info in backend.segments() if not info.damaged}
    sessions = {number: info for number, info in infos.items() if info.kind is SegmentKind.SESSION}
    times = [page.time for (number, _), (page, _) in going.items() if number in sessions]
    users = {sessions[number].user for number, _ in going if number in sessions}
    # The owner of notes is a user or an agent. Another user's agent had other messages.
    other_users = {info.user for info in sessions.values()} - users - {""}
    concerned = {}
    for info in infos.values() if times else ():
        if info.kind is SegmentKind.NOTES and info.user not in other_users:
            names = {
                page.name or ""
                for page, _ in backend.pages(info.number)
                if page.digest and page.trust <= Trust.AGENT and not page.cites and page.time >= min(times)
                if (info.number, page.id) not in going
            }
            if names:
                concerned[info.name] = tuple(sorted(names))
    return concerned


def receipt_pages(backend: Backend, receipt: Erasure) -> list[tuple[str, Page]]:
    """Return the pages that a receipt names, each with the name of its segment."""
    pages = []
    for info in backend.segments():
        for address in receipt.pages.get(info.name, ()):
            first, last = parse_address(address)
            rows = backend.read((info.number, number) for number in range(first, last + 1))
            pages += [(info.name, page) for page, _ in rows.values()]
    return pages


def find_copies(backend: Backend, going: list[tuple[str, Page]]) -> list[dict[str, str]]:
    """Return the pages of this tenant that have the same text and stay."""
    digests = {page.digest: page.address for _, page in going if page.digest}
    forgotten_keys = {(name, page.id) for name, page in going}
    copies = []
    for info in backend.segments() if digests else ():
        try:
            rows = list(backend.pages(info.number))
        except StoreCorrupt as error:
            warnings.warn(f"whether {info.name!r} has a copy cannot be said: {error.what}", DamageWarning, stacklevel=2)
            continue
        for page, _ in rows:
            if page.digest in digests and (info.name, page.id) not in forgotten_keys:
                copies.append({"session": info.name, "address": page.address, "of": digests[page.digest]})
    return copies


def described(
    receipt: Erasure, going: Iterable[tuple[str, Page]], copies: Iterable[Mapping[str, str]], *, dry: bool
) -> dict[str, Any]:
    """Return a receipt as JSON, with the addresses of all forgotten pages and with the copies that stay.

    Args:
        dry: whether nothing was forgotten yet.
    """
    session, address = receipt.asked.get("session"), receipt.asked.get("address")
    addresses = [page.address if name == session and address else f"{name} {page.address}" for name, page in going]
    report = {"session": session, "asked": address or receipt.asked, "forgotten": addresses, "dry": dry, "copies": list(copies)}
    return report | {key: value for key, value in msgspec.structs.asdict(receipt).items() if key != "asked"}


def _describe_place(page: Page, kind: SegmentKind) -> str:
    if kind in (SegmentKind.DOCUMENT, SegmentKind.NOTES):
        return "chunks" if kind is SegmentKind.DOCUMENT else "notes"
    if page.kind in (Kind.FACT, Kind.ENTITY):
        return "facts" if page.kind is Kind.FACT else "entities"
    return "originals" if page.id > 0 else "folds"


def _exports(backend: Backend, number: int, name: str, pages: list[int]) -> Iterable[Export]:
    """Yield the exports of a segment that were made when these pages existed."""
    first = min((page for page in pages if page > 0), default=0)
    for event in backend.events(number, act=Act.NOTE):
        if "export" in event.data and 0 < first <= int(event.data.get("last", 0)):
            yield Export(session=name, to=str(event.data["export"]), time=event.time)


def remember_copy(source: Backend, to: str, time: float) -> None:
    """Note in a store that a copy of it is made, so that a receipt can name the copy.

    Raises:
        StoreReadOnly, StoreBusy, StoreFull.
    """
    copies = copied_to(source)
    copies[to] = time
    source.settings.put("copies", msgspec.json.encode(copies).decode())


def copied_to(source: Backend) -> dict[str, float]:
    """Return the copies of a store that `kilburn copy` made: destination -> time of the last update."""
    return msgspec.json.decode(source.settings.all().get("copies", "{}"), type=dict[str, float])


def erase(home: Home, roots: Mapping[int, Iterable[int]], keys: Sequence[Key], whole: Iterable[int], why: str) -> None:
    """Forget pages, whose closure is `keys`, and segments as a whole.

    Raises:
        StoreError: other writers keep adding to a segment, or the disk fails; a second call goes on.
        Exception: the first error of an eraser outside the store; all pages are forgotten in the store.
    """
    errors = list[Exception]()
    with home.backend.erasing():
        forget(home, roots, why, keys, errors)
        names = {info.number: info.name for info in home.backend.segments()}
        for number in whole:
            _erase(home, number, names[number], why, errors)
    if errors:
        raise errors[0]


def _erase(home: Home, number: int, name: str, why: str, errors: list[Exception]) -> None:
    """Forget a segment as a whole, with its branches."""
    with ExitStack() as leaving:
        for remaining_tries in reversed(range(MAX_ATTEMPTS)):
            _erase_branches(home, number, name, why, errors)
            if page_ids := _left_in(home, number):
                forget(home, {number: page_ids}, why, errors=errors)
            # Pages that others have added since are forgotten in the same transaction.
            try:
                with (holder := home.segment(number)).contents.alone():
                    if _branches(home, number, name):
                        raise StoreStale(f"a branch of {name!r} has just begun", advice="forget it again")
                    added = _left_in(home, number)
                    dropped = holder.contents.drop(added, why) if added else []
                    home.backend.erase(number)
            except StoreStale:
                if not remaining_tries:
                    raise
            else:
                errors += holder.contents.erase_elsewhere(dropped)
                break
            # A page was made from these. From now on no page can be made from pages of this segment.
            leaving.enter_context(home.backend.leaving([(number, 0)]))
    # A branch may have begun just before that; from now on none can.
    _erase_branches(home, number, name, why, errors)


def _left_in(home: Home, number: int) -> list[int]:
    return [page.id for page, state in home.backend.pages(number) if state.at is not Place.DROPPED]


def _erase_branches(home: Home, number: int, name: str, why: str, errors: list[Exception]) -> None:
    for info in _branches(home, number, name):
        _erase(home, info.number, info.name, why, errors)


def _branches(home: Home, number: int, name: str) -> list[SegmentInfo]:
    """Return the branches of a segment, according to their ledgers."""
    infos = named_in(home.backend, name).get(name, ())
    forks = ((info, fork_of(origin_in(home.backend.events(info.number)))) for info in infos)
    return [info for info, fork in forks if fork is not None and fork.forked == number]

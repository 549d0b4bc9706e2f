"""What a request shipped: the prompts that the ledgers say were made for it, with the addresses of their pages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.budget import Counter
from kilburn.event import Act, Event
from kilburn.kernel.receipts import ranges
from kilburn.kernel.render import items
from kilburn.kernel.replay import last_of, rebuild
from kilburn.model import is_count
from kilburn.page import Place, address_of


class Shipment(NamedTuple):
    """One prompt.

    Args:
        session: the name of the session.
        turn: the number of its last message.
        event: the number of its event in the session's ledger.
        time: seconds since the epoch.
        request: the ids of its request.
        pages: addresses of the pages in the prompt, folds first. out: addresses that only a handle or a fold mentions.
        beside: addresses of cited pages that were shown in addition; those of another session follow its name.
        forgotten: the number of these pages that have been forgotten since.
        tokens: by the session's counter. again: the tokens among them that an engine had to process again because of an edit.
        prompt, cached, reply: tokens reported by the provider; None if it reported none.
    """

    session: str
    turn: int
    event: int
    time: float
    request: dict[str, str]
    pages: tuple[str, ...]
    out: tuple[str, ...]
    beside: tuple[str, ...]
    forgotten: int
    tokens: int
    again: int
    prompt: int | None
    cached: int | None
    reply: int | None


def shipments(backend: Backend, counter: Counter, request_id: str, session: str | None = None) -> Iterator[Shipment]:
    """Yield the prompts of a request, found by any of its ids, oldest first in each session.

    Args:
        session: search only this session; None searches the ledgers of all sessions of the tenant.
    """
    names = {info.number: info.name for info in backend.segments()}
    for info in backend.segments():
        if info.damaged or info.kind is not SegmentKind.SESSION or session not in (None, info.name):
            continue
        for event in backend.events(info.number, act=Act.SHIP):
            request = event.data.get("request")
            # Another program may have written anything.
            if isinstance(request, dict) and request_id in request.values():
                yield _shipment(backend, counter, info, event, names)


def _shipment(backend: Backend, counter: Counter, info: SegmentInfo, ship: Event, names: dict[int, str]) -> Shipment:
    turn, until = ship.turn, ship.number
    if is_count(asked_turn := ship.data.get("turn")):
        # A request that was asked again is answered from the session as it was then.
        turn, until = asked_turn, last_of(backend, info.number, asked_turn, ship.number)
    rebuilt = rebuild(backend, info, counter, until=until)
    window, owner = rebuilt.window, rebuilt.lineage.owner
    visible = [page for _, page, instead in items(window) if page is not None and not instead]
    rows = backend.read((owner(page.id), page.id) for page in visible)
    forgotten = sum(1 for _, state in rows.values() if state.at is Place.DROPPED)
    out = [page.id for page in window.pages.originals() if window.at(page.id) in (Place.OUT, Place.STUB, Place.FOLDED)]
    usage, cites = _after(backend, info.number, ship.number)
    counts = {name: value if is_count(value := usage.get(name)) else None for name in ("prompt", "cached", "reply")}
    beside = [f"{names.get(number, number)} {address_of(page)}" for number, page in cites if number != info.number]
    own_cites = [address_of(page) for number, page in cites if number == info.number]
    return Shipment(
        session=info.name,
        turn=turn,
        event=ship.number,
        time=ship.time,
        request={str(name): str(value) for name, value in ship.data["request"].items()},
        pages=ranges(page.id for page in visible),
        out=ranges(out),
        beside=(*own_cites, *beside),
        forgotten=forgotten,
        tokens=ship.tokens,
        again=again if is_count(again := ship.data.get("again")) else 0,
        **counts,
    )


def _after(backend: Backend, number: int, ship: int) -> tuple[dict[str, object], list[tuple[int, int]]]:
    """Return the usage that the provider reported for a prompt, and the pages that its reply cites."""
    usage: dict[str, object] = {}
    cites: list[tuple[int, int]] = []
    heard = False
    for event in backend.events(number, ship):
        if event.act is Act.SHIP:
            break
        if event.act is Act.ADMIT and not heard:
            heard = True
            for page, _ in backend.read((number, page_id) for page_id in event.pages).values():
                if page.role == "assistant":
                    cites += [*((number, source) for source in page.sources), *page.cites]
        elif event.act is Act.USAGE and not usage:
            usage = dict(event.data)
    return usage, list(dict.fromkeys(cites))

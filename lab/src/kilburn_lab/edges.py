"""The graph of a memory, read: the edges around a name, at a time, as known at a time; and entities made one by hand.

Nothing here is a second index. Pages with a name are found by the store's text index, the edges of an entity by its index
of citations, and their validity is that of any page.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

import msgspec

from kilburn.backend import State
from kilburn.claims import contested, subject_key
from kilburn.collections.collecting import is_true, since_of, until_of
from kilburn.collections.collection import Collection
from kilburn.errors import KernelError
from kilburn.event import Act
from kilburn.kernel.store import Store
from kilburn.message import Kind, Trust
from kilburn.move import Add, Restore, Retire
from kilburn.page import Claim, Page, Place
from kilburn_lab.graph import ALIAS

__all__ = ["neighbourhood"]

MAX_EDGES = 500
"""Edges of one answer."""

PAGES_PER_READ = 500
"""Pages that are read at a time."""

MAX_PASSAGES = 200
"""Passages that are looked at for a name."""


class Edge(msgspec.Struct, frozen=True, kw_only=True):
    """A relation between two things, with the times of both kinds, in seconds since the epoch.

    Args:
        memory: the name of its collection; `address` is the fact there.
        since, until: from when to when it is true; `until` is None if no end is known.
        recorded: when it was written.
        contested: addresses of edges in the same answer that contradict it.
    """

    memory: str
    address: str
    subject: str
    relation: str
    object: str
    text: str
    since: float
    until: float | None
    recorded: float
    trust: Trust
    contested: tuple[str, ...] = ()


def entities(memory: Collection, name: str) -> list[tuple[Page, State]]:
    """Return the pages of entities with this name, those that were merged into another included; forgotten and proposed ones
    not."""
    return [row for row in _named(memory, name) if row[0].kind is Kind.ENTITY]


def _named(memory: Collection, name: str) -> list[tuple[Page, State]]:
    """Return the facts and entities of a memory whose claim has this name."""
    key = subject_key(name)
    passages = memory.backend.words.search(key, segments=[memory.number], limit=MAX_PASSAGES)
    rows = memory.backend.read(dict.fromkeys((passage.segment, passage.page) for passage in passages))
    return [
        (page, state)
        for page, state in rows.values()
        if state.at in (Place.OUT, Place.RETIRED)
        and page.claim is not None
        and key in (subject_key(page.claim.subject), subject_key(page.claim.object) if page.kind is Kind.FACT else None)
    ]


def neighbourhood(
    store: Store,
    name: str,
    *,
    user: str = "",
    at: float | None = None,
    known: float | None = None,
    depth: int = 1,
    limit: int = MAX_EDGES,
) -> list[Edge]:
    """Return the edges of an entity, and of those that are up to `depth` edges away; nearest first, then the newest.

    Args:
        user: whose memory.
        at: what was true at this time; None for now. In seconds since the epoch, as `known`.
        known: by what was written up to this time; None for all. This reads the memory's ledger.
        limit: edges at most.

    Raises:
        KernelError: a depth below 1. SpecError: no name of a user. StoreReadOnly: there is no such memory.
    """
    if depth < 1 or limit < 1:
        raise KernelError(f"depth={depth}, limit={limit}", advice="give numbers of 1 or more")
    memory = store.memory(user).collection
    ends = _ends(memory, known) if known is not None else None
    time = store.clock() if at is None else at

    def state_then(page: Page, state: State) -> State | None:
        """Return the state of a page as it was known, if it was true at that time."""
        if ends is not None and known is not None:
            if page.time > known:
                return None
            state = msgspec.structs.replace(state, at=Place.OUT, until=ends.get(page.id))
        return state if is_true(page, state, time, now=at is None) else None

    facts: dict[int, tuple[Page, State]] = {}
    heard: set[str] = set()
    fresh = [name]
    for _ in range(depth):
        rows = _around(memory, fresh, heard, state_then, limit - len(facts))
        new = {page: row for page, row in rows.items() if page not in facts}
        facts |= dict(sorted(new.items(), key=lambda row: (-since_of(row[1][0]), -row[1][0].time, row[0])))
        fresh = [name for page, _ in new.values() if page.claim is not None for name in (page.claim.subject, page.claim.object)]
        if not fresh or len(facts) >= limit:
            break
    return _edges(memory, list(facts.values())[:limit])


def _around(
    memory: Collection,
    names: Iterable[str],
    heard: set[str],
    state_then: Callable[[Page, State], State | None],
    limit: int,
) -> dict[int, tuple[Page, State]]:
    """Return the facts about some names and their aliases, those that were written last first; `heard` grows by the names."""
    rows: dict[int, tuple[Page, State]] = {}
    waiting = list(names)
    while waiting and len(rows) < limit:
        name = waiting.pop()
        if not subject_key(name) or subject_key(name) in heard:
            continue
        heard.add(subject_key(name))
        matches = _named(memory, name)
        pages = [page.id for page, _ in matches if page.kind is Kind.ENTITY]
        citing = [key for key in memory.backend.citing(memory.number, pages) if key[0] == memory.number] if pages else []
        keys = list(dict.fromkeys((*citing, *((memory.number, page.id) for page, _ in matches if page.kind is Kind.FACT))))
        for start in range(0, len(keys), PAGES_PER_READ):
            for page, state in memory.backend.read(keys[start : start + PAGES_PER_READ]).values():
                if page.kind is not Kind.FACT or page.claim is None or state.at not in (Place.OUT, Place.RETIRED):
                    continue
                if page.claim.relation == ALIAS and state.at is Place.OUT:
                    waiting += [page.claim.subject, page.claim.object]
                past_state = state_then(page, state)
                if past_state is not None:
                    rows[page.id] = page, past_state
            if len(rows) >= limit:
                break
    return rows


def _ends(memory: Collection, recorded_until: float) -> dict[int, float | None]:
    """Return when each page ceased to be true, by what was written up to a time; None for a page that was restored. A page that
    was only proposed by then was never true."""
    ends: dict[int, float | None] = {}
    for event in memory.ledger.events():
        if event.time > recorded_until:
            break
        if event.data.get("at") == Place.PROPOSED:
            ends.update(dict.fromkeys(event.pages, -math.inf))
        elif event.act in (Act.RETIRE, Act.RESTORE):
            until = event.data.get("until", event.time) if event.act is Act.RETIRE else None
            ends.update(dict.fromkeys(event.pages, until))
    return ends


def _edges(memory: Collection, rows: Sequence[tuple[Page, State]]) -> list[Edge]:
    texts = memory.backend.contents.texts({page.digest for page, _ in rows}) if rows else {}
    rivals = contested((memory.number, page.claim) for page, _ in rows)
    return [
        Edge(
            memory=memory.name,
            address=page.address,
            subject=page.claim.subject,
            relation=page.claim.relation,
            object=page.claim.object,
            text=texts[page.digest],
            since=since_of(page),
            until=until_of(page, state),
            recorded=page.time,
            trust=page.trust,
            contested=tuple(rows[index][0].address for index in against),
        )
        for (page, state), against in zip(rows, rivals, strict=True)
        if page.claim is not None
    ]


def merge(memory: Collection, alias: str, name: str) -> str:
    """Make two entities one, as a person: the page of `alias` is retired in favour of that of `name`, and an edge says so.

    Returns:
        The address of that edge; `unmerge` takes it back.

    Raises:
        KernelError: one of them is not known, or they are one already.
    """
    alias_page, page = _in_force(memory, alias), _in_force(memory, name)
    if alias_page is None or page is None or alias_page.id == page.id:
        raise KernelError(f"{alias!r} and {name!r} are no two entities of {memory.name!r}", advice="give the names of two")
    assert alias_page.claim is not None
    assert page.claim is not None
    claim = Claim(subject=alias_page.claim.subject, relation=ALIAS, object=page.claim.subject, many=True)
    text = f"{claim.subject} {ALIAS} {claim.object}"
    edge = Add(text=text, claim=claim, sources=(alias_page.id, page.id), why="merged")
    return memory.apply(edge, Retire((alias_page.id,), by=page.id, why="merged"))[0]


def unmerge(memory: Collection, address: str) -> None:
    """Take a merge back, by the address of its edge.

    Raises:
        UnknownAddress, Forgotten. KernelError: it is no such edge.
    """
    (number,) = memory.contents.resolve(address)[:1]
    page, _ = memory.read(number)
    if page.claim is None or page.claim.relation != ALIAS:
        raise KernelError(f"{address} merges nothing", advice="give the address of an edge that `merge` returned")
    rows = memory.backend.read((memory.number, source) for source in page.sources)
    retired = tuple(source.id for source, state in rows.values() if state.at is Place.RETIRED)
    back = (Restore(retired, why="unmerged"),) if retired else ()
    memory.apply(Retire((number,), why="unmerged"), *back)


def _in_force(memory: Collection, name: str) -> Page | None:
    return next((page for page, state in entities(memory, name) if state.at is Place.OUT), None)

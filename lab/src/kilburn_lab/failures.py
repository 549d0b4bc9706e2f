"""The four ways in which a memory fails although nothing is lost (brief 002), each with a detector and a count.

- *not triggered*: the user speaks of the past, or of something that the memory knows and the session does not, and
  nothing was recalled;
- *unattributed*: a fact whose origin cannot be found;
- *decayed*: a fact that nobody confirmed or used for long, that is past its end, or whose vector is another embedder's;
- *contaminated*: facts that contradict each other, or one that was learned from recalled text.

`examine` looks for all four and writes the counts into the memory's ledger; `counted` reads them. What is found is a
hint for a person or for a policy, and changes nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from enum import StrEnum
from typing import Any

import msgspec

from kilburn.backend import State
from kilburn.claims import contested, is_speaker, plain_name
from kilburn.collections.collecting import is_true, until_of
from kilburn.collections.collection import Collection
from kilburn.event import Act
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.message import Kind, Role
from kilburn.page import Page, Place

STALE = 180 * 86_400.0
"""Seconds after which a fact that nobody used or said again has decayed."""

MOST = 10_000
"""Passages without a vector that are looked at."""

_PAST = re.compile(
    r"\b(?:(?:as|like|what) (?:i|we|you) (?:said|told|mentioned|discussed|agreed|decided)|i (?:already |once )?told you"
    r"|(?:do|did|can|don't) you (?:still )?(?:remember|recall)|remember (?:when|what|that|how|my|the)|the other day"
    r"|last (?:time|week|month|year|session)|(?:we|you and i) (?:talked|spoke|discussed|agreed|decided)|same as (?:before|last)"
    r"|(?:my|the|our) usual"
    r"|remind me (?:of|about|when|what|who|where|how)|(?:what )?did i (?:tell|say|mention)"
    r"|(?:when|what|where|who)(?:'s| is| was| are) (?:my|our) .{1,60} again"
    r"|earlier (?:you|i|we)|(?:you|i|we) .{0,20}(?:earlier|before|previously)\b)",
    re.IGNORECASE,
)
_NAME = re.compile(r"\b[A-Z][\w'-]+(?: [A-Z][\w'-]+)*")


class Failing(StrEnum):
    """How a memory failed."""

    NOT_TRIGGERED = "not triggered"
    UNATTRIBUTED = "unattributed"
    DECAYED = "decayed"
    CONTAMINATED = "contaminated"


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """One finding: `address` in the process called `process`, and why, in words that quote no page."""

    kind: Failing
    session: str
    address: str
    why: str


def not_triggered(session: Session, memory: Collection) -> list[Failure]:
    """Messages of the user in a session that needed the memory, and after which nothing was recalled or searched before
    the user spoke again.

    A message needs it if it speaks of the past, or names something that a claim of the memory names and nothing that was
    said before in the session does.
    """
    rows = [(page, state) for page, state in session.contents.pages() if page.id > 0 and state.at is not Place.DROPPED]
    asked = [page for page, _ in rows if page.role is Role.USER and page.kind is Kind.TEXT]
    used = [event.turn for event in session.ledger.events() if event.act in (Act.FAULT, Act.SEARCH)]
    times = [event.time for event in memory.ledger.events() if event.act in (Act.FAULT, Act.SEARCH)]
    known = _names(memory)
    spread = Counter(name for names in known.values() for name in names)
    found, heard = [], ""
    texts = {page.id: session.contents.text(page.id) for page, _ in rows if page.kind in (Kind.TEXT, Kind.RESULT)}
    order = iter(sorted(texts))
    for page, following in zip(asked, [*asked[1:], *([None] if asked else [])], strict=True):
        for earlier in order:
            if earlier >= page.id:
                break
            heard += f" {plain_name(texts[earlier])} "
        text = texts[page.id]
        why = "the user speaks of the past" if _PAST.search(text) else ""
        # What was learned from this message was not known before it.
        taught = known.get((session.number, page.id), set())
        if not why and any(spread[name] > (name in taught) and f" {name} " not in heard for name in _mentioned(text)):
            why = "the memory knows a name that the session does not"
        last = following.message if following is not None else session.window.turn + 1
        until = following.time if following is not None else float("inf")
        recalled = any(page.message <= turn < last for turn in used) or any(page.time <= time < until for time in times)
        if why and not recalled:
            found.append(Failure(kind=Failing.NOT_TRIGGERED, session=session.name, address=page.address, why=why))
        heard += f" {plain_name(text)} "
    return found


def _mentioned(text: str) -> Iterator[str]:
    for match in _NAME.finditer(text):
        words = match[0].split()
        # The first word of a sentence is written large too.
        for first in range(len(words)):
            for last in range(first + 1, len(words) + 1):
                yield plain_name(" ".join(words[first:last]))


def _names(memory: Collection) -> dict[tuple[int, int], set[str]]:
    """Names that the claims in force have as subject or object, by the messages that they are from; those of a fact that a
    person told by (0, 0)."""
    found: dict[tuple[int, int], set[str]] = {}
    for page, _ in memory.pages():
        if page.claim is not None:
            names = {plain_name(name) for name in (page.claim.subject, page.claim.object) if name and not is_speaker(name)}
            for cite in page.cites or [(0, 0)]:
                found.setdefault(cite, set()).update(names)
    return found


def unattributed(memory: Collection) -> list[Failure]:
    """Facts whose origin cannot be found: a page that they were made from is not there, or a policy wrote them and cites
    nothing."""
    told = {page for event in memory.ledger.events() if event.act is Act.ADMIT and event.policy == "user" for page in event.pages}
    found = []
    for page, _ in _facts(memory):
        keys = [*page.cites, *((memory.number, source) for source in page.sources)]
        there = memory.backend.read(keys)
        if any(key not in there or there[key][1].at is Place.DROPPED for key in keys):
            why = "a page that it was made from is not there"
        elif not keys and page.id not in told:
            why = "a policy wrote it and cites nothing"
        elif keys and not page.cites and page.id not in told and all(there[key][0].kind is Kind.ENTITY for key in keys):
            why = "it cites nothing but entities"
        else:
            continue
        found.append(Failure(kind=Failing.UNATTRIBUTED, session=memory.name, address=page.address, why=why))
    return found


def decayed(memory: Collection, now: float, *, stale: float = STALE, embedder: str = "") -> list[Failure]:
    """Facts in force that were neither written, recalled nor found for `stale` seconds; facts past their end that nobody
    retired; and, with the name of an embedder, facts without a vector of it."""
    used: dict[int, float] = {}
    for event in memory.ledger.events():
        if event.act in (Act.FAULT, Act.SEARCH, Act.RESTORE):
            used.update(dict.fromkeys(event.pages, event.time))
    waiting = [entry for entry, _ in memory.backend.vectors.unembedded(embedder, MOST)] if embedder else []
    bare = {hit.page for hit in memory.backend.words.passages(waiting).values() if hit.segment == memory.number}
    found = []
    for page, state in _facts(memory):
        until = until_of(page, state)
        if until is not None and until <= now:
            why = "past its end"
        elif now - max(page.time, used.get(page.id, page.time)) > stale:
            why = "not used for long"
        elif page.id in bare:
            why = "without a vector of this embedder"
        else:
            continue
        found.append(Failure(kind=Failing.DECAYED, session=memory.name, address=page.address, why=why))
    return found


def contaminated(memory: Collection, now: float) -> list[Failure]:
    """Facts in force that contradict another one, and facts that were made from recalled text."""
    facts = [page for page, state in _facts(memory) if is_true(page, state, now)]
    rivals = contested((memory.number, page.claim) for page in facts)
    cited = memory.backend.read({key for page in facts for key in page.cites})
    found = []
    for page, against in zip(facts, rivals, strict=True):
        origins = [cited[key][0] for key in page.cites if key in cited]
        if against:
            why = f"contradicts {', '.join(facts[other].address for other in against[:5])}"
        elif any(origin.id > 0 and origin.sources for origin in origins):
            why = "it was learned from recalled text"
        else:
            continue
        found.append(Failure(kind=Failing.CONTAMINATED, session=memory.name, address=page.address, why=why))
    return found


def examine(store: Store, user: str = "", *, stale: float = STALE, embedder: str = "") -> list[Failure]:
    """All failures of a user's memory and of the sessions of that user, and a note of their number in the memory's ledger. It
    reads all of these.

    Raises:
        SpecError: no name of a user. StoreReadOnly: there is no such memory.
    """
    memory, now = store.memory(user).collection, store.clock()
    found = [*unattributed(memory), *decayed(memory, now, stale=stale, embedder=embedder), *contaminated(memory, now)]
    for info in store.sessions():
        if info.user == user and not info.damaged:
            found += not_triggered(store.session(info.name), memory)
    figures = Counter(str(failure.kind) for failure in found)
    noted: dict[str, Any] = {kind.replace(" ", "_"): figures[kind] for kind in Failing}
    memory.ledger.record(Act.NOTE, policy="failures", outcome="examined", why="failures", **noted)
    return found


def counted(memory: Collection) -> dict[Failing, int]:
    """The counts of the last examination, read from the ledger; zeros before the first."""
    counts = dict.fromkeys(Failing, 0)
    for event in memory.ledger.events():
        if event.policy == "failures" and event.act is Act.NOTE:
            figures: Mapping[str, Any] = event.data
            counts = {kind: int(figures.get(kind.replace(" ", "_"), 0)) for kind in Failing}
    return counts


def _facts(memory: Collection) -> Iterable[tuple[Page, State]]:
    """The facts that nobody retired, also those past their end."""
    return [row for row in memory.pages(history=True) if row[0].kind is Kind.FACT and row[1].at is Place.OUT]

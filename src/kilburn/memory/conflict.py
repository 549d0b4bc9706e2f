"""Resolves contradictions between new facts and facts in force when the new ones are written.

An explicit correction wins; otherwise confidence times recency decides. A statement of lower trust never retires one of
higher trust. If neither side wins, both stay in force, and a search returns both, marked (`kilburn.claims`).

    moves = settle([(Add(text="Ana lives in Braga", claim=claim), Trust.USER)], standing, now=now).moves
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from kilburn.backend import State
from kilburn.claims import contradict, same_claim
from kilburn.collections.collecting import since_of, until_of
from kilburn.message import Trust
from kilburn.move import Add, Retire
from kilburn.page import Claim, Page, Place
from kilburn.search.dates import DAY

HALF_LIFE = 30 * DAY
"""Seconds after which a statement weighs half as much against a newer one."""


class Standing(StrEnum):
    """The relation of a new statement to the facts in force."""

    NEW = "new"
    """No fact has the same subject and relation, or the relation may have several objects."""
    SAME = "same"
    """The same fact is in force: nothing is written."""
    SUPERSEDES = "supersedes"
    EARLIER = "earlier"
    """It was true once: a fact that began later is in force."""
    CONTESTED = "contested"
    """Neither side wins: both are in force."""


class Settled(msgspec.Struct, frozen=True):
    """The result of `settle`.

    Args:
        standings: one for each, in order.
        moves: an `Add` for each that is written, then the `Retire`s.
        rivals: for each, the ids of the pages that it contradicts; for SAME, of the pages that say the same.
    """

    standings: tuple[Standing, ...]
    moves: tuple[Add | Retire, ...]
    rivals: tuple[tuple[int, ...], ...]


class _Known(msgspec.Struct, eq=False):
    """A statement that is in force, or will be by this plan; the latter has an `Add`, and the id 0."""

    page: int
    claim: Claim
    trust: Trust
    since: float
    until: float | None
    said_at: float
    add: Add | None = None


def weight(confidence: float, age: float) -> float:
    """Return confidence times recency: the confidence halves with each `HALF_LIFE` of `age`, both in seconds."""
    return confidence * float(0.5 ** (max(0.0, age) / HALF_LIFE))


def settle(
    new: Sequence[tuple[Add, Trust]],
    standing: Iterable[tuple[Page, State]],
    *,
    now: float,
    said_times: Sequence[float] = (),
    offset: int = 0,
) -> Settled:
    """Return the moves that write new statements, in the order in which they were made, into what is in force.

    - An update closes what it supersedes at the time at which its own validity begins.
    - A correction says that the other was never true: it takes over the other's beginning, at which the other is closed.
    - A statement that was made before a fact in force began is closed when that fact begins.
    - A temporary statement (`Add.until`) does not retire a permanent one, which holds again afterwards.
    - A repeated statement is not written again, unless its trust is higher now.

    Args:
        new: each with the trust that its page will have.
        standing: pages of the same memory with their states. Those that are not in force, or speak of something else,
            do not count.
        now: seconds since the epoch: when a statement becomes true if it does not say.
        said_times: when each was said, if it became true at another time ("I have lived in Braga since 2019").
        offset: number of `Add`s of the same plan before these.
    """
    current = [fact for page, state in standing if (fact := _in_force(page, state)) is not None]
    additions: list[_Known | Add] = []
    closed: list[tuple[tuple[int, ...], _Known, Retire]] = []
    standings: list[Standing] = []
    rivals: list[tuple[int, ...]] = []
    for at, (add, trust) in enumerate(new):
        if add.claim is None:
            additions.append(add)
            standings.append(Standing.NEW)
            rivals.append(())
            continue
        since = now if add.since is None else add.since
        fact = _Known(0, add.claim, trust, since, add.until, said_times[at] if said_times else since, add)
        against = [existing for existing in current if _overlap(fact, existing) and contradict(fact.claim, existing.claim)]
        alike = [existing for existing in current if _overlap(fact, existing) and same_claim(fact.claim, existing.claim)]
        beaten = [existing for existing in against if _beats(fact, existing)]
        how = _standing(fact, alike, against, beaten)
        standings.append(how)
        rivals.append(tuple(existing.page for existing in (alike if how is Standing.SAME else against) if existing.page))
        if how is Standing.SAME:
            continue
        # The page that decides an open contradiction may be in force already.
        stands = next((existing for existing in alike if beaten and existing.trust >= trust), fact)
        if stands is fact:
            beaten += [existing for existing in alike if existing.trust < trust and existing.since <= fact.since]
            additions.append(fact)
            current.append(fact)
        if how is Standing.EARLIER:
            fact.until = min(end for end in (fact.until, *(existing.since for existing in (*against, *alike))) if end is not None)
        if not beaten:
            continue
        if add.claim.correction:
            fact.since = min(fact.since, *(existing.since for existing in beaten))
        for existing in beaten:
            existing.until = fact.since
            current.remove(existing)
        pages = tuple(existing.page for existing in beaten if existing.add is None)
        why = "corrected" if add.claim.correction else "superseded"
        closed.append((pages, stands, Retire(pages, by=stands.page, until=fact.since, why=why)))
    moves = [addition if isinstance(addition, Add) else _with_times(addition) for addition in additions]
    places = {id(addition): offset + at for at, addition in enumerate(additions)}
    retired = [msgspec.structs.replace(move, refers=places.get(id(stands))) for pages, stands, move in closed if pages]
    return Settled(tuple(standings), (*moves, *retired), tuple(rivals))


def _with_times(fact: _Known) -> Add:
    assert fact.add is not None
    return msgspec.structs.replace(fact.add, since=fact.since, until=fact.until)


def _in_force(page: Page, state: State) -> _Known | None:
    if page.claim is None or not page.claim.relation or state.at in (Place.RETIRED, Place.PROPOSED, Place.DROPPED):
        return None
    since = since_of(page)
    return _Known(page.id, page.claim, page.trust, since, until_of(page, state), since)


def _overlap(first: _Known, second: _Known) -> bool:
    return (first.until is None or second.since < first.until) and (second.until is None or first.since < second.until)


def _beats(new: _Known, old: _Known) -> bool:
    """Return whether a new statement supersedes one that it contradicts."""
    if new.trust < old.trust or (new.until is not None and old.until is None):
        return False
    if new.claim.correction:
        return not old.claim.correction or new.said_at >= old.said_at
    return new.said_at > old.said_at and new.claim.confidence >= weight(old.claim.confidence, new.said_at - old.said_at)


def _standing(new: _Known, alike: Sequence[_Known], against: Sequence[_Known], beaten: Sequence[_Known]) -> Standing:
    repeated = [rival for rival in alike if rival.trust >= new.trust]
    if against and len(beaten) == len(against):
        return Standing.SUPERSEDES
    if any(rival.since <= new.said_at for rival in repeated):
        # Repeating one side of an open contradiction decides nothing.
        return Standing.SAME
    rivals = [*against, *alike]
    if rivals and not new.claim.correction and all(rival.since > new.said_at and rival.trust >= new.trust for rival in rivals):
        return Standing.EARLIER
    return Standing.CONTESTED if against else Standing.NEW

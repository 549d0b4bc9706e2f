"""Contradictions between what is new and what is in force, resolved when something is written.

The order is: an explicit correction, then confidence times recency. A statement of lower trust never retires one of
higher trust. What cannot be resolved stays on both sides, and a search returns both, marked (`kilburn.claims`).

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
    """How a new statement stands to what is in force."""

    NEW = "new"
    """Nothing speaks of the same thing, or the relation may have several objects."""
    SAME = "same"
    """It is in force already: nothing is written."""
    SUPERSEDES = "supersedes"
    EARLIER = "earlier"
    """It was true once: what began later is in force already."""
    CONTESTED = "contested"
    """Neither side wins: both are in force."""


class Settled(msgspec.Struct, frozen=True):
    """What to do with new statements.

    Args:
        standings: one for each, in order.
        moves: an `Add` for each that is written, then the `Retire`s.
        rivals: for each, the ids of the pages that it contradicts; of SAME, of those that say the same.
    """

    standings: tuple[Standing, ...]
    moves: tuple[Add | Retire, ...]
    rivals: tuple[tuple[int, ...], ...]


class _Known(msgspec.Struct, eq=False):
    """A statement that is in force, or will be with this plan: then it has an `Add`, and the id 0."""

    page: int
    claim: Claim
    trust: Trust
    since: float
    until: float | None
    said: float
    add: Add | None = None


def weight(confidence: float, age: float, half_life: float = HALF_LIFE) -> float:
    """Confidence times recency: the confidence halves with each `half_life` of `age`, both in seconds."""
    return confidence * float(0.5 ** (max(0.0, age) / half_life))


def settle(
    new: Sequence[tuple[Add, Trust]],
    standing: Iterable[tuple[Page, State]],
    *,
    now: float,
    said: Sequence[float] = (),
    before: int = 0,
    half_life: float = HALF_LIFE,
) -> Settled:
    """The moves that write new statements, in the order in which they were made, into what is in force.

    - An update closes what it supersedes at the time at which its own validity begins.
    - A correction says that the other was never true: it takes over the other's beginning, at which the other is closed.
    - What was said before something that is in force already began is closed at birth, when that one begins.
    - A statement for a time only (`Add.until`) retires none that is for ever: once it is over, the other holds again.
    - A statement that was made already is not written again, unless its trust is higher now.

    Args:
        new: each with the trust that its page will have.
        standing: pages of the same memory with their states. Those that are not in force, or speak of something else,
            do not count.
        now: seconds since the epoch: when a statement becomes true if it does not say.
        said: when each was said, where that is not when it became true ("I have lived in Braga since 2019").
        before: how many `Add`s of the same plan come before these.
    """
    known = [fact for page, state in standing if (fact := _in_force(page, state)) is not None]
    written: list[_Known | Add] = []
    closed: list[tuple[tuple[int, ...], _Known, Retire]] = []
    standings: list[Standing] = []
    rivals: list[tuple[int, ...]] = []
    for at, (add, trust) in enumerate(new):
        if add.claim is None:
            written.append(add)
            standings.append(Standing.NEW)
            rivals.append(())
            continue
        since = now if add.since is None else add.since
        fact = _Known(0, add.claim, trust, since, add.until, said[at] if said else since, add)
        against = [other for other in known if _overlap(fact, other) and contradict(fact.claim, other.claim)]
        alike = [other for other in known if _overlap(fact, other) and same_claim(fact.claim, other.claim)]
        beaten = [other for other in against if _beats(fact, other, half_life)]
        how = _standing(fact, alike, against, beaten)
        standings.append(how)
        rivals.append(tuple(other.page for other in (alike if how is Standing.SAME else against) if other.page))
        if how is Standing.SAME:
            continue
        # What decides an open contradiction may be in force already: then it is that page that stands.
        stands = next((other for other in alike if beaten and other.trust >= trust), fact)
        if stands is fact:
            beaten += [other for other in alike if other.trust < trust and other.since <= fact.since]
            written.append(fact)
            known.append(fact)
        if how is Standing.EARLIER:
            fact.until = min(end for end in (fact.until, *(other.since for other in (*against, *alike))) if end is not None)
        if not beaten:
            continue
        if add.claim.correction:
            fact.since = min(fact.since, *(other.since for other in beaten))
        for other in beaten:
            other.until = fact.since
            known.remove(other)
        pages = tuple(other.page for other in beaten if other.add is None)
        why = "corrected" if add.claim.correction else "superseded"
        closed.append((pages, stands, Retire(pages, by=stands.page, until=fact.since, why=why)))
    moves = [one if isinstance(one, Add) else _dated(one) for one in written]
    places = {id(one): before + at for at, one in enumerate(written)}
    retired = [msgspec.structs.replace(move, refers=places.get(id(stands))) for pages, stands, move in closed if pages]
    return Settled(tuple(standings), (*moves, *retired), tuple(rivals))


def _dated(fact: _Known) -> Add:
    assert fact.add is not None
    return msgspec.structs.replace(fact.add, since=fact.since, until=fact.until)


def _in_force(page: Page, state: State) -> _Known | None:
    if page.claim is None or not page.claim.relation or state.at in (Place.RETIRED, Place.PROPOSED, Place.DROPPED):
        return None
    since = since_of(page)
    return _Known(page.id, page.claim, page.trust, since, until_of(page, state), since)


def _overlap(one: _Known, other: _Known) -> bool:
    return (one.until is None or other.since < one.until) and (other.until is None or one.since < other.until)


def _beats(new: _Known, old: _Known, half_life: float) -> bool:
    """Whether a new statement supersedes one that it contradicts."""
    if new.trust < old.trust or (new.until is not None and old.until is None):
        return False
    if new.claim.correction:
        return not old.claim.correction or new.said >= old.said
    return new.said > old.said and new.claim.confidence >= weight(old.claim.confidence, new.said - old.said, half_life)


def _standing(new: _Known, alike: Sequence[_Known], against: Sequence[_Known], beaten: Sequence[_Known]) -> Standing:
    said = [other for other in alike if other.trust >= new.trust]
    if against and len(beaten) == len(against):
        return Standing.SUPERSEDES
    if any(other.since <= new.said for other in said):
        # Also one side of an open contradiction, said again: that decides nothing.
        return Standing.SAME
    others = [*against, *alike]
    if others and not new.claim.correction and all(other.since > new.said and other.trust >= new.trust for other in others):
        return Standing.EARLIER
    return Standing.CONTESTED if against else Standing.NEW

"""From the changes of one call to one transaction of a collection: what is allowed, and the pages that are made.

Everything here is pure: it reads what was read before, and changes nothing. What the numbers of the laws mean is in
docs/design/architecture.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Unpack

import msgspec

from kilburn.backend import Batch, SegmentInfo, SegmentKind, State
from kilburn.budget import Counter
from kilburn.collections.names import LARGEST_NOTE, check_one_of_each, checked_name
from kilburn.errors import Forgotten, KernelError, LawBroken, UnknownAddress
from kilburn.event import Act, Data, Event, in_order, ledger_time, writable
from kilburn.kernel.admission import line_of
from kilburn.message import Kind, Role, Trust
from kilburn.move import Add, Restore, Retire
from kilburn.page import Page, Place, address_of, digest_of

MAX_CHARS = {Kind.FACT: 10_000, Kind.ENTITY: 1_000, Kind.TEXT: 1_000_000}
"""The kinds of pages that a collection may have, with the most characters of each."""

ROLES = {Trust.TOOL: Role.TOOL, Trust.AGENT: Role.ASSISTANT, Trust.USER: Role.USER, Trust.OPERATOR: Role.SYSTEM}

LARGEST = 1 << 62
"""No page and no segment has such a number; a store could not even look for it."""

Key = tuple[int, int]
"""A page of the tenant: (number of the segment, page id)."""

Rows = Mapping[Key, tuple[Page, State]]
Change = Add | Retire | Restore


def since_of(page: Page) -> float:
    """From when what a page says is true, in seconds since the epoch."""
    return page.time if page.since is None else page.since


def until_of(page: Page, state: State) -> float | None:
    """When the text of a page stops being true: the end that it names, or the end at which it was closed, whichever is earlier.
    None if it has no end."""
    if page.until is None or state.until is None:
        return state.until if page.until is None else page.until
    return min(page.until, state.until)


def is_true(page: Page, state: State, at: float, *, now: bool = False) -> bool:
    """Whether what a page says was true at a time, by all that is known now (law 9): it had begun, and neither had it ended nor
    was it closed by then. What is proposed, forgotten, or retired without an end is never true.

    Args:
        now: `at` is the present. What is here has begun then, unless it says when it begins: the clock of whoever wrote it may be
            ahead of ours.
    """
    if state.at in (Place.PROPOSED, Place.DROPPED) or not page.digest or (state.at is Place.RETIRED and state.until is None):
        return False
    begins, until = page.since if now else since_of(page), until_of(page, state)
    return (begins is None or begins <= at) and (until is None or at < until)


def as_changes(values: Iterable[object]) -> list[Change]:
    """Values as changes of a collection, with their fields checked.

    Raises:
        KernelError: another move, fields of wrong types, a time or a number that is not finite, text that is empty, too
            long, or that no store can keep.
    """
    return [_as_change(value) for value in values]


def _as_change(value: object) -> Change:
    if not isinstance(value, Add | Retire | Restore):
        raise KernelError(f"a {type(value).__name__} is no change of a collection", advice="give Add, Retire or Restore")
    try:
        fields = msgspec.structs.asdict(value)
        if isinstance(value, Add) and value.claim is not None:
            fields["claim"] = msgspec.structs.asdict(value.claim)
        change = msgspec.convert(fields, type(value))
        if isinstance(change, Add):
            _check_add(change)
        elif isinstance(change, Retire):
            _check_times(change.until)
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError, AttributeError, TypeError) as error:
        raise KernelError(
            f"an odd {type(value).__name__}: {error}", advice="name pages by their ids, give text without lone surrogates"
        ) from None
    return change


def _check_add(add: Add) -> None:
    if add.kind not in MAX_CHARS:
        raise KernelError(f"a collection has no page of kind {add.kind}", advice="use " + ", ".join(MAX_CHARS))
    if not add.text.strip():
        raise KernelError("an empty text says nothing", advice="give the statement in words")
    if len(add.text) > MAX_CHARS[add.kind]:
        raise KernelError(
            f"a {add.kind} of {len(add.text):,} characters",
            advice=f"{MAX_CHARS[add.kind]:,} at most; keep long texts as documents",
        )
    add.text.encode("utf-8")
    if add.name and checked_name(add.name) != add.name:
        raise KernelError(f"the name {add.name!a} is not composed", advice="normalise it to NFC")
    _check_times(add.since, add.until)
    if add.since is not None and add.until is not None and add.since > add.until:
        raise KernelError(f"it begins at {add.since}, after its end at {add.until}", advice="give since <= until")
    numbers = [add.importance] if add.claim is None else [add.importance, add.claim.confidence]
    if not all(0.0 <= number <= 1.0 for number in numbers):
        raise KernelError("an importance or a confidence that is not between 0 and 1", advice="give a number from 0 to 1")
    if add.claim is not None:
        for words in (add.claim.subject, add.claim.relation, add.claim.object):
            words.encode("utf-8")
            if len(words) > MAX_CHARS[Kind.ENTITY]:
                raise KernelError(f"a claim with {len(words):,} characters in one part", advice="keep the claim short")
    for numbers_named in (add.sources, add.refers, add.cites):
        if len(set(numbers_named)) != len(numbers_named):
            raise KernelError("an Add that names a page twice", advice="name each page once")


def _check_times(*times: float | None) -> None:
    for time in times:
        if time is not None and not math.isfinite(time):
            raise KernelError(f"the time {time} is none", advice="give seconds since the epoch, or None")


def keys_of(changes: Sequence[Change], number: int) -> list[Key]:
    """All pages that changes of this collection name, those of the same call left out."""
    own_pages: list[int] = []
    keys: list[Key] = []
    for change in changes:
        if isinstance(change, Add):
            own_pages += change.sources
            keys += change.cites
        else:
            own_pages += change.pages
            if isinstance(change, Retire) and change.by:
                own_pages.append(change.by)
    unique = dict.fromkeys([*((number, page) for page in own_pages), *keys])
    return [key for key in unique if 0 < key[0] < LARGEST and 0 < abs(key[1]) < LARGEST]


def held_of(event: Event) -> list[Retire]:
    """What pages that an event proposed would retire once they are accepted."""
    retirements = event.data.get("retires", ()) if event.act is Act.ADMIT else ()
    return [Retire(tuple(pages), by=by, until=until) for by, pages, until in retirements]


class Collecting:
    """The transaction that some changes make.

    Args:
        info: the collection.
        last: ids of its last original and its last derived page; the second is 0 or negative.
        rows: every page that the changes name, as it is now; those that do not exist are missing.
        clock: what the writer's clock shows.
        policy: whose changes they are; "user" for a person's.
        tainted: whether the policy had read untrusted text before.
        named: of notes, the pages that are in force, by their names; None for any other collection.
    """

    def __init__(
        self,
        info: SegmentInfo,
        last: tuple[int, int],
        rows: Rows,
        counter: Counter,
        clock: float,
        *,
        policy: str = "user",
        cause: str = "user",
        tainted: bool = False,
        named: Mapping[str, int] | None = None,
    ) -> None:
        self.info, self.last, self.rows, self.counter, self.clock = info, last, rows, counter, clock
        self.now = ledger_time(clock, info.used)
        self.policy, self.cause, self.tainted, self.named = policy, cause, tainted, named
        self.added: list[int] = []
        self.pages: dict[int, Page] = {}
        self.texts: dict[str, str] = {}
        self.states: dict[int, State] = {}
        self.index: list[int] = []
        self.events: list[Event] = []

    def carry(self, changes: Sequence[Change]) -> None:
        """Carry the changes out: first all `Add`s, then the others in their order.

        Raises:
            LawBroken, KernelError: one is not allowed.
        """
        adds = [change for change in changes if isinstance(change, Add)]
        self._number(adds)
        for at, add in enumerate(adds):
            if add.kind is not Kind.ENTITY:
                self._make(at, add, adds)
        for at, add in enumerate(adds):
            if add.kind is Kind.ENTITY:
                self._make_entity(at, add, adds)
        # A page that waits for a person's word supersedes nothing before it is accepted.
        moves = [self._resolved(change) for change in changes if not isinstance(change, Add)]
        postponed = [move for move in moves if isinstance(move, Retire) and self._is_held(move)]
        self._admit(adds, postponed)
        for move in moves:
            if isinstance(move, Restore):
                self._restore(move)
            elif move not in postponed:
                self._retire(move)
        for move in postponed:
            for page in move.pages:
                self._known(page)
            if move.by not in self.pages:
                self._record(Act.NOTE, move.pages, move.why, outcome="proposed", move="retire", by=move.by)
        if self.named is not None:
            check_one_of_each(self.named, [self._known(page) for page in self.states])

    def batch(self, head: int, observed: Sequence[Event] = ()) -> Batch:
        """The transaction after event `head`; what was observed before comes first."""
        return Batch(
            head=head,
            events=in_order([*observed, *self.events], head, self.info.used),
            pages=list(self.pages.values()),
            texts=self.texts,
            states=self.states,
            index=self.index,
        )

    def _number(self, adds: Sequence[Add]) -> None:
        """Give out the ids of the new pages."""
        original, derived = self.last
        for add in adds:
            if add.sources or add.refers or add.cites:
                derived -= 1
                self.added.append(derived)
            else:
                original += 1
                self.added.append(original)

    def _make(self, at: int, add: Add, adds: Sequence[Add]) -> None:
        """Make the page of an `Add` that is no entity: its sources, its trust and its place."""
        for earlier in add.refers:
            if not 0 <= earlier < len(adds) or (earlier >= at and adds[earlier].kind is not Kind.ENTITY):
                raise KernelError(f"it refers to Add {earlier}, which does not come before it", advice="count Adds from 0")
        made_from = [self._there((self.info.number, page)) for page in add.sources]
        for page, (_, state) in zip(add.sources, made_from, strict=True):
            # A note is what its writer has read, which may have been an earlier version.
            if state.at is Place.RETIRED and self.info.kind is not SegmentKind.NOTES:
                raise LawBroken(9, f"{address_of(page)} is retired", advice="make it from what supersedes it")
        if any(segment == self.info.number for segment, _ in add.cites):
            raise KernelError("an Add cites its own collection", advice="name these pages as sources")
        made_from += [self._there((segment, page)) for segment, page in add.cites]
        made_from += [(self.pages[self.added[n]], self.states[self.added[n]]) for n in add.refers if self.added[n] in self.pages]
        # An entity is only a name: it says nothing, so it is no evidence, and what is known of it needs no other trust.
        evidence = [(page, state) for page, state in made_from if page.kind is not Kind.ENTITY]
        by_person = self.policy == "user"
        if not evidence and not by_person and self.info.kind is SegmentKind.MEMORY:
            raise LawBroken(4, "a policy's fact without a source", advice="cite the pages that it was made from")
        writer_trust = Trust.TOOL if self.info.kind is SegmentKind.DOCUMENT else Trust.USER
        if self.info.kind is SegmentKind.NOTES and not by_person:
            writer_trust = Trust.TOOL if self.tainted else Trust.AGENT
        bound = writer_trust if not evidence or self.info.kind is SegmentKind.NOTES else Trust.OPERATOR
        upper = bound if add.trust is None else min(bound, add.trust)
        trust = min([upper, *(page.trust for page, _ in evidence)])
        waits = trust is Trust.TOOL or any(state.at is Place.PROPOSED for _, state in evidence)
        # A note is its writer's own, so it is in force at once; it shows its trust.
        is_proposed = not by_person and (self.tainted or waits) and self.info.kind is not SegmentKind.NOTES
        place = Place.PROPOSED if is_proposed else Place.OUT
        depth = 1 + max((page.depth for page, _ in made_from), default=0)
        self._keep(at, add, trust, place, depth if self.added[at] < 0 else 0)

    def _make_entity(self, at: int, add: Add, adds: Sequence[Add]) -> None:
        """Make the page of an entity. What is made from it holds it: it is forgotten with the last of these."""
        if self.added[at] < 0:
            raise LawBroken(4, "an entity with sources", advice="give the sources to the facts that refer to it")
        of_it = [self.added[n] for n, fact in enumerate(adds) if at in fact.refers]
        if not of_it and self.policy != "user":
            raise LawBroken(4, "an entity that no fact of the same plan refers to", advice="add the two together")
        waits = bool(of_it) and all(self.states[page].at is Place.PROPOSED for page in of_it)
        trust = min((self.pages[page].trust for page in of_it), default=Trust.USER)
        self._keep(at, add, trust, Place.PROPOSED if waits else Place.OUT, 0)

    def _keep(self, at: int, add: Add, trust: Trust, place: Place, depth: int) -> None:
        number = self.added[at]
        if (self.named is not None) != bool(add.name) or (self.named is not None and add.kind is not Kind.TEXT):
            subject = "a note that is no text with a name" if self.named is not None else f"the name {add.name!r}"
            raise KernelError(subject, advice="notes are texts with names, and nothing else in a collection has one")
        if add.name and len(add.text) > LARGEST_NOTE:
            raise KernelError(f"a note of {len(add.text):,} characters", advice=f"{LARGEST_NOTE:,} at most; split it")
        digest = digest_of(add.text)
        self.texts[digest] = add.text
        self.pages[number] = Page(
            id=number,
            digest=digest,
            kind=add.kind,
            role=ROLES[trust],
            message=0,
            tokens=self.counter.count(add.text),
            time=self.now,
            trust=trust,
            sources=(*add.sources, *(self.added[n] for n in add.refers)),
            depth=depth,
            name=add.name or None,
            order=(number, 0),
            label=line_of(add.text),
            cites=add.cites,
            since=add.since,
            until=add.until,
            claim=add.claim,
        )
        self.states[number] = State(at=place, importance=add.importance)
        if place is Place.OUT:
            self.index.append(number)

    def _admit(self, adds: Sequence[Add], postponed: Sequence[Retire]) -> None:
        """One event for all pages of the same place and reason: a reason may quote a page, and is erased with it."""
        alike: dict[tuple[Place, str], list[int]] = {}
        worth: dict[float, list[int]] = {}
        for number, add in zip(self.added, adds, strict=True):
            alike.setdefault((self.states[number].at, add.why), []).append(number)
            if add.importance:
                worth.setdefault(add.importance, []).append(number)
        for (place, why), pages in alike.items():
            data: Data = {"at": place}
            if retires := [[move.by, list(move.pages), self._end(move)] for move in postponed if move.by in pages]:
                data["retires"] = retires
            self._record(Act.ADMIT, pages, why, **data)
        for importance, pages in worth.items():
            self._record(Act.RATE, pages, importance=importance)

    def _resolved(self, move: Retire | Restore) -> Retire | Restore:
        """The move with the page that its `refers` means."""
        if isinstance(move, Restore) or move.refers is None:
            return move
        if not 0 <= move.refers < len(self.added):
            raise KernelError(f"it refers to Add {move.refers} of {len(self.added)}", advice="count Adds from 0")
        return msgspec.structs.replace(move, by=self.added[move.refers], refers=None)

    def _is_held(self, move: Retire) -> bool:
        if self.policy == "user" or self.info.kind is SegmentKind.NOTES:
            return False
        return self.tainted or (move.by in self.states and self.states[move.by].at is Place.PROPOSED)

    def _end(self, move: Retire) -> float:
        """When retired pages stopped being true: at the end that they name, else when what supersedes them begins, else now."""
        if move.until is not None:
            return move.until
        return since_of(self._known(move.by)[0]) if move.by else self.now

    def _retire(self, move: Retire) -> None:
        for page in self._each(move.pages):
            _, state = self._known(page)
            if state.at is Place.RETIRED:
                raise KernelError(f"{address_of(page)} is retired already", advice="see its history")
            if state.pinned:
                raise LawBroken(3, f"{address_of(page)} is pinned", advice="unpin it first")
            if state.at is Place.PROPOSED and self.policy != "user":
                raise LawBroken(7, f"{address_of(page)} waits for a person's word", advice="only a person accepts or rejects it")
            if page == move.by:
                raise KernelError(f"{address_of(page)} cannot supersede itself", advice="give the page that takes its place")
        by: Data = {"by": move.by} if move.by else {}
        # What a person rejects was never true; each page of it ends where it began.
        rejected = [page for page in move.pages if self._known(page)[1].at is Place.PROPOSED]
        for page in rejected:
            self._move(Act.RETIRE, [page], Place.RETIRED, move.why, {"until": since_of(self._known(page)[0]), **by})
        if accepted := [page for page in move.pages if page not in rejected]:
            self._move(Act.RETIRE, accepted, Place.RETIRED, move.why, {"until": self._end(move), **by})

    def _restore(self, move: Restore) -> None:
        if self.policy != "user":
            raise LawBroken(7, "a policy may not restore", advice="only a person undoes or accepts")
        for page in self._each(move.pages):
            if self._known(page)[1].at is Place.OUT:
                raise KernelError(f"{address_of(page)} is in force", advice="restore what was retired or proposed")
        if not move.proposed:
            # A page that was proposed was never in the index; for the others this changes nothing.
            self.index += move.pages
        self._move(Act.RESTORE, move.pages, Place.PROPOSED if move.proposed else Place.OUT, move.why, {})

    def mark(self, act: Act, pages: Sequence[int], **data: Unpack[Data]) -> None:
        """Pin or unpin pages, or set their importance."""
        for page in pages:
            state = self._known(page)[1]
            if act is Act.RATE:
                self.states[page] = msgspec.structs.replace(state, importance=data["importance"])
            else:
                self.states[page] = msgspec.structs.replace(state, pinned=act is Act.PIN)
        self._record(act, pages, "", **data)

    def _move(self, act: Act, pages: Sequence[int], place: Place, why: str, more: Data) -> None:
        until = more.get("until")
        for page in pages:
            state = self._known(page)[1]
            self.states[page] = msgspec.structs.replace(state, at=place, until=until)
        data: Data = {"at": place, **more}
        self._record(act, pages, why, **data)

    def _record(self, act: Act, pages: Sequence[int], why: str = "", **data: Unpack[Data]) -> None:
        event = Event(number=0, act=act, time=self.clock, pages=tuple(pages), boundary="database", data=data)
        self.events.append(writable(msgspec.structs.replace(event, policy=self.policy, cause=self.cause, why=why)))

    def _each(self, pages: Sequence[int]) -> Sequence[int]:
        if not pages or len(set(pages)) != len(pages):
            raise KernelError("a change of no pages, or of one page twice", advice="name each page once")
        return pages

    def _known(self, page: int) -> tuple[Page, State]:
        """A page of this collection, as it is after the changes so far."""
        if page in self.pages:
            return self.pages[page], self.states[page]
        row, state = self._there((self.info.number, page))
        return row, self.states.get(page, state)

    def _there(self, key: Key) -> tuple[Page, State]:
        where = "this collection" if key[0] == self.info.number else f"segment {key[0]}"
        if key not in self.rows:
            raise UnknownAddress(f"there is no {address_of(key[1])} in {where}", advice="name pages that exist, of this tenant")
        if self.rows[key][1].at is Place.DROPPED:
            raise Forgotten(f"{address_of(key[1])} of {where} was forgotten", advice="nothing of it is kept")
        return self.rows[key]

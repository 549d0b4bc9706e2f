"""How sessions end, and which texts go to the cold place: rules that decide by times that they are given, and what carries them
out.

A session that nobody has used for long is archived first: its texts go to the cold place, and it is read as before. Later it is
forgotten, with its branches and with what was made from it. A session that is in use, that holds a page which a person pinned,
or that has an open branch, is left alone, and so are its branches.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

import msgspec

from kilburn.backend import Backend, Batch, Moved, SegmentInfo, SegmentKind
from kilburn.errors import KilburnError, SpecError, StoreCorrupt, StoreStale
from kilburn.event import Act, Event, clock_of, in_order
from kilburn.forgetting.erasure import Erasure
from kilburn.jobs.claims import LEASE, JobName, kept, named, renewing, take
from kilburn.kernel.branches import Fork, above_of, branches_in, origin_in
from kilburn.kernel.store import Store
from kilburn.memory.retention import HOUR, rule_time
from kilburn.message import Role
from kilburn.page import Place

SETTING = "retention"
"""The setting of a tenant with its rule."""

RECEIPTS, MOST_RECEIPTS = "receipts", 200
"""The setting of a tenant with the receipts of what its rule has forgotten, and how many it has: the last ones."""

FORGET = "forget"
"""The kind of the job that forgets a session; see `kilburn.jobs.claims`."""

WHY = "its time to live is over"
"""What the ledger says of what is forgotten by a rule."""

MISDATED = "its last use was dated in the future; rules count from here"
"""What the ledger says of a session to which a wrong clock has written last."""

READ_ACTS = (Act.FAULT, Act.SEARCH)
"""Events that say that somebody read a page."""


class Ending(StrEnum):
    """What becomes of a session."""

    ARCHIVE = "archive"
    FORGET = "forget"
    DATE = "date"
    """Its last use is dated in the future: it counts as used now."""


class SessionUse(NamedTuple):
    """What a rule knows of a session: its name, when it or a branch of it was last used, and what holds it.

    `held` says in words why it is left alone; "" where nothing holds it. `alone`: it is a branch of a gateway's session with one
    question and its answer, and nobody has continued it.
    """

    name: str
    used: float
    held: str = ""
    alone: bool = False


class TimeToLive(msgspec.Struct, frozen=True, kw_only=True):
    """When sessions end: so many seconds after they were last used; None for never.

    Args:
        branches: when a gateway's branch is forgotten that has one question, and that nobody has continued.

    Raises:
        SpecError: no lengths of time, or sessions that are forgotten before they are archived.
    """

    archive: float | None = None
    forget: float | None = None
    branches: float | None = None

    def __post_init__(self) -> None:
        delays = [delay for delay in (self.archive, self.forget) if delay is not None]
        if any(not delay >= 0 for delay in (*delays, self.branches or 0.0)) or delays != sorted(delays):
            raise SpecError("a time to live that makes no sense", advice="give 0 or more, and forget no earlier than you archive")

    def decide(self, use: SessionUse, now: float) -> Ending | None:
        """Return the action that is due for a session at this time, or None if nothing is due or something holds the session."""
        if use.held or self == TimeToLive():
            return None
        age = now - use.used
        if age < -HOUR:
            return Ending.DATE
        if any(delay is not None and age >= delay for delay in (self.forget, self.branches if use.alone else None)):
            return Ending.FORGET
        return Ending.ARCHIVE if self.archive is not None and age >= self.archive else None


class TextUse(NamedTuple):
    """What a rule knows of a text: when a page with it was last read or made, how many tokens it has, and whether a page with it
    is in a window that is in use, or pinned."""

    digest: str
    used: float
    tokens: int
    held: bool = False


class Coolness(msgspec.Struct, frozen=True, kw_only=True):
    """Which texts go to the cold place: those that nobody has read for so many seconds, and that have so many tokens."""

    after: float
    least: int = 100

    def choose(self, texts: Iterable[TextUse], now: float) -> list[str]:
        """Return the digests of the texts that are cold at this time. A text is as warm as the warmest page with it."""
        warmest: dict[str, TextUse] = {}
        for text in texts:
            warmer = warmest.get(text.digest, text)
            warmest[text.digest] = TextUse(
                text.digest, max(text.used, warmer.used), max(text.tokens, warmer.tokens), text.held or warmer.held
            )
        return [
            text.digest
            for text in warmest.values()
            if not text.held and now - text.used >= self.after and text.tokens >= self.least
        ]


class Expired(msgspec.Struct, frozen=True, kw_only=True):
    """What became of sessions.

    Args:
        archived, forgotten: their names. moved: their texts that went to the cold place by this.
        receipts: of what was forgotten. kept: (name, reason) of sessions that are due, and left alone.
    """

    archived: tuple[str, ...] = ()
    forgotten: tuple[str, ...] = ()
    moved: Moved = Moved()
    receipts: tuple[Erasure, ...] = ()
    kept: tuple[tuple[str, str], ...] = ()


def read_rule(backend: Backend) -> TimeToLive | None:
    """Return the tenant's rule, or None if it has none.

    Raises:
        StoreCorrupt: it cannot be read.
    """
    value = backend.settings.all().get(SETTING)
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=TimeToLive)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt(
            f"the setting {SETTING!r} cannot be read: {error}", advice="`kilburn sessions rule` sets it"
        ) from error


def keep_rule(backend: Backend, rule: TimeToLive | None) -> None:
    """Keep the tenant's rule; None removes it."""
    backend.settings.put(SETTING, None if rule is None else msgspec.json.encode(rule).decode())


def expire(
    store: Store,
    rule: TimeToLive,
    *,
    dry: bool = False,
    told: Callable[[Erasure], object] = lambda receipt: None,
    stopped: Callable[[], bool] = lambda: False,
    lease: float = LEASE,
) -> Expired:
    """Archive and forget the sessions for which the rule says so at this time.

    What is forgotten goes as by `Store.forget`: with the branches, and with every fact and note that was made from it. What a
    kill has broken off goes on. Of several programs that do this, one forgets a session, and has its receipt; a session that
    cannot be forgotten is left alone for a while, and holds up no other.

    Args:
        dry: only say what is due; the receipts say what would go.
        told: is told each receipt when its session is gone.
        stopped: whether to begin no other session.
        lease: seconds for which a claim holds.

    Raises:
        SpecError: sessions are to be archived, and the tenant has no cold place. ClockSkew: nobody knows what is due.
        StoreError: trying again goes on.
    """
    now, backend = rule_time(store), store.backend
    due: dict[Ending, list[tuple[SegmentInfo, list[SegmentInfo]]]] = {stage: [] for stage in Ending}
    skipped = []
    for info, below, use, stage in _due(backend, rule, now):
        if use.held:
            skipped.append((info.name, use.held))
        else:
            due[stage].append((info, below))
    receipts, forgotten = [], []
    for info, below in due[Ending.DATE] if not dry else ():
        for member in (info, *below):
            if _used(backend, member, now) - now > HOUR:
                with suppress(StoreStale):
                    _note(backend, member, now, MISDATED)
    for info, _ in due[Ending.FORGET]:
        if stopped():
            break
        receipt, why = _dry(store, info) if dry else _forget(store, info, rule, now, told, lease)
        if receipt is not None:
            receipts.append(receipt)
            forgotten.append(info.name)
        elif why:
            skipped.append((info.name, why))
    archived, moved = due[Ending.ARCHIVE], Moved()
    if archived and not dry and not stopped():
        moved = backend.contents.chill(
            _only_in(backend, {member.number for info, below in archived for member in (info, *below)})
        )
    return Expired(
        archived=tuple(info.name for info, _ in archived),
        forgotten=tuple(forgotten),
        moved=moved,
        receipts=tuple(receipts),
        kept=tuple(skipped),
    )


def due(backend: Backend, rule: TimeToLive, now: float) -> dict[Ending, set[int]]:
    """Return the numbers of the sessions for which an action is due at this time and that nothing holds, with their branches."""
    numbers: dict[Ending, set[int]] = {stage: set() for stage in Ending}
    for info, below, use, stage in _due(backend, rule, now):
        if not use.held:
            numbers[stage].update(member.number for member in (info, *below))
    return numbers


def _dry(store: Store, info: SegmentInfo) -> tuple[Erasure, str]:
    return store.forget(session=info.name, dry=True), ""


def _forget(
    store: Store, info: SegmentInfo, rule: TimeToLive, now: float, report: Callable[[Erasure], object], lease: float
) -> tuple[Erasure | None, str]:
    """Forget a session and return its receipt, or the reason why it is left alone; "" if it is not due any more."""
    backend = store.backend
    claim = take(backend, JobName(FORGET, info.number), lease=lease)
    if claim is None:
        return None, "another program forgets it, or it could not be forgotten a moment ago"
    receipt, error = None, ""
    try:
        with renewing(claim):
            # Somebody may have come back, or forgotten it, while others were forgotten.
            if _begin(backend, info, rule, now, begun=claim.tries > 1):
                _keep_receipt(backend, KeptReceipt(segment=info.number, time=now))
                receipt = store.forget(session=info.name, why=WHY)
                final = KeptReceipt(
                    segment=info.number, time=receipt.time, segments=len(receipt.whole), places=receipt.places, whole=True
                )
                _keep_receipt(backend, final)
                report(receipt)
    except KilburnError as failed:
        error = named(failed)
        claim.failed(error)
    except BaseException:
        claim.failed("interrupted")  # what is begun is known by that
        raise
    else:
        claim.done()
    return receipt, error


def _due(backend: Backend, rule: TimeToLive, now: float) -> Iterator[tuple[SegmentInfo, list[SegmentInfo], SessionUse, Ending]]:
    """Yield the sessions that are due, oldest first, with their branches and the facts that a rule may know of each. Held
    sessions are included. A branch expires with its session, or because nobody has continued it."""
    forks: dict[int, Fork] = {}
    infos = backend.segments()
    names = {info.name for info in infos}
    broken = {job.segment for job in kept(backend) if job.kind == FORGET}
    for info in infos:
        # What begins with "@" is a program's own.
        if info.kind is not SegmentKind.SESSION or info.damaged or info.name.startswith("@"):
            continue
        old = rule.branches is not None and now - info.used >= rule.branches
        if above_of(info.name) in names and not (old and _is_alone(backend, info)):
            continue
        # A branch may have been used later, and never makes it due earlier.
        if info.number not in broken and rule.decide(SessionUse(info.name, info.used, alone=old), now) is None:
            continue
        try:
            below = branches_in(backend, info, forks)
            use = _use(backend, info, below, now, begun=info.number in broken)
        except StoreCorrupt:
            # It ends when somebody has looked at it, and holds up no other.
            below, use = [], SessionUse(info.name, info.used, "it is damaged: see `kilburn fsck`")
        stage = rule.decide(use._replace(held=""), now)
        if stage is not None:
            yield info, [branch for branch, _ in below], use, stage


def _use(backend: Backend, info: SegmentInfo, below: list[tuple[SegmentInfo, Fork]], now: float, *, begun: bool) -> SessionUse:
    members = [info, *(member for member, _ in below)]
    used = max(_used(backend, member, now, begun=begun) for member in members)
    # What a branch gave back may be gone by now: then it looks as if it were open.
    going = begun and any(_is_dropped(event) for member in members for event in backend.events(member.number, act=Act.DROP))
    alone = not below and (going or _is_alone(backend, info))
    return SessionUse(info.name, used, _held(backend, info, [] if going else below), alone)


def _is_alone(backend: Backend, info: SegmentInfo) -> bool:
    """Return whether a session is a gateway's branch that has one question and its answer beside what it began with."""
    try:
        origin = origin_in(backend.events(info.number))
        # What a client compacted goes on in the new session.
        if "continues" not in origin or origin["forked"] in origin["continues"]:
            return False
        roles = [page.role for page, _ in backend.pages(info.number) if page.id > max(0, origin.get("known", 0))]
    except StoreCorrupt:
        return False
    questions = takewhile(lambda role: role is not Role.ASSISTANT, roles)
    return {*roles[sum(1 for _ in questions) :]} <= {Role.ASSISTANT}


def _used(backend: Backend, info: SegmentInfo, now: float, *, begun: bool = False) -> float:
    """Return when a session was last used. A wrong clock may have dated events in the future: then the last event's own clock
    counts.

    Args:
        begun: whether a rule has begun to forget it: what that wrote is no use of it.
    """
    if not begun and info.used - now <= HOUR:
        return info.used
    last = info.created
    for event in backend.events(info.number, 0 if begun else max(0, info.head - 1)):
        if not (begun and _is_ours(event)):
            last = clock_of(event)
    return last


def _is_ours(event: Event) -> bool:
    return _is_dropped(event) or (event.act is not Act.ADMIT and event.policy == "kernel" and event.why != MISDATED)


def _note(backend: Backend, info: SegmentInfo, now: float, why: str) -> None:
    """Write a note after the last event of a segment.

    Raises:
        StoreStale: it is not the last any more.
    """
    event = Event(number=0, act=Act.NOTE, time=now, policy="kernel", why=why)
    backend.commit(info.number, Batch(head=info.head, events=in_order([event], info.head, info.used)))


def _is_dropped(event: Event) -> bool:
    return event.act is Act.DROP and event.why == WHY


def _begin(backend: Backend, info: SegmentInfo, rule: TimeToLive, now: float, *, begun: bool) -> bool:
    """Return whether a session is to be forgotten by now. If so, its ledger and those of its branches record it, each after the
    event that was its last when the rule decided, so a later use of one of them keeps them all."""
    current = backend.segment(info.name, time=0.0, create=False)
    if current is None or current.number != info.number or current.damaged:
        return False
    below = branches_in(backend, current, {})
    if rule.decide(_use(backend, current, below, now, begun=begun), now) is not Ending.FORGET:
        return False
    try:
        for member in (current, *(branch for branch, _ in below)):
            _note(backend, member, now, WHY)
    except StoreStale:
        return False
    return [branch.number for branch, _ in branches_in(backend, current, {})] == [branch.number for branch, _ in below]


class KeptReceipt(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What a store keeps of a session that a rule has forgotten: no name, and no word of it.

    Args:
        segment: its number. time: seconds since the epoch. segments: how many went, with its branches.
        places: see `Erasure`.
        whole: whether it was forgotten to its end. If not, it was begun; whatever went on with it may have been killed before it
            could count.
    """

    segment: int
    time: float
    segments: int = 0
    places: dict[str, int] = {}
    whole: bool = False


def kept_receipts(backend: Backend) -> list[KeptReceipt]:
    """Of the sessions that rules have forgotten, the last ones, oldest first."""
    return _decode_receipts(backend.settings.all().get(RECEIPTS))


def _decode_receipts(value: str | None) -> list[KeptReceipt]:
    try:
        return msgspec.json.decode(value or "[]", type=list[KeptReceipt])
    except msgspec.MsgspecError:
        return []  # whoever wrote that: it is replaced


def _keep_receipt(backend: Backend, receipt: KeptReceipt) -> None:
    while True:
        value = backend.settings.all().get(RECEIPTS)
        others = [stored_receipt for stored_receipt in _decode_receipts(value) if stored_receipt.segment != receipt.segment]
        encoded = msgspec.json.encode([*others, receipt][-MOST_RECEIPTS:]).decode()
        if backend.settings.replace(RECEIPTS, value, encoded):
            return


def _held(backend: Backend, info: SegmentInfo, below: list[tuple[SegmentInfo, Fork]]) -> str:
    """Return why a session is left alone, or "" if nothing holds it."""
    if _is_pinned(backend, info.number):
        return "a person pinned a page of it"
    for branch, fork in below:
        closed = any("branch" in event.data for event in backend.events(branch.number, act=Act.NOTE))
        first = next((page.id for page, _ in backend.pages(branch.number) if page.id > 0), 0)
        if not closed and not any(number == fork.forked for number, _ in backend.citing(branch.number, [first])):
            return f"its branch {branch.name!r} is open"
        # The fork pins what the branch is to do.
        if _is_pinned(backend, branch.number, but=first):
            return f"a person pinned a page of its branch {branch.name!r}"
    return ""


def _is_pinned(backend: Backend, number: int, *, but: int = 0) -> bool:
    """Return whether a person has pinned a page in a session. Inherited pages of a branch have no row there, so its ledger
    tells."""
    pins = {page: event.number for event in backend.events(number, act=Act.PIN) if event.policy == "user" for page in event.pages}
    pins.pop(but, None)
    if not pins:
        return False
    unpins = {page: event.number for event in backend.events(number, act=Act.UNPIN) for page in event.pages}
    states = {page: state for (_, page), (_, state) in backend.read((number, page) for page in pins).items()}
    return any(states[page].pinned if page in states else at > unpins.get(page, 0) for page, at in pins.items())


def _only_in(backend: Backend, numbers: Collection[int]) -> set[str]:
    """Return the texts of segments that no other segment has."""
    inside, outside = set[str](), set[str]()
    for info in backend.segments():
        digests = inside if info.number in numbers else outside
        # A damaged one may hide that it has a text, too: then that is read from the cold place.
        with suppress(StoreCorrupt):
            for page, _ in backend.pages(info.number) if not info.damaged else ():
                digests.update(filter(None, (page.digest, page.extra)))
    return inside - outside


def cool(store: Store, rule: Coolness, *, dry: bool = False) -> Moved:
    """Move the texts of sessions and documents to the cold place that the rule chooses at this time.

    Args:
        dry: only say how many there are; their bytes are then not known.

    Raises:
        SpecError: the tenant has no cold place. ClockSkew. StoreError: what has moved stays moved.
    """
    now, backend = rule_time(store), store.backend
    cold_digests = backend.contents.cold()
    chosen = [digest for digest in rule.choose(_texts(backend, rule, now), now) if digest not in cold_digests]
    return Moved(texts=len(chosen)) if dry else backend.contents.chill(chosen)


def _texts(backend: Backend, rule: Coolness, now: float) -> Iterator[TextUse]:
    """Yield the facts that a rule may know of each text. Facts and notes stay, because they are short and searched all the time.
    A damaged segment yields its readable texts."""
    for info in backend.segments():
        if not info.damaged:
            with suppress(StoreCorrupt):
                yield from _segment_texts(backend, rule, now, info)


def _segment_texts(backend: Backend, rule: Coolness, now: float, info: SegmentInfo) -> Iterator[TextUse]:
    read_times: dict[int, float] = {}
    for act in READ_ACTS if info.kind is SegmentKind.SESSION else ():
        for event in backend.events(info.number, act=act):
            read_times.update(dict.fromkeys(event.pages, clock_of(event)))
    small = info.kind not in (SegmentKind.SESSION, SegmentKind.DOCUMENT)
    last = _used(backend, info, now)
    in_use = now - last < rule.after
    for page, state in backend.pages(info.number):
        is_held = small or (in_use and (state.at is Place.IN or state.pinned))
        # A caller may date what it appends in the future.
        used = max(min(page.time, last), read_times.get(page.id, 0.0))
        for digest in filter(None, (page.digest, page.extra)):
            yield TextUse(digest, used, page.tokens, is_held)

"""Events: what the ledger remembers.

One event is one thing that happened at a boundary: what, when, why, by which policy, at what cost.
Events carry addresses, digests and numbers, never a page's text, so that forgetting a page need
not search the log for its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Any, TypedDict

import msgspec

__all__ = ["Act", "Event"]


class Act(StrEnum):
    """What happened. The first block changes state and is replayed; the second only observes."""

    ADMIT = "admit"
    LOAD = "load"
    EVICT = "evict"
    FOLD = "fold"
    RETIRE = "retire"
    RESTORE = "restore"
    DROP = "drop"
    PIN = "pin"
    UNPIN = "unpin"
    RATE = "rate"

    FAULT = "fault"
    """A page was recalled by address."""
    SEARCH = "search"
    SHIP = "ship"
    """A prompt was rendered: tokens shipped, tokens whose prefix had changed."""
    ASK = "ask"
    """A policy asked a model; `data` holds the outcome."""
    COMPACT = "compact"
    """A policy was at work; `data` holds the outcome (`kilburn.effect.Outcome`)."""
    REFUSE = "refuse"
    """Moves of a policy were rejected; nothing changed."""
    USAGE = "usage"
    """A provider reported what a prompt really cost."""
    CACHE = "cache"
    """At the kv boundary: keys and values left the cache, came into it, or were computed again; device memory
    does not survive, so it is never replayed."""
    NOTE = "note"


STATE = frozenset({Act.ADMIT, Act.LOAD, Act.EVICT, Act.FOLD, Act.RETIRE, Act.RESTORE, Act.DROP, Act.PIN, Act.UNPIN, Act.RATE})
"""Acts that change state: replaying exactly these, in order, rebuilds it (law 8)."""


class Data(TypedDict, total=False):
    """What the acts say beside the fields that all events have: the keys that Kilburn itself writes and reads.

    These keys stand in files, so none is ever renamed. A policy's figures, and what another program or version wrote,
    stand beside them and are kept as they are. What was read from a file is as its writer made it: nothing checks a value.
    """

    # Moves
    to: Mapping[str, Sequence[int]]
    """In a session: the pages by the places they went to (`kilburn.page.Place`)."""
    fold: int
    """The page that was made."""
    cover: Sequence[int]
    """What it stands for, where that is not what it cites."""
    uncover: Sequence[int]
    """The folds that stand for nothing any more."""
    covers: Sequence[tuple[int, Sequence[int]]]
    """Folds that came back, each with what it stands for again."""
    undoes: int
    """The last event of the moves that this one takes back."""
    at: str
    """In a collection: the place of all pages of the event."""
    until: float | None
    """Until when they were true."""
    by: int
    """The page that supersedes them, or 0."""
    retires: Sequence[Sequence[Any]]
    """What waits with a proposed page: by which page, which pages, until when."""
    importance: float
    """From 0 to 1."""
    standing: Sequence[Sequence[int]]
    """What the user said that is to stay, where that changes: the pages, each with the ends of its sentences; see
    `kilburn.kernel.standing`."""

    clock: float
    """What the writer's clock showed, where it was behind the event before: times within one ledger never run backwards."""

    # Prompts and what they cost
    missed: Sequence[int]
    """Of the pages that were recalled, those that the window did not have."""
    request: Mapping[str, str]
    """Who asked for a prompt: ids by names of their owner's. In a gateway's they are `id`, `client` and `trace`."""
    again: int
    """Tokens after the first difference from the previous prompt, as far as they were shipped before."""
    fresh: int
    """Tokens after that difference that were in no earlier prompt; left out where the previous prompt is not known."""
    window: int
    """Tokens that the pages of a prompt may take, by the session's own counter."""
    whole: int
    """The window that was asked for, where that differs; `beside` of it is kept for the reply and the tools."""
    beside: int
    counted: int
    """Tokens of a prompt by the own counter; `prompt`, `cached` and `reply` are the provider's."""
    prompt: int | str
    """Of a refusal: the digest of what was asked."""
    cached: int
    reply: Any
    """In a gateway's note another thing: the key of a reply that its provider keeps, with `turn` and the ids in `calls`."""

    # Policies
    outcome: str
    """An `Outcome`, or the word of a note."""
    detail: str
    freed: int
    moves: int
    asked: Any
    """The outcomes of a policy's questions; in a recursive run, the page of its question."""
    raised: str
    """The name of the error's class."""
    move: str

    # Notes of the kernel
    tokenizer: str
    lost: int
    """Observations that could not be written."""
    forked: int
    """The session that this one was made of. Of a branch see `kilburn.kernel.branches.Fork`, whose `at` is an event."""
    inherit: str
    derived: int
    call: int
    continues: Sequence[int]
    known: int
    export: str
    last: int
    quarantined: str

    # Notes of a memory
    learned: int
    """A session, with `upto` and `waiting`."""
    upto: int
    waiting: Sequence[Sequence[int]]
    chunks: Sequence[int]

    # Notes of a gateway, and of a scheduler
    turn: int
    calls: Any
    """In a recursive run how many, or whether a branch holds such."""
    kept: Mapping[str, str]
    learns: bool
    """Of a session, that it is to be learned from."""
    takes_over: str
    """The digest of a gateway's request whose turn another gateway had reserved."""
    job: Mapping[str, Any]

    # Notes of agents
    permit: str
    tool: str
    against: str
    privileges: Sequence[str]
    consent: str
    branch: str
    spent: int
    tokens: int
    """In a session also: what the pages that an event appends cost."""
    money: float
    resident: int
    resumed: int
    seconds: float
    refused: int
    """How many questions of a cell were refused; in a cache, whether a move was."""
    limit: str
    answered: str
    page: int
    json: bool
    steps: int
    began: int
    digest: str
    past: bool
    depth: int
    limits: Mapping[str, Any]
    most: int
    functions: Sequence[str]
    bounds: Mapping[str, Any]

    # The cache of keys and values
    how: str
    prefilled: int
    evicted: int
    files: Sequence[str]


_encode = msgspec.msgpack.Encoder().encode

MAX_INTEGER = 2**53
"""The largest whole number in an event's data: every reader of JSON has it exactly."""


class Event(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One line of the ledger of one session.

    Args:
        number: position in the session's ledger, from 1, without holes.
        act: what happened.
        time: seconds since the epoch, and not before the event before it; see `Data.clock`.
        turn: number of the last admitted message when it happened.
        pages: ids of the pages it happened to.
        boundary: "window" unless another level's boundary.
        policy: the policy's name, "kernel" for the kernel's own moves, "user" for calls from outside.
        cause: at a window a `kilburn.policy.Cause`, or "user"; in a collection also "accept", "forget", "learn", "mcp" or "undo".
        why: in the policy's words.
        tokens: use of the level above the boundary after the event.
        data: what is particular to the act, as plain JSON; see `Data`.
    """

    number: int
    act: Act
    time: float
    turn: int = 0
    pages: tuple[int, ...] = ()
    boundary: str = "window"
    policy: str = ""
    cause: str = ""
    why: str = ""
    tokens: int = 0
    if TYPE_CHECKING:
        data: Data = {}
    else:  # a decoder of `Data` would leave out the keys of others
        data: dict[str, Any] = {}


def in_order(events: Iterable[Event], head: int, latest: float) -> list[Event]:
    """Return the events as they follow event `head`, which is of the time `latest`: numbered, and none before the one before it.
    An event whose clock was behind comes at the next moment that can be told apart, and has the clock in its data."""
    ordered = list[Event]()
    for number, event in enumerate(events, head + 1):
        time, data = event.time, event.data
        if time < latest:
            time, data = ledger_time(time, latest), {**data, "clock": clock_of(event)}
        ordered.append(msgspec.structs.replace(event, number=number, time=time, data=data))
        latest = time
    return ordered


def ledger_time(clock: float, latest: float) -> float:
    """Return the time of what happens now in a ledger whose last event is of the time `latest`."""
    return clock if clock >= latest else math.nextafter(latest, math.inf)


def clock_of(event: Event) -> float:
    """Return what the clock of an event's writer showed."""
    clock = event.data.get("clock")
    return clock if isinstance(clock, float) else event.time


def encodable(text: str) -> str:
    """A text that UTF-8 can hold: pairs of surrogates joined, lone ones replaced by U+FFFD."""
    if text.isascii():
        return text
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def writable(event: Event) -> Event:
    """The event as it can be written: what a policy or a model put into it may be anything.

    Text that UTF-8 cannot hold is replaced, a whole number beyond 2^53 becomes that bound, and what JSON
    does not know becomes its type's name.
    """
    try:
        _encode(event)
    except (TypeError, ValueError, OverflowError, RecursionError):
        words = {name: encodable(getattr(event, name)) for name in ("policy", "cause", "why")}
        data = {encodable(str(key)): _encodable(value) for key, value in event.data.items()}
        return msgspec.structs.replace(event, **words, data=data)
    return event


def _encodable(value: object, depth: int = 8) -> object:
    if isinstance(value, str):
        return encodable(value)
    if value is None or isinstance(value, bool | float):
        return value
    if isinstance(value, int):
        return max(-MAX_INTEGER, min(MAX_INTEGER, value))
    if isinstance(value, list | tuple | dict) and not depth:
        return type(value).__name__
    if isinstance(value, list | tuple):
        return [_encodable(item, depth - 1) for item in value]
    if isinstance(value, dict):
        return {encodable(str(key)): _encodable(item, depth - 1) for key, item in value.items()}
    return type(value).__name__

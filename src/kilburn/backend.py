"""What a store is: the durable level below the window.

A store keeps pages by content, the ledger, the state of the window and an index for text search, and changes all four
in one transaction. It has few verbs, and each is all or nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from kilburn.errors import SpecError, StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page, Place, Span

__all__ = ["Backend", "Batch", "Passage", "Pieces", "SegmentInfo", "SegmentKind", "State", "Vector"]

LONGEST_NAME = 500
"""Characters of a session's or a tenant's name."""


def check_name(name: Any, what: str) -> str:
    """The name of a session or a tenant, as it was given. Any character may stand in it but NUL.

    Raises:
        SpecError: not a string, nothing but blanks, longer than `LONGEST_NAME` characters, or with a character that
            cannot be stored: NUL, a lone surrogate.
    """
    if not isinstance(name, str):
        raise SpecError(f"{what} {str(name)[:40]!r} is {type(name).__name__}, not a name", advice="give a string")
    if not name.strip():
        raise SpecError(f"{name[:40]!r} is no {what} name", advice="give a string that is not empty")
    if len(name) > LONGEST_NAME:
        raise SpecError(f"a {what} name of {len(name):,} characters", advice=f"give one of {LONGEST_NAME} at most")
    wrong = next((letter for letter in name if letter == "\0" or "\ud800" <= letter <= "\udfff"), None)
    if wrong is not None:
        raise SpecError(f"the {what} name {name[:40]!r} has the character U+{ord(wrong):04X}", advice="give another name")
    return name


_FORK = re.compile(r"(.+?)(~[0-9]+)?(/b[0-9]+)*", re.DOTALL)


def root_of(name: str) -> str:
    """Return what a session, its forks and its branches are called: `work` for `work~2` and for `work/b1`."""
    match = _FORK.fullmatch(name)
    return match[1] if match else name


class SegmentKind(StrEnum):
    """What a segment is."""

    SESSION = "session"
    """An agent's: it has a window."""
    MEMORY = "memory"
    """A user's facts. It is a collection: nobody speaks in it, and it has no window."""
    DOCUMENT = "document"
    """A text that was handed over, in passages; a collection too."""
    NOTES = "notes"
    """Texts with names that a user or an agent keeps; a collection too."""
    FORGOTTEN = "forgotten"
    """It was forgotten as a whole; only its number is left, and nobody gets it again."""


# A session has one for each of its thousands of pages: none can be part of a cycle, and the garbage collector passes over them.
class State(msgspec.Struct, frozen=True, gc=False):
    """What may change of a page: where it is, whether it is pinned, its importance, and when it stopped being true
    (seconds since the epoch; None as long as nobody closed its validity)."""

    at: Place = Place.OUT
    pinned: bool = False
    importance: float = 0.0
    until: float | None = None


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a tenant: its number in the store, name, time of creation, ledger length.

    `pages` and `tokens` count the rows of the store, derived pages included; the figures that people see of a session are in
    `kilburn.kernel.ledger.Stats`.

    `damaged` says in words why it cannot be opened; it is "" if nothing is known to be wrong. The other figures of a
    damaged segment mean nothing. `user` is the user of the tenant that it belongs to, or "" for all users.
    """

    number: int
    name: str
    created: float
    head: int = 0
    pages: int = 0
    tokens: int = 0
    used: float = 0.0
    damaged: str = ""
    kind: SegmentKind = SegmentKind.SESSION
    user: str = ""


class Scope(msgspec.Struct, frozen=True, kw_only=True):
    """Segments to look in.

    Args:
        infos: those that are whole, by number, oldest first. What is written meanwhile may come into it, and nothing goes.
        damaged: those that are not, and what stands for sessions that are missing.
        everything: whether no other segment of the tenant is there.
    """

    infos: Mapping[int, SegmentInfo]
    damaged: Sequence[SegmentInfo] = ()
    everything: bool = False


class Passage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A found passage: which segment and page, which span of its text, how well it matched.

    `entry` is its number in the store's index, by which its vector is known.
    """

    segment: int
    page: int
    span: Span
    score: float
    entry: int = 0


class HistoryOwner(msgspec.Struct, frozen=True, kw_only=True):
    """A session that has said what a digest is over: `at` is the number of that digest among its own, and it has `count`. Of a
    reply's key, `at` is the number of the note with it, below 0."""

    name: str
    at: int
    count: int


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """Texts that went to the cold place, or came back: how many, and how many bytes their rows had."""

    texts: int = 0
    bytes: int = 0


class Vector(msgspec.Struct, frozen=True, kw_only=True):
    """A passage's vector as it is stored: `entry` is the passage's (its upper bits are the segment), `data` its bytes."""

    number: int
    entry: int
    data: bytes


Pieces = Sequence[str | tuple[str, int, int]]
"""A text as pieces: words, and spans of other texts as (digest, start, stop), in characters."""


class Digests(msgspec.Struct, frozen=True):
    """What a session has said, from the digest behind its first `after` ones to the last: each is over a message and all before
    it. Whoever recognises histories makes them; to a kernel and a store they are bytes.

    `tails` has, for each of `added`, a digest over the last messages alone, or None: a history is found by it that begins
    otherwise. It may be empty. `inherits`: the first ones are of the session that this one forks from, which has none itself yet.
    """

    after: int
    added: tuple[bytes, ...]
    tails: tuple[bytes | None, ...] = ()
    inherits: bool = False


class Batch(msgspec.Struct, kw_only=True):
    """One transaction of one segment.

    Args:
        head: number of the last event that the writer knows. A store refuses a batch with another head than its own,
            because another writer was faster.
        used: when the segment was used last, as far as the writer knows; None if it does not. A store refuses another time too:
            it has lost events that the writer knows, and has got as many others since. Where these are of the same time, as they
            may be after a clock was set back, nobody sees it.
        above: the segment that this one forks from, and its last event: a store refuses the batch if it has another by now.
        events: to append, numbered head + 1 onwards.
        pages: new pages.
        texts: digest -> text, for every digest of `pages` (extras too); known ones are not rewritten.
        pieces: digest -> the pieces that make this text, of excerpts. A store may keep these in place of the text. They are
            spans of originals' texts, which are in the store or in this batch.
        states: page id -> state after the batch.
        index: ids of new pages whose text becomes searchable.
        unindex: ids that search must no longer find.
        erase: ids to forget: row scrubbed, index entry gone, content gone unless another page of
            the tenant has the same.
        checkpoint: the window of the segment after this batch, as its kernel writes it: with it, the ledger need not be replayed
            from the beginning. It has no words of pages.
        inherited: pages of other segments that are forgotten here: no event of this one may quote them any more.
        said: what the session has said with the new pages, kept as by `keep_history`; but only if the digests before are kept up
            to the last page before them.
        copied: whether it comes from another store (`kernel.copying`): pages without a digest are forgotten ones, what pages
            cite may come later, and what is erased may still be cited. again: with it, events that take the place of those with
            their numbers.
        wait: whether to wait for another writer; without, `StoreBusy` comes at once.
    """

    head: int
    used: float | None = None
    above: tuple[int, int] | None = None
    events: Sequence[Event] = ()
    pages: Sequence[Page] = ()
    texts: Mapping[str, str] = {}
    pieces: Mapping[str, Pieces] = {}
    states: Mapping[int, State] = {}
    index: Sequence[int] = ()
    unindex: Sequence[int] = ()
    erase: Sequence[int] = ()
    inherited: Sequence[Page] = ()
    checkpoint: bytes | None = None
    said: Digests | None = None
    copied: bool = False
    again: Sequence[Event] = ()
    wait: bool = True

    def check_continues(self, segment: int, head: int, used: float) -> None:
        """Check that this batch follows event `head` of a segment that was used last at a time.

        Raises:
            StoreStale: its writer knew another last event. StoreError: its events are not numbered without holes.
        """
        if head != self.head:
            what = f"segment {segment} is at event {head}, not {self.head}"
            raise StoreStale(what, advice="reopen the process, then do it again")
        if self.used not in (None, used):
            what = f"segment {segment} has another event {head}: the store has lost what was written last"
            raise StoreStale(what, advice="reopen the process, then do it again")
        for at, event in enumerate(self.events, head + 1):
            if event.number != at:
                what = f"event {event.number} stands where {at} must"
                raise StoreError(what, advice="number events from head + 1, without holes")

    def check_above(self, head: int) -> None:
        """Check that the segment that this one forks from is at the event that the writer knows.

        Raises:
            StoreStale: it is not.
        """
        if self.above is not None and self.above[1] != head:
            what = f"segment {self.above[0]} is at event {head}, not {self.above[1]}"
            raise StoreStale(what, advice="fork again from what is there now")


@runtime_checkable
class ContentStore(Protocol):
    """The texts of a tenant by their digests, and the cold place to which some of them are moved."""

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        """Return the verified texts of these digests.

        Raises:
            StoreCorrupt: a text does not match its digest, or is missing.
        """
        ...

    def chill(self, digests: Iterable[str]) -> Moved:
        """Move texts to the tenant's cold place, which the setting "cold" names (see `kilburn.backends.cold`).

        Texts that are there already, missing texts and texts too short to save space are passed over. Each text is always in
        one of the two places, even if the program is killed. Reading a cold text reads its object; forgetting the text deletes
        the object.

        Raises:
            SpecError: there is no cold place. StoreError: it cannot be reached; texts that were moved before stay moved.
            StoreBusy, StoreFull, StoreReadOnly. MissingExtra.
        """
        ...

    def warm(self, digests: Iterable[str] | None = None) -> Moved:
        """Move texts back from the cold place; all of them if `digests` is None.

        Raises:
            StoreCorrupt: an object is missing, or not what was written. StoreError, SpecError, MissingExtra.
        """
        ...

    def scrub(self, *, repair: bool = False) -> list[str]:
        """Read every object of the cold place and return a description of each problem: an object that is missing or altered,
        that should be deleted and still exists, or that belongs to no text.

        Args:
            repair: delete the objects that belong to no text.

        Raises:
            StoreError: the place cannot be reached. SpecError, MissingExtra.
        """
        ...

    def cold(self) -> dict[str, int]:
        """Return the texts that are in the cold place: each digest with its text's length in bytes."""
        ...

    def unreached(self) -> tuple[str, ...]:
        """Describe the places of the store where bytes of erased texts may remain."""
        ...


@runtime_checkable
class WordIndex(Protocol):
    """The index of passages by their words."""

    def search(self, query: str, *, segments: Collection[int] | None = None, limit: int = 20) -> list[Passage]:
        """Return at most `limit` passages that match the query's words, best first; of these segments, or of all. Damaged
        segments are left out."""
        ...

    def newest(self, segment: int, queries: Sequence[tuple[str, str]], limit: int = 20) -> list[list[Passage]]:
        """Return the newest passages of a segment for each query, newest first, with the score 0.

        The cost does not grow with the segment. A query without words, or of a damaged segment, has no passages.

        Args:
            queries: pairs of texts: a passage has every word of the first, and at least one of the second unless that is "".
            limit: passages for each query, at most.
        """
        ...

    def entries(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[Passage]]:
        """Return the passages of pages in reading order, with the score 0, by (number of the segment, page id). A page that is
        not indexed is left out."""
        ...

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """Return the passages with these numbers, with the score 0. Passages that no longer exist are left out."""
        ...


@runtime_checkable
class VectorIndex(Protocol):
    """The vectors of passages, by embedder."""

    def unembedded(
        self, embedder: str, limit: int, damaged: MutableMapping[int, StoreCorrupt] | None = None
    ) -> list[tuple[int, str]]:
        """Return at most `limit` passages without a vector of this embedder as (entry, text), newest segments first. A passage
        with an altered text is passed over.

        Args:
            damaged: receives the errors of the passages that were passed over, by entry.
        """
        ...

    def add(self, embedder: str, rows: Sequence[tuple[int, bytes]]) -> None:
        """Store vectors of passages, by entry, all or none. Vectors of forgotten passages are not stored. A new vector replaces
        the passage's previous one.

        Raises:
            StoreError: a vector's length differs from that of this embedder's others. StoreBusy, StoreFull, StoreReadOnly.
            SpecError: not a valid name of an embedder.
        """
        ...

    def read(self, embedder: str, after: int = 0) -> Iterator[Vector]:
        """Yield the vectors of this embedder with a number greater than `after`, in the order in which they were stored. Damaged
        vectors are left out."""
        ...

    def embedders(self) -> list[str]:
        """Return the names of the embedders with stored vectors, in the order of their first vectors."""
        ...

    def drop(self, embedder: str) -> None:
        """Remove all vectors of this embedder.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...


@runtime_checkable
class SettingStore(Protocol):
    """The settings of a tenant, by name. Job leases are settings too."""

    def all(self) -> dict[str, str]:
        """Return all settings."""
        ...

    def put(self, name: str, value: str | None) -> None:
        """Store a setting; None removes it.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def replace(self, name: str, known: str | None, value: str | None) -> bool:
        """Store a setting if its present value is `known` (None: it is not set); None removes it. Exactly one of several writers
        that know the same value succeeds.

        Returns:
            Whether the setting was stored.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...


@runtime_checkable
class HistoryIndex(Protocol):
    """The index of histories: the digests of each session's messages, by which a client's history is recognised.

    Whoever recognises histories derives the digests from the pages. Forgetting a page of a session erases the session's digests.
    """

    def put(self, segment: int, digests: Digests, *, page: int) -> bool:
        """Store a session's digests behind the first `digests.after` ones, which are stored already; all of them if that is 0.

        Args:
            page: the session's last original page, as far as the caller knows.

        Returns:
            Whether they are stored. Nothing is written if a page of the session was forgotten, if `page` is not its last page,
            or if it does not have exactly `digests.after` digests.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def owners(self, digest: bytes, limit: int, *, tail: bool = False) -> list[HistoryOwner]:
        """Return at most `limit` sessions with this digest: those that end with it first, then the newest. In place of a digest,
        the key of a reply (in bytes) finds the sessions whose ledgers note that reply.

        Args:
            tail: look for one of `Digests.tails`; a session may then appear several times.
        """
        ...

    def missing(self, root: str, user: str, limit: int) -> list[str]:
        """Return the names of a user's sessions, `root` and its forks, without digests up to their last page: at most `limit`,
        the most recently used first. Empty sessions are left out."""
        ...


@runtime_checkable
class Backend(Protocol):
    """A store: segments of pages with their ledgers, changed in transactions, and five further parts.

    One object serves one tenant: the tenant is a partition, not a filter. All methods raise `StoreError`s.
    `kilburn.testing.check_store` holds an implementation to this contract.
    """

    tenant: str
    readonly: bool
    contents: ContentStore
    words: WordIndex
    vectors: VectorIndex
    settings: SettingStore
    histories: HistoryIndex

    def segment(
        self, name: str, *, time: float, create: bool = True, kind: SegmentKind = SegmentKind.SESSION, user: str = ""
    ) -> SegmentInfo | None:
        """The segment of that name. If it does not exist and `create` is set, it is created at `time`, of this kind and
        for this user; of one that exists, both stay as they are.

        Its head is that of the last commit of any writer, so a reader can see whether it is current.

        Raises:
            StoreCorrupt: it is damaged. SpecError: no name of a user.
        """
        ...

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        """Create a session at `time`, for this user, and do its first batch, as one transaction: both, or nothing.

        Raises:
            StoreStale: the name is taken by now. What `process` raises when it creates, and what `commit` raises.
        """
        ...

    def segments(self, under: str = "") -> Sequence[SegmentInfo]:
        """All segments of the tenant, oldest first; one that is damaged is listed as such and blocks no other.

        Args:
            under: only those whose names begin with this name and a slash; "" for all.
        """
        ...

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """The segments of these kinds that belong to a user or to all users; None for everybody's. What it costs does not grow
        with their number, once they were read."""
        ...

    def commit(self, segment: int, batch: Batch) -> None:
        """Do the whole batch durably (but see `sync`), or raise and do nothing. What is written can be read again.

        Raises:
            StoreStale: the segment's ledger has moved on, or that of the one that it forks from; or a new page cites one that is
                forgotten by now; or a page that is to be erased is cited by another segment. So forgetting goes leaf first,
                and no citation ever dangles.
            Forgotten: a new page cites one that is being forgotten, see `leaving`.
            StoreBusy, StoreFull, StoreReadOnly.
            StoreCorrupt: what is there already is damaged.
            StoreError: a batch that contradicts itself, or a page or event that could not be read again.
        """
        ...

    def pages(self, segment: int) -> Iterable[tuple[Page, State]]:
        """All pages of a segment with their states, originals first, in order of id.

        Raises:
            StoreCorrupt: a page is missing, or not what was written.
        """
        ...

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Single pages with their states, by (number of the segment, page id), without reading any other; what does not
        exist is left out.

        Raises:
            StoreCorrupt: one is not what was written.
        """
        ...

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """As `read`, but nothing of it is verified: to choose among many pages those that are then read.

        Raises:
            StoreCorrupt: one cannot even be decoded, or its segment is damaged.
        """
        ...

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """The pages that directly cite any of these pages of a segment, as (number of the segment, page id), in order:
        those of any segment of the tenant that have it among their `cites`, and those of the segment itself that have it
        among their `sources`; of a session, without these pages themselves. Forgotten pages cite nothing."""
        ...

    def calls(self, segment: int, among: Iterable[str] | None = None) -> dict[str, int]:
        """The calls of a segment by their ids, with the ids of their pages: all, or those with these ids. Forgotten ones are
        left out."""
        ...

    def forgotten(self, segment: int) -> list[int]:
        """The ids of the pages of a segment that are forgotten, in order."""
        ...

    def checkpoint(self, segment: int, until: int | None = None) -> tuple[int, bytes] | None:
        """The newest checkpoint of a segment, at event `until` or before it, with the number of its last event. None where there
        is none that is as it was written."""
        ...

    def events(self, segment: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """The ledger from event `after` + 1 on; only the events of one act, if it is given.

        Raises:
            StoreCorrupt: an event is missing, or not what was written.
        """
        ...

    def naming(self, segment: int, pages: Iterable[int]) -> list[Event]:
        """The events of a session's ledger that say that something happened to any of these pages, or was made of them; oldest
        first.

        Raises:
            StoreCorrupt: one is not what was written.
        """
        ...

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        """Erase what is left of a segment of which every page is forgotten: its name, its user and its ledger. Its number is
        not given again, and nothing can be written to it any more.

        Args:
            wipe: whether its bytes go now, which may read or write everything that is stored. Without, those of its name may
                stay until something else is erased. It is for a segment that never had a page.

        Raises:
            StoreError: no such segment, or it has pages that are not forgotten. StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def now(self) -> float:
        """Seconds since the epoch by the clock of the store: the server's, where there is one."""
        ...

    def snapshot(self) -> AbstractContextManager[None]:
        """Within this, this thread reads the store as it was at the first read, whatever others write meanwhile. Its writes are
        refused (`StoreReadOnly`). What others erase meanwhile stays in the files until this ends.

        Raises:
            StoreBusy.
        """
        ...

    def together(self, segments: Collection[int] = ()) -> AbstractContextManager[None]:
        """Within this, all that this thread writes is one transaction: it is there when this ends, or, if the block raises or the
        program is killed, nothing of it. Until then only this object sees it, and other writers wait.

        Args:
            segments: to these nobody else writes from the beginning, and not only once this thread has.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def erasing(self) -> AbstractContextManager[None]:
        """Within this, several commits of this thread may erase: their bytes are gone when it ends, and not after each. If the
        program is killed before, they go when the store is next opened for writing."""
        ...

    def leaving(self, keys: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Within this, no new page may cite these, nor what cites them when it begins, by anybody: they are to be forgotten, and
        whoever cites goes first. If the program is killed before it ends, they still cannot be cited until they are forgotten;
        `fsck` says so. What can then not be written at its end is written with a later commit. A page 0 stands for all pages of a
        segment, also those to come.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def lasting(self) -> AbstractContextManager[None]:
        """Within this, what this thread commits, and what was committed before it, is durable when a commit returns, where that
        saves a wait: `sync` knows, and finds nothing to do. Elsewhere it changes nothing."""
        ...

    def sync(self, segment: int | None = None) -> None:
        """Where commits are not durable at once, because the store was opened so: all that were done before this are when it
        returns.

        Args:
            segment: to find out whether the last commit to it is still there: a server that was killed in between has lost it,
                and its next start does not say so.

        Raises:
            StoreError: the disk failed; what is not durable may be lost in a power cut. StoreUnavailable: the commit is lost.
        """
        ...

    def close(self) -> None:
        """Release what it holds open; idempotent."""
        ...

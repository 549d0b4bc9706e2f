"""The interface of a backend: the durable level below a `Store`.

A backend holds pages by content, ledgers, the states of pages and an index for text search. One transaction changes all of
them. Every method succeeds as a whole or changes nothing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from typing import Any, Protocol, runtime_checkable

import msgspec

from kilburn.errors import SpecError, StoreCorrupt, StoreError, StoreStale
from kilburn.event import Act, Event
from kilburn.page import Page, Place, Span

__all__ = ["Backend", "Batch", "Passage", "Pieces", "SegmentInfo", "SegmentKind", "State", "Vector"]

MAX_NAME_CHARS = 500
"""Maximum length of the name of a session, tenant, user or embedder."""


def check_name(name: Any, noun: str) -> str:
    """Return a name of a session, tenant, user or embedder if it is valid. Every character but NUL is allowed.

    Args:
        noun: what has this name, for the error.

    Raises:
        SpecError: not a string, blank, longer than `MAX_NAME_CHARS`, or with a character that cannot be stored (NUL, a lone
            surrogate).
    """
    if not isinstance(name, str):
        raise SpecError(f"{noun} {str(name)[:40]!r} is {type(name).__name__}, not a name", advice="give a string")
    if not name.strip():
        raise SpecError(f"{name[:40]!r} is no {noun} name", advice="give a string that is not empty")
    if len(name) > MAX_NAME_CHARS:
        raise SpecError(f"a {noun} name of {len(name):,} characters", advice=f"give one of {MAX_NAME_CHARS} at most")
    wrong = next((letter for letter in name if letter == "\0" or "\ud800" <= letter <= "\udfff"), None)
    if wrong is not None:
        raise SpecError(f"the {noun} name {name[:40]!r} has the character U+{ord(wrong):04X}", advice="give another name")
    return name


_FORK = re.compile(r"(.+?)(~[0-9]+)?(/b[0-9]+)*", re.DOTALL)


def root_name(name: str) -> str:
    """Return the name that a session shares with its forks and branches: `work` for `work~2` and for `work/b1`."""
    match = _FORK.fullmatch(name)
    return match[1] if match else name


class SegmentKind(StrEnum):
    """The kind of a segment."""

    SESSION = "session"
    """A session of an agent, with a window."""
    MEMORY = "memory"
    """The facts of a user: a collection, without messages and without a window."""
    DOCUMENT = "document"
    """A document in passages; a collection too."""
    NOTES = "notes"
    """Named texts of a user or an agent; a collection too."""
    FORGOTTEN = "forgotten"
    """A segment that was forgotten as a whole. Its number remains and is never reused."""


# A session has thousands of these. They cannot be part of a cycle, so the garbage collector need not track them.
class State(msgspec.Struct, frozen=True, gc=False):
    """The mutable part of a page: its place, whether it is pinned, its importance, and the end of its validity (seconds since
    the epoch; None while it is valid)."""

    at: Place = Place.OUT
    pinned: bool = False
    importance: float = 0.0
    until: float | None = None


class SegmentInfo(msgspec.Struct, frozen=True, kw_only=True):
    """One segment of a tenant.

    Args:
        number: its number in the store. created, used: seconds since the epoch. head: the number of its last event.
        pages, tokens: counts of the store's rows, derived pages included; a user sees the figures of
            `kilburn.kernel.ledger.Stats`.
        damaged: why it cannot be opened, or "". The other figures of a damaged segment are meaningless.
        user: the user that it belongs to, or "" for all users of the tenant.
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
    """Segments to search.

    Args:
        infos: the undamaged segments, by number, oldest first. A concurrent write may add segments, and removes none.
        damaged: the damaged segments, and a placeholder for missing sessions.
        everything: whether the tenant has no other segments.
    """

    infos: Mapping[int, SegmentInfo]
    damaged: Sequence[SegmentInfo] = ()
    everything: bool = False


class Passage(msgspec.Struct, frozen=True, gc=False, kw_only=True):
    """A passage of a page, with the span of its text and its score for a query.

    `entry` is its number in the store's index; its vector has the same number.
    """

    segment: int
    page: int
    span: Span
    score: float
    entry: int = 0


class HistoryOwner(msgspec.Struct, frozen=True, kw_only=True):
    """A session whose messages have a digest: it is number `at` of the session's `count` digests. For the key of a reply, `at` is
    the negated number of the note with this key."""

    name: str
    at: int
    count: int


class Moved(msgspec.Struct, frozen=True, kw_only=True):
    """The number of texts that were moved to or from the cold place, and the bytes of their rows."""

    texts: int = 0
    bytes: int = 0


class Vector(msgspec.Struct, frozen=True, kw_only=True):
    """A stored vector: `entry` is the number of its passage (the upper bits are the segment), `data` its bytes."""

    number: int
    entry: int
    data: bytes


Pieces = Sequence[str | tuple[str, int, int]]
"""A text in pieces: literal words, and spans of other texts as (digest, start, stop), in characters."""


class Digests(msgspec.Struct, frozen=True):
    """Digests of a session's messages, each over a message and all messages before it. They are opaque bytes to kernel and store.

    Args:
        offset: number of the session's first digests that stay as they are. added: the digests behind these.
        tails: for each of `added`, a digest over the last messages alone, or None; empty for none. It finds a history with
            another beginning.
        inherits: whether the first ones belong to the session that this one forks from, and this one has none of its own yet.
    """

    offset: int
    added: tuple[bytes, ...]
    tails: tuple[bytes | None, ...] = ()
    inherits: bool = False


class Batch(msgspec.Struct, kw_only=True):
    """One transaction of one segment.

    Args:
        head: number of the last event that the writer knows. The store refuses the batch if its own head differs: another
            writer was faster.
        used: time of the segment's last use, as far as the writer knows; None if unknown. The store refuses the batch if its own
            time differs: it has lost events that the writer knows, and has as many other events. Events of the same time, after
            a clock was set back, go unnoticed.
        above: the segment that this one forks from, and its last event. The store refuses the batch if that segment has another
            last event.
        events: events to append, numbered from head + 1.
        pages: new pages.
        texts: digest -> text, for every digest of `pages`, extras included. Texts that are stored already are not rewritten.
        pieces: digest -> pieces of an excerpt's text, which a store may keep in place of the text. They are spans of originals'
            texts, which are in the store or in this batch.
        states: page id -> state after the batch.
        index: ids of pages whose texts become searchable. unindex: ids of pages that a search must no longer find.
        erase: ids of pages to forget: the row is scrubbed, the index entry removed, and the content too unless another page of
            the tenant has it.
        checkpoint: the window of the segment after this batch, as the kernel encodes it, without texts of pages. It saves
            replaying the ledger from its beginning.
        inherited: pages of other segments that are forgotten: no event of this segment may quote them any more.
        digests: digests of the session's messages with the new pages. They are stored if the digests before them are complete up
            to the last page before the new ones.
        copied: whether the batch comes from another store (`kilburn.copying`): pages without a digest are forgotten, cited pages
            may follow later, and erased pages may still be cited.
        replaced: in a copy, events that replace those with their numbers.
        wait: whether to wait for another writer; otherwise `StoreBusy` is raised at once.
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
    digests: Digests | None = None
    copied: bool = False
    replaced: Sequence[Event] = ()
    wait: bool = True

    def check_continues(self, segment: int, head: int, last_used: float) -> None:
        """Check that this batch continues a segment with this head and time of last use.

        Raises:
            StoreStale: the writer knew another last event. StoreError: the numbers of the events have gaps.
        """
        if head != self.head:
            message = f"segment {segment} is at event {head}, not {self.head}"
            raise StoreStale(message, advice="reopen the session, then do it again")
        if self.used not in (None, last_used):
            message = f"segment {segment} has another event {head}: the store has lost its latest events"
            raise StoreStale(message, advice="reopen the session, then do it again")
        for at, event in enumerate(self.events, head + 1):
            if event.number != at:
                message = f"the batch has event {event.number} in place of {at}"
                raise StoreError(message, advice="number events from head + 1, without gaps")

    def check_above(self, head: int) -> None:
        """Check that the parent of a fork is at the event that the writer knows.

        Raises:
            StoreStale: it is not.
        """
        if self.above is not None and self.above[1] != head:
            message = f"segment {self.above[0]} is at event {head}, not {self.above[1]}"
            raise StoreStale(message, advice="fork again from its present state")


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """One problem of a store.

    Args:
        kind: "file" (SQLite's own check), "content" (missing or altered), "session" (its row), "page" (its row
            and its content disagree), "state" (of a page), "ledger" (holes, altered events or a wrong head),
            "index" (of search, citations, mentions, calls or replies: it differs from the pages or the ledger),
            "checkpoint" (altered, or different from the ledger), "citation" (of a missing page), "vector" (damaged, or without
            a passage), "cold" (an object of the cold place), "anchor" (the store is older than its anchor), or "orphan" (stored
            but unused).
        what: a description with the digest or address.
        derived: whether a repair can mend it.
        segment: the segment's number, or 0. page: the page's id, or 0.
    """

    kind: str
    what: str
    derived: bool = False
    segment: int = 0
    page: int = 0


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

    def search(
        self, query: str, *, segments: Collection[int] | None = None, limit: int = 20, by_user: bool = False
    ) -> list[Passage]:
        """Return at most `limit` passages that match the query's words, best first; of these segments, or of all. Damaged
        segments are left out.

        Args:
            by_user: search only the user's messages, see `Page.is_by_user`.
        """
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
    """The settings of a tenant, by name: any text. Job leases are settings too. CONTRIBUTING.md says how to add a setting."""

    def all(self) -> dict[str, str]:
        """Return all settings."""
        ...

    def put(self, name: str, value: str | None) -> None:
        """Store a setting; None removes it.

        Raises:
            StoreError: a lone surrogate. StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def replace(self, name: str, expected: str | None, value: str | None) -> bool:
        """Store a setting if its present value is `expected` (None: it is not set); None removes it. Of several
        writers that expect the same value, exactly one succeeds.

        Returns:
            Whether the setting was stored.

        Raises:
            StoreError: a lone surrogate. StoreBusy, StoreFull, StoreReadOnly.
        """
        ...


@runtime_checkable
class HistoryIndex(Protocol):
    """The index of histories: the digests of each session's messages, by which a client's history is recognised.

    Whoever recognises histories derives the digests from the pages. Forgetting a page of a session erases the session's digests.
    """

    def put(self, segment: int, digests: Digests, *, page: int) -> bool:
        """Store a session's digests behind the first `digests.offset` ones, which are stored already; all of them if that is 0.

        Args:
            page: the session's last original page, as far as the caller knows.

        Returns:
            Whether they are stored. Nothing is written if a page of the session was forgotten, if `page` is not its last page,
            or if it does not have exactly `digests.offset` digests.

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
    """A backend: segments of pages with their ledgers, changed in transactions, and five further parts.

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
        """Return the segment of that name. A missing segment is created if `create` is set, with this time, kind and user; an
        existing one keeps its kind and user.

        Its head is that of the last commit of any writer, so that a reader sees whether it is current.

        Raises:
            StoreCorrupt: it is damaged. SpecError: not a valid user name.
        """
        ...

    def begin(self, name: str, batch: Batch, *, time: float, user: str = "") -> SegmentInfo:
        """Create a session at `time` for this user and commit its first batch, in one transaction.

        Raises:
            StoreStale: the name is taken. The errors of `segment` and of `commit`.
        """
        ...

    def segments(self, under: str = "") -> Sequence[SegmentInfo]:
        """Return all segments of the tenant, oldest first. A damaged segment is listed with its damage.

        Args:
            under: return only segments whose names begin with this name and a slash.
        """
        ...

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """Return the segments of these kinds that belong to a user or to all users; for None, those of every user. After the
        first call the cost does not grow with their number."""
        ...

    def commit(self, segment: int, batch: Batch) -> None:
        """Commit the whole batch durably (but see `sync`), or raise and change nothing.

        Raises:
            StoreStale: another writer has moved on the segment, or the one that it forks from; a new page cites a forgotten
                page; or another segment cites a page to erase. Thus pages are forgotten leaf first, and no citation dangles.
            Forgotten: a new page cites a page that is being forgotten, see `leaving`.
            StoreBusy, StoreFull, StoreReadOnly.
            StoreCorrupt: the stored segment is damaged.
            StoreError: the batch contradicts itself, or a page or event of it could not be decoded again.
        """
        ...

    def pages(self, segment: int) -> Iterable[tuple[Page, State]]:
        """Yield all pages of a segment with their states, originals first, in the order of their ids.

        Raises:
            StoreCorrupt: a page is missing or altered.
        """
        ...

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Return single pages with their states, by (number of the segment, page id). Missing pages are left out.

        Raises:
            StoreCorrupt: one is altered.
        """
        ...

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """Return single pages like `read`, but unverified: for choosing among many pages those to `read`.

        Raises:
            StoreCorrupt: one cannot be decoded, or its segment is damaged.
        """
        ...

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """Return the pages that directly cite any of these pages of a segment, as (number of the segment, page id), in order:
        pages of any segment with one of them in `cites`, and pages of the segment itself with one in `sources`. For a session
        these pages themselves are left out. Forgotten pages cite nothing."""
        ...

    def calls(self, segment: int, among: Iterable[str] | None = None) -> dict[str, int]:
        """Return the page ids of a segment's calls by call id: all, or those with these call ids. Forgotten calls are left
        out."""
        ...

    def forgotten(self, segment: int) -> list[int]:
        """Return the ids of a segment's forgotten pages, in order."""
        ...

    def checkpoint(self, segment: int, until: int | None = None) -> tuple[int, bytes] | None:
        """Return the number of the last event and the data of a segment's newest checkpoint, at event `until` or before it; None
        if there is no undamaged one."""
        ...

    def events(self, segment: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """Yield the ledger from event `after` + 1, or only its events of one act.

        Raises:
            StoreCorrupt: an event is missing or altered.
        """
        ...

    def naming(self, segment: int, pages: Iterable[int]) -> list[Event]:
        """Return the events of a session's ledger that concern any of these pages, or pages derived from them, oldest first.

        Raises:
            StoreCorrupt: one is altered.
        """
        ...

    def erase(self, segment: int, *, wipe: bool = True) -> None:
        """Erase the name, user and ledger of a segment whose pages are all forgotten. Its number is never reused, and no further
        batch is accepted.

        Args:
            wipe: wipe its bytes now, which may read or write the whole store. Otherwise bytes of its name may remain until the
                next erasure; this is for a segment that never had a page.

        Raises:
            StoreError: there is no such segment, or it has pages that are not forgotten. StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def now(self) -> float:
        """Return the time of the store's clock in seconds since the epoch; a server has its own clock."""
        ...

    def snapshot(self) -> AbstractContextManager[None]:
        """Let this thread read the store as of its first read in the block. Its writes raise `StoreReadOnly`. Bytes that others
        erase meanwhile stay in the files until the block ends.

        Raises:
            StoreBusy.
        """
        ...

    def together(self, segments: Collection[int] = ()) -> AbstractContextManager[None]:
        """Make all writes of this thread in the block one transaction. Nothing of it remains if the block raises or the program
        is killed. Until the block ends only this object sees the writes, and other writers wait.

        Args:
            segments: segments to lock at once instead of at their first write.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def erasing(self, *, strict: bool = False) -> AbstractContextManager[None]:
        """Wipe the bytes that commits of this thread erase once, at the end of the block, in place of after each commit. If the
        program is killed, the next opening for writing wipes them.

        Args:
            strict: whether the end of the block raises if the bytes cannot be wiped now. Otherwise this is logged, and the next
                erasure tries again.

        Raises:
            StoreReadOnly, StoreBusy, StoreError: the bytes could not be wiped, and `strict` is set.
        """
        ...

    def leaving(self, keys: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Keep every writer from citing these pages, and pages that cite them at the start of the block: they are being
        forgotten, citing pages first. If the program is killed in the block, they stay uncitable until they are forgotten, and
        `fsck` reports them. A later commit repeats a failed write at the end of the block. Page 0 stands for all pages of a
        segment, future ones included.

        Raises:
            StoreBusy, StoreFull, StoreReadOnly.
        """
        ...

    def lasting(self) -> AbstractContextManager[None]:
        """Make commits of this thread in the block durable when they return, where that saves a wait of `sync`. Elsewhere the
        block has no effect."""
        ...

    def sync(self, segment: int | None = None) -> None:
        """Make all earlier commits durable, if the store was opened with commits that are not durable at once.

        Args:
            segment: check too that the last commit to this segment exists: a server that was killed meanwhile may have lost it.

        Raises:
            StoreError: the disk failed; a power cut may lose the latest commits. StoreUnavailable: the commit is lost.
        """
        ...

    def close(self) -> None:
        """Release files and connections; idempotent."""
        ...


def at_once(backend: Backend, *, ahead: bool = False) -> AbstractContextManager[None]:
    """Let this thread's reads be one snapshot, in which nothing is read twice, where that saves round trips to a server. Nothing
    is to be written within it, and nobody else is to be waited for.

    Args:
        ahead: whether the pages and texts of what is found are read with it.
    """
    context: AbstractContextManager[None]
    context = backend.at_once(ahead=ahead) if hasattr(backend, "at_once") else nullcontext()
    return context

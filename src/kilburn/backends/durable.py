"""What the backends in SQLite and PostgreSQL do alike, whatever their SQL."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from itertools import chain, repeat
from types import TracebackType
from typing import TYPE_CHECKING, Protocol, Self, TypeVar

from kilburn.backend import ContentStore, HistoryIndex, Passage, SettingStore, VectorIndex, WordIndex
from kilburn.backends import citations
from kilburn.backends.chilling import Chilling
from kilburn.backends.ranked import Extents, RankedIndex
from kilburn.errors import StoreError
from kilburn.event import Act, Event
from kilburn.page import Span

if TYPE_CHECKING:
    from kilburn.backends.anchor import Anchor

T = TypeVar("T")

READ_ROWS = 1000
"""Events, or vectors, that one transaction reads: none stays open while a caller thinks."""

FIRST_EVENTS = 16
"""Events that are read first: they include how a session was created."""


class DurableBackend(ABC):
    """What the backends of a file and of a database share."""

    path: str
    tenant: str
    readonly: bool
    contents: ContentStore
    words: WordIndex
    vectors: VectorIndex
    settings: SettingStore
    histories: HistoryIndex
    _chilling: Chilling

    def __init__(self, tenant: str, *, readonly: bool) -> None:
        self.tenant, self.readonly = tenant, readonly
        self.anchor: Anchor | None = None
        # Whether a thread is within `erasing`.
        self._erasing = threading.local()
        # Marks of pages that are no longer being forgotten, and that could not be removed yet.
        self._stale_marks = set[citations.Citation]()

    def __repr__(self) -> str:
        """Name the place and the tenant; nothing is read for it."""
        return f"<{type(self).__name__} {self.path!r} of tenant {self.tenant!r}{', for reading' * self.readonly}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def events(self, segment: int, after: int = 0, act: Act | None = None) -> Iterator[Event]:
        """See `Backend`."""
        # Many callers need only the first few.
        for limit in chain((FIRST_EVENTS,), repeat(READ_ROWS)):
            events = self._read_events(segment, after, act, limit)
            yield from events
            if len(events) < limit:
                return
            after = events[-1].number

    @contextmanager
    def erasing(self, *, strict: bool = False) -> Iterator[None]:
        """See `Backend`. Other threads' commits do not wait for the end of this block."""
        outer, self._erasing.inside = self._is_erasing(), True
        try:
            yield
        finally:
            self._erasing.inside = outer
            if not outer:
                self._chilling.sweep()
                self._wipe_erased(strict=strict)

    @contextmanager
    def leaving(self, keys: Iterable[tuple[int, int]]) -> Iterator[None]:
        """See `Backend`."""
        marks = set[citations.Citation]()
        try:
            self._mark_leaving(set(keys), marks)
            self._stale_marks -= marks
            yield
        finally:
            # An interrupt may come just after they were written, and a broken connection leaves it open whether they were.
            self._stale_marks |= marks
            self._remove_stale_marks()

    def _remove_stale_marks(self, *, wait: bool = True) -> None:
        """Allow new pages to cite again what is no longer being forgotten. Where that cannot be written now, or may be undone
        with the transaction around it, the next commit does it."""
        marks = set(self._stale_marks)
        if not marks or self._is_joined():
            return
        with suppress(StoreError):
            self._remove_citations(marks, wait=wait)
            self._stale_marks -= marks

    def _hold_anchor(self) -> AbstractContextManager[None]:
        return self.anchor.held() if self.anchor is not None else nullcontext()

    def _is_erasing(self) -> bool:
        return bool(getattr(self._erasing, "inside", False))

    def _keeps_objects(self) -> bool:
        """Whether no object of the cold place may be deleted now."""
        return self.readonly or self._is_joined() or self._is_erasing()

    @abstractmethod
    def close(self) -> None:
        """See `Backend`."""

    @abstractmethod
    def _read_events(self, segment: int, after: int, act: Act | None, limit: int) -> Sequence[Event]:
        """Read at most `limit` events behind one, in one transaction."""

    @abstractmethod
    def _mark_leaving(self, keys: Collection[tuple[int, int]], marks: set[citations.Citation]) -> None:
        """Write that pages are being forgotten, and add to `marks` what was written."""

    @abstractmethod
    def _remove_citations(self, marks: Collection[citations.Citation], *, wait: bool) -> None:
        """Remove rows from the index of citations."""

    @abstractmethod
    def _is_joined(self) -> bool:
        """Whether the present batches are part of a larger transaction, or of a snapshot."""

    @abstractmethod
    def _wipe_erased(self, *, strict: bool) -> None:
        """Wipe the bytes of erased rows, unless there are none or an `erasing` block defers it."""


class IndexView(Protocol):
    """The passages of a tenant within one transaction."""

    @property
    def index(self) -> RankedIndex:
        """The index of their words."""
        ...

    def extents(self, segments: Collection[int] | None) -> Extents:
        """Return how much there is to look through in these segments, or in all; damaged ones are left out."""
        ...

    def whole(self, segments: Iterable[int]) -> set[int]:
        """Return those of these numbers that are undamaged segments of this tenant."""
        ...

    def page_entries(self, keys: Sequence[tuple[int, int]]) -> Iterable[tuple[tuple[int, int], int, Span]]:
        """Yield the entries of pages as (key, entry, span), of each page in reading order."""
        ...


class ReadsIndex(Protocol):
    """Calls a function with the passages in one snapshot."""

    def __call__(self, do: Callable[[IndexView], T]) -> T:
        """Return what `do` returns."""
        ...


class PassageIndex:
    """See `kilburn.backend.WordIndex`."""

    def __init__(self, read_index: ReadsIndex) -> None:
        self._read = read_index

    def search(
        self, query: str, *, segments: Collection[int] | None = None, limit: int = 20, by_user: bool = False
    ) -> list[Passage]:
        """See `WordIndex`."""

        def do(view: IndexView) -> list[Passage]:
            if segments:
                view.index.expect(query, min(segments), max(segments), by_user=by_user)
            extents = view.extents(segments)
            apart = segments is not None and len(extents.segments) > 1
            hits = view.index.search(query, extents, limit, apart=apart, by_user=by_user)
            passages = _passages(view, [entry for entry, _ in hits], dict(hits))
            return [passages[entry] for entry, _ in hits if entry in passages]

        return self._read(do)

    def newest(self, segment: int, queries: Sequence[tuple[str, str]], limit: int = 20) -> list[list[Passage]]:
        """See `WordIndex`."""

        def do(view: IndexView) -> list[list[Passage]]:
            if not view.whole([segment]):
                return [[] for _ in queries]
            hits = [view.index.newest(every, any_of, segment, limit) for every, any_of in queries]
            # Queries share words, so they share passages.
            passages = _passages(view, list({entry for entries in hits for entry in entries}))
            return [[passages[entry] for entry in entries if entry in passages] for entries in hits]

        return self._read(do)

    def entries(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[Passage]]:
        """See `WordIndex`."""
        requested = dict.fromkeys(keys)

        def do(view: IndexView) -> dict[tuple[int, int], list[Passage]]:
            whole = view.whole(segment for segment, _ in requested)
            passages: dict[tuple[int, int], list[Passage]] = {}
            for key, entry, span in view.page_entries([key for key in requested if key[0] in whole]):
                passages.setdefault(key, []).append(Passage(segment=key[0], page=key[1], span=span, score=0.0, entry=entry))
            return {key: passages[key] for key in requested if key in passages}

        return self._read(do)

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """See `WordIndex`."""
        requested = list(entries)
        return self._read(lambda view: _passages(view, requested))


def _passages(view: IndexView, entries: Sequence[int], scores: dict[int, float] | None = None) -> dict[int, Passage]:
    """Return the passages with these numbers, by number; those of damaged segments are left out."""
    spans = view.index.spans(entries)
    whole = view.whole(entry >> 32 for entry in spans)
    return {
        entry: Passage(segment=entry >> 32, page=page, span=span, score=scores[entry] if scores else 0.0, entry=entry)
        for entry, (page, span) in spans.items()
        if entry >> 32 in whole
    }

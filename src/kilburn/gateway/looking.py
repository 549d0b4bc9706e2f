"""A store as one client may look at it: for reading alone, and without what belongs to others.

It stands before every backend, so whoever reads through it needs no check of its own: what may not be seen is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, cast

import msgspec

from kilburn.backend import (
    Backend,
    ContentStore,
    HistoryIndex,
    Passage,
    Scope,
    SegmentInfo,
    SegmentKind,
    SettingStore,
    State,
    VectorIndex,
    WordIndex,
)
from kilburn.errors import SpecError, StoreReadOnly
from kilburn.page import Page


def _of_a_segment(name: str) -> Any:
    """Return a method whose first argument is a segment."""

    def ask(self: LookingBackend, segment: int, *args: Any, **options: Any) -> Any:
        self.check(segment)
        return getattr(self.whole, name)(segment, *args, **options)

    return ask


def _refused(*args: Any, **options: Any) -> Any:
    raise StoreReadOnly("nothing is written by looking", advice="use a verb that changes something")


class _Readable:
    """The named methods of a part of a backend; its other methods are refused."""

    def __init__(self, part: object, *names: str) -> None:
        self._part, self._names = part, names

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name) if name in self._names else _refused


class _Words:
    """The passages of the segments that may be seen."""

    def __init__(self, looking: LookingBackend) -> None:
        self._looking, self._whole = looking, looking.whole.words

    def search(
        self, query: str, *, segments: Collection[int] | None = None, limit: int = 20, by_user: bool = False
    ) -> list[Passage]:
        """See `WordIndex`."""
        requested = [info.number for info in self._looking.segments()] if segments is None else segments
        visible = [number for number in requested if self._looking.has(number)]
        return self._whole.search(query, segments=visible, limit=limit, by_user=by_user)

    def newest(self, segment: int, queries: Sequence[tuple[str, str]], limit: int = 20) -> list[list[Passage]]:
        """See `WordIndex`."""
        self._looking.check(segment)
        return self._whole.newest(segment, queries, limit)

    def entries(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], list[Passage]]:
        """See `WordIndex`."""
        return self._whole.entries(self._looking.visible(keys))

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """See `WordIndex`."""
        passages = self._whole.passages(entries)
        return {entry: passage for entry, passage in passages.items() if self._looking.has(passage.segment)}


class LookingBackend:
    """A backend for reading.

    Args:
        shows: whether a segment may be seen.
    """

    readonly = True

    calls, forgotten, checkpoint = map(_of_a_segment, ("calls", "forgotten", "checkpoint"))
    events, pages, naming = map(_of_a_segment, ("events", "pages", "naming"))
    begin = commit = erase = together = erasing = leaving = sync = lasting = snapshot = _refused

    def __init__(self, whole: Backend, shows: Callable[[SegmentInfo], bool] = lambda info: True) -> None:
        self.whole, self._shows = whole, shows
        self.tenant, self.now = whole.tenant, whole.now
        self.contents: ContentStore = cast(Any, _Readable(whole.contents, "texts"))
        self.words: WordIndex = _Words(self)
        self.vectors: VectorIndex = cast(Any, _Readable(whole.vectors, "embedders"))
        self.settings: SettingStore = cast(Any, _Readable(whole.settings, "all"))
        self.histories: HistoryIndex = cast(Any, _Readable(whole.histories))
        self.path = str(getattr(whole, "path", ""))
        self._known: dict[int, bool] = {}
        """By its number, which is given once: whose a segment is does not change."""

    def has(self, number: int) -> bool:
        """Whether a segment may be seen."""
        if number not in self._known:
            self._known |= {info.number: self._shows(info) for info in self.whole.segments() if info.number}
        return self._known.get(number, False)

    def check(self, number: int) -> None:
        """Check that a segment may be seen.

        Raises:
            SpecError: it may not.
        """
        if not self.has(number):
            raise SpecError("there is no such session", advice="see the list of sessions")

    def visible(self, keys: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
        """Return the pages whose segments may be seen."""
        return [key for key in keys if self.has(key[0])]

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        return self.whole.read(self.visible(keys))

    def skim(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        """See `Backend`."""
        return self.whole.skim(self.visible(keys))

    def segment(
        self, name: str, *, time: float, create: bool = True, kind: SegmentKind = SegmentKind.SESSION, user: str = ""
    ) -> SegmentInfo | None:
        """Return the segment of that name if it may be seen; none is created.

        Raises:
            StoreReadOnly: it would be made.
        """
        info = self.whole.segment(name, time=0.0, create=False)
        info = info if info is not None and self._shows(info) else None
        if info is None and create:
            raise StoreReadOnly(f"no {kind} {name!r} here, and nothing is made by looking", advice="see the list")
        return info

    def segments(self, under: str = "") -> Sequence[SegmentInfo]:
        """Those that may be seen."""
        return [info for info in self.whole.segments(under) if self._shows(info)]

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """Return the part of a scope that may be seen."""
        full_scope = self.whole.scope(kinds, user)
        infos = {number: info for number, info in full_scope.infos.items() if self._shows(info)}
        damaged = [info for info in full_scope.damaged if self._shows(info)]
        return msgspec.structs.replace(
            full_scope, infos=infos, damaged=damaged, everything=full_scope.everything and len(infos) == len(full_scope.infos)
        )

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """Of those that may be seen."""
        return self.visible(self.whole.citing(segment, pages))

    def close(self) -> None:
        """The backend is its owner's."""

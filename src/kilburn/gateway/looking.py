"""A store as one client may look at it: for reading alone, and without what belongs to others.

It stands before every backend, so whoever reads through it needs no check of its own: what may not be seen is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import msgspec

from kilburn.backend import Backend, Passage, Scope, SegmentInfo, SegmentKind
from kilburn.errors import SpecError, StoreReadOnly


def _as_it_is(name: str) -> Any:
    def ask(self: LookingBackend, *arguments: Any, **more: Any) -> Any:
        return getattr(self.whole, name)(*arguments, **more)

    return ask


def _of_a_segment(name: str) -> Any:
    """Return a method whose first argument is the number of a segment."""

    def ask(self: LookingBackend, segment: int, *arguments: Any, **more: Any) -> Any:
        if not self.has(segment):
            raise SpecError("there is no such session", advice="see the list of sessions")
        return getattr(self.whole, name)(segment, *arguments, **more)

    return ask


def _of_keys(name: str) -> Any:
    """Return a method that gets pages, each with the number of its segment."""

    def ask(self: LookingBackend, keys: Iterable[tuple[int, int]]) -> Any:
        return getattr(self.whole, name)([key for key in keys if self.has(key[0])])

    return ask


def _refused(self: LookingBackend, *arguments: Any, **more: Any) -> Any:
    raise StoreReadOnly("nothing is written by looking", advice="use a verb that changes something")


class LookingBackend:
    """A read-only backend with the visible segments.

    Args:
        shows: whether a segment may be seen.
    """

    readonly = True

    calls, forgotten, checkpoint = map(_of_a_segment, ("calls", "forgotten", "checkpoint"))
    events, pages, newest, naming = map(_of_a_segment, ("events", "pages", "newest", "naming"))
    read, skim, entries = map(_of_keys, ("read", "skim", "entries"))
    texts, embedders, settings, now = map(_as_it_is, ("texts", "embedders", "settings", "now"))
    begin = commit = erase = keep_vectors = drop_vectors = keep_history = together = erasing = leaving = _refused
    unembedded = vectors = said_by = unkept = sync = lasting = snapshot = _refused
    keep_setting = replace_setting = chill = warm = scrub = cold = _refused

    def __init__(self, whole: Backend, shows: Callable[[SegmentInfo], bool] = lambda info: True) -> None:
        self.whole, self._shows = whole, shows
        self.tenant = whole.tenant
        self.path = str(getattr(whole, "path", ""))
        self._known: dict[int, bool] = {}
        """By its number, which is given once: whose a segment is does not change."""

    def has(self, number: int) -> bool:
        """Return whether a segment is visible."""
        if number not in self._known:
            self._known |= {info.number: self._shows(info) for info in self.whole.segments() if info.number}
        return self._known.get(number, False)

    def segment(
        self, name: str, *, time: float, create: bool = True, kind: SegmentKind = SegmentKind.SESSION, user: str = ""
    ) -> SegmentInfo | None:
        """Return the segment of that name, if it is visible; none is created.

        Raises:
            StoreReadOnly: it would be made.
        """
        info = self.whole.segment(name, time=0.0, create=False)
        info = info if info is not None and self._shows(info) else None
        if info is None and create:
            raise StoreReadOnly(f"no {kind} {name!r} here, and nothing is made by looking", advice="see the list")
        return info

    def segments(self, under: str = "") -> Sequence[SegmentInfo]:
        """Return the visible segments."""
        return [info for info in self.whole.segments(under) if self._shows(info)]

    def scope(self, kinds: Collection[SegmentKind], user: str | None = None) -> Scope:
        """Return the visible segments of some kinds."""
        scope_of_store = self.whole.scope(kinds, user)
        infos = {number: info for number, info in scope_of_store.infos.items() if self._shows(info)}
        damaged = [info for info in scope_of_store.damaged if self._shows(info)]
        return msgspec.structs.replace(
            scope_of_store,
            infos=infos,
            damaged=damaged,
            everything=scope_of_store.everything and len(infos) == len(scope_of_store.infos),
        )

    def search(self, query: str, *, segments: Collection[int] | None = None, limit: int = 20) -> Any:
        """Search the visible segments."""
        among = (
            [info.number for info in self.segments()] if segments is None else [number for number in segments if self.has(number)]
        )
        return self.whole.search(query, segments=among, limit=limit)

    def citing(self, segment: int, pages: Iterable[int]) -> list[tuple[int, int]]:
        """Return the citing pages in visible segments."""
        return [key for key in self.whole.citing(segment, pages) if self.has(key[0])]

    def passages(self, entries: Iterable[int]) -> dict[int, Passage]:
        """Return the passages in visible segments."""
        return {number: passage for number, passage in self.whole.passages(entries).items() if self.has(passage.segment)}

    def close(self) -> None:
        """Do nothing: the backend's owner closes it."""

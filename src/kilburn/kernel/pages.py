"""The pages of a process, which are read from the store when they are needed.

A session of a million pages is opened as fast as an empty one: what is in the window is read, and anything else when somebody
asks for it. Nothing changes a page, but forgetting it.
"""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterable, Iterator, Mapping, MutableMapping, ValuesView
from typing import TypeVar, overload

from kilburn.backend import Backend
from kilburn.errors import StoreCorrupt
from kilburn.kernel.branches import Lineage
from kilburn.page import Page, address_of

T = TypeVar("T")

Reader = Callable[[Iterable[int]], Mapping[int, Page]]
Finder = Callable[[Iterable[str] | None], Mapping[str, int]]


def reader_of(backend: Backend, lineage: Lineage) -> Reader:
    """Reads pages of a session by their ids, also those that it inherited."""

    def read(pages: Iterable[int]) -> dict[int, Page]:
        rows = backend.read([(lineage.owner(page), page) for page in pages])
        return {page.id: page for page, _ in rows.values()}

    return read


def finder_of(backend: Backend, lineage: Lineage) -> Finder:
    """Finds the calls of a session in the store, also those that it inherited."""

    def find(among: Iterable[str] | None) -> dict[str, int]:
        names = None if among is None else list(among)
        calls: dict[str, int] = {}
        for owner in (*(share.segment for share in lineage.shares), lineage.segment):
            owner_calls = backend.calls(owner, names) if owner else {}
            # A parent goes on after the fork: what it has called since is not seen here.
            calls.update((call, page) for call, page in owner_calls.items() if lineage.owner(page) == owner)
        return calls

    return find


class PagesById(MutableMapping[int, Page]):
    """Pages by their ids.

    Args:
        read: reads pages that are not here; None if all of them are.
    """

    def __init__(self, reader: Reader | None = None) -> None:
        self.read = reader
        self._here: dict[int, Page] = {}
        # The ids that the store has: all from the one to the other, but 0.
        self._first = self._last = 0

    @property
    def held(self) -> int:
        """How many are in memory."""
        return len(self._here)

    def part(self, pages: Iterable[int]) -> PagesById:
        """The same, to be changed by itself, with these in memory. Where there is no store to read from, with all."""
        subset = PagesById(self.read)
        subset._here = {page: self[page] for page in pages} if self.read is not None else self._here.copy()
        subset._first, subset._last = self._first, self._last
        return subset

    def settle(self, first: int, last: int) -> None:
        """The store has all pages by now: those from one id to the other."""
        self._first, self._last = first, last

    def drop(self, pages: Iterable[int]) -> None:
        """Keep these in memory no longer, where the store has them."""
        for page in pages:
            if self.read is not None and self._is_stored(page):
                self._here.pop(page, None)

    def fetch(self, pages: Iterable[int]) -> None:
        """Read those of these pages that are not here, in one query.

        Raises:
            StoreCorrupt: one is missing, or not what was written.
        """
        missing = [page for page in dict.fromkeys(pages) if page not in self._here]
        if missing:
            rows = self.read(missing) if self.read is not None else {}
            self._here.update(rows)
            lost = next((page for page in missing if page not in rows), None)
            if lost is not None:
                raise StoreCorrupt(f"{address_of(lost)} is missing", advice="run `kilburn fsck`")

    def originals(self) -> list[Page]:
        """The originals in order, read in one query where they are not here."""
        numbers = [page for page in self if page > 0]
        self.fetch(numbers)
        return [self._here[page] for page in numbers]

    def _is_stored(self, page: object) -> bool:
        return isinstance(page, int) and self._first <= page <= self._last and page != 0

    def __contains__(self, page: object) -> bool:
        return page in self._here or self._is_stored(page)

    def has_all(self, pages: set[int]) -> bool:
        """Whether there are all of these. It looks at these only: a session may have a million others."""
        return all(map(self._is_stored, pages.difference(self._here)))

    def __getitem__(self, page: int) -> Page:
        row = self._here.get(page)
        if row is None:
            if not self._is_stored(page):
                raise KeyError(page)
            self.fetch([page])
            row = self._here[page]
        return row

    @overload
    def get(self, page: int, /) -> Page | None: ...
    @overload
    def get(self, page: int, /, default: T) -> Page | T: ...
    def get(self, page: int, /, default: T | None = None) -> Page | T | None:
        """The page of an id, or the default where there is none."""
        row = self._here.get(page)
        return row if row is not None else self[page] if self._is_stored(page) else default

    def __setitem__(self, number: int, page: Page) -> None:
        self._here[number] = page

    def __delitem__(self, page: int) -> None:
        del self._here[page]

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __iter__(self) -> Iterator[int]:
        more = [page for page in self._here if not self._is_stored(page)]
        return iter([*range(1, self._last + 1), *range(-1, self._first - 1, -1), *more])

    def values(self) -> ValuesView[Page]:
        """All pages, read in one query where they are not here."""
        self.fetch(self)
        return super().values()

    def items(self) -> ItemsView[int, Page]:
        """All pages with their ids, read in one query where they are not here."""
        self.fetch(self)
        return super().items()


class Calls(Mapping[str, int]):
    """The pages of tool calls, by the ids of the calls. Those that were made since the session was opened are here, and the
    store knows the others.

    Args:
        find: the calls that the store has, all or those with these ids; None if all of them are here.
    """

    def __init__(self, find: Finder | None = None) -> None:
        self.find = find
        self._here: dict[str, int] = {}

    def copy(self) -> Calls:
        """The same, to be changed by itself. What the store knows is left to it; nothing may wait to be written."""
        copied = Calls(self.find)
        copied._here = {} if self.find is not None else self._here.copy()
        return copied

    def __getitem__(self, call: str) -> int:
        page = self._here.get(call)
        if page is None and self.find is not None and call:
            page = self.find([call]).get(call)
        if page is None:
            raise KeyError(call)
        return page

    def among(self, calls: Iterable[str]) -> dict[str, int]:
        """Those of these calls that there are, with their pages. Of the others the store is asked once."""
        cached = self._here
        hits = {call: page for call in calls if (page := cached.get(call)) is not None}
        missing = [call for call in calls if call not in hits] if self.find is not None else ()
        return {**self.find(missing), **hits} if self.find is not None and missing else hits

    def __setitem__(self, call: str, page: int) -> None:
        self._here[call] = page

    def pop(self, call: str) -> None:
        """Remove a call that was made since the session was opened, if it is there."""
        self._here.pop(call, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all())

    def __len__(self) -> int:
        return len(self._all())

    def _all(self) -> dict[str, int]:
        return {**(self.find(None) if self.find is not None else {}), **self._here}

"""Forgets pages across segments, with all pages that were made from them.

A page may cite pages of other segments, and no citation may dangle at any moment. So citing pages are forgotten first, each
segment in its own transaction; the store refuses a transaction that would leave a citation behind. If another writer adds a
citation meanwhile, the closure is computed again, and from then on no new page may cite these.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import chain
from typing import Protocol

from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.errors import KernelError, StoreStale
from kilburn.kernel.branches import Fork, above_of, fork_of, heirs_in, origin_in
from kilburn.message import Kind
from kilburn.page import Page, Place, address_of

Key = tuple[int, int]
"""A page of the tenant: (number of the segment, page id)."""

MAX_ATTEMPTS = 20
"""Attempts at a forgetting that other writers add to."""


class HolderContents(Protocol):
    """The pages of a segment, as forgetting uses them."""

    def made_from(self, pages: Iterable[int]) -> list[int]:
        """Return these pages and the pages of this segment that were made from them, without forgotten ones."""
        ...

    def drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        """Forget pages of this segment, with the pages that it made from them; return the ids of all of these."""
        ...

    def erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        """Erase copies of forgotten pages outside the store; return the errors that were raised there."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Keep other writers out within the context, and make all writes one transaction."""
        ...


class Holder(Protocol):
    """Is a segment that can forget its own pages."""

    @property
    def name(self) -> str:
        """Its name."""
        ...

    @property
    def info(self) -> SegmentInfo:
        """Its row in the store."""
        ...

    @property
    def contents(self) -> HolderContents:
        """Its pages."""
        ...


class Home(Protocol):
    """Gives a segment the backend of its store, and the other segments of the tenant."""

    backend: Backend

    def segment(self, number: int) -> Holder:
        """The segment of that number."""
        ...


Roots = Mapping[int, Iterable[int]]
"""Number of a segment -> ids of its pages."""


def forget(
    home: Home, roots: Roots, why: str, closure_keys: Sequence[Key] | None = None, errors: list[Exception] | None = None
) -> dict[Key, str]:
    """Forget pages of segments and everything that was made from them; return the forgotten pages, with their segments' names.

    Args:
        closure_keys: the `closure` of these pages, if it was just computed.
        errors: gets the errors of erasers outside the store. Without it, the first of these errors is raised after all pages are
            forgotten.

    Raises:
        StoreStale: other writers kept adding pages that cite these. StoreError. Pages that were forgotten by then stay forgotten,
            and a second call goes on.
    """
    root_pages, dropped_names = {number: list(pages) for number, pages in roots.items()}, dict[Key, str]()
    raised = list[Exception]() if errors is None else errors
    keys = None if closure_keys is None else list(closure_keys)
    with ExitStack() as leaving:
        for remaining_tries in reversed(range(MAX_ATTEMPTS)):
            try:
                if keys is None:
                    keys = closure(home, root_pages)
                with home.backend.erasing():
                    for number, page_ids in _steps(home.backend, keys):
                        holder = home.segment(number)
                        dropped = holder.contents.drop(page_ids, why)
                        dropped_names |= {(number, page): holder.name for page in dropped}
                        raised += holder.contents.erase_elsewhere(dropped)
                # A branch may have begun meanwhile, with pages that are forgotten by now.
                keys = closure(home, root_pages)
                if not keys:
                    break
                if not remaining_tries:
                    raise StoreStale("others kept adding to what is to be forgotten", advice="forget it again")
            except StoreStale:
                if not remaining_tries:
                    raise
            # Other writers would always be faster. So no new page may cite these pages, or pages that cite them by now.
            starts = ((number, page) for number, pages in root_pages.items() for page in pages)
            leaving.enter_context(home.backend.leaving([*starts, *(keys or ())]))
            keys = None
    if raised and errors is None:
        raise raised[0]
    return dropped_names


def addresses(keys: Mapping[Key, str], segment: int) -> list[str]:
    """Return the addresses of pages that come with the names of their segments: first `p3` for pages of `segment`, then `NAME p3`
    for other pages."""
    ordered = sorted(keys, key=lambda key: (key[0] != segment, key[0], abs(key[1]), key[1]))
    return [f"{'' if key[0] == segment else f'{keys[key]} '}{address_of(key[1])}" for key in ordered]


def closure(home: Home, roots: Roots) -> list[Key]:
    """Return all pages, in any segment, that are forgotten with these. A page that branches inherited is forgotten in the segment
    that made it and in each branch, whichever of them names it.

    An entity is only a name, and stays as long as pages that were made from it: it is forgotten with the last of them.
    """
    backend, by_segment = home.backend, dict[int, set[int]]()
    heirs: dict[int, list[tuple[int, Fork]]] = {}
    fresh: dict[int, set[int]] = {}
    for number, pages in roots.items():
        for owner, page_ids in _made_in(home, number, pages):
            fresh.setdefault(owner, set()).update(page_ids)
    while fresh:
        number, page_ids = fresh.popitem()
        holder = home.segment(number)
        if number not in heirs:
            heirs[number] = heirs_in(backend, number, holder.name)
        closed = by_segment.setdefault(number, set())
        more = set(holder.contents.made_from(page_ids)) - closed
        closed |= more
        for citing_segment, page in backend.citing(number, more) if more else ():
            if page not in by_segment.get(citing_segment, ()):
                fresh.setdefault(citing_segment, set()).add(page)
        pages_and_sources = more.union(page_ids)
        for branch, fork in heirs[number]:
            inherited = {page for page in pages_and_sources if fork.derived <= page <= fork.known} - by_segment.get(branch, set())
            if inherited:
                fresh.setdefault(branch, set()).update(inherited)
    keys = {(number, page) for number, pages in by_segment.items() for page in pages}
    # A session has no entities, and its folds have many sources.
    derived = [key for key in keys if home.segment(key[0]).info.kind is not SegmentKind.SESSION]
    sources = {(number, source) for (number, _), (page, _) in backend.read(derived).items() for source in page.sources} - keys
    names = [
        key for key, (page, state) in backend.read(sources).items() if page.kind is Kind.ENTITY and state.at is not Place.DROPPED
    ]
    keys.update(key for key in names if keys.issuperset(backend.citing(key[0], [key[1]])))
    return sorted(keys, key=lambda key: (key[0], abs(key[1])))


def _made_in(home: Home, number: int, pages: Iterable[int]) -> Iterator[tuple[int, set[int]]]:
    """Yield the segments that made pages of a segment, each with its pages: the segment, and those that it inherits from."""
    remaining = set(pages)
    while remaining and (
        fork := fork_of(origin_in(home.backend.events(number))) if above_of(home.segment(number).name) else None
    ):
        inherited = {page for page in remaining if fork.derived <= page <= fork.known}
        yield number, remaining - inherited
        number, remaining = fork.forked, inherited
    yield number, remaining


def named_closure(home: Home, segment: int, pages: Iterable[int]) -> list[tuple[str, Page]]:
    """Return the pages of `closure`, each with the name of its segment."""
    keys = closure(home, {segment: pages})
    names = {number: home.segment(number).name for number in {number for number, _ in keys}}
    rows = home.backend.read(keys)
    # A page that a branch inherited is in its parent's row alone.
    return [(names[key[0]], rows[key][0]) for key in keys if key in rows]


def _steps(backend: Backend, keys: Sequence[Key]) -> Iterator[tuple[int, list[int]]]:
    """Yield the transactions that forget pages, citing pages first: (number of the segment, page ids)."""
    rows = backend.read(keys)
    forks = {number: fork_of(origin_in(backend.events(number))) for number in {key[0] for key in keys if key not in rows}}
    parents = {number: fork.forked for number, fork in forks.items() if fork is not None}
    # Other keys were forgotten with their segments meanwhile.
    remaining = {key for key in keys if key in rows or key[0] in parents}
    # A page without a row was inherited: the branch drops it first.
    made_from = {key: {(parents[key[0]], key[1])} & remaining for key in remaining if key[0] in parents}
    made_from |= {
        key: {*page.cites, *((key[0], source) for source in page.sources)} & remaining for key, (page, _) in rows.items()
    }
    # A source in another segment is forgotten a step after the citing page, a source in the same segment with it or later.
    citers, step = dict.fromkeys(remaining, 0), dict.fromkeys(remaining, 0)
    for source in chain.from_iterable(made_from.values()):
        citers[source] += 1
    ready, steps, placed = [key for key in remaining if not citers[key]], dict[tuple[int, int], list[int]](), 0
    while ready:
        key = ready.pop()
        steps.setdefault((step[key], key[0]), []).append(key[1])
        placed += 1
        for source in made_from[key]:
            step[source] = max(step[source], step[key] + (source[0] != key[0]))
            citers[source] -= 1
            if not citers[source]:
                ready.append(source)
    if placed < len(remaining):
        raise KernelError("pages that were made from each other", advice="run `kilburn fsck`")
    for (_, number), pages in sorted(steps.items()):
        yield number, sorted(pages)

"""Forgetting across segments: what was made from pages goes with them, wherever it is.

A page may cite pages of other segments, and no citation may dangle at any moment. So what cites goes first, each segment
in its own transaction; the store refuses one that would leave a citation behind. If somebody adds to it in the meantime,
everything is looked at again, and nothing new may cite it.
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

TRIES = 20
"""How often it is looked at again what is to be forgotten."""


class HolderContents(Protocol):
    """The pages of a segment, as forgetting uses them."""

    def made_from(self, pages: Iterable[int]) -> list[int]:
        """Return these pages, and those of this segment that were made from them, without those that are forgotten."""
        ...

    def drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        """Forget pages of this segment, with all that it made from them; return those that are gone by this."""
        ...

    def erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        """Have pages that are gone erased where copies of them are outside the store; return what was raised there."""
        ...

    def alone(self) -> AbstractContextManager[None]:
        """Within this nobody else writes to it, and all that is written is one transaction."""
        ...


class Holder(Protocol):
    """A segment that can forget its own pages."""

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
    """What a segment needs of the store that it is in: what lies below it, and the other segments of the tenant."""

    backend: Backend

    def segment(self, number: int) -> Holder:
        """The segment of that number."""
        ...


Roots = Mapping[int, Iterable[int]]
"""Number of a segment -> ids of its pages."""


def forget(
    home: Home, roots: Roots, why: str, known: Sequence[Key] | None = None, failed: list[Exception] | None = None
) -> dict[Key, str]:
    """Forget pages of segments and everything that was made from them; returns what went, with the names of its segments.

    Args:
        known: their `closure`, if it was just found.
        failed: gets what was raised where pages were to be erased outside the store. Without it, the first of that is raised when
            all is forgotten.

    Raises:
        StoreStale: others kept adding to it. StoreError. What had gone by then is gone, and trying again goes on.
    """
    wanted, gone = {number: list(pages) for number, pages in roots.items()}, dict[Key, str]()
    raised = list[Exception]() if failed is None else failed
    keys = None if known is None else list(known)
    with ExitStack() as leaving:
        for left in reversed(range(TRIES)):
            try:
                if keys is None:
                    keys = closure(home, wanted)
                with home.backend.erasing():
                    for number, some in _steps(home.backend, keys):
                        holder = home.segment(number)
                        dropped = holder.contents.drop(some, why)
                        gone |= {(number, page): holder.name for page in dropped}
                        raised += holder.contents.erase_elsewhere(dropped)
                # A branch may have begun meanwhile, with pages that are gone by now.
                keys = closure(home, wanted)
                if not keys:
                    break
                if not left:
                    raise StoreStale("others kept adding to what is to be forgotten", advice="forget it again")
            except StoreStale:
                if not left:
                    raise
            # Others would always be faster: nothing new cites what is to go, and what cites it by now.
            starts = ((number, page) for number, pages in wanted.items() for page in pages)
            leaving.enter_context(home.backend.leaving([*starts, *(keys or ())]))
            keys = None
    if raised and failed is None:
        raise raised[0]
    return gone


def addresses(keys: Mapping[Key, str], own: int) -> list[str]:
    """The addresses of pages that come with the names of their segments: `p3` of the segment `own`, which come first, `NAME p3`
    of any other."""
    ordered = sorted(keys, key=lambda key: (key[0] != own, key[0], abs(key[1]), key[1]))
    return [f"{'' if key[0] == own else f'{keys[key]} '}{address_of(key[1])}" for key in ordered]


def closure(home: Home, roots: Roots) -> list[Key]:
    """All pages that forgetting these would forget, in any segment. A page that branches inherited is forgotten where it was
    made and in each of them, whichever of them names it.

    An entity is only a name, and is held by what was made from it: it goes with the last of these.
    """
    backend, by_segment = home.backend, dict[int, set[int]]()
    heirs: dict[int, list[tuple[int, Fork]]] = {}
    fresh: dict[int, set[int]] = {}
    for number, pages in roots.items():
        for owner, some in _made_in(home, number, pages):
            fresh.setdefault(owner, set()).update(some)
    while fresh:
        number, some = fresh.popitem()
        holder = home.segment(number)
        if number not in heirs:
            heirs[number] = heirs_in(backend, number, holder.name)
        known = by_segment.setdefault(number, set())
        more = set(holder.contents.made_from(some)) - known
        known |= more
        for other, page in backend.citing(number, more) if more else ():
            if page not in by_segment.get(other, ()):
                fresh.setdefault(other, set()).add(page)
        both = more.union(some)
        for branch, fork in heirs[number]:
            inherited = {page for page in both if fork.derived <= page <= fork.known} - by_segment.get(branch, set())
            if inherited:
                fresh.setdefault(branch, set()).update(inherited)
    found = {(number, page) for number, pages in by_segment.items() for page in pages}
    # A session has no entities, and its folds have many sources.
    derived = [key for key in found if home.segment(key[0]).info.kind is not SegmentKind.SESSION]
    sources = {(number, source) for (number, _), (page, _) in backend.read(derived).items() for source in page.sources} - found
    names = [key for key, (page, state) in backend.read(sources).items() if _is_entity(page) and state.at is not Place.DROPPED]
    found.update(key for key in names if found.issuperset(backend.citing(key[0], [key[1]])))
    return sorted(found, key=lambda key: (key[0], abs(key[1])))


def _made_in(home: Home, number: int, pages: Iterable[int]) -> Iterator[tuple[int, set[int]]]:
    """The segments in which pages of a segment were made, with these: itself, and those that a branch inherited from."""
    left = set(pages)
    while left and (fork := fork_of(origin_in(home.backend.events(number))) if above_of(home.segment(number).name) else None):
        inherited = {page for page in left if fork.derived <= page <= fork.known}
        yield number, left - inherited
        number, left = fork.forked, inherited
    yield number, left


def named_closure(home: Home, segment: int, pages: Iterable[int]) -> list[tuple[str, Page]]:
    """The pages of `closure`, each with the name of its segment."""
    found = closure(home, {segment: pages})
    names = {number: home.segment(number).name for number in {number for number, _ in found}}
    rows = home.backend.read(found)
    # A page that a branch inherited is in its parent's row alone.
    return [(names[key[0]], rows[key][0]) for key in found if key in rows]


def _is_entity(page: Page) -> bool:
    return page.kind is Kind.ENTITY


def _steps(backend: Backend, keys: Sequence[Key]) -> Iterator[tuple[int, list[int]]]:
    """The transactions in which pages can go, what cites first: (number of the segment, pages)."""
    rows = backend.read(keys)
    forks = {number: fork_of(origin_in(backend.events(number))) for number in {key[0] for key in keys if key not in rows}}
    parents = {number: fork.forked for number, fork in forks.items() if fork is not None}
    # What is in neither went with its segment meanwhile.
    left = {key for key in keys if key in rows or key[0] in parents}
    # A page without a row here was inherited: the branch lets go of it first.
    made_from = {key: {(parents[key[0]], key[1])} & left for key in left if key[0] in parents}
    made_from |= {key: {*page.cites, *((key[0], source) for source in page.sources)} & left for key, (page, _) in rows.items()}
    # What a page of another segment cites goes a step after it. What it was made from here goes with it, or later.
    citers, step = dict.fromkeys(left, 0), dict.fromkeys(left, 0)
    for source in chain.from_iterable(made_from.values()):
        citers[source] += 1
    ready, steps, placed = [key for key in left if not citers[key]], dict[tuple[int, int], list[int]](), 0
    while ready:
        key = ready.pop()
        steps.setdefault((step[key], key[0]), []).append(key[1])
        placed += 1
        for source in made_from[key]:
            step[source] = max(step[source], step[key] + (source[0] != key[0]))
            citers[source] -= 1
            if not citers[source]:
                ready.append(source)
    if placed < len(left):
        raise KernelError("pages that were made from each other", advice="run `kilburn fsck`")
    for (_, number), pages in sorted(steps.items()):
        yield number, sorted(pages)

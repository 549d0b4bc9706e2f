"""Branches: sessions that forked, and whose pages they see.

A branch with its parent's history has the parent's pages under the same addresses, by reference: nothing is copied in the
store. Its own pages are numbered on from there. What it does with an inherited page, such as an eviction, is in its own
ledger, and the parent does not notice. When it returns, the parent gets one message that cites the branch's own pages.
So the return can be opened again, has the lowest trust of what it stands for, and is forgotten with it.

Folding a sub-task into its result is ContextFold's idea (arXiv 2510.11967); there the folded steps cannot be read again.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterable
from enum import StrEnum
from itertools import takewhile
from typing import NamedTuple

import msgspec

from kilburn.backend import Backend, SegmentInfo, SegmentKind
from kilburn.errors import StoreCorrupt
from kilburn.event import Act, Data, Event
from kilburn.search.found import DamageWarning

__all__ = ["Inherit"]

BRANCH = "b"
"""Branches of the session `work` are called `work/b1`, `work/b2`, and so on."""


class Inherit(StrEnum):
    """What a branch begins with."""

    HISTORY = "history"
    """All pages of its parent, and the same window."""
    TASK = "task"
    """The parent's system messages and its user's latest request."""
    NOTHING = "nothing"


class Fork(msgspec.Struct, frozen=True, kw_only=True):
    """What a branch's ledger says first.

    Args:
        forked: number of the parent's session.
        inherit: what it began with.
        at: the parent's last event that counts for the branch; 0 where it inherits no pages.
        known, derived: the last original and the last derived page that the parent has too.
        call: the parent's page with the call that it answers, or 0.
    """

    forked: int
    inherit: Inherit
    at: int = 0
    known: int = 0
    derived: int = 0
    call: int = 0


class SeenPages(NamedTuple):
    """A session, and the last original and the last derived page of it that are seen."""

    segment: int
    last: int
    last_derived: int


class Lineage(NamedTuple):
    """Whose pages a session sees: its own, and those that its ancestors had when it forked.

    Args:
        session: its own number.
        shares: of its ancestors, the oldest first.
    """

    segment: int
    shares: tuple[SeenPages, ...] = ()

    def child(self, segment: int, last: int, last_derived: int) -> Lineage:
        """The lineage of a session that forks from this one, with the last original and the last derived page that it sees."""
        return Lineage(segment, (*self.shares, SeenPages(self.segment, last, last_derived)))

    def owner(self, page: int) -> int:
        """The number of the segment in whose ledger a page was made."""
        for share in self.shares:
            if share.last_derived <= page <= share.last:
                return share.segment
        return self.segment

    def owns(self, page: int) -> bool:
        """Whether a page was made in this session itself."""
        return not self.shares or not self.shares[-1].last_derived <= page <= self.shares[-1].last


def origin_in(events: Iterable[Event]) -> Data:
    """What a ledger says before its first page of where the session comes from; empty if it was not made of another one."""
    for event in takewhile(lambda event: event.act is not Act.ADMIT, events):
        if event.act is Act.NOTE and "forked" in event.data:
            return event.data.copy()
    return {}


def fork_of(origin: Data) -> Fork | None:
    """The fork that an origin describes; None of any other session, also of one that a gateway copied."""
    return msgspec.convert({key: origin.get(key, 0) for key in Fork.__struct_fields__}, Fork) if origin.get("inherit") else None


def above_of(name: str) -> str:
    """The name of the session of which one with this name would be a branch; "" where this is no name of a branch."""
    above, _, last = name.rpartition("/")
    return above if last.startswith(BRANCH) and last.removeprefix(BRANCH).isdecimal() else ""


def named_in(backend: Backend, under: str) -> dict[str, list[SegmentInfo]]:
    """The sessions under a name that have the names of branches, by the name of what they would be branches of; the first
    begun first."""
    branches: dict[str, list[SegmentInfo]] = {}
    for info in backend.segments(under):
        above = above_of(info.name)
        if above and info.kind is SegmentKind.SESSION and not info.damaged:
            branches.setdefault(above, []).append(info)
    return branches


def branches_in(
    backend: Backend, info: SegmentInfo, forks: dict[int, Fork], *, below: bool = True
) -> list[tuple[SegmentInfo, Fork]]:
    """The branches of a session, oldest first, each with its fork. One that is damaged is left out, with a warning.

    Args:
        forks: the forks that were read before, by the number of the branch; it grows.
        below: whether each is followed by the branches below it.
    """
    by_parent, branches = named_in(backend, info.name), list[tuple[SegmentInfo, Fork]]()
    waiting = [(branch, info.number) for branch in reversed(by_parent.get(info.name, ()))]
    while waiting:
        branch, above = waiting.pop()
        try:
            fork = forks.get(branch.number) or fork_of(origin_in(backend.events(branch.number)))
        except StoreCorrupt as error:
            warnings.warn(f"left out: {error.what}", DamageWarning, stacklevel=3)
            continue
        if fork is None:
            continue
        forks[branch.number] = fork
        if fork.forked == above:
            branches.append((branch, fork))
            waiting += [(child, branch.number) for child in reversed(by_parent.get(branch.name, ()))] if below else []
    return branches


def heirs_in(backend: Backend, number: int, name: str) -> list[tuple[int, Fork]]:
    """The branches that inherit pages of this session, each with its number. One that does not say what it inherited because
    it is damaged may have inherited everything."""
    heirs, everything = list[tuple[int, Fork]](), sys.maxsize
    for info in named_in(backend, name).get(name, ()):
        try:
            fork = fork_of(origin_in(backend.events(info.number)))
        except StoreCorrupt:
            fork = Fork(forked=number, inherit=Inherit.HISTORY, at=1, known=everything, derived=-everything)
        if fork is not None and fork.forked == number and fork.at:
            heirs.append((info.number, fork))
    return heirs

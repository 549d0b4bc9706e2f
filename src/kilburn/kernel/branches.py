"""Branches: processes that forked, and whose pages they see.

A branch with its parent's history has the parent's pages under the same addresses, by reference: nothing is copied in the
store. Its own pages are numbered on from there. What it does with an inherited page, such as an eviction, is in its own
ledger, and the parent does not notice. When it returns, the parent gets one message that cites the branch's own pages.
So the return can be opened again, has the lowest trust of what it stands for, and is forgotten with it.

Folding a sub-task into its result is ContextFold's idea (arXiv 2510.11967); there the folded steps cannot be read again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from itertools import takewhile
from typing import Any, NamedTuple

import msgspec

from kilburn.event import Act, Event
from kilburn.kernel.window import Window
from kilburn.store import ProcessKind, Store

__all__ = ["BRANCH", "Fork", "Inherit", "Lineage", "fork_of", "heirs_in", "origin_in"]

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
        forked: number of the parent's process.
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


class Share(NamedTuple):
    """A process, and the last original and the last derived page of it that are seen."""

    process: int
    last: int
    last_derived: int


class Lineage(NamedTuple):
    """Whose pages a process sees: its own, and those that its ancestors had when it forked.

    Args:
        process: its own number.
        shares: of its ancestors, the oldest first.
    """

    process: int
    shares: tuple[Share, ...] = ()

    def child(self, process: int, window: Window) -> Lineage:
        """The lineage of a process that forks from this one now."""
        return Lineage(process, (*self.shares, Share(self.process, window.last, window.last_derived)))

    def owner(self, page: int) -> int:
        """The number of the process in whose ledger a page was made."""
        for share in self.shares:
            if share.last_derived <= page <= share.last:
                return share.process
        return self.process

    def owns(self, page: int) -> bool:
        """Whether a page was made in this process itself."""
        return not self.shares or not self.shares[-1].last_derived <= page <= self.shares[-1].last


def origin_in(events: Iterable[Event]) -> dict[str, Any]:
    """What a ledger says before its first page of where the session comes from; empty if it was not made of another one."""
    for event in takewhile(lambda event: event.act is not Act.ADMIT, events):
        if event.act is Act.NOTE and "forked" in event.data:
            return dict(event.data)
    return {}


def fork_of(origin: Mapping[str, Any]) -> Fork | None:
    """The fork that an origin describes; None of any other session, also of one that a gateway copied."""
    return msgspec.convert({key: origin.get(key, 0) for key in Fork.__struct_fields__}, Fork) if origin.get("inherit") else None


def heirs_in(store: Store) -> dict[int, list[tuple[int, Fork]]]:
    """The branches of each process that inherit its pages: number -> (number of the branch, its fork)."""
    found: dict[int, list[tuple[int, Fork]]] = {}
    for info in store.processes():
        if f"/{BRANCH}" in info.name and info.kind is ProcessKind.SESSION and not info.damaged:
            fork = fork_of(origin_in(store.events(info.number)))
            if fork is not None and fork.at:
                found.setdefault(fork.forked, []).append((info.number, fork))
    return found

"""What a policy is, and all that it may see.

A policy is a pure plan over a frozen view: no I/O, no clock, no data of its own. It returns moves, or is a generator
that yields effects (`Ask`, `Find`), receives answers, and returns moves. The same view gives the same plan.
Everything that it needs to know about the past is in the view.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from typing import Protocol, runtime_checkable

import msgspec

from kilburn.budget import Budget
from kilburn.effect import Answer, Deferred, Effect
from kilburn.move import Move
from kilburn.page import Page

__all__ = ["Cause", "Plan", "Policy", "Use", "View"]


class Cause(StrEnum):
    """Why a policy is asked."""

    ADMIT = "admit"
    """Messages were just appended (`wanted` are their pages); no tool call waits for its result."""
    PRESSURE = "pressure"
    """The window is over its capacity."""
    FAULT = "fault"
    """Pages were recalled by address. It stands in the ledger; a policy is not asked then, and sees it as the pages' use."""
    ADVICE = "advice"
    """Somebody said what pages (`wanted`) are worth: they were pinned, unpinned or marked as important."""
    IDLE = "idle"
    """The caller has time: a good moment for work that may wait."""


class Use(msgspec.Struct, frozen=True):
    """How a page was used since it was admitted: times, and when last (turn, seconds)."""

    count: int
    turn: int
    time: float


def _never(page: int) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class View:
    """The frozen state of one boundary, valid while the plan runs.

    Args:
        cause: why the policy is asked.
        pages: the resident pages in the order of the prompt, pinned ones included.
        budget: what the level may hold; `use` is what it holds now, handles included, in tokens.
        wanted: the pages that the cause is about.
        turn: number of the last admitted message; `now` is the kernel's time in seconds.
        pins: ids that no move may touch: pinned pages, the user's latest message (it stays until the next one),
            and the pages that excerpts and summaries among these stand for.
        open: pages of calls whose results may still come: they cannot leave. A call after which eight messages of the
            user and the assistant came is abandoned, and is not among them.
        stubs: results that stand as a handle in place.
        marks: explicit importance ("remember this"), 0 to 1, by page id.
        uses: how pages were used, by page id; a page never recalled has its admission only.
        page: the page of an id, on any level.
        text: the exact text of a page, on any level.
        group: all pages that must move with a page, itself included, on any level.
        count: tokens of a text, by the process's counter.
        handle: what a handle costs at most, in tokens.
        task: the text of the request, that is, the user's latest message; its last part if it has several; "" if
            there is none.
        seen: tokens of all originals that were ever admitted, including those that were just appended.
        deferred: the question in the background (`Later`), with its answer the first time it is there.
        gone: whether a page is retired or forgotten: no fold may cite it.
        task_page: the id of the page of `task`, or 0; it is among the pins while it is resident.
    """

    cause: Cause
    pages: Sequence[Page]
    budget: Budget
    use: int
    wanted: tuple[int, ...]
    turn: int
    now: float
    pins: Set[int]
    open: Set[int]
    stubs: Set[int]
    marks: Mapping[int, float]
    uses: Mapping[int, Use]
    page: Callable[[int], Page]
    text: Callable[[int], str]
    group: Callable[[int], tuple[int, ...]]
    count: Callable[[str], int]
    handle: int
    task: str = ""
    boundary: str = "window"
    seen: int = 0
    deferred: Deferred | None = None
    gone: Callable[[int], bool] = _never
    task_page: int = 0

    @property
    def excess(self) -> int:
        """Tokens over the capacity, or 0."""
        return max(0, self.use - self.budget.capacity)

    def free(self, candidates: Iterable[Page], tokens: int) -> tuple[int, ...]:
        """Whole groups from `candidates`, in that order, until `tokens` would be freed.

        Pinned pages and their groups are left out. Of a group with an open call or a page of the latest message only
        results leave: their calls stay, and a handle takes their place. Returns the ids of resident pages. They may
        free less than asked if there are too few candidates.
        """
        resident = {page.id: page for page in self.pages}
        chosen: dict[int, None] = {}
        freed = 0
        for page in candidates:
            if freed >= tokens:
                break
            if page.id in chosen or page.id in self.pins:
                continue
            together = [resident[member] for member in self.group(page.id) if member in resident]
            if self.is_movable(page, together):
                leaving = [member for member in together if member.id not in chosen]
                freed += sum(member.tokens for member in leaving)
            elif page.answers and not self.is_latest(page) and page.tokens > self.handle:
                leaving = [page]
                freed += page.tokens - self.handle
            else:
                continue
            chosen.update(dict.fromkeys(member.id for member in leaving))
        return tuple(chosen)

    def is_movable(self, page: Page, together: Sequence[Page] | None = None) -> bool:
        """Whether a page's whole group may leave: nothing pinned, no open call, and, unless the page
        itself is, nothing of the latest message."""
        members = [self.page(member) for member in self.group(page.id)] if together is None else together
        latest = self.is_latest(page)
        return not any(
            member.id in self.pins or member.id in self.open or (self.is_latest(member) and not latest) for member in members
        )

    def latest(self) -> list[Page]:
        """The resident pages of the message that was admitted last, in order. Only the end of the window is searched."""
        end = takewhile(lambda page: page.id < 0 or page.message == self.turn, reversed(self.pages))
        return [page for page in end if page.message == self.turn][::-1]

    def held(self) -> set[int]:
        """Ids of all pages that stay for now: pins, open calls and the latest message, each with its group.

        For a page that is not of the latest message, `page.id in view.held()` equals `not view.is_movable(page)`, and
        is much faster for many pages.
        """
        latest = [page.id for page in self.latest()]
        latest += [stub for stub in self.stubs if self.page(stub).message == self.turn]
        return {member for page in (*latest, *self.pins, *self.open) for member in self.group(page)}

    def originals(self, page: Page) -> tuple[int, ...]:
        """The pages that a fold must cite to stand for this page: the page itself, or the originals of a derived page
        (law 4), and the results of its group that are stubs already."""
        stubs = [member for member in self.group(page.id) if member in self.stubs and member != page.id]
        own = page.sources if page.depth else (page.id,)
        return (*own, *(stub for stub in stubs if stub not in own))

    def is_latest(self, page: Page) -> bool:
        """Whether the page belongs to the message that was admitted last."""
        return page.message == self.turn


Plan = Sequence[Move] | Generator[Effect, Answer, Sequence[Move]]


@runtime_checkable
class Policy(Protocol):
    """Decides at one boundary. Implementations are dataclasses: comparable, made from a spec string.

    It is asked again as long as the window is over its capacity and its moves make progress. If it does not free
    enough, the kernel evicts the oldest pages.
    """

    def plan(self, view: View) -> Plan:
        """Moves for this view; an empty sequence for none."""
        ...

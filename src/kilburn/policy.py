"""What a policy is, and all that it may see.

A policy is a pure plan over a frozen view: no I/O, no clock, no data of its own. It returns moves, or is a generator
that yields effects (`Ask`, `Find`), receives answers, and returns moves. The same view gives the same plan.
Everything that it needs to know about the past is in the view.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import takewhile
from typing import Protocol, runtime_checkable

import msgspec

from kilburn.budget import Budget
from kilburn.effect import Answer, Deferred, Effect
from kilburn.move import Evict, Fold, Move
from kilburn.page import Page, Parts

__all__ = ["Acts", "Cause", "Plan", "Policy", "Stretch", "Use", "View"]


class Acts(StrEnum):
    """When a policy has something to do. It says so as `acts`, and is not asked for nothing; in a window over its capacity each
    is asked. A class that brings its own `plan` says it anew."""

    ALWAYS = "always"
    """At each message. A policy that says nothing is asked so."""
    FOLDED = "folded"
    """While the window has room, only in a session that has a fold or an excerpt."""
    FULL = "full"
    """Never while the window has room."""


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


class Use(msgspec.Struct, frozen=True, gc=False):
    """How a page was used since it was admitted: times, and when last (turn, seconds)."""

    count: int
    turn: int
    time: float


@dataclass(frozen=True, slots=True)
class Stretch:
    """The pages that one fold may stand for (see `View.stretch`).

    Args:
        sources: the originals that it cites, in order.
        pages: the resident pages of the stretch, in the order of the prompt; all of them leave.
        torn: ids of pages that the fold cannot replace whole, because a part of them stays or is not cited. They are
            evicted before the fold is made. If all pages are torn, the fold would replace nothing.
    """

    sources: tuple[int, ...]
    pages: tuple[Page, ...]
    torn: Set[int]

    @property
    def leaving(self) -> list[Page]:
        """The pages that the fold replaces."""
        return [page for page in self.pages if page.id not in self.torn]

    @property
    def freed(self) -> int:
        """Tokens of the pages that the fold replaces."""
        return sum([page.tokens for page in self.pages if page.id not in self.torn])

    def fold(self, why: str, *, text: str | None = None, parts: Parts = (), torn: str) -> list[Move]:
        """The moves that put a summary or an excerpt in place of the stretch.

        Args:
            torn: the reason in the ledger for torn pages.
        """
        fold = Fold(pages=self.sources, text=text, parts=parts, why=why)
        stale = tuple([page.id for page in self.pages if page.id in self.torn])
        return [Evict(pages=stale, why=torn), fold] if stale else [fold]


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
        turn: how many messages were appended so far, the number of the last one (`Page.message`).
        now: the kernel's time in seconds.
        pins: ids that no move may touch: pinned pages, standing orders, the user's latest message (it stays until the next
            one), a provider's newest compaction, and the pages that excerpts and summaries among these stand for.
        open: pages of calls whose results may still come: they cannot leave. A call after which eight messages of the
            user and the assistant came is abandoned, and is not among them.
        stubs: results that stand as a handle in place.
        importance: what `rate` set, 0 to 1, by page id.
        uses: how pages were used, by page id: of those in the window and in folds, and of those that were ever recalled. A page
            never recalled has its admission, or when it was folded.
        page: the page of an id, on any level.
        text: the text of a page, on any level: the exact one, but of an image or a provider's block what it is, and its text
            without media (see `Page.is_atomic`). An excerpt of such a page breaks law 4.
        group: all pages that must move with a page, itself included, on any level.
        count: tokens of a text, by the session's counter.
        handle: what a handle costs at most, in tokens.
        task: the text of the request, that is, the user's latest message; its last part if it has several; "" if
            there is none.
        seen: tokens of all originals that were ever admitted, including those that were just appended.
        deferred: the question in the background (`Later`), with its answer the first time it is there.
        gone: whether a page is retired or forgotten: no fold may cite it.
        task_page: the id of the page of `task`, or 0; it is among the pins while it is resident.
        copies: ids of the resident pages that are copies beside their sources (see `Bring`): such a page stands for nothing,
            and leaves without a trace.
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
    importance: Mapping[int, float]
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
    copies: Set[int] = frozenset()
    # The ids of what was found last to be movable together: a stretch is asked for the same pages.
    _free: set[int] = field(init=False, repr=False, compare=False, default_factory=set)
    # Where each resident page stands, and how many resident pages each group has, once they are asked for.
    _places: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)
    _groups: dict[int, int] = field(init=False, repr=False, compare=False, default_factory=dict)

    @property
    def excess(self) -> int:
        """Tokens over the capacity, or 0."""
        return max(0, self.use - self.budget.capacity)

    def free(self, candidates: Iterable[Page], tokens: int) -> tuple[int, ...]:
        """Return whole groups from `candidates`, in that order, until `tokens` would be freed.

        Pinned pages and their groups are left out. Of a group with an open call or a page of the latest message only
        results leave: their calls stay, and a handle takes their place. Returns the ids of resident pages. They may
        free less than asked if there are too few candidates.
        """
        resident = {page.id: page for page in self.pages}
        chosen: dict[int, None] = {}
        # Groups that stay, asked for by a page of the latest message or by another one.
        stays: set[tuple[int, bool]] = set()
        freed = 0
        for page in candidates:
            if freed >= tokens:
                break
            if page.id in chosen or page.id in self.pins:
                continue
            key = page.group, self.is_latest(page)
            stay = bool(page.group) and key in stays
            together = [] if stay else [resident[member] for member in self.group(page.id) if member in resident]
            if not stay and self.is_movable(page, together):
                leaving = [member for member in together if member.id not in chosen]
                freed += sum(member.tokens for member in leaving)
            elif page.answers and not self.is_latest(page) and page.tokens > self.handle:
                leaving = [page]
                freed += page.tokens - self.handle
                stays.add(key)
            else:
                stays.add(key)
                continue
            chosen.update(dict.fromkeys(member.id for member in leaving))
        return tuple(chosen)

    def is_movable(self, page: Page, together: Sequence[Page] | None = None) -> bool:
        """Whether a page's whole group may leave: nothing in it is pinned, an open call, or (unless the page itself is)
        of the latest message."""
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
        return self._with_groups((*latest, *self.pins, *self.open))

    def _with_groups(self, pages: Iterable[int]) -> set[int]:
        """Some pages and all that move together with them. Each group is looked at once, however many of it are named."""
        members: set[int] = set()
        for page in pages:
            if page not in members:
                members.update(self.group(page))
        return members

    def front(self, tail: int) -> Sequence[Page]:
        """The resident pages in front of the newest ones that take `tail` tokens together at most, copies not counted."""
        first = len(self.pages)
        while first and tail >= self._own(self.pages[first - 1]):
            first -= 1
            tail -= self._own(self.pages[first])
        return self.pages[:first]

    def _own(self, page: Page) -> int:
        return 0 if page.id in self.copies else page.tokens

    @property
    def residents(self) -> Mapping[int, int]:
        """Where each resident page stands among `pages`, by its id."""
        if not self._places:
            self._places.update({page.id: place for place, page in enumerate(self.pages)})
        return self._places

    def movable(self, pages: Iterable[Page]) -> list[Page]:
        """The resident pages among these that may leave together: whole groups, and nothing that stays (see `held`)."""
        staying = self.held()
        free = [page for page in pages if page.id not in staying]
        chosen = {page.id for page in free}
        tied = self._tied(free, chosen)
        if tied:
            free = [page for page in free if page.group not in tied]
            chosen = {page.id for page in free}
        self._free.clear()
        self._free.update(chosen)
        return free

    def _tied(self, free: Sequence[Page], chosen: Set[int]) -> set[int]:
        """Return the groups with a resident page that is not among these."""
        if 8 * len(free) > len(self.pages):
            tied = {page.group for page in self.pages if page.group and page.id not in chosen}
            return tied.intersection([page.group for page in free])
        if not self._groups:
            self._groups.update(Counter([page.group for page in self.pages]))
        resident = self.residents
        counts = Counter([page.group for page in free if page.group and page.id in resident])
        return {group for group, count in counts.items() if count < self._groups[group]}

    def stretch(self, pages: Iterable[int], within: Set[int] | None = None) -> Stretch:
        """Return the stretch that a fold in place of these pages covers: the sources that it must cite to break no law, and the
        pages that leave with it.

        A fold cites the originals of derived pages, and the stubs of its groups. It cites no page that stays in the
        window, no page that a page that stays shows or stands for, and no part of a group. If it cannot replace a
        derived page whole, that page is torn; so is an original that came back beside such a page. A copy beside its
        sources (`copies`) binds nothing; if it is named, it is torn.

        Args:
            pages: ids of resident pages; those that may not leave are left out. Also ids of originals that are
                already out: the fold cites them too.
            within: the originals that it may cite; None for all.
        """
        chosen = set(pages)
        resident: Set[int] = self._places.keys()
        if 8 * len(chosen) < len(self.pages):
            # Many such stretches may be asked for.
            resident = self.residents.keys()
            going = {
                page.id: page for page in [self.pages[at] for at in sorted(map(self._places.__getitem__, chosen & resident))]
            }
        else:
            resident = resident or {page.id for page in self.pages}
            going = {page.id: page for page in self.pages if page.id in chosen}
        if going.keys() != self._free:
            going = {page.id: page for page in self.movable(going.values())}
        beside = {number for number in self.copies if number in going}
        behind = {number: self.originals(going[number]) for number in going if number < 0 and number not in beside}
        plain = going.keys() - behind.keys() - beside
        together = self._with_groups(going) if self.stubs else set()
        stubs = {stub for stub in self.stubs if stub in together}
        out = {number for number in chosen - resident if number > 0 and not self.gone(number)}
        sources = plain.union(stubs, out, *behind.values())
        if out or min(resident, default=0) < 0:
            stays = (page for page in self.pages if page.id not in going)
            sources -= self._shown_by(page for page in stays if page.id not in self.copies)
        legal = sources if within is None else sources & within
        torn = self._torn(going, behind, stubs, legal)
        # The fold does not stand for pages that leave before it, and this may tear another page.
        plain |= stubs
        while less := {member for member in self._with_groups(torn) if member in legal and member in plain}:
            legal = legal - less
            torn = self._torn(going, behind, stubs, legal)
        return Stretch(tuple(sorted(legal)), tuple(going.values()), torn | beside)

    def originals(self, page: Page) -> set[int]:
        """Return the originals that a page was made from, at any depth."""
        if page.id > 0:
            return {page.id}
        return {
            original for source in page.sources for original in ((source,) if source > 0 else self.originals(self.page(source)))
        }

    def _shown_by(self, staying: Iterable[Page]) -> set[int]:
        """The originals that some pages show, and all of their groups."""
        pages = list(staying)
        return self._with_groups(page.id for page in pages).union(*map(self.originals, pages))

    def _torn(self, going: Mapping[int, Page], behind: Mapping[int, Set[int]], stubs: Set[int], legal: Set[int]) -> set[int]:
        """The leaving pages of which not everything may be cited, each with its group."""
        torn = going.keys() - behind.keys() - legal
        torn.update(number for number, originals in behind.items() if not originals <= legal)
        return {member for member in self._with_groups(torn | (stubs - legal)) if member in going}

    def is_latest(self, page: Page) -> bool:
        """Whether the page belongs to the message that was admitted last."""
        return page.message == self.turn


Plan = Sequence[Move] | Generator[Effect, Answer, Sequence[Move]]


@runtime_checkable
class Policy(Protocol):
    """Decides at one boundary. Implementations are dataclasses: comparable, made from a spec string.

    It is asked again as long as the window is over its capacity and its moves make progress. If it does not free
    enough, the kernel evicts the oldest pages. It may have `acts`, an `Acts`: when it has something to do. A policy without is
    asked at each message.
    """

    def plan(self, view: View) -> Plan:
        """Moves for this view; an empty sequence for none."""
        ...

"""The steps behind the current one as a partition: folded stretches and raw steps between them.

A partition is read from a view, never stored. It says which stretches begin and end where items do, and
which pages a fold of such a stretch must cite so that every law holds. It refuses to say which stretch
is worth folding, and writes no words.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kilburn.message import Kind, Role
from kilburn.page import Page, digest_of
from kilburn.policies.steps import beginnings
from kilburn.policy import View

__all__ = ["Partition", "Stretch", "partition_of"]


RECENT = 16
"""Steps that are looked at to see whether the agent calls tools."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """What a fold of some steps is about.

    Args:
        sources: the originals to cite, in order.
        leaving: the resident pages that the fold takes the place of.
        loose: resident folds that have to be evicted first: part of what they stand for must stay.
        freed: tokens of `leaving`.
    """

    sources: tuple[int, ...]
    leaving: tuple[int, ...]
    loose: tuple[int, ...]
    freed: int


@dataclass(frozen=True, slots=True)
class Partition:
    """The items that the steps 1 to `behind` are in.

    Args:
        view: the boundary that it was read from.
        starts: the first page of each step; the last one's is the current step's.
        folds: first and last step of each folded item, in order, apart from each other.
        task: digest of the latest user message where it is a task, which no fold takes: of an agent that
            calls tools. Of one that acts in plain text, user messages are what came back; then "".
    """

    view: View
    starts: list[int]
    folds: tuple[tuple[int, int], ...]
    task: str

    @property
    def behind(self) -> int:
        """The latest step before the current one; 0 where there is none."""
        return max(0, len(self.starts) - 1)

    def item(self, step: int) -> tuple[int, int]:
        """First and last step of the item that a step is in."""
        at = bisect_right(self.folds, (step, self.behind)) - 1
        if at >= 0 and self.folds[at][0] <= step <= self.folds[at][1]:
            return self.folds[at]
        return step, step

    def refusal(self, first: int, last: int) -> str:
        """Why a stretch is not one that a directive may name; "" where it is."""
        if not self.behind:
            return "there is no step to fold yet"
        if first > last:
            return f"the range {first} to {last} runs backwards"
        if last != self.behind:
            return f"the range ends at {last}, not at the latest step, {self.behind}"
        if first < 1:
            return f"there is no step {first}"
        begins = self.item(first)[0]
        return "" if begins == first else f"step {first} is inside of an item that begins at {begins}"

    def newest(self) -> Iterator[tuple[int, int]]:
        """The items, newest first."""
        step = self.behind
        while step > 0:
            first, last = self.item(step)
            yield first, last
            step = first - 1

    def shown(self, last: int) -> int:
        """Resident pages that stand before the step behind `last`."""
        return bisect_left(self.view.pages, self.starts[last], key=_origin)

    def stretch(self, first: int, last: int) -> Stretch:
        """The pages of some whole items: whole groups that may leave, with the originals behind them."""
        view = self.view
        inside, floating = self._inside(first, last)
        apart = {page.id for page in floating}
        sources = {source for page in inside for source in view.originals(page)}
        # What left earlier for want of room belongs to the stretch too; what stays is taken out again below.
        sources.update(range(self.starts[first - 1], self.starts[last]))
        roots = {page.id: _roots(view, page) for page in floating}
        for found in roots.values():
            sources |= found
        for page in view.pages:
            if page.depth and not page.message and page.id not in apart:
                sources -= _roots(view, page)
        legal = self._legal(sources, {page.id for page in inside})
        loose = tuple(number for number, found in roots.items() if not found <= legal or view.page(number).depth > 1)
        leaving = [page for page in inside if (legal.issuperset(page.sources) if page.depth else page.id in legal)]
        leaving += [page for page in floating if page.id not in loose]
        return Stretch(tuple(sorted(legal)), tuple(page.id for page in leaving), loose, sum(page.tokens for page in leaving))

    def _legal(self, sources: set[int], chosen: set[int]) -> set[int]:
        """Of some originals those that a fold may cite: not gone, and nothing of their groups that is shown stays behind."""
        view = self.view
        groups = {source: view.group(source) for source in sources}
        strangers = any(member not in chosen for members in groups.values() for member in members)
        stays = {page.id for page in view.pages} - chosen if strangers else set()
        # Derived pages of the stretch leave with their sources, so they hold nobody back.
        stays = {number for number in stays if number > 0 or view.page(number).message}
        stays |= view.pins | view.open
        return {
            source
            for source, members in groups.items()
            if not view.gone(source)
            and not any(member in stays or (member in view.stubs and member not in sources) for member in members)
        }

    def _inside(self, first: int, last: int) -> tuple[list[Page], list[Page]]:
        """Resident pages of a stretch that may leave: those in their own place, and folds of several."""
        view = self.view
        low, high = self.starts[first - 1], self.starts[last]
        at = bisect_left(view.pages, low, key=_origin)
        inside = [
            page
            for page in view.pages[at : bisect_left(view.pages, high, key=_origin)]
            if (page.message or not page.depth)
            and not view.is_latest(page)
            and not (page.role is Role.USER and page.digest == self.task)
            and view.is_movable(page)
        ]
        floating = [
            page
            for page in view.pages
            if page.depth and not page.message and page.id not in view.pins and self._covers(page, low, high)
        ]
        return inside, floating

    def _covers(self, page: Page, low: int, high: int) -> bool:
        roots = _roots(self.view, page)
        return low <= min(roots) and max(roots) < high


def partition_of(view: View, last: int) -> Partition:
    """The partition of the steps up to the original `last`."""
    starts = beginnings(view, last)
    found: list[tuple[int, int]] = []
    for low, high in sorted(_intervals(view, starts)):
        if found and low <= found[-1][1]:
            found[-1] = (found[-1][0], max(high, found[-1][1]))
        else:
            found.append((low, high))
    recent = range(last, starts[-RECENT:][0] - 1, -1) if starts else ()
    calls = any(view.page(number).kind is Kind.CALL for number in recent)
    return Partition(view, starts, tuple(found), digest_of(view.task) if calls and view.task else "")


def _intervals(view: View, starts: list[int]) -> Iterable[tuple[int, int]]:
    """The steps that each resident fold stands for, as far as they are behind the current one."""
    for page in view.pages:
        if page.depth and (not page.message or (page.kind is Kind.FOLD and page.role is Role.ASSISTANT)):
            roots = _roots(view, page)
            low, high = max(1, bisect_right(starts, min(roots))), min(len(starts) - 1, bisect_right(starts, max(roots)))
            if low <= high:
                yield low, high


def _roots(view: View, page: Page) -> set[int]:
    """The originals behind a derived page, however deep."""
    found: set[int] = set()
    for source in page.sources:
        found |= {source} if source > 0 else _roots(view, view.page(source))
    return found


def _origin(page: Page) -> int:
    return page.order[0]

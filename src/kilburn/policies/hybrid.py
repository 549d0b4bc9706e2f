"""The default: a tail kept whole, a core of what was marked, and of all else the lines that tell most.

When the window is over capacity, everything older than the tail becomes one excerpt: verbatim lines,
each under the address of its page, chosen to cover as many names as possible (paths, identifiers,
numbers) in few tokens, with a preference for what is near to the latest thought and for what is recent.
The excerpt is remade from the originals' spans, never from its own text, so nothing drifts; pages that
no longer tell anything leave behind a handle. It needs no model. Ours; the figures are in
docs/explanation/policies.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kilburn.message import Kind, Role
from kilburn.move import Evict, Fold, Move
from kilburn.page import Page, Parts, Span
from kilburn.policies.text.coverage import Line, choose, lines_of
from kilburn.policy import View

__all__ = ["Hybrid"]

REACH = 128
"""Originals that one excerpt stands for, at most: older ones stay behind their handle."""

SLACK = 32
"""Originals let go together once there are more. An excerpt whose sources all go into the next one is
replaced in one step; one that loses a source must leave first, which touches every source twice."""

MARKED = 0.5
"""Importance from which on a page belongs to the core."""


@dataclass(frozen=True)
class Hybrid:
    """Keep a tail and a core whole, and excerpt the rest, when the window is over capacity.

    Args:
        low: tokens in the window after it acted; None leaves a tenth of a small window free and a quarter
            of one of 4,000 tokens or more: every action edits the prefix, and a large window can afford fewer.
        tail: tokens of newest pages that stay whole; None for three tenths of the capacity.
        core: tokens of marked pages ("remember this") that stay whole; None for a quarter.
        whole: tokens up to which the latest message stays whole, and to which it is excerpted beyond;
            None for half of the capacity.
    """

    low: int | None = None
    tail: int | None = None
    core: int | None = None
    whole: int | None = None

    def plan(self, view: View) -> Sequence[Move]:
        """One excerpt in place of all that is older than the tail, or nothing while there is room."""
        if not view.excess:
            return []
        capacity = view.budget.capacity
        low = min(capacity - view.handle, capacity - _spare(capacity) if self.low is None else self.low)
        kept, older = self._split(
            view, capacity * 3 // 10 if self.tail is None else self.tail, capacity // 4 if self.core is None else self.core
        )
        latest, saved = self._latest(view, kept, capacity // 2 if self.whole is None else self.whole)
        if not older:
            return latest
        sources, stale = self._reach(view, older)
        room = low - (view.use - saved - sum(page.tokens for page in older)) - 2 * view.handle
        parts = self._parts(view, older, kept, set(sources), room)
        if not parts:
            return [*latest, Evict(pages=tuple(page.id for page in older), why="no room for an excerpt")]
        fold = Fold(pages=sources, parts=parts, why=f"lines of {len(parts)} pages")
        return [*latest, Evict(pages=stale, why="beyond the excerpt's reach"), fold] if stale else [*latest, fold]

    @staticmethod
    def _reach(view: View, older: Sequence[Page]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The originals that the excerpt will stand for, and the pages that leave because it does not reach them."""
        sources = sorted({source for page in older for source in view.originals(page)})
        if len(sources) <= REACH:
            return tuple(sources), ()
        chosen = set(sources[SLACK - REACH :])
        stale = {page.id for page in older if not chosen.issuperset(view.originals(page))}
        stale |= {page.id for page in older if not stale.isdisjoint(view.group(page.id))}
        whole = {source for page in older if page.id in stale and not page.depth for source in view.originals(page)}
        return tuple(sorted(chosen - whole)), tuple(page.id for page in older if page.id in stale)

    @staticmethod
    def _latest(view: View, kept: Sequence[Page], whole: int) -> tuple[list[Move], int]:
        """Excerpts of what just came and is too long to stay whole, and the tokens that they save."""
        folds: list[Move] = []
        saved = 0
        for page in kept:
            if (
                not view.is_latest(page)
                or page.tokens <= whole
                or page.id in view.pins
                or page.kind not in (Kind.RESULT, Kind.TEXT)
            ):
                continue
            lines = lines_of(view.text(page.id), page.id, page.message, str(page.role))
            parts = choose(lines, [], _focus(view), whole - view.handle, view.count)
            if parts:
                folds.append(Fold(pages=(page.id,), keep=parts[0][1], why=f"{page.tokens} tokens, too long to stay whole"))
                saved += page.tokens - whole
        return folds, saved

    def _split(self, view: View, tail: int, core: int) -> tuple[list[Page], list[Page]]:
        """Pages that stay whole, and those that are older."""
        stays: set[int] = set()
        for page in reversed(view.pages):
            tail -= page.tokens
            if tail < 0:
                break
            stays.add(page.id)
        for page in sorted(
            (page for page in view.pages if view.marks.get(page.id, 0.0) >= MARKED),
            key=lambda page: (-view.marks[page.id], -page.id),
        ):
            if page.tokens <= core:
                core -= page.tokens
                stays.add(page.id)
        older: list[Page] = []
        for page in view.pages:
            together = view.group(page.id)
            if not any(member in stays for member in together) and view.is_movable(page) and not view.is_latest(page):
                older.append(page)
        gone = {page.id for page in older}
        return [page for page in view.pages if page.id not in gone], older

    def _parts(self, view: View, older: Sequence[Page], kept: Sequence[Page], sources: set[int], room: int) -> Parts:
        """The spans to keep of each original, within the room, marks included."""
        if room <= view.handle:
            return ()
        lines = [line for page in older for line in self._lines(view, page) if line.page in sources]
        shown = [view.text(page.id) for page in kept if page.kind is not Kind.IMAGE]
        return choose(lines, shown, _focus(view), room, view.count)

    @staticmethod
    def _lines(view: View, page: Page) -> list[Line]:
        """The lines of a page; of an excerpt, the lines that it kept of its originals."""
        if page.kind is Kind.FOLD:
            return []
        if page.parts:
            return [line for source, spans in page.parts for line in _within(view, source, spans)]
        if page.kind is Kind.EXCERPT:
            return _within(view, page.sources[0], page.spans)
        return [] if page.kind is Kind.IMAGE else list(lines_of(view.text(page.id), page.id, page.message, str(page.role)))


def _spare(capacity: int) -> int:
    return max(capacity // 10, min(capacity // 4, (capacity - 2000) // 2))


def _within(view: View, source: int, spans: Sequence[Span]) -> list[Line]:
    """The lines of a page that lie in its kept spans; both are in order."""
    page = view.page(source)
    found: list[Line] = []
    left = list(reversed(spans))
    for line in lines_of(view.text(source), source, page.message, str(page.role)):
        while left and left[-1][1] <= line.start:
            left.pop()
        if left and left[-1][0] <= line.start:
            found.append(line)
    return found


def _focus(view: View) -> str:
    """What the agent is at: its latest words, or the task."""
    for page in reversed(view.pages):
        if page.role is Role.ASSISTANT and page.kind in (Kind.TEXT, Kind.REASONING):
            return view.text(page.id)
    return view.task

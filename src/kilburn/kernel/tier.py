"""The window's tier: a layout that changes, step by step, and can go back.

All changes go through `set`, which keeps the order, the gaps and the use in step, and through a
journal, so that a failed batch leaves the state before it. The tier checks no law and does no I/O.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Collection, Iterable

from kilburn.kernel.layout import GONE, OUT, VISIBLE, Layout
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page, Place, tombstone_of
from kilburn.store import State

__all__ = ["OUT", "Tier"]

FOLDED = frozenset({Place.FOLDED})


class Tier(Layout):
    """State of one process's window.

    Args:
        count: what a line of handle costs in the prompt, in tokens, envelope included.
    """

    def __init__(self, count: Callable[[str], int]) -> None:
        super().__init__(count)
        self._journal: list[Callable[[], object]] = []

    def scrub(self, pages: Iterable[int]) -> None:
        """Let go of every word of forgotten pages, outside any batch."""
        for page in pages:
            call = self.pages[page].call
            if call is not None and self.calls.get(call) == page:
                del self.calls[call]
            self.pages[page] = tombstone_of(self.pages[page])
        self._kept = None

    def add(self, page: Page, state: State) -> None:
        """Take in a new page."""
        before = (self.last, self.last_derived, self.turn, self.said, self.request, self.seen)
        self.pages[page.id] = page
        if page.id > 0:
            if page.role in (Role.USER, Role.ASSISTANT) and page.message > self.turn:
                self.said += 1
            # A forgotten page has no label either, and no digest; a blank one says nothing.
            said = page.kind is Kind.TEXT and (page.label or not page.digest)
            if page.role is Role.USER and said and page.trust >= Trust.USER:
                same = bool(self.request) and self.pages[self.task].message == page.message
                self.request = (*self.request, page.id) if same else (page.id,)
            self.last = max(self.last, page.id)
            self.turn = max(self.turn, page.message)
            self.seen += page.tokens
        else:
            self.last_derived = min(self.last_derived, page.id)
        self._journal.append(lambda: self._forget(page, before))
        if page.group:
            members = self.groups.get(page.group, ())
            self.groups[page.group] = (*members, page.id)
            self._journal.append(lambda: self._regroup(page.group, members))
        if page.id > 0:
            self._note_call(page)
        self.states[page.id] = OUT if page.id < 0 else State(at=Place.FOLDED)
        if page.id > 0:
            self.folded.add(page.id)
        self.set(page.id, state)

    def set(self, page: int, state: State) -> None:
        """Change a page's state, keeping order, gaps and use in step."""
        before = self.states[page]
        if before == state:
            return
        self._journal.append(lambda: self._swap(page, state, before))
        self._swap(page, before, state)

    def set_cover(self, pages: Collection[int], fold: int | None) -> None:
        """Note that a fold stands for pages, or that none does: in one step, however many they are."""
        self._journal.append(self.cover.take(pages) if fold is None else self.cover.put(pages, fold))

    def reprice(self, costs: dict[int, int]) -> None:
        """Take other costs per page (another tokenizer), outside any batch."""
        states = dict(self.states)
        for page in states:
            self._swap(page, self.states[page], State(at=Place.FOLDED))
        self.costs = costs
        self.seen = sum(self.cost(page) for page in self.pages if page > 0)
        for page, state in states.items():
            self._swap(page, State(at=Place.FOLDED), state)

    def begin(self) -> None:
        """Start a batch: forget the journal."""
        self._journal.clear()

    def on_rollback(self, undo: Callable[[], object]) -> None:
        """Note what undoes a change beside the tier's own, as a part of the batch."""
        self._journal.append(undo)

    def mark(self) -> int:
        """A point in the batch that `rollback` can return to."""
        return len(self._journal)

    def rollback(self, mark: int = 0) -> None:
        """Undo the batch back to a mark."""
        while len(self._journal) > mark:
            self._journal.pop()()

    def _swap(self, page: int, before: State, after: State) -> None:
        self.states[page] = after
        if before.pinned != after.pinned:
            (self.pins.add if after.pinned else self.pins.discard)(page)
        if after.mark:
            self.marks[page] = after.mark
        else:
            self.marks.pop(page, None)
        if before.at == after.at:
            return
        self._note_place(page, before.at, after.at)
        key = (*self.pages[page].order, page)
        if before.at in VISIBLE or after.at in VISIBLE:
            # Coming in at the end is the usual case; all else rebuilds the list when it is looked at.
            at_end = after.at == Place.IN and before.at not in VISIBLE and (not self._order or key > self._order[-1])
            if self._kept is not None and at_end:
                self._kept.append(self.priced(page))
            else:
                self._kept = None
        if before.at in VISIBLE:
            self._held -= self._stubs.pop(page) if before.at == Place.STUB else self.cost(page)
            if after.at not in VISIBLE:
                del self._order[bisect_left(self._order, key)]
                self._gaps.close(key)
        elif before.at == Place.OUT and page > 0:
            self._gaps.remove(page)
        if after.at in VISIBLE:
            if before.at not in VISIBLE:
                insort(self._order, key)
                self._gaps.part(key)
            if after.at == Place.STUB:
                self._stubs[page] = self._cost_of_stub(self.pages[page])
            self._held += self._stubs[page] if after.at == Place.STUB else self.cost(page)
        elif after.at == Place.OUT and page > 0:
            self._gaps.add(page, self.cost(page))

    def _note_place(self, page: int, before: Place, after: Place) -> None:
        for places, members in ((VISIBLE, self.shown), (GONE, self.gone), (FOLDED, self.folded)):
            if after in places:
                members.add(page)
            elif before in places:
                members.discard(page)

    def _note_call(self, page: Page) -> None:
        """Keep track of calls without a result; a forgotten page has lost its call's id, not what it answers."""
        if page.kind is Kind.CALL:
            self.open[page.id] = self.said
            self._journal.append(lambda: self.open.pop(page.id, None))
            call = page.call
            if call is not None:
                self.calls[call] = page.id
                self._journal.append(lambda: self.calls.pop(call, None))
        elif page.kind is Kind.RESULT and page.answers in self.open:
            said = self.open.pop(page.answers)
            self._journal.append(lambda: self.open.__setitem__(page.answers, said))

    def _regroup(self, group: int, members: tuple[int, ...]) -> None:
        if members:
            self.groups[group] = members
        else:
            self.groups.pop(group, None)

    def _forget(self, page: Page, before: tuple[int, int, int, int, tuple[int, ...], int]) -> None:
        self._swap(page.id, self.states[page.id], State(at=Place.FOLDED))
        self.folded.discard(page.id)
        del self.pages[page.id], self.states[page.id]
        self.last, self.last_derived, self.turn, self.said, self.request, self.seen = before

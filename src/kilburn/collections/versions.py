"""The versions of what a collection says: what superseded what, from its ledger, and how that is undone."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import msgspec

from kilburn.backend import State
from kilburn.collections.collecting import Change, since_of
from kilburn.errors import KernelError
from kilburn.event import Act, Event
from kilburn.move import Restore, Retire
from kilburn.page import Page, Place, address_of


class Version(msgspec.Struct, frozen=True, kw_only=True):
    """One of the pages that superseded each other, with its state now and the events that made it so, oldest first."""

    page: Page
    state: State
    events: tuple[Event, ...]


class Versions:
    """Which page superseded which.

    Args:
        events: the ledger of the collection.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        # The page that superseded a page last, and the pages that a page superseded.
        self._heir: dict[int, int] = {}
        self._olds: dict[int, list[int]] = {}
        # Pages that nobody has accepted yet, those that were rejected included.
        self._waiting: set[int] = set()
        for event in events:
            if event.act in (Act.ADMIT, Act.RESTORE):
                waits = event.data.get("at") == Place.PROPOSED
                (self._waiting.update if waits else self._waiting.difference_update)(event.pages)
            elif event.act is Act.RETIRE:
                self._take_in(event.pages, event.data.get("by", 0), undone=event.cause == "undo")

    def _take_in(self, pages: Sequence[int], by: int, *, undone: bool) -> None:
        for page in () if undone and not by else pages:
            heir = self._heir.pop(page, 0)
            if heir:
                self._olds[heir].remove(page)
            if by:
                self._heir[page] = by
                self._olds.setdefault(by, []).append(page)

    def of(self, *pages: int) -> set[int]:
        """All versions of what pages say, themselves included."""
        chain, fresh = set(pages), list(pages)
        while fresh:
            page = fresh.pop()
            near = {*self._olds.get(page, ()), self._heir.get(page, page)} - chain
            chain |= near
            fresh += near
        return chain

    def _line(self, page: int, rows: Collection[int]) -> list[int]:
        """A page, what superseded it, what superseded that, and so on; those that are forgotten are left out."""
        line = {page: None}
        while (page := self._heir.get(page, 0)) and page not in line:
            line[page] = None
        return [page for page in line if page in rows]

    def undo(self, pages: Sequence[int], rows: Mapping[int, tuple[Page, State]], why: str) -> list[Change]:
        """The changes that undo what last happened to these pages.

        Args:
            rows: all versions of them that are not forgotten.

        Raises:
            KernelError: one of them is proposed.
        """
        restored: dict[int, None] = {}
        retired: dict[int, int] = {}
        at = {page: state.at for page, (_, state) in rows.items()}
        lines = {page: self._line(page, rows) for page in rows}

        def bring_back(superseded_by: int, but: Sequence[int] = ()) -> None:
            for old, line in lines.items():
                if line[1:2] == [superseded_by] and at[old] is Place.RETIRED and old not in but:
                    restored[old] = None

        for page in pages:
            line = lines[page]
            if at[page] is Place.PROPOSED:
                raise KernelError(f"{address_of(page)} is proposed", advice="accept it, or retire it")
            if at[page] is Place.OUT and len(line) > 1:
                # It was superseded, and an undo brought it back.
                retired[page] = line[1]
                restored.update((heir, None) for heir in line[-1:] if at[heir] is Place.RETIRED)
            elif at[page] is Place.OUT:
                retired[page] = 0
                bring_back(page)
            else:
                restored[page] = None
                # What an undo brought back in its place goes again.
                retired.update((old, line[1]) for old, line in lines.items() if page in line[1:] and at[old] is Place.OUT)
                for heir in line[1:]:
                    if at[heir] is Place.OUT:
                        retired[heir] = 0
                        bring_back(heir, but=line)
        # What a person rejected is not in force by this: it waits again.
        back = tuple(page for page in restored if page not in self._waiting)
        waiting = tuple(page for page in restored if page in self._waiting)
        changes: list[Change] = [Restore(back, why)] if back else []
        changes += [Restore(waiting, why, proposed=True)] if waiting else []
        for page, by in retired.items():
            # It counts as never true, unless it was superseded again: then it ended where that begins.
            until = None if by else since_of(rows[page][0])
            changes.append(Retire((page,), by=by, until=until, why=why))
        return changes

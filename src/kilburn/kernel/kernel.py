"""The kernel of one process: the only code that changes where pages are.

Policies propose (`planning`), the laws check (`laws`), this moves, inside a batch of the address
space. It refuses to choose.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from kilburn.errors import Forgotten, KernelError, LawBroken, PinsExceedWindow, UnknownAddress
from kilburn.event import Act
from kilburn.kernel.admission import pages_of, pins_on_arrival, text_cost
from kilburn.kernel.folding import derived_page
from kilburn.kernel.laws import (
    Change,
    as_move,
    check_drop,
    check_evict,
    check_fold,
    check_held,
    check_load,
    check_retire,
    closure_of_drop,
)
from kilburn.kernel.layout import PATIENCE
from kilburn.kernel.render import PENDING
from kilburn.kernel.space import AddressSpace
from kilburn.kernel.tier import OUT
from kilburn.message import Message
from kilburn.move import Drop, Evict, Fold, Load, Move, Retire
from kilburn.page import Page, Place, Span, parse_address

__all__ = ["LEAST", "Kernel"]

ENDS = 120
"""Characters of head and of tail that an excerpt of the user's latest message keeps in any case."""

LEAST = 1
"""Messages of the user and the assistant after which the kernel may take a call without a result, where nothing
else makes room: then it is not the latest message's."""


class Kernel(AddressSpace):
    """Carries out what the laws allow."""

    def resolve(self, address: str) -> list[int]:
        """The page ids that an address names, retired ones included.

        Raises:
            UnknownAddress: not an address, or beyond the last page. Forgotten: all of it was dropped.
        """
        first, last = parse_address(address)
        tier = self.tier
        if first not in tier.pages or last not in tier.pages:
            known = f"this process has p1-p{tier.last}" if tier.last else "this process has no pages yet"
            raise UnknownAddress(f"{address} does not exist in {self.info.name!r}", advice=known)
        found = [page for page in range(first, last + 1) if tier.at(page) != Place.DROPPED]
        if not found:
            raise Forgotten(f"{address} was forgotten", advice="nothing of it is kept")
        return found

    def closure(self, pages: Sequence[int]) -> list[int]:
        """All that a forget of these pages would forget, in order."""
        return sorted(closure_of_drop(self.tier, pages), key=abs)

    def forget_texts(self, gone: Sequence[int]) -> None:
        """Let go of all texts at hand, and of what is known of forgotten pages; what is still wanted is read again."""
        self.tier.scrub(gone)
        self.contents.clear()

    def take_in(self, messages: Sequence[Message]) -> tuple[int, int]:
        """Admit messages into the window; returns the first and last page id.

        Raises:
            WireError, LawBroken, PinsExceedWindow: nothing was admitted.
        """
        drafts = pages_of(messages, self.tier, self.counter, self.clock())
        pinned = pins_on_arrival(drafts, self.tier, self.capacity)
        for page in drafts.pages:
            self._add(page, drafts.texts)
            self.tier.set(page.id, msgspec.structs.replace(OUT, at=Place.IN, pinned=page.id in pinned))
        self.note(Act.ADMIT, [page.id for page in drafts.pages], to={Place.IN: [page.id for page in drafts.pages]})
        for number, why in pinned.items():
            self.note(Act.PIN, [number], why=why)
        self.check_pins()
        for page in drafts.pages:
            if page.answers and self.tier.stands_itself(page.answers) is None:
                self._join(page)
        return drafts.pages[0].id, drafts.pages[-1].id

    def _join(self, late: Page) -> None:
        """Bring the call of a late result back, which had left without one; where it cannot stand any more, or
        not beside an open tool loop, the result goes below as well, and its handle says so (law 6)."""
        point = self.savepoint()
        try:
            self.carry(Load(pages=(late.answers,), why="its result came"), policy="kernel", cause="admit")
            if self._fits_beside_loop(late):
                return
            why = "its call does not fit beside the open tool loop"
        except KernelError:
            why = "its call cannot come back"
        self.undo(point)
        self.carry(Evict(pages=(late.id,), why=why), policy="kernel", cause="admit")

    def _fits_beside_loop(self, late: Page) -> bool:
        """Whether a late result's group, its results as handles, leaves an open tool loop its room."""
        tier = self.tier
        loop = tier.loop(LEAST)
        back = {page for page in tier.group(late.id) if tier.at(page) == Place.IN and not tier.pages[page].answers}
        stays = back.union(loop, tier.pins, tier.held())
        handles = text_cost(self.counter, PENDING) * (1 + len(tier.group(late.id)) - len(back))
        return not loop or sum(map(tier.cost, stays)) + handles <= self.capacity

    def _add(self, page: Page, texts: dict[str, str]) -> None:
        for digest in (page.digest, page.extra):
            if digest:
                self.pending.texts[digest] = texts[digest]
                self.contents.keep(digest, texts[digest])
        self.pending.new.append(page)
        self.pending.touched.add(page.id)
        self.tier.add(page, OUT if page.id < 0 else msgspec.structs.replace(OUT, at=Place.FOLDED))

    def check_pins(self) -> None:
        """Law 2 against law 3: the pins, and one handle for the rest, must fit."""
        held = sum(self.tier.cost(page) for page in self.tier.pins)
        least = held + (text_cost(self.counter, PENDING) if len(self.tier.pins) < len(self.tier.pages) else 0)
        if self.tier.pins and least > self.capacity:
            raise PinsExceedWindow(f"pinned pages take {least} of {self.capacity} tokens")

    def carry(self, move: Move, *, policy: str = "user", cause: str = "user", depth: int = 1) -> int | None:
        """Carry out one move inside the current batch; returns the id of a derived page, or None.

        Raises:
            LawBroken, KernelError: the move is illegal, or none; the caller undoes to its savepoint.
        """
        made: int | None = None
        move = as_move(move)
        if isinstance(move, Fold) and policy != "kernel":
            move = self._with_ends(move)
        match move:
            case Load():
                change, act = check_load(self.tier, move), Act.LOAD
            case Evict():
                forced = policy == "kernel"
                change, act = check_evict(self.tier, move, LEAST if forced else PATIENCE, forced=forced), Act.EVICT
            case Retire():
                change, act = check_retire(self.tier, move), Act.RETIRE
                self.pending.unindex.update(page for page in move.pages if page > 0)
            case Fold():
                change, act = check_fold(self.tier, move, depth), Act.FOLD
            case _:
                if policy != "user":
                    raise LawBroken(1, "a policy may not forget", advice="retire or evict; only a person forgets")
                gone = sorted(closure_of_drop(self.tier, move.pages), key=abs)
                move = Drop(pages=tuple(gone), why=move.why)
                change, act = check_drop(self.tier, set(gone)), Act.DROP
        # A person may forget or retire what was asked; the kernel takes it last of all.
        if policy != "kernel" and not (policy == "user" and act in (Act.DROP, Act.RETIRE)) and not self._keeps_ends(move):
            check_held(self.tier, change)
        if isinstance(move, Fold):
            made = self._derive(move, change)
        self.enact(change, made)
        data: dict[str, Any] = {"to": _by_place(change.at)}
        if made is not None:
            data["fold"] = made
            if not change.cited:
                data["cover"] = list(change.cover)
        if change.uncover:
            data["uncover"] = change.uncover
        if isinstance(move, Retire) and move.by:
            data["by"] = move.by
        self.note(act, move.pages, policy=policy, cause=cause, why=move.why, **data)
        return made

    def enact(self, change: Change, fold: int | None = None) -> None:
        """Put pages where a checked change says."""
        if change.uncover:
            self.tier.set_cover(change.uncover, None)
        for page, at in change.at.items():
            gone = at == Place.DROPPED
            state = msgspec.structs.replace(self.tier.states[page], at=at)
            self.tier.set(page, msgspec.structs.replace(state, pinned=False, mark=0.0) if gone else state)
            self.pending.touched.add(page)
        if fold is not None:
            self.tier.set_cover(change.cover, fold)
            self.tier.set(fold, msgspec.structs.replace(self.tier.states[fold], at=Place.IN))

    def _with_ends(self, move: Fold) -> Fold:
        """An excerpt in the place of the user's latest message, while that is the latest of all, keeps its head and tail,
        whatever was chosen of it."""
        tier = self.tier
        page = tier.pages.get(move.pages[0]) if len(move.pages) == 1 and move.keep else None
        if page is None or page.id not in tier.request or page.message != tier.turn:
            return move
        end = len(self.text(page.id))
        merged: list[Span] = []
        for start, stop in sorted([(0, min(ENDS, end)), *move.keep, (max(0, end - ENDS), end)]):
            if merged and start <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(stop, merged[-1][1]))
            else:
                merged.append((start, stop))
        return msgspec.structs.replace(move, keep=tuple(merged))

    def _keeps_ends(self, move: Move) -> bool:
        """Whether a move puts an excerpt of one page, its head and tail among it, in that page's place."""
        if not isinstance(move, Fold) or len(move.pages) != 1 or not move.keep:
            return False
        return move.keep[0][0] == 0 and move.keep[-1][1] == len(self.text(move.pages[0]))

    def _derive(self, move: Fold, change: Change) -> int:
        extra = self.contents.get(self.tier.pages[move.pages[0]].extra) if len(move.pages) == 1 else ""
        page, text, kept = derived_page(move, change, self.tier, self.counter, self.clock(), self.text, extra)
        self._add(page, {page.digest: text, page.extra: kept})
        return page.id

    def mark(self, pages: Sequence[int], *, pinned: bool | None = None, importance: float | None = None, why: str = "") -> None:
        """Pin, unpin or mark pages inside the current batch.

        Raises:
            PinsExceedWindow: the pins would not fit; the caller undoes.
        """
        for page in pages:
            self.text(page)
            state = self.tier.states[page]
            if pinned is not None:
                state = msgspec.structs.replace(state, pinned=pinned)
            if importance is not None:
                state = msgspec.structs.replace(state, mark=importance)
            self.tier.set(page, state)
            self.pending.touched.add(page)
        if importance is not None:
            self.note(Act.REMEMBER, pages, policy="user", cause="user", why=why, mark=importance)
        if pinned is not None:
            self.note(Act.PIN if pinned else Act.UNPIN, pages, policy="user", cause="user", why=why)
        self.check_pins()


def _by_place(at: dict[int, Place]) -> dict[Place, list[int]]:
    places: dict[Place, list[int]] = {}
    for page, where in at.items():
        places.setdefault(where, []).append(page)
    return places

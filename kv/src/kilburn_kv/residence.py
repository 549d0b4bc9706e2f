"""Keeps a session's window in an engine's cache: the window's moves are repeated there.

When the kernel evicts or folds pages in the window, `follow` evicts their tokens from the cache, or computes again
from there, whichever costs less. The cache may have its own budget, with its own policy. A branch shares everything
up to its branch point, and leaves nothing behind. Pages in the window are never moved from here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, Unpack

import msgspec

from kilburn.errors import BudgetTooSmall, OutOfBlocks, SpecError
from kilburn.event import Act, Data
from kilburn.kernel.session import Session
from kilburn.page import Place
from kilburn.policy import Cause
from kilburn_kv.boundary import Boundary
from kilburn_kv.edits import EditPlan, How, PlacedLine, Price, plan_edits
from kilburn_kv.engine import Engine
from kilburn_kv.generation import GREEDY, Sampling, stream
from kilburn_kv.lineage import Alteration
from kilburn_kv.observation import CachedPage
from kilburn_kv.sequence import CachedSequence
from kilburn_kv.spill import owner_of
from kilburn_kv.template import Template, WindowLine

__all__ = ["Residence"]


class Followed(msgspec.Struct, frozen=True):
    """What `follow` did.

    Args:
        how: what was done: any but "auto".
        prefilled: tokens that were computed.
        saved: tokens that computing again from the first difference would have needed in addition.
        evicted: tokens whose keys and values left, because of the window or of the budget.
        cached: tokens that are cached now.
        exact: whether the cache is what the window's text alone would give.
    """

    how: How
    prefilled: int
    saved: int
    evicted: int
    cached: int
    exact: bool


class Residence:
    """One session in one engine.

    Args:
        budget: tokens that may be cached for it; None for as many as the engine has.
        policy: at the kv boundary, a spec or an object with `plan`.
        price: the price of editing the cache, compared with computing again.
        how: "auto" takes the cheaper way; "edit" and "prefill" always take that way.
        channel: whether a fold is computed while its sources are still visible (Memento), or only with what stays.

    Raises:
        SpecError: a budget that the engine cannot hold, an unknown `how`, or weights without a tokenizer.
    """

    def __init__(
        self,
        engine: Engine,
        session: Session,
        *,
        budget: int | None = None,
        policy: Any = "lru",
        price: Price | None = None,
        how: str = How.AUTO,
        channel: bool = True,
    ) -> None:
        held = engine.pool.capacity * engine.pool.size
        if budget is not None and budget > held:
            raise SpecError(f"a KV budget of {budget} tokens in an engine of {held}", advice="open a larger engine")
        self.engine, self.session = engine, session
        self.pressure = Boundary(held if budget is None else budget, policy)
        self.price, self.how, self.channel = price or Price(), How.asked(how), channel
        self._template = Template(engine.weights)
        self.sequence = self._open()
        self.prefilled = 0
        self._placed: list[PlacedLine] = []
        self._evicted = 0

    def follow(self) -> Followed:
        """Bring the cache to what the window shows now. After an error it has a part of that, and can continue.

        Forgotten pages leave, together with everything that was computed while they were visible, whatever that
        costs. If the sequence lost its blocks to another one, everything is computed again.

        Raises:
            BudgetTooSmall: pins, handles and the latest message do not fit the KV budget. OutOfBlocks: others hold
            the engine's blocks.
        """
        self._revive()
        wanted = self._template.lines(self.session)
        before, self._evicted = self.prefilled, 0
        purged = self._purge()
        self._forget_missing_pins()
        plan = plan_edits(self._placed, wanted, self.price, self.how)
        if plan.how in (How.EDIT, How.PREFILL) and Alteration.COMPRESSED in self.sequence.table.altered:
            # What each head chose stands for no line any more: nothing of it could be told apart.
            self._cut(0)
            purged, plan = True, plan_edits(self._placed, wanted, self.price, self.how)
        adopted = self._adopt(plan)
        if plan.how is How.EDIT:
            try:
                self._edit(plan)
            except OutOfBlocks:
                # A gap may take a block more than the end does.
                plan = plan_edits(self._placed, wanted, self.price, How.PREFILL)
        if plan.cut is not None:
            self._cut(plan.cut)
        self._append(list(plan.append)[adopted:])
        done = self.prefilled - before
        how = How.PREFILL if purged and plan.how is not How.EDIT else plan.how
        made = Followed(
            how=how,
            prefilled=done,
            saved=max(0, int(plan.anew) - done) if plan.how is How.EDIT else 0,
            evicted=self._evicted,
            cached=len(self.sequence),
            exact=not self.sequence.table.altered,
        )
        if how in (How.EDIT, How.PREFILL):
            gone = [one.line.page for one in plan.evict if one.line.page]
            self._record(gone, "kernel", "", how=str(how), prefilled=done, evicted=self._evicted)
        return made

    def reply(self, limit: int = 256, sampling: Sampling = GREEDY) -> str:
        """Follow the window, then let the model reply; returns the text, without the end marker of the template.

        The generated tokens stay cached until the window shows something else in their place.
        """
        return self.engine.weights.text(list(self.tokens(limit, sampling)))

    def tokens(self, limit: int = 256, sampling: Sampling = GREEDY) -> Iterator[int]:
        """The same, token by token, without the token that ends the reply."""
        self.follow()
        self._make_room(len(self._template.opening()) + limit)
        self.engine.prefill(self.sequence, self._template.opening())
        ends = self._template.stops | self.engine.weights.stops
        for token in stream(self.engine, self.sequence, limit, sampling, stops=ends):
            if token not in ends:
                yield token

    @contextmanager
    def branch(self, session: Session) -> Iterator[Residence]:
        """A residence for another session that begins with what this window shows. It shares all blocks until it writes.

        When the block ends, its own blocks are freed, and this residence is unchanged.
        """
        self._revive()
        made = Residence.__new__(Residence)
        made.__dict__.update(self.__dict__)
        made.session, made.sequence = session, self.engine.fork(self.sequence)
        made._placed, made.prefilled = list(self._placed), 0
        made.sequence.owners |= {owner_of(session)}
        try:
            yield made
        finally:
            made.close()

    def facts(self) -> Mapping[int, CachedPage]:
        """What the store knows of each cached page, for the page-aware press."""
        view = self.session.edits.view()
        cached = self.sequence.table.pages.items()
        folded = {source for page in view.pages if page.depth and page.id in cached for source in page.sources}
        latest: dict[str, int] = {}
        for page in view.pages:
            if page.answers:
                latest[view.page(page.answers).label] = page.id
        made = {}
        for page in view.pages:
            stale = bool(page.answers) and latest[view.page(page.answers).label] != page.id
            use = view.uses.get(page.id)
            # The distance since the last use is taken as an estimate of the distance to the next use.
            distance = float(view.turn - use.turn) if use is not None else None
            made[page.id] = CachedPage(page.id, 0, 0, page.id in view.pins, page.id in folded, stale, distance)
        return made

    def close(self) -> None:
        """Free its sequence; idempotent."""
        if self.sequence.is_live or self.sequence.lineage is not None:
            self.engine.free(self.sequence)

    def _revive(self) -> None:
        """Begin again if its blocks were given to another sequence."""
        lineage = self.sequence.lineage
        if lineage is not None and lineage.recomputable:
            self.engine.free(self.sequence)
            self.sequence = self._open()
            self._placed = []

    def _open(self) -> CachedSequence:
        made = self.engine.open()
        made.owners = frozenset((owner_of(self.session),))
        return made

    def _purge(self) -> bool:
        """Drop everything that was computed while a page was visible that is forgotten now."""
        states = self.session.window.states
        stood = [
            start for page, start in self.sequence.table.stood.items() if page in states and states[page].at == Place.DROPPED
        ]
        if not stood:
            return False
        cut = 0 if Alteration.COMPRESSED in self.sequence.table.altered else min(stood)
        self._cut(min([cut, *(one.start for one in self._placed if one.start < cut < one.stop)]))
        return True

    def _forget_missing_pins(self) -> None:
        """Pages that were pinned after their keys and values had left, and have to come back."""
        table, pins = self.sequence.table, self.session.window.pins
        self._placed = [one for one in self._placed if one.line.page not in pins or table.count(one.start, one.stop)]

    def _adopt(self, plan: EditPlan) -> int:
        """Find whole lines of the window that the model generated itself: they are cached already."""
        table = self.sequence.table
        known = self._placed[-1].stop if self._placed else 0
        if table.end == known:
            return 0
        count = 0
        if plan.how is How.APPEND:
            tokens = table.tokens
            for line in plan.append:
                stop = known + len(line.tokens)
                if tuple(tokens[known:stop]) != line.tokens:
                    break
                self._place(line, known)
                known, count = stop, count + 1
            if count < len(plan.append):
                # The reply is cached without the marker that closes its line; only that is missing.
                line = plan.append[count]
                same = 0
                while same < min(len(line.tokens), table.end - known) and tokens[known + same] == line.tokens[same]:
                    same += 1
                if 0 < same < len(line.tokens):
                    self.engine.truncate(self.sequence, known + same)
                    self._make_room(len(line.tokens) - same)
                    self._compute(line.tokens[same:])
                    self._place(line, known)
                    return count + 1
        self.engine.truncate(self.sequence, known)
        return count

    def _edit(self, plan: EditPlan) -> None:
        """Insert folds while their sources are visible, then evict the sources, then insert everything else."""
        sources = {one.line.page for one in plan.evict}
        pages = self.session.window.pages
        seeing: list[tuple[WindowLine, int]] = []
        blind: list[tuple[WindowLine, int]] = []
        for line, position in plan.insert:
            page = pages.get(line.page)
            sees = self.channel and page is not None and bool(page.depth) and not sources.isdisjoint(page.sources)
            (seeing if sees else blind).append((line, position))
        gone = {one.line.key for one in plan.evict}
        self._placed = [one for one in self._placed if one.line.key not in gone]
        try:
            # The last first, so that no fold sees another new one.
            for line, position in reversed(seeing):
                try:
                    self._insert(line, position)
                except (BudgetTooSmall, OutOfBlocks):
                    # There is no room for it beside its sources; once they are evicted there may be.
                    blind.append((line, position))
        finally:
            inserted = [(one.start, one.stop) for one in self._placed]
            for one in plan.evict:
                for start, stop in _subtract(one.start, one.stop, inserted):
                    self._evicted += self.engine.evict(self.sequence, start, stop)
        if plan.cut is not None:
            self._cut(plan.cut)
        for line, position in sorted(blind):
            self._insert(line, position)

    def _insert(self, line: WindowLine, position: int) -> None:
        stop = position + len(line.tokens)
        self._evicted += self.engine.evict(self.sequence, position, stop)
        self._make_room(len(line.tokens))
        self.engine.insert(self.sequence, position, line.tokens)
        self.prefilled += len(line.tokens)
        self._place(line, position)

    def _cut(self, position: int) -> None:
        self._placed = [one for one in self._placed if one.start < position]
        self._evicted += self.engine.truncate(self.sequence, position)

    def _append(self, lines: list[WindowLine]) -> None:
        for line in lines:
            self._make_room(len(line.tokens))
            start = self.sequence.end
            self._compute(line.tokens)
            self._place(line, start)

    def _compute(self, tokens: tuple[int, ...]) -> None:
        self.engine.prefill(self.sequence, tokens)
        self.prefilled += len(tokens)

    def _place(self, line: WindowLine, start: int) -> None:
        stop = start + len(line.tokens)
        # The handle of a result quotes from its call; that of a gap has only numbers.
        if line.key[2] in self.session.window.stubs and not line.page:
            stood = self.sequence.table.stood
            stood[line.key[2]] = min(start, stood.get(line.key[2], start))
        if line.page:
            pages = self.sequence.table.pages
            for other in pages.over(start, stop):
                pages.remove(other)
            if line.page in pages:
                pages.remove(line.page)
            self.sequence.table.label(line.page, start, stop)
        self._placed.append(PlacedLine(line, start, stop))
        self._placed.sort(key=lambda one: one.start)

    def _make_room(self, need: int) -> None:
        """Ask the policy at the kv boundary with cause PRESSURE: what it evicts leaves the cache, and the ledger records
        it."""
        table = self.sequence.table
        for relief in self.pressure.relief(self.session, table, need):
            for page in relief.pages:
                self._evicted += self.engine.evict(self.sequence, *table.pages[page])
            if relief.pages or relief.refused:
                self._record(relief.pages, relief.policy, relief.why or relief.refused, refused=bool(relief.refused))
        if table.need(need) > self.engine.pool.free:
            with suppress(OutOfBlocks):
                table.defragment()

    def _record(self, pages: Any, policy: str, why: str, **data: Unpack[Data]) -> None:
        said: Data = {"cached": len(self.sequence), **data}
        self.session.ledger.record(Act.CACHE, pages, policy=policy, cause=Cause.PRESSURE, why=why, **said)


def _subtract(start: int, stop: int, taken: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """A range less others that may lie in it."""
    left = [(start, stop)]
    for low, high in taken:
        left = [
            piece for begin, end in left for piece in ((begin, min(end, low)), (max(begin, high), end)) if piece[0] < piece[1]
        ]
    return left

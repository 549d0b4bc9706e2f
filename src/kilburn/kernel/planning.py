"""Consults the policy and keeps the budget: what happens between admitting pages and the commit.

The policy is asked once for every admission and again while the window is over its capacity and it
makes progress; moves that break a law are undone and recorded. What is then still over capacity the
kernel settles itself, oldest first, so that law 2 never depends on a policy.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from types import MappingProxyType

from kilburn.budget import Budget
from kilburn.effect import Answer, Ask, Deferred
from kilburn.errors import KernelError, PinsExceedWindow
from kilburn.event import Act
from kilburn.kernel.admission import text_cost
from kilburn.kernel.background import Background
from kilburn.kernel.consultation import Consultation
from kilburn.kernel.gaps import handle_of
from kilburn.kernel.kernel import Kernel
from kilburn.message import Kind, Role
from kilburn.move import Evict, Fold, Load, Move
from kilburn.page import Page, Span
from kilburn.policy import Cause, Policy, View

__all__ = ["Planner"]

ROUNDS = 4
"""Times a policy is asked for one admission, at most."""


class Planner:
    """One policy at one process's window.

    Args:
        answer: asks the model in the background; None where there is none.
    """

    def __init__(self, kernel: Kernel, policy: Policy, name: str, answer: Callable[[Ask], Answer] | None = None) -> None:
        self.kernel, self.policy, self.name = kernel, policy, name
        self.background = Background(kernel, answer)
        self._consultation = Consultation(kernel, name, int(getattr(policy, "max_depth", 1)), self.background, self._rehearse)
        self._handle = text_cost(kernel.counter, handle_of((1000, 2000, 1001, 1_000_000)))

    def settle(self, cause: Cause, wanted: tuple[int, ...]) -> Generator[Ask, Answer, None]:
        """Bring the window under its capacity, and let the policy use the occasion.

        Raises:
            PinsExceedWindow: nothing unpinned is left to move.
        """
        kernel = self.kernel
        self._page_system(wanted)
        self._page_oversized(wanted)
        if not kernel.tier.waiting():
            yield from self._consult(cause, wanted)
        rounds, before = 0, -1
        while kernel.excess and rounds < ROUNDS and kernel.use != before:
            before = kernel.use
            yield from self._consult(Cause.PRESSURE, wanted)
            rounds += 1
        if kernel.excess:
            self._fall_back()

    def bring(self, pages: Sequence[int]) -> None:
        """Bring pages into the window whole, before they are pinned."""
        below = tuple(page for page in pages if self.kernel.tier.at(page) != "in")
        if below:
            self.kernel.carry(Load(pages=below, why="pinned"), cause=Cause.FAULT)

    def enforce(self) -> None:
        """Settle the budget without asking the policy."""
        if self.kernel.excess:
            self._fall_back()

    def reopen(self) -> None:
        """Fit a reopened process to this budget and counter.

        Raises:
            PinsExceedWindow: the pins need a larger window.
        """
        kernel = self.kernel
        with kernel.batch():
            kernel.settle_ruler()
            kernel.check_pins()
            if kernel.excess:
                self._fall_back()

    def view(self, cause: Cause, wanted: tuple[int, ...], deferred: Deferred | None = None) -> View:
        """The frozen view for one plan."""
        kernel, tier = self.kernel, self.kernel.tier
        return View(
            cause=cause,
            pages=tier.resident(),
            budget=Budget(kernel.capacity),
            use=kernel.use,
            wanted=wanted,
            turn=tier.turn,
            now=kernel.clock(),
            pins=frozenset(tier.pins),
            open=frozenset(standing for call in tier.open if (standing := tier.stands(call)) is not None),
            stubs=frozenset(tier.stubs),
            marks=MappingProxyType(tier.marks),
            uses=MappingProxyType(kernel.uses),
            page=tier.pages.__getitem__,
            text=kernel.text,
            group=tier.group,
            count=kernel.counter.count,
            handle=self._handle,
            task=self._task(),
            seen=tier.seen,
            deferred=deferred,
            gone=tier.gone.__contains__,
            task_page=tier.task,
        )

    def _task(self) -> str:
        tier = self.kernel.tier
        return self.kernel.text(tier.task) if tier.task and tier.at(tier.task) != "dropped" else ""

    def _consult(self, cause: Cause, wanted: tuple[int, ...]) -> Generator[Ask, Answer, None]:
        view = self.view(cause, wanted, self.background.look())
        yield from self._consultation.hold(self.policy.plan(view), view)

    def abandon(self) -> None:
        """The session ends: an answer that is still awaited comes too late, and the ledger says so."""
        purpose = self.background.abandon()
        if purpose is not None:
            self.kernel.note(Act.COMPACT, policy=self.name, cause=Cause.IDLE, why=purpose, outcome="late", freed=0, moves=0)

    def _rehearse(self) -> None:
        """Make sure that what is about to become durable can be made to fit, whatever the model says.

        Raises:
            PinsExceedWindow: it cannot; nothing was written.
        """
        if self.kernel.excess:
            point = self.kernel.savepoint()
            self._fall_back()
            self.kernel.undo(point)

    def _page_system(self, wanted: tuple[int, ...]) -> None:
        """Of a leading system prompt that is too long to pin, head and tail are pinned instead (law 3)."""
        kernel, tier = self.kernel, self.kernel.tier
        for number in wanted:
            page = tier.pages[number]
            if (
                page.role is not Role.SYSTEM
                or number in tier.pins
                or page.tokens <= kernel.capacity // 4
                or page.kind is not Kind.TEXT
            ):
                continue
            if all(tier.pages[before].role is Role.SYSTEM for before in range(1, number)) and self._shorten(
                page, kernel.capacity // 4
            ):
                kernel.mark([tier.last_derived], pinned=True, why="the system prompt is too long to pin whole")

    def _page_oversized(self, wanted: tuple[int, ...]) -> None:
        """A message that cannot fit is itself paged: head, tail and handle stay."""
        kernel = self.kernel
        pinned = sum(kernel.tier.cost(page) for page in kernel.tier.pins)
        room = kernel.capacity - pinned - self._handle
        calls = [number for number in wanted if number in kernel.tier.open and number not in kernel.tier.pins]
        if sum(kernel.tier.cost(number) for number in calls) > room:
            # None of them may leave before its result is here, so each gets its share.
            for number in calls:
                if kernel.tier.cost(number) > room // len(calls):
                    self._shorten(kernel.tier.pages[number], room // (len(calls) + 1))
        for number in wanted:
            page = kernel.tier.pages[number]
            if (
                number not in kernel.tier.pins
                and kernel.tier.at(number) == "in"
                and page.tokens > room
                and page.kind is not Kind.IMAGE
            ):
                self._shorten(page, room // 2)

    def _shorten(self, page: Page, tokens: int) -> bool:
        """Put head and tail in the place of a page; False where not even those would help."""
        if page.kind is Kind.IMAGE or page.depth:
            return False
        text = self.kernel.text(page.id)
        point = self.kernel.savepoint()
        for share in (1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.05):
            budget = int(tokens * share)
            keep = _head_and_tail(text, int(len(text) * budget / max(1, page.tokens)))
            if not keep or budget < 2 * self._handle:
                return False
            try:
                made = self.kernel.carry(
                    Fold(pages=(page.id,), keep=keep, why="larger than the window"), policy="kernel", cause=Cause.PRESSURE
                )
            except KernelError:
                self.kernel.undo(point)
                return False
            if made is not None and self.kernel.tier.cost(made) <= tokens:
                return True
            self.kernel.undo(point)
        return False

    def _fall_back(self) -> None:
        """Evict the oldest unpinned groups; then shorten or evict even what just came.

        Raises:
            PinsExceedWindow: what is left is pinned, or cannot leave before a result comes.
        """
        kernel = self.kernel
        first = self.view(Cause.PRESSURE, ())
        for page in first.pages:
            if kernel.excess and not first.is_latest(page):
                self._evict(page)
        for page in self.view(Cause.PRESSURE, ()).pages:
            if kernel.excess and kernel.tier.at(page.id) == "in" and page.id not in kernel.tier.pins:
                least = max(page.tokens - kernel.excess - self._handle, 3 * self._handle)
                if page.tokens <= least or not self._shorten(page, least):
                    self._evict(page)
        for page in self.view(Cause.PRESSURE, ()).pages:
            if kernel.excess and page.answers:
                self._try(Evict(pages=(page.id,), why="over capacity"))
        for page in self.view(Cause.PRESSURE, ()).pages:
            if kernel.excess and page.kind is Kind.REASONING and kernel.tier.at(page.id) == "in":
                together = map(kernel.tier.pages.__getitem__, kernel.tier.group(page.id))
                thoughts = tuple(each.id for each in together if each.kind is Kind.REASONING and kernel.tier.at(each.id) == "in")
                self._try(Evict(pages=thoughts, why="thinking that does not fit"))
        self._merge_handles()
        if kernel.excess:
            raise PinsExceedWindow(f"{kernel.use} of {kernel.capacity} tokens are pinned or wait for a result")

    def _evict(self, page: Page) -> None:
        """Evict a page's group, or of it what may leave; nothing where nothing may."""
        if self.kernel.tier.at(page.id) != "in":
            return
        chosen = self.view(Cause.PRESSURE, ()).free([page], 1)
        if chosen:
            self._try(Evict(pages=chosen, why="over capacity"))

    def _try(self, move: Move) -> bool:
        """Carry out a move of the kernel's own, if the laws allow it."""
        point = self.kernel.savepoint()
        try:
            self.kernel.carry(move, policy="kernel", cause=Cause.PRESSURE)
        except KernelError:
            self.kernel.undo(point)
            return False
        return True

    def _merge_handles(self) -> None:
        """Stubs whose calls nothing else keeps alive go with their calls."""
        kernel = self.kernel
        for number in list(kernel.tier.stubs):
            if kernel.excess and number in kernel.tier.stubs:
                standing = kernel.tier.stands(kernel.tier.pages[number].answers)
                if standing is not None:
                    self._evict(kernel.tier.pages[standing])


def _head_and_tail(text: str, size: int) -> tuple[Span, ...]:
    """Spans of about `size` characters: two thirds from the head, one third from the tail, at line ends where near."""
    if size < 8 or len(text) <= size:
        return ((0, min(len(text), max(size, 1))),) if text else ()
    head, tail = size * 2 // 3, len(text) - size // 3
    line = text.rfind("\n", head // 2, head)
    head = line + 1 if line >= 0 else head
    line = text.find("\n", tail, tail + size // 6)
    tail = line + 1 if 0 <= line < len(text) - 1 else tail
    return ((0, head), (tail, len(text)))

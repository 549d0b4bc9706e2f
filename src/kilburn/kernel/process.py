"""A process: one agent's address space over all levels.

What is appended stays: in the window while there is room, below it by address for ever. This class
is the surface; the kernel does the work, the policy decides, and every call here is one batch.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Iterator
from typing import Any

import msgspec

from kilburn.budget import Budget
from kilburn.effect import Answer, Ask
from kilburn.errors import KernelError
from kilburn.event import Act, Event
from kilburn.kernel.drive import arun, run
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import Stats
from kilburn.kernel.planning import Planner
from kilburn.kernel.render import Item, Prompt, items, part_of, render, transcript
from kilburn.kernel.search import Found, found
from kilburn.message import Kind, Message, Part
from kilburn.model import Tokens
from kilburn.move import Drop, Move
from kilburn.page import Page, address_of, parse_address, span_of
from kilburn.policy import Cause
from kilburn.store import State
from kilburn.wire.form import dump, parse

__all__ = ["HitRateWarning", "Process", "Recalled"]


class HitRateWarning(UserWarning):
    """The window misses too much of what the agent asks for (see `Stats`)."""


class Recalled(str):
    """Recalled text, exact: the concatenation of its pages' texts.

    `parts` holds the pages' texts one by one, `pages` the pages.
    """

    pages: tuple[Page, ...]
    parts: tuple[str, ...]

    def __new__(cls, pages: tuple[Page, ...], parts: tuple[str, ...]) -> Recalled:
        made = super().__new__(cls, "".join(parts))
        made.pages, made.parts = pages, parts
        return made


class Process:
    """One session of one agent, made by `Hierarchy.process`.

    Safe to use from several threads; calls are serialised.
    """

    def __init__(self, kernel: Kernel, planner: Planner, answer: Callable[[Ask], Answer]) -> None:
        self.kernel = kernel
        self._planner = planner
        self._answer = answer
        self._parts: dict[int, tuple[Part, str | None]] = {}
        self._shipped: list[tuple[Any, int]] = []
        self._seen: set[int] = set()
        self._warned = False

    @property
    def name(self) -> str:
        """The session's name."""
        return self.kernel.info.name

    # --- writing -------------------------------------------------------------------------------

    def append(self, *messages: Any) -> str:
        """Admit messages: OpenAI-style or Anthropic-style dicts, or `Message`s; durable on return.

        Returns:
            The address of the new pages: `p17`, or a range `p17-p19` where a message has several parts.

        Raises:
            WireError: not a valid message here. PinsExceedWindow: pins leave no room. StoreError.
            After any of them nothing was admitted.
        """
        return run(self._append(messages), self._answer)

    async def aappend(self, *messages: Any) -> str:
        """`append` for async callers: a model that a policy asks runs in a worker thread."""
        return await arun(self._append(messages), self._answer)

    def _append(self, messages: tuple[Any, ...]) -> Generator[Ask, Answer, str]:
        parsed = [message for value in messages for message in parse(value)]
        if not parsed:
            raise KernelError("append without a message", advice="give at least one message")
        kernel = self.kernel
        kernel.lock.acquire()
        try:
            first, last = kernel.take_in(parsed)
            yield from self._planner.settle(Cause.ADMIT, tuple(range(first, last + 1)))
            kernel.flush()
        except BaseException:
            kernel.undo()
            raise
        finally:
            kernel.lock.release()
        return span_of(first, last)

    def idle(self) -> None:
        """Tell the policy that nothing happens: a good moment for work that may wait."""
        run(self._settling(lambda: None, Cause.IDLE, ()), self._answer)

    def _settling(self, change: Callable[[], object], cause: Cause, wanted: tuple[int, ...]) -> Generator[Ask, Answer, None]:
        kernel = self.kernel
        kernel.lock.acquire()
        try:
            change()
            yield from self._planner.settle(cause, wanted)
            kernel.flush()
        except BaseException:
            kernel.undo()
            raise
        finally:
            kernel.lock.release()

    def resize(self, budget: Budget) -> None:
        """Give this process another budget from now on; what no longer fits leaves.

        Raises:
            PinsExceedWindow: the pins do not fit it; the old budget stays.
        """
        kernel = self.kernel
        before = kernel.budget
        kernel.budget = budget
        try:
            run(self._settling(kernel.check_pins, Cause.PRESSURE, ()), self._answer)
        except BaseException:
            kernel.budget = before
            raise

    def observe(self, usage: Tokens, counted: int) -> None:
        """Tell what a provider says a prompt cost that was counted here as `counted` tokens.

        Where our count was too low, the window shrinks accordingly; the ledger remembers.
        """
        with self.kernel.lock:
            self.kernel.observe(Act.USAGE, counted=counted, prompt=usage.prompt, cached=usage.cached, reply=usage.reply)
        if self.kernel.excess:
            self.idle()

    def pin(self, address: str) -> None:
        """Keep pages in the window, byte-identical, until they are unpinned; pages below come back first.

        Raises:
            UnknownAddress, Forgotten. PinsExceedWindow: nothing was pinned.
        """
        self._mark(address, pinned=True)

    def unpin(self, address: str) -> None:
        """Let pages move again."""
        self._mark(address, pinned=False)

    def remember(self, address: str, importance: float = 1.0) -> None:
        """Mark pages as important, 0 to 1: policies that weigh importance keep them longer."""
        if not 0.0 <= importance <= 1.0:
            raise KernelError(f"importance {importance} is not between 0 and 1", advice="use 1.0 for what must stay longest")
        self._mark(address, importance=importance)

    def _mark(self, address: str, *, pinned: bool | None = None, importance: float | None = None) -> None:
        pages = self.kernel.resolve(address)

        def change() -> None:
            if pinned:
                self._planner.bring(pages)
            self.kernel.mark(pages, pinned=pinned, importance=importance)

        run(self._settling(change, Cause.FAULT, tuple(pages) if pinned else ()), self._answer)

    def apply(self, *moves: Move) -> list[str]:
        """Carry out moves as a policy would, all or none; returns the addresses of derived pages.

        Raises:
            LawBroken, KernelError: a move is illegal; nothing changed.
        """
        with self.kernel.batch():
            made = [self.kernel.carry(move) for move in moves]
            self._planner.enforce()
        return [address_of(page) for page in made if page is not None]

    def forget(self, address: str, why: str = "") -> list[str]:
        """Forget pages and all that was derived from them, in every place; returns what went.

        What this cannot reach: providers' caches, file-system snapshots, and exports made elsewhere.
        """
        pages = self.kernel.resolve(address)
        with self.kernel.batch():
            gone = self.kernel.closure(pages)
            self.kernel.carry(Drop(pages=tuple(pages), why=why))
            self._planner.enforce()
        self.kernel.forget_texts(gone)
        for page in gone:
            self._parts.pop(page, None)
        self._shipped.clear()
        return [address_of(page) for page in gone]

    # --- reading -------------------------------------------------------------------------------

    def recall(self, address: str) -> Recalled:
        """The exact text at an address: a page fault, answered from whichever level has it.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        kernel = self.kernel
        with kernel.lock:
            numbers = self.kernel.resolve(address)
            pages = tuple(kernel.tier.pages[number] for number in numbers)
            kernel.fetch(page.digest for page in pages)
            recalled = Recalled(pages, tuple(kernel.content(page.digest) for page in pages))
            if not kernel.store.readonly:
                kernel.observe(Act.FAULT, numbers, policy="user", cause=Cause.FAULT, missed=[n for n in numbers if kernel.tier.at(n) != "in"])
            return recalled

    def search(self, query: str, tokens: int = 1000, limit: int = 20) -> list[Found]:
        """Passages of this process that match a query, best first, within a token budget."""
        kernel = self.kernel
        with kernel.lock:
            passages = kernel.store.search(query, process=kernel.info.number, limit=limit)
            hits = found(passages, {kernel.info.number: self}, kernel.counter, tokens, kernel.clock())
            if not kernel.store.readonly:
                kernel.observe(Act.SEARCH, [parse_address(hit.address)[0] for hit in hits], policy="user", cause=Cause.FAULT)
        return hits

    def render(self, format: str = "chat") -> Prompt:
        """The prompt: what is in the window, as messages for OpenAI ("chat") or Anthropic ("messages").

        A list of dicts; for "messages" the system prompt stands beside it, in `.system`. Never over
        the window; grows only at its end until something is edited.
        """
        kernel = self.kernel
        with kernel.lock:
            shown = items(kernel.tier)
            fresh = [page for _, page, instead in shown if page is not None and not instead and page.id not in self._parts]
            kernel.fetch(digest for page in fresh for digest in (page.digest, page.extra))
            for page in fresh:
                self._parts[page.id] = part_of(page, kernel.content(page.digest), kernel.content(page.extra))
            if len(self._parts) > 2 * len(shown) + 64:
                kept = {page.id for _, page, _ in shown if page is not None}
                self._parts = {number: part for number, part in self._parts.items() if number in kept}
            prompt = render(transcript(kernel.tier, lambda page: self._parts[page.id]), format, kernel.use)
            if not kernel.store.readonly:
                self._ship(shown)
        return prompt

    def _ship(self, shown: list[Item]) -> None:
        kernel = self.kernel
        now = [((key, instead), _cost(page, instead, kernel)) for key, page, instead in shown]
        same = 0
        for old, new in zip(self._shipped, now, strict=False):
            if old != new:
                break
            same += 1
        again = sum(cost for (key, _), cost in now[same:] if key[2] in self._seen)
        self._seen.update(key[2] for (key, _), _ in now)
        self._shipped = now
        kernel.observe(Act.SHIP, cause=Cause.IDLE, again=again, window=kernel.capacity)

    def stats(self) -> Stats:
        """The ledger's figures; a hit rate under 60% also raises a `HitRateWarning`, once."""
        kernel = self.kernel
        with kernel.lock:
            if not kernel.store.readonly:
                kernel.flush()
            stats = kernel.ledger.report(use=kernel.use, window=kernel.capacity)
        if stats.warnings and not self._warned:
            self._warned = True
            warnings.warn(stats.warnings[0], HitRateWarning, stacklevel=2)
        return stats

    def pages(self) -> list[tuple[Page, State]]:
        """All pages with where they are: originals in order, then derived ones."""
        tier = self.kernel.tier
        return [(tier.pages[page], tier.states[page]) for page in sorted(tier.pages, key=lambda page: (page < 0, abs(page)))]

    def events(self) -> Iterator[Event]:
        """The ledger, oldest first."""
        with self.kernel.lock:
            if not self.kernel.store.readonly:
                self.kernel.flush()
        return self.kernel.store.events(self.kernel.info.number)

    def messages(self) -> list[dict[str, Any]]:
        """The whole transcript as it was appended, exactly; forgotten pages are missing from it."""
        kernel = self.kernel
        made: list[Message] = []
        current = 0
        with kernel.lock:
            for number in range(1, kernel.tier.last + 1):
                page = kernel.tier.pages[number]
                if kernel.tier.at(number) == "dropped":
                    continue
                part, leftovers = part_of(page, kernel.content(page.digest), kernel.content(page.extra))
                if page.message == current:
                    made[-1] = msgspec.structs.replace(made[-1], parts=(*made[-1].parts, part))
                else:
                    made.append(Message(role=page.role, parts=(part,), extra=leftovers, sources=page.sources))
                current = page.message
        return dump(made)


def _cost(page: Page | None, instead: str, kernel: Kernel) -> int:
    if page is None:
        return kernel.counter.count(instead) + kernel.counter.envelope
    return kernel.tier.stubs[page.id] if instead else kernel.tier.cost(page.id)

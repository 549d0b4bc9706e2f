"""A process: one agent's address space over all levels.

What is appended stays: in the window while there is room, below it by address for ever. This class
is the surface; the kernel does the work, the policy decides, and every call here is one batch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Iterator
from contextlib import contextmanager
from typing import Any

from kilburn.budget import Budget
from kilburn.effect import Answer, Ask
from kilburn.errors import KernelError, KilburnError
from kilburn.event import Act, Event
from kilburn.kernel.drive import answerer, arun, run
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.planning import Planner
from kilburn.kernel.reader import HitRateWarning, Reader, Recalled
from kilburn.kernel.render import Prompt
from kilburn.model import Model, Tokens, is_count
from kilburn.move import Drop, Move
from kilburn.page import address_of, span_of
from kilburn.policy import Cause, Policy, View
from kilburn.tokens.calibrated import is_plausible
from kilburn.wire.form import parse

log = logging.getLogger("kilburn")

__all__ = ["HitRateWarning", "Process", "Recalled"]


class Process(Reader):
    """One session of one agent, made by `Hierarchy.process`.

    Safe to use from several threads; calls are serialised.
    """

    def __init__(self, kernel: Kernel, planner: Planner, answer: Callable[[Ask], Answer]) -> None:
        super().__init__(kernel)
        self._planner = planner
        self._answer = answer
        # Places outside of the store that hold what was made of pages, by name: each is told which pages are forgotten.
        self.erasers: dict[str, Callable[[Collection[int]], None]] = {}

    def _renewed(self) -> None:
        super()._renewed()
        if not self.kernel.store.readonly:
            try:
                # The other writer's window may be larger.
                self._planner.reopen()
            except KilburnError as error:
                # Reading goes on where nothing can be written; a prompt is made to fit where it is rendered.
                log.info("session %s: %s", self.name, error)

    def append(self, *messages: Any) -> str:
        """Admit messages: OpenAI-style or Anthropic-style dicts, or `Message`s.

        When it returns, they are admitted and durable. When it raises, whatever it raises, none of them was
        admitted, and trying again admits them once. While the policy waits for a model's words, everybody
        else sees the process as it was before. (A Ctrl-C that comes while the commit itself runs may find
        the messages admitted.)

        Returns:
            The address of the new pages: `p17`, or a range `p17-p19` where a message has several parts.

        Raises:
            WireError: not a valid message here. PinsExceedWindow: pins leave no room. StoreError.
        """
        return run(self._append(messages), self._answer)

    async def aappend(self, *messages: Any) -> str:
        """`append` for async callers: a model that a policy asks runs in a worker thread.

        Where the call is cancelled, nothing was admitted.
        """
        return await arun(self._append(messages), self._answer)

    def _append(self, messages: tuple[Any, ...]) -> Generator[Ask, Answer, str]:
        parsed = [message for value in messages for message in parse(value)]
        if not parsed:
            raise KernelError("append without a message", advice="give at least one message")

        def admit() -> tuple[int, ...]:
            first, last = self.kernel.take_in(parsed)
            return tuple(range(first, last + 1))

        admitted = yield from self._settling(admit, Cause.ADMIT)
        return span_of(admitted[0], admitted[-1])

    def idle(self) -> None:
        """Tell the policy that nothing happens: a good moment for work that may wait."""
        run(self._settling(tuple, Cause.IDLE), self._answer)

    def compact(self, policy: Policy, name: str, model: Model | None = None) -> list[Event]:
        """Ask another policy once, now, under a name of its own, to make room.

        Args:
            name: stands in the ledger for this policy.
            model: answers what it asks; None for nobody.

        Returns:
            What the ledger has of it: its moves, and last the event `COMPACT` with the outcome. Nothing where
            there was nothing to do.
        """
        before = self.kernel.pending.next - 1
        run(self._settling(tuple, Cause.IDLE, planner=Planner(self.kernel, policy, name)), answerer(model))
        return [event for event in self.events(before) if event.policy == name]

    @contextmanager
    def batch(self) -> Iterator[Kernel]:
        """Several changes as one transaction, by the kernel's own verbs: all are written at the end, or none.

        No policy is asked, and nothing brings the window within its budget: whoever uses it does.

        Raises:
            KernelError: within another change.
        """
        with self.kernel.batch():
            yield self.kernel

    def _settling(
        self, change: Callable[[], tuple[int, ...]], cause: Cause, *, planner: Planner | None = None, waits: bool = True
    ) -> Generator[Ask, Answer, tuple[int, ...]]:
        """One batch: a change, then whatever the policy makes of it; `change` says which pages it is about."""
        kernel, planner = self.kernel, planner or self._planner
        with kernel.lock:
            kernel.begin()
            try:
                # A policy must not quote to a model what another process has forgotten.
                kernel.check_current()
                wanted = yield from planner.settle(cause, change, waits=waits)
                kernel.flush()
            except BaseException as error:
                kernel.fail(error)
                planner.background.undo()
                raise
            kernel.end()
            planner.background.commit()
        return wanted

    def abandon(self) -> None:
        """Let go of what the policy still awaits from a model; called when the store closes."""
        with self.kernel.lock:
            self._planner.abandon()

    def resize(self, budget: Budget) -> None:
        """Give this process another budget from now on; what no longer fits leaves.

        Raises:
            PinsExceedWindow: the pins do not fit it; the old budget stays.
        """

        def change() -> tuple[int, ...]:
            self.kernel.rebudget(budget)
            self.kernel.check_pins()
            return ()

        run(self._settling(change, Cause.PRESSURE), self._answer)

    def observe(self, usage: Tokens, counted: int) -> bool:
        """Tell what a provider says a prompt cost that was counted here as `counted` tokens.

        Where our count was too low, the window shrinks accordingly, at once: no model is waited for. Numbers
        that cannot be true change nothing; the ledger says that they came.

        Returns:
            Whether the numbers are believed.
        """
        kernel = self.kernel
        with kernel.lock:
            if not (is_count(counted) and usage.sound and is_plausible(counted, usage.prompt)):
                kernel.observe(Act.NOTE, why="a provider's count of a prompt cannot be true")
                return False
            kernel.observe(Act.USAGE, counted=counted, prompt=usage.prompt, cached=usage.cached, reply=usage.reply)
            if kernel.excess:
                run(self._settling(tuple, Cause.PRESSURE, waits=False), self._answer)
            return True

    def render(self, format: str = "chat") -> Prompt:
        """The prompt: what is in the window, as messages for OpenAI ("chat") or Anthropic ("messages").

        A list of dicts; for "messages" the system prompt stands beside it, in `.system`. Never over
        the window; grows only at its end until something is edited.

        Raises:
            PinsExceedWindow: the session was written with a larger window, and its pins exceed this one.
        """
        with self._current() as kernel:
            if not kernel.excess:
                return self._prompt(format)
            # Written with a larger window, and not to be written here: made to fit in memory, and undone.
            kernel.begin()
            try:
                self._planner.enforce()
                prompt = self._prompt(format)
                kernel.undo()
                kernel.end()
            except BaseException as error:
                kernel.fail(error)
                raise
            finally:
                self._parts.clear()
            return prompt

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
        def change() -> tuple[int, ...]:
            pages = self.kernel.resolve(address)
            if pinned:
                self._planner.bring(pages)
            self.kernel.mark(pages, pinned=pinned, importance=importance)
            return tuple(pages)

        run(self._settling(change, Cause.ADVICE), self._answer)

    def view(self, cause: Cause = Cause.IDLE, wanted: tuple[int, ...] = ()) -> View:
        """What a policy at the window is shown now: frozen, and good until the next change."""
        with self.kernel.lock:
            return self._planner.view(cause, wanted)

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

        Places that registered in `erasers` (a folder of spilled keys and values) are told, all of them, also where one
        fails: what that raises is raised then, and the pages are forgotten here all the same.

        What this cannot reach: providers' caches, file-system snapshots, and exports made elsewhere.
        """
        with self.kernel.batch():
            pages = self.kernel.resolve(address)
            gone = self.kernel.closure(pages)
            self.kernel.carry(Drop(pages=tuple(pages), why=why))
            self._planner.enforce()
        self.kernel.forget_texts(gone)
        for page in gone:
            self._parts.pop(page, None)
        self._shipped.clear()
        failures = []
        for erase in list(self.erasers.values()):
            try:
                erase(gone)
            except KilburnError as error:
                failures.append(error)
        if failures:
            raise failures[0]
        return [address_of(page) for page in gone]

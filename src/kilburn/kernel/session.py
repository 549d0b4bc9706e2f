"""A session: one agent's address space over all levels.

What is appended stays: in the window while there is room, and in the store for ever, under its address. This class is
the public interface. The policy decides, the kernel does the work, and each change is one batch. Each answer follows
the current ledger: if another writer continued the session (or a person forgot a page), everything is read again
first. Reads are recorded in the ledger, unless the store was opened for reading; no read waits or fails because of
that. What a session has in common with a memory and a document is in `segment`; its branches are in `Branches` here.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, Unpack, cast

import msgspec

from kilburn.arguments import checked
from kilburn.backend import Digests, SegmentInfo, State
from kilburn.budget import Budget, Counter
from kilburn.effect import Answer, Ask, Outcome
from kilburn.errors import (
    Forgotten,
    HitRateWarning,
    InvalidBudget,
    KernelError,
    KilburnError,
    LawBroken,
    SpecError,
    StoreError,
    StoreStale,
    StoreUnavailable,
    UnknownAddress,
)
from kilburn.event import Act, Data, Event
from kilburn.forgetting.closure import Home, closure, forget
from kilburn.kernel.branches import BRANCH, Fork, Inherit, branches_in, fork_of, origin_in
from kilburn.kernel.drive import answerer, arun, aside, run
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import Stats
from kilburn.kernel.planning import Planner
from kilburn.kernel.prompts import Prompts, difference, snapshot
from kilburn.kernel.receipts import Difference, Preview, Receipt, newest_moves, ranges, receipts
from kilburn.kernel.render import Item, Prompt, items, part_of
from kilburn.kernel.replay import last_of, rebuild
from kilburn.kernel.segment import FREE, Segment
from kilburn.kernel.window import GONE, WindowState
from kilburn.message import TRUST_OF_ROLE, Kind, Message, Part, Role, Trust
from kilburn.model import Model, Tokens, is_count
from kilburn.move import Drop, Evict, Move
from kilburn.page import Page, Place, address_of, parse_address, span_of
from kilburn.policy import Cause, Policy, View
from kilburn.search.found import Found
from kilburn.tokens.calibrated import is_plausible
from kilburn.tokens.choice import counts_alike, repriced
from kilburn.wire.form import dump, parse

if TYPE_CHECKING:
    from kilburn.collections.collection import Collection as Facts

    # It makes sessions.
    from kilburn.kernel.store import Store

log = logging.getLogger("kilburn")

READ = 500
"""Pages whose texts are read at a time."""

TRIES = 5
"""How often a branch is begun anew because another program went on with the session that it forks from."""


def is_return(page: Page, fork: Fork) -> bool:
    """Whether a page that cites a branch is its return, and not a recall from it."""
    return page.answers == fork.call if fork.call else page.role is Role.USER


class NoteTaker(Protocol):
    """What a session needs of the memory of its user: `kilburn.memory.user_memory.UserMemory` is one."""

    def note(self, text: str, session: Session) -> str:
        """Keep a fact that the session's agent notes; returns its address."""
        ...

    @property
    def collection(self) -> Facts:
        """The pages of the facts."""
        ...


class SessionHome(Home, Protocol):
    """What a session needs of the store that it is in: also the other sessions, by name."""

    def session(self, name: str, user: str = "") -> Session:
        """The session of that name: created, or reopened where it was left."""
        ...

    def counter_of(self, model: str) -> Counter | None:
        """The counter for a model that a request names; None where all is counted by the store's own."""
        ...

    def _begin(self, name: str, user: str, write: Callable[[Session], None]) -> Session | None:
        """A new session, which exists when `write` has written into it; None if the name is taken."""
        ...

    def _prepare(self, name: str, user: str) -> Session:
        """Return the session of that name; a new one exists when something was appended to it."""
        ...

    def release(self, name: str) -> None:
        """Keep a session in memory no longer."""
        ...

    def memory(self, user: str = "") -> NoteTaker:
        """The memory of a user, or of all users."""
        ...


@checked
class Session(Segment):
    """One session of one agent, made by `Store.session`. Recall, pins, forgetting and the ledger are in `Segment`.

    Safe to use from several threads; calls are serialised.
    """

    _home: SessionHome

    def __init__(self, home: SessionHome, kernel: Kernel, planner: Planner, answer: Callable[[Ask], Answer]) -> None:
        super().__init__(home, kernel.lock, kernel.counter)
        self._kernel = kernel
        self._planner = planner
        self._answer = answer
        self._prompts = Prompts(kernel)
        self._warned = False
        # How many branches are known to exist, and forks by the number of the branch.
        self._forks = 0
        self._known: dict[int, Fork] = {}
        # Places outside the store with data made from pages, by name: each is called with the pages that are forgotten.
        self.erasers: dict[str, Callable[[Collection[int]], None]] = {}

    def __repr__(self) -> str:
        """What is known in memory: nothing is read, and no text of a page is in it."""
        known = f"{len(self.window.pages)} pages, {self.window.use} of {self.budget.capacity} tokens"
        return f"<Session {self.name!r} of tenant {self.tenant!r}: {known}>"

    @property
    def info(self) -> SegmentInfo:
        """Its row in the store, as it was when the session was opened."""
        return self._kernel.info

    @property
    def store(self) -> Store:
        """The store that it is in."""
        return cast("Store", self._home)

    @property
    def head(self) -> int:
        """Number of the last event in its ledger, as this session last saw it."""
        return self._kernel.pending.head

    @property
    def size(self) -> int:
        """Bytes that it takes in memory, about."""
        return self._kernel.size

    @property
    def branches(self) -> Branches:
        """The session that it is a branch of, and its own branches."""
        return Branches(self)

    @property
    def window(self) -> WindowState:
        """What is in the window, where and at what cost, as this session last saw it. Only the kernel changes it."""
        return self._kernel.window

    @property
    def budget(self) -> Budget:
        """What its window may hold."""
        return self._kernel.budget

    @property
    def capacity(self) -> int:
        """Tokens that the pages of a prompt may take: the budget's, corrected by what providers reported."""
        with self.lock:
            return self._kernel.capacity

    @property
    def use(self) -> int:
        """Tokens that the prompt takes now."""
        with self.lock:
            return self._kernel.use

    @property
    def excess(self) -> int:
        """Tokens over the capacity: 0, unless the session was opened with a smaller window than its pins, and its calls that
        wait for results, need. Then it can be read and mended, by `unpin`, `forget` or a larger window; `render` and `append`
        raise `PinsExceedWindow`."""
        with self.lock:
            return self._kernel.excess

    @property
    def shipped(self) -> int | None:
        """Tokens, by the session's own counter, that the last prompt might take; None before the first prompt."""
        with self.lock:
            return self._kernel.ledger.stats.room or None

    @property
    def turn(self) -> int:
        """Number of the message that was admitted last; 0 before the first."""
        return self._kernel.window.turn

    @contextmanager
    def _current(self) -> Iterator[Kernel]:
        """The kernel, locked and up to date with the ledger.

        Raises:
            StoreStale: another writer went on while changes here are not written.
        """
        with self.lock:
            self.refresh()
            yield self._kernel

    def knows(self, info: SegmentInfo) -> bool:
        """Whether memory has the state in which the store says that it has this session: it begins with the same ledger."""
        return self._kernel.pending.follows(info)

    def refresh(self) -> bool:
        """Read what other writers have done; every read here begins with this. Returns whether they did anything.

        Raises:
            StoreStale: another writer went on while changes here are not written.
        """
        with self.lock:
            self._kernel.check_free()
            found = self._kernel.refresh()
            if found:
                self._renewed()
            return found

    def _renewed(self) -> None:
        """Drop what memory holds of the old state, after everything was read again."""
        self._prompts.clear()
        if not self.readonly:
            try:
                # The other writer's window may be larger.
                self._planner.reopen()
            except KilburnError as error:
                # Reading works even if nothing can be written; a prompt is made to fit when it is rendered.
                log.info("session %s: %s", self.name, error)

    def append(
        self,
        *messages: Any,
        time: float | None = None,
        instead_of: Iterable[int] = (),
        said: Digests | None = None,
        after: int | None = None,
    ) -> str:
        """Admit messages: OpenAI-style or Anthropic-style dicts, or `Message`s.

        When it returns, they are admitted and durable. When it raises, whatever it raises, none of them was admitted,
        and trying again admits them once. While a policy asks a model, everyone else sees the session as it was
        before. (After a Ctrl-C during the commit itself, an error of the disk during its last sync, or a database that does not
        answer any more, the messages may be admitted. After the second and the third, trying again raises `StoreStale`.)

        Args:
            time: when they were said, in seconds since the epoch, for conversations of the past; None for now.
            instead_of: pages that are taken back with this, in the same transaction; see `take_back`.
            said: digests that the store keeps with them: see `kilburn.backend.Batch`.
            after: the number of the message that they must follow, 0 for none; None for whichever is the last.

        Returns:
            The address of the new pages: `p17`, or a range `p17-p19` if there are several parts.

        Raises:
            WireError: not a valid message here. Forgotten: a page elsewhere that one of them cites is forgotten, or is being
            forgotten. PinsExceedWindow: pins leave no room. StoreStale: another message is the last one by now. StoreError.
        """
        return run(self._append(messages, time, tuple(instead_of), said, after), self._answer)

    async def aappend(self, *messages: Any, time: float | None = None) -> str:
        """`append` for async callers: a model that a policy asks runs in a worker thread.

        If the call is cancelled, nothing was admitted.
        """
        return await arun(self._append(messages, time), self._answer)

    def _append(
        self,
        messages: tuple[Any, ...],
        time: float | None,
        instead_of: tuple[int, ...] = (),
        said: Digests | None = None,
        after: int | None = None,
    ) -> Generator[Ask, Answer, str]:
        parsed = [message for value in messages for message in parse(value)]
        if not parsed:
            raise KernelError("append without a message", advice="give at least one message")

        def admit() -> tuple[int, ...]:
            # The commit makes sure that the store has no more than is known here.
            if after is not None and after != self.turn:
                raise self._kernel.overtaken()
            if instead_of:
                self._kernel.take_back(instead_of)
            first, last = self._kernel.take_in(parsed, time)
            self._kernel.pending.said = said
            return tuple(range(first, last + 1))

        admitted = yield from self._settling(admit, Cause.ADMIT)
        return span_of(admitted[0], admitted[-1])

    def take_back(self, pages: Iterable[int]) -> None:
        """Retire pages, pinned or not: no prompt shows them and no search finds them; they stay readable by their address.
        Those that are gone already are passed over. A call that waits for its result gets one that says so, and both go."""
        with self._kernel.batch():
            self._kernel.take_back(pages)
            self._planner.enforce(eases=True)

    def idle(self) -> None:
        """Tell the policy that the caller has time: a good moment for work that may wait."""
        run(self._settling(tuple, Cause.IDLE), self._answer)

    def compact(self, policy: Policy, name: str, model: Model | None = None) -> list[Event]:
        """Ask another policy once, now, to make room.

        Args:
            name: the policy's name in the ledger.
            model: answers its questions; None for no model.

        Returns:
            The events in the ledger: its moves, and last `COMPACT` with the outcome. Empty if there was nothing to
                do.
        """
        before = self._kernel.pending.next - 1
        run(self._settling(tuple, Cause.IDLE, planner=Planner(self._kernel, policy, name)), answerer(model))
        return [event for event in self.events(before) if event.policy == name]

    @contextmanager
    def batch(self) -> Iterator[Kernel]:
        """Several changes as one transaction, by the kernel's own verbs: all are written at the end, or none.

        No policy is asked, and the window is not brought within its budget: the caller has to do that.

        Raises:
            KernelError: within another change.
        """
        with self._kernel.batch():
            yield self._kernel

    def _settling(
        self,
        change: Callable[[], tuple[int, ...]],
        cause: Cause,
        *,
        planner: Planner | None = None,
        waits: bool = True,
        eases: bool = False,
    ) -> Generator[Ask, Answer, tuple[int, ...]]:
        """One batch: a change, then the policy's moves; `change` says which pages it is about."""
        kernel, planner = self._kernel, planner or self._planner
        with kernel.lock:
            kernel.check_free()
            try:
                kernel.begin()
                if cause is not Cause.ADMIT:
                    # Where nothing is written in the end, no commit finds out.
                    kernel.check_current()
                wanted = yield from planner.settle(cause, change, waits=waits, eases=eases)
                kernel.flush()
                kernel.end()
            except BaseException as error:
                kernel.fail(error)
                planner.background.undo()
                if isinstance(error, KilburnError) and not isinstance(error, StoreUnavailable):
                    # What is wrong in a state that is old by now may be right in the current one.
                    kernel.check_current()
                raise
            planner.background.commit()
        return wanted

    def decide_by(self, policy: Policy, name: str) -> None:
        """Let another policy decide at this window from now on, until the session is opened again.

        Args:
            name: its name in the ledger.
        """
        with self._kernel.lock:
            self._kernel.check_free()
            self._planner.abandon()
            self._planner = Planner(self._kernel, policy, name, self._answer)

    def release(self) -> None:
        """Write what waits, and keep this session in memory no longer than its callers do."""
        self._home.release(self.name)

    def flush(self) -> bool:
        """Write the observations that wait, if that is possible at once and this is no moment within a change; whether that
        worked."""
        with self.lock:
            return self._kernel.flush_observed()

    def close(self) -> None:
        """Give up a question that a model is still answering, and write what waits; called when the store closes, or
        releases the session."""
        if self.readonly:
            return
        # Another thread may be in the middle of a change, which is its own to write.
        with self.lock:
            self._planner.abandon()
            if self._kernel.stale or not self.number:
                return
            try:
                self._kernel.flush(closing=True)
            except StoreStale:
                # Another writer continued this session; only observations are left here.
                self._kernel.undo()
            except StoreError as error:
                # Reading a session must not fail because the reading cannot be recorded.
                if count := len(self._waiting()):
                    what = f"{count} observations of session {self.name!r} are not in its ledger: {error.what}"
                    warnings.warn(what, stacklevel=4)

    def resize(self, budget: Budget) -> None:
        """Give this session another budget from now on; pages that no longer fit leave.

        Raises:
            PinsExceedWindow: the pins do not fit; the old budget stays. Where they did not fit it either, the new one is taken.
        """
        over = self.excess > 0

        def change() -> tuple[int, ...]:
            self._kernel.rebudget(budget)
            if not over:
                self._kernel.check_pins()
            return ()

        run(self._settling(change, Cause.PRESSURE, eases=over), self._answer)

    def count_for(self, model: str) -> None:
        """Count by the tokenizer of the model that a prompt is for; the pages are counted again if it is another one. A store
        that was opened with a tokenizer of its own, or with a model, counts by that: then nothing happens.

        Args:
            model: as a request names it.

        Raises:
            StoreError: the session cannot be read.
        """
        with self.lock:
            counter = self._home.counter_of(model)
            if counter is None or counts_alike(counter, self.counter):
                return
            self.refresh()
            self._set_counter(counter)
            self._renewed()

    def price_attachments_for(self, model: str) -> None:
        """Price the attachments that are appended from now on by the rules of the model that a prompt is for; text is counted as
        before. A store that was opened with a tokenizer of its own, or with a model, prices them by that.

        Args:
            model: as a request names it.
        """
        with self.lock:
            named = self._home.counter_of(model)
            family = getattr(named, "family", "")
            if named is not None and family != getattr(self.counter, "family", ""):
                self.counter = repriced(self.counter, family=family)
                self._kernel.set_counter(self.counter)

    def _set_counter(self, counter: Counter) -> None:
        self._kernel.count_by(counter)
        self.counter = counter
        self.decide_by(self._planner.policy, self._planner.name)

    def observe(self, usage: Tokens, counted: int) -> bool:
        """Report what a provider says that a prompt cost, which was counted here as `counted` tokens.

        If our count was too low, the window shrinks accordingly, at once, without asking a model. Impossible numbers
        change nothing; the ledger records that they came.

        Returns:
            Whether the numbers are plausible.
        """
        kernel = self._kernel
        with kernel.lock:
            if not (is_count(counted) and usage.sound and is_plausible(counted, usage.prompt)):
                kernel.observe(Act.NOTE, why="a provider's count of a prompt cannot be true")
                return False
            kernel.settle_ruler()
            kernel.observe(Act.USAGE, counted=counted, prompt=usage.prompt, cached=usage.cached, reply=usage.reply)
            if kernel.excess:
                run(self._settling(tuple, Cause.PRESSURE, waits=False), self._answer)
            return True

    def render(self, format: str = "chat", *, request: Mapping[str, str] | None = None) -> Prompt:
        """The prompt: what is in the window, as messages for OpenAI ("chat") or Anthropic ("messages").

        A list of dicts; for "messages" the system prompt is in `.system`. "responses" is "chat" with a message for each item of
        OpenAI's responses. It never exceeds the window, and between
        edits it grows only at its end.

        Args:
            request: ids of what the prompt is for, by names of yours; the ledger keeps them with it, and
                `kilburn window shipped ID` finds it by any of them.

        Raises:
            PinsExceedWindow: the session was written with a larger window, and its pins exceed this one.
        """
        with self._current() as kernel:
            asked = _asked(request)
            if not kernel.excess:
                return self._prompts.render(format, asked)
            # The session has a larger window, and nothing may be written: it is made to fit in memory, and this is
            # undone.
            with kernel.batch(undone=True):
                self._planner.enforce()
                return self._prompts.render_once(format, asked)

    def render_from(
        self,
        turn: int,
        messages: Sequence[Message] = (),
        format: str = "chat",
        *,
        request: Mapping[str, str] | None = None,
    ) -> Prompt:
        """The prompt as it was after a turn, with these messages behind it, and without what came since: what has left the window
        by now is in it, and what is forgotten or retired by now is not. Nothing is appended or moved, and no policy is asked.

        Raises:
            What `append` raises.
        """
        with kernel_of(self, turn, messages) as then:
            then.unsigned_to = self._kernel.unsigned_to
            return Prompts(then).render(format, _asked(request) | {"turn": turn})

    def leave_out_reasoning(self) -> bool:
        """Leave out of prompts, from now on, the reasoning and the signatures of what was said so far: the provider, or another
        model, refuses them. What is said later keeps its own. A session that is opened again begins anew.

        Returns:
            Whether prompts had any that was not left out yet.
        """
        with self.lock:
            kernel = self._kernel
            before, kernel.unsigned_to = kernel.unsigned_to, kernel.window.last
            return any(page.role is Role.ASSISTANT and page.id > before and page.extra for page in kernel.window.visible())

    async def arender(self, format: str = "chat") -> Prompt:
        """`render` for async callers, in a worker thread."""
        return await aside(partial(self.render, format))

    def sent_whole(self, *, request: Mapping[str, str] | None = None) -> None:
        """Record that everything appended so far was sent to a model as it came, where nothing has left the window: a prompt
        that need not be rendered. If the store was opened for reading, nothing happens. `request` is that of `render`."""
        with self.lock:
            if not self.readonly:
                self._prompts.sent_whole(_asked(request))

    def _located(self, address: str) -> tuple[Session, str]:
        if not (isinstance(address, str) and "/" in address):
            return self, address
        path, _, rest = address.strip().rpartition("/")
        return self.branches.open(path), rest

    def _read(self, address: str) -> tuple[Sequence[Page], Sequence[str], list[int]]:
        kernel, window = self._kernel, self.window
        numbers = kernel.resolve(address)
        window.pages.fetch(numbers)
        pages = [window.pages[number] for number in numbers]
        kernel.contents.fetch(page.digest for page in pages)
        return pages, [kernel.text_of(page) for page in pages], [page for page in numbers if window.at(page) != Place.IN]

    def owner(self, page: int) -> int:
        """The number of the session in which a page was made: a branch inherits pages. `cites` takes both numbers."""
        return self._kernel.lineage.owner(page)

    def resolve(self, address: str) -> list[int]:
        """The ids of the pages that an address names, those that were retired included.

        Raises:
            UnknownAddress: not an address, or beyond the last page. Forgotten: all of it was forgotten.
        """
        with self.lock:
            return self._kernel.resolve(address)

    def fetch(self, pages: Iterable[Page]) -> None:
        """Cache the texts of pages in one read of the store; forgotten pages have none."""
        with self.lock:
            self._kernel.contents.fetch(digest for page in pages for digest in (page.digest, page.extra))

    def text(self, page: int) -> str:
        """The exact text of a page, by its id. Unlike `recall` it records nothing.

        Raises:
            UnknownAddress, Forgotten, StoreCorrupt.
        """
        with self.lock:
            return self._kernel.text(page)

    def part(self, page: Page) -> tuple[Part, str | None]:
        """The message part that a page came from; with the first part, also the leftovers of its message.

        Raises:
            StoreCorrupt.
        """
        contents = self._kernel.contents
        with self.lock:
            return part_of(page, contents.get(page.digest), contents.get(page.extra))

    def shown(self) -> list[Item]:
        """Everything in the prompt, in order: pages, and handles."""
        with self.lock:
            return items(self.window)

    def search(
        self,
        query: str,
        tokens: int = 1000,
        limit: int = 20,
        *,
        record: bool = True,
        unseen: bool = False,
        among: Sequence[SegmentInfo] | None = None,
    ) -> list[Found]:
        """Passages of this session and its branches that match a query, best first, within a token budget.

        Args:
            record: whether it is recorded in the ledger; a measurement must not change what policies see.
            unseen: whether pages that this window shows come last: their reader has them already.
            among: segments of the tenant to search instead; None for this one and its branches.
        """
        with self._current() as kernel:
            return found_in(self, kernel, query, tokens, limit, record=record, unseen=unseen, among=among)

    async def asearch(
        self,
        query: str,
        tokens: int = 1000,
        limit: int = 20,
        *,
        record: bool = True,
        unseen: bool = False,
        among: Sequence[SegmentInfo] | None = None,
    ) -> list[Found]:
        """`search` for async callers, in a worker thread."""
        return await aside(partial(self.search, query, tokens, limit, record=record, unseen=unseen, among=among))

    def _mark(self, act: Act, address: str, **data: Any) -> None:
        def change() -> tuple[int, ...]:
            pages = self._kernel.resolve(address)
            if act is Act.PIN:
                self._planner.load(pages)
            self._kernel.mark(act, pages, **data)
            return tuple(pages)

        run(self._settling(change, Cause.ADVICE, eases=act is not Act.PIN), self._answer)

    def view(self, cause: Cause = Cause.IDLE, wanted: tuple[int, ...] = ()) -> View:
        """The view that a policy at the window would get now: frozen, and valid until the next change."""
        with self._kernel.lock:
            return self._planner.view(cause, wanted)

    def apply(self, *moves: Move) -> list[str]:
        """Carry out moves as a policy would, all or none; returns the addresses of derived pages.

        Raises:
            LawBroken, KernelError: a move is illegal; nothing changed.
        """
        with self._kernel.batch():
            made = [self._kernel.carry(move) for move in moves]
            self._planner.enforce()
        return [address_of(page) for page in made if page is not None]

    def forgettable(self, address: str) -> dict[int, list[int]]:
        """The pages that an address names, for `forget`: the number of the session that has them, this one or a branch of it
        -> their ids. What is forgotten there is among them: if an earlier forgetting broke off, others may still have it.

        Raises:
            UnknownAddress. Forgotten: all of it was forgotten, everywhere.
        """
        whose, address = self._located(address)
        if whose is not self:
            return whose.forgettable(address)
        with self._current() as kernel:
            first, last = parse_address(address)
            try:
                kernel.resolve(address)
            except Forgotten:
                if not closure(self._home, {self.number: range(first, last + 1)}):
                    raise
            # Only now: an address may name more pages than memory can list.
            return {self.number: list(range(first, last + 1))}

    def made_from(self, pages: Iterable[int]) -> list[int]:
        """These pages and all that were derived or recalled from them here, without those that are forgotten.

        Raises:
            UnknownAddress: there is no such page.
        """
        with self._current() as kernel:
            pages = list(pages)
            for page in pages:
                if page not in kernel.window.states:
                    raise UnknownAddress(f"{self.name} has no page {page}"[:200], advice="give numbers of its pages")
            there = [page for page in pages if kernel.window.at(page) != Place.DROPPED]
            return kernel.closure(there) if there else []

    def alone(self, beside: Iterable[int] = ()) -> AbstractContextManager[None]:
        """See `Segment`."""
        return self._kernel.alone(beside)

    def drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        """Forget pages of this session alone; `forget` reaches what other segments made from them first, and calls the `erasers`.

        Returns:
            The pages that are gone by this.

        Raises:
            UnknownAddress: there is no such page.
            StoreStale: a page of another segment still cites one of them.
        """
        gone = list[int]()
        with self.lock:
            for left in reversed(range(FREE + 1)):
                try:
                    with nullcontext() if left else self.alone():
                        gone = self.made_from(pages)
                        if not gone:
                            return []
                        with self._kernel.batch():
                            self._kernel.carry(Drop(pages=tuple(gone), why=why), closed=True)
                            self._planner.enforce(eases=True)
                    break
                except StoreStale:
                    # If nobody has written here, one of them is cited.
                    if not left or not self.refresh():
                        raise
            self._kernel.forget_texts(gone)
            self._prompts.forget(gone)
        return gone

    def erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        """Call the `erasers` with pages that are gone, all of them; returns what they raised, which is logged too: a forgetting
        that breaks off after that raises something else."""
        failed = list[Exception]()
        for place, erase in list(self.erasers.items()) if pages else ():
            try:
                erase(pages)
            except Exception as error:  # noqa: BLE001 -- whatever a program has registered; it is raised when all is forgotten
                log.warning("session %s: what was forgotten could not be erased in %s: %s", self.name, place, error)
                failed.append(error)
        return failed

    @property
    def figures(self) -> Stats:
        """The ledger's figures without what waits to be written: nothing is read or written for their sake."""
        return self._kernel.ledger.report(use=self.use)

    def stats(self) -> Stats:
        """The ledger's figures; a hit rate under 60% also raises a `HitRateWarning`, once.

        Observations that cannot be written yet (a full disk, another writer) are counted once they are written.
        """
        with self._current():
            self.flush()
            stats = self.figures
        low = next((warning for warning in stats.warnings if warning.startswith("hit rate")), None)
        if low is not None and not self._warned:
            self._warned = True
            warnings.warn(low, HitRateWarning, stacklevel=2)
        return stats

    def pages(self) -> list[tuple[Page, State]]:
        """All pages with where they are, as this session last saw them: originals in order, then derived ones."""
        with self._kernel.lock:
            pages, states = self.window.pages, self.window.states
            return [(pages[page], states[page]) for page in sorted(pages, key=lambda page: (page < 0, abs(page)))]

    def _observe(self, act: Act, pages: Sequence[int], *, policy: str, cause: str, why: str, **data: Unpack[Data]) -> None:
        self._kernel.observe(act, pages, policy=policy, cause=cause, why=why, **data)

    def _waiting(self) -> Sequence[Event]:
        return self._kernel.pending.events

    def fork(
        self, prompt: str, *, inherit: Inherit | str = Inherit.HISTORY, call: str | None = None, system: str = ""
    ) -> Session:
        """Begin a branch: another session, `NAME/b1`, that sees what this one sees, and goes its own way from there.

        No page is copied. The branch has this session's pages under the same addresses; from here its own pages are
        `b1/p17`. The prompt is pinned in it.

        Args:
            prompt: what the branch is to do; its first own message, in the user's role.
            inherit: "history", or only the "task" (the system messages and the user's latest request), or "nothing".
            call: the id of the open call here that the branch answers. The prompt is then the model's own words.
            system: a system message before all others; not beside the history, which has its own.

        Returns:
            The branch. `exit` returns from it; `branches.open` finds it again.

        Raises:
            SpecError: nothing that can be inherited has this name.
            KernelError: the call has a result already. Nothing was forked then.
            PinsExceedWindow, StoreError: nothing was forked.
        """
        if inherit not in [*Inherit] or (system and inherit == Inherit.HISTORY):
            what = f"inherit={inherit!r}" + (" with a system message" if system else "")
            raise SpecError(what[:200], advice=f"use one of {', '.join(Inherit)}; the history has its own system message")
        for _ in range(TRIES - 1):
            # Another program may go on with this session meanwhile.
            with suppress(StoreStale):
                return self.branches._begin(prompt, Inherit(inherit), call, system)
        return self.branches._begin(prompt, Inherit(inherit), call, system)

    def exit(self, text: str) -> str:
        """Return from this branch: its result becomes a message of the parent, in one transaction.

        Returns:
            The address of the result in the parent. The branch's pages stay, and are `b1/p17` from there.

        Raises:
            KernelError: this session is no branch, its parent was forgotten, or it has returned already.
            WireError: the parent's call has a result, or was forgotten. StoreError.
        """
        parent, _ = self.branches._above()
        with parent.lock:
            address = parent.append(self.branches.returning(text))
        self.release()
        return address

    def receipts(self) -> list[Receipt]:
        """What each compaction took out of the window, why, by which policy, and how to get it back; oldest first."""
        return list(receipts(self.events()))

    def preview(self, tokens: int = 0, by: Policy | None = None, *, capacity: int | None = None) -> Preview:
        """What would leave the window if a message of so many tokens came now, and at which price. Nothing changes, nothing is
        recorded, and no model is asked.

        Args:
            by: a policy that is asked once, now, in place of the session's own: what `compact` would do with it.
            capacity: tokens that the pages of a prompt may take, by this session's count, as `shipped` has it; None for those
                of the session's budget, corrected by what providers reported.

        Raises:
            PinsExceedWindow: pins leave no room for that. InvalidBudget: the window never has such room.
        """
        with self._current() as kernel:
            pending, capacity = kernel.pending, kernel.capacity if capacity is None else capacity
            if tokens >= capacity:
                raise InvalidBudget(f"{tokens:,} tokens never fit a window of {capacity:,}", advice="ask about fewer")
            before, waiting = snapshot(self.window), len(pending.events)
            planner = Planner(kernel, by or self._planner.policy, self._planner.name if by is None else type(by).__name__.lower())
            asked = 0

            def count(ask: Ask) -> Answer:
                nonlocal asked
                asked += 1
                return Answer(outcome=Outcome.NO_MODEL)

            try:
                with kernel.batch(undone=True):
                    kernel.assumed = capacity - tokens
                    run(planner.settle(Cause.PRESSURE if by is None else Cause.IDLE, tuple), count)
                    found = list(receipts(pending.events[waiting:], before.use))
                    changed = difference(before, snapshot(self.window))
            finally:
                kernel.assumed = None
                # What is undone stays as an observation; here nothing was to be seen.
                del pending.events[waiting:]
        return Preview(
            receipts=tuple(msgspec.structs.replace(receipt, folds=(), brought=()) for receipt in found),
            use=changed.before, after=changed.after, capacity=capacity, again=changed.after - changed.kept, asks=asked,
        )  # fmt: skip

    def evict(self, address: str, why: str = "") -> list[str]:
        """Let pages go out of the window by hand, with the calls and results that belong to them; returns the addresses of what
        left. They stay in the store, and in the prompt a line names them.

        Raises:
            UnknownAddress, Forgotten. KernelError: none of them is in the window. LawBroken: one is pinned, is the user's latest
                message, or waits for its result.
        """
        with self._current() as kernel:
            window = self.window
            named = [standing for page in kernel.resolve(address) if (standing := window.stands(page)) is not None]
            going = {member for page in named for member in window.group(page) if window.at(member) == Place.IN}
            if not going:
                raise KernelError(f"{address} is not in the window", advice="see `kilburn show` for what is")
            with kernel.batch():
                kernel.carry(Evict(pages=tuple(sorted(going)), why=why or "let go by hand"))
                self._planner.enforce(eases=True)
        return list(ranges(going))

    def undo(self, tokens: int | None = None, *, dry: bool = False) -> Receipt:
        """Take the newest compaction back, or another change of what is in the window: every page is where it was before, and
        what was put there leaves. Again, and the one before is taken back. What was forgotten or retired since stays gone.

        The policy may take the same pages out when it makes room the next time; pin those that are to stay.

        Args:
            tokens: that the prompt may take then; None for the capacity of the window.
            dry: whether nothing is changed: it returns or raises what `undo` would.

        Returns:
            The receipt of what was taken back.

        Raises:
            KernelError: there is nothing to take back. LawBroken: it does not fit the window, or a page that would leave is
                pinned; nothing changed.
        """
        with self._current() as kernel:
            receipt, moved, since = newest_moves(list(self.events()))
            if receipt is None:
                raise KernelError(f"no compaction of {self.name!r} to take back", advice="see its receipts for what left when")
            before = rebuild(self.backend, self.info, self.counter, until=receipt.events[0] - 1).window
            with kernel.batch(undone=dry):
                kernel.undo_moves(before, moved, since, receipt.events[1])
                over = kernel.use - (kernel.capacity if tokens is None else tokens)
                if over > 0:
                    was = f"what was there before the change at turn {receipt.turn}"
                    raise LawBroken(
                        2, f"{was} takes {over:,} tokens more than the window has",
                        advice="recall or pin single pages, or open a larger window",
                    )  # fmt: skip
        return receipt

    def difference(self, turn: int, until: int | None = None) -> Difference:
        """How the prompt after a turn differs from the one after an earlier turn.

        Args:
            turn: number of the last message before the earlier prompt.
            until: the same of the later one; None for the prompt as it is now.

        Raises:
            UnknownAddress: no such turn.
        """
        with self._current():
            later = self.window if until is None else self._as_of(until)
            return difference(snapshot(self._as_of(turn)), snapshot(later))

    def _as_of(self, turn: int) -> WindowState:
        """The window as it was after a turn, just before the next message came."""
        if not 0 <= turn <= self.turn:
            raise UnknownAddress(f"{self.name} has no turn {turn}", advice=f"its last is {self.turn}")
        if turn == self.turn:
            return self.window
        last = self._last_of(turn)
        if not last and (parent := self.branches.parent) is not None:
            # It was before the branch.
            return parent._as_of(turn)
        return rebuild(self.backend, self.info, self.counter, until=last).window

    def _last_of(self, turn: int) -> int:
        """The number of the last event before the message after a turn, or 0."""
        self.flush()
        return last_of(self.backend, self.number, turn, self.head)

    def messages(self) -> list[dict[str, Any]]:
        """The whole transcript as it was appended, exactly.

        Forgotten pages are missing. The rest of a message with forgotten pages is in the chat form.
        """
        return dump(self.originals())

    def originals(self, gone: str | None = None) -> list[Message]:
        """The whole transcript as messages with their sources, as `append` takes them; see `messages`.

        Args:
            gone: stands in the place of each page that is forgotten; None leaves these out.
        """
        made: dict[int, Message] = {}
        with self._current() as kernel:
            window = kernel.window
            kept = window.pages.originals()
            if gone is None:
                kept = [page for page in kept if window.at(page.id) != Place.DROPPED]
            for at, page in enumerate(kept):
                if at % READ == 0:
                    self.fetch(kept[at : at + READ])
                if gone is not None and window.at(page.id) == Place.DROPPED:
                    call = window.pages[page.answers].call if page.answers else None
                    part, leftovers = Part(kind=page.kind, text=gone, call=call), None
                else:
                    part, leftovers = self.part(page)
                known = made.get(page.message)
                if known is None:
                    made[page.message] = Message(
                        role=page.role, parts=(part,), extra=leftovers, sources=page.sources, cites=page.cites
                    )
                else:
                    made[page.message] = msgspec.structs.replace(known, parts=(*known.parts, part))
            damaged = {page.message for page in window.pages.originals() if window.at(page.id) == Place.DROPPED}
        return list(_without_form(made, damaged).values() if damaged else made.values())


@checked
class Branches:
    """The branches of a session, and the session that it is itself a branch of.

    It holds the session, and not the other way, so that a session is freed as soon as nobody has it.
    """

    def __init__(self, session: Session) -> None:
        self._session = session

    def origin(self) -> Data:
        """Where a session is from, if it was made of another one: what its ledger says of it before its first page.

        `forked` is the number of that session's session, `known` the last page here that the other one has too.
        """
        return origin_in(self._session.backend.events(self._session.number, 0))

    @property
    def forked(self) -> Fork | None:
        """Where this branch forked from; None if this session is no branch."""
        known, number = self._session._known, self._session.number
        fork = known.get(number) or fork_of(self.origin())
        if fork is not None:
            known[number] = fork
        return fork

    @property
    def parent(self) -> Session | None:
        """The session that this branch forked from; None if this session is no branch.

        Raises:
            KernelError: it was forgotten.
        """
        name, fork = self._session.name, self.forked
        if fork is None:
            return None
        found = self._named(name.rpartition("/")[0])
        if found is None or found.number != fork.forked:
            raise KernelError(f"the session that {name!r} forked from is gone", advice="nothing can be returned to it")
        return found

    def open(self, path: str) -> Session:
        """A branch of this session by its name from here, such as `b1`, or `b1/b2` for a branch of that.

        Raises:
            UnknownAddress: there is none.
        """
        found = self._session
        for name in path.split("/"):
            below = self._named(f"{found.name}/{name}") if name.startswith(BRANCH) else None
            fork = below.branches.forked if below is not None else None
            if below is None or fork is None or fork.forked != found.number:
                raise UnknownAddress(f"there is no branch {path[:80]!r} here", advice="see `branches.children()`")
            found = below
        return found

    def children(self) -> list[tuple[SegmentInfo, Fork]]:
        """The branches that forked from this session, oldest first; none of them is opened."""
        return branches_in(self._session.backend, self._session.info, self._session._known, below=False)

    def below(self) -> list[SegmentInfo]:
        """The branches, their branches, and so on; none of them is opened."""
        return [info for info, _ in branches_in(self._session.backend, self._session.info, self._session._known)]

    def returned(self) -> str | None:
        """The address in the parent of what this branch returned; None before.

        Raises:
            KernelError: this session is no branch, or its parent was forgotten.
        """
        parent, fork = self._above()
        parent.refresh()
        # The return cites all of them, and what lost one is forgotten.
        citing = self._session.backend.citing(self._session.number, self._own(fork)[:1])
        pages = parent.window.pages
        found = [page for number, page in citing if number == fork.forked and page in pages and is_return(pages[page], fork)]
        return address_of(found[0]) if found else None

    def returning(self, text: str) -> Message:
        """The message with which this branch returns: a result of the call that it answers, or else a user's message of the
        trust of what it was made from. It cites all pages of the branch; so it can be opened again, and is forgotten with
        them.

        Raises:
            KernelError: this session is no branch, its parent was forgotten, or it has returned already.
        """
        parent, fork = self._above()
        known = self.returned()
        if known is not None:
            raise KernelError(f"{self._session.name!r} has returned already, at {known}", advice="fork again")
        own, number = self._own(fork), self._session.number
        name = self._session.name.rpartition("/")[2]
        told = f"{text}\n[{name}: {name}/{span_of(own[0], own[-1])}]" if own else text
        cites = tuple((number, page) for page in own)
        if fork.call:
            call = parent.window.pages[fork.call].call
            return Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text=told, call=call),), cites=cites)
        return Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=told),), trust=Trust.AGENT, cites=cites)

    def catch_up(self) -> None:
        """Forget what this branch inherited and was forgotten above it by a program that did not know of the branch."""
        window = self._session.window
        if lost := [page for page in self._gone_above() if window.at(page) is not Place.DROPPED]:
            # What it returned of them stands in the way until `finish`.
            with suppress(StoreError):
                self._session.erase_elsewhere(self._session.drop(lost, "forgotten where it was inherited from"))

    def finish(self) -> None:
        """Finish forgetting what this branch inherited, where that broke off: it is forgotten here and not above, or above
        and not here. What was made from it goes too, in any segment."""
        session = self._session
        with session.lock:
            window, owns = session.window, session._kernel.lineage.owns
            here = {page for page in window.gone if window.at(page) is Place.DROPPED and not owns(page)}
            begun = sorted(here ^ self._gone_above())
        if begun:
            try:
                forget(session._home, {session.number: begun}, "the rest of a forgetting that broke off")
            except KilburnError as error:
                # The next time it is opened, or asked to forget them, goes on.
                log.warning("session %s: forgetting broke off and could not be finished: %s", session.name, error)

    def _gone_above(self) -> set[int]:
        """The pages that this branch inherited and that are forgotten where they were made."""
        lineage = self._session._kernel.lineage
        owners = [share.segment for share in lineage.shares]
        return {page for owner in owners for page in self._session.backend.forgotten(owner) if lineage.owner(page) == owner}

    def _above(self) -> tuple[Session, Fork]:
        fork, parent = self.forked, self.parent
        if fork is None or parent is None:
            raise KernelError(f"{self._session.name!r} is no branch", advice="fork it from a session")
        return parent, fork

    def _own(self, fork: Fork) -> list[int]:
        """The originals of this branch itself, without those that are forgotten."""
        with self._session._current() as kernel:
            window = kernel.window
            return [page for page in range(fork.known + 1, window.last + 1) if window.at(page) is not Place.DROPPED]

    def _named(self, name: str) -> Session | None:
        """The session of that name, or None."""
        home = self._session._home
        return home.session(name) if home.backend.segment(name, time=0.0, create=False) is not None else None

    def _prepare(self, name: str, turn: int, continues: Sequence[int] = ()) -> Session:
        """Prepare a branch that goes on from what this session was after a turn. It is in the store once something was appended,
        and has nothing to return.

        Args:
            name: of the branch, which nobody has yet.
            continues: numbers of the sessions that both go on from; the ledger keeps them.

        Raises:
            StoreError: nothing was forked.
        """
        session = self._session
        with session.lock:
            at = session._last_of(turn)
            then = session._kernel.as_of(at)
            window = then.window
            child = session._home._prepare(name, session.user)
            if child.number:
                raise session._kernel.overtaken()
            if child.counter is not session.counter:
                child._set_counter(session.counter)
            fork = Fork(forked=session.number, inherit=Inherit.HISTORY, at=at, known=window.last, derived=window.last_derived)
            child._kernel.fork(then, fork, session.head, branch="goes on", continues=list(continues))
            return child

    def _begin(self, prompt: str, inherit: Inherit, call: str | None, system: str) -> Session:
        """Begin a branch; see `Session.fork`."""
        session = self._session
        with session._current() as kernel:
            session._check_writable()
            window = kernel.window
            # Where nothing is left the branch does not lean on a ledger that is about to go, too.
            whole = inherit is Inherit.HISTORY and any(state.at is not Place.DROPPED for state in window.states.values())
            asked = window.calls.get(call or "", 0)
            if call is not None and asked not in window.open:
                raise KernelError(f"no call {call!r} waits for a result here", advice="fork before the call has its result")
            if any(event.act is not Act.SHIP for event in kernel.pending.events) or kernel.is_long:
                kernel.flush(closing=kernel.is_long)
            fork = Fork(
                forked=session.number,
                inherit=inherit,
                at=kernel.pending.head if whole else 0,
                known=window.last if whole else 0,
                derived=window.last_derived if whole else 0,
                call=asked,
            )
            first = [Message(role=Role.SYSTEM, parts=(Part(kind=Kind.TEXT, text=system),))] if system else []
            said = [*first, *self._first_of(fork, prompt)]

            def write(child: Session) -> None:
                if child.counter is not session.counter:
                    child._set_counter(session.counter)
                # The branch is created by the transaction that writes its first messages.
                child._kernel.fork(kernel, fork)
                run(child._settling(partial(child.branches._admit, said), Cause.ADMIT), child._answer)

            child = None
            while child is None:
                # Of the names that are taken the next one is tried, however many there are.
                child = session._home._begin(f"{session.name}/{BRANCH}{session._forks + 1}", session.user, write)
                session._forks += 1
            return child

    def _first_of(self, fork: Fork, prompt: str) -> list[Message]:
        """The first own messages of a branch."""
        kernel, said = self._session._kernel, list[Message]()
        window, owner = kernel.window, kernel.lineage.owner
        if fork.at:
            for number in window.waiting():
                text = "[you are in the branch now]" if number == fork.call else "[this is done in another place]"
                result = Part(kind=Kind.RESULT, text=text, call=window.pages[number].call)
                said.append(Message(role=Role.TOOL, parts=(result,)))
        elif fork.inherit is Inherit.TASK:
            # Of a long one an excerpt may be in its place.
            shown = [page for page in window.resident() if page.role is Role.SYSTEM and page.message]
            systems = [page.id if page.id > 0 else page.sources[0] for page in shown]
            for number in (*systems, *window.request):
                page = window.pages[number]
                if window.at(number) not in GONE:
                    part = Part(kind=Kind.TEXT, text=kernel.text(number))
                    said.append(Message(role=page.role, parts=(part,), cites=((owner(number), number),)))
        sources = (fork.call,) if fork.call and fork.at else ()
        cites = ((owner(fork.call), fork.call),) if fork.call and not fork.at else ()
        return [*said, Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=prompt),), sources=sources, cites=cites)]

    def _admit(self, said: Sequence[Message]) -> tuple[int, ...]:
        """Admit the first messages of this branch; of these what it is to do is pinned."""
        kernel = self._session._kernel
        first, last = kernel.take_in(said)
        if kernel.window.cost(last) <= kernel.capacity // 4:
            kernel.mark(Act.PIN, [last], why="what the branch is to do")
        return tuple(range(first, last + 1))


@contextmanager
def kernel_of(session: Session, turn: int | None = None, messages: Sequence[Message] = ()) -> Iterator[Kernel]:
    """The kernel of a session, locked and up to date; or as it was after a turn, with these messages behind it, and without what
    is forgotten or retired by now. That one is to be looked at: of what happens in the block only observations are kept.

    Raises:
        StoreStale: another writer went on while changes here are not written. Of a turn, also what `append` raises.
    """
    with session._current() as kernel:
        if turn is None:
            yield kernel
            return
        then = kernel.as_of(session._last_of(turn))
        with then.batch(undone=True):
            then.leave_out(session.window)
            if messages:
                then.take_in([_said_then(message, then.window, session.window) for message in messages])
            Planner(then, session._planner.policy, session._planner.name).enforce()
            yield then
        kernel.take_over(then.pending.events)


def found_in(
    session: Session,
    kernel: Kernel,
    query: str,
    tokens: int,
    limit: int,
    *,
    record: bool = True,
    unseen: bool = False,
    among: Sequence[SegmentInfo] | None = None,
) -> list[Found]:
    """`Session.search` in the session as a kernel of it has it; see `kernel_of`."""
    search = kernel.searching(session.branches.below() if among is None else among, alone=among is not None)
    _, hits = search.best(query, tokens, kernel.clock(), kernel.counter, limit, unseen=unseen, apart=True)
    if record and not session.readonly:
        own = [parse_address(hit.address)[0] for hit in hits if hit.session == session.name]
        kernel.observe(Act.SEARCH, own, policy="user", cause=Cause.FAULT)
    return hits


def _said_then(message: Message, then: WindowState, now: WindowState) -> Message:
    """A message of now as it can stand in an earlier state: pages that came since, from which it was made, are none there. It
    is believed no more than they are.

    Raises:
        Forgotten: such a page is.
    """
    later = [source for source in message.sources if source not in then.pages and source in now.pages]
    if not later:
        return message
    if any(now.at(page) is Place.DROPPED for page in later):
        raise Forgotten("a page of which this was made was forgotten", advice="make it anew")
    own = TRUST_OF_ROLE[message.role] if message.trust is None else message.trust
    trust = min([own, *(now.pages[page].trust for page in later)])
    sources = tuple(source for source in message.sources if source not in later)
    return msgspec.structs.replace(message, sources=sources, trust=trust)


def _asked(request: Mapping[str, str] | None) -> Data:
    """What the ledger keeps of who asked for a prompt."""
    return {"request": dict(request)} if request else {}


def _without_form(made: dict[int, Message], damaged: set[int]) -> dict[int, Message]:
    """Remove the original dict from messages that lost a part, and from those that came in the same dict."""
    chain: list[int] = []
    for number in sorted(made.keys() | damaged):
        chain.append(number)
        known = made.get(number)
        more = known is not None and known.extra is not None and '"more":true' in known.extra
        if not more:
            if damaged & set(chain):
                made.update({each: msgspec.structs.replace(made[each], extra=None) for each in chain if each in made})
            chain = []
    return made

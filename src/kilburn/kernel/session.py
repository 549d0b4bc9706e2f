"""A session: one agent's address space over all levels.

What is appended stays: in the window while there is room, and in the store for ever, under its address. This class is
the public interface: the verbs of every day; the others are in its `edits`, `ledger`, `contents`, `prompts` and `branches`.
The policy decides, the kernel does the work, and each change is one batch. Each answer follows
the current ledger: if another writer continued the session (or a person forgot a page), everything is read again
first. Reads are recorded in the ledger, unless the store was opened for reading; no read waits or fails because of
that. What a session has in common with a memory and a document is in `segment`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, Unpack, cast

from kilburn import remembered
from kilburn.arguments import checked
from kilburn.backend import Digests, SegmentInfo
from kilburn.budget import Counter
from kilburn.effect import Answer, Ask
from kilburn.errors import (
    Forgotten,
    HitRateWarning,
    KernelError,
    KilburnError,
    SpecError,
    StoreError,
    StoreStale,
    StoreUnavailable,
    UnknownAddress,
)
from kilburn.event import Act, Data, Event
from kilburn.forgetting.closure import Home, closure
from kilburn.kernel.branches import Fork, Inherit
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.drive import arun, aside, run
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.ledger import Stats
from kilburn.kernel.planning import Planner
from kilburn.kernel.prompts import Prompts
from kilburn.kernel.render import Prompt
from kilburn.kernel.replay import last_of, rebuild
from kilburn.kernel.segment import FREE, Segment
from kilburn.kernel.session_branches import Branches
from kilburn.kernel.session_contents import SessionContents
from kilburn.kernel.session_edits import Edits, take_back
from kilburn.kernel.session_ledger import SessionLedger
from kilburn.kernel.session_prompts import SessionPrompts, request_data
from kilburn.kernel.window import WindowState
from kilburn.move import Drop
from kilburn.page import Page, Place, parse_address, span_of
from kilburn.policy import Cause
from kilburn.search.found import Found

if TYPE_CHECKING:
    from kilburn.collections.collection import Collection as Facts

    # It makes sessions.
    from kilburn.kernel.store import Store

log = logging.getLogger("kilburn")

T = TypeVar("T")

MAX_ATTEMPTS = 5
"""Maximum attempts of an operation while another program writes to the same session."""


def retried(work: Callable[[], T]) -> T:
    """Call `work` up to `MAX_ATTEMPTS` times, until it raises no `StoreStale`, and return its result. The last error is
    raised."""
    for _ in range(MAX_ATTEMPTS - 1):
        with suppress(StoreStale):
            return work()
    return work()


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
        figures = f"{len(self.window.pages)} pages, {self.window.use} of {self._kernel.budget.capacity} tokens"
        return f"<Session {self.name!r} of tenant {self.backend.tenant!r}: {figures}>"

    @property
    def info(self) -> SegmentInfo:
        """Its row in the store, as it was when the session was opened."""
        return self._kernel.info

    @property
    def store(self) -> Store:
        """The store that it is in."""
        return cast("Store", self._home)

    @property
    def branches(self) -> Branches:
        """The session that it is a branch of, and its own branches."""
        return Branches(self)

    @property
    def edits(self) -> Edits:
        """Changes of the window by hand: evict, apply moves, preview, undo, compact, resize."""
        return Edits(self)

    @property
    def ledger(self) -> SessionLedger:
        """What happened: events, receipts, differences between prompts."""
        return SessionLedger(self)

    @property
    def contents(self) -> SessionContents:
        """Its pages and their texts, and the transcript."""
        return SessionContents(self)

    @property
    def prompts(self) -> SessionPrompts:
        """The size of its prompts, how their tokens are counted, and what providers report of them."""
        return SessionPrompts(self)

    @property
    def window(self) -> WindowState:
        """What is in the window, where and at what cost, as this session last saw it. Only the kernel changes it."""
        return self._kernel.window

    @contextmanager
    def _current(self) -> Iterator[Kernel]:
        """The kernel, locked and up to date with the ledger.

        Raises:
            StoreStale: another writer went on while changes here are not written.
        """
        with self.lock:
            self._refresh()
            yield self._kernel

    @property
    def _head(self) -> int:
        return self._kernel.pending.head

    def _refresh(self) -> bool:
        with self.lock:
            self._kernel.check_free()
            changed = self._kernel.refresh()
            if changed:
                self._renewed()
            return changed

    def _renewed(self) -> None:
        """Drop what memory holds of the old state, after everything was read again."""
        self._prompts.clear()
        if not self.backend.readonly:
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

        When it returns, they are admitted and durable. When it raises, none of them was admitted (three exceptions are below),
        and trying again admits them once. While a policy asks a model, everyone else sees the session as it was before.

        After a Ctrl-C during the commit itself, an error of the disk during its last sync, or a database that does not answer any
        more, the messages may be admitted. After the second and the third, trying again raises `StoreStale`.

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
        parsed = [message for value in messages for message in capabilities.forms.parse(value)]
        if not parsed:
            raise KernelError("append without a message", advice="give at least one message")

        def admit() -> tuple[int, ...]:
            # `after` is compared with what is known here. If the store has a newer message, the commit raises `StoreStale`.
            if after is not None and after != self.window.turn:
                raise self._kernel.overtaken()
            if instead_of:
                take_back(self._kernel, instead_of)
            first, last = self._kernel.take_in(parsed, time)
            self._kernel.pending.digests = said
            return tuple(range(first, last + 1))

        admitted = yield from self._settling(admit, Cause.ADMIT)
        return span_of(admitted[0], admitted[-1])

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
                kernel.busy = True
                if cause is not Cause.ADMIT:
                    # An admission always commits, which finds another writer. Any other change may write nothing, so the store
                    # is asked first.
                    kernel.check_current()
                pages = yield from planner.settle(cause, change, waits=waits, eases=eases)
                kernel.flush()
                kernel.busy = False
            except BaseException as error:
                kernel.fail(error)
                planner.background.undo()
                if isinstance(error, KilburnError) and not isinstance(error, StoreUnavailable):
                    # What is wrong in a state that is old by now may be right in the current one.
                    kernel.check_current()
                raise
            planner.background.commit()
        return pages

    def _flush(self) -> bool:
        with self.lock:
            return self._kernel.flush_observed()

    def close(self) -> None:
        """Give up a question that a model is still answering, and write what waits; called when the store closes, or
        releases the session."""
        if self.backend.readonly:
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
                    message = f"{count} observations of session {self.name!r} are not in its ledger: {error.what}"
                    warnings.warn(message, stacklevel=4)

    def _set_counter(self, counter: Counter) -> None:
        self._kernel.count_by(counter)
        self.counter = counter
        self.edits.decide_by(self._planner.policy, self._planner.name)

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
            origin = request_data(request)
            if not kernel.excess:
                return self._prompts.render(format, origin)
            # The session has a larger window, and nothing may be written: it is made to fit in memory, and this is
            # undone.
            with kernel.batch(undone=True):
                self._planner.enforce()
                return self._prompts.render_once(format, origin)

    async def arender(self, format: str = "chat") -> Prompt:
        """`render` for async callers, in a worker thread."""
        return await aside(partial(self.render, format))

    def _located(self, address: str) -> tuple[Session, str]:
        if not (isinstance(address, str) and "/" in address):
            return self, address
        path, _, rest = address.strip().rpartition("/")
        return self.branches.open(path), rest

    def _read(self, address: str) -> tuple[Sequence[Page], Sequence[str], list[int]]:
        kernel, window = self._kernel, self.window
        numbers = self._resolve(address)
        window.pages.fetch(numbers)
        pages = [window.pages[number] for number in numbers]
        kernel.contents.fetch(page.digest for page in pages)
        return pages, [kernel.text_of(page) for page in pages], [page for page in numbers if window.at(page) != Place.IN]

    def _resolve(self, address: str) -> list[int]:
        with self.lock:
            first, last = parse_address(address)
            window = self.window
            if first not in window.pages or last not in window.pages:
                extent = f"this session has p1-p{window.last}" if window.last else "this session has no pages yet"
                raise UnknownAddress(f"{address} does not exist in {self.name!r}", advice=extent)
            pages = [page for page in range(first, last + 1) if window.at(page) != Place.DROPPED]
            if not pages:
                raise Forgotten(f"{address} was forgotten", advice="nothing of it is kept")
            return pages

    def _text(self, page: int) -> str:
        with self.lock:
            return self._kernel.text(page)

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
            pages = self._resolve(address)
            if act is Act.PIN:
                self._planner.load(pages)
            self._kernel.mark(act, pages, **data)
            return tuple(pages)

        run(self._settling(change, Cause.ADVICE, eases=act is not Act.PIN), self._answer)

    def _forgettable(self, address: str) -> dict[int, list[int]]:
        whose, address = self._located(address)
        if whose is not self:
            return whose._forgettable(address)
        with self._current():
            first, last = parse_address(address)
            try:
                self._resolve(address)
            except Forgotten:
                if not closure(self._home, {self.number: range(first, last + 1)}):
                    raise
            # Only now: an address may name more pages than memory can list.
            return {self.number: list(range(first, last + 1))}

    def _made_from(self, pages: Iterable[int]) -> list[int]:
        with self._current() as kernel:
            pages = list(pages)
            for page in pages:
                if page not in kernel.window.states:
                    raise UnknownAddress(f"{self.name} has no page {page}"[:200], advice="give numbers of its pages")
            present = [page for page in pages if kernel.window.at(page) != Place.DROPPED]
            return kernel.closure(present) if present else []

    def _alone(self, beside: Iterable[int] = ()) -> AbstractContextManager[None]:
        return self._kernel.alone(beside)

    def _drop(self, pages: Sequence[int], why: str = "") -> list[int]:
        dropped = list[int]()
        with self.lock:
            for attempts in reversed(range(FREE + 1)):
                try:
                    with nullcontext() if attempts else self._alone():
                        dropped = self._made_from(pages)
                        if not dropped:
                            return []
                        with self._kernel.batch():
                            self._kernel.carry(Drop(pages=tuple(dropped), why=why), closed=True)
                            self._planner.enforce(eases=True)
                    break
                except StoreStale:
                    # If nobody has written here, one of them is cited.
                    if not attempts or not self._refresh():
                        raise
            self._kernel.window.scrub(dropped)
            self._kernel.contents.clear()
            remembered.texts.clear()
            self._prompts.forget(dropped)
        return dropped

    def _erase_elsewhere(self, pages: Sequence[int]) -> list[Exception]:
        failed = list[Exception]()
        for place, erase in list(self.erasers.items()) if pages else ():
            try:
                erase(pages)
            except Exception as error:  # noqa: BLE001 -- whatever a program has registered; it is raised when all is forgotten
                log.warning("session %s: what was forgotten could not be erased in %s: %s", self.name, place, error)
                failed.append(error)
        return failed

    def stats(self) -> Stats:
        """The ledger's figures; a hit rate under 60% also raises a `HitRateWarning`, once.

        Observations that cannot be written yet (a full disk, another writer) are counted once they are written.
        """
        with self._current():
            self._flush()
            stats = self.ledger.figures
        low = next((warning for warning in stats.warnings if warning.startswith("hit rate")), None)
        if low is not None and not self._warned:
            self._warned = True
            warnings.warn(low, HitRateWarning, stacklevel=2)
        return stats

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
            argument = f"inherit={inherit!r}" + (" with a system message" if system else "")
            raise SpecError(argument[:200], advice=f"use one of {', '.join(Inherit)}; the history has its own system message")
        # Another program may write to this session meanwhile.
        return retried(lambda: self.branches._begin(prompt, Inherit(inherit), call, system))

    def _as_of(self, turn: int) -> WindowState:
        """The window as it was after a turn, just before the next message came."""
        if not 0 <= turn <= self.window.turn:
            raise UnknownAddress(f"{self.name} has no turn {turn}", advice=f"its last is {self.window.turn}")
        if turn == self.window.turn:
            return self.window
        last = self._last_of(turn)
        if not last and (parent := self.branches.parent) is not None:
            # It was before the branch.
            return parent._as_of(turn)
        return rebuild(self.backend, self.info, self.counter, until=last).window

    def _last_of(self, turn: int) -> int:
        """The number of the last event before the message after a turn, or 0."""
        self._flush()
        return last_of(self.backend, self.number, turn, self._head)


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
    if record and not session.backend.readonly:
        own_pages = [parse_address(hit.address)[0] for hit in hits if hit.session == session.name]
        kernel.observe(Act.SEARCH, own_pages, policy="user", cause=Cause.FAULT)
    return hits

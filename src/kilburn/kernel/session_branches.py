"""The branches of a session, and the session that it is itself a branch of."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING

from kilburn.arguments import checked
from kilburn.backend import SegmentInfo
from kilburn.errors import KernelError, KilburnError, StoreError, UnknownAddress
from kilburn.event import Act, Data
from kilburn.forgetting.closure import forget
from kilburn.kernel.branches import BRANCH, Fork, Inherit, branches_in, fork_of, origin_in
from kilburn.kernel.drive import run
from kilburn.kernel.kernel import SHORT
from kilburn.kernel.window import GONE
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.page import Page, Place, address_of, span_of
from kilburn.policy import Cause

if TYPE_CHECKING:
    from kilburn.kernel.session import Session
else:
    # `checked` reads the annotations, and sessions hold their branches.
    Session = object

log = logging.getLogger("kilburn")

BRANCHED = 256
"""A session whose replay is work for one page in so many, and for `SHORT`, gets a checkpoint when a branch begins from it."""


def is_return(page: Page, fork: Fork) -> bool:
    """Return whether a page that cites a branch is its return, and not a recall from it."""
    return page.answers == fork.call if fork.call else page.role is Role.USER


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
        forks, number = self._session._known, self._session.number
        fork = forks.get(number) or fork_of(self.origin())
        if fork is not None:
            forks[number] = fork
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
        parent = self._named(name.rpartition("/")[0])
        if parent is None or parent.number != fork.forked:
            raise KernelError(f"the session that {name!r} forked from is gone", advice="nothing can be returned to it")
        return parent

    def open(self, path: str) -> Session:
        """Open a branch by its name below this session, such as `b1`, or `b1/b2` for a branch of `b1`.

        Raises:
            UnknownAddress: there is none.
        """
        session = self._session
        for name in path.split("/"):
            below = self._named(f"{session.name}/{name}") if name.startswith(BRANCH) else None
            fork = below.branches.forked if below is not None else None
            if below is None or fork is None or fork.forked != session.number:
                raise UnknownAddress(f"there is no branch {path[:80]!r} here", advice="see `branches.children()`")
            session = below
        return session

    def children(self) -> list[tuple[SegmentInfo, Fork]]:
        """Return the branches that forked from this session, oldest first. None of them is opened."""
        return branches_in(self._session.backend, self._session.info, self._session._known, below=False)

    def below(self) -> list[SegmentInfo]:
        """Return the branches, their branches, and so on. None of them is opened."""
        return [info for info, _ in branches_in(self._session.backend, self._session.info, self._session._known)]

    def returned(self) -> str | None:
        """Return the address of this branch's result in its parent; None before it has returned.

        Raises:
            KernelError: this session is no branch, or its parent was forgotten.
        """
        parent, fork = self._above()
        parent.ledger.refresh()
        # The return cites all of them, and what lost one is forgotten.
        citing = self._session.backend.citing(self._session.number, self._own(fork)[:1])
        pages = parent.window.pages
        returns = [page for number, page in citing if number == fork.forked and page in pages and is_return(pages[page], fork)]
        return address_of(returns[0]) if returns else None

    def returning(self, text: str) -> Message:
        """The message with which this branch returns: a result of the call that it answers, or else a user's message of the
        trust of what it was made from. It cites all pages of the branch; so it can be opened again, and is forgotten with
        them.

        Raises:
            KernelError: this session is no branch, its parent was forgotten, or it has returned already.
        """
        parent, fork = self._above()
        address = self.returned()
        if address is not None:
            raise KernelError(f"{self._session.name!r} has returned already, at {address}", advice="fork again")
        own_pages, number = self._own(fork), self._session.number
        name = self._session.name.rpartition("/")[2]
        result = f"{text}\n[{name}: {name}/{span_of(own_pages[0], own_pages[-1])}]" if own_pages else text
        cites = tuple((number, page) for page in own_pages)
        if fork.call:
            call = parent.window.pages[fork.call].call
            return Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text=result, call=call),), cites=cites)
        return Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=result),), trust=Trust.AGENT, cites=cites)

    def catch_up(self) -> None:
        """Forget what this branch inherited and was forgotten above it by a program that did not know of the branch."""
        window = self._session.window
        if lost := [page for page in self._gone_above() if window.at(page) is not Place.DROPPED]:
            # What it returned of them stands in the way until `finish`.
            with suppress(StoreError):
                self._session.contents.erase_elsewhere(self._session.contents.drop(lost, "forgotten where it was inherited from"))

    def finish(self) -> None:
        """Finish forgetting what this branch inherited, where that broke off: it is forgotten here and not above, or above
        and not here. What was made from it goes too, in any segment."""
        session = self._session
        with session.lock:
            window, owns = session.window, session._kernel.lineage.owns
            dropped = {page for page in window.gone if window.at(page) is Place.DROPPED and not owns(page)}
            unfinished = sorted(dropped ^ self._gone_above())
        if unfinished:
            try:
                forget(session._home, {session.number: unfinished}, "the rest of a forgetting that broke off")
            except KilburnError as error:
                # The next time it is opened, or asked to forget them, goes on.
                log.warning("session %s: forgetting broke off and could not be finished: %s", session.name, error)

    def _gone_above(self) -> set[int]:
        """Return the inherited pages that were forgotten in the session that made them."""
        lineage = self._session._kernel.lineage
        owners = [share.segment for share in lineage.shares]
        return {page for owner in owners for page in self._session.backend.forgotten(owner) if lineage.owner(page) == owner}

    def _above(self) -> tuple[Session, Fork]:
        fork, parent = self.forked, self.parent
        if fork is None or parent is None:
            raise KernelError(f"{self._session.name!r} is no branch", advice="fork it from a session")
        return parent, fork

    def _own(self, fork: Fork) -> list[int]:
        """Return the originals of this branch itself, without forgotten ones."""
        with self._session._current() as kernel:
            window = kernel.window
            return [page for page in range(fork.known + 1, window.last + 1) if window.at(page) is not Place.DROPPED]

    def _named(self, name: str) -> Session | None:
        """Return the session of that name, or None if there is none."""
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
            past = session._kernel.as_of(at)
            window = past.window
            child = session._home._prepare(name, session.info.user)
            if child.number:
                raise session._kernel.overtaken()
            if child.counter is not session.counter:
                child._set_counter(session.counter)
            fork = Fork(forked=session.number, inherit=Inherit.HISTORY, at=at, known=window.last, derived=window.last_derived)
            child._kernel.fork(past, fork, session.ledger.head, branch="goes on", continues=list(continues))
            return child

    def _begin(self, prompt: str, inherit: Inherit, call: str | None, system: str) -> Session:
        """Begin a branch; see `Session.fork`."""
        session = self._session
        with session._current() as kernel:
            session._check_writable()
            window = kernel.window
            # Where nothing is left the branch does not lean on a ledger that is about to go, too.
            whole = inherit is Inherit.HISTORY and any(state.at is not Place.DROPPED for state in window.states.values())
            call_page = window.calls.get(call or "", 0)
            if call is not None and call_page not in window.open:
                raise KernelError(f"no call {call!r} waits for a result here", advice="fork before the call has its result")
            slow_to_read = kernel.work >= max(SHORT, (window.last - window.last_derived) // BRANCHED)
            if slow_to_read or any(event.act is not Act.SHIP for event in kernel.pending.events):
                kernel.flush(closing=slow_to_read)
            fork = Fork(
                forked=session.number,
                inherit=inherit,
                at=kernel.pending.head if whole else 0,
                known=window.last if whole else 0,
                derived=window.last_derived if whole else 0,
                call=call_page,
            )
            first = [Message(role=Role.SYSTEM, parts=(Part(kind=Kind.TEXT, text=system),))] if system else []
            messages = [*first, *self._first_of(fork, prompt)]

            def write(child: Session) -> None:
                if child.counter is not session.counter:
                    child._set_counter(session.counter)
                # The branch is created by the transaction that writes its first messages.
                child._kernel.fork(kernel, fork)
                run(child._settling(partial(child.branches._admit, messages), Cause.ADMIT), child._answer)

            child = None
            while child is None:
                # Of the names that are taken the next one is tried, however many there are.
                child = session._home._begin(f"{session.name}/{BRANCH}{session._forks + 1}", session.info.user, write)
                session._forks += 1
            return child

    def _first_of(self, fork: Fork, prompt: str) -> list[Message]:
        """Return the first own messages of a branch."""
        kernel, messages = self._session._kernel, list[Message]()
        window, owner = kernel.window, kernel.lineage.owner
        if fork.at:
            for number in window.waiting():
                text = "[you are in the branch now]" if number == fork.call else "[this is done in another place]"
                result = Part(kind=Kind.RESULT, text=text, call=window.pages[number].call)
                messages.append(Message(role=Role.TOOL, parts=(result,)))
        elif fork.inherit is Inherit.TASK:
            # Of a long one an excerpt may be in its place.
            system_pages = [page for page in window.resident() if page.role is Role.SYSTEM and page.message]
            systems = [page.id if page.id > 0 else page.sources[0] for page in system_pages]
            for number in (*systems, *window.request):
                page = window.pages[number]
                if window.at(number) not in GONE:
                    part = Part(kind=Kind.TEXT, text=kernel.text(number))
                    messages.append(Message(role=page.role, parts=(part,), cites=((owner(number), number),)))
        sources = (fork.call,) if fork.call and fork.at else ()
        cites = ((owner(fork.call), fork.call),) if fork.call and not fork.at else ()
        return [*messages, Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=prompt),), sources=sources, cites=cites)]

    def _admit(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """Admit the first messages of this branch; of these what it is to do is pinned."""
        kernel = self._session._kernel
        first, last = kernel.take_in(messages)
        if kernel.window.cost(last) <= kernel.capacity // 4:
            kernel.mark(Act.PIN, [last], why="what the branch is to do")
        return tuple(range(first, last + 1))

    def exit(self, text: str) -> str:
        """Return from this branch: its result becomes a message of the parent, in one transaction.

        Returns:
            The address of the result in the parent. The branch's pages stay, and are `b1/p17` from there.

        Raises:
            KernelError: this session is no branch, its parent was forgotten, or it has returned already.
            WireError: the parent's call has a result, or was forgotten. StoreError.
        """
        parent, _ = self._above()
        with parent.lock:
            address = parent.append(self.returning(text))
        self._session._home.release(self._session.name)
        return address

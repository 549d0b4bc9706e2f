"""Changes of a session's window by hand: each is one batch, and can be undone."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from contextlib import contextmanager
from typing import TYPE_CHECKING

import msgspec

from kilburn.arguments import checked
from kilburn.budget import Budget
from kilburn.effect import Answer, Ask, Outcome
from kilburn.errors import InvalidBudget, KernelError, LawBroken
from kilburn.event import Act, Data, Event
from kilburn.kernel.capabilities import capabilities
from kilburn.kernel.drive import run
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.laws import check_held, check_paired, check_undo
from kilburn.kernel.planning import Planner
from kilburn.kernel.prompts import difference, snapshot
from kilburn.kernel.receipts import Preview, Receipt, newest_moves, ranges, receipts
from kilburn.kernel.replay import rebuild
from kilburn.kernel.standing import packed
from kilburn.kernel.window import GONE, WindowState
from kilburn.message import Kind, Message, Part, Role
from kilburn.model import Model
from kilburn.move import Evict, Move, Retire
from kilburn.page import Place, address_of
from kilburn.policy import Cause, Policy, View

if TYPE_CHECKING:
    from kilburn.kernel.session import Session
else:
    # `checked` reads the annotations, and a session makes this.
    Session = object


__all__ = ["Edits"]


@checked
class Edits:
    """Changes of what a session's window holds, apart from what `append` and the policy do."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def apply(self, *moves: Move) -> list[str]:
        """Carry out moves as a policy would, all or none; returns the addresses of derived pages.

        Raises:
            LawBroken, KernelError: a move is illegal; nothing changed.
        """
        with self._session._kernel.batch():
            derived = [self._session._kernel.carry(move) for move in moves]
            self._session._planner.enforce()
        return [address_of(page) for page in derived if page is not None]

    def evict(self, address: str, why: str = "") -> list[str]:
        """Let pages go out of the window by hand, with the calls and results that belong to them; returns the addresses of what
        left. They stay in the store, and in the prompt a line names them.

        Raises:
            UnknownAddress, Forgotten. KernelError: none of them is in the window. LawBroken: one is pinned, is the user's latest
                message, or waits for its result.
        """
        with self._session._current() as kernel:
            window = self._session.window
            residents = [standing for page in self._session._resolve(address) if (standing := window.stands(page)) is not None]
            going = {member for page in residents for member in window.group(page) if window.at(member) == Place.IN}
            if not going:
                raise KernelError(f"{address} is not in the window", advice="see `kilburn show` for what is")
            with kernel.batch():
                kernel.carry(Evict(pages=tuple(sorted(going)), why=why or "let go by hand"))
                self._session._planner.enforce(eases=True)
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
        with self._session._current() as kernel:
            receipt, moved_pages, since = newest_moves(list(self._session.ledger.events()))
            if receipt is None:
                raise KernelError(
                    f"no compaction of {self._session.name!r} to take back", advice="see its receipts for what left when"
                )
            earlier = rebuild(
                self._session.backend, self._session.info, self._session.counter, until=receipt.events[0] - 1
            ).window
            with kernel.batch(undone=dry):
                _undo_moves(kernel, earlier, moved_pages, since, receipt.events[1])
                over = kernel.window.use - (kernel.capacity if tokens is None else tokens)
                if over > 0:
                    was = f"what was there before the change at turn {receipt.turn}"
                    raise LawBroken(
                        2, f"{was} takes {over:,} tokens more than the window has",
                        advice="recall or pin single pages, or allow more tokens "
                        "(`kilburn window undo --window`, `undo(tokens=...)`)",
                    )  # fmt: skip
        return receipt

    def preview(self, tokens: int = 0, by: Policy | None = None, *, capacity: int | None = None) -> Preview:
        """Return what would leave the window if a message of `tokens` came now, and its price. Nothing changes, nothing is
        recorded, and no model is asked.

        Args:
            by: a policy that is asked once, now, in place of the session's own: what `compact` would do with it.
            capacity: tokens that the pages of a prompt may take, by this session's count, as `last_room` has it; None for those
                of the session's budget, corrected by what providers reported.

        Raises:
            PinsExceedWindow: pins leave no room for that. InvalidBudget: the window never has such room.
        """
        with self._session._current() as kernel:
            pending, capacity = kernel.pending, kernel.capacity if capacity is None else capacity
            if tokens >= capacity:
                raise InvalidBudget(f"{tokens:,} tokens never fit a window of {capacity:,}", advice="ask about fewer")
            earlier, waiting = snapshot(self._session.window), len(pending.events)
            planner = Planner(
                kernel,
                by or self._session._planner.policy,
                self._session._planner.name if by is None else type(by).__name__.lower(),
            )
            questions = 0

            def count(ask: Ask) -> Answer:
                nonlocal questions
                questions += 1
                return Answer(outcome=Outcome.NO_MODEL)

            try:
                with kernel.batch(undone=True):
                    kernel.assumed = capacity - tokens
                    run(planner.settle(Cause.PRESSURE if by is None else Cause.IDLE, tuple), count)
                    previewed = list(receipts(pending.events[waiting:], earlier.use))
                    changed = difference(earlier, snapshot(self._session.window))
            finally:
                kernel.assumed = None
                # What is undone stays as an observation; here nothing was to be seen.
                del pending.events[waiting:]
        return Preview(
            receipts=tuple(msgspec.structs.replace(receipt, folds=(), brought=()) for receipt in previewed),
            use=changed.before, after=changed.after, capacity=capacity, again=changed.after - changed.kept, asks=questions,
        )  # fmt: skip

    def compact(self, policy: Policy, name: str, model: Model | None = None) -> list[Event]:
        """Ask another policy once, now, to make room.

        Args:
            name: the policy's name in the ledger.
            model: answers its questions; None for no model.

        Returns:
            The events in the ledger: its moves, and last `COMPACT` with the outcome. Empty if there was nothing to
                do.
        """
        head = self._session._kernel.pending.next - 1
        run(
            self._session._settling(tuple, Cause.IDLE, planner=Planner(self._session._kernel, policy, name)),
            capabilities.answers.answerer(model),
        )
        return [event for event in self._session.ledger.events(head) if event.policy == name]

    def take_back(self, pages: Iterable[int]) -> None:
        """Retire pages, pinned or not: no prompt shows them and no search finds them; they stay readable by their address.
        Those that are gone already are passed over. A call that waits for its result gets one that says so, and both go."""
        with self._session._kernel.batch():
            take_back(self._session._kernel, pages)
            self._session._planner.enforce(eases=True)

    def resize(self, budget: Budget) -> None:
        """Give this session another budget from now on; pages that no longer fit leave.

        Raises:
            PinsExceedWindow: the pins do not fit; the old budget stays. Where they did not fit it either, the new one is taken.
        """
        over = self._session.prompts.excess > 0

        def change() -> tuple[int, ...]:
            self._session._kernel.rebudget(budget)
            if not over:
                self._session._kernel.check_pins()
            return ()

        run(self._session._settling(change, Cause.PRESSURE, eases=over), self._session._answer)

    def decide_by(self, policy: Policy, name: str) -> None:
        """Let another policy decide at this window from now on, until the session is opened again.

        Args:
            name: its name in the ledger.
        """
        with self._session._kernel.lock:
            self._session._kernel.check_free()
            self._session._planner.abandon()
            self._session._planner = Planner(self._session._kernel, policy, name, self._session._answer)

    def idle(self) -> None:
        """Tell the policy that the caller has time: a good moment for work that may wait."""
        run(self._session._settling(tuple, Cause.IDLE), self._session._answer)

    @contextmanager
    def batch(self) -> Iterator[Kernel]:
        """Several changes as one transaction, by the kernel's own verbs: all are written at the end, or none.

        No policy is asked, and the window is not brought within its budget: the caller has to do that.

        Raises:
            KernelError: within another change.
        """
        with self._session._kernel.batch():
            yield self._session._kernel

    def view(self, cause: Cause = Cause.IDLE, pages: tuple[int, ...] = ()) -> View:
        """Return the view that a policy at the window would get now. It is frozen, and valid until the next change."""
        with self._session._kernel.lock:
            return self._session._planner.view(cause, pages)


def take_back(kernel: Kernel, pages: Iterable[int]) -> None:
    """See `Edits.take_back`; inside the current batch."""
    window = kernel.window
    retired = [page for page in pages if page in window.pages and window.at(page) not in GONE]
    if waiting := [window.pages[page].call for page in retired if page in window.open]:
        results = [Part(kind=Kind.RESULT, text="[the call was taken back]", call=call) for call in waiting]
        first, last = kernel.take_in([Message(role=Role.TOOL, parts=(result,)) for result in results])
        retired += range(first, last + 1)
    if pinned := [page for page in retired if page in window.pins]:
        kernel.mark(Act.UNPIN, pinned)
    if retired:
        kernel.carry(Retire(pages=tuple(retired), why="retired: the session goes on without it"))


def _undo_moves(kernel: Kernel, earlier: WindowState, moved_pages: Set[int], since: Set[int], last: int) -> None:
    """Put pages back to where they were before the newest moves, inside the current batch.

    Args:
        earlier, moved_pages, since: see `check_undo`.
        last: the last event of these moves.

    Raises:
        LawBroken: a page that they put there is pinned, or a call would be without its result. The caller undoes.
    """
    window = kernel.window
    change = check_undo(window, earlier, moved_pages, since)
    check_held(window, change)
    back = tuple(page for page, where in change.at.items() if where == Place.IN)
    data: Data = {"to": change.places, "undoes": last}
    if change.uncover:
        data["uncover"] = change.uncover
    if change.covers:
        data["covers"] = list(change.covers.items())
    restored = {
        page: sentences
        for page, sentences in earlier.orders.items()
        if page not in window.orders and window.at(page) not in GONE and earlier.stands_itself(page) in back
    }
    if restored:
        # A person let go of it by what is taken back.
        data["standing"] = packed(dict(sorted({**restored, **window.orders}.items())))
    kernel.record(Act.LOAD, back, policy="user", cause="user", why="undone", **data)
    check_paired(window, change.at)

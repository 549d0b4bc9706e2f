"""Changes that a person makes to a session's window: used by the command line, the gateway and the dashboard.

The agent that works in a session owns its window. `opened` opens the session with a very large window, so that only the
requested change moves pages; `preview` uses the window of the last prompt. What must fit is measured by that window.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kilburn.agents.compaction import NAME as ON_DEMAND
from kilburn.backend import Backend
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow, SpecError
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.receipts import Preview, Receipt
from kilburn.kernel.session import Session
from kilburn.opening import Store

WIDE_WINDOW = 1 << 40
"""Tokens of a window from which nothing has to be evicted."""

DEFAULT_WINDOW = 8000
"""Tokens of the window if the session has no prompt yet."""

POLICY = "hybrid"
"""The policy of a preview if nothing has been compacted yet."""


def opened(backend: Backend, name: str, *, budget: Budget | None = None, policy: Any = "fifo") -> Session:
    """Open an existing session with the token counter of its agent. A read-only backend is never written to.

    Raises:
        SpecError: there is no session of this name.
    """
    info = backend.segment(name, time=0.0, create=False)
    if info is None:
        raise SpecError(f"no session {name[:80]!r}", advice="see `kilburn ps`")
    counter = counter_of(backend, info.number)
    session = Store(backend, budget or Budget(WIDE_WINDOW), policy, tokenizer=counter, foreign=False).session(name)
    if session.number != info.number:
        raise SpecError(f"{name!r} was replaced by another session just now", advice="try again")
    return session


class WindowPreview(NamedTuple):
    """The pages that would leave a window, the policy that chose them, and the size of the window in tokens."""

    preview: Preview
    policy: Any
    window: int


def preview(
    backend: Backend,
    name: str,
    tokens: int = 0,
    *,
    window: int | None = None,
    otherwise: int = DEFAULT_WINDOW,
    policy: Any = None,
) -> WindowPreview:
    """Preview which pages would leave the window of a session if a message of `tokens` came now.

    Args:
        window: tokens of the window, to which the session's correction applies; None for that of the last prompt, whose room is
            corrected already.
        otherwise: tokens of the window if there was no prompt yet.
        policy: a spec, or an object; None for the policy that decided last.

    Raises:
        SpecError: there is no such session. PinsExceedWindow, InvalidBudget: see `Session.edits.preview`.
    """
    current = opened(backend, name)
    policy = policy or decider(current.ledger.receipts())
    session = opened(backend, name, budget=Budget(window or otherwise), policy=policy)
    result = session.edits.preview(tokens, capacity=None if window else session.prompts.last_room)
    return WindowPreview(result, policy, window or current.ledger.figures.window or otherwise)


def decider(receipts: Sequence[Receipt]) -> str:
    """Return the policy that made the newest of some receipts, oldest first; `POLICY` if none did."""
    policies = (receipt.policy for receipt in reversed(receipts))
    return next((policy for policy in policies if policy not in ("kernel", "user", ON_DEMAND)), POLICY)


VERBS = {"undo": "taken back", "evict": "let go", "pin": "kept", "unpin": "may leave again"}
"""The verbs of `change`, and the words for each in the JSON of programs."""


class WindowChange(NamedTuple):
    """A change that was made: its verb, the addresses that it moved, and the tokens in the window after it. `receipt` is the
    compaction that was undone."""

    session: str
    verb: str
    pages: list[str]
    use: int
    receipt: Receipt | None = None

    def figures(self) -> dict[str, Any]:
        """Return the fields that programs get as JSON."""
        return {"session": self.session, "done": VERBS[self.verb], "pages": self.pages, "use": self.use}


def change(session: Session, verb: str, address: str = "", *, why: str = "", tokens: int | None = None) -> WindowChange:
    """Change the window of a session.

    Args:
        verb: a key of `VERBS`.
        address: the pages that are evicted, pinned or unpinned.
        why: a reason for the ledger.
        tokens: see `undo`.

    Raises:
        KernelError, LawBroken, PinsExceedWindow, UnknownAddress, Forgotten: nothing changed.
    """
    receipt, pages = None, [address]
    match verb:
        case "undo":
            receipt = undo(session, tokens)
            pages = [*receipt.left, *receipt.back]
        case "evict":
            pages = list(session.edits.evict(address, why))
        case "pin":
            keep(session, address)
        case _:
            session.unpin(address)
    return WindowChange(session.name, verb, pages, session.prompts.use, receipt)


def undo(session: Session, tokens: int | None = None, *, dry: bool = False) -> Receipt:
    """Undo the newest compaction, if its pages fit.

    Args:
        tokens: the size that the prompt may have then; None for that of the last prompt.
        dry: see `Session.edits.undo`.

    Raises:
        KernelError, LawBroken: see `Session.edits.undo`.
    """
    return session.edits.undo(tokens or _room(session), dry=dry)


def keep(session: Session, address: str) -> None:
    """Pin pages, if all pins together fit the window of the last prompt.

    Raises:
        PinsExceedWindow: they do not fit. UnknownAddress, Forgotten.
    """
    room = _room(session)
    pinned = sum(map(session.window.cost, session.window.pins.union(session.contents.resolve(address))))
    if room is not None and pinned > room:
        raise PinsExceedWindow(
            f"all pins would take {pinned:,} tokens, and the window of the last prompt has {room:,}",
            advice="unpin others, or pin fewer",
        )
    session.pin(address)


def _room(session: Session) -> int | None:
    return min(session.prompts.last_room, session.prompts.capacity) if session.prompts.last_room is not None else None

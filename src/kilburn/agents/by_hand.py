"""What a person does to a session's window by hand, in the command line, the gateway and the dashboard alike.

A session's window belongs to the agent that works in it. So a session is opened for this with a very large window, and nothing
moves but what is asked for. What must fit is measured by the window that the agent's last prompt had.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from kilburn.backend import Backend
from kilburn.budget import Budget
from kilburn.errors import PinsExceedWindow, SpecError
from kilburn.kernel.ledger import counter_of
from kilburn.kernel.receipts import Preview, Receipt
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store

WIDE_WINDOW = 1 << 40
"""Tokens: a window that is always large enough."""

DEFAULT_WINDOW = 8000
"""Tokens of a window where no prompt says how many."""

DEFAULT_POLICY = "hybrid"
"""Who decides where nothing has been compacted yet."""


def opened(backend: Backend, name: str, *, budget: Budget | None = None, policy: Any = "fifo") -> Session:
    """Return a session that exists, counted as its agent counts. With a backend for reading nothing is written, not even by a
    preview.

    Raises:
        SpecError: there is none of this name.
    """
    info = backend.segment(name, time=0.0, create=False)
    if info is None:
        raise SpecError(f"no session {name[:80]!r}", advice="see `kilburn ps`")
    ruler = counter_of(backend, info.number)
    session = Store(backend, budget or Budget(WIDE_WINDOW), policy, tokenizer=ruler, foreign=False).session(name)
    if session.number != info.number:
        raise SpecError(f"{name!r} was replaced by another session just now", advice="try again")
    return session


class WindowPreview(NamedTuple):
    """What would leave a window, with the policy that decides and the window's size in tokens."""

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
    """Preview what would leave the window of a session if a message of so many tokens came now.

    Args:
        window: tokens of the window, to which the session's correction applies; None for that of the last prompt, whose room is
            corrected already.
        otherwise: tokens of the window if there was no prompt yet.
        policy: a spec, or an object; None for the policy that decided last.

    Raises:
        SpecError: there is no such session. PinsExceedWindow, InvalidBudget: see `Session.edits.preview`.
    """
    reader = opened(backend, name)
    policy = policy or decider(reader.ledger.receipts())
    session = opened(backend, name, budget=Budget(window or otherwise), policy=policy)
    previewed = session.edits.preview(tokens, capacity=None if window else session.prompts.shipped)
    return WindowPreview(previewed, policy, window or reader.ledger.figures.window or otherwise)


def decider(receipts: Sequence[Receipt]) -> str:
    """Return the policy that decided last at a window."""
    policies = (
        receipt.policy for receipt in reversed(receipts) if receipt.policy not in ("kernel", "user") and " " not in receipt.policy
    )
    return next(policies, DEFAULT_POLICY)


def undo(session: Session, tokens: int | None = None, *, dry: bool = False) -> Receipt:
    """Take the newest compaction back, if that fits.

    Args:
        tokens: that the prompt may take then; None for what the last one might take.
        dry: see `Session.edits.undo`.

    Raises:
        KernelError, LawBroken: see `Session.edits.undo`.
    """
    return session.edits.undo(tokens or _room(session), dry=dry)


def keep(session: Session, address: str) -> None:
    """Pin pages, if all pins together fit the window of the last prompt.

    Raises:
        PinsExceedWindow: they do not. UnknownAddress, Forgotten.
    """
    room = _room(session)
    pinned_tokens = sum(map(session.window.cost, session.window.pins.union(session.contents.resolve(address))))
    if room is not None and pinned_tokens > room:
        raise PinsExceedWindow(
            f"all pins would take {pinned_tokens:,} tokens, and the window of the last prompt has {room:,}",
            advice="unpin others, or pin fewer",
        )
    session.pin(address)


def _room(session: Session) -> int | None:
    return min(session.prompts.shipped, session.prompts.capacity) if session.prompts.shipped is not None else None

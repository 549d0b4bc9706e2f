"""The view of a memory policy: new messages of a session, and the memory.

A memory policy is a pure plan at the boundary between a session and a user's memory. It returns `Add`s and `Retire`s, or
is a generator that yields effects (`Ask`, `Find`, `Note`) and returns them. The hits of a `Find` are pages of the memory
that are in force. The clock is in the view: times in a text are relative to when it was said (`Utterance.page.time`).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from kilburn.backend import State
from kilburn.effect import Answer, Effect
from kilburn.message import Role, Trust
from kilburn.move import Add, Retire
from kilburn.page import Claim, Page

SUMMARY = "summary"
"""The relation of the page that holds the running summary of a session; its subject is "session" and the session's name."""


@dataclass(frozen=True, slots=True)
class Utterance:
    """A message text of a session.

    Args:
        segment: number of the session that has the page; for a branch, this may be a session above it.
        page: its page, with its role, its time in seconds since the epoch, and its trust.
        text: the exact text.
        recalled: whether it shows something recalled, or is an assistant's text after that in the same exchange: nothing is
            learned from it again.
        taint: for an assistant's text, the lowest trust of all that was read in the session before; for a user's, its own.
    """

    segment: int
    page: Page
    text: str
    recalled: bool = False
    taint: Trust = Trust.USER

    @property
    def cite(self) -> tuple[int, int]:
        """How a fact that is made from it names it (`Add.cites`)."""
        return self.segment, self.page.id

    @property
    def address(self) -> str:
        """Its address within the session, such as `p17`."""
        return self.page.address

    @property
    def role(self) -> Role:
        """Who said it."""
        return self.page.role


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The frozen state of the boundary between a session and a memory, valid while the plan runs.

    Args:
        new: texts to learn from: one exchange between user and assistant, all with the same taint, in order; no output of
            tools, no system prompt, nothing recalled.
        earlier: the previous texts, ten at most, oldest first; none is less trusted than those of `new`.
        summary: the running summary of the earlier session, if a policy maintains one, or "".
        now: the kernel's time, in seconds since the epoch.
        session: the session's name.
        user: owner of the memory, or "" for all users.
        page: returns a page of the memory by its id.
        text: returns the exact text of a page by its id.
        about: returns the facts in force about a subject, with one relation or (with "") any: pages with their states, newest
            first, 64 at most. If a subject has more, those that mention `thing`, the optional third argument, come first.
        summary_page: the id of the page that holds the summary, or 0.
        made_from: returns the pages in force that were made from these pages of the memory.
        note: returns the page in force of a note by its name; None for none.
    """

    new: Sequence[Utterance]
    earlier: Sequence[Utterance]
    summary: str
    now: float
    session: str
    user: str
    page: Callable[[int], Page]
    text: Callable[[int], str]
    about: Callable[..., Sequence[tuple[Page, State]]]
    summary_page: int = 0
    made_from: Callable[[Sequence[int]], Sequence[Page]] = lambda _: ()
    note: Callable[[str], Page | None] = lambda _: None

    @property
    def taint(self) -> Trust:
        """The lowest trust of what was read before and in `new`; below AGENT, what is learned is only proposed."""
        return min((utterance.taint for utterance in self.new), default=Trust.USER)

    def standing(self, claim: Claim) -> Sequence[tuple[Page, State]]:
        """Return what is in force that a claim may repeat or contradict."""
        return self.about(claim.subject, claim.relation, claim.object if claim.many else "")


MemoryPlan = Sequence[Add | Retire] | Generator[Effect, Answer, Sequence[Add | Retire]]


@runtime_checkable
class MemoryPolicy(Protocol):
    """Decides which facts of a session are added to a memory, and which facts they supersede.

    Optional attributes: `writes = SegmentKind.NOTES` if the policy writes notes instead of facts; `messages`, the messages of an
    exchange at most (2 by default); `cursor`, a word that distinguishes the cursors of several policies of a class.
    """

    def plan(self, view: MemoryView) -> MemoryPlan:
        """Return moves for this view; an empty sequence if there is nothing to learn."""
        ...

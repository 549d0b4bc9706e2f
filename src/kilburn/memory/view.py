"""What a memory policy may see: what was said in a session and not learned from yet, and what the memory holds.

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
    """A text that was said in a session.

    Args:
        session: the number in the store of the session in which it was said: of a branch, maybe one above it.
        page: its page, with its role, its time in seconds since the epoch, and its trust.
        text: exact.
        recalled: whether it shows something recalled, or is an assistant's text after such in the same exchange: nothing is
            learned from it again.
        taint: of an assistant's text, the lowest trust of all that was read in the session up to it; of a user's, its own.
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


class About(Protocol):
    """See `MemoryView.about`."""

    def __call__(self, subject: str, relation: str, thing: str = "") -> Sequence[tuple[Page, State]]:
        """Return what is in force about a subject."""
        ...


@dataclass(frozen=True, slots=True)
class MemoryView:
    """The frozen state of the boundary between a session and a memory, valid while the plan runs.

    Args:
        new: what to learn from: texts of one exchange between user and assistant, all with the same taint, in order. No
            tool's output, no system prompt, nothing recalled.
        earlier: the texts before these, ten at most, oldest first; none that is less trusted than those of `new`.
        summary: the running summary of the session before these, if a policy keeps one, or "".
        now: the kernel's time, in seconds since the epoch.
        session: the session's name.
        user: whose memory it is, or "" for all users.
        page: a page of the memory, by its id.
        text: its exact text.
        about: what is in force about a subject, with one relation or (with "") any: pages with their states, newest first, 64
            at most. If a subject has more, those that mention `thing`, which may be given as a third argument, come first.
        summary_page: the id of the page that holds the summary, or 0.
        made_from: what is in force and was made from these pages of the memory.
        note: of notes, the page that is in force under a name; None for none.
    """

    new: Sequence[Utterance]
    earlier: Sequence[Utterance]
    summary: str
    now: float
    session: str
    user: str
    page: Callable[[int], Page]
    text: Callable[[int], str]
    about: About
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
    """Decides what of a session becomes part of a memory, and what in the memory it supersedes.

    A policy may say more of itself: `writes = SegmentKind.NOTES` if it writes notes, and no facts; `messages`, how many it takes
    in at a time, two where it says nothing; `cursor`, a word, if policies of its class each get on by themselves.
    """

    def plan(self, view: MemoryView) -> MemoryPlan:
        """Return moves for this view; an empty sequence if there is nothing to learn."""
        ...

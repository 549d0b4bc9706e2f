"""Effects: what a policy yields when its decision needs a model's words or a search.

A policy never calls a model or a store. It yields an effect and receives an `Answer`, so that one
implementation serves sync, async, replay and training (the generator idea of httpx's auth flow).
A failure is an answer too: it never raises inside a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from typing import Any

import msgspec

from kilburn.page import Span

__all__ = ["Answer", "Ask", "Deferred", "Effect", "Find", "Hit", "Later", "Note", "Outcome"]


class Outcome(StrEnum):
    """How an effect, or a whole consultation of a policy, ended."""

    DONE = "done"
    EMPTY = "empty"
    """Nothing came."""
    FAILED = "failed"
    """It raised, or timed out."""
    REFUSED = "refused"
    """The model declined."""
    REJECTED = "rejected"
    """What the model wrote was of no use, or not a valid directive."""
    TRUNCATED = "truncated"
    """The reply met its cap."""
    NO_MODEL = "none"
    """No model is configured at this boundary."""
    NO_PROGRESS = "no progress"
    """Nothing that would have made room."""
    ILLEGAL = "illegal"
    """The moves broke a law."""
    STARTED = "started"
    """A question in the background."""
    BUSY = "busy"
    """One is running in the background already, and there is one at a time."""
    LATE = "late"
    """Others changed the session while the model was asked, or the session had ended."""


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the boundary's model for words.

    Args:
        prompt: the user turn, in which untrusted text is quoted as data.
        system: the system turn, or "".
        max_tokens: cap of the reply.
        schema: a JSON schema that the reply must follow, or None.
        purpose: for the ledger, such as "summary of p3-p40".
        timeout: seconds after which no answer is an answer: FAILED.
    """

    prompt: str
    system: str = ""
    max_tokens: int = 512
    schema: dict[str, Any] | None = None
    purpose: str = ""
    timeout: float = 120.0


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Search the session's pages outside the window, with the search that people and models use.

    Args:
        query: free text; its rare words count most.
        limit: maximum number of hits.
        tokens: maximum total tokens of the hits; 0 for 200 times `limit`.
        abstain: return no hits if none is likely to be an answer.
        shown: ids of the pages that the prompt shows, which are excluded from the hits; None for all pages that are whole in the
            window.
        by_words: search by words only. Nothing is embedded, so it costs about half.
        by_user: search only the user's messages, by words only.
    """

    query: str
    limit: int = 8
    tokens: int = 0
    abstain: bool = False
    shown: frozenset[int] | None = None
    by_words: bool = False
    by_user: bool = False


class Later(msgspec.Struct, frozen=True, kw_only=True):
    """Ask in the background, about a snapshot: the agent goes on, and the answer stands in a later view.

    The answer to this effect comes at once: STARTED, BUSY or NO_MODEL. When the model has spoken, the next view has it
    in `View.deferred`, once; what it then replaces is exactly `pages`, whatever came meanwhile.

    Args:
        pages: the originals that the words will stand for, in order.
        compose: makes the question from a function that gives a page's exact text. It runs beside the
            agent, so it must be pure and must read nothing but its argument.
        purpose: for the ledger.
        key: comes back with the answer. There is one question at a time for all policies of a boundary: by
            it a policy knows its own, and leaves another's alone.
        review: makes of the model's answer the one that is handed out, such as REJECTED, from the same
            function, the question and the answer; beside the agent too, and pure.
    """

    pages: tuple[int, ...]
    compose: Callable[[Callable[[int], str]], Ask]
    purpose: str = ""
    key: str = ""
    review: Callable[[Callable[[int], str], Ask, Answer], Answer] | None = None


class Note(msgspec.Struct, frozen=True, kw_only=True):
    """Tell the ledger how a compaction went, where the moves alone do not say it.

    Args:
        outcome: how it stands where no moves follow: EMPTY, FAILED, REFUSED, REJECTED or NO_PROGRESS; None says
            nothing of it. Moves that are carried out make it DONE, or NO_PROGRESS if the window was too full and they freed
            nothing, whatever was noted.
        why: in the policy's words; no word of a page's text, which forgetting could not reach there.
        figures: counts for the ledger, such as {"unmatched": 2}; of several notes they are added up.
    """

    outcome: Outcome | None = None
    why: str = ""
    figures: dict[str, int] = {}


Effect = Ask | Find | Later | Note


class Hit(msgspec.Struct, frozen=True, kw_only=True):
    """A passage that a search found: `span` of the text of page `page`, with its score (higher is
    better, comparable only within one search)."""

    page: int
    span: Span
    text: str
    score: float


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What an effect gave.

    Args:
        outcome: DONE, EMPTY, FAILED, REFUSED, TRUNCATED or NO_MODEL; of a `Later` STARTED or BUSY too.
        text: the model's words (Ask), or "".
        hits: the passages, best first (Find).
        confidence: how likely it is that an answer is among them, 0 to 1 (Find).
        detail: for the ledger: the error's text, or "".
    """

    outcome: Outcome
    text: str = ""
    hits: tuple[Hit, ...] = ()
    confidence: float = 0.0
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is something to use."""
        return self.outcome == Outcome.DONE

    @property
    def has_text(self) -> bool:
        """Whether the model gave a text, whole or cut at its cap."""
        return self.outcome in (Outcome.DONE, Outcome.TRUNCATED)


class Deferred(msgspec.Struct, frozen=True, kw_only=True):
    """A question in the background: what it is about, since when, and the answer once there is one.

    Args:
        pages: the snapshot that it was asked about.
        turn: the last admitted message when it was asked.
        answer: None while the model still speaks.
        key: as of the `Later`.
    """

    pages: tuple[int, ...]
    turn: int
    key: str = ""
    answer: Answer | None = None

"""Effects: what a policy yields when its decision needs a model's words or a search.

A policy never calls a model or a store. It yields an effect and receives an `Answer`, so that one
implementation serves sync, async, replay and training (the generator idea of httpx's auth flow).
A failure is an answer too: it never raises inside a policy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from kilburn.page import Span

__all__ = ["Answer", "Ask", "Deferred", "Effect", "Find", "Hit", "Later", "Note"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the boundary's model for words.

    Args:
        prompt: the user turn, in which untrusted text is quoted as data.
        system: the system turn, or "".
        max_tokens: cap of the reply.
        schema: a JSON schema that the reply must follow, or None.
        purpose: for the ledger, such as "summary of p3-p40".
        timeout: seconds after which no answer is an answer: "failed".
    """

    prompt: str
    system: str = ""
    max_tokens: int = 512
    schema: dict[str, Any] | None = None
    purpose: str = ""
    timeout: float = 120.0


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Search what this process has below the window.

    Args:
        query: free text; its rare words count most.
        limit: hits at most.
    """

    query: str
    limit: int = 8


class Later(msgspec.Struct, frozen=True, kw_only=True):
    """Ask in the background, about a snapshot: the agent goes on, and the answer stands in a later view.

    The answer to this effect comes at once: "started", "busy" (one is running already, and there is
    one at a time) or "none" (no model is configured). When the model has spoken, the next view has it
    in `View.deferred`, once; what it then replaces is exactly `pages`, whatever came meanwhile.

    Args:
        pages: the originals that the words will stand for, in order.
        compose: makes the question from a function that gives a page's exact text. It runs beside the
            agent, so it must be pure and must read nothing but its argument.
        purpose: for the ledger.
        key: comes back with the answer. There is one question at a time for all policies of a boundary: by
            it a policy knows its own, and leaves another's alone.
        review: makes of the model's answer the one that is handed out, such as "rejected", from the same
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
        outcome: how it stands where no moves follow: "empty", "failed", "refused", "rejected" (what
            the model wrote was not a valid directive) or "no progress". Moves that are carried out
            make it "done", whatever was noted.
        why: in the policy's words; no word of a page's text, which forgetting could not reach there.
        figures: counts for the ledger, such as {"unmatched": 2}; of several notes they are added up.
    """

    outcome: str = ""
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
        outcome: "done", "empty" (nothing came), "failed" (it raised or timed out), "refused" (the
            model declined), "none" (no model is configured at this boundary), or "truncated" (the
            reply hit its cap).
        text: the model's words (Ask), or "".
        hits: the passages, best first (Find).
        detail: for the ledger: the error's text, or "".
    """

    outcome: str
    text: str = ""
    hits: tuple[Hit, ...] = ()
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether there is something to use."""
        return self.outcome == "done"


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

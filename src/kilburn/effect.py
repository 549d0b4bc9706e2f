"""Effects: what a policy yields when its decision needs a model's words or a search.

A policy never calls a model or a store. It yields an effect and receives an `Answer`, so that one
implementation serves sync, async, replay and training (the generator idea of httpx's auth flow).
A failure is an answer too: it never raises inside a policy.
"""

from __future__ import annotations

from typing import Any

import msgspec

from kilburn.page import Span

__all__ = ["Answer", "Ask", "Effect", "Find", "Hit"]


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """Ask the boundary's model for words.

    Args:
        prompt: the user turn, in which untrusted text is quoted as data.
        system: the system turn, or "".
        max_tokens: cap of the reply.
        schema: a JSON schema that the reply must follow, or None.
        purpose: for the ledger, such as "summary of p3-p40".
    """

    prompt: str
    system: str = ""
    max_tokens: int = 512
    schema: dict[str, Any] | None = None
    purpose: str = ""


class Find(msgspec.Struct, frozen=True, kw_only=True):
    """Search what this process has below the window.

    Args:
        query: free text; its rare words count most.
        limit: hits at most.
    """

    query: str
    limit: int = 8


Effect = Ask | Find


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

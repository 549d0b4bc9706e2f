"""What a request changed in its session's figures: the session as it was after the last reply, and as it is now."""

from __future__ import annotations

import time

import msgspec

from kilburn.gateway.conversations import Conversation
from kilburn.gateway.exchange import Exchange
from kilburn.kernel.ledger import Stats
from kilburn.kernel.session import Session
from kilburn.model import is_count
from kilburn.tracing import compactions
from kilburn.wire.digests import HIDDEN

MOVE_COUNTS = ("evictions", "folds", "loads", "asks", "refused_moves", "policy_failures", "fallbacks")
"""Figures of which at least one increases with a compaction."""


class SessionState(msgspec.Struct):
    """A session's state after its last reply: its figures, the tokens of our own calls and their results, the last event of its
    ledger, and the time. One request at a time uses it, so it needs no lock."""

    stats: Stats
    hidden: int
    head: int
    used: float | None = None


def begin(exchange: Exchange, conversation: Conversation) -> None:
    """Record the figures of a request whose new messages are in the session."""
    figures = conversation.session.ledger.figures
    state = conversation.state
    if state is None:
        # A new session has no prompts. Earlier prompts of a session read from the store were counted by another gateway.
        start, head = conversation.met if figures.prompts else (Stats(), 0)
        state = conversation.state = SessionState(start, _hidden(conversation.session), head)
    exchange.session = conversation.name
    exchange.stats_before = state.stats
    exchange.new = figures.tokens_seen - state.stats.tokens_seen
    exchange.sent = max(0, figures.tokens_seen - state.hidden)
    exchange.idle = None if state.used is None else exchange.began - state.used


def hide(conversation: Conversation, tokens_before: int) -> None:
    """Exclude the tokens appended since `tokens_before`, because they are not the client's."""
    state = conversation.state
    assert state is not None, "a request begins before it goes on"
    state.hidden += conversation.session.ledger.figures.tokens_seen - tokens_before


def end(exchange: Exchange, conversation: Conversation) -> None:
    """Record a request's figures at its end, before its session is released."""
    state = conversation.state
    assert state is not None, "a request begins before it ends"
    session = conversation.session
    exchange.stats_after = stats = session.ledger.figures
    if any(getattr(stats, name) != getattr(state.stats, name) for name in MOVE_COUNTS):
        exchange.compacted = [
            (event.policy, str(event.data.get("outcome", "done")), freed if is_count(freed := event.data.get("freed")) else 0)
            for event in compactions(session, state.head)
        ]
    state.stats, state.head, state.used = stats, session.ledger.head, time.time()


def _hidden(session: Session) -> int:
    """Return the tokens of our own calls and their results."""
    # Another request, which makes this one again, may be in the middle of a change.
    with session.lock:
        window, pages = session.window, session.window.pages.originals()
        calls = {page.id for page in pages if (page.call or "").startswith(HIDDEN)}
        return sum(window.cost(page.id) for page in pages if page.id in calls or page.answers in calls)

"""What a request changed in its session's figures: the session as it was after the last reply, and as it is now."""

from __future__ import annotations

import time
from weakref import WeakKeyDictionary

import msgspec

from kilburn.gateway.conversations import Conversation
from kilburn.gateway.exchange import Exchange
from kilburn.kernel.ledger import Stats
from kilburn.kernel.session import Session
from kilburn.model import is_count
from kilburn.tracing import compactions
from kilburn.wire.digests import HIDDEN

MOVED = ("evictions", "folds", "loads", "asks", "refused_moves", "policy_failures", "fallbacks")
"""Figures of which one grows where there was a compaction."""


class _Known(msgspec.Struct):
    """A session after its last reply: its figures, tokens of our own calls and their results, the last event of its ledger, and
    when that was."""

    stats: Stats
    hidden: int
    head: int
    used: float | None = None


class Figures:
    """The figures of the sessions of one tenant, as long as they are in memory.

    What is known of a session is used by one request at a time, so it needs no lock.
    """

    def __init__(self) -> None:
        self._known: WeakKeyDictionary[Conversation, _Known] = WeakKeyDictionary()

    def begin(self, exchange: Exchange, conversation: Conversation) -> None:
        """The request's new messages are in the session."""
        now = conversation.session.ledger.figures
        known = self._known.get(conversation)
        if known is None:
            # A session that is new has no prompt yet. Of one that was read again, what was before is another gateway's to count.
            before, head = conversation.met if now.prompts else (Stats(), 0)
            known = self._known[conversation] = _Known(before, _hidden(conversation.session), head)
        exchange.session = conversation.name
        exchange.before = known.stats
        exchange.new = now.tokens_seen - known.stats.tokens_seen
        exchange.sent = max(0, now.tokens_seen - known.hidden)
        exchange.idle = None if known.used is None else exchange.began - known.used

    def hide(self, conversation: Conversation, before: int) -> None:
        """What was appended since the session had seen so many tokens is none of the client's."""
        self._known[conversation].hidden += conversation.session.ledger.figures.tokens_seen - before

    def end(self, exchange: Exchange, conversation: Conversation) -> None:
        """The request is over; its session is still its own."""
        known = self._known[conversation]
        session = conversation.session
        exchange.after = after = session.ledger.figures
        if any(getattr(after, name) != getattr(known.stats, name) for name in MOVED):
            exchange.compacted = [
                (event.policy, str(event.data.get("outcome", "done")), freed if is_count(freed := event.data.get("freed")) else 0)
                for event in compactions(session, known.head)
            ]
        known.stats, known.head, known.used = after, session.ledger.head, time.time()


def _hidden(session: Session) -> int:
    """Tokens of our own calls and their results."""
    # Another request, which makes this one again, may be in the middle of a change.
    with session.lock:
        window, pages = session.window, session.window.pages.originals()
        calls = {page.id for page in pages if (page.call or "").startswith(HIDDEN)}
        return sum(window.cost(page.id) for page in pages if page.id in calls or page.answers in calls)

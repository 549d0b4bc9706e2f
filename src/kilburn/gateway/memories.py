"""Long-term memory beside what a client sends: what is known goes upstream with the user's last message, and nowhere else.

The client resends its own message, so the session never holds what was put beside it. It stands behind the user's words: all
that comes before keeps its bytes, and the provider's cache its prefix. What is said is learned from in a thread, when a turn
is over.
"""

from __future__ import annotations

import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from weakref import WeakSet

import msgspec

from kilburn.event import Act
from kilburn.gateway.form import Form, ParsedRequest
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.brought import QUERY, behind, known
from kilburn.memory.learning import Learning
from kilburn.message import Kind, Role, Trust

log = logging.getLogger("kilburn.gateway")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Remembered(msgspec.Struct, frozen=True):
    """Memories that are put beside the user's last message.

    Args:
        words: the end of that message, by which it is found again; "" for whatever the user said last.
        text: what is known, quoted, each piece with its address, origin and age.
        tokens: what that costs.
        trust: the lowest of what it has.
        pages: that it is from: number of the segment, page.
    """

    words: str
    text: str
    tokens: int
    trust: Trust
    pages: tuple[tuple[int, int], ...] = ()

    def beside(self, form: Form, body: bytes) -> bytes:
        """Return a request with the memories behind the user's last message; unchanged if that message is evicted."""
        fields = _fields(body)
        messages = _list(fields[form.key]) if bytes(fields[form.key]).lstrip().startswith(b"[") else None
        if messages is None:
            combined = f"{msgspec.json.decode(fields[form.key])}\n\n{self.text}"
            return msgspec.json.encode({**fields, form.key: combined})
        kind = "input_text" if form.name == "responses" else "text"
        changed = behind(messages, self.text, self.words, kind)
        return body if changed is None else msgspec.json.encode({**fields, form.key: changed})


def remembered(store: Store, form: Form, req: ParsedRequest, user: str, tokens: int, running: str = "") -> Remembered | None:
    """Return memories about the user's last message, from facts, documents and sessions other than the running one, within so
    many tokens; None if there are none or the store cannot be read."""
    if tokens <= 0:
        return None
    if not req.messages:
        form.split(req)  # it was recognised by its bytes
    words = _asked_for(form, req)
    if not words.strip():
        return None
    memories = known(store, words, tokens, user, without=running)
    return None if memories is None else Remembered(words, memories.text, memories.tokens, memories.trust, memories.pages)


def _asked_for(form: Form, req: ParsedRequest) -> str:
    """Return the end of the user's last text."""
    for raw in reversed(req.messages):
        for message in reversed(form.read(raw)):
            texts = [part.text for part in message.parts if part.kind is Kind.TEXT]
            if message.role is Role.USER and texts:
                return texts[-1][-QUERY:]
    return ""


class Learners:
    """Learns from sessions, one after the other, in its own thread.

    Args:
        works: whether it does; otherwise workers do, for whom each session is marked.
    """

    def __init__(self, *, works: bool = True) -> None:
        self._works, self._marked = works, WeakSet[Session]()
        self._pool = ThreadPoolExecutor(1, "kilburn-gateway-learn")
        self._lock = threading.Lock()
        self._waiting: set[Session] = set()
        self._now: Learning | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Number of sessions in the queue."""
        return len(self._waiting)

    def mark(self, session: Session) -> None:
        """Mark a session for learning in the transaction of its next messages, so that later workers find it."""
        if session not in self._marked:
            self._marked.add(session)
            session.ledger.record(Act.NOTE, policy="gateway", learns=True)

    def learn(self, store: Store, session: Session, user: str) -> None:
        """Queue a session for learning."""
        with self._lock:
            if self._works and not self._closed and session not in self._waiting:
                self._waiting.add(session)
                self._pool.submit(self._learn, store, session, user)

    def _learn(self, store: Store, session: Session, user: str) -> None:
        try:
            with self._lock:
                self._waiting.discard(session)
                if self._closed:
                    return
                self._now = Learning(store, session, "plain", user=user)
            learned = self._now.result()
            if learned.failed:
                log.warning("session %s: %d passages are still to be learned from", session.name, len(learned.failed))
        except Exception as error:  # noqa: BLE001 - learning is nobody's request; and its words may quote what was said
            log.warning("session %s: nothing was learned: %s", session.name, type(error).__name__)

    def close(self) -> None:
        """Stop. A session in progress is learned from the next time."""
        with self._lock:
            self._closed = True
        if self._now is not None:
            self._now.close()
        self._pool.shutdown(cancel_futures=True)

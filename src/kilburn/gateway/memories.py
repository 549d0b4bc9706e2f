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
from kilburn.gateway.form import Asked, Form
from kilburn.kernel.brought import QUERY, behind, known
from kilburn.kernel.session import Session
from kilburn.kernel.store import Store
from kilburn.memory.learning import Learning
from kilburn.message import Kind, Role, Trust

log = logging.getLogger("kilburn.gateway")

_fields = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_list = msgspec.json.Decoder(list[msgspec.Raw]).decode


class Remembered(msgspec.Struct, frozen=True):
    """What is put beside the user's last message.

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
        """A request with this behind the user's last message; as it was, if that message has left the window."""
        fields = _fields(body)
        messages = _list(fields[form.key]) if bytes(fields[form.key]).lstrip().startswith(b"[") else None
        if messages is None:
            both = f"{msgspec.json.decode(fields[form.key])}\n\n{self.text}"
            return msgspec.json.encode({**fields, form.key: both})
        kind = "input_text" if form.name == "responses" else "text"
        changed = behind(messages, self.text, self.words, kind)
        return body if changed is None else msgspec.json.encode({**fields, form.key: changed})


def remembered(store: Store, form: Form, asked: Asked, user: str, tokens: int, running: str = "") -> Remembered | None:
    """What is known about the user's last message, from facts, documents and sessions other than the running one, within so many
    tokens; None if there is nothing or the store cannot be read."""
    if tokens <= 0:
        return None
    if not asked.messages:
        form.split(asked)  # it was recognised by its bytes
    words = _asked_for(form, asked)
    if not words.strip():
        return None
    found = known(store, words, tokens, user, without=running)
    return None if found is None else Remembered(words, found.text, found.tokens, found.trust, found.pages)


def _asked_for(form: Form, asked: Asked) -> str:
    """The end of the user's last words."""
    for raw in reversed(asked.messages):
        for message in reversed(form.read(raw)):
            texts = [part.text for part in message.parts if part.kind is Kind.TEXT]
            if message.role is Role.USER and texts:
                return texts[-1][-QUERY:]
    return ""


class Learners:
    """Learns from sessions, one after the other, in a thread of its own.

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
        """Sessions that wait."""
        return len(self._waiting)

    def mark(self, session: Session) -> None:
        """Note in a session that it is to be learned from, in the transaction of what is said next: whoever works later knows."""
        if session not in self._marked:
            self._marked.add(session)
            session.ledger.record(Act.NOTE, policy="gateway", learns=True)

    def learn(self, store: Store, session: Session, user: str) -> None:
        """Learn from what was said in a session, soon."""
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
                log.warning("session %s: %d places wait to be learned from", session.name, len(learned.failed))
        except Exception as error:  # noqa: BLE001 - learning is nobody's request; and its words may quote what was said
            log.warning("session %s: nothing was learned: %s", session.name, type(error).__name__)

    def close(self) -> None:
        """Stop. A session that is being learned from is given up, and learned from the next time."""
        with self._lock:
            self._closed = True
        if self._now is not None:
            self._now.close()
        self._pool.shutdown(cancel_futures=True)

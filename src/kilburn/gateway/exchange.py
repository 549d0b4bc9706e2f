"""The record of one request and its reply, and the totals of a session.

`access` begins an exchange, the relay fills it in, and metrics, logs and spans read it.
"""

from __future__ import annotations

import secrets
import time

import msgspec

from kilburn.errors import StoreError
from kilburn.gateway.keys import Key
from kilburn.kernel.ledger import Stats
from kilburn.model import Tokens
from kilburn.tracing import NONE, Span

LEAVING = "on_leaving"
"""Key in a request's state: a function that takes a callback for the client's leaving, and returns a function that removes it. A
waiting task, as in plain ASGI, takes much longer."""


class Exchange(msgspec.Struct, kw_only=True):
    """One request and its reply: `scope["state"]["exchange"]`. Times are in seconds, tokens by the session's counter.

    `access` sets these:
        id: of the request, random. client_name: the id that the client gave the request, if valid.
        began: since the epoch. started: by `time.perf_counter`.
        method, path, client: as they came; the path without its query. parent: the span that it belongs to (`traceparent`).
        key: who asked; None before that is known, and if nobody may.
        status: of the reply; 499 if the client left before one. problem: why it was refused or failed, in one word.
        received: from `started` until the body was there; None if it never was. size: bytes of the body. weight: what it takes
            of the memory for all bodies, in bytes; see `kilburn.gateway.limits.BodyTally`.
        first: from `started` until the first byte of the reply went out. seconds: until its last.
        logged_body: the body, if contents are logged.
        trace: where an unexpected error came from, files and lines; its message only if contents are logged.

    Whoever answers sets these, as far as they are known:
        form: "chat", "messages" or "responses". model, session: their names. stream: whether it was asked for.
        waited: of `first`, how long the upstream took; the rest is what the gateway added.
        sent: tokens of the history that the client sent. new: those of them that were not in the session yet.
        usage: what the upstream counted, all hidden rounds together. rounds: how many calls of the upstream.
        stats_before, stats_after: the session's figures before its new messages, and after the reply.
        idle: since the session's last reply, or None; the upstream's cache may have expired.
        finish: why the reply ended.
        unread: why it was served without a session, or its reply not kept; see `kilburn.gateway.problems.unread_reason`.
        unkept: what the store said to a reply that went out all the same.
        span: of the request, where somebody takes it. pages: addresses of what the last prompt showed, then.
        upstream: seconds that each call of the upstream took, until its answer was whole.
        compacted: policy, outcome and tokens freed of each compaction.
        lookups: what the model's calls of our tools, and searches for it, came to: tool and outcome.
        warnings: what the prompt does not show of the newest request, and what does not fit the window.
    """

    id: str = msgspec.field(default_factory=lambda: secrets.token_hex(8))
    client_name: str = ""
    began: float = msgspec.field(default_factory=time.time)
    started: float = msgspec.field(default_factory=time.perf_counter)
    method: str = ""
    path: str = ""
    client: str = ""
    parent: str = ""
    key: Key | None = None
    status: int = 0
    problem: str = ""
    received: float | None = None
    size: int = 0
    weight: int = 0
    first: float | None = None
    seconds: float = 0.0
    logged_body: bytes | None = None
    trace: str = ""

    form: str = ""
    model: str = ""
    session: str = ""
    stream: bool = False
    waited: float | None = None
    sent: int = 0
    new: int = 0
    usage: Tokens | None = None
    rounds: int = 0
    stats_before: Stats | None = None
    stats_after: Stats | None = None
    idle: float | None = None
    finish: str = ""
    unread: str = ""
    unkept: StoreError | None = None
    span: Span = NONE
    pages: str = ""
    upstream: list[float] = []
    compacted: list[tuple[str, str, int]] = []
    lookups: list[tuple[str, str]] = []
    warnings: list[str] = []

    @property
    def request(self) -> dict[str, str]:
        """The ids by which the records of this request are found."""
        ids = {"id": self.id, "client": self.client_name, "trace": self.span.trace or self.parent[3:35]}
        return {name: value for name, value in ids.items() if value}

    @property
    def added(self) -> float | None:
        """Seconds that the gateway added to the first byte, once the request was there; None if no upstream was asked."""
        if self.first is None or self.waited is None or self.received is None:
            return None
        return max(0.0, self.first - self.received - self.waited)


class SessionTotals(msgspec.Struct, kw_only=True):
    """The figures of one session since the gateway started. Tokens are by the session's own counter; `cached`, `written` and
    `replied` are the provider's, 0 if it reports none. `window`, `tokens_in_window`, `fill` and `hit_rate` are as of its last
    reply (see `kilburn.kernel.ledger.Stats`), the hit rate over its whole life; `alarm` tells that it is under 60%. `saved` is
    money: see `kilburn.gateway.metrics.saved`."""

    tenant: str
    session: str
    requests: int = 0
    window: int = 0
    tokens_in_window: int = 0
    fill: float | None = None
    sent: int = 0
    new: int = 0
    shipped: int = 0
    cached: int = 0
    written: int = 0
    replied: int = 0
    reprefilled: int = 0
    hits: int = 0
    faults: int = 0
    refaults: int = 0
    evictions: int = 0
    folds: int = 0
    hit_rate: float | None = None
    alarm: bool = False
    saved: float = 0.0
    used: float = 0.0


class Rows(msgspec.Struct, kw_only=True):
    """The answer of `/sessions`, as of a time in seconds since the epoch."""

    time: float
    sessions: list[SessionTotals]


def together(first: Tokens | None, second: Tokens) -> Tokens:
    """Return the sum of two usages."""
    if first is None:
        return second
    beside = second.beside if first.beside is None else together(second.beside, first.beside)
    names = ("prompt", "reply", "cached", "written")
    return Tokens(**{name: getattr(first, name) + getattr(second, name) for name in names}, beside=beside)

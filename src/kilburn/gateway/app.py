"""The ASGI application of the gateway."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import threading
import time
from collections.abc import AsyncIterable, AsyncIterator, Callable, Iterator, Mapping, MutableMapping, MutableSequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Any, NamedTuple, Protocol
from urllib.parse import quote, unquote

import anyio
import msgspec

import kilburn
from kilburn import tracing
from kilburn.backends.gateways import open_turnstile
from kilburn.budget import Budget
from kilburn.errors import KilburnError, MissingExtra, Refused, SpecError, StoreError, Unavailable
from kilburn.gateway import by_hand, spans
from kilburn.gateway.access import LINGER, LOOPBACK, METHODS, Access, App, is_probe
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.exchange import LEAVING, Exchange
from kilburn.gateway.faults import Offer
from kilburn.gateway.form import Form, parse_fields
from kilburn.gateway.history import Histories
from kilburn.gateway.kept import Ids, Kept, is_ours, names_nothing
from kilburn.gateway.keys import Key, Keys, Link
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.logs import Log
from kilburn.gateway.memories import Learners
from kilburn.gateway.messages import MessagesForm
from kilburn.gateway.metrics import Counts, Metrics, OwnCounts
from kilburn.gateway.problems import Problem, is_anthropic, unread_reason
from kilburn.gateway.relay import Receive, Relay, Scope, Send, fail, forward
from kilburn.gateway.repeats import Repeats
from kilburn.gateway.responses import ResponsesForm
from kilburn.gateway.sayings import Sayings
from kilburn.gateway.status import Trouble, routes
from kilburn.gateway.tally import Tally
from kilburn.gateway.threads import in_thread
from kilburn.gateway.upstream import KEY_FROM, Endpoint, InProcess, UpstreamApi, is_lent, joined
from kilburn.gateway.users import Shares, below, requested_user
from kilburn.jobs.claims import FAILED, kept
from kilburn.jobs.ending import read_rule
from kilburn.jobs.worker import Did, JobKind, Ways, Worker
from kilburn.kernel.resolve import resolve
from kilburn.kernel.store import Store
from kilburn.model import takes_tools
from kilburn.native import give_memory_back, limit_heaps
from kilburn.prices import PRICES, Prices
from kilburn.retrieval import Embedder
from kilburn.search.choice import usual_embedder, vectors_for

try:
    from starlette.responses import Response as PlainResponse
    from starlette.routing import Route, Router
except ModuleNotFoundError as error:
    raise MissingExtra("starlette", "serve") from error

__all__ = ["Settings", "build"]

log = logging.getLogger("kilburn.gateway")

FAIL = ("closed", "open")

LARGE = 1 << 20
"""Minimum size of a body that is parsed by a thread instead of the event loop, in bytes."""

SEARCHED = 1 << 16
"""Maximum size of a body that is searched for ids first, in bytes. For a longer one, the gateway first checks whether any id has
an owner."""

READ_PATHS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
"""Paths whose bodies become sessions."""

FLOWING = (b"multipart/", b"audio/", b"image/", b"video/", b"application/octet-stream", b"application/pdf")
"""Content types of bodies that are passed through. Others are read, because they may name an end user and stored objects."""

AZURE_PATH = re.compile(r"/openai(?:/v1|/deployments/[A-Za-z0-9_-][A-Za-z0-9_.-]*)?(/.+)")
"""A path of Azure's API; the group is the same path below `/v1`."""

OTHER_APIS = {
    "/v1beta/": "Gemini's own API is not served here; use the OpenAI-compatible one: clients call this gateway's /v1, and its "
    "upstream is Gemini's /v1beta/openai/",
    "/api/": "Ollama's own API is not served here; use the OpenAI-compatible one: clients call this gateway's /v1, and its "
    "upstream is Ollama's /v1",
}
"""Paths of unsupported APIs, with the message for the client."""

NOTHING = "there is nothing at this path; see the list of paths in the documentation"

QUIET = 1.0
"""Seconds without a new request, after which work in the background may run."""

SETTLED = 500
"""Number of requests after which freed memory is returned to the system."""

TEND = 600.0
"""Seconds between two checks for expired sessions."""


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """The settings of a gateway.

    Args:
        db: the store's file.
        tenant: the tenant of requests without a key.
        upstream: the endpoint, as its SDK takes it: "https://api.openai.com/v1", or "https://api.anthropic.com".
        model: the model that answers instead of an endpoint, or its spec.
        window: maximum tokens of a prompt and its reply.
        policy: the policy that manages the window.
        tokenizer: counts tokens: see `kilburn.open`.
        file_tokens: tokens of a file that a request names by an id or a URL: see `kilburn.open`.
        embedder: "auto" also searches by meaning, if this machine can: see `kilburn.open`; None searches by words only.
        memory_tools: whether the model is offered recall and search_memory after the first eviction: "auto" until it refuses
            them, "on" or "off". Without them, the gateway searches evicted messages for the user's words.
        rounds: maximum number of rounds of the model's memory calls within one request.
        timeout: seconds of silence of the upstream before a request fails.
        keys: the file of the keys that clients need; None for none.
        one_user: whether all clients of a gateway without keys are one user. Otherwise each credential for the provider
            (`Authorization`, `x-api-key`) is a user of its own.
        hosts: names under which clients may call it; by default those of this machine.
        origins: origins of web pages that may call it.
        limits: limits of clients' requests.
        memory: maximum tokens of long-term memory beside the user's last message, for requests without a key; facts are then
            learned too. 0 for neither.
        link: whether a session is linked to an earlier one with the same content: "auto" if the user is known, "on" or "off". A
            key may set it too, and "off" wins.
        prices: prices of the upstream's tokens, for the money saved.
        log: writes a line for each request; None for none. contents: whether the lines have the requests' bodies.
        fail: how a request is handled that cannot be read or stored, because the store fails or its shape is unknown: "closed"
            refuses it, "open" passes it on unread.
        tend: seconds between two checks for sessions that expire by the tenants' rules (`kilburn sessions rule`).
        background: whether it learns, embeds and expires sessions itself; otherwise `kilburn worker` does.
    """

    db: str = "agent.db"
    tenant: str = "default"
    upstream: str | None = None
    model: Any = None
    window: int = 32_000
    policy: Any = "cost"
    tokenizer: Any = "auto"
    file_tokens: int | None = None
    embedder: Any = "auto"
    memory_tools: str = "auto"
    rounds: int = 5
    timeout: float = 600.0
    keys: str | None = None
    one_user: bool = False
    hosts: tuple[str, ...] = LOOPBACK
    origins: tuple[str, ...] = ()
    limits: RequestBounds = RequestBounds()
    memory: int = 0
    link: str = "auto"
    prices: Prices = PRICES["hosted"]
    log: Log | None = None
    contents: bool = False
    fail: str = "closed"
    tend: float = TEND
    background: bool = True


class Behind(NamedTuple):
    """The parts of a gateway that its dashboard uses.

    Args:
        windows: what is looked at, and changed by hand.
        keys: who may come in; None where no keys are needed, and everyone is `anonymous`.
        origins: of web pages that are ours too.
    """

    windows: by_hand.WindowsByHand
    keys: Keys | None
    anonymous: Key
    origins: frozenset[str]


class Among(Counts, Protocol):
    """State that the processes of one address share: see `kilburn.gateway.worker.Parent`."""

    now: Callable[[], Any]
    used: MutableSequence[float]

    def leads(self, tenant: str) -> bool:
        """Return whether this process does a tenant's work in the background."""
        ...


class Gateway:
    """State shared by all requests: the upstream, and a store for each tenant, opened at its first request.

    Args:
        leads: returns whether this process does a tenant's background work.
        last_request: the time of the last request by `time.monotonic`, shared by several processes; None for a single process.

    Raises:
        SpecError: neither an upstream nor a model, or both; memory tools for a model without tool support; an unknown value of
            `link` or `fail`; both keys and `one_user`.
    """

    def __init__(
        self,
        settings: Settings,
        leads: Callable[[str], bool] = lambda tenant: True,
        last_request: MutableSequence[float] | None = None,
    ) -> None:
        if (settings.upstream is None) == (settings.model is None):
            raise SpecError("a gateway needs an upstream or a model", advice="give --upstream URL or --model SPEC")
        if settings.link not in [*Link]:
            raise SpecError(f"invalid link {settings.link[:40]!r}", advice=f"say one of {', '.join(Link)}")
        if settings.one_user and settings.keys is not None:
            raise SpecError("keys and one user", advice="leave --one-user out: each key says whose sessions it opens")
        if settings.fail not in FAIL:
            raise SpecError(f"invalid fail {settings.fail[:40]!r}", advice=f"say one of {', '.join(FAIL)}")
        self.settings, self.link, self._leads = settings, Link(settings.link), leads
        self.fails_open = settings.fail == "open"
        self._trouble = Trouble(settings.db, settings.tenant)
        self._tally = Tally(open_turnstile(settings.db), opens=self.fails_open)
        self.shares = Shares(settings.limits, self._tally)
        self.repeats = Repeats(self._tally, settings.limits.repeat)
        self.owners = Kept(lambda: self.relay(settings.tenant).histories.store)
        self.upstream: UpstreamApi
        if settings.upstream is not None:
            self.upstream = Endpoint(settings.upstream, timeout=settings.timeout)
        else:
            self.upstream = InProcess(settings.model)
        self._offer = Offer(settings.memory_tools, takes=settings.model is None or takes_tools(settings.model))
        self._lock = threading.Lock()
        self._open: dict[str, Relay] = {}
        self._sayings = Sayings()
        self._stores: list[Store] = []
        self._learners = Learners(works=settings.background)
        self._learned: set[str] = set()
        budget = Budget(settings.window)
        self.windows = by_hand.WindowsByHand(settings.db, lambda tenant: self.relay(tenant).histories, budget, settings.policy)
        self._used = [0.0] if last_request is None else last_request
        self._asked = 0
        self._giving: asyncio.Task[bool] | None = None
        self._embedder: Embedder | None = None
        with suppress(MissingExtra, Unavailable):
            if settings.embedder is not None:
                is_named = settings.embedder != "auto"
                self._embedder = resolve("search.embedders", settings.embedder) if is_named else usual_embedder()

    def prepare(self) -> None:
        """Load the embedder before the first request."""
        try:
            if self._embedder is not None:
                self._embedder.embed(["a"])
        except KilburnError as error:
            log.warning("searches use words only: %s", error)
            self._embedder = None

    @property
    def search(self) -> str:
        """How searches work: by words, or by words and meaning."""
        if self._embedder is None:
            return "words"
        troubled = any(store.vectors is not None and store.vectors.trouble for store in self._stores)
        return "words; meaning fails" if troubled else "words and meaning"

    def now(self) -> Iterator[tuple[str, str, float]]:
        """Yield the present figures: see `kilburn.gateway.metrics.CURRENT`."""
        files = [file for file in (self.settings.db, f"{self.settings.db}-wal") if os.path.exists(file)]
        with suppress(OSError):
            if files:
                yield "store_bytes", "", sum(os.stat(file).st_size for file in files)
        yield "learning_waiting", "", self._learners.waiting
        yield "spans_waiting", "", tracing.waiting()
        yield "requests_waiting", "", self.repeats.waiting
        for tenant, relay in list(self._open.items()):
            store = relay.histories.store
            yield "sessions_open", tenant, relay.histories.held
            with suppress(KilburnError):
                yield "jobs_failed", tenant, sum(job.tries >= FAILED for job in kept(store.backend).values())
            if store.vectors is not None and self._embedder is not None:
                yield "embedding_failing", tenant, bool(store.vectors.trouble)
                with suppress(KilburnError):
                    yield "embedding_behind", tenant, bool(store.backend.vectors.unembedded(self._embedder.name, 1))

    def use(self) -> None:
        """Note a request, to which work in the background gives way."""
        self._used[0] = time.monotonic()
        self._asked += 1
        if self._asked % SETTLED == 0:
            self._giving = asyncio.create_task(in_thread(give_memory_back))

    def _busy(self) -> bool:
        return time.monotonic() - self._used[0] < QUIET

    async def tending(self) -> None:
        """While no request comes, expire sessions by the tenants' rules, and learn from marked sessions, at intervals."""
        while self.settings.background:
            await asyncio.sleep(self.settings.tend)
            if not self._busy():
                await in_thread(self.tend)

    def tend(self) -> None:
        """Expire the sessions of each open tenant by its rule, and learn once from the marked sessions that an earlier gateway
        did not reach before it was killed; sessions of this gateway are learned from after their replies. A request interrupts
        the work, which continues later."""
        learns = self.settings.memory > 0 or self.settings.keys is not None
        for store in list(self._stores) if self.settings.db != ":memory:" else ():
            tenant = store.tenant
            if not self._leads(tenant):
                continue
            try:
                kinds: tuple[JobKind, ...] = (JobKind.EXPIRE,) if read_rule(store.backend) is not None else ()
                kinds += (JobKind.LEARN,) if learns and tenant not in self._learned else ()
                if not kinds:
                    continue
                ways = Ways(kinds=kinds, embedder=None)
                with Worker(self.settings.db, (tenant,), ways, report=_log_work, stopped=self._busy) as worker:
                    worker.once()
                    if not worker.is_over() and JobKind.LEARN in kinds:
                        self._learned.add(tenant)
            except KilburnError as error:
                log.warning("tenant %r: the work in the background failed: %s", tenant, error)

    def opened(self, tenant: str) -> Relay | None:
        """Return the relay of a tenant, if its store is open."""
        return self._open.get(tenant)

    def relay(self, tenant: str) -> Relay:
        """Return the relay of a tenant, and open its store if needed."""
        with self._lock:
            relay = self._open.get(tenant)
            if relay is None:
                settings = self.settings
                store = kilburn.open(
                    settings.db,
                    window=settings.window,
                    policy=settings.policy,
                    tenant=tenant,
                    tokenizer=settings.tokenizer,
                    file_tokens=settings.file_tokens,
                    embedder=None,
                    foreign=False,
                    durable=False,  # a request waits for the disk once, before its client hears the end
                )
                self._stores.append(store)
                if self._embedder is not None:
                    store.vectors = vectors = vectors_for(
                        store.backend, "auto" if settings.embedder == "auto" else self._embedder
                    )
                    vectors.start(QUIET, busy=self._busy, turn=lambda: settings.background and self._leads(tenant))
                relay = self._open[tenant] = Relay(
                    Histories(store, settings.limits, self._sayings),
                    self.upstream,
                    self._learners,
                    self._offer,
                    rounds=settings.rounds,
                    fails_open=self.fails_open,
                )
            return relay

    def failed(self, error: Exception | None) -> None:
        """Note that a request met an error of the store, or none."""
        if error is None or isinstance(error, StoreError):
            self._trouble.note(error)

    def check_rested(self) -> None:
        """Fail at once if requests may be served unread and another request has just waited for the store in vain.

        Raises:
            StoreBusy: another program holds the store.
        """
        if self.fails_open:
            self._trouble.check_rested()

    def check(self) -> None:
        """Check that the store of the gateway's own tenant can be read and written, as far as that can be determined without a
        write.

        Raises:
            StoreError: it cannot.
        """
        self.relay(self.settings.tenant).histories.store.backend.segment("@health", time=0.0, create=False)
        self._trouble.check()

    async def close(self) -> None:
        """Write pending data, and close everything."""
        await self.upstream.close()
        await self._tally.close()
        await in_thread(self._learners.close)
        await in_thread(self.windows.close)
        for store in self._stores:
            await in_thread(store.close)
        await in_thread(self._trouble.close)
        await in_thread(tracing.drain)


def _log_work(did: Did) -> None:
    if did.error:
        log.warning("tenant %r: a job of kind %s failed: %s", did.tenant, did.kind, did.error)
    elif did.count:
        log.info("tenant %r: a job of kind %s is done: %d", did.tenant, did.kind, did.count)


class _Endpoint:
    """One path of the gateway, or all other paths, as an ASGI application.

    Args:
        form: of what is asked there by POST; None where everything goes through unread.
        shape: of errors; None for that of the path.
    """

    def __init__(self, gateway: Gateway, form: Form | None, shape: Form, alternative: Form | None = None) -> None:
        self._gateway, self._form, self._shape, self._other = gateway, form, shape, alternative or shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; stop if the client leaves."""
        self._gateway.use()
        if scope["method"] not in METHODS:
            raise Problem(405, "method_not_allowed", f"this path takes {', '.join(METHODS)}")
        if scope["path"] not in READ_PATHS:
            _check_path(scope)
        began = False

        async def tell(message: dict[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        flow = _Flow(receive) if scope["state"].get("flows") else None
        body = b"" if flow is not None else await _body(receive)
        if body is None:
            return
        shape = self._other if is_anthropic(scope["path"]) else self._shape
        exchange: Exchange = scope["state"]["exchange"]
        headers = joined((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        key: Key = scope["state"]["key"]
        headers[KEY_FROM] = key.upstream
        try:
            arguments = headers, body, key
            fields, user = await in_thread(self._taken_apart, *arguments) if len(body) > LARGE else self._taken_apart(*arguments)
        except KilburnError as error:
            exchange.problem = type(error).__name__
            await fail(shape, error, send)
            return
        async with self._gateway.shares.taken(key, user):
            exchange.key = key = below(key, user, self._gateway.link)
            try:
                answering = await self._kept(scope, body, headers, key, tell)
            except KilburnError as error:
                self._gateway.failed(error)
                exchange.problem = type(error).__name__
                await fail(shape, error, send)
                return
            on_leaving = scope["state"].get(LEAVING) if flow is None else None
            async with _UnlessLeft(receive, None if flow is None else flow.over, on_leaving):
                try:
                    if flow is None:
                        if self._form is not None and scope["method"] == "POST":
                            spans.begin(exchange, headers)
                        with exchange.span.current():
                            await self._answer(scope, body, headers, key, answering, lambda: began, fields)
                    else:
                        await self._flow(scope, flow, headers, answering)
                except KilburnError as error:
                    if began:
                        raise
                    exchange.problem = type(error).__name__
                    await fail(shape, error, send)

    def _taken_apart(self, headers: Mapping[str, str], body: bytes, key: Key) -> tuple[Mapping[str, msgspec.Raw] | None, str]:
        """Return the fields of a body that is read here, and the end user that the request names."""
        fields = None if self._form is None else parse_fields(body)
        return fields, requested_user(headers, body, key, fields)

    async def _kept(self, scope: Scope, body: bytes, headers: Mapping[str, str], key: Key, tell: Send) -> Send:
        """Check that the stored objects that a request names are its user's. Return a sender that makes the objects of the answer
        this user's."""
        gateway = self._gateway
        if len(body) <= SEARCHED and names_nothing(scope["method"], scope["path"], body, key):
            return tell
        check = partial(gateway.owners.check, scope["method"], scope["path"], body, key, lent=is_lent(headers))
        if not await in_thread(check):
            return tell
        ids, reads, writes = Ids(), False, True

        async def telling(message: dict[str, Any]) -> None:
            nonlocal reads, writes
            if message["type"] == "http.response.start":
                kinds = [value for name, value in message["headers"] if name.lower() == b"content-type"]
                reads = any(b"json" in kind or b"event-stream" in kind for kind in kinds)
            elif reads and (digests := ids.feed(message.get("body", b""))):
                try:
                    await in_thread(partial(gateway.owners.claim, digests, key, write=writes))
                except StoreError as error:
                    # The owner stays in memory, and is written with the next one.
                    writes = False
                    gateway.failed(error)
                    log.warning("the owner of a response was not stored: %s", type(error).__name__)
            await tell(message)

        return telling

    async def _answer(
        self,
        scope: Scope,
        body: bytes,
        headers: dict[str, str],
        key: Key,
        send: Send,
        began: Callable[[], bool],
        fields: Mapping[str, msgspec.Raw] | None,
    ) -> None:
        path, gateway = _upstream_path(scope), self._gateway
        form = self._form if scope["method"] == "POST" else None
        if form is None or headers.get("x-kilburn", "").lower() == "off":
            await self._pass(scope, path, body, headers, send)
            return
        exchange: Exchange = scope["state"]["exchange"]
        try:
            gateway.check_rested()
            relay = gateway.opened(key.tenant)
            if relay is None:
                relay = await in_thread(gateway.relay, key.tenant)
            empty = form.empty(body, fields)
            if empty or (form.unread(body, fields) and not await in_thread(relay.histories.has, form, body, headers, key.user)):
                if not gateway.upstream.speaks(form):
                    reason_text = "goes on from what a provider keeps, and this upstream keeps nothing"
                    problem = f"the request {'has no conversation' if empty else reason_text}"
                    raise Refused(problem, advice=f"send the whole conversation as {form.key}")
                await self._pass(scope, path, body, headers, send)
                return
            name = headers.get("x-kilburn-session", "")
            async with gateway.repeats.alone(key.tenant, key.user, name, path, body) as hold:
                await relay.answer(form, body, path, headers, key, exchange, send, hold, fields)
        except Exception as error:
            gateway.failed(error)
            if began() or not gateway.fails_open or not (reason := unread_reason(error)) or is_ours(form, body):
                raise
            exchange.unread, exchange.form = reason, form.name
            log.warning("a request is served unread: %s", error if isinstance(error, StoreError) else type(error).__name__)
            if exchange.rounds:
                # A provider would repeat its first answer under the same idempotency key.
                headers = {name: value for name, value in headers.items() if name != "idempotency-key"}
            headers = {**headers, **exchange.span.carried()}
            await forward(gateway.upstream, "POST", path, body, headers, send, form, reason)
        else:
            gateway.failed(exchange.unkept)

    async def _flow(self, scope: Scope, flow: _Flow, headers: Mapping[str, str], send: Send) -> None:
        """Pass a body through as it arrives."""

        async def sending(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.body" and not message.get("more_body"):
                # An upstream may answer before the end of the body, and a client that is cut off while sending gets no answer.
                with anyio.move_on_after(LINGER):
                    await flow.drain()
            await send(message)

        try:
            await self._pass(scope, _upstream_path(scope), flow, headers, sending)
        except KilburnError:
            if flow.left:
                return
            if flow.problem is not None:
                raise flow.problem from None
            raise

    async def _pass(
        self, scope: Scope, path: str, body: bytes | AsyncIterable[bytes], headers: Mapping[str, str], send: Send
    ) -> None:
        upstream = self._gateway.upstream
        if isinstance(upstream, InProcess):
            if self._form is not None:
                raise Refused("a model in this process cannot pass requests through", advice="leave x-kilburn out")
            if not upstream.answers(path):
                await _nothing(scope, None, None)
        if "websocket" in headers.get("upgrade", "").lower():
            raise Problem(501, "no_websockets", "the gateway does not support WebSockets; connect to the provider directly")

        exchange: Exchange = scope["state"]["exchange"]
        headers = {**headers, **exchange.span.carried()}
        if await forward(upstream, scope["method"], path, body, headers, send) >= 400:
            exchange.problem = "upstream_error"


class _UnlessLeft:
    """Cancels its block, without an error, when the client leaves.

    Args:
        over: set when the client's body is over, if that is read inside.
        on_leaving: the server's way to say so, if it has one: see `connection`.
    """

    def __init__(
        self, receive: Receive, over: anyio.Event | None, on_leaving: Callable[[Callable[[], None]], Callable[[], None]] | None
    ) -> None:
        self._receive, self._over, self._on_leaving = receive, over, on_leaving
        self._done = self._left = False
        self._stop: Callable[[], object] = lambda: None

    async def __aenter__(self) -> None:
        self._task = asyncio.current_task()
        if self._on_leaving is not None:
            self._stop = self._on_leaving(self._leave)
        else:
            self._stop = asyncio.get_running_loop().create_task(self._watch()).cancel

    async def _watch(self) -> None:
        if self._over is not None:
            await self._over.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self._leave()

    def _leave(self) -> None:
        if not self._done and self._task is not None:
            self._left = True
            self._task.cancel()

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> bool:
        self._done = True
        self._stop()
        if self._left and self._task is not None:
            self._task.uncancel()
            return kind is asyncio.CancelledError
        return False


class _Flow:
    """A body that is passed on as it arrives."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self.over = anyio.Event()
        self.left = False
        """Whether the client left before its end."""
        self.problem: Problem | None = None

    async def __aiter__(self) -> AsyncIterator[bytes]:
        """Yield the pieces.

        Raises:
            Problem: it is too large, or too slow. ConnectionAbortedError: the client went away.
        """
        while not self.over.is_set():
            try:
                message = await self._receive()
            except Problem as problem:
                self.problem = problem
                raise
            if message["type"] == "http.disconnect":
                self.left = True
                raise ConnectionAbortedError("the client went away")
            if not message.get("more_body", False):
                self.over.set()
            if piece := message.get("body", b""):
                yield piece

    async def drain(self) -> None:
        """Read the rest, and discard it."""
        with suppress(Problem, ConnectionAbortedError):
            async for _ in self:
                pass


def _check_path(scope: Scope) -> None:
    """Refuse a path that another server may resolve differently.

    Raises:
        Problem: it is refused.
    """
    path: str = scope["path"]
    parts = re.split(r"[/\\]", path)
    # The provider's key may give access to more at other paths.
    if any(part.partition(";")[0] in (".", "..") for part in parts) or unquote(path) != path or not path.isprintable():
        raise Problem(404, "unknown_url", NOTHING)


def _upstream_path(scope: Scope) -> str:
    """Return the path below `/v1` and its query, as the client wrote them."""
    raw = scope.get("raw_path") or quote(scope["path"], safe="/:@").encode()
    path = raw.decode("latin-1").partition("?")[0].removeprefix("/v1")
    query = scope.get("query_string", b"").decode("latin-1")
    return f"{path}?{query}" if query else path


def _flows(scope: MutableMapping[str, Any]) -> bool:
    """Return whether a request has a body that the gateway does not read, such as a file."""
    if scope["path"] in READ_PATHS or not scope["path"].startswith("/v1/"):
        return False
    headers = {name: value.lower() for name, value in scope["headers"]}
    return (headers.get(b"content-length", b"0").strip() != b"0" or b"transfer-encoding" in headers) and headers.get(
        b"content-type", b""
    ).lstrip().startswith(FLOWING)


async def _body(receive: Receive) -> bytes | None:
    """Read the whole body; return None if the client left before its end."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


async def check(settings: Settings) -> None:
    """Open the store once, and read the keys, so that errors are reported before several processes start with these settings.

    Raises:
        SpecError: settings that do not fit. StoreError: the store cannot be opened.
    """
    gateway = Gateway(msgspec.structs.replace(settings, embedder=None))
    try:
        _check_store(gateway)
        if settings.keys is not None:
            Keys(settings.keys).close()
    finally:
        await gateway.close()


def _check_store(gateway: Gateway) -> None:
    try:
        gateway.check()
    except StoreError as error:
        if not gateway.fails_open:
            raise
        log.warning("requests are served unread until the store can be used: %s", error)


def build(settings: Settings, people: Callable[[Behind], App] | None = None, among: Among | None = None) -> App:
    """Return the gateway as an ASGI application with access control.

    Args:
        people: makes what is shown to people, such as `kilburn.dashboard.behind_keys.mounted()`; None for nothing.
        among: what it has in common with other processes; None where it is alone.

    Raises:
        SpecError: settings that do not fit. StoreError: the store cannot be opened.
    """
    gateway = Gateway(settings) if among is None else Gateway(settings, among.leads, among.used)
    _check_store(gateway)
    chat, messages, responses = ChatForm(), MessagesForm(), ResponsesForm()

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        limit_heaps()
        await in_thread(gateway.prepare)
        tending = asyncio.create_task(gateway.tending())
        try:
            yield
        finally:
            tending.cancel()
            await asyncio.wait([tending])
            await gateway.close()
            if keys is not None:
                keys.close()

    # Exporting spans may be slow; no request waits for it.
    tracing.end_aside()
    counts: Counts = OwnCounts(Metrics(settings.prices, gateway.now)) if among is None else among
    if among is not None:
        among.now = gateway.now
    readers = [counts.observe, spans.end, *([] if settings.log is None else [settings.log.observe])]

    def observe(exchange: Exchange) -> None:
        for reader in readers:
            reader(exchange)

    answering = (_Endpoint(gateway, chat, chat), _Endpoint(gateway, responses, chat), _Endpoint(gateway, messages, messages))
    endpoints: Mapping[str, Any] = dict(zip(READ_PATHS, answering, strict=True))
    paths = [
        Route("/v1/{rest:path}", _Endpoint(gateway, None, chat, messages)),
        *routes(counts, gateway.check, lambda: gateway.search, keyed=settings.keys is not None, serves=gateway.fails_open),
        *by_hand.routes(gateway.windows, gateway.shares),
    ]
    router = Router(paths, default=_nothing, lifespan=lifespan, redirect_slashes=False)

    async def routed(scope: MutableMapping[str, Any], receive: Any, send: Any) -> None:
        path = scope.get("path", "")
        if scope["type"] == "http" and is_probe(scope):
            await PlainResponse()(scope, receive, send)
            return
        if azure := AZURE_PATH.fullmatch(path):
            # The path below `/v1` decides about the request; `raw_path` goes upstream.
            scope = {**scope, "path": f"/v1{azure[1]}", "raw_path": scope.get("raw_path") or quote(path, safe="/:@").encode()}
        await endpoints.get(scope.get("path", ""), router)(scope, receive, send)

    keys = None if settings.keys is None else Keys(settings.keys)
    anonymous = Key(tenant=settings.tenant, memory=settings.memory, learn=settings.memory > 0)
    behind = Behind(gateway.windows, keys, anonymous, frozenset(origin.lower() for origin in settings.origins))
    return Access(
        routed,
        keys=keys,
        anonymous=anonymous,
        one_user=settings.one_user,
        hosts=settings.hosts,
        origins=settings.origins,
        limits=settings.limits,
        observe=observe,
        contents=settings.contents,
        flows=_flows,
        people=None if people is None else people(behind),
    )


async def _nothing(scope: MutableMapping[str, Any], receive: object, send: object) -> None:
    for beginning, message in OTHER_APIS.items():
        if scope["path"].startswith(beginning):
            raise Problem(404, "unsupported_api", message)
    raise Problem(404, "unknown_url", NOTHING)

"""The ASGI application of the gateway."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import AsyncIterator, Mapping, MutableMapping
from contextlib import asynccontextmanager, suppress
from typing import Any
from urllib.parse import quote

import anyio
import msgspec
from anyio.to_thread import run_sync

import kilburn
from kilburn.errors import KilburnError, MissingExtra, Refused, SpecError, StoreError, Unavailable
from kilburn.gateway.access import LOOPBACK, Access, App
from kilburn.gateway.chat import Chat
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.faults import MemoryTools, Offer
from kilburn.gateway.form import Form
from kilburn.gateway.history import Histories
from kilburn.gateway.kept import Ids, Kept, is_kept
from kilburn.gateway.keys import Key, Keys, Link
from kilburn.gateway.limits import Bounds, check_listening, limits_of
from kilburn.gateway.logs import Log
from kilburn.gateway.memories import Learners
from kilburn.gateway.messages import Messages
from kilburn.gateway.metrics import Metrics
from kilburn.gateway.problems import Problem
from kilburn.gateway.relay import Receive, Relay, Scope, Send, fail, forward
from kilburn.gateway.responses import Responses
from kilburn.gateway.spans import spans
from kilburn.gateway.status import routes
from kilburn.gateway.upstream import KEY_FROM, Endpoint, InProcess, Upstream, joined
from kilburn.gateway.users import Shares, below, told
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.resolve import resolve
from kilburn.memory.choice import usual_embedder, vectors_for
from kilburn.model import takes_tools
from kilburn.prices import PRICES, Prices
from kilburn.retrieval import Embedder

try:
    from starlette.routing import Route, Router
except ModuleNotFoundError as error:
    raise MissingExtra("starlette", "serve") from error

__all__ = [
    "LOOPBACK",
    "Bounds",
    "Gateway",
    "Log",
    "MemoryTools",
    "Settings",
    "build",
    "check_listening",
    "limits_of",
    "uvicorn_options",
]

log = logging.getLogger("kilburn.gateway")

LARGE = 1 << 18
"""Bytes of a body that is read by a thread, so that nobody else waits for it."""

QUIET = 1.0
"""Seconds without a new request, after which the gateway does what can wait."""


class Settings(msgspec.Struct, kw_only=True, frozen=True):
    """What a gateway is made of.

    Args:
        db: the store's file.
        tenant: whose sessions they are, where no key says it.
        upstream: the endpoint, as its SDK takes it: "https://api.openai.com/v1", or "https://api.anthropic.com".
        model: what answers instead of an endpoint: a model, or its spec.
        window: tokens that a prompt and its reply may take.
        policy: what decides at the window.
        tokenizer: counts tokens: see `kilburn.open`.
        embedder: "auto" finds by meaning too, where that can be done on this machine: see `kilburn.open`; None by words alone.
        memory_tools: whether the model is offered recall and search_memory once something has left the window: "auto" until it
            refuses them, "on" or "off". Without them what has left is searched for the user's words.
        rounds: times that the model's memory calls are answered within one request.
        timeout: seconds of silence of the upstream before a request is given up.
        keys: the file of the keys that clients need; None for none.
        hosts: names under which clients may call it; by default those of this machine.
        origins: of web pages that may call it.
        limits: what clients may take.
        memory: tokens of long-term memory beside the user's last message, and facts are learned, where no key says it;
            0 for neither.
        link: whether a session is linked to an earlier one because it says the same: "auto" where it is known whose they are,
            "on" or "off". A key may say so too, and "off" wins.
        prices: of the upstream's tokens, for what is saved.
        log: writes a line for each request; None for none. contents: whether it says what was asked.
    """

    db: str = "agent.db"
    tenant: str = "default"
    upstream: str | None = None
    model: Any = None
    window: int = 32_000
    policy: Any = "cost"
    tokenizer: Any = "auto"
    embedder: Any = "auto"
    memory_tools: str = "auto"
    rounds: int = 5
    timeout: float = 600.0
    keys: str | None = None
    hosts: tuple[str, ...] = LOOPBACK
    origins: tuple[str, ...] = ()
    limits: Bounds = Bounds()
    memory: int = 0
    link: str = "auto"
    prices: Prices = PRICES["hosted"]
    log: Log | None = None
    contents: bool = False


class Gateway:
    """What the requests of all tenants share: the upstream, and a store for each tenant, opened when it is asked for.

    Raises:
        SpecError: neither an upstream nor a model, or both; memory tools for a model that takes none; no such link.
    """

    def __init__(self, settings: Settings) -> None:
        if (settings.upstream is None) == (settings.model is None):
            raise SpecError("a gateway needs an upstream or a model", advice="give --upstream URL or --model SPEC")
        if settings.link not in [*Link]:
            raise SpecError(f"link {settings.link[:40]!r}", advice=f"say one of {', '.join(Link)}")
        self.settings, self.link = settings, Link(settings.link)
        self.shares = Shares(settings.limits)
        self._kept: Kept | None = None
        self.upstream: Upstream
        if settings.upstream is not None:
            self.upstream = Endpoint(settings.upstream, timeout=settings.timeout)
        else:
            self.upstream = InProcess(settings.model)
        self._offer = Offer(settings.memory_tools, takes=settings.model is None or takes_tools(settings.model))
        self._lock = threading.Lock()
        self._open: dict[str, Relay] = {}
        self._stores: list[Hierarchy] = []
        self._learners = Learners()
        self._used = 0.0
        self._embedder: Embedder | None = None
        with suppress(MissingExtra, Unavailable):
            if settings.embedder is not None:
                named = settings.embedder != "auto"
                self._embedder = resolve("memory.embedders", settings.embedder) if named else usual_embedder()

    def prepare(self) -> None:
        """Load what finds by meaning, so that no request waits for it."""
        try:
            if self._embedder is not None:
                self._embedder.embed(["a"])
        except KilburnError as error:
            log.warning("what was said is found by words alone: %s", error)
            self._embedder = None

    @property
    def search(self) -> str:
        """How what was said is found."""
        if self._embedder is None:
            return "words"
        troubled = any(store.vectors is not None and store.vectors.trouble for store in self._stores)
        return "words; meaning fails" if troubled else "words and meaning"

    def use(self) -> None:
        """A request came: what is done in the background lets it go first."""
        self._used = time.monotonic()

    def _busy(self) -> bool:
        return time.monotonic() - self._used < QUIET

    def opened(self, tenant: str) -> Relay | None:
        """What answers the requests of a tenant, if its store is open."""
        return self._open.get(tenant)

    def relay(self, tenant: str) -> Relay:
        """What answers the requests of a tenant."""
        with self._lock:
            known = self._open.get(tenant)
            if known is None:
                settings = self.settings
                store = kilburn.open(
                    settings.db,
                    window=settings.window,
                    policy=settings.policy,
                    tenant=tenant,
                    tokenizer=settings.tokenizer,
                    embedder=None,
                    foreign=False,
                    durable=False,  # a request waits for the disk once, before its client hears the end
                )
                self._stores.append(store)
                if self._embedder is not None:
                    store.vectors = vectors = vectors_for(store.store, "auto" if settings.embedder == "auto" else self._embedder)
                    vectors.start(QUIET, busy=self._busy)
                known = self._open[tenant] = Relay(
                    Histories(store, settings.limits.messages),
                    self.upstream,
                    self._learners,
                    self._offer,
                    rounds=settings.rounds,
                )
            return known

    def kept(self) -> Kept:
        """Whose it is what the provider keeps."""
        store = self.relay(self.settings.tenant).histories.hierarchy
        with self._lock:
            if self._kept is None:
                self._kept = Kept(store)
            return self._kept

    def check(self) -> None:
        """Raise a StoreError if the store of the gateway's own tenant cannot be read."""
        self.relay(self.settings.tenant).histories.hierarchy.store.process("@health", time=0.0, create=False)

    async def close(self) -> None:
        """Write what waits, and close everything."""
        await self.upstream.close()
        await run_sync(self._learners.close)
        for store in self._stores:
            await run_sync(store.close)


class _Endpoint:
    """One path of the gateway, as an ASGI application.

    Args:
        form: of what is asked there; None where everything goes through unread.
    """

    def __init__(self, gateway: Gateway, form: Form | None, shape: Form, *methods: str) -> None:
        self._gateway, self._form, self._shape, self._methods = gateway, form, shape, methods or ("POST",)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request; a client that goes away ends the work."""
        self._gateway.use()
        if scope["method"] not in self._methods:
            raise Problem(405, "method_not_allowed", f"this path takes {', '.join(self._methods)}")
        done = anyio.Event()

        async def watch() -> None:
            while (await receive())["type"] != "http.disconnect":
                pass
            if not done.is_set():
                group.cancel_scope.cancel()

        began = False

        async def tell(message: dict[str, Any]) -> None:
            nonlocal began
            began = True
            await send(message)

        body = await _body(receive)
        if body is None:
            return
        exchange: Exchange = scope["state"]["exchange"]
        headers = joined((name.decode("latin-1"), value.decode("latin-1")) for name, value in scope["headers"])
        key: Key = scope["state"]["key"]
        headers[KEY_FROM] = key.upstream
        try:
            user = await run_sync(told, headers, body, key) if len(body) > LARGE else told(headers, body, key)
        except KilburnError as error:
            exchange.problem = type(error).__name__
            await fail(self._shape, error, send)
            return
        with self._gateway.shares.taken(key, user):
            exchange.key = key = below(key, user, self._gateway.link)
            answering: Send = tell
            if scope["path"].startswith("/v1/responses"):
                try:
                    answering = await self._kept(scope["path"], body, key, tell)
                except KilburnError as error:
                    exchange.problem = type(error).__name__
                    await fail(self._shape, error, send)
                    return
            async with anyio.create_task_group() as group:
                group.start_soon(watch)
                try:
                    await self._answer(scope, body, headers, key, answering)
                except KilburnError as error:
                    if began:
                        raise
                    exchange.problem = type(error).__name__
                    await fail(self._shape, error, send)
                finally:
                    done.set()
                group.cancel_scope.cancel()

    async def _kept(self, path: str, body: bytes, key: Key, tell: Send) -> Send:
        """Check that what a request names of what the provider keeps is its user's; how it is answered, so that what the
        provider keeps of the answer is its user's too."""
        gateway, ids = self._gateway, Ids()
        kept = await run_sync(gateway.kept)
        await run_sync(kept.check, path, body, key)

        async def telling(message: dict[str, Any]) -> None:
            if found := ids.feed(message.get("body", b"")):
                kept.claim(found, key)
                try:
                    await run_sync(kept.write)
                except StoreError as error:
                    # It holds as long as the gateway runs, and is written with the next one.
                    log.warning("whose a response is was not written: %s", type(error).__name__)
            await tell(message)

        return telling if is_kept(key) else tell

    async def _answer(self, scope: Scope, body: bytes, headers: dict[str, str], key: Key, send: Send) -> None:
        if not {".", ".."}.isdisjoint(scope["path"].split("/")):
            # The provider's key opens more there than what is spoken here.
            await _nothing(scope, None, None)
        path = quote(scope["path"].removeprefix("/v1"), safe="/:@")
        query = scope.get("query_string", b"").decode("latin-1")
        path = f"{path}?{query}" if query else path
        gateway = self._gateway
        if self._form is None or headers.get("x-kilburn", "").lower() == "off":
            await self._pass(scope, path, body, headers, send)
            return
        empty = self._form.empty(body)
        relay = gateway.opened(key.tenant)
        if relay is None:
            relay = await run_sync(gateway.relay, key.tenant)
        if empty or (self._form.unread(body) and not await run_sync(relay.histories.has, self._form, body, headers, key.user)):
            if not gateway.upstream.speaks(self._form):
                kept = "goes on from what a provider keeps, and this upstream keeps nothing"
                what = f"the request {'has no conversation' if empty else kept}"
                raise Refused(what, advice=f"send the whole conversation as {self._form.key}")
            await self._pass(scope, path, body, headers, send)
            return
        await relay.answer(self._form, body, path, headers, key, scope["state"]["exchange"], send)

    async def _pass(self, scope: Scope, path: str, body: bytes, headers: Mapping[str, str], send: Send) -> None:
        upstream = self._gateway.upstream
        if self._form is not None and isinstance(upstream, InProcess):
            raise Refused("a model of this process has no prompt to pass through", advice="leave x-kilburn out")
        if await forward(upstream, scope["method"], path, body, headers, send) >= 400:
            scope["state"]["exchange"].problem = "upstream_error"


async def _body(receive: Receive) -> bytes | None:
    """The whole body; None if the client went away before."""
    pieces: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return None
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces)


def build(settings: Settings) -> App:
    """The gateway as an ASGI application, behind its door.

    Raises:
        SpecError: settings that do not fit. StoreError: the store cannot be opened.
    """
    gateway = Gateway(settings)
    gateway.check()
    chat, messages = Chat(), Messages()

    @asynccontextmanager
    async def lifespan(_: object) -> AsyncIterator[None]:
        await run_sync(gateway.prepare)
        try:
            yield
        finally:
            await gateway.close()

    metrics = Metrics(settings.prices)
    readers = [metrics.observe, spans(), *([] if settings.log is None else [settings.log.observe])]

    def observe(exchange: Exchange) -> None:
        for reader in readers:
            reader(exchange)

    paths = [
        Route("/v1/chat/completions", _Endpoint(gateway, chat, chat)),
        Route("/v1/responses", _Endpoint(gateway, Responses(), chat)),
        Route("/v1/responses/{rest:path}", _Endpoint(gateway, None, chat, "GET", "POST", "DELETE")),
        Route("/v1/messages", _Endpoint(gateway, messages, messages)),
        Route("/v1/messages/count_tokens", _Endpoint(gateway, None, messages)),
        Route("/v1/embeddings", _Endpoint(gateway, None, chat)),
        Route("/v1/models", _Endpoint(gateway, None, chat, "GET")),
        Route("/v1/models/{name:path}", _Endpoint(gateway, None, chat, "GET")),
        *routes(metrics, gateway.check, lambda: gateway.search, keyed=settings.keys is not None),
    ]
    return Access(
        Router(paths, default=_nothing, lifespan=lifespan, redirect_slashes=False),
        keys=None if settings.keys is None else Keys(settings.keys),
        anonymous=Key(tenant=settings.tenant, memory=settings.memory, learn=settings.memory > 0),
        hosts=settings.hosts,
        origins=settings.origins,
        limits=settings.limits,
        observe=observe,
        contents=settings.contents,
    )


async def _nothing(scope: MutableMapping[str, Any], receive: object, send: object) -> None:
    raise Problem(404, "unknown_url", "there is nothing at this path; see the list of paths in the documentation")

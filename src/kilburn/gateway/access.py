"""Admission of requests: Host, Origin, key and limits. Pure ASGI, so that a client that leaves is noticed.

The checks are, in this order: Host and Origin, headers, key, rate, concurrent requests, size, body. The application finds the
`Key` in `scope["state"]["key"]` and the whole body in one message. The gateway's own key is removed from the headers, so that it
cannot be passed on.
"""

from __future__ import annotations

import asyncio
import math
import re
import time
import traceback
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, MutableMapping
from contextlib import suppress
from typing import Any

import msgspec

from kilburn.errors import SpecError
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.keys import Key, Keys
from kilburn.gateway.limits import BodyTally, Buckets, RequestBounds, is_loopback
from kilburn.gateway.problems import Problem, error_body, over_most, over_rate
from kilburn.gateway.users import client_user

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]
HeaderValues = dict[bytes, list[bytes]]
"""The values of each header."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
"""Host names of this machine."""

LINGER = 5.0
"""Seconds for which the rest of a refused body is read and discarded: a client that is cut off while sending gets no reply."""

METHODS = ("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE")
"""Methods that a client may use. TRACE would reveal the provider's key."""

OPEN = "/health"
"""The only path that needs no key."""

REQUEST = b"x-kilburn-request"
"""Response header with the id of the request."""

REQUEST_ID_HEADERS = (b"x-client-request-id", b"x-request-id")
"""Headers with the client's own id of a request, in order of precedence."""

A_NAME = re.compile(rb"[\x21-\x7e]{1,128}")
"""Matches a client's id of a request; others are ignored."""

A_PARENT = re.compile(rb"00-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")

FIGURES = ("/metrics", "/sessions")
"""Paths for a key with `figures`."""

LOOKING, READING = ("/metrics/", "/sessions/"), ("GET", "HEAD")
"""Path prefixes and methods for a key with `looks`."""

FORWARDED = frozenset((b"forwarded", b"via", b"x-forwarded-for", b"x-real-ip"))
"""Headers that proxies add: a forwarded request is not from this machine."""

PEOPLE = "/dashboard"
"""Path of the dashboard. A browser has no key, so the dashboard signs people in itself."""

VISITORS = 96
"""Maximum number of concurrent requests of browsers, which do not count against the limits of clients."""


class Access:
    """Admits requests to an application, or refuses them.

    Args:
        app: the application that answers admitted requests.
        keys: the keys of admitted clients; None admits every client as `anonymous`.
        anonymous: the key of clients if there are no keys.
        one_user: whether all clients are one user if there are no keys. Otherwise each credential for the provider is a user.
        hosts: allowed names in the Host header, without port; "*" for any.
        origins: origins of web pages that may call; without any, all pages are refused.
        limits: the limits of requests.
        observe: called with every exchange at its end.
        contents: whether the log gets bodies.
        flows: decides whether a request's body is passed on piece by piece instead of read whole; `scope["state"]["flows"]` has
            the result.
        people: the application below `PEOPLE`; None for none.
    """

    def __init__(
        self,
        app: App,
        *,
        keys: Keys | None = None,
        anonymous: Key | None = None,
        one_user: bool = False,
        hosts: Iterable[str] = LOOPBACK,
        origins: Iterable[str] = (),
        limits: RequestBounds | None = None,
        observe: Callable[[Exchange], None] = lambda exchange: None,
        contents: bool = False,
        flows: Callable[[Scope], bool] = lambda scope: False,
        people: App | None = None,
    ) -> None:
        self.flows, self.people = flows, people
        self._visitors = 0
        self.app, self.keys, self.limits, self.observe, self.contents = app, keys, limits or RequestBounds(), observe, contents
        self.anonymous, self.one_user = anonymous or Key(), one_user
        self.hosts = frozenset(host.lower() for host in hosts)
        self.origins = frozenset(origin.lower() for origin in origins)
        self._running: Counter[str] = Counter()
        self._held = 0
        self._buckets = Buckets()
        self._inner: App = self._admitted
        if self.origins:
            from starlette.middleware.cors import CORSMiddleware

            self._inner = CORSMiddleware(
                self._admitted, allow_origins=tuple(self.origins), allow_methods=METHODS, allow_headers=["*"]
            )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})
        client = scope.get("client")
        exchange = Exchange(method=scope["method"], path=scope["path"], client=client[0] if client else "")
        values = by_name(scope["headers"])
        exchange.parent, exchange.client_name = parent_in(values), name_in(values)
        scope = {**scope, "state": {**scope.get("state", {}), "exchange": exchange, "given": values}}

        async def sending(message: Message) -> None:
            if message["type"] == "http.response.start":
                exchange.status = message["status"]
                # The upstream may be a gateway itself.
                headers = [header for header in message["headers"] if header[0].lower() != REQUEST]
                message = {**message, "headers": [*headers, (REQUEST, exchange.id.encode())]}
            elif exchange.first is None and (message.get("body") or not message.get("more_body")):
                exchange.first = time.perf_counter() - exchange.started
            await send(message)

        ended = False

        async def receiving() -> Message:
            nonlocal ended
            message = await receive()
            ended = not message.get("more_body")
            return message

        try:
            try:
                self._check_framing(scope, values)
                if self.people is not None and f"{scope['path']}/".startswith(f"{PEOPLE}/"):
                    self._check_host(values)
                    await self._visited(self.people, scope, receiving, sending)
                else:
                    self._check_caller(values)
                    await self._inner(scope, receiving, sending)
            except Exception as error:  # noqa: BLE001 -- it goes to the log, and the client is told
                problem = self._to_problem(error, exchange)
                if exchange.status:
                    raise ConnectionAbortedError(f"a reply broke off: {exchange.problem}") from None
                await self._refuse(problem, exchange, None if ended else receive, sending)
        except asyncio.CancelledError:
            exchange.problem = "cancelled"
            raise
        finally:
            exchange.status = exchange.status or 499
            exchange.seconds = time.perf_counter() - exchange.started
            self.observe(exchange)
        return None

    def _to_problem(self, error: Exception, exchange: Exchange) -> Problem:
        while isinstance(error, ExceptionGroup) and len(error.exceptions) == 1:
            error = error.exceptions[0]
        problem = error if isinstance(error, Problem) else Problem(500, "internal_error", "the gateway failed; see its log")
        exchange.problem = problem.code
        if problem is not error:
            places = [f"{place.filename}:{place.lineno}" for place in traceback.extract_tb(error.__traceback__)]
            exchange.trace = " > ".join([*places, type(error).__name__]) + (f": {error}" if self.contents else "")
        return problem

    def _check_framing(self, scope: Scope, values: HeaderValues) -> None:
        """Refuse ambiguous framing: a proxy that reads it differently would take the rest of the body for another request. The
        server itself refuses other wrong lengths."""
        if b"transfer-encoding" not in values:
            return
        if b"content-length" in values:
            raise Problem(400, "invalid_length", "Content-Length and Transfer-Encoding are both given; send one of them")
        if scope.get("http_version") == "1.0":
            raise Problem(400, "invalid_length", "HTTP/1.0 has no Transfer-Encoding; send Content-Length")

    def _check_caller(self, values: HeaderValues) -> None:
        """Check Host and Origin, against web pages and names that resolve to this machine by deceit."""
        self._check_host(values)
        if any(origin.decode("latin-1").lower() not in self.origins for origin in values.get(b"origin", ())):
            raise Problem(403, "invalid_origin", "web pages may not call this gateway from that origin")

    def _check_host(self, values: HeaderValues) -> None:
        hosts = values.get(b"host", [])
        if len(hosts) != 1:
            raise Problem(400, "invalid_host", "a request has exactly one Host header")
        if "*" not in self.hosts and host_name(hosts[0]) not in self.hosts:
            raise Problem(421, "invalid_host", "this gateway has another name: the Host header is not one that it serves")

    async def _visited(self, people: App, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve a person's browser. The application itself signs people in and checks where requests come from."""
        self._check_headers(scope["headers"], scope["state"].pop("given"))
        if self._visitors >= VISITORS:
            raise Problem(503, "overloaded", "the dashboard is answering as many requests as it may", retry_after=5)
        self._visitors += 1
        try:
            await people(scope, receive, send)
        finally:
            self._visitors -= 1

    async def _admitted(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: Exchange = scope["state"]["exchange"]
        # The headers have the gateway's own key.
        values: HeaderValues = scope["state"].pop("given")
        length = self._check_headers(scope["headers"], values)
        if scope["path"] == OPEN or is_probe(scope):
            return await self.app(scope, receive, send)
        key, headers = self._key(scope)
        exchange.key = key
        if self.keys is None and not key.user and not self.one_user and f"{scope['path']}/".startswith("/sessions/"):
            check_local(scope)
        if key.figures and scope["path"] not in FIGURES:
            raise Problem(403, "not_permitted", "this key reads figures, and opens nothing else")
        if key.looks and not (scope["method"] in READING and f"{scope['path']}/".startswith(LOOKING)):
            raise Problem(403, "not_permitted", "this key looks at sessions and figures, and opens nothing else")
        rate = key.rate or self.limits.rate
        if wait := self._buckets.take(key.name, rate):
            raise over_rate(rate, wait)
        flows = self.flows(scope)
        if length is not None and length > (self.limits.upload if flows else self.limits.body):
            raise self._too_large(flows)
        self._begin(key)
        try:
            receiving = self._flowing(receive, exchange) if flows else await self._read(receive, exchange)
            if receiving is None:
                return None
            state = {**scope["state"], "key": key, "flows": flows}
            try:
                await self.app({**scope, "headers": headers, "state": state}, receiving, send)
            except Problem as problem:
                # An end user was refused, for which the others below the key do not pay, or all gateways together were.
                if problem.status == 429:
                    self._buckets.give(key.name)
                raise
        finally:
            self._held -= exchange.weight
            self._end(key)
        return None

    def _check_headers(self, headers: list[tuple[bytes, bytes]], values: HeaderValues) -> int | None:
        """Check the headers; return the announced length of the body, if any."""
        limits = self.limits
        if len(headers) > limits.headers or sum(len(name) + len(value) for name, value in headers) > limits.header_bytes:
            raise Problem(431, "headers_too_large", f"over {limits.headers} headers, or {limits.header_bytes:,} bytes of them")
        if any(value.strip().lower() != b"identity" for value in values.get(b"content-encoding", ())):
            raise Problem(415, "encoded_body", "send the body as it is, without Content-Encoding")
        lengths = values.get(b"content-length")
        if lengths is None:
            return None
        if len(set(lengths)) > 1 or not lengths[0].isdigit() or len(lengths[0]) > 19:
            raise Problem(400, "invalid_length", "Content-Length is no number")
        return int(lengths[0])

    def _key(self, scope: Scope) -> tuple[Key, list[tuple[bytes, bytes]]]:
        """Return the client's key, and the headers without the gateway's own key."""
        headers: list[tuple[bytes, bytes]] = scope["headers"]
        if self.keys is None:
            return self._anonymous_key(scope), headers
        ours = [(name, value) for name, value in headers if _secret(name, value).startswith(b"kilburn-")]
        if not ours:
            raise Problem(401, "invalid_api_key", "this gateway needs a key: as `Authorization: Bearer KEY` or `x-api-key: KEY`")
        if len({_secret(name, value) for name, value in ours}) > 1:
            raise Problem(400, "invalid_api_key", "two different keys of this gateway; send one")
        try:
            key = self.keys.find(_secret(*ours[0]))
        except (SpecError, OSError) as error:
            raise Problem(
                503, "keys_unreadable", "the gateway cannot read its keys; no client is admitted until it can"
            ) from error
        if key is None:
            raise Problem(401, "invalid_api_key", "this key is unknown here, or was revoked")
        return key, [header for header in headers if header not in ours]

    def _anonymous_key(self, scope: Scope) -> Key:
        """Return the key of a client of a gateway without keys."""
        if not self.one_user and (user := client_user(scope["headers"])):
            return msgspec.structs.replace(self.anonymous, user=user)
        return self.anonymous

    def _begin(self, key: Key) -> None:
        if self.limits.per_key and self._running[key.name] >= self.limits.per_key:
            raise over_most(self.limits.per_key)
        if self._running.total() >= self.limits.running:
            raise Problem(503, "overloaded", "the gateway is answering as many requests as it may", retry_after=1)
        self._running[key.name] += 1

    def _end(self, key: Key) -> None:
        self._running[key.name] -= 1
        if not self._running[key.name]:
            del self._running[key.name]

    async def _read(self, receive: Receive, exchange: Exchange) -> Receive | None:
        """Return a receiver that yields the whole body in one message, and later messages; None if the client left."""
        body = await self._body(receive, exchange)
        if body is None:
            return None
        exchange.received = time.perf_counter() - exchange.started
        if self.contents:
            exchange.logged_body = body
        pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        del body

        async def receiving() -> Message:
            return pending.pop() if pending else await receive()

        return receiving

    def _flowing(self, receive: Receive, exchange: Exchange) -> Receive:
        """Return a receiver of the body's pieces. Only the time spent waiting for the client counts against its pace."""
        limits, loop = self.limits, asyncio.get_running_loop()
        waited, ended = 0.0, False

        async def receiving() -> Message:
            nonlocal waited, ended
            if ended:
                return await receive()
            began = loop.time()
            try:
                async with asyncio.timeout(limits.patience + exchange.size / limits.pace - waited):
                    message = await receive()
            except TimeoutError:
                raise self._too_slow() from None
            waited += loop.time() - began
            exchange.size += len(message.get("body", b""))
            if exchange.size > limits.upload:
                raise self._too_large(flows=True)
            if not message.get("more_body"):
                ended, exchange.received = True, time.perf_counter() - exchange.started
            return message

        return receiving

    async def _body(self, receive: Receive, exchange: Exchange) -> bytes | None:
        """Read the whole body, and count it; return None if the client left."""
        limits = self.limits
        pieces: list[bytes] = []
        tally = BodyTally()
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(limits.patience) as deadline:
                began = loop.time()
                while True:
                    message = await receive()
                    if message["type"] == "http.disconnect":
                        return None
                    chunk = message.get("body", b"")
                    pieces.append(chunk)
                    tally.feed(chunk)
                    self._held += tally.weight - exchange.weight
                    exchange.size, exchange.weight = tally.size, tally.weight
                    self._check_size(tally)
                    if self._held > limits.bodies:
                        raise Problem(503, "overloaded", "the gateway holds as many requests as it may", retry_after=1)
                    if not message.get("more_body"):
                        return b"".join(pieces)
                    deadline.reschedule(began + limits.patience + exchange.size / limits.pace)
        except TimeoutError:
            raise self._too_slow() from None

    def _too_slow(self) -> Problem:
        return Problem(408, "slow_body", "the body came too slowly")

    def _check_size(self, tally: BodyTally) -> None:
        limits = self.limits
        if tally.size > limits.body:
            raise self._too_large()
        if tally.values > limits.values:
            reason = f"the JSON of a request may have {limits.values:,} values; send fewer messages, parts or tools"
            raise Problem(413, "too_many_values", f"{reason}, or have the operator raise `values`")
        if tally.depth > limits.depth:
            reason = f"the JSON of a request may be nested {limits.depth:,} levels deep; send it flatter"
            raise Problem(400, "nested_too_deep", f"{reason}, or have the operator raise `depth`")

    def _too_large(self, flows: bool = False) -> Problem:
        max_bytes, name = (self.limits.upload, "upload") if flows else (self.limits.body, "body")
        reason = f"a request may have {max_bytes:,} bytes; send less of it at once, or have the operator raise `{name}`"
        return Problem(413, "request_too_large", reason)

    async def _refuse(self, problem: Problem, exchange: Exchange, rest: Receive | None, send: Send) -> None:
        """Answer with an error, and close the connection after the rest of the body."""
        body = error_body(problem, exchange.path, exchange.id)
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        headers += [(b"connection", b"close"), (b"x-request-id", exchange.id.encode())]
        if problem.retry_after is not None:
            headers.append((b"retry-after", str(math.ceil(problem.retry_after)).encode()))
        if problem.status == 401:
            headers.append((b"www-authenticate", b"Bearer"))
        await send({"type": "http.response.start", "status": problem.status, "headers": headers})
        await send({"type": "http.response.body", "body": body, "more_body": True})
        if rest is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(LINGER):
                    while (message := await rest())["type"] == "http.request" and message.get("more_body"):
                        pass
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def check_local(scope: Scope) -> None:
    """Allow only the operator, who works at this machine, to see the sessions of all clients of a gateway without keys.

    Raises:
        Problem: the request is from another machine, or a proxy forwarded it.
    """
    local = is_loopback((scope.get("client") or ("",))[0])
    if not local or any(name in FORWARDED for name, _ in scope["headers"]):
        raise Problem(403, "not_permitted", "without keys this is for this machine alone; send the key of your own requests")


def is_probe(scope: Scope) -> bool:
    """Return whether a client, such as Claude Code, checks that a server exists at this address. That needs no key."""
    return bool(scope["path"] == "/" and scope["method"] == "HEAD")


def by_name(headers: Iterable[tuple[bytes, bytes]]) -> HeaderValues:
    """Return the headers with all values of each name."""
    values: HeaderValues = {}
    for name, value in headers:
        values.setdefault(name, []).append(value)
    return values


def name_in(values: HeaderValues) -> str:
    """Return the client's own id of a request; "" if there is no valid one."""
    value = next((values[name][0] for name in REQUEST_ID_HEADERS if name in values), b"")
    return value.decode() if A_NAME.fullmatch(value) else ""


def parent_in(values: HeaderValues) -> str:
    """Return the parent span in the request's header; "" if there is no valid one."""
    parents = values.get(b"traceparent", [b""])
    return parents[0].decode() if len(parents) == 1 and A_PARENT.fullmatch(parents[0]) else ""


def host_name(host: bytes) -> str:
    """Return the name in a Host header, without its port."""
    name = host.decode("latin-1").lower()
    head, colon, port = name.rpartition(":")
    if colon and port.isdecimal() and (":" not in head or head.startswith("[")):
        return head
    return name


def _secret(name: bytes, value: bytes) -> bytes:
    """Return the key in a header; empty bytes for other headers."""
    if name in (b"x-api-key", b"api-key"):
        return value.strip()
    kind, _, rest = value.partition(b" ")
    return rest.strip() if name == b"authorization" and kind.lower() == b"bearer" else b""

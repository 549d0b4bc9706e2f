"""The dashboard as an ASGI application. It only reads: it knows GET and HEAD, and its store is open for reading.

A page that another site wrote cannot use it: its own names alone may stand in the Host header, requests from other sites are
refused, and no page of it can be framed. What stands in a store is data: no script of it runs, because only our own file may.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from kilburn.backend import Backend
from kilburn.dashboard.look import STATIC, environment, rendered, static
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.screens import SCREENS
from kilburn.errors import Forgotten, KilburnError, MissingExtra, SpecError, StoreCorrupt, UnknownAddress
from kilburn.gateway.access import LOOPBACK, by_name, name_of
from kilburn.kernel.replay import SENSELESS

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, Response, StreamingResponse
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "starlette", "dashboard") from error

log = logging.getLogger("kilburn")

Scope = MutableMapping[str, Any]
App = Callable[[Scope, Callable[[], Awaitable[Any]], Callable[[Any], Awaitable[None]]], Awaitable[None]]

POLICY = (
    "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; form-action 'self'; "
    "base-uri 'none'; frame-ancestors 'none'"
)
"""What a page may load: our own style and script, and nothing that stands in it."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

LONGEST = 8_000
"""Bytes of a query."""

WATCHERS = 32
"""Screens that may be kept up to date at once."""

EVERY = 1.0
"""Seconds between two looks whether something has changed."""


class Guard:
    """Lets through what may ask, and adds the headers that protect a page.

    Args:
        hosts: the names that a Host header may give, without port.
    """

    def __init__(self, app: App, hosts: Iterable[str] = LOOPBACK) -> None:
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        refused = self._refused(scope)
        return await (refused or self.app)(scope, receive, sending)

    def _refused(self, scope: Scope) -> Response | None:
        """What answers a request that may not come in."""
        headers = by_name(scope["headers"])
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("the dashboard only reads\n", 405, headers={"allow": "GET, HEAD"})
        if not self._is_ours(headers.get(b"host", [])):
            return PlainTextResponse("this name is not the dashboard's: see kilburn dashboard --allow-host\n", 421)
        site, mode = (headers.get(name, [b""])[0] for name in (b"sec-fetch-site", b"sec-fetch-mode"))
        if site in (b"cross-site", b"same-site") and mode != b"navigate":
            return PlainTextResponse("requests of other sites are refused\n", 403)
        if len(scope.get("query_string", b"")) > LONGEST:
            return PlainTextResponse("the query is too long\n", 414)
        return None

    def _is_ours(self, hosts: list[bytes]) -> bool:
        return len(hosts) == 1 and ("*" in self.hosts or name_of(hosts[0]) in self.hosts)


def query_of(request: Request) -> dict[str, str]:
    """What a query asks; what is no UTF-8 is replaced. Of a name that comes twice, the last one."""
    return dict(parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="replace"))


def build(
    backend: Backend,
    *,
    hosts: Iterable[str] = LOOPBACK,
    every: float = EVERY,
    ending: Callable[[], bool] = lambda: False,
) -> App:
    """The application over a store.

    Args:
        backend: opened for reading.
        hosts: the names under which it may be called; "*" for any.
        every: seconds between two looks whether something has changed.
        ending: whether the server is about to end: a browser that is kept up to date never hangs up by itself.
    """
    reading = LedgerReader(backend)
    looks: dict[str, Any] = {}
    files = {name: (static(name), kind) for name, kind in STATIC.items()}
    watchers = 0

    def look(root: str) -> Any:
        if root not in looks:
            looks.clear()
            looks[root] = environment(root=root)
        return looks[root]

    def screen(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        path = request.scope["path"].removeprefix(root) or "/"
        query = query_of(request)
        about: dict[str, Any] = {"store": StoreName(backend), "path": path, "query": query}
        try:
            template, shown = SCREENS[path](reading, query)
            return HTMLResponse(rendered(look(root), template, about | shown))
        except KilburnError as error:
            status = 404 if isinstance(error, SpecError | UnknownAddress | Forgotten) else 500
            return HTMLResponse(rendered(look(root), "problem.html", about | {"error": error, "status": status}), status)
        except SENSELESS:
            # Nothing checks what the writer of a ledger put into an event.
            log.exception("%s could not be shown", path)
            odd = StoreCorrupt("the ledger says something that this screen cannot read", advice="run kilburn fsck")
            return HTMLResponse(rendered(look(root), "problem.html", about | {"error": odd, "status": 500}), 500)

    def text(request: Request) -> Response:
        """The exact text of a page; a browser shows it as text, whatever it says."""
        query = query_of(request)
        try:
            session = reading.session(query.get("name", ""))
            pages = session.resolve(query.get("address", ""))
            if len(pages) != 1:
                return PlainTextResponse("give the address of one page\n", 404)
            said = session.text(pages[0])
        except KilburnError as error:
            return PlainTextResponse(f"{error.what}\n", 404)
        return PlainTextResponse(said)

    def own(request: Request) -> Response:
        # A browser asks for an icon by this name beside a text, which names none.
        found = files.get(request.path_params.get("file", "mark.svg"))
        if found is None:
            return PlainTextResponse("not found\n", 404)
        return Response(found[0], media_type=found[1], headers={"cache-control": "max-age=300"})

    async def live(request: Request) -> Response:
        nonlocal watchers
        if watchers >= WATCHERS:
            return PlainTextResponse("too many screens are kept up to date\n", 503)
        name = query_of(request).get("name", "")

        async def changes() -> AsyncIterator[str]:
            nonlocal watchers
            watchers += 1
            try:
                before = await run_in_threadpool(state_of, name)
                yield "retry: 5000\n\n"
                while not ending() and not await request.is_disconnected():
                    now = await run_in_threadpool(state_of, name)
                    if now != before:
                        before = now
                        yield f"data: {now}\n\n"
                    await asyncio.sleep(every)
            finally:
                watchers -= 1

        return StreamingResponse(changes(), media_type="text/event-stream")

    def state_of(name: str) -> str:
        """Changes whenever a session does, or any of them; of a session also while it is replayed."""
        try:
            if name:
                info = reading.info(name)
                return f"{info.head} {reading.progress(info.number):.1f}"
            infos = reading.sessions()
            return f"{len(infos)} {sum(info.head for info in infos)} {reading.counted}"
        except KilburnError as error:
            return type(error).__name__

    def nothing(request: Request, error: Exception) -> Response:
        about = {"store": StoreName(backend), "path": "", "query": {}, "status": 404}
        gone = SpecError("the dashboard has no such screen", advice="begin with the list of sessions")
        return HTMLResponse(rendered(look(request.scope.get("root_path", "")), "problem.html", about | {"error": gone}), 404)

    routes = [Route(path, screen, methods=["GET"]) for path in SCREENS]
    routes += [
        Route("/text", text, methods=["GET"]),
        Route("/own/{file}", own, methods=["GET"]),
        Route("/favicon.ico", own, methods=["GET"]),
        Route("/live", live, methods=["GET"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: nothing})
    inner.router.redirect_slashes = False
    return Guard(inner, hosts)


class StoreName:
    """Which store this is, in words."""

    def __init__(self, backend: Backend) -> None:
        self.path = str(getattr(backend, "path", "")) or "store"
        self.tenant = backend.tenant

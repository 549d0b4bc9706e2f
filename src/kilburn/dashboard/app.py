"""The dashboard as an ASGI application.

The store is opened for reading, and GET and HEAD change nothing. A visitor who may change something sends forms by POST (see
`changes`).

Pages of other sites cannot use the dashboard: it answers only to its own host names, refuses cross-site requests, and cannot be
framed. The contents of a store are data: the content security policy allows only the dashboard's own script.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, MutableMapping
from typing import Any
from urllib.parse import parse_qsl

from kilburn.backend import Backend
from kilburn.budget import Budget
from kilburn.dashboard.changes import (
    FORM_TIMEOUT,
    MAX_FORM_BYTES,
    Visit,
    carry_out,
    is_of_this_visit,
    is_ours,
    parse_form,
    result_message,
)
from kilburn.dashboard.look import STATIC, environment, rendered, static
from kilburn.dashboard.reading import LedgerReader
from kilburn.dashboard.screens import SCREENS
from kilburn.errors import Forgotten, KilburnError, MissingExtra, SpecError, StoreCorrupt, UnknownAddress
from kilburn.gateway.access import LOOPBACK, by_name, host_name
from kilburn.kernel.replay import SENSELESS

try:
    from starlette.applications import Starlette
    from starlette.concurrency import run_in_threadpool
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
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
"""A page may load the dashboard's own style and script; inline scripts and styles are forbidden."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Other sites get no referrer. With "no-referrer", a browser would send "Origin: null" with the dashboard's own forms.
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}

MAX_QUERY_BYTES = 8_000

MAX_WATCHERS = 32
"""Live screens that may be open at once."""

LIVE_INTERVAL = 1.0
"""Seconds between two checks whether a live screen has changed."""

NOT_FOUND = (SpecError, UnknownAddress, Forgotten)
"""Errors that are answered with status 404."""


class Guard:
    """Middleware that refuses requests of other sites, and adds the security headers to replies.

    Args:
        hosts: host names that are accepted, without port.
        origins: origins of the dashboard's pages other than the request's own.
        visit: the visit of a request whose scope has none.
    """

    def __init__(
        self, app: App, hosts: Iterable[str] = LOOPBACK, origins: Iterable[str] = (), visit: Visit | None = None
    ) -> None:
        self.app, self.visit = app, visit or Visit()
        self.hosts = frozenset(host.lower() for host in hosts)
        self.origins = frozenset(origin.lower() for origin in origins)

    async def __call__(self, scope: Scope, receive: Callable[[], Awaitable[Any]], send: Callable[[Any], Awaitable[None]]) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":
            return await send({"type": "websocket.close", "code": 1008})

        async def sending(message: Any) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                missing = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in present]
                message = {**message, "headers": [*message["headers"], *missing]}
            await send(message)

        state = scope.get("state", {})
        visit = state.get("visit", self.visit)
        refused = self._refused(scope, visit)
        return await (refused or self.app)({**scope, "state": {**state, "visit": visit}}, receive, sending)

    def _refused(self, scope: Scope, visit: Visit) -> Response | None:
        """Return the reply to a request that is refused; None if it is not."""
        headers = by_name(scope["headers"])
        posts = scope["method"] == "POST" and visit.hands is not None
        if scope["method"] not in ("GET", "HEAD") and not posts:
            return PlainTextResponse("the dashboard only reads\n", 405, headers={"allow": "GET, HEAD"})
        if not self._is_ours(headers.get(b"host", [])):
            return PlainTextResponse("this name is not the dashboard's: see kilburn dashboard --allow-host\n", 421)
        if posts and not is_ours(headers, self.origins):
            return PlainTextResponse("a change is made from a page of this dashboard alone\n", 403)
        site, mode = (headers.get(name, [b""])[0] for name in (b"sec-fetch-site", b"sec-fetch-mode"))
        if site in (b"cross-site", b"same-site") and mode != b"navigate":
            return PlainTextResponse("requests of other sites are refused\n", 403)
        if len(scope.get("query_string", b"")) > MAX_QUERY_BYTES:
            return PlainTextResponse("the query is too long\n", 414)
        return None

    def _is_ours(self, hosts: list[bytes]) -> bool:
        return len(hosts) == 1 and ("*" in self.hosts or host_name(hosts[0]) in self.hosts)


def own_file(name: str) -> Response:
    """Return one of the dashboard's static files, which anybody may read."""
    if name not in STATIC:
        return PlainTextResponse("not found\n", 404)
    return Response(static(name), media_type=STATIC[name], headers={"cache-control": "max-age=300"})


def parse_query(request: Request) -> dict[str, str]:
    """Parse the query of a request. Invalid UTF-8 is replaced; of a repeated name, the last value counts."""
    return dict(parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="replace"))


def build(
    backend: Backend,
    *,
    hosts: Iterable[str] = LOOPBACK,
    every: float = LIVE_INTERVAL,
    ending: Callable[[], bool] = lambda: False,
    visit: Visit | None = None,
    origins: Iterable[str] = (),
    budget: Callable[[str], Budget | None] = lambda name: None,
    rest: Callable[[], float] = lambda: 0.0,
) -> App:
    """Build the application for a store.

    Args:
        backend: a read-only connection.
        hosts: host names at which the dashboard answers; "*" for any.
        every: seconds between two checks of a live screen.
        ending: returns whether the server shuts down, which ends the streams of live screens.
        visit, origins: see `Guard`.
        budget: see `LedgerReader`.
        rest: returns the minimum number of seconds between two checks.
    """
    dashboard = _Dashboard(backend, LedgerReader(backend, budget=budget), every, ending, rest)
    routes = [Route(path, dashboard.screen, methods=["GET"]) for path in SCREENS]
    routes += [
        Route("/text", dashboard.text, methods=["GET"]),
        Route("/own/{file}", _static_file, methods=["GET"]),
        Route("/favicon.ico", _static_file, methods=["GET"]),
        Route("/live", dashboard.live, methods=["GET"]),
        Route("/do/{verb}", dashboard.change, methods=["POST"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: dashboard.no_such_screen})
    inner.router.redirect_slashes = False
    return Guard(inner, hosts, origins, visit)


def _static_file(request: Request) -> Response:
    # A browser requests /favicon.ico for a plain text, which names no icon.
    return own_file(request.path_params.get("file", "mark.svg"))


class _Dashboard:
    """The handlers of `build`; its arguments are the attributes."""

    def __init__(
        self, backend: Backend, reading: LedgerReader, every: float, ending: Callable[[], bool], rest: Callable[[], float]
    ) -> None:
        self._store = {"path": str(getattr(backend, "path", "")) or "store", "tenant": backend.tenant}
        self._reading = reading
        self._every, self._ending, self._rest = every, ending, rest
        self._looks: dict[str, Any] = {}
        self._watchers = 0

    def _render(self, request: Request, template: str, context: dict[str, Any]) -> str:
        root = request.scope.get("root_path", "")
        if root not in self._looks:
            self._looks.clear()
            self._looks[root] = environment(root=root)
        return rendered(self._looks[root], template, context)

    def _context(self, request: Request, path: str, query: dict[str, str]) -> dict[str, Any]:
        """Return what every page shows."""
        visit: Visit = request.state.visit
        context: dict[str, Any] = {"store": self._store, "path": path, "query": query, "said": result_message(query)}
        return context | {"word": visit.word if visit.hands is not None else "", "visitor": visit.name, "visit": visit}

    def _problem(self, request: Request, context: dict[str, Any], error: KilburnError, status: int = 0) -> Response:
        status = status or (404 if isinstance(error, NOT_FOUND) else 500)
        return HTMLResponse(self._render(request, "problem.html", context | {"error": error, "status": status}), status)

    def no_such_screen(self, request: Request, error: Exception) -> Response:
        """Answer a request for an unknown path."""
        unknown = SpecError("the dashboard has no such screen", advice="begin with the list of sessions")
        return self._problem(request, self._context(request, "", {}), unknown)

    def screen(self, request: Request) -> Response:
        """Render a screen."""
        path = request.scope["path"].removeprefix(request.scope.get("root_path", "")) or "/"
        query = parse_query(request)
        context = self._context(request, path, query)
        try:
            template, content = SCREENS[path](self._reading, query)
            return HTMLResponse(self._render(request, template, context | content))
        except KilburnError as error:
            return self._problem(request, context, error)
        except SENSELESS:
            # The data of an event is not validated when it is written.
            log.exception("%s could not be shown", path)
            corrupt = StoreCorrupt("the ledger contains an event that this screen cannot read", advice="run kilburn fsck")
            return self._problem(request, context, corrupt)

    async def change(self, request: Request) -> Response:
        """Make the change of a form, and redirect to a screen."""
        body = await read_body(request)
        return await run_in_threadpool(self._change, request, body)

    def _change(self, request: Request, body: bytes | None) -> Response:
        visit: Visit = request.state.visit
        context = self._context(request, "", {})
        try:
            if body is None or visit.hands is None:
                raise SpecError("the form is too long, or came too slowly", advice="go back, and send it again")
            form = parse_form(body)
            if not is_of_this_visit(form, visit):
                expired = SpecError("this form is of an earlier visit", advice="go back, load the page again, and send it again")
                return self._problem(request, context, expired, 403)
            target = carry_out(request.path_params["verb"], form, visit.hands, SCREENS)
        except KilburnError as error:
            return self._problem(request, context, error, 0 if isinstance(error, NOT_FOUND) else 409)
        return RedirectResponse(request.scope.get("root_path", "") + target, 303)

    def text(self, request: Request) -> Response:
        """Return the exact text of a page as text/plain."""
        query = parse_query(request)
        try:
            session = self._reading.session(query.get("name", ""))
            pages = session.contents.resolve(query.get("address", ""))
            if len(pages) != 1:
                return PlainTextResponse("give the address of one page\n", 404)
            text = session.contents.text(pages[0])
        except KilburnError as error:
            return PlainTextResponse(f"{error.what}\n", 404)
        return PlainTextResponse(text)

    async def live(self, request: Request) -> Response:
        """Stream an event whenever a session changes, or any session if none is named."""
        if self._watchers >= MAX_WATCHERS:
            return PlainTextResponse("too many live screens are open\n", 503)
        name = parse_query(request).get("name", "")

        async def changes() -> AsyncIterator[str]:
            self._watchers += 1
            try:
                previous = await run_in_threadpool(self._state, name)
                yield "retry: 5000\n\n"
                while not self._ending() and not await request.is_disconnected():
                    state = await run_in_threadpool(self._state, name)
                    if state != previous:
                        previous = state
                        yield f"data: {state}\n\n"
                    await asyncio.sleep(max(self._every, self._rest()))
            finally:
                self._watchers -= 1

        return StreamingResponse(changes(), media_type="text/event-stream")

    def _state(self, name: str) -> str:
        """Return a string that changes when a session is written to or replayed; "" stands for all sessions."""
        try:
            if name:
                info = self._reading.info(name)
                return f"{info.head} {self._reading.progress(info.number):.1f}"
            infos = self._reading.sessions()
            return f"{len(infos)} {sum(info.head for info in infos)} {self._reading.counted}"
        except KilburnError as error:
            return type(error).__name__


async def read_body(request: Request) -> bytes | None:
    """Return the body of a form; None if it is too long, too slow, or of another content type."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return None
    body = bytearray()
    try:
        async with asyncio.timeout(FORM_TIMEOUT):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MAX_FORM_BYTES:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    return bytes(body)

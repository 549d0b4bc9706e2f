"""The dashboard as an ASGI application. Its store is open for reading, and GET and HEAD change nothing; what a person changes by
hand comes in a form by POST, where the visit has hands (see `changes`).

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
from kilburn.budget import Budget
from kilburn.dashboard.changes import LARGEST, SENDING, Visit, done, form_of, is_of_this_visit, is_ours, said_of
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
"""What a page may load: our own style and script, and nothing that stands in it."""

HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    # Other sites are told nothing. With "no-referrer" a browser would say of our own forms that they are from nowhere.
    "referrer-policy": "same-origin",
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
        origins: of pages that are ours, besides those of the name that a request is sent to.
        visit: who looks, where the scope does not say it.
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
                given = {name for name, _ in message["headers"]}
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items() if name.encode() not in given]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        state = scope.get("state", {})
        visit = state.get("visit", self.visit)
        refused = self._refused(scope, visit)
        return await (refused or self.app)({**scope, "state": {**state, "visit": visit}}, receive, sending)

    def _refused(self, scope: Scope, visit: Visit) -> Response | None:
        """What answers a request that may not come in."""
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
        if len(scope.get("query_string", b"")) > LONGEST:
            return PlainTextResponse("the query is too long\n", 414)
        return None

    def _is_ours(self, hosts: list[bytes]) -> bool:
        return len(hosts) == 1 and ("*" in self.hosts or host_name(hosts[0]) in self.hosts)


def own_file(name: str) -> Response:
    """One of our own files; whoever may not see the store may see these."""
    if name not in STATIC:
        return PlainTextResponse("not found\n", 404)
    return Response(static(name), media_type=STATIC[name], headers={"cache-control": "max-age=300"})


def query_of(request: Request) -> dict[str, str]:
    """What a query asks; what is no UTF-8 is replaced. Of a name that comes twice, the last one."""
    return dict(parse_qsl(request.scope["query_string"].decode("latin-1"), keep_blank_values=True, errors="replace"))


def build(
    backend: Backend,
    *,
    hosts: Iterable[str] = LOOPBACK,
    every: float = EVERY,
    ending: Callable[[], bool] = lambda: False,
    visit: Visit | None = None,
    origins: Iterable[str] = (),
    budget: Callable[[str], Budget | None] = lambda name: None,
    rest: Callable[[], float] = lambda: 0.0,
) -> App:
    """The application over a store.

    Args:
        backend: opened for reading.
        hosts: the names under which it may be called; "*" for any.
        every: seconds between two looks whether something has changed.
        ending: whether the server is about to end: a browser that is kept up to date never hangs up by itself.
        visit, origins: see `Guard`.
        budget: see `LedgerReader`.
        rest: seconds between two such looks at least, which may change.
    """
    reading = LedgerReader(backend, budget=budget)
    looks: dict[str, Any] = {}
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
        about = about_of(request, path, query)
        try:
            template, shown = SCREENS[path](reading, query)
            return HTMLResponse(rendered(look(root), template, about | shown))
        except KilburnError as error:
            return trouble(request, about, error)
        except SENSELESS:
            # Nothing checks what the writer of a ledger put into an event.
            log.exception("%s could not be shown", path)
            odd = StoreCorrupt("the ledger says something that this screen cannot read", advice="run kilburn fsck")
            return trouble(request, about, odd)

    def about_of(request: Request, path: str, query: dict[str, str]) -> dict[str, Any]:
        visit: Visit = request.state.visit
        about: dict[str, Any] = {"store": StoreName(backend), "path": path, "query": query, "said": said_of(query)}
        return about | {"word": visit.word if visit.hands is not None else "", "visitor": visit.name, "visit": visit}

    def trouble(request: Request, about: dict[str, Any], error: KilburnError, status: int = 0) -> Response:
        status = status or (404 if isinstance(error, SpecError | UnknownAddress | Forgotten) else 500)
        root = request.scope.get("root_path", "")
        return HTMLResponse(rendered(look(root), "problem.html", about | {"error": error, "status": status}), status)

    async def change(request: Request) -> Response:
        """Do what a form asks for, and lead back to the screen."""
        body = await body_of(request)
        return await run_in_threadpool(changed, request, body)

    def changed(request: Request, body: bytes | None) -> Response:
        visit: Visit = request.state.visit
        about = about_of(request, "", {})
        try:
            if body is None or visit.hands is None:
                raise SpecError("the form is too long, or came too slowly", advice="go back, and send it again")
            given = form_of(body)
            if not is_of_this_visit(given, visit):
                old = SpecError("this form is of an earlier visit", advice="go back, load the page again, and send it again")
                return trouble(request, about, old, 403)
            to = done(request.path_params["verb"], given, visit.hands, SCREENS)
        except KilburnError as error:
            return trouble(request, about, error, 0 if isinstance(error, SpecError | UnknownAddress | Forgotten) else 409)
        return RedirectResponse(request.scope.get("root_path", "") + to, 303)

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
        return own_file(request.path_params.get("file", "mark.svg"))

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
                    await asyncio.sleep(max(every, rest()))
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
        gone = SpecError("the dashboard has no such screen", advice="begin with the list of sessions")
        return trouble(request, about_of(request, "", {}), gone)

    routes = [Route(path, screen, methods=["GET"]) for path in SCREENS]
    routes += [
        Route("/text", text, methods=["GET"]),
        Route("/own/{file}", own, methods=["GET"]),
        Route("/favicon.ico", own, methods=["GET"]),
        Route("/live", live, methods=["GET"]),
        Route("/do/{verb}", change, methods=["POST"]),
    ]
    inner = Starlette(routes=routes, exception_handlers={404: nothing})
    inner.router.redirect_slashes = False
    return Guard(inner, hosts, origins, visit)


async def body_of(request: Request) -> bytes | None:
    """The body of a form; None where it is too long, too slow, or of another type."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return None
    body = bytearray()
    try:
        async with asyncio.timeout(SENDING):
            async for piece in request.stream():
                body += piece
                if len(body) > LARGEST:
                    return None
    except (TimeoutError, ClientDisconnect):
        return None
    return bytes(body)


class StoreName:
    """Which store this is, in words."""

    def __init__(self, backend: Backend) -> None:
        self.path = str(getattr(backend, "path", "")) or "store"
        self.tenant = backend.tenant

"""The dashboard within a gateway, below `/dashboard`, behind its keys.

A person signs in with a key. `kilburn.gateway.users.sees` decides what the key may see and change, as for every other request.
Without keys, the gateway and its dashboard serve this machine alone.

The dashboard leaves the gateway its time: it reads the store over its own connections, one thread renders one screen at a time,
and a live screen that takes long to render is rendered less often.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

import msgspec

from kilburn.dashboard.app import HEADERS, MAX_QUERY_BYTES, build, own_file, read_body
from kilburn.dashboard.changes import Visit, fresh_word, is_of_this_visit, is_ours, parse_form
from kilburn.dashboard.look import environment, rendered
from kilburn.dashboard.screens import SCREENS
from kilburn.dashboard.signing import SignIn, SignIns, cookie, words_in
from kilburn.errors import KilburnError, MissingExtra, SpecError
from kilburn.gateway.access import PEOPLE, App, Receive, Send, by_name, check_local
from kilburn.gateway.app import Behind
from kilburn.gateway.by_hand import WindowsByHand
from kilburn.gateway.keys import Key, Keys
from kilburn.gateway.problems import Problem
from kilburn.gateway.threads import in_thread
from kilburn.kernel.session import Session
from kilburn.memory.user_memory import UserMemory

try:
    from starlette.requests import Request
    from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "starlette", "dashboard") from error

T = TypeVar("T")
Scope = MutableMapping[str, Any]

MAX_VIEWS = 16
"""Views that are cached, the least recently used first to go."""

MAX_LIVE = 48
"""Live screens that may be open at once."""

MAX_SIGNING_IN = 24
"""Sign-in forms that may be received at once. A form that is sent slowly delays nobody who is signed in."""

LIVE_INTERVAL = 2.0
"""Minimum seconds between two checks whether a live screen has changed."""

REST_FACTOR = 20
"""A live screen is rendered again after this many times the seconds that it took."""

SIGN_IN, SIGN_OUT, LIVE = "/sign-in", "/sign-out", "/live"


class KeyHands:
    """Changes what a key may change."""

    def __init__(self, windows: WindowsByHand, key: Key) -> None:
        self._windows, self._key = windows, key

    def session(self, name: str, do: Callable[[Session], T]) -> T:
        """See `Hands`."""
        try:
            return self._windows.change(self._key, "", name, do)
        except Problem as problem:
            raise SpecError(problem.message, advice="see the list of sessions") from None

    def memory(self, owner: str, do: Callable[[UserMemory], T]) -> T:
        """See `Hands`."""
        try:
            return self._windows.memory(self._key, owner, do)
        except Problem as problem:
            raise SpecError(problem.message, advice="see the list of users") from None


class _View:
    """The dashboard for keys with the same rights, and the seconds that its last screen took."""

    def __init__(self, behind: Behind, key: Key, ending: Callable[[], bool]) -> None:
        self.took = 0.0
        self.app = build(
            behind.windows.looking(key),
            hosts=("*",),
            every=LIVE_INTERVAL,
            ending=ending,
            origins=behind.origins,
            budget=lambda name: behind.windows.budget(key, name),
            rest=lambda: REST_FACTOR * self.took,
        )


class BehindKeys:
    """Answers below `/dashboard`.

    Args:
        behind: the keys, sessions and origins of the gateway.
        ending: returns whether the server is shutting down.
        sign: asks the parent of several worker processes who is signed in (see `SignIns.answer`); None if this process knows.
        word: the token of forms if nobody signs in.
    """

    def __init__(
        self,
        behind: Behind,
        ending: Callable[[], bool] = lambda: False,
        sign: Callable[[str, Sequence[Any]], Awaitable[Any]] | None = None,
        word: str = "",
    ) -> None:
        self._behind, self._ending = behind, ending
        self._ask = None if behind.keys is None else sign or SignIns(behind.keys).answer
        self._word = word or fresh_word()
        self._views: OrderedDict[tuple[str, bool, str], _View] = OrderedDict()
        self._turn, self._lock = asyncio.Semaphore(1), threading.Lock()
        self._live_screens = self._signing_in = 0
        self._look = environment(root=PEOPLE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"].removeprefix(PEOPLE) or "/"
        scope = {**scope, "root_path": PEOPLE, "path": PEOPLE + path}
        headers = by_name(scope["headers"])
        if path.startswith("/own/"):
            return await self._reply(own_file(path.removeprefix("/own/")), scope, receive, send)
        if self._ask is None:
            check_local(scope)
            return await self._screen(scope, path, self._behind.anonymous, self._word, receive, send)
        request = Request(scope, receive)
        if path == SIGN_IN:
            return await self._reply(await self._sign_in(request, headers), scope, receive, send)
        words = words_in(headers.get(b"cookie", ()))
        # The requests of a live screen do not extend a sign-in.
        visitor = await self._find(words, look=headers.get(b"sec-fetch-mode", [b"navigate"]) == [b"navigate"])
        if visitor is None:
            return await self._reply(self._sign_in_page(scope, path, headers), scope, receive, send)
        scope["state"]["exchange"].key = visitor.key
        if path == SIGN_OUT:
            return await self._reply(await self._sign_out(request, headers, visitor, words), scope, receive, send)

        async def is_signed_in() -> bool:
            sign_in = await self._find(words, look=False)
            return sign_in is not None and sign_in.word == visitor.word

        return await self._screen(scope, path, visitor.key, visitor.word, receive, send, is_signed_in)

    async def _reply(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    async def _find(self, words: list[str], *, look: bool = True) -> SignIn | None:
        result = await self._call("find", words, look)
        return result if isinstance(result, SignIn) else msgspec.convert(result, SignIn | None)

    async def _call(self, verb: str, *arguments: Any) -> Any:
        """Call a method of the sign-ins, in this process or in the parent of several workers."""
        assert self._ask is not None
        try:
            return await self._ask(verb, arguments)
        except (SpecError, OSError) as error:
            raise Problem(503, "keys_unreadable", "the gateway cannot read its keys, and lets nobody in") from error

    def _sign_in_page(self, scope: Scope, path: str, headers: dict[bytes, list[bytes]]) -> Response:
        """Return the sign-in page, which leads to the requested screen."""
        if scope["method"] not in ("GET", "HEAD") or path not in SCREENS:
            return PlainTextResponse("sign in first\n", 401)
        to = _place(path, scope.get("query_string", b"").decode("latin-1"))
        linked = headers.get(b"sec-fetch-site", [b""])[0] in (b"cross-site", b"same-site")
        return self._page(to, linked=linked, status=401)

    def _page(self, to: str, wrong: str = "", *, linked: bool = False, status: int = 200) -> Response:
        context = {"to": to, "wrong": wrong, "linked": linked}
        return HTMLResponse(rendered(self._look, "sign_in.html", context), status)

    async def _sign_in(self, request: Request, headers: dict[bytes, list[bytes]]) -> Response:
        if request.method in ("GET", "HEAD"):
            return self._page("/")
        if request.method != "POST":
            return PlainTextResponse("sign in by POST\n", 405, headers={"allow": "GET, HEAD, POST"})
        if not is_ours(headers, self._behind.origins):
            return PlainTextResponse("sign in from the page of this dashboard\n", 403)
        address = (request.scope.get("client") or ("",))[0]
        if wait := await self._call("wait", address):
            slow = self._page("/", f"Too many wrong keys. Try again in {round(wait) + 1} seconds.", status=429)
            slow.headers["retry-after"] = str(round(wait) + 1)
            return slow
        if self._signing_in >= MAX_SIGNING_IN:
            raise Problem(503, "overloaded", "too many people sign in at the same time", retry_after=5)
        self._signing_in += 1
        try:
            form = await _read_form(request)
        finally:
            self._signing_in -= 1
        path, _, query = form.get("to", "").partition("?")
        to = _place(path, query)
        word = await self._call("enter", form.get("key", ""), address)
        if word is None:
            return self._page(to, "This key is unknown here, was revoked, or opens no session.", status=401)
        reply = RedirectResponse(PEOPLE + to, 303)
        reply.headers["set-cookie"] = cookie(word, PEOPLE, secure=_is_secure(request.scope, headers))
        return reply

    async def _sign_out(self, request: Request, headers: dict[bytes, list[bytes]], visitor: SignIn, words: list[str]) -> Response:
        if request.method != "POST" or not is_ours(headers, self._behind.origins):
            return PlainTextResponse("sign out with the button on a page of this dashboard\n", 403)
        if not is_of_this_visit(await _read_form(request), Visit(visitor.word)):
            return PlainTextResponse("this form is of an earlier visit; go back, and load the page again\n", 403)
        await self._call("leave", words)
        reply = RedirectResponse(f"{PEOPLE}{SIGN_IN}", 303)
        for secure in (False, True):
            reply.headers.append("set-cookie", cookie("", PEOPLE, secure=secure))
        return reply

    async def _screen(
        self,
        scope: Scope,
        path: str,
        key: Key,
        word: str,
        receive: Receive,
        send: Send,
        is_signed_in: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """Answer a visitor's request with the rights of a key.

        Args:
            is_signed_in: returns whether the visitor is still signed in; None if nobody signs in.
        """
        view = await in_thread(self._view, key)
        hands = None if key.looks else KeyHands(self._behind.windows, key)
        visit = Visit(word, hands, key.note or key.name)
        scope = {**scope, "state": {**scope["state"], "visit": visit}}
        if path == LIVE:
            return await self._live(view, scope, receive, send, is_signed_in)
        if scope["method"] == "POST":
            # The body is read before the lock is taken: a slow sender delays nobody.
            receive = _replay(await read_body(Request(scope, receive)) or b"", receive)
        messages: list[Any] = []

        async def hold(message: Any) -> None:
            messages.append(message)

        async with self._turn:
            began = time.perf_counter()
            await view.app(scope, receive, hold)
            view.took = time.perf_counter() - began
        # The reply is sent after the lock is released: a slow reader delays nobody.
        for message in messages:
            await send(message)
        return None

    def _view(self, key: Key) -> _View:
        kind = key.tenant, bool(key.name), key.user
        try:
            with self._lock:
                view = self._views.pop(kind, None) or _View(self._behind, key, self._ending)
                self._views[kind] = view
                while len(self._views) > MAX_VIEWS:
                    self._views.popitem(last=False)
            return view
        except KilburnError as error:
            raise Problem(503, "store_failed", "the gateway's store cannot be read; try again later") from error

    async def _live(
        self, view: _View, scope: Scope, receive: Receive, send: Send, is_signed_in: Callable[[], Awaitable[bool]] | None
    ) -> None:
        if self._live_screens >= MAX_LIVE:
            raise Problem(503, "overloaded", "too many live screens are open", retry_after=30)

        async def receiving() -> Any:
            return await receive() if is_signed_in is None or await is_signed_in() else {"type": "http.disconnect"}

        self._live_screens += 1
        try:
            await view.app(scope, receiving, send)
        finally:
            self._live_screens -= 1


async def _read_form(request: Request) -> dict[str, str]:
    """Return the fields of a form, or no fields if the body is not a form."""
    try:
        return parse_form(await read_body(request) or b"")
    except SpecError:
        return {}


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return a `receive` that yields a body which was read already, and then calls the original."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return pending.pop() if pending else await receive()

    return receiving


def _place(path: str, query: str) -> str:
    """Return the path of a screen with its query, encoded anew; "/" if there is no such screen."""
    if path not in SCREENS or len(query) > MAX_QUERY_BYTES:
        return "/"
    encoded = urlencode(parse_qsl(query, keep_blank_values=True, errors="replace")[:20])
    return f"{path}?{encoded}" if encoded else path


def _is_secure(scope: Scope, headers: dict[bytes, list[bytes]]) -> bool:
    """Return whether the page came over TLS, by the scheme of this server or by the origin that the browser sent."""
    return scope.get("scheme") == "https" or headers.get(b"origin", [b""])[0].lower().startswith(b"https://")


def shared_sign_ins(keys: str | None) -> SignIns | None:
    """Return the sign-ins that the parent of several worker processes keeps; None without keys."""
    return None if keys is None else SignIns(Keys(keys))


def mounted(
    ending: Callable[[], bool] = lambda: False, sign: Callable[[str, Sequence[Any]], Awaitable[Any]] | None = None, word: str = ""
) -> Callable[[Behind], App]:
    """Return the function with which a gateway creates its dashboard. See `BehindKeys` for the arguments."""
    return lambda behind: BehindKeys(behind, ending, sign, word)

"""The dashboard within a gateway, below `/dashboard`, behind its keys.

A person signs in with a key, and sees and changes what that key may: `kilburn.gateway.users.sees` decides, as for every other
request. Without keys the gateway serves this machine alone, and so does this.

It takes little of the gateway: the store is read over connections of its own, screens are made by a thread, one at a time, and a
screen that is kept up to date waits the longer between two looks the longer it takes to make.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlencode

from kilburn.dashboard.app import HEADERS, LONGEST, body_of, build, own_file
from kilburn.dashboard.changes import Visit, form_of, fresh_word, is_of_this_visit, is_ours
from kilburn.dashboard.look import environment, rendered
from kilburn.dashboard.screens import SCREENS
from kilburn.dashboard.signing import Reception, SignIn, SignIns, cookie, words_in
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

READERS = 16
"""Different views that are kept in memory: those that were used last."""

FOLLOWED = 48
"""Screens that may be kept up to date at once."""

ENTERING = 24
"""People who sign in at once. Whoever sends a form slowly keeps nobody waiting who is signed in."""

EVERY = 2.0
"""Seconds between two looks whether something has changed, at least."""

SHARE = 20
"""A screen that is kept up to date is made again after so many times the time that it took."""

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
    """The dashboard as one kind of key sees it, and how long its last screen took."""

    def __init__(self, behind: Behind, key: Key, ending: Callable[[], bool]) -> None:
        self.took = 0.0
        self.app = build(
            behind.windows.looking(key),
            hosts=("*",),
            every=EVERY,
            ending=ending,
            origins=behind.origins,
            budget=lambda name: behind.windows.budget(key, name),
            rest=lambda: SHARE * self.took,
        )


class BehindKeys:
    """Answers below `/dashboard`.

    Args:
        behind: what the gateway gives it.
        ending: whether the server is about to end.
        sign: answers who is signed in, where several processes serve at one address (see `Reception`); None for this one.
        word: what forms bring back where nobody signs in.
    """

    def __init__(
        self,
        behind: Behind,
        ending: Callable[[], bool] = lambda: False,
        sign: Callable[[str, Sequence[Any]], Awaitable[Any]] | None = None,
        word: str = "",
    ) -> None:
        self._behind, self._ending = behind, ending
        self._reception = None if behind.keys is None else Reception(sign or SignIns(behind.keys).answer)
        self._word = word or fresh_word()
        self._views: OrderedDict[tuple[str, bool, str], _View] = OrderedDict()
        self._turn, self._lock = asyncio.Semaphore(1), threading.Lock()
        self._followed = self._entering = 0
        self._look = environment(root=PEOPLE)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        path = scope["path"].removeprefix(PEOPLE) or "/"
        scope = {**scope, "root_path": PEOPLE, "path": PEOPLE + path}
        headers = by_name(scope["headers"])
        if path.startswith("/own/"):
            return await self._told(own_file(path.removeprefix("/own/")), scope, receive, send)
        if self._reception is None:
            check_local(scope)
            return await self._shown(scope, path, self._behind.anonymous, self._word, receive, send)
        request = Request(scope, receive)
        if path == SIGN_IN:
            return await self._told(await self._signed_in(request, headers), scope, receive, send)
        words = words_in(headers.get(b"cookie", ()))
        # A page that keeps itself up to date keeps nobody signed in.
        visitor = await self._find(words, look=headers.get(b"sec-fetch-mode", [b"navigate"]) == [b"navigate"])
        if visitor is None:
            return await self._told(self._asked(scope, path, headers), scope, receive, send)
        scope["state"]["exchange"].key = visitor.key
        if path == SIGN_OUT:
            return await self._told(await self._signed_out(request, headers, visitor, words), scope, receive, send)

        async def still() -> bool:
            found = await self._find(words, look=False)
            return found is not None and found.word == visitor.word

        return await self._shown(scope, path, visitor.key, visitor.word, receive, send, still)

    async def _told(self, response: Response, scope: Scope, receive: Receive, send: Send) -> None:
        for name, value in HEADERS.items():
            response.headers.setdefault(name, value)
        await response(scope, receive, send)

    # Signing in

    async def _find(self, words: list[str], *, look: bool = True) -> SignIn | None:
        assert self._reception is not None
        try:
            return await self._reception.find(words, uses=look)
        except (SpecError, OSError) as error:
            raise Problem(503, "keys_unreadable", "the gateway cannot read its keys; nobody comes in until it can") from error

    def _asked(self, scope: Scope, path: str, headers: dict[bytes, list[bytes]]) -> Response:
        """The page to sign in, which leads on to what was asked for."""
        if scope["method"] not in ("GET", "HEAD") or path not in SCREENS:
            return PlainTextResponse("sign in first\n", 401)
        to = _place(path, scope.get("query_string", b"").decode("latin-1"))
        linked = headers.get(b"sec-fetch-site", [b""])[0] in (b"cross-site", b"same-site")
        return self._page(to, linked=linked, status=401)

    def _page(self, to: str, wrong: str = "", *, linked: bool = False, status: int = 200) -> Response:
        shown = {"to": to, "wrong": wrong, "linked": linked}
        return HTMLResponse(rendered(self._look, "sign_in.html", shown), status)

    async def _signed_in(self, request: Request, headers: dict[bytes, list[bytes]]) -> Response:
        assert self._reception is not None
        if request.method in ("GET", "HEAD"):
            return self._page("/")
        if request.method != "POST":
            return PlainTextResponse("sign in by POST\n", 405, headers={"allow": "GET, HEAD, POST"})
        if not is_ours(headers, self._behind.origins):
            return PlainTextResponse("one signs in from the page of this dashboard alone\n", 403)
        address = (request.scope.get("client") or ("",))[0]
        if wait := await self._reception.wait(address):
            slow = self._page("/", f"Too many wrong keys. Try again in {round(wait) + 1} seconds.", status=429)
            slow.headers["retry-after"] = str(round(wait) + 1)
            return slow
        if self._entering >= ENTERING:
            raise Problem(503, "overloaded", "as many people sign in as may at once", retry_after=5)
        self._entering += 1
        try:
            given = form_of(await body_of(request) or b"")
        except SpecError:
            given = {}
        finally:
            self._entering -= 1
        path, _, query = given.get("to", "").partition("?")
        to = _place(path, query)
        try:
            word = await self._reception.enter(given.get("key", ""), address)
        except (SpecError, OSError) as error:
            raise Problem(503, "keys_unreadable", "the gateway cannot read its keys; nobody comes in until it can") from error
        if word is None:
            return self._page(to, "This key is unknown here, was revoked, or opens no session.", status=401)
        reply = RedirectResponse(PEOPLE + to, 303)
        reply.headers["set-cookie"] = cookie(word, PEOPLE, secure=_is_secure(request.scope, headers))
        return reply

    async def _signed_out(
        self, request: Request, headers: dict[bytes, list[bytes]], visitor: SignIn, words: list[str]
    ) -> Response:
        assert self._reception is not None
        if request.method != "POST" or not is_ours(headers, self._behind.origins):
            return PlainTextResponse("one signs out by the button of a page of this dashboard\n", 403)
        try:
            given = form_of(await body_of(request) or b"")
        except SpecError:
            given = {}
        if not is_of_this_visit(given, Visit(visitor.word)):
            return PlainTextResponse("this form is of an earlier visit; go back, and load the page again\n", 403)
        await self._reception.leave(words)
        reply = RedirectResponse(f"{PEOPLE}{SIGN_IN}", 303)
        for secure in (False, True):
            reply.headers.append("set-cookie", cookie("", PEOPLE, secure=secure))
        return reply

    # The screens

    async def _shown(
        self,
        scope: Scope,
        path: str,
        key: Key,
        word: str,
        receive: Receive,
        send: Send,
        still: Callable[[], Awaitable[bool]] | None = None,
    ) -> None:
        """What a visitor asked for, as the key shows it.

        Args:
            still: whether the visitor is still signed in; None where nobody signs in.
        """
        view = await in_thread(self._view, key)
        hands = None if key.looks else KeyHands(self._behind.windows, key)
        visit = Visit(word, hands, key.note or key.name)
        scope = {**scope, "state": {**scope["state"], "visit": visit}}
        if path == LIVE:
            return await self._live(view, scope, receive, send, still)
        if scope["method"] == "POST":
            # Before anybody else has to wait for it.
            receive = _replayed(await body_of(Request(scope, receive)) or b"", receive)
        held: list[Any] = []

        async def hold(message: Any) -> None:
            held.append(message)

        async with self._turn:
            began = time.perf_counter()
            await view.app(scope, receive, hold)
            view.took = time.perf_counter() - began
        # A browser that reads slowly keeps nobody waiting.
        for message in held:
            await send(message)
        return None

    def _view(self, key: Key) -> _View:
        kind = key.tenant, bool(key.name), key.user
        try:
            with self._lock:
                view = self._views.pop(kind, None) or _View(self._behind, key, self._ending)
                self._views[kind] = view
                while len(self._views) > READERS:
                    self._views.popitem(last=False)
            return view
        except KilburnError as error:
            raise Problem(503, "store_failed", "the gateway's store cannot be read; try again later") from error

    async def _live(
        self, view: _View, scope: Scope, receive: Receive, send: Send, still: Callable[[], Awaitable[bool]] | None
    ) -> None:
        if self._followed >= FOLLOWED:
            raise Problem(503, "overloaded", "as many screens are kept up to date as may be", retry_after=30)

        async def receiving() -> Any:
            return await receive() if still is None or await still() else {"type": "http.disconnect"}

        self._followed += 1
        try:
            await view.app(scope, receiving, send)
        finally:
            self._followed -= 1


def _replayed(body: bytes, receive: Receive) -> Receive:
    """What gives a body that was read, and then what comes."""
    pending = [{"type": "http.request", "body": body, "more_body": False}]

    async def receiving() -> Any:
        return pending.pop() if pending else await receive()

    return receiving


def _place(path: str, query: str) -> str:
    """A screen of ours with its query, written anew; the list of sessions for anything else."""
    if path not in SCREENS or len(query) > LONGEST:
        return "/"
    asked = urlencode(parse_qsl(query, keep_blank_values=True, errors="replace")[:20])
    return f"{path}?{asked}" if asked else path


def _is_secure(scope: Scope, headers: dict[bytes, list[bytes]]) -> bool:
    """Whether the page came over TLS: its browser says so, or this server did it itself."""
    return scope.get("scheme") == "https" or headers.get(b"origin", [b""])[0].lower().startswith(b"https://")


def signing_of(keys: str | None) -> SignIns | None:
    """Who is signed in at several processes that serve at one address, for their parent; None where nobody signs in."""
    return None if keys is None else SignIns(Keys(keys))


def mounted(
    ending: Callable[[], bool] = lambda: False,
    sign: Callable[[str, Sequence[Any]], Awaitable[Any]] | None = None,
    word: str = "",
) -> Callable[[Behind], App]:
    """What a gateway takes to have a dashboard; the arguments are those of `BehindKeys`."""
    return lambda behind: BehindKeys(behind, ending, sign, word)

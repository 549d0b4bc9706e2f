"""The state of the gateway: /health for everybody, /metrics and /sessions for keys, each with its own figures."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

import kilburn
from kilburn.backend import Backend
from kilburn.backends.places import is_url, open_backend
from kilburn.errors import KilburnError, MissingExtra, SpecError, StoreBusy, StoreError, StoreFull, StoreStale
from kilburn.gateway.exchange import Rows
from kilburn.gateway.keys import Key
from kilburn.gateway.metrics import Counts
from kilburn.gateway.problems import Problem, client_message
from kilburn.gateway.users import requested_user, sees

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtra("starlette", "serve") from error


FRESH = 1.0
"""Seconds for which a health check's result is reused, so that frequent checks do not load the disk."""


WAIT = 0.5
"""Seconds that a health check waits for another writer."""

FREE = 4 << 20
"""Minimum free space of a disk, in bytes: a write needs some for the store's log."""

RECENT = 10.0
"""Seconds for which a failed write counts if none was tried since."""

BUSY_SECONDS = 2.0
"""Seconds after a request has waited for another program in vain, in which other requests do not wait for it."""


class Trouble:
    """Determines whether the store can be written, without writing. Safe to use from several threads.

    Args:
        path, tenant: of the store.
    """

    def __init__(self, path: str, tenant: str) -> None:
        self._path, self._tenant = path, tenant
        self._lock = threading.Lock()
        self._backend: Backend | None = None
        self._last: tuple[float, StoreError] | None = None

    def note(self, error: StoreError | None) -> None:
        """Note the store's error that a request met, or None."""
        is_repeat = self._last is not None and error is self._last[1]
        if not is_repeat and not isinstance(error, StoreStale):
            self._last = None if error is None else (time.monotonic(), error)

    def check_rested(self) -> None:
        """Raise what the last request met, if that was a moment ago and it had to wait for it.

        Raises:
            StoreBusy: another program holds the store.
        """
        last = self._last
        if last is not None and isinstance(last[1], StoreBusy) and time.monotonic() - last[0] < BUSY_SECONDS:
            raise last[1].with_traceback(None)

    def check(self) -> None:
        """Check the free disk space, become the writer without writing, and check the last request's error.

        Raises:
            StoreError: the store could not be written.
        """
        if self._path == ":memory:":
            return
        if not is_url(self._path):
            room = os.statvfs(os.path.dirname(os.path.abspath(self._path)))
            if room.f_bavail * room.f_frsize < FREE:
                raise StoreFull("there is no space left for the store", advice="free some space")
        with self._lock:
            # A separate connection, so that requests do not wait for it.
            self._backend = self._backend or open_backend(self._path, tenant=self._tenant, busy_timeout=WAIT)
            with self._backend.together():
                pass
        last = self._last
        if last is not None and time.monotonic() - last[0] < RECENT:
            raise last[1].with_traceback(None)

    def close(self) -> None:
        """Release the store."""
        with self._lock:
            if self._backend is not None:
                self._backend.close()


def routes(
    counts: Counts, check: Callable[[], object], search: Callable[[], str], *, keyed: bool, serves: bool = False
) -> list[Route]:
    """Return the routes.

    Args:
        check: raises if the gateway cannot work.
        search: says how what was said is found.
        keyed: whether clients have keys. Each then sees its tenant's figures, and one with `figures` those of all.
        serves: whether clients are served all the same if the gateway cannot work.
    """
    results: list[tuple[float, str]] = []
    asking = asyncio.Lock()

    async def health(request: Request) -> Response:
        async with asking:
            if not results or time.monotonic() - results[-1][0] > FRESH:
                results[:] = [(time.monotonic(), await asyncio.to_thread(_trouble, check))]
        trouble = results[-1][1]
        # Everybody may ask, so it names the class of the error, and no file, host or session.
        fields = {"status": "ok" if not trouble else "unread" if serves else "failing"}
        fields |= {"version": kilburn.__version__, "search": search()}
        return _json(fields | ({"problem": trouble} if trouble else {}), 503 if trouble and not serves else 200)

    def of(request: Request) -> str | None:
        key: Key = request.state.key
        return key.tenant if keyed and not key.figures else None

    async def page(request: Request) -> Response:
        return Response(await counts.page(of(request)), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def sessions(request: Request) -> Response:
        key: Key = request.state.key
        try:
            user_name = requested_user(request.headers, b"", key)
        except SpecError as error:
            raise Problem(400, "invalid_user", client_message(error)) from None
        return _json(Rows(time=time.time(), sessions=await counts.sessions(of(request), sees(key, user_name))), 200)

    return [Route("/health", health), Route("/metrics", page), Route("/sessions", sessions)]


def _trouble(check: Callable[[], object]) -> str:
    try:
        check()
    except (KilburnError, OSError) as error:
        return type(error).__name__
    return ""


def _json(value: Any, status: int) -> Response:
    return Response(msgspec.json.encode(value), status, media_type="application/json")

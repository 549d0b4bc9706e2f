"""How the gateway is: /health for whoever asks, /metrics and /sessions for keys, each with what is its own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import msgspec

import kilburn
from kilburn.errors import KilburnError, MissingExtra
from kilburn.gateway.exchange import Rows
from kilburn.gateway.keys import Key
from kilburn.gateway.metrics import Metrics

try:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ModuleNotFoundError as error:
    raise MissingExtra("starlette", "serve") from error

__all__ = ["routes"]

FRESH = 1.0
"""Seconds for which a health check's result is given again, so that nobody keeps the disk busy with it."""


def routes(metrics: Metrics, check: Callable[[], object], search: Callable[[], str], *, keyed: bool) -> list[Route]:
    """The routes.

    Args:
        check: raises if the gateway cannot work.
        search: says how what was said is found.
        keyed: whether clients have keys. Each then sees its tenant's figures, and one with `figures` those of all.
    """
    known: list[tuple[float, str]] = []
    asking = asyncio.Lock()

    async def health(request: Request) -> Response:
        async with asking:
            if not known or time.monotonic() - known[-1][0] > FRESH:
                known[:] = [(time.monotonic(), await asyncio.to_thread(_trouble, check))]
        trouble = known[-1][1]
        # Anyone may ask: it names the class of what is wrong, and no file, host or session.
        said = {"status": "failing" if trouble else "ok", "version": kilburn.__version__, "search": search()}
        return _json(said | ({"problem": trouble} if trouble else {}), 503 if trouble else 200)

    def of(request: Request) -> str | None:
        key: Key = request.state.key
        return key.tenant if keyed and not key.figures else None

    async def page(request: Request) -> Response:
        return Response(metrics.page(of(request)), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def sessions(request: Request) -> Response:
        return _json(Rows(time=time.time(), sessions=metrics.sessions(of(request))), 200)

    return [Route("/health", health), Route("/metrics", page), Route("/sessions", sessions)]


def _trouble(check: Callable[[], object]) -> str:
    try:
        check()
    except (KilburnError, OSError) as error:
        return type(error).__name__
    return ""


def _json(said: Any, status: int) -> Response:
    return Response(msgspec.json.encode(said), status, media_type="application/json")

"""A proxy that only passes on, in the gateway's own framework: what any gateway in it costs at least.

python -m kilburn.evals.pass_through PORT UPSTREAM
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx2
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

__all__ = ["build"]

OWN = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
"""Headers that are of one connection."""


def build(upstream: str) -> Starlette:
    """The application. `upstream`: the URL before `/v1`."""
    limits = httpx2.Limits(max_connections=None, max_keepalive_connections=200)
    client = httpx2.AsyncClient(timeout=600, limits=limits, trust_env=False)

    async def relay(request: Request) -> StreamingResponse:
        headers = {name: value for name, value in request.headers.items() if name not in OWN}
        asked = client.build_request(
            request.method, f"{upstream}{request.url.path}", content=await request.body(), headers=headers
        )
        answer = await client.send(asked, stream=True)
        kept = {name: value for name, value in answer.headers.items() if name not in OWN}
        return StreamingResponse(answer.aiter_raw(), answer.status_code, kept, background=BackgroundTask(answer.aclose))

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        async with client:
            yield

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(build(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)

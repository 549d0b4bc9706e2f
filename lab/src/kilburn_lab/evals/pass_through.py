"""A proxy that only passes on, in the gateway's own framework: what any gateway in it costs at least.

python -m kilburn_lab.evals.pass_through PORT UPSTREAM
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

OWN = {"host", "connection", "content-length", "transfer-encoding", "accept-encoding"}
"""Headers that are of one connection."""


def build(upstream: str) -> Starlette:
    """The application. `upstream`: the URL before `/v1`."""

    async def relay(request: Request) -> StreamingResponse:
        headers = {name: value for name, value in request.headers.items() if name not in OWN}
        session: aiohttp.ClientSession = request.state.session
        answer = await session.request(request.method, upstream + request.url.path, data=await request.body(), headers=headers)
        kept = {name: value for name, value in answer.headers.items() if name.lower() not in OWN}
        return StreamingResponse(answer.content.iter_any(), answer.status, kept)

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[dict[str, aiohttp.ClientSession]]:
        timeout = aiohttp.ClientTimeout(total=600)
        async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
            yield {"session": session}

    return Starlette(routes=[Route("/{path:path}", relay, methods=["GET", "POST"])], lifespan=lifespan)


if __name__ == "__main__":
    uvicorn.run(
        build(sys.argv[2]), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False, timeout_keep_alive=600
    )

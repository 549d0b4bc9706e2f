"""A real server for an ASGI application, in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import uvicorn

from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.limits import Limits


@pytest.fixture
def serving() -> Iterator[Callable[..., int]]:
    """Serves an application on a free port of the loopback until the test ends; returns the port."""
    servers: list[tuple[uvicorn.Server, threading.Thread]] = []

    def serve(app: Any, limits: Limits | None = None) -> int:
        config = uvicorn.Config(app, port=0, log_level="error", lifespan="auto", **uvicorn_options(limits or Limits()))
        server = uvicorn.Server(config)
        thread = threading.Thread(target=server.run)
        thread.start()
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        servers.append((server, thread))
        found: socket.socket = server.servers[0].sockets[0]
        return int(found.getsockname()[1])

    yield serve
    for server, _ in servers:
        server.should_exit = True
    for server, thread in servers:
        thread.join(5)
        server.force_exit = True
        thread.join(10)
        assert not thread.is_alive()

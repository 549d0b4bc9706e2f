"""One TCP connection: uvicorn's, with bounds on how long a client may keep it for nothing.

uvicorn itself waits for ever for a request's headers, and for a client that stops reading what it is sent.
"""

from __future__ import annotations

import asyncio
from typing import Any

from kilburn.errors import MissingExtra
from kilburn.gateway.limits import RequestBounds

try:
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "uvicorn", "serve") from error


def uvicorn_options(limits: RequestBounds) -> dict[str, Any]:
    """Options of `uvicorn.Config` that hold the limits which no application can hold. Clients' addresses are those of their
    connections: a forwarded header proves nothing."""

    class Connection(H11Protocol):
        """A connection that is cut when its client neither asks nor reads."""

        _waiting: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            # After headers that are whole, the body is the application's matter.
            if self.cycle is not None and not self.cycle.response_complete:
                self._waiting = _cancel(self._waiting)
            elif self._waiting is None:
                self._wait()

        def connection_lost(self, exc: Exception | None) -> None:
            self._waiting, self._writing = _cancel(self._waiting), _cancel(self._writing)
            super().connection_lost(exc)

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._writing is None:
                self._writing = self.loop.call_later(limits.patience, self.transport.abort)

        def resume_writing(self) -> None:
            self._writing = _cancel(self._writing)
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            # Closing would wait until the client has read what was sent before.
            self.transport.abort()

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(limits.patience, self.transport.abort)

    return {
        "http": Connection,
        "ws": "none",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "h11_max_incomplete_event_size": limits.header_bytes,
        "timeout_keep_alive": max(1, round(limits.patience)),
    }


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """What is left of a timer: nothing."""
    if timer is not None:
        timer.cancel()
    return None

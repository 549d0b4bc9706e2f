"""uvicorn's TCP connection, with limits on the memory that a client may occupy, and on the time that it may be idle.

The parser is llhttp, in C, which has no limits of its own: this module counts the bytes until the parser reports a complete head,
piece of a body, or end. uvicorn itself waits without limit for a request's headers, and for a client that stops reading.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any
from urllib.parse import unquote

from kilburn.errors import MissingExtra
from kilburn.gateway.exchange import LEAVING
from kilburn.gateway.limits import RequestBounds

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "uvicorn", "serve") from error

PIPELINED = 16
"""Maximum number of requests that a client may send while it waits for an answer."""


def uvicorn_options(limits: RequestBounds) -> dict[str, Any]:
    """Options of `uvicorn.Config` that hold the limits which no application can hold. Clients' addresses are those of their
    connections: a forwarded header proves nothing."""

    class BoundedProtocol(HttpToolsProtocol):
        """A connection that is closed if its client neither sends requests nor reads, or sends data that never becomes a
        request."""

        _waiting: asyncio.TimerHandle | None = None
        _writing: asyncio.TimerHandle | None = None
        _progress = False
        """Whether the parser reported a complete part in its last input."""
        _unfinished = 0
        """Bytes of input since then."""
        _in_body = False
        _leaving: tuple[Callable[[], None], ...] = ()
        """Functions to call when the client leaves."""

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.abort()
                return
            self._wait()

        def data_received(self, data: bytes) -> None:
            if len(data) <= limits.header_bytes:
                self._feed(data)
            else:
                remaining = memoryview(data)
                while remaining and not self.transport.is_closing():
                    size = len(remaining) if self._in_body else limits.header_bytes
                    self._feed(bytes(remaining[:size]))
                    remaining = remaining[size:]
            # After complete headers, the application limits the body.
            if self.cycle is not None and not self.cycle.response_complete:
                self._waiting = _cancel(self._waiting)
            elif self._waiting is None:
                self._wait()

        def _feed(self, data: bytes) -> None:
            if self._unfinished > limits.header_bytes:
                self.send_400_response("Invalid HTTP request received.")
                return
            self._progress = False
            super().data_received(data)
            self._unfinished = 0 if self._progress else self._unfinished + len(data)

        def on_message_begin(self) -> None:
            super().on_message_begin()
            if len(self.pipeline) >= PIPELINED:
                raise ValueError("more requests than are answered at once")

        def on_header(self, name: bytes, value: bytes) -> None:
            # Bytes behind a body are not headers of the request that is being answered.
            if not self._in_body:
                super().on_header(name, value)

        def on_headers_complete(self) -> None:
            self._progress = self._in_body = True
            codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
            if not self.url.startswith(b"/") or codings not in ([], [b"chunked"]):
                raise ValueError("an address of another server, or a body that nobody here can read")
            super().on_headers_complete()
            # The raw target: httptools drops a fragment behind `#`, and reads `//name` as a host.
            path, _, query = self.url.partition(b"?")
            self.scope["path"], self.scope["raw_path"], self.scope["query_string"] = unquote(path.decode("ascii")), path, query
            self.scope["state"][LEAVING] = self._on_leaving
            if self.parser.should_upgrade():
                # The bytes behind it are not HTTP.
                self.cycle.keep_alive = False

        def on_body(self, body: bytes) -> None:
            self._progress = True
            super().on_body(body)

        def on_message_complete(self) -> None:
            self._progress, self._in_body = True, False
            super().on_message_complete()

        def connection_lost(self, exc: Exception | None) -> None:
            self._waiting, self._writing = _cancel(self._waiting), _cancel(self._writing)
            super().connection_lost(exc)
            for leave in self._leaving:
                leave()

        def _on_leaving(self, leave: Callable[[], None]) -> Callable[[], None]:
            # The end of a connection is noticed only while it is read.
            self.flow.resume_reading()
            self._leaving = (*self._leaving, leave)
            if self.transport.is_closing():
                self.loop.call_soon(leave)

            def stay() -> None:
                self._leaving = tuple(callback for callback in self._leaving if callback is not leave)

            return stay

        def pause_writing(self) -> None:
            super().pause_writing()
            if self._writing is None:
                self._writing = self.loop.call_later(limits.patience, self.transport.abort)

        def resume_writing(self) -> None:
            self._writing = _cancel(self._writing)
            super().resume_writing()

        def timeout_keep_alive_handler(self) -> None:
            # Closing would wait until the client has read all data.
            self.transport.abort()

        def _wait(self) -> None:
            self._waiting = self.loop.call_later(limits.patience, self.transport.abort)

    return {
        "http": BoundedProtocol,
        "ws": "none",
        "access_log": False,
        "server_header": False,
        "proxy_headers": False,
        "timeout_keep_alive": max(1, round(limits.patience)),
    }


def _cancel(timer: asyncio.TimerHandle | None) -> asyncio.TimerHandle | None:
    """Cancel a timer, and return None."""
    if timer is not None:
        timer.cancel()
    return None

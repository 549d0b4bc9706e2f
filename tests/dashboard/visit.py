"""Asks an ASGI application, as a browser's first request would."""

from __future__ import annotations

import asyncio
import html
import re
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote


@dataclass(frozen=True)
class Reply:
    """What came back."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8")

    @property
    def links(self) -> list[str]:
        """Where its links lead, without those within the page."""
        found = [html.unescape(link) for link in re.findall(r'<a [^>]*?href="([^"]+)"', self.text)]
        return [link for link in found if not link.startswith("#")]


def ask(app: Any, path: str, *, method: str = "GET", host: str | None = "127.0.0.1:8765", **headers: str) -> Reply:
    """One request and its whole answer. Names of headers have underscores for dashes."""
    where, _, query = path.partition("?")
    sent = [(name.replace("_", "-").encode(), value.encode("latin-1")) for name, value in headers.items()]
    sent += [(b"host", host.encode("latin-1"))] if host is not None else []
    scope = {
        "type": "http",
        "http_version": "1.1",
        "method": method,
        "scheme": "http",
        "path": where,
        "raw_path": quote(where).encode(),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": sent,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8765),
    }
    got: list[Any] = []

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        got.append(message)

    asyncio.run(app(scope, receive, send))
    start = got[0]
    return Reply(
        status=start["status"],
        headers={name.decode().lower(): value.decode() for name, value in start["headers"]},
        body=b"".join(message.get("body", b"") for message in got[1:]),
    )

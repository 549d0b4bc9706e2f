"""Asks an ASGI application, as a browser's first request would."""

from __future__ import annotations

import asyncio
import html
import re
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote, urlencode


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
    where, _, query = path.partition("#")[0].partition("?")
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


def to(path: str, **query: object) -> str:
    """A path with its query."""
    return f"{path}?{urlencode(query)}"


def ok(app: Any, path: str, **query: object) -> Reply:
    """The answer of a screen that is there; what is still worked out is waited for."""
    for _ in range(6_000):
        reply = ask(app, to(path, **query))
        assert reply.status == 200, reply.text
        if "data-again" not in reply.text:
            return reply
        time.sleep(0.02)
    raise AssertionError("it is never ready")


def words_of(reply: Reply) -> str:
    """What a reader sees, roughly."""
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", reply.text)))


def walk(app: Any, begin: str = "/", each: int = 12) -> set[str]:
    """Follow all links, a few of each kind, since there are thousands of pages; each leads somewhere. Returns the links."""
    seen, waiting = {begin}, [begin]
    while waiting:
        reply = ask(app, waiting.pop())
        assert reply.status == 200, reply.text
        for link in reply.links if "text/html" in reply.headers["content-type"] else ():
            kind = re.sub(r"=[^&]*", "", link).partition("#")[0]
            if link not in seen and sum(re.sub(r"=[^&]*", "", one).partition("#")[0] == kind for one in seen) < each:
                seen.add(link)
                waiting.append(link)
    return seen

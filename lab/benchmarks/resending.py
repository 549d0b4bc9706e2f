"""What the gateway does for one request of a client that resends everything: its processor time, and calls of functions.

Conversations of 39 messages are asked for turn by turn; a model in the program answers, and no network is in between. The rows:
histories that begin, byte for byte, as the last one did; histories that their client writes anew at each turn, as with a mark for
a cache that moves; the first request after a restart. Requests of 17 to 23 messages count. What else runs on the machine changes
the time, and no count of calls: run two checkouts in turn to compare them.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any

from figures import Row, emit, median, parser
from kilburn.gateway.app import Settings, build
from kilburn.models.echo import Echo

WORDS = "the river carries sand and the sand carries gold " * 4
LAST = 39
COUNTED = range(17, 24)
KINDS = ("the same bytes", "written anew", "after a restart")


class Client:
    """Asks an application, and resends everything."""

    def __init__(self, app: Any, *, anew: bool = False) -> None:
        self.app, self.anew = app, anew
        self.messages: list[dict[str, Any]] = []

    async def ask(self, words: str) -> None:
        """Say something, and keep what is answered."""
        self.messages.append({"role": "user", "content": words})
        sent = [*self.messages]
        if self.anew:
            sent[-1] = {"role": "user", "content": [{"type": "text", "text": words, "cache_control": {"type": "ephemeral"}}]}
        body = json.dumps({"model": "m", "max_tokens": 4, "messages": sent}).encode()
        headers = [(b"host", b"localhost"), (b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
        scope = {"type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
                 "path": "/v1/chat/completions", "raw_path": b"/v1/chat/completions", "query_string": b"", "root_path": "",
                 "headers": headers, "client": ("127.0.0.1", 9), "server": ("localhost", 80), "state": {}}  # fmt: skip
        waiting = [{"type": "http.request", "body": body, "more_body": False}]
        heard: list[dict[str, Any]] = []
        over = asyncio.Event()

        async def receive() -> dict[str, Any]:
            if waiting:
                return waiting.pop()
            await over.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            heard.append(message)

        await self.app(scope, receive, send)
        over.set()
        if heard[0]["status"] != 200:
            raise SystemExit(f"the gateway answered {heard}")
        reply = json.loads(b"".join(each.get("body", b"") for each in heard[1:]))
        self.messages.append(reply["choices"][0]["message"])


class Calls:
    """Counts the calls of functions, in this thread and in those that begin later."""

    def __init__(self) -> None:
        self.count = 0
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: object) -> None:
        self.count += event in ("call", "c_call")


async def measure(talks: int, calls: Calls | None) -> list[Row]:
    """A row for each kind of history: milliseconds of processor time, or calls, for a request."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        for kind in KINDS:
            settings = Settings(
                db=str(Path(folder) / f"{KINDS.index(kind)}.db"), model=Echo(), tokenizer="chars/4", embedder=None
            )
            app, found = build(settings), list[float]()
            for talk in range(talks):
                client = Client(app, anew=kind == KINDS[1])
                for count in range(1, LAST + 1, 2):
                    if kind == KINDS[2] and count in COUNTED:
                        client.app = app = build(settings)
                    before = calls.count if calls else time.process_time()
                    await client.ask(f"{kind} {talk} {count} {WORDS}")
                    spent = calls.count - before if calls else 1000 * (time.process_time() - before)
                    if count in COUNTED and talk:
                        found.append(spent)
            rows.append({"history": kind, "calls" if calls else "ms of processor time": median(found)})
    return rows


def main() -> None:
    """Measure and print."""
    arguments = parser(__doc__ or "")
    arguments.add_argument("--talks", type=int, default=20, help="conversations of each kind")
    arguments.add_argument("--calls", action="store_true", help="count calls of functions instead of the time")
    given = arguments.parse_args()
    rows = asyncio.run(measure(given.talks + 1, Calls() if given.calls else None))
    figure = "calls" if given.calls else "ms of processor time"
    least = float(rows[0][figure])
    rows = [{**row, "x": round(float(row[figure]) / least, 2)} for row in rows]
    emit("resending", rows, given.json, note="One request of about 20 messages; x: against one that resends the same bytes.")


if __name__ == "__main__":
    sys.exit(main())

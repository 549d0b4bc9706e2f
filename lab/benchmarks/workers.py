"""What a gateway carries, and what it costs: over a file with one worker and with several, and over PostgreSQL, in turns.

    python lab/benchmarks/workers.py
    python lab/benchmarks/workers.py --rounds 1 --requests 300 --json

Clients talk in conversations of 20 messages, at once and over connections that stay; a provider that answers at once stands
behind. Both are plain sockets, so that they take little beside the gateway. Processor time is that of all processes of the
gateway, without clients and provider; PostgreSQL's stands by itself. What is added to the first byte is what the gateway's own
log says of the last request of each conversation. Every round has every setting, and a ratio is the median of the rounds': so a
machine that is busy with something else disturbs all alike. Requests a second say something on a quiet machine alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from figures import Row, emit, parser
from kilburn.backends.postgres.server import OwnServer

MESSAGES = 20
"""Of a conversation, with its last reply."""

WORDS = "I looked at line {n} of the parser, and the check for the last line stands before the loop, where it is skipped. " * 3

ANSWER = msgspec.json.encode(
    {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "m",
        "choices": [{"index": 0, "message": {"role": "assistant", "content": WORDS}, "finish_reason": "stop"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": 60, "total_tokens": 160},
    }
)

TICKS = os.sysconf("SC_CLK_TCK")


class Answers(asyncio.Protocol):
    """The provider: the same answer to everything."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._data = transport, b""

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, rest = self._data.partition(b"\r\n\r\n")
        if not found or len(rest) < int(re.search(rb"(?i)content-length: *(\d+)", head)[1]):  # type: ignore[index]
            return
        self._data = b""
        start = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(ANSWER)
        self._transport.write(start + ANSWER)


async def provide() -> None:
    server = await asyncio.get_running_loop().create_server(Answers, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


@contextmanager
def provider() -> Iterator[str]:
    """Its URL; it has a process of its own."""
    with subprocess.Popen([sys.executable, __file__, "--provide"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/v1"
        finally:
            process.kill()


async def talk(port: int, name: str, turns: int) -> None:
    """Conversations over one connection, one after the other."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    messages: list[dict[str, str]] = []
    for turn in range(turns):
        if len(messages) >= MESSAGES:
            messages = []
        messages.append({"role": "user", "content": f"{name} {turn}: {WORDS.format(n=turn)}"})
        body = msgspec.json.encode({"model": "m", "messages": messages})
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
            b"content-length: %d\r\n\r\n" % len(body) + body
        )
        head = await reader.readuntil(b"\r\n\r\n")
        said = await reader.readexactly(int(re.search(rb"content-length: (\d+)", head)[1]))  # type: ignore[index]
        if not head.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"{head!r} {said!r}")
        messages.append({"role": "assistant", "content": json.loads(said)["choices"][0]["message"]["content"]})
    writer.close()


async def talks(port: int, clients: int, requests: int, round_: int) -> None:
    await asyncio.gather(*(talk(port, f"r{round_}c{client}", requests // clients) for client in range(clients)))


def processor(pid: int) -> float:
    """Seconds that a process and those that it began have taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / TICKS + sum(processor(int(child)) for child in children)


class Found(NamedTuple):
    """What one run took: requests a second, milliseconds of processor a request of the gateway and of PostgreSQL, and
    milliseconds that were added at the end of each conversation."""

    rate: float
    processor: float
    database: float
    added: float


def run(far: str, db: str, workers: int, clients: int, requests: int, round_: int, server: OwnServer | None) -> Found:
    with tempfile.TemporaryDirectory(prefix="workers") as folder:
        log, told = Path(folder) / "log", Path(folder) / "told"
        place = db or f"{folder}/agent.db"
        words = ("--port", "0", "--upstream", far, "--db", place, "--log", str(log), "--workers", str(workers))
        with told.open("w") as out:
            process = subprocess.Popen([sys.executable, "-m", "kilburn", "serve", *words, "--tenant", f"r{round_}"], stderr=out)
        try:
            while not (found := re.search(r"http://[\d.]+:(\d+)/v1", told.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(told.read_text())
                time.sleep(0.05)
            port = int(found[1])
            asyncio.run(talks(port, clients, 2 * clients * workers, -1 - round_))  # connections, code, prepared statements
            before, there = processor(process.pid), _postmaster(server)
            skipped, began = log.read_text().count("\n"), time.perf_counter()
            asyncio.run(talks(port, clients, requests, round_))
            wall = time.perf_counter() - began
            took, database = processor(process.pid) - before, _postmaster(server) - there
            lines = [json.loads(line) for line in log.read_text().splitlines()[skipped:]]
            longest = max(line["bytes"] for line in lines)
            added = [line["added"] for line in lines if line["bytes"] > 0.9 * longest and "added" in line]
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)
    done = requests // clients * clients
    return Found(done / wall, took / done * 1e3, database / done * 1e3, statistics.median(added) * 1e3)


def _postmaster(server: OwnServer | None) -> float:
    return 0.0 if server is None else processor(int((server.data / "postmaster.pid").read_text().split()[0]))


def rows_of(rounds: int, clients: int, requests: int, workers: int) -> list[Row]:
    found: dict[str, list[Found]] = {}
    with ExitStack() as stack:
        far = stack.enter_context(provider())
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True))
        Path(folder).chmod(0o711)
        server = OwnServer(Path(folder) / "s")
        server.start()
        stack.callback(server.stop, "immediate")
        settings = [("file", "", 1), ("file", "", workers), ("PostgreSQL", server.url, 1), ("PostgreSQL", server.url, workers)]
        for round_ in range(rounds):
            for kind, db, count in settings:
                made = run(far, db, count, clients, requests, round_ * 10 + count, server if db else None)
                found.setdefault(f"{kind}, {count}", []).append(made)
    base = found["file, 1"]

    def ratio(some: list[Found], of: str) -> float:
        return statistics.median(getattr(one, of) / getattr(other, of) for one, other in zip(some, base, strict=True))

    return [
        {
            "store, workers": name,
            "requests/s": statistics.median(one.rate for one in some),
            "x": ratio(some, "rate"),
            "gateway ms": statistics.median(one.processor for one in some),
            "x of it": ratio(some, "processor"),
            "PostgreSQL ms": statistics.median(one.database for one in some),
            "added ms": statistics.median(one.added for one in some),
        }
        for name, some in found.items()
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--requests", type=int, default=1200, help="of each run")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--provide", action="store_true", help="be the provider")
    asked = options.parse_args()
    if asked.provide:
        asyncio.run(provide())
        return
    rows = rows_of(asked.rounds, asked.clients, asked.requests, asked.workers)
    emit("workers", rows, asked.json, "Processor time is of all processes of the gateway, for each request.")


if __name__ == "__main__":
    main()

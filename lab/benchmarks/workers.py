"""What a gateway carries, and what it costs: over a file with one worker and with several, and over PostgreSQL, in turns.

    python lab/benchmarks/workers.py
    python lab/benchmarks/workers.py --rounds 1 --requests 320 --store file --json
    python lab/benchmarks/workers.py --memory 8000 --store file

Clients talk in conversations of 20 messages, at once and over connections that stay; a provider that answers at once stands
behind. Both are in one process that has written every byte beforehand, so they take little of the processor, and the table says
how much. Processor time is that of all processes of the gateway, without clients and provider; PostgreSQL's stands by itself.

What is added to the first byte is measured with one client: the time from a streamed request to its first event through the
gateway, less the same of the provider, which is asked for the same directly before; the median of the last requests of
conversations. Every round has every setting, and a ratio is the median of the rounds': so a machine that is busy with something
else disturbs all alike. Requests a second say something on a quiet machine alone.

With `--memory` it says instead what one gateway takes for itself (RssAnon) after so many answers, and after a half, a quarter and
an eighth of them: once with conversations of 20 messages, where each is a new session, and once with few that go on to 400.
"""

from __future__ import annotations

import os
import re
import select
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from figures import Row, emit, parser
from kilburn.backends.postgres.server import OwnServer
from kilburn_lab.evals.load import private_memory

MESSAGES = 20
"""Of a conversation, with its last reply."""

TURNS = MESSAGES // 2

LONG = 400
"""Messages of a long conversation."""

WORDS = "I looked at line {n} of the parser, and the check for the last line stands before the loop, where it is skipped. " * 3

TICKS = os.sysconf("SC_CLK_TCK")

STORES = ("file", "PostgreSQL")

HELLO = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"

LENGTH = re.compile(rb"(?i)content-length: *(\d+)")

END = b"0\r\n\r\n"
"""The last bytes of a stream."""


def _answer() -> bytes:
    message = {"index": 0, "message": {"role": "assistant", "content": WORDS}, "finish_reason": "stop"}
    usage = {"prompt_tokens": 100, "completion_tokens": 60, "total_tokens": 160}
    body = msgspec.json.encode(
        {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": "m", "choices": [message], "usage": usage}
    )
    return b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n" % len(body) + body


def _stream() -> tuple[bytes, bytes]:
    """Its head with the first event, and the rest."""
    pieces = [WORDS[at : at + 20] for at in range(0, len(WORDS), 20)]
    choices: list[dict[str, Any]] = [{"index": 0, "delta": {"role": "assistant", "content": piece}} for piece in pieces]
    choices.append({"index": 0, "delta": {}, "finish_reason": "stop"})
    event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    first, *rest = [b"data: " + msgspec.json.encode({**event, "choices": [choice]}) + b"\n\n" for choice in choices]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + _chunk(first), b"".join(map(_chunk, [*rest, b"data: [DONE]\n\n"])) + END


def _chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


ANSWER, (FIRST, REST) = _answer(), _stream()


def conversations(name: str, count: int, *, stream: bool = False, length: int = MESSAGES) -> Iterator[bytes]:
    """So many requests, which go on from each other up to conversations of a length."""
    messages = list[dict[str, str]]()
    for turn in range(count):
        if len(messages) >= length:
            messages = []
        messages.append({"role": "user", "content": f"{name} {turn}: {WORDS.format(n=turn)}"})
        body = msgspec.json.encode({"model": "m", "messages": messages, **({"stream": True} if stream else {})})
        yield HELLO % len(body) + body
        messages.append({"role": "assistant", "content": WORDS})


class Ends:
    """The clients, and the provider: who stands at both ends of the gateway."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._poll = select.epoll()
        self._poll.register(self._listener, select.EPOLLIN)
        self._asked: dict[int, tuple[socket.socket, bytearray]] = {}
        """Connections of the provider, each with what came of a request."""
        self._streams: list[socket.socket] = []
        """Streams of which the first event is out."""

    def __enter__(self) -> Ends:
        return self

    def __exit__(self, *error: object) -> None:
        for connection, _ in self._asked.values():
            connection.close()
        self._poll.close()
        self._listener.close()

    def _ready(self) -> Iterator[int]:
        """Lets the provider do what it has to; the clients that have something to read."""
        for number, _ in self._poll.poll():
            if number == self._listener.fileno():
                connection = self._listener.accept()[0]
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._asked[connection.fileno()] = connection, bytearray()
                self._poll.register(connection, select.EPOLLIN)
            elif number in self._asked:
                self._provide(number)
            else:
                yield number

    def _provide(self, number: int) -> None:
        connection, data = self._asked[number]
        piece = connection.recv(1 << 18)
        if not piece:
            del self._asked[number]
            connection.close()
            return
        data += piece
        end = data.find(b"\r\n\r\n")
        if end < 0 or len(data) - end - 4 < int(LENGTH.search(data, 0, end + 2)[1]):  # type: ignore[index]
            return
        if data.find(b'"stream":true', end) < 0:
            connection.send(ANSWER)
        else:
            connection.send(FIRST)
            self._streams.append(connection)
        data.clear()

    def talk(self, port: int, requests: Iterable[Iterable[bytes]]) -> None:
        """Each of some clients asks for one thing after the other, over one connection."""
        clients: dict[int, tuple[socket.socket, Iterator[bytes], bytearray]] = {}
        with ExitStack() as stack:
            for some in requests:
                connection = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                clients[connection.fileno()] = connection, iter(some), bytearray()
                self._poll.register(connection, select.EPOLLIN)
                connection.sendall(next(clients[connection.fileno()][1]))
            while clients:
                for number in self._ready():
                    connection, left, data = clients[number]
                    piece = connection.recv(1 << 18)
                    data += piece
                    end = data.find(b"\r\n\r\n")
                    if not piece or (end >= 0 and not data.startswith(b"HTTP/1.1 200")):
                        raise RuntimeError(bytes(data).decode("utf-8", "replace"))
                    if end < 0 or len(data) - end - 4 < int(LENGTH.search(data, 0, end + 2)[1]):  # type: ignore[index]
                        continue
                    data.clear()
                    if (request := next(left, None)) is not None:
                        connection.sendall(request)
                    else:
                        self._poll.unregister(connection)
                        del clients[number]

    def first(self, connection: socket.socket, request: bytes) -> float:
        """Seconds until the first event of a stream, whose rest is read, too. The provider says it as soon as that is there."""
        began, data, took = time.perf_counter(), b"", 0.0
        connection.sendall(request)
        while not data.endswith(END):
            for _ in self._ready():
                piece = connection.recv(1 << 18)
                data += piece
                if not piece or not data.startswith(b"HTTP/1.1 200"):
                    raise RuntimeError(data.decode("utf-8", "replace"))
                if not took and b"data: " in data:
                    took = time.perf_counter() - began
                    self._streams.pop().send(REST)
        return took

    def added(self, port: int, name: str, times: int) -> float:
        """Milliseconds that a gateway adds to the first byte at the end of a conversation: the median of so many."""
        found = []
        with ExitStack() as stack:
            direct, through = (stack.enter_context(socket.create_connection(("127.0.0.1", each))) for each in (self.port, port))
            for one in (direct, through):
                one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._poll.register(one, select.EPOLLIN)
            for at, request in enumerate(conversations(name, times * TURNS, stream=True), 1):
                alone = self.first(direct, request)
                both = self.first(through, request)
                if at % TURNS == 0:
                    found.append(both - alone)
            for one in (direct, through):
                self._poll.unregister(one)
        return statistics.median(found) * 1e3


def processor(pid: int) -> float:
    """Seconds that a process and those that it began have taken."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / TICKS + sum(processor(int(child)) for child in children)


class Found(NamedTuple):
    """What one run took: requests a second; milliseconds of processor a request of the gateway, of PostgreSQL, and of clients and
    provider; and milliseconds that were added to the first byte."""

    rate: float
    processor: float
    database: float
    ends: float
    added: float


class Asked(NamedTuple):
    """How much one run does."""

    clients: int
    requests: int
    firsts: int


@contextmanager
def gateway(ends: Ends, db: str, workers: int, tenant: str, *more: str) -> Iterator[tuple[int, int]]:
    """The process of a gateway over a database, or a file of its own, and its port."""
    with tempfile.TemporaryDirectory(prefix="workers") as folder:
        log, told = Path(folder) / "log", Path(folder) / "told"
        place, far = db or f"{folder}/agent.db", f"http://127.0.0.1:{ends.port}/v1"
        words = ("--port", "0", "--upstream", far, "--db", place, "--log", str(log), "--workers", str(workers), *more)
        with told.open("w") as out:
            process = subprocess.Popen([sys.executable, "-m", "kilburn", "serve", *words, "--tenant", tenant], stderr=out)
        try:
            while not (found := re.search(r"http://[\d.]+:(\d+)/v1", told.read_text())):
                if process.poll() is not None:
                    raise RuntimeError(told.read_text())
                time.sleep(0.05)
            yield process.pid, int(found[1])
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(120)


def run(ends: Ends, db: str, workers: int, asked: Asked, round_: int, server: OwnServer | None) -> Found:
    with gateway(ends, db, workers, f"r{round_}") as (pid, port):
        each = asked.requests // asked.clients
        # Connections, code, prepared statements.
        ends.talk(port, (conversations(f"before {client}", 2 * workers) for client in range(asked.clients)))
        said = [[*conversations(f"client {client}", each)] for client in range(asked.clients)]
        before, there = processor(pid), _postmaster(server)
        began, own = time.perf_counter(), time.process_time()
        ends.talk(port, said)
        wall, own = time.perf_counter() - began, time.process_time() - own
        took, database = processor(pid) - before, _postmaster(server) - there
        added = ends.added(port, "alone", asked.firsts)
    done = each * asked.clients
    return Found(done / wall, took / done * 1e3, database / done * 1e3, own / done * 1e3, added)


def _postmaster(server: OwnServer | None) -> float:
    return 0.0 if server is None else processor(int((server.data / "postmaster.pid").read_text().split()[0]))


@contextmanager
def both_ends(stores: Sequence[str]) -> Iterator[tuple[Ends, OwnServer | None]]:
    """Clients and provider, and a PostgreSQL if it is among the stores."""
    with ExitStack() as stack:
        ends, server = stack.enter_context(Ends()), None
        if "PostgreSQL" in stores:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True))
            Path(folder).chmod(0o711)
            server = OwnServer(Path(folder) / "s")
            server.start()
            stack.callback(server.stop, "immediate")
        yield ends, server


def memory_of(stores: Sequence[str], asked: Asked, more: Sequence[str]) -> list[Row]:
    """What a gateway takes for itself after so many answers, and after parts of them."""
    rows: list[Row] = []
    with both_ends(stores) as (ends, server):
        for kind in stores:
            for name, length in (("many", MESSAGES), ("long", LONG)):
                db = server.url if server is not None and kind == "PostgreSQL" else ""
                with gateway(ends, db, 1, name, *more) as (pid, port):
                    each = asked.requests // asked.clients
                    talks = [conversations(f"client {client}", each, length=length) for client in range(asked.clients)]
                    taken: dict[int, float] = {0: private_memory(pid) / 2**20}
                    done = 0
                    for part in (8, 4, 2, 1):
                        ends.talk(port, [islice(talk, each // part - done) for talk in talks])
                        done = each // part
                        taken[done * asked.clients] = private_memory(pid) / 2**20
                half, whole = list(taken)[-2:]
                rows.append(
                    {
                        "store": kind,
                        "sessions": name,
                        **{f"{count:,}": size for count, size in taken.items()},
                        "+ a thousand": 1000 * (taken[whole] - taken[half]) / (whole - half),
                    }
                )
    return rows


def rows_of(stores: Sequence[str], workers: int, rounds: int, asked: Asked) -> list[Row]:
    found: dict[str, list[Found]] = {}
    with both_ends(stores) as (ends, server):
        for round_ in range(rounds):
            for kind in stores:
                for count in dict.fromkeys((1, workers)):
                    there = server if kind == "PostgreSQL" else None
                    made = run(ends, there.url if there is not None else "", count, asked, round_ * 10 + count, there)
                    found.setdefault(f"{kind}, {count}", []).append(made)
    base = next(iter(found.values()))

    def ratio(some: list[Found], of: str) -> float:
        return float(statistics.median(getattr(one, of) / getattr(other, of) for one, other in zip(some, base, strict=True)))

    return [
        {
            "store, workers": name,
            "requests/s": statistics.median(one.rate for one in some),
            "x": ratio(some, "rate"),
            "gateway ms": statistics.median(one.processor for one in some),
            "x of it": ratio(some, "processor"),
            "PostgreSQL ms": statistics.median(one.database for one in some),
            "ends ms": statistics.median(one.ends for one in some),
            "first byte over provider's, ms": statistics.median(one.added for one in some),
        }
        for name, some in found.items()
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=3)
    options.add_argument("--requests", type=int, default=1200, help="of each run")
    options.add_argument("--clients", type=int, default=8)
    options.add_argument("--workers", type=int, default=2)
    options.add_argument("--firsts", type=int, default=30, help="first bytes that are measured in each run")
    options.add_argument("--memory", type=int, default=0, metavar="ANSWERS", help="measure memory after so many instead")
    options.add_argument("--serve", action="append", default=[], help="an option of kilburn serve for that; may be repeated")
    options.add_argument("--store", action="append", choices=STORES, help="may be repeated; both if it is left out")
    asked = options.parse_args()
    if asked.memory:
        rows = memory_of(asked.store or STORES, Asked(asked.clients, asked.memory, 0), asked.serve)
        emit(
            "workers",
            rows,
            asked.json,
            "MiB of the gateway's own memory after so many answers; what a thousand add from half on.",
        )
        return
    much = Asked(asked.clients, asked.requests, asked.firsts)
    rows = rows_of(asked.store or STORES, asked.workers, asked.rounds, much)
    note = "Processor time is for each request: of all processes of the gateway, of PostgreSQL, of clients and provider."
    emit("workers", rows, asked.json, note)


if __name__ == "__main__":
    main()

"""A provider on the loopback: a real HTTP server that answers from a script and remembers what it was asked."""

from __future__ import annotations

import json
import socket
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

CUT = "cut the connection here"
STALL = "say nothing until the client has gone"


@dataclass
class Answer:
    """One answer: `body` for a whole one, else `events`: bytes to send, or one of CUT and STALL."""

    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    body: Any = None
    events: Iterable[bytes | str] = ()


@dataclass
class Asked:
    path: str
    headers: dict[str, str]
    body: dict[str, Any]


class Loopback(ThreadingHTTPServer):
    """The script repeats its last answer when `forever`."""

    daemon_threads = True

    def __init__(self, answers: Iterable[Answer], *, forever: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = deque(answers)
        self.forever = forever
        self.asked: list[Asked] = []
        self.gone = threading.Event()
        """Set once a client has hung up on an answer."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def next_answer(self) -> Answer:
        return self.script[0] if self.forever and len(self.script) == 1 else self.script.popleft()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Loopback

    def do_GET(self) -> None:
        self._respond({})

    def do_POST(self) -> None:
        self._respond(json.loads(self.rfile.read(int(self.headers["content-length"]))))

    def _respond(self, body: dict[str, Any]) -> None:
        headers = {key.lower(): value for key, value in self.headers.items()}
        self.server.asked.append(Asked(self.path, headers, body))
        answer = self.server.next_answer()
        try:
            self._answer(answer)
        except OSError:
            self.server.gone.set()
            self.close_connection = True

    def _answer(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for key, value in answer.headers.items():
            self.send_header(key, value)
        if answer.body is not None:
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_header("content-type", "application/json")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            return
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        for event in answer.events:
            if event == CUT:
                self.connection.shutdown(socket.SHUT_RDWR)
                raise ConnectionAbortedError
            if event == STALL:
                self.connection.recv(1)
                raise ConnectionAbortedError
            assert isinstance(event, bytes)
            self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))
        self.wfile.write(b"0\r\n\r\n")

    def log_message(self, format: str, *args: object) -> None:
        return

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()


@contextmanager
def loopback(*answers: Answer, forever: bool = False) -> Iterator[Loopback]:
    server = Loopback(answers, forever=forever)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

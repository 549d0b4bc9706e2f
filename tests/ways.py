"""Ways to a server that a test can stop, cut or listen to: a relay that knows where each message begins."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

COMMITTED = b"C\x00\x00\x00\x0bCOMMIT\x00"
"""What a server says when a transaction is written."""


class Link:
    """One connection over a way."""

    def __init__(self, client: socket.socket, server: socket.socket) -> None:
        self.client, self.server = client, server
        self.pid = 0
        self.stopped = threading.Event()

    def cut(self) -> None:
        """End it, as a broken network does."""
        self.stopped.set()
        for one in (self.client, self.server):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """Pass nothing more, and say nothing about it."""
        self.stopped.set()


class Way:
    """A port that leads to a server's socket.

    Args:
        path: that socket.
        url: how the server is reached without it.
    """

    def __init__(self, path: str, url: str) -> None:
        self._path = path
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._threads: list[threading.Thread] = []
        self._links: list[Link] = []
        self._healed = threading.Event()
        self._healed.set()
        name = url.partition("@/")[2].partition("?")[0]
        port = self._listener.getsockname()[1]
        self.url = f"postgresql://postgres@127.0.0.1:{port}/{name}?sslmode=disable&gssencmode=disable&connect_timeout=3"
        self.connects = 0
        self.asked: Callable[[Link, int], None] = lambda link, number: None
        """Is called before each message of a client, with its number since `counted`; it may stop or cut the link."""
        self.sent: Callable[[bytes], None] = lambda message: None
        """Is called with each message of a client that is passed on."""
        self.answered: Callable[[Link, bytes], bytes] = lambda link, message: message
        """Is called with each message of the server; returns what the client gets instead."""
        self._numbers = itertools.count(1)
        self._start(self._accept)

    def count(self) -> None:
        """Begin to count messages anew."""
        self._numbers = itertools.count(1)

    def hang(self) -> None:
        """Pass nothing more, for those who come, too."""
        self._healed.clear()
        for link in self._links:
            link.stop()

    def heal(self) -> None:
        """Pass again; what hung is lost."""
        for link in self._links:
            if link.stopped.is_set():
                link.cut()
        self._healed.set()

    def close(self) -> None:
        """End all of it."""
        self._healed.set()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for link in self._links:
            link.cut()
        for thread in self._threads:
            thread.join()
        for link in self._links:
            link.client.close()
            link.server.close()

    def _start(self, do: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=do, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self.connects += 1
                own = socket.socket(socket.AF_UNIX)
                link = Link(client, own)
                self._links.append(link)
                if not self._healed.is_set():
                    link.stop()
                    continue
                own.connect(self._path)
                self._start(self._ask, link)
                self._start(self._answer, link)

    def _ask(self, link: Link) -> None:
        with suppress(OSError, EOFError):
            # What a client says first has no letter.
            (size,) = struct.unpack("!i", hello := read(link.client, 4))
            link.server.sendall(hello + read(link.client, size - 4))
            for message in messages(link.client):
                self.asked(link, next(self._numbers))
                if link.stopped.is_set():
                    return
                self.sent(message)
                link.server.sendall(message)
        if not link.stopped.is_set():
            link.cut()

    def _answer(self, link: Link) -> None:
        with suppress(OSError, EOFError):
            for message in messages(link.server):
                if message[:1] == b"K":
                    (link.pid,) = struct.unpack("!i", message[5:9])
                passed = self.answered(link, message)
                if link.stopped.is_set():
                    return
                link.client.sendall(passed)
        if not link.stopped.is_set():
            link.cut()


def read(one: socket.socket, size: int) -> bytes:
    """So many bytes."""
    found = b""
    while len(found) < size:
        more = one.recv(size - len(found))
        if not more:
            raise EOFError
        found += more
    return found


def messages(one: socket.socket) -> Iterator[bytes]:
    """Each message that comes."""
    while True:
        head = read(one, 5)
        yield head + read(one, struct.unpack("!i", head[1:])[0] - 4)


@contextmanager
def way_to(path: str, url: str) -> Iterator[Way]:
    """A way that ends with the block."""
    way = Way(path, url)
    try:
        yield way
    finally:
        way.close()

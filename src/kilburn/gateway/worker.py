"""A worker process: one of several that serve at one address; see `kilburn.gateway.workers`.

It accepts one connection at a time, and leaves the next one to the worker with the fewest, so that clients with persistent
connections use all processors. It ends in one of two ways. A retired worker accepts no new connection, and serves its open ones
until each is closed or idle for a while; another worker serves by then. A stopped worker accepts nothing new, ends the running
requests within their time, and closes.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import itertools
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import msgspec

from kilburn.errors import MissingExtra, Unavailable
from kilburn.gateway.exchange import Exchange, SessionTotals
from kilburn.gateway.metrics import COUNTED_FIELDS
from kilburn.gateway.threads import in_thread
from kilburn.gateway.workers import MAX_LINE_BYTES, Saying, read_saying, written

try:
    import uvicorn
except ModuleNotFoundError as error:
    raise MissingExtra("uvicorn", "serve") from error

LINGER = 2.0
"""Seconds that a retired worker keeps an idle connection. The next answer closes it earlier."""

FULL = 1.0
"""Seconds without new connections after the limit of open files is reached."""

YIELD, YIELDS = 0.002, 8
"""Seconds for which a new connection is left to a worker that has fewer, and how often, since that worker may be computing. After
that, any worker accepts it."""

PLACES = 8 + 4 * 128
"""Bytes that the workers share, enough for more workers than there may be."""

CLOSE = (b"connection", b"close")


def first_line(line: socket.socket) -> Saying:
    """Read the parent's first message: the worker's settings, and its place as `id`."""
    data = b""
    while not data.endswith(b"\n"):
        piece = line.recv(1 << 16)
        if not piece:
            raise Unavailable("the parent of the workers is gone", advice="start the gateway again")
        data += piece
    return read_saying(data)


class Neighbours:
    """What the workers see of each other, in memory that is one for all: how many connections each has, and when a request came
    last to any. The kernel gives most new connections to whoever asked for one last: with connections that stay, one worker would
    have nearly all of them, and the others nothing to do.

    Nothing is wrong where a number is old; connections are only shared out less evenly for a while.

    Args:
        folder: of the parent.
        place: of this worker; the one that is begun in its place has the same.

    Attributes:
        used: one number, when a request came last, by `time.monotonic`: what is done in the background waits for all workers.

    Raises:
        OSError: the disk is full, for example.
    """

    def __init__(self, folder: str, place: int) -> None:
        file = os.open(os.path.join(folder, "connections"), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            if os.fstat(file).st_size < PLACES:
                # Written, and not only made longer: on a full disk this raises, and a write to memory would kill the process.
                os.pwrite(file, bytes(PLACES), 0)
            shared = memoryview(mmap.mmap(file, PLACES))
            self.used, self._counts = shared[:8].cast("d"), shared[8:PLACES].cast("I")
        finally:
            os.close(file)
        self._place = place
        self.leave()

    def has(self, connections: int) -> bool:
        """Store this worker's number of connections; return whether another worker has fewer."""
        self._counts[self._place] = connections + 1
        return any(0 < count <= connections for count in self._counts)

    def leave(self) -> None:
        """Note that this worker accepts no connections."""
        self._counts[self._place] = 0


class Parent:
    """The connection to the parent process, and the state that all workers share: figures, signed-in people, and the worker that
    does a tenant's background work.

    Args:
        line: the socket connected to the parent.
        folder: the folder with the tenants' lock files and the numbers of connections.
        place: the number of this worker.
    """

    def __init__(self, line: socket.socket, folder: str, place: int) -> None:
        self._socket, self._folder = line, folder
        self.neighbours = Neighbours(folder, place)
        self.used = self.neighbours.used
        self._numbers = itertools.count(1)
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._led_tenants: dict[str, int] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._task: asyncio.Task[None] | None = None
        self.now: Callable[[], Any] = tuple
        """Returns the gateway's present figures."""

    async def connect(self, retire: Callable[[], object], stop: Callable[[], object]) -> None:
        """Begin to receive the parent's messages. If the parent ends, this worker stops."""
        reader, self._writer = await asyncio.open_connection(sock=self._socket, limit=MAX_LINE_BYTES)
        self._task = asyncio.create_task(self._hear(reader, retire, stop))

    async def _hear(self, reader: asyncio.StreamReader, retire: Callable[[], object], stop: Callable[[], object]) -> None:
        with suppress(OSError):
            while line := await reader.readline():
                await self._heard(read_saying(line), retire)
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_exception(Unavailable("the parent of the workers is gone", advice="start the gateway again"))
        if self._writer is not None:
            self._writer.close()
        stop()

    async def _heard(self, line: Saying, retire: Callable[[], object]) -> None:
        match line.kind:
            case "told":
                waiting = self._waiting.pop(line.id, None)
                if waiting is not None and not waiting.done():
                    waiting.set_result(msgspec.json.decode(line.body))
            case "now":
                self.tell("now", await in_thread(self._figures))
            case "retire":
                retire()

    def _figures(self) -> list[tuple[str, str, float]]:
        return [(name, tenant, float(figure)) for name, tenant, figure in self.now()]

    def tell(self, kind: str, body: Any = None, number: int = 0) -> None:
        """Send a message to the parent."""
        if self._writer is not None and not self._writer.is_closing():
            self._writer.write(written(kind, body, number))

    async def _ask(self, kind: str, *arguments: Any) -> Any:
        if self._writer is None or self._writer.is_closing():
            raise Unavailable("the parent of the workers is gone", advice="start the gateway again")
        number = next(self._numbers)
        self._waiting[number] = asyncio.get_running_loop().create_future()
        self.tell(kind, arguments, number)
        answer = await self._waiting[number]
        if "error" in answer:
            raise OSError(answer["error"])
        return answer["value"]

    # Figures

    def observe(self, exchange: Exchange) -> None:
        """Send an exchange to be counted."""
        key = exchange.key
        counted = {name: getattr(exchange, name) for name in COUNTED_FIELDS}
        self.tell("seen", {**counted, "key": None if key is None else {"tenant": key.tenant, "user": key.user}})

    async def page(self, tenant: str | None) -> bytes:
        """See `Metrics.page`; of all workers."""
        text: str = await self._ask("page", tenant)
        return text.encode()

    async def sessions(self, tenant: str | None, sees: Callable[[str], bool]) -> list[SessionTotals]:
        """See `Metrics.sessions`; of all workers."""
        rows = msgspec.convert(await self._ask("sessions", tenant), list[tuple[SessionTotals, str]])
        return [row for row, user in rows if sees(user)]

    # Signed-in people

    async def sign(self, verb: str, arguments: Sequence[Any]) -> Any:
        """See `kilburn.gateway.workers.Signing.answer`."""
        return await self._ask(verb, *arguments)

    # Background work

    def leads(self, tenant: str) -> bool:
        """Return whether this worker does a tenant's work in the background: the first one that asks, until it ends. Two workers
        would compute the same results twice."""
        if tenant not in self._led_tenants:
            name = hashlib.blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=12).hexdigest()
            file = os.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(file)
                return False
            self._led_tenants[tenant] = file
        return True

    def stop_leading(self) -> None:
        """Leave the background work of all tenants to other workers, as the end of the process does."""
        while self._led_tenants:
            os.close(self._led_tenants.popitem()[1])


class _Connections(set[Any]):
    """A server's connections; reports when one ends, so that the other workers learn the number."""

    def __init__(self, on_discard: Callable[[], object]) -> None:
        super().__init__()
        self._gone = on_discard

    def discard(self, connection: Any) -> None:
        super().discard(connection)
        self._gone()


class WorkerServer(uvicorn.Server):
    """uvicorn's server, which accepts connections from a shared socket."""

    def __init__(self, config: uvicorn.Config, listener: socket.socket, parent: Parent) -> None:
        super().__init__(config)
        self._listener, self._parent = listener, parent
        self._coming: dict[asyncio.Task[Any], asyncio.Protocol] = {}
        self._retiring: asyncio.Task[None] | None = None
        self._listens, self._yielded = False, 0
        self.server_state.connections = _Connections(self._lost)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Ignore signals to the whole process group: the parent handles them, and tells this worker to end."""
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to serve, and report it to the parent."""
        await self._parent.connect(self.retire, self.stop)
        await super().startup(sockets=[])
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, self.stop)
        self._listener.setblocking(False)
        self._listen()
        self._parent.tell("ready")

    def _listen(self) -> None:
        if self._listener.fileno() >= 0:
            self._listens = True
            self._parent.neighbours.has(self._connections)
            asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def _leave(self) -> None:
        self._parent.neighbours.leave()
        if self._listens:
            self._listens = False
            asyncio.get_running_loop().remove_reader(self._listener)

    def _lost(self) -> None:
        if self._listens:
            self._parent.neighbours.has(self._connections)

    @property
    def _connections(self) -> int:
        # A new connection is in both.
        return len({*self.server_state.connections, *self._coming.values()})

    def _accept(self) -> None:
        """Accept one connection, or leave it to a worker that has fewer. The event loop calls again if there are more."""
        loop = asyncio.get_running_loop()
        if self._parent.neighbours.has(self._connections) and self._yielded < YIELDS:
            # Its count stays, because this takes only a moment.
            self._yielded += 1
            loop.remove_reader(self._listener)
            loop.call_later(YIELD, self._listen)
            return
        self._yielded = 0
        try:
            connection, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            self._leave()
            loop.call_later(FULL, self._listen)
            uvicorn.server.logger.error("no connection can be taken: %s", os.strerror(error.errno or 0))
            return
        connection.setblocking(False)
        protocol = self._protocol()
        task = loop.create_task(loop.connect_accepted_socket(lambda: protocol, connection))
        self._coming[task] = protocol
        task.add_done_callback(self._coming.pop)
        self._parent.neighbours.has(self._connections)

    def _protocol(self) -> asyncio.Protocol:
        protocol: Callable[..., asyncio.Protocol] = self.config.http_protocol_class
        return protocol(config=self.config, server_state=self.server_state, app_state=self.lifespan.state)

    def retire(self) -> None:
        """Accept no more connections, finish those that are open, and end."""
        if self._retiring is None:
            self._close_after_answers()
            self._retiring = asyncio.get_running_loop().create_task(self._retired())

    async def _retired(self) -> None:
        loop = asyncio.get_running_loop()
        end = loop.time() + LINGER
        while (self._coming or self.server_state.connections) and loop.time() < end and not self.should_exit:
            await asyncio.sleep(0.05)
        self.should_exit = True

    def stop(self) -> None:
        """Accept no more connections, finish the running requests, and end."""
        self._close_after_answers()
        self.should_exit = True

    def _close_after_answers(self) -> None:
        """Accept no more connections, and mark each answer as the last of its connection."""
        self._leave()
        self._listener.close()
        if CLOSE not in self.config.encoded_headers:
            self.config.encoded_headers.append(CLOSE)
            self.server_state.default_headers = [*self.server_state.default_headers, CLOSE]
        for connection in self.server_state.connections:
            cycle: Any = getattr(connection, "cycle", None)
            if cycle is not None and not cycle.response_complete:
                cycle.keep_alive = False

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """End the running requests, within their time."""
        self._leave()
        if self._coming:
            await asyncio.wait(list(self._coming))
        await super().shutdown(sockets=[])
        self._parent.stop_leading()

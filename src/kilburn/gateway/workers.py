"""Worker processes that serve at one address, from the parent's side. The parent binds the address once, starts the workers,
replaces those that end, counts for all of them, keeps the signed-in people, and ends the workers.

A worker is a new program, not a fork: it shares no store, thread or lock with its parent. It inherits the listening socket and
one end of a pair of sockets, which carries lines of JSON: its exchanges, so that the figures of a killed worker are not lost, and
its questions. uvicorn's own supervisor pickles its settings, restarts failing workers without limit, and has no such channel.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Protocol

import msgspec

from kilburn.errors import MissingExtra
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.metrics import CURRENT, SUMMED, Metrics
from kilburn.prices import Prices
from kilburn.terminal import say

try:
    from prometheus_client import ProcessCollector
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise MissingExtra(error.name or "prometheus_client", "serve") from error

log = logging.getLogger("kilburn.gateway")

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line, in bytes."""

CLOSING = 15.0
"""Seconds that a worker has for closing its store after its last request."""

PATIENCE = 2.0
"""Seconds that a worker has for reporting its figures; after that the previous ones count."""

MINUTE, AT_ONCE, MAX_PAUSE = 60.0, 3, 30.0
"""Within `MINUTE` seconds, `AT_ONCE` workers are replaced immediately, and further ones after 1, 2, 4 ... up to `MAX_PAUSE`
seconds."""

INTERRUPTED = 130
"""The exit status after Ctrl-C."""

SIGNING = ("wait", "enter", "find", "leave")
"""A worker's questions about signed-in people."""


class Saying(msgspec.Struct, omit_defaults=True):
    """A message between a worker and its parent.

    Args:
        kind: "begin", "now" and "retire" go to a worker; "ready", "seen" and questions come from it; "told" answers a question.
        id: the id of a question and its answer; a worker's place with "begin".
        body: the message's data, by its kind.
    """

    kind: str
    id: int = 0
    body: msgspec.Raw = msgspec.Raw(b"null")


read_saying = msgspec.json.Decoder(Saying).decode
_read_exchange = msgspec.json.Decoder(Exchange).decode


def written(kind: str, body: Any = None, id: int = 0) -> bytes:
    """Encode a message as a line."""
    return msgspec.json.encode(Saying(kind, id, msgspec.Raw(msgspec.json.encode(body)))) + b"\n"


class Signing(Protocol):
    """The signed-in people of a dashboard: see `kilburn.dashboard.signing.SignIns`."""

    async def answer(self, verb: str, arguments: Sequence[Any]) -> Any:
        """Return the result of one of `SIGNING`, as JSON."""
        ...


class Pace:
    """Determines the pause before an ended worker is replaced.

    Args:
        clock: returns seconds that never decrease.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ended: deque[float] = deque()

    def pause(self) -> float:
        """Note that a worker ended; return the pause before the next one, in seconds."""
        moment = self._clock()
        while self._ended and moment - self._ended[0] >= MINUTE:
            self._ended.popleft()
        self._ended.append(moment)
        more = len(self._ended) - AT_ONCE - 1
        return 0.0 if more < 0 else min(MAX_PAUSE, 2.0**more)


class ServingProcess:
    """One of the worker processes.

    Args:
        place: its number, from 1; its replacement has the same.
    """

    def __init__(self, place: int, process: asyncio.subprocess.Process, writer: asyncio.StreamWriter) -> None:
        self.place, self.process, self.writer = place, process, writer
        loop = asyncio.get_running_loop()
        self.ready: asyncio.Future[bool] = loop.create_future()
        """True once the worker serves, False if it ended before."""
        self.ended: asyncio.Future[int] = loop.create_future()
        self.figures: list[tuple[str, str, float]] = []
        """Its last reported present figures."""
        self.asked: asyncio.Future[None] | None = None

    def tell(self, kind: str, body: Any = None, id: int = 0) -> None:
        """Send it a message, unless it has ended."""
        if not self.writer.is_closing():
            self.writer.write(written(kind, body, id))

    def signal(self, number: int) -> None:
        """Send it a signal."""
        with suppress(ProcessLookupError):
            self.process.send_signal(number)


class Workers:
    """The parent process. Its `run` needs an event loop of its own, in the main thread.

    Args:
        listener: the socket on which all workers listen.
        count: number of workers.
        command: the command that starts a worker, without the numbers of its two sockets.
        begin: data of the first message to a worker.
        drain: seconds for finishing requests at the end.
        prices: prices, for the money saved.
        signing: the signed-in people; None for none.
        notify: called once when all workers serve.
    """

    def __init__(
        self,
        listener: socket.socket,
        *,
        count: int,
        command: Sequence[str],
        begin: Any,
        drain: float,
        prices: Prices,
        signing: Signing | None = None,
        notify: Callable[[], None] = lambda: None,
    ) -> None:
        self._listener, self._count, self._command, self._begin = listener, count, command, begin
        self._drain, self._signing, self._told = drain, signing, notify
        self._figures: list[tuple[str, str, float]] = []
        self._own = _Processes(self._alive)
        self._metrics = Metrics(prices, lambda: self._figures, collectors=[self._own])
        self._pace = Pace()
        self._places: dict[int, ServingProcess] = {}
        self._all: set[ServingProcess] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._rolling: asyncio.Task[None] | None = None
        self._again = self._force = False
        self._status = 0
        self._ending = asyncio.Event()
        self._asking = asyncio.Lock()

    def _alive(self) -> list[int]:
        return [worker.process.pid for worker in self._all]

    async def run(self) -> int:
        """Serve until a signal; return the exit status: 0 after a request to end, 130 after Ctrl-C, 1 if no worker can serve or
        one had to be killed."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._end, number)
        loop.add_signal_handler(signal.SIGHUP, self._restart)
        try:
            workers = [await self._started(place) for place in range(1, self._count + 1)]
            self._places = {worker.place: worker for worker in workers}
            serve = await self._unless_ending(asyncio.gather(*(worker.ready for worker in workers)))
            if serve is not None and not all(serve):
                say("a worker ended before it served; see its output above")
                self._status = 1
            elif serve is not None:
                self._told()
                await self._ending.wait()
        finally:
            await self._close()
        return self._status

    async def _unless_ending(self, waited: asyncio.Future[Any]) -> Any:
        """Return the result of a future; None if the workers are to end first."""
        ending = asyncio.ensure_future(self._ending.wait())
        await asyncio.wait([waited, ending], return_when=asyncio.FIRST_COMPLETED)
        ending.cancel()
        return waited.result() if waited.done() else None

    # Signals

    def _end(self, number: int) -> None:
        self._force = self._force or (self._ending.is_set() and number == signal.SIGINT)
        if not self._ending.is_set() and number == signal.SIGINT:
            self._status = INTERRUPTED
        self._ending.set()
        if self._force:
            for worker in self._all:
                worker.signal(signal.SIGKILL)

    def _restart(self) -> None:
        """Replace all workers, one after the other. A further request meanwhile repeats it."""
        if self._ending.is_set() or not self._places:
            return
        if self._rolling is not None and not self._rolling.done():
            self._again = True
            return
        self._rolling = self._do(self._roll())

    async def _roll(self) -> None:
        say(f"restarting {self._count} workers, one after the other")
        for place in range(1, self._count + 1):
            old = self._places[place]
            try:
                new = await self._started(place)
            except OSError as error:
                say(f"worker {place} cannot be started: {error}; the old workers continue to serve")
                return
            if not await new.ready:
                say(f"worker {place}: the new one ended before it served; the old workers continue to serve")
                return
            self._places[place] = new
            old.tell("retire")
            await self._over(old)
        say(f"all {self._count} workers are new")
        if self._again:
            self._again = False
            await self._roll()

    async def _over(self, worker: ServingProcess) -> None:
        """Wait until a worker has ended, and kill it after some time."""
        await asyncio.wait([worker.ended], timeout=self._drain + CLOSING)
        if not worker.ended.done():
            say(f"worker {worker.place} does not end; it is killed")
            self._status = self._status or (1 if self._ending.is_set() else 0)
            worker.signal(signal.SIGKILL)
            await asyncio.wait([worker.ended])

    def _do(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    # Starting and ending workers

    async def _started(self, place: int) -> ServingProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            numbers = self._listener.fileno(), theirs.fileno()
            process = await asyncio.create_subprocess_exec(*self._command, *map(str, numbers), pass_fds=numbers)
        reader, writer = await asyncio.open_connection(sock=ours, limit=MAX_LINE_BYTES)
        worker = ServingProcess(place, process, writer)
        self._all.add(worker)
        if self._ending.is_set():
            worker.signal(signal.SIGTERM)  # the other workers got the signal before this one existed
        worker.tell("begin", self._begin, place)
        self._do(self._hear(worker, reader))
        return worker

    async def _hear(self, worker: ServingProcess, reader: asyncio.StreamReader) -> None:
        """Process a worker's messages until it ends."""
        with suppress(OSError):
            while line := await reader.readline():
                try:
                    self._heard(worker, read_saying(line))
                except msgspec.DecodeError as error:
                    log.error("worker %d sent an invalid message: %s", worker.place, error)
        status = await worker.process.wait()
        worker.writer.close()
        self._all.discard(worker)
        if not worker.ready.done():
            worker.ready.set_result(False)
        if worker.asked is not None and not worker.asked.done():
            worker.asked.set_result(None)
        worker.ended.set_result(status)
        if worker.ready.result() and self._places.get(worker.place) is worker and not self._ending.is_set():
            await self._replace(worker, status)

    async def _replace(self, worker: ServingProcess, status: int) -> None:
        """Replace a worker that ended, until a new one serves."""
        self._own.ended += 1
        while self._places[worker.place] is worker:
            pause = self._pace.pause()
            how = f"by {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
            when = f"in {pause:.0f} s" if pause else "now"
            say(f"worker {worker.place} (process {worker.process.pid}) ended {how}; another one is started {when}")
            await asyncio.sleep(pause)
            if self._ending.is_set() or self._places[worker.place] is not worker:
                return
            try:
                new = await self._started(worker.place)
            except OSError as error:
                say(f"worker {worker.place} cannot be started: {error}")
                continue
            if not await new.ready:
                status = await new.ended
            elif self._places[worker.place] is worker:
                self._places[worker.place] = new
            else:
                new.tell("retire")  # a restart was faster

    async def _close(self) -> None:
        """End all workers: they accept no connections, and have some time to finish their answers."""
        self._ending.set()
        self._listener.close()
        for worker in self._all:
            worker.signal(signal.SIGTERM)
        while running := list(self._all):
            await asyncio.gather(*map(self._over, running))
            await asyncio.sleep(0)
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # Messages from workers

    def _heard(self, worker: ServingProcess, line: Saying) -> None:
        match line.kind:
            case "seen":
                self._metrics.observe(_read_exchange(line.body))
            case "ready":
                worker.ready.set_result(True)
            case "now":
                worker.figures = msgspec.json.decode(line.body, type=list[tuple[str, str, float]])
                if worker.asked is not None and not worker.asked.done():
                    worker.asked.set_result(None)
            case _:
                self._do(self._answer(worker, line))

    async def _answer(self, worker: ServingProcess, line: Saying) -> None:
        arguments = msgspec.json.decode(line.body)
        try:
            if line.kind in SIGNING and self._signing is not None:
                answer: Any = {"value": await self._signing.answer(line.kind, arguments)}
            else:
                await self._gather()
                page, rows = self._metrics.page, self._metrics.rows
                answer = {"value": page(*arguments).decode() if line.kind == "page" else rows(*arguments)}
        except Exception as error:  # noqa: BLE001 -- whoever asked must not wait for ever
            answer = {"error": str(error)}
        worker.tell("told", answer, line.id)

    async def _gather(self) -> None:
        """Ask every worker for its figures. Exchanges that it has answered before are counted by then."""
        async with self._asking:
            workers = [worker for worker in self._all if worker.ready.done() and not worker.ended.done()]
            for worker in workers:
                worker.asked = asyncio.get_running_loop().create_future()
                worker.tell("now")
            if workers:
                await asyncio.wait([worker.asked for worker in workers if worker.asked is not None], timeout=PATIENCE)
            self._figures = list(together(worker.figures for worker in self._all))


def together(figures: Any) -> Iterator[tuple[str, str, float]]:
    """Combine the present figures of several workers: sums of their own figures, and the maximum of shared ones."""
    totals: dict[tuple[str, str], float] = {}
    for name, tenant, figure in (entry for batch in figures for entry in batch if entry[0] in CURRENT):
        previous = totals.get((name, tenant), 0.0)
        totals[name, tenant] = previous + figure if name in SUMMED else max(previous, figure)
    yield from ((name, tenant, figure) for (name, tenant), figure in totals.items())


class _Processes(Collector):
    """Figures of all processes together. The processor time of ended ones stays in the sum."""

    def __init__(self, alive: Callable[[], list[int]]) -> None:
        self._alive = alive
        self.ended = 0

    def collect(self) -> Iterator[Metric]:
        alive = self._alive()
        families = {family.name: family for family in _process(os.getpid())}
        dead = resource.getrusage(resource.RUSAGE_CHILDREN)
        for family in (family for pid in alive for family in _process(pid)):
            if family.name in SHARED and family.name in families:
                families[family.name].samples[0] = (
                    families[family.name]
                    .samples[0]
                    ._replace(value=families[family.name].samples[0].value + family.samples[0].value)
                )
        if "process_cpu_seconds" in families:
            [sample] = families["process_cpu_seconds"].samples
            families["process_cpu_seconds"].samples = [sample._replace(value=sample.value + dead.ru_utime + dead.ru_stime)]
        yield from families.values()
        yield GaugeMetricFamily("kilburn_workers", "Worker processes that run.", value=len(alive))
        yield CounterMetricFamily("kilburn_workers_ended", "Workers that ended without being told to.", value=self.ended)


SHARED = ("process_virtual_memory_bytes", "process_resident_memory_bytes", "process_cpu_seconds", "process_open_fds")
"""Figures that are summed; the other process figures are the parent's."""


def _process(pid: int) -> Sequence[Metric]:
    with suppress(OSError, ValueError, IndexError):
        return list(ProcessCollector(pid=lambda: pid, registry=None).collect())
    return []


def worker_command(module: str, function: str) -> list[str]:
    """Return the command that starts a worker with this Python. Nothing is imported from the working directory."""
    run = f"import sys; from {module} import {function}; sys.exit({function}(*map(int, sys.argv[1:])))"
    return [sys.executable, "-P", "-c", run]

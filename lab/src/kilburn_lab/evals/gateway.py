"""What a gateway costs between a client and its model: time to the first byte, requests a second, memory, and order.

Every system is a proxy in an operating-system process of its own, between the same stub and the same client. Beside Kilburn's
gateway, in the same run and in turn with it: no proxy at all, a proxy in the same framework that only passes on, and other
systems where a Python that has them is named. Clients resend everything, as agents do.

    report = evaluate()
    print(report.table())
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

import msgspec

import kilburn
from kilburn.errors import MissingExtra, SpecError, Unavailable
from kilburn_lab.evals.gateway_load import ClientConnection, ClientConversation
from kilburn_lab.evals.gateway_report import Beginning, GatewayReport, GatewayRow, Latency
from kilburn_lab.evals.intervals import percentile_95
from kilburn_lab.evals.measure import Progress, check_known, unwatched

_WORDS = "the river carries sand and the sand carries gold " * 4

DIRECT, FLOOR, OWN = "no proxy", "pass-through", "kilburn"
PEERS = ("litellm", "headroom")

SHORT, LONG = 20, 1000
"""Messages of the histories that are resent."""

WORDS = {SHORT: 40, LONG: 155}
"""Words of each message; 1,000 of 155 words are 200,000 tokens of four characters."""

TURNS = 5
"""Requests of one conversation of 20 messages before the next one begins, so that they are about 20."""

EVENTS = 8
"""Pieces of text in a streamed answer."""

AT_ONCE = 16
"""Requests under way while requests are counted."""

LAST = 39
"""Messages at which a conversation ends there; it begins with one, so that they are 20 in the middle."""

SESSIONS = (10, 1000, 10_000)
"""Sessions in a store when a new conversation begins."""

BEGUN = 40
"""New conversations that are measured then."""

FILLED = 300
"""New conversations before that: as many as a gateway keeps in memory, and more."""

PATIENT, LONGEST = 1.5, 60.0
"""Seconds without work after which a system has done what can wait, since Kilburn leaves the processor for one to requests that
may come; and the most that this is waited for."""

STEP, BUSY = 0.1, 0.05
"""Seconds between two looks, and the share of a processor that is work."""

SAMPLES = 20
"""Times that memory is read."""

PIECES, PAUSE = 40, 10
"""Events of each of the streams that run at once, and the milliseconds between them."""

PATIENCE = 120.0
"""Maximum seconds for a server to start, and to stop."""


class System(NamedTuple):
    """How a system is started: its command line and what its environment has besides."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = {}


def evaluate(
    *,
    rounds: int = 20,
    requests: int = 300,
    streams: int = 50,
    window: int = 32_000,
    sessions: int = 1000,
    peers: Mapping[str, str] | None = None,
    progress: Progress = unwatched,
) -> GatewayReport:
    """Measure each system.

    Args:
        rounds: requests of each system whose first byte is waited for, at 20 messages; a third as many at 1,000.
        requests: of each system, 16 at once, at 20 messages; memory is read meanwhile.
        streams: that run at once.
        window: tokens of Kilburn's window.
        sessions: in the largest store in which new conversations begin.
        peers: of the systems in `PEERS`, which Python has them.
        progress: called with the requests that are done, and their total.

    Raises:
        SpecError: a number below 1, or no such system. MissingExtra: no starlette, aiohttp or uvicorn. Unavailable: a system
            did not start or answer.
    """
    if min(rounds, requests, streams, window, sessions) < 1:
        given = f"rounds={rounds}, requests={requests}, streams={streams}, window={window}, sessions={sessions}"
        raise SpecError(given, advice="give 1 or more")
    named = dict(peers or {})
    check_known("system", named, PEERS)
    for module in ("starlette", "aiohttp", "uvicorn"):
        if find_spec(module) is None:
            raise MissingExtra(module, "serve")
    stores = sorted({min(each, sessions) for each in SESSIONS})
    steps = (3 + len(named)) * (2 * (rounds + -(-rounds // 3)) + requests + streams) + len(stores) * (FILLED + BEGUN)
    done = count(1)
    progress(0, steps)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kilburn-gateway-")))
        port = stack.enter_context(stub_of("kilburn_lab.evals.gateway_load"))
        running = [_Running(DIRECT, port, None)]
        for system in (_floor(port), _own(port, folder, window), *(_peer(name, at, port, folder) for name, at in named.items())):
            running.append(stack.enter_context(_started(system, folder)))

        def step() -> None:
            progress(next(done), steps)

        report = asyncio.run(_measured(running, rounds, requests, streams, window, step))
        beginnings = _beginnings(port, folder, window, stores, step)
        return msgspec.structs.replace(report, beginnings=beginnings)


class _Running:
    """A system that runs at a port; `process` is None for the stub itself."""

    def __init__(self, name: str, port: int, process: int | None) -> None:
        self.name, self.port, self.process = name, port, process

    def spent(self) -> float | None:
        """Seconds of processor time so far, of all its threads."""
        if self.process is None:
            return None
        # The clock of a process has the number that clock_getcpuclockid(3) gives.
        return sum(time.clock_gettime(~one << 3 | 2) for one in family(self.process))

    async def quiet(self) -> float | None:
        """The same, once it has done what can wait until nobody asks."""
        before, since, begun = self.spent(), time.monotonic(), time.monotonic()
        while before is not None and time.monotonic() - since < PATIENT and time.monotonic() - begun < LONGEST:
            await asyncio.sleep(STEP)
            now = self.spent() or 0.0
            if now - before > BUSY * STEP:
                since = time.monotonic()
            before = now
        return before

    def memory(self) -> float | None:
        """Bytes of memory."""
        if self.process is None:
            return None
        pages = (int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in family(self.process))
        return float(sum(pages) * os.sysconf("SC_PAGE_SIZE"))


def family(process: int) -> list[int]:
    """A process and its descendants."""
    found = [process]
    for one in found:
        for task in Path(f"/proc/{one}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def _floor(stub: int) -> System:
    return System(FLOOR, [sys.executable, "-m", "kilburn_lab.evals.pass_through", "{port}", f"http://127.0.0.1:{stub}"])


def _own(stub: int, folder: Path, window: int) -> System:
    options = ["--upstream", f"http://127.0.0.1:{stub}/v1", "--db", str(folder / "gateway.db"), "--window", str(window)]
    return System(OWN, [sys.executable, "-m", "kilburn", "serve", "--port", "{port}", *options])


def _peer(name: str, python: str, stub: int, folder: Path) -> System:
    beside = Path(python).parent
    if not Path(python).is_file():
        raise SpecError(f"no Python at {python}", advice=f"--peer {name}=/path/to/python")
    quiet = {"HOME": str(folder), "DO_NOT_TRACK": "1"}
    if name == "litellm":
        settings = folder / "litellm.yaml"
        settings.write_text(
            "model_list:\n  - model_name: scripted\n    litellm_params:\n      model: openai/scripted\n"
            f'      api_base: "http://127.0.0.1:{stub}/v1"\n      api_key: none\n',
            encoding="utf-8",
        )
        quiet |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_DANGEROUSLY_PERMIT_WEAK_OR_UNSET_MASTER_KEY": "true"}
        quiet["LITELLM_LOG"] = "ERROR"
        return System(name, [str(beside / "litellm"), "--config", str(settings), "--port", "{port}"], quiet)
    quiet |= {"OPENAI_TARGET_API_URL": f"http://127.0.0.1:{stub}", "HEADROOM_TELEMETRY": "off"}
    return System(name, [str(beside / "headroom"), "proxy", "--port", "{port}", "--no-rate-limit"], quiet)


@contextmanager
def stub_of(module: str) -> Iterator[int]:
    """The port of a stub, in a process of its own.

    Args:
        module: which, run, says its port and serves.

    Raises:
        Unavailable: it did not start.
    """
    command = [sys.executable, "-m", module]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                raise Unavailable("the stub did not start", advice=f"run {' '.join(command)} to see why")
            yield int(said)
        finally:
            process.kill()


class ServerProcess:
    """A server in its own process. It uses the same port after a restart.

    Args:
        name: the name of the server and of its log file in the folder.
        command: the command line, with {port} in place of the port. environment: additional environment variables.
    """

    def __init__(self, name: str, command: Sequence[str], folder: Path, environment: Mapping[str, str] | None = None) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port: int = free.getsockname()[1]
        self.name, self.url, self.log = name, f"http://127.0.0.1:{self.port}", folder / f"{name}.log"
        self._command = [part.format(port=self.port) for part in command]
        self._environment = {**os.environ, **(environment or {})}
        self.process: subprocess.Popen[bytes] | None = None

    def begin(self) -> None:
        """Start it."""
        with self.log.open("ab") as log:
            command, null = self._command, subprocess.DEVNULL
            self.process = subprocess.Popen(command, stdin=null, stdout=log, stderr=log, env=self._environment)

    async def ready(self, answers: Callable[[int], Awaitable[bool]], *, again: bool = False) -> None:
        """Wait until the server answers.

        Args:
            answers: whether the server answers at its port.
            again: whether to restart the server if it ends, like a supervisor, for example because its database is not available
                yet.

        Raises:
            Unavailable: the server ended, or did not answer in time.
        """
        end = time.monotonic() + PATIENCE
        while not await answers(self.port):
            ended = self.process is None or self.process.poll() is not None
            if time.monotonic() > end or (ended and not again):
                last = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise Unavailable(f"{self.name} did not start: {last[0][:300]}", advice="run it by hand to see why")
            await asyncio.sleep(0.1)
            if ended:
                self.begin()

    def end(self, how: int = signal.SIGTERM) -> None:
        """Send the server a signal, and wait until it has ended."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(how)
            try:
                self.process.wait(timeout=PATIENCE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def _started(system: System, folder: Path) -> Iterator[_Running]:
    server = ServerProcess(system.name, system.command, folder, system.environment)
    server.begin()
    assert server.process is not None
    try:
        asyncio.run(server.ready(_answers))
        yield _Running(system.name, server.port, server.process.pid)
    finally:
        server.end()


async def _answers(port: int) -> bool:
    connection, talk = ClientConnection(port), ClientConversation(0, 3)
    try:
        async with asyncio.timeout(10):
            return talk.hear(await connection.ask(talk.next(0, 1, stream=False)))
    except (OSError, Unavailable, TimeoutError):
        return False
    finally:
        await connection.close()


async def _measured(
    running: Sequence[_Running], rounds: int, requests: int, streams: int, window: int, step: Callable[[], None]
) -> GatewayReport:
    found = [
        await _latencies(running, messages, count, step, streamed=streamed)
        for streamed in (True, False)
        for messages, count in ((SHORT, rounds), (LONG, -(-rounds // 3)))
    ]
    search = await _search(running[2].port)
    rows = []
    for system in running:
        began, spent = time.perf_counter(), system.spent()
        memory, failed = await _load(system, requests, step)
        seconds, after = time.perf_counter() - began, system.spent()
        wrong = await _streams(system, streams, step)
        rows.append(
            GatewayRow(
                system=system.name,
                latencies=[each[system.name] for each in found],
                rate=requests / seconds,
                cpu=None if spent is None or after is None else 1000 * (after - spent) / requests,
                failed=failed,
                memory=memory,
                wrong=wrong,
            )
        )
    cores = len(os.sched_getaffinity(0))
    return GatewayReport(rounds=rounds, requests=requests, streams=streams, window=window, cores=cores, search=search, rows=rows)


async def _search(port: int) -> str:
    """What Kilburn says of how it finds."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
    answer = await reader.read()
    writer.close()
    return str(msgspec.json.decode(answer.partition(b"\r\n\r\n")[2]).get("search", ""))


async def _latencies(
    running: Sequence[_Running], messages: int, rounds: int, step: Callable[[], None], *, streamed: bool
) -> dict[str, Latency]:
    """Times to the first byte of an answer to the next message of a known conversation, the systems in turn."""
    waits: dict[str, list[float]] = {system.name: [] for system in running}
    firsts: dict[str, list[float]] = {system.name: [] for system in running}
    cpu: dict[str, list[float]] = {system.name: [] for system in running}
    begun = await _quiet(running)
    during = dict.fromkeys(waits, 0.0)
    connections = {system.name: ClientConnection(system.port) for system in running}
    turns = TURNS if messages == SHORT else rounds
    letters = said = 0
    for start in range(0, rounds, turns):
        talks = {}
        for system in running:
            before = turns if turns < messages else 2
            talk = talks[system.name] = ClientConversation(start, WORDS[messages], messages - before, streamed=streamed)
            spent = system.spent()
            firsts[system.name].append(await _asked(connections[system.name], talk, start, system.name))
            during[system.name] += 0.0 if spent is None else (system.spent() or 0.0) - spent
        for turn in range(start, min(start + turns, rounds)):
            shifted = turn % len(running)
            for system in [*running[shifted:], *running[:shifted]]:
                spent = system.spent()
                waits[system.name].append(await _asked(connections[system.name], talks[system.name], turn, system.name))
                if spent is not None:
                    cpu[system.name].append((system.spent() or 0.0) - spent)
                step()
        letters = max(letters, max(talk.letters for talk in talks.values()))
        said += len(talks[FLOOR])
    for connection in connections.values():
        await connection.close()
    ended = await _quiet(running)
    direct, floor = median(waits[DIRECT]), 1000 * median(cpu[FLOOR])
    found = {}
    for system in running:
        name = system.name
        middle, late = median(waits[name]), percentile_95(waits[name])
        took = 1000 * median(cpu[name]) if cpu[name] else None
        one, other = begun[name], ended[name]
        behind = None if one is None or other is None else 1000 * (other - one - during[name] - sum(cpu[name])) / said
        found[name] = Latency(
            streamed=streamed,
            messages=messages,
            tokens=letters // 4,
            first=1000 * median(firsts[name]),
            p50=1000 * middle,
            p95=1000 * late,
            added_p50=1000 * (middle - direct),
            added_p95=1000 * (late - percentile_95(waits[DIRECT])),
            ratio=middle / median(waits[FLOOR]),
            cpu=took,
            behind=behind,
            cpu_ratio=None if took is None else took / floor,
        )
    return found


async def _quiet(running: Sequence[_Running]) -> dict[str, float | None]:
    """Seconds of processor time of each, once it has done what waits."""
    return dict(zip((each.name for each in running), await asyncio.gather(*(each.quiet() for each in running)), strict=True))


def _beginnings(stub: int, folder: Path, window: int, stores: Sequence[int], step: Callable[[], None]) -> tuple[Beginning, ...]:
    """What a new conversation costs in stores of so many sessions."""
    found: list[tuple[int, float, float]] = []
    filled = 0
    below = folder / "many"
    below.mkdir()
    for sessions in stores:
        with kilburn.open(str(below / "gateway.db"), window=window, embedder=None, durable=False) as store:
            for number in range(filled, sessions):
                store.session(f"chat-{number:016x}").append({"role": "user", "content": f"Question {number}: {_WORDS}"})
                if number % 100 == 99:
                    store.release(f"chat-{number:016x}")
        filled = sessions
        with _started(_own(stub, below, window), folder) as system:
            first, cpu = asyncio.run(_begun(system, sessions, step))
        found.append((sessions, 1000 * first, 1000 * cpu))
    return tuple(Beginning(sessions=each, first=first, cpu=cpu, ratio=cpu / found[0][2]) for each, first, cpu in found)


async def _begun(system: _Running, sessions: int, step: Callable[[], None]) -> tuple[float, float]:
    """The middle time to the first byte, and of the processor, of new conversations."""
    connection, waits, cpu = ClientConnection(system.port), list[float](), list[float]()
    for number in range(FILLED + BEGUN):
        talk = ClientConversation(sessions * 10_000 + number, WORDS[SHORT])
        spent = system.spent() or 0.0
        waits.append(await _asked(connection, talk, number, system.name))
        cpu.append((system.spent() or 0.0) - spent)
        step()
    await connection.close()
    return median(waits[FILLED:]), median(cpu[FILLED:])


async def _asked(connection: ClientConnection, talk: ClientConversation, number: int, name: str) -> float:
    heard = await connection.ask(talk.next(number, EVENTS, stream=talk.streamed))
    if not talk.hear(heard):
        raise Unavailable(f"{name} answered {heard.status}: {heard.text[:200]!r}", advice="run it by hand to see why")
    return heard.first


async def _load(system: _Running, requests: int, step: Callable[[], None]) -> tuple[list[tuple[int, float]], int]:
    """Memory after so many requests, and the requests that were not answered as they should be."""
    left, done, failed = count(), 0, 0
    memory: list[tuple[int, float]] = []
    every = max(1, requests // SAMPLES)

    async def client(seed: int) -> None:
        nonlocal done, failed
        connection, talk = ClientConnection(system.port), ClientConversation(seed, WORDS[SHORT])
        seeds = count(seed, AT_ONCE)
        while (number := next(left)) < requests:
            if len(talk) >= LAST or not len(talk):
                talk = ClientConversation(1000 + next(seeds), WORDS[SHORT])
            try:
                failed += not talk.hear(await connection.ask(talk.next(number, EVENTS, stream=False)))
            except Unavailable:
                failed += 1
                await connection.close()
                talk = ClientConversation(1000 + next(seeds), WORDS[SHORT])
            done += 1
            step()
            if done % every == 0 and (bytes_ := system.memory()) is not None:
                memory.append((done, bytes_))
        await connection.close()

    await asyncio.gather(*(client(seed) for seed in range(AT_ONCE)))
    return memory, failed


async def _streams(system: _Running, streams: int, step: Callable[[], None]) -> int:
    """How many of these streams, run at once, lost or reordered an event, or did not end."""

    async def one(number: int) -> bool:
        connection, talk = ClientConnection(system.port), ClientConversation(1_000_000 + number, WORDS[SHORT])
        try:
            return talk.hear(await connection.ask(talk.next(number, PIECES, PAUSE)))
        except (OSError, Unavailable):
            return False
        finally:
            await connection.close()
            step()

    return streams - sum(await asyncio.gather(*map(one, range(streams))))

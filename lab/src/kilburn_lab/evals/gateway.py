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
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from statistics import median
from typing import NamedTuple

from kilburn.errors import MissingExtra, SpecError, Unavailable
from kilburn_lab.evals.gateway_load import ClientConnection, ClientConversation
from kilburn_lab.evals.gateway_report import GatewayReport, GatewayRow, Latency
from kilburn_lab.evals.intervals import percentile_95
from kilburn_lab.evals.measure import Progress, check_known, unwatched

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

SAMPLES = 20
"""Times that memory is read."""

PIECES, PAUSE = 40, 10
"""Events of each of the streams that run at once, and the milliseconds between them."""

PATIENCE = 90.0
"""Seconds that a system may take to start."""


class System(NamedTuple):
    """How a system is started: its command line and what its environment has besides."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str] = {}


def evaluate(
    *,
    rounds: int = 100,
    requests: int = 10_000,
    streams: int = 200,
    window: int = 32_000,
    peers: Mapping[str, str] | None = None,
    progress: Progress = unwatched,
) -> GatewayReport:
    """Measure each system.

    Args:
        rounds: requests of each system whose first byte is waited for, at 20 messages; a third as many at 1,000.
        requests: of each system, 16 at once, at 20 messages; memory is read meanwhile.
        streams: that run at once.
        window: tokens of Kilburn's window.
        peers: of the systems in `PEERS`, which Python has them.
        progress: called with the requests that are done, and their total.

    Raises:
        SpecError: a number below 1, or no such system. MissingExtra: no starlette, aiohttp or uvicorn. Unavailable: a system
            did not start or answer.
    """
    if min(rounds, requests, streams, window) < 1:
        raise SpecError(f"rounds={rounds}, requests={requests}, streams={streams}, window={window}", advice="give 1 or more")
    named = dict(peers or {})
    check_known("system", named, PEERS)
    for module in ("starlette", "aiohttp", "uvicorn"):
        if find_spec(module) is None:
            raise MissingExtra(module, "serve")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kilburn-gateway-")))
        port = stack.enter_context(_stub())
        running = [_Running(DIRECT, port, None)]
        for system in (_floor(port), _own(port, folder, window), *(_peer(name, at, port, folder) for name, at in named.items())):
            running.append(stack.enter_context(_started(system, folder)))
        steps = len(running) * (rounds + -(-rounds // 3) + requests + streams)
        done = count(1)

        def step() -> None:
            progress(next(done), steps)

        return asyncio.run(_measured(running, rounds, requests, streams, window, step))


class _Running:
    """A system that runs at a port; `process` is None for the stub itself."""

    def __init__(self, name: str, port: int, process: int | None) -> None:
        self.name, self.port, self.process = name, port, process

    def spent(self) -> float | None:
        """Seconds of processor time so far."""
        if self.process is None:
            return None
        tick = os.sysconf("SC_CLK_TCK")
        fields = [Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split() for one in _family(self.process)]
        return sum(int(each[11]) + int(each[12]) for each in fields) / tick

    def memory(self) -> float | None:
        """Bytes of memory."""
        if self.process is None:
            return None
        pages = (int(Path(f"/proc/{one}/statm").read_text().split()[1]) for one in _family(self.process))
        return float(sum(pages) * os.sysconf("SC_PAGE_SIZE"))


def _family(process: int) -> list[int]:
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
def _stub() -> Iterator[int]:
    """The stub's port, in a process of its own."""
    command = [sys.executable, "-m", "kilburn_lab.evals.gateway_load"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            said = process.stdout.readline()
            if not said:
                raise Unavailable("the stub did not start", advice=f"run {' '.join(command)} to see why")
            yield int(said)
        finally:
            process.kill()


@contextmanager
def _started(system: System, folder: Path) -> Iterator[_Running]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = folder / f"{system.name}.log"
    with log.open("wb") as said:
        process = subprocess.Popen(
            [part.format(port=port) for part in system.command],
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            env={**os.environ, **system.environment},
        )
    try:
        end = time.monotonic() + PATIENCE
        while not asyncio.run(_answers(port)):
            if process.poll() is not None or time.monotonic() > end:
                last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
                raise Unavailable(f"{system.name} did not start: {last[0][:300]}", advice="run it by hand to see why")
            time.sleep(0.1)
        yield _Running(system.name, port, process.pid)
    finally:
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


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
    short = await _latencies(running, SHORT, rounds, step)
    long = await _latencies(running, LONG, -(-rounds // 3), step)
    rows = []
    for system in running:
        began, spent = time.perf_counter(), system.spent()
        memory, failed = await _load(system, requests, step)
        seconds, after = time.perf_counter() - began, system.spent()
        wrong = await _streams(system, streams, step)
        rows.append(
            GatewayRow(
                system=system.name,
                latencies=[short[system.name], long[system.name]],
                rate=requests / seconds,
                cpu=None if spent is None or after is None else 1000 * (after - spent) / requests,
                failed=failed,
                memory=memory,
                wrong=wrong,
            )
        )
    cores = len(os.sched_getaffinity(0))
    return GatewayReport(rounds=rounds, requests=requests, streams=streams, window=window, cores=cores, rows=rows)


async def _latencies(running: Sequence[_Running], messages: int, rounds: int, step: Callable[[], None]) -> dict[str, Latency]:
    """Times to the first byte of a streamed answer to the next message of a known conversation, the systems in turn."""
    waits: dict[str, list[float]] = {system.name: [] for system in running}
    firsts: dict[str, list[float]] = {system.name: [] for system in running}
    cpu = dict.fromkeys(waits, 0.0)
    connections = {system.name: ClientConnection(system.port) for system in running}
    turns = TURNS if messages == SHORT else rounds
    letters = 0
    for start in range(0, rounds, turns):
        talks = {}
        for system in running:
            talk = talks[system.name] = ClientConversation(start, WORDS[messages], messages - (turns if turns < messages else 2))
            firsts[system.name].append(await _asked(connections[system.name], talk, start, system.name))
        for turn in range(start, min(start + turns, rounds)):
            shifted = turn % len(running)
            for system in [*running[shifted:], *running[:shifted]]:
                spent = system.spent()
                waits[system.name].append(await _asked(connections[system.name], talks[system.name], turn, system.name))
                if spent is not None:
                    cpu[system.name] += (system.spent() or 0.0) - spent
                step()
        letters = max(letters, max(talk.letters for talk in talks.values()))
    for connection in connections.values():
        await connection.close()
    direct = median(waits[DIRECT])
    found = {}
    for system in running:
        middle, late = median(waits[system.name]), percentile_95(waits[system.name])
        found[system.name] = Latency(
            messages=messages,
            tokens=letters // 4,
            first=1000 * median(firsts[system.name]),
            p50=1000 * middle,
            p95=1000 * late,
            added_p50=1000 * (middle - direct),
            added_p95=1000 * (late - percentile_95(waits[DIRECT])),
            ratio=middle / median(waits[FLOOR]),
            cpu=None if system.process is None else 1000 * cpu[system.name] / rounds,
        )
    return found


async def _asked(connection: ClientConnection, talk: ClientConversation, number: int, name: str) -> float:
    heard = await connection.ask(talk.next(number, EVENTS))
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

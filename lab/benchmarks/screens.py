"""What the dashboard takes: its first screen over many sessions, the screens of a long one, and what a gateway beside it notices.

Screens are asked for over the loopback, of a dashboard that has just begun in an operating-system process of its own; processor
time is that of this process. The gateway's rounds are pairs, once without and once with a dashboard in which a browser has the
list of sessions open: it follows the stream of events, and fetches the screen again as our script does. The clock is given beside
the processor time, because on a busy machine it says little.
"""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import kilburn
from corpus import turns
from figures import Row, emit, median, parser, quantile
from kilburn.backend import Backend, Batch
from kilburn_lab.evals.gateway_load import ClientConnection, ClientConversation

WINDOW = 8_000
TAIL = 20
"""Turns at the end of each session that came one by one, each with its prompt."""

FIRST, LONG = 300, 500
"""Milliseconds that the first screen, and one of the long session, may take."""

SCREENS = ("/session", "/window", "/transcript", "/receipts", "/faults", "/prices", "/branches", "/cache", "/page")

AT_ONCE, WORDS, MOST, EVENTS = 4, 40, 39, 8
"""Of the gateway's clients: how many, the words of a message, the messages of a conversation at most, and pieces of an answer."""

PATIENCE = 60.0
CPU = 20
"""A renewed screen waits so many times what the last one took."""


def grow(session: kilburn.Session, pages: int, single: int) -> None:
    """Bring a new session to so many pages; the last turns come one by one, each with a prompt."""
    source = turns()
    session.append({"role": "system", "content": "You read source code."}, {"role": "user", "content": "Explain the library."})
    left = (pages - 2) // 2
    while left > 0:
        many = min(50, left - single) if left > single else 1
        session.append(*(message for _ in range(many) for message in next(source)))
        session.render()
        left -= many


def copy(backend: Backend, number: int, name: str) -> None:
    """Write the pages and the ledger of a session once more, under another name, in one transaction.

    No search finds them: that would take most of the time, and no screen here searches.
    """
    events, pages, checkpoint = list(backend.events(number)), list(backend.pages(number)), backend.checkpoint(number)
    made = [page for page, _ in pages]
    info = backend.segment(name, time=time.time())
    assert info is not None
    digests = {digest for page in made for digest in (page.digest, page.extra) if digest}
    whole = checkpoint is not None and checkpoint[0] == len(events)
    backend.commit(
        info.number,
        Batch(
            head=0,
            events=events,
            pages=made,
            texts=backend.contents.texts(digests),
            states={page.id: state for page, state in pages},
            checkpoint=checkpoint[1] if checkpoint is not None and whole else None,
        ),
    )  # fmt: skip


def fill(path: Path, sessions: int, pages: int, long: int) -> None:
    """Make the store: so many sessions of so many pages each, which are alike, and a long one."""
    with kilburn.open(str(path), window=WINDOW, policy="fifo", tokenizer="chars/4", embedder=None, durable=False) as store:
        first = store.session("agent-0000")
        grow(first, pages, TAIL)
        for page in range(3, min(30, pages)):
            first.recall(f"p{page}")
        store.release(first.name)
        for number in range(1, sessions):
            copy(store.backend, first.number, f"agent-{number:04}")
        grow(store.session("long"), long, long // 50)


class Running(NamedTuple):
    """A server that runs: its port and its process."""

    port: int
    process: int

    def spent(self) -> float:
        """Seconds of processor time of all its threads."""
        # The clock of a process has the number that clock_getcpuclockid(3) gives.
        return time.clock_gettime(~self.process << 3 | 2)


@contextmanager
def running(*command: str) -> Iterator[Running]:
    """A verb of `kilburn` that serves at a port, `{port}`, until it is closed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = [sys.executable, "-m", "kilburn", *(word.format(port=port) for word in command)]
    with tempfile.TemporaryFile() as said, subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=said, stderr=said) as process:
        try:
            end = time.monotonic() + PATIENCE
            while True:
                with socket.socket() as knock:
                    if not knock.connect_ex(("127.0.0.1", port)):
                        break
                if process.poll() is not None or time.monotonic() > end:
                    said.seek(0)
                    sys.exit(f"{' '.join(words)} does not answer: {said.read()[-500:].decode(errors='replace')}")
                time.sleep(0.05)
            yield Running(port, process.pid)
        finally:
            process.terminate()
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                process.kill()


def fetched(url: str) -> bytes:
    """What stands there."""
    with urllib.request.urlopen(url, timeout=600) as reply:
        data: bytes = reply.read()
    return data


def screen(server: Running, path: str) -> tuple[float, float, bytes]:
    """Milliseconds of the processor and of the clock for a screen, and the screen."""
    spent, began = server.spent(), time.perf_counter()
    data = fetched(f"http://127.0.0.1:{server.port}{path}")
    took = time.perf_counter() - began
    return 1000 * (server.spent() - spent), 1000 * took, data


def measured(path: Path, what: str, asked: Sequence[str], aim: float, times: int) -> Row:
    """The first request to a dashboard that has just begun, and a later one of the same screen."""
    first, clock, later, data = list[float](), list[float](), list[float](), b""
    for _ in range(times):
        for each in asked:
            with running("dashboard", "--db", str(path), "--port", "{port}") as server:
                cpu, wall, data = screen(server, each)
                first.append(cpu)
                clock.append(wall)
                later.append(screen(server, each)[0])
    rows = max((table.count(b"<tr") - 1 for table in re.findall(rb"<table.*?</table>", data, re.DOTALL)), default=0)
    rows = max(rows, data.count(b'<details class="left"'))
    return {
        "what": what,
        "first ms": median(first),
        "aim ms": aim,
        "by the clock ms": median(clock),
        "later ms": median(later),
        "KB": len(data) / 1000,
        "rows": rows,
    }


def watch(port: int) -> None:
    """Be a browser that has the list of sessions open, until killed."""
    place = f"http://127.0.0.1:{port}"
    fetched(f"{place}/")
    with urllib.request.urlopen(f"{place}/live", timeout=600) as stream:
        print("it is open", flush=True)
        for line in stream:
            if line.startswith(b"data:"):
                began = time.perf_counter()
                fetched(f"{place}/")
                time.sleep(CPU * (time.perf_counter() - began))


async def load(port: int, requests: int, seed: int) -> list[float]:
    """Seconds to the end of each answer; conversations of some 20 messages, in the middle."""
    waits, left = list[float](), iter(range(requests))

    async def client(number: int) -> None:
        connection, at = ClientConnection(port), 0
        talk = ClientConversation(seed + number, WORDS, streamed=False)
        for number_of in left:
            if len(talk) >= MOST:
                at += 1
                talk = ClientConversation(seed + number + AT_ONCE * at, WORDS, streamed=False)
            heard = await connection.ask(talk.next(number_of, EVENTS, stream=False))
            assert talk.hear(heard), heard.status
            waits.append(heard.first)
        await connection.close()

    await asyncio.gather(*(client(number) for number in range(AT_ONCE)))
    return waits


def beside(folder: Path, pairs: int, requests: int) -> Iterator[Row]:
    """Pairs of the same load, without and with a dashboard that is open; each pair in the other order than the one before."""
    stub = subprocess.Popen(
        [sys.executable, "-m", "kilburn_lab.evals.gateway_load"], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert stub.stdout is not None
        upstream, db = f"http://127.0.0.1:{int(stub.stdout.readline())}/v1", str(folder / "gateway.db")
        p95: dict[bool, list[float]] = {False: [], True: []}
        cpu: dict[bool, list[float]] = {False: [], True: []}
        shares = list[float]()
        options = ("--upstream", upstream, "--db", db, "--window", str(WINDOW))
        with running("serve", "--port", "{port}", *options) as gateway:
            asyncio.run(load(gateway.port, 5 * AT_ONCE, 0))
            with running("dashboard", "--db", db, "--port", "{port}") as dashboard:
                for pair in range(pairs):
                    for opened in (False, True) if pair % 2 else (True, False):
                        browser = _browser(dashboard.port) if opened else None
                        spent, own, began = gateway.spent(), dashboard.spent(), time.perf_counter()
                        waits = asyncio.run(load(gateway.port, requests, 10_000 * (2 * pair + opened + 1)))
                        cpu[opened].append(1000 * (gateway.spent() - spent) / requests)
                        p95[opened].append(1000 * quantile(waits, 0.95))
                        if browser is not None:
                            shares.append((dashboard.spent() - own) / (time.perf_counter() - began))
                            browser.kill()
                            browser.communicate()
        for figure, found in (("p95", p95), ("processor time of a request", cpu)):
            ratios = [one / other for one, other in zip(found[True], found[False], strict=True)]
            yield {
                "what": f"gateway, {figure}, {pairs} pairs of {requests}",
                "alone ms": median(found[False]),
                "with a dashboard ms": median(found[True]),
                "ratio": median(ratios),
                "aim": 1.1,
                "least ratio": min(ratios),
                "largest ratio": max(ratios),
                "processors of the dashboard": median(shares),
            }
    finally:
        stub.kill()
        stub.wait()


def _browser(port: int) -> subprocess.Popen[bytes]:
    """A browser that has loaded the screen."""
    words = [sys.executable, __file__, "--watch", str(port)]
    browser = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE)
    assert browser.stdout is not None
    browser.stdout.readline()
    return browser


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--sessions", type=int, default=1000)
    options.add_argument("--pages", type=int, default=1000, help="of each session")
    options.add_argument("--long", type=int, default=100_000, help="pages of the long session")
    options.add_argument("--store", type=Path, help="is made where it is not there [default: one that is removed]")
    options.add_argument("--times", type=int, default=3, help="of each screen, of which the median counts; 0 for no screens")
    options.add_argument("--pairs", type=int, default=6, help="of a gateway without and with a dashboard; 0 for none")
    options.add_argument("--requests", type=int, default=200, help="in each half of a pair")
    options.add_argument("--watch", type=int, help="be the browser of the dashboard at this port")
    asked = options.parse_args()
    if asked.watch:
        watch(asked.watch)
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        path = asked.store or Path(folder) / "store.db"
        if asked.times and not path.exists():
            fill(path, asked.sessions, asked.pages, asked.long)
        many = f"the first screen, {asked.sessions:,} sessions, {asked.sessions * asked.pages:,} pages"
        if asked.times:
            rows.append(measured(path, "a screen with nothing on it", ["/memory"], FIRST, asked.times))
            rows.append(measured(path, many, ["/"], FIRST, asked.times))
        for each in SCREENS if asked.times else ():
            query = f"{each}?name=long" + (f"&address=p{asked.long // 2}" if each == "/page" else "")
            rows.append(measured(path, f"{each} of a session of {asked.long:,} pages", [query], LONG, asked.times))
        rows = [{**row, "x": float(row["first ms"]) / float(rows[0]["first ms"])} for row in rows]
        if asked.pairs:
            rows += beside(Path(folder), asked.pairs, asked.requests)
    note = (
        "Milliseconds of the dashboard's processor time, but where it says by the clock. x: beside a screen with nothing on it."
    )
    emit("screens", rows, asked.json, note)


if __name__ == "__main__":
    main()

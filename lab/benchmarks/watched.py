"""What requests of a gateway take of the processor while somebody has its dashboard open, and follows a session there.

Baseline of the same run: the same requests with no dashboard open. Both take turns, and each turn goes on with the same sessions.
The provider is scripted and runs, like the clients and the browser, in another process than the gateway.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from figures import Row, emit, median, parser, quantile
from kilburn.testing.upstream import Upstream, serving

TEXT = "The parser drops the last line of every file that has no newline at its end. "


def spent(process: int) -> float:
    """Seconds of the processor that a process took so far."""
    # Linux: the clock of what a process used, to the nanosecond; see clock_getcpuclockid(3).
    return time.clock_gettime((~process << 3) | 2)


@contextmanager
def gateway(folder: Path, upstream: str, window: int) -> Iterator[tuple[int, str]]:
    """A gateway with a dashboard; its process, and where it listens."""
    command = ["serve", "--port", "0", "--upstream", f"{upstream}/v1", "--dashboard", "--db", str(folder / "agent.db")]
    log = folder / "said"
    with log.open("w") as said:
        program = "import sys; from kilburn.cli import main; sys.exit(main(sys.argv[1:]))"
        more = ["--window", str(window), "--log", str(folder / "log")]
        running = subprocess.Popen([sys.executable, "-c", program, *command, *more], stderr=said, stdin=subprocess.DEVNULL)
    try:
        while "/dashboard shows" not in log.read_text():
            if running.poll() is not None:
                raise SystemExit(log.read_text())
            time.sleep(0.05)
        yield (
            running.pid,
            next(word for word in log.read_text().split() if word.endswith("/dashboard")).removesuffix("/dashboard"),
        )
    finally:
        running.terminate()
        running.wait()


class Watcher:
    """A browser that shows a window and follows it, as `dashboard.js` does."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name, self.screens = f"{url}/dashboard", name, 0
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._over = threading.Event()

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        with httpx2.Client(timeout=60, trust_env=False) as http:
            self._show(http)
            with http.stream("GET", f"{self.url}/live", params={"name": self.name}) as live:
                for line in live.iter_lines():
                    if line.startswith("data:"):
                        self._show(http)
                    if self._over.is_set():
                        return

    def _show(self, http: Any) -> None:
        http.get(f"{self.url}/window", params={"name": self.name}).raise_for_status()
        self.screens += 1


class Client:
    """A session whose client sends its whole history each time."""

    def __init__(self, url: str, name: str) -> None:
        self.url, self.name, self.messages = url, name, list[dict[str, str]]()

    def ask(self, http: Any) -> float:
        """One request; how long it took, in seconds."""
        self.messages.append({"role": "user", "content": f"Number {len(self.messages)}. " + TEXT * 8})
        began = time.perf_counter()
        body, headers = {"model": "m", "messages": self.messages}, {"x-kilburn-session": self.name}
        answer = http.post(f"{self.url}/v1/chat/completions", json=body, headers=headers)
        took = time.perf_counter() - began
        self.messages.append(
            {"role": "assistant", "content": answer.raise_for_status().json()["choices"][0]["message"]["content"]}
        )
        return took


def measure(folder: Path, rounds: int, requests: int, window: int, pause: float) -> list[Row]:
    """The figures, over so many turns of each kind."""
    took: dict[str, list[float]] = {"closed": [], "open": []}
    cost: dict[str, list[float]] = {"closed": [], "open": []}
    screens = 0
    with (
        serving(Upstream(otherwise="Noted, and the work goes on. " * 4)) as upstream,
        gateway(folder, upstream, window) as (process, url),
        httpx2.Client(timeout=60, trust_env=False) as http,
    ):
        client = Client(url, "work")
        for _ in range(requests):
            client.ask(http)
        for turn in range(2 * rounds):
            kind = ("closed", "open", "open", "closed")[turn % 4]
            watching = Watcher(url, client.name)
            if kind == "open":
                watching.__enter__()
            before = spent(process)
            for _ in range(requests):
                took[kind].append(client.ask(http))
                time.sleep(pause)
            cost[kind].append(1000 * (spent(process) - before) / requests)
            if kind == "open":
                client.ask(http)
                watching.__exit__()
                screens += watching.screens
    return [
        {
            "dashboard": kind,
            "requests": len(took[kind]),
            "screens": screens if kind == "open" else 0,
            "processor ms": median(cost[kind]),
            "x": median(cost[kind]) / max(median(cost["closed"]), 1e-9),
            "p50 ms": 1000 * median(took[kind]),
            "p95 ms": 1000 * quantile(took[kind], 0.95),
        }
        for kind in took
    ]


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=8, help="turns with a dashboard open, and as many without")
    options.add_argument("--requests", type=int, default=60, help="of one turn")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--pause", type=float, default=0.02, help="seconds between two requests of the client")
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as folder:
        rows = measure(Path(folder), asked.rounds, asked.requests, asked.window, asked.pause)
    emit("watched", rows, asked.json, "The gateway's processor time for one request, screens included; x: against closed.")


if __name__ == "__main__":
    main()

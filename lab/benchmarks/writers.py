"""What an append to a file costs while another process writes there too: processor time, how much of it under the file's lock.

    python lab/benchmarks/writers.py

Both processes append in turns, so none waits for the other. What another one has committed, this one has to read anew: SQLite
forgets all pages that it holds. The time under the lock says how much of an append no other process can do meanwhile.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

from figures import Row, emit, parser
from kilburn import Store
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget

WORDS = "I looked at line {n} of the parser, and the check for the last line stands before the loop, where it is skipped. " * 3

MESSAGES = 20
"""Of a session."""


class Timed(Sqlite):
    """A file that knows how long its commits took of the processor."""

    took = 0.0

    def commit(self, segment: int, batch: Batch) -> None:
        began = time.thread_time()
        super().commit(segment, batch)
        self.took += time.thread_time() - began


class Writer:
    """Appends messages of a user and an assistant, in sessions."""

    def __init__(self, path: str, name: str) -> None:
        # As the gateway has it: a request waits for the disk once, at its end.
        self.backend = Timed(path, synchronous="NORMAL")
        self._store, self._name, self._count = Store(self.backend, Budget(32_000), "cost"), name, 0

    def append(self) -> float:
        """Seconds of the processor that one took."""
        session = self._store.session(f"{self._name}{self._count // MESSAGES}")
        role = ("user", "assistant")[self._count % 2]
        message = {"role": role, "content": f"{self._name} {self._count}: {WORDS.format(n=self._count)}"}
        self._count += 1
        began = time.thread_time()
        session.append(message)
        return time.thread_time() - began

    def close(self) -> None:
        self._store.close()


class Found(NamedTuple):
    """Milliseconds of the processor of an append, and how much of that its commit took."""

    whole: float
    commit: float


def measured(writer: Writer, times: int, before: Callable[[], object]) -> Found:
    whole = commits = 0.0
    for _ in range(times):
        before()
        held = writer.backend.took
        whole += writer.append()
        commits += writer.backend.took - held
    return Found(whole / times * 1e3, commits / times * 1e3)


def rows_of(rounds: int, times: int) -> list[Row]:
    found: dict[str, list[Found]] = {"alone": [], "behind another's": []}
    with tempfile.TemporaryDirectory(prefix="writers") as folder:
        path = f"{folder}/agent.db"
        writer = Writer(path, "one")
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, __file__, "--other", path], text=True, bufsize=1, **pipes) as other:  # type: ignore[call-overload]
            assert other.stdin is not None
            assert other.stdout is not None

            def let() -> None:
                other.stdin.write("\n")
                other.stdout.readline()

            measured(writer, MESSAGES, let)
            for _ in range(rounds):
                found["alone"].append(measured(writer, times, lambda: None))
                found["behind another's"].append(measured(writer, times, let))
            other.stdin.close()
        writer.close()
    base = found["alone"]

    def ratio(some: list[Found]) -> float:
        return statistics.median(one.whole / other.whole for one, other in zip(some, base, strict=True))

    return [
        {
            "an append": name,
            "ms": statistics.median(one.whole for one in some),
            "x": ratio(some),
            "under the lock ms": statistics.median(one.commit for one in some),
        }
        for name, some in found.items()
    ]


def other(path: str) -> None:
    """The other process: an append for each line."""
    writer = Writer(path, "other")
    for _ in sys.stdin:
        writer.append()
        print(flush=True)
    writer.close()


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--times", type=int, default=100, help="appends of each round")
    options.add_argument("--other", metavar="PATH", help="be the other process")
    asked = options.parse_args()
    if asked.other:
        other(asked.other)
        return
    note = "Processor time; a request through the gateway is two appends and what stands around them."
    emit("writers", rows_of(asked.rounds, asked.times), asked.json, note)


if __name__ == "__main__":
    main()

"""What PostgreSQL costs beside a file: appends and searches, in one run, on a server of its own that syncs.

    python lab/benchmarks/postgres.py
    python lab/benchmarks/postgres.py --appends 200 --plain

`--plain` sends each statement by itself, and waits for its answer: without pipeline mode.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import kilburn
from figures import Row, emit, parser
from kilburn.backends.postgres import connection
from kilburn.backends.postgres.server import OwnServer

TEXT = "step {number}: I looked at line {line} of src/module_{number}/file.py, and nothing there explains error{number}. " * 4


def measured(do: Callable[[int], object], times: int) -> tuple[float, float]:
    """Milliseconds of the wall (the median) and of this process's processor (the mean) for each."""
    walls, before = [], time.process_time()
    for number in range(times):
        began = time.perf_counter()
        do(number)
        walls.append(time.perf_counter() - began)
    return statistics.median(walls) * 1e3, (time.process_time() - before) / times * 1e3


def run(place: str, appends: int) -> dict[str, tuple[float, float]]:
    with kilburn.open(place, window=4000, policy="lru", tokenizer="chars/4", embedder=None, tenant=os.urandom(4).hex()) as store:
        session = store.session("s")

        def append(number: int) -> None:
            role = "user" if number % 2 else "assistant"
            session.append({"role": role, "content": TEXT.format(number=number, line=number * 7)})

        found = {"append": measured(append, appends)}
        found["search"] = measured(lambda number: store.search(f"error{number} module line"), appends // 4)
        found["open"] = measured(lambda number: store.backend.segment("s", time=0.0, create=False), appends // 4)
        return found


def rows_of(appends: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        server = OwnServer(Path(folder) / "s")
        server.start()
        try:
            file = run(f"{folder}/agent.db", appends)
            both = (("file", file), ("PostgreSQL", run(server.url, appends)))
        finally:
            server.stop("immediate")
    return [
        {"in": kind, "doing": what, "wall ms, median": wall, "processor ms": processor, "x": wall / file[what][0]}
        for kind, found in both
        for what, (wall, processor) in found.items()
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--appends", type=int, default=400)
    options.add_argument("--plain", action="store_true", help="without pipeline mode")
    asked = options.parse_args()
    if asked.plain:
        connection.BoundedConnection.pipeline = lambda self: nullcontext()  # type: ignore[method-assign]
    emit("postgres", rows_of(asked.appends), asked.json, "Processor time is of this process, without the server's.")


if __name__ == "__main__":
    main()

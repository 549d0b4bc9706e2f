"""What the size of a session costs: a turn, a question and a fork, in one session that grows, on a real file with full sync.

At each size rounds of a turn and of a bare synced insert of the same bytes are interleaved, so that a noisy moment hits both.
A turn is one `append` of a call and its result, and `render`. With `--embedder` a second session of its own is measured at one
size while its pages are being embedded behind it.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import kilburn
from corpus import SIZE, Turn, fill, turns
from figures import Row, emit, median, parser, quantile
from turn import Bare

SIZES = [100, 10_000, 100_000, 1_000_000]
BATCH = 500
"""Turns of one `append` while the session grows."""


class Session:
    """A session of a store of its own, which grows."""

    def __init__(self, path: Path, window: int, policy: str, embedder: str | None) -> None:
        self.store = kilburn.open(str(path), window=window, policy=policy, embedder=embedder)
        self.session = self.store.session("s")
        self.source = turns(SIZE)
        self.forks = 0

    def grow(self, pages: int) -> None:
        """Bring it to so many pages."""
        fill(self.session, self.source, pages, batch=min(BATCH, max(1, pages // 4)))

    def turn(self, turn: Turn) -> None:
        """One more turn."""
        self.session.append(*turn)
        self.session.render()

    def question(self, text: str) -> None:
        """The user asks something short."""
        self.session.append({"role": "user", "content": text})
        self.session.render()
        self.session.append({"role": "assistant", "content": "It is there."})

    def call(self) -> None:
        """A call that will fork."""
        self.forks += 1
        function = {"name": "branch", "arguments": "{}"}
        call = {"id": f"branch{self.forks}", "type": "function", "function": function}
        self.session.append({"role": "assistant", "content": None, "tool_calls": [call]})

    def fork(self) -> kilburn.Session:
        """The fork of the last call."""
        return self.session.fork("Look into it.", call=f"branch{self.forks}")


def _seconds(work: Callable[[], Any], clock: Callable[[], float]) -> float:
    start = clock()
    work()
    return clock() - start


def measure(session: Session, bare: Bare, fresh: Iterator[Turn], rounds: int) -> Row:
    """The figures of a session at its size."""
    took: dict[str, list[float]] = {"turn": [], "bare": []}
    for turn in islice(fresh, rounds):
        took["turn"].append(_seconds(partial(session.turn, turn), time.perf_counter))
        took["bare"].append(_seconds(partial(bare.turn, turn), time.perf_counter))
    asked: list[float] = []
    for number, turn in enumerate(islice(fresh, max(2, rounds // 5))):
        words = " ".join(str(turn[1]["content"]).split()[1:8])
        asked.append(_seconds(partial(session.question, f"{number}: where is {words}?"), time.thread_time))
    called, forked = [], []
    for _ in range(max(2, rounds // 5)):
        called.append(_seconds(session.call, time.thread_time))
        start = time.thread_time()
        branch = session.fork()
        forked.append(time.thread_time() - start)
        branch.branches.exit("fine")
    synced = median(took["bare"])
    return {
        "turn p50 ms": 1000 * median(took["turn"]),
        "turn p95 ms": 1000 * quantile(took["turn"], 0.95),
        "bare insert ms": 1000 * synced,
        "x bare": median(took["turn"]) / synced,
        "p95 x bare": quantile(took["turn"], 0.95) / synced,
        "question ms": 1000 * median(asked),
        "append ms": 1000 * median(called),
        "fork ms": 1000 * median(forked),
        "fork x append": median(forked) / median(called),
    }


def main() -> None:
    """Measure and print."""
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, action="append", help="sizes; 100, 10000, 100000 and 1000000 where none is given")
    options.add_argument("--embedder", type=int, default=0, help="pages of the session that is embedded; 0 for none")
    options.add_argument("--policy", default="hybrid")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--rounds", type=int, default=200)
    asked = options.parse_args()
    rows: list[Row] = []
    fresh = turns(SIZE, start=10_000_000)
    with tempfile.TemporaryDirectory(dir=".") as folder:
        bare = Bare(Path(folder) / "bare.db")
        session = Session(Path(folder) / "sizes.db", asked.window, asked.policy, None)
        for pages in sorted(asked.pages or SIZES):
            session.grow(pages)
            rows.append({"session": f"{pages:,} pages", "pages": pages, **measure(session, bare, fresh, asked.rounds)})
        session.store.close()
        if asked.embedder:
            session = Session(Path(folder) / "embedded.db", asked.window, asked.policy, "auto")
            session.grow(asked.embedder)
            session.store.search("where is the first line?")  # from the first search on, what waits is embedded
            row = measure(session, bare, fresh, asked.rounds)
            rows.append({"session": f"{asked.embedder:,} pages, while they are embedded", "pages": asked.embedder, **row})
            session.store.close()
        bare.db.close()
    rows = [{**row, "x": float(row["x bare"]) / float(rows[0]["x bare"])} for row in rows]
    note = f"{asked.policy}, a window of {asked.window:,}. A question and a fork in processor time. x: of the first size."
    emit("sizes", rows, asked.json, note)


if __name__ == "__main__":
    main()

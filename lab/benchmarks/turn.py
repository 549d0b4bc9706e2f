"""What one more turn costs: `append` (durable) and `render`, in sessions of many sizes.

Baselines of the same run: a bare synced SQLite insert of the same bytes, and what an agent without
Kilburn does: keep a list, cut it to the window, and serialise it. Rounds of all are interleaved, so
that a noisy moment hits all of them. The goals are ratios to the bare insert's median.

With `--embedder` each session is measured once more, with an embedder at work on what it has.
With `--calls` it counts instead what one append with room enters: functions of Kilburn, and their files.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import apsw

import kilburn
from append import entered
from corpus import SIZE, Turn, fill, turns
from figures import Row, emit, parser, quantile

OWN = 1000
"""Pages of a session that come under the policy that is measured, at least; the others under `fifo`, in large batches."""
WARM = 20
"""Turns before what is measured: they read what was not in memory."""
SIZES = [100, 10_000, 100_000]
BARE = "bare SQLite insert, synced"


class Bare:
    """A table, one row a page, committed with full sync."""

    def __init__(self, path: Path) -> None:
        self.db = apsw.Connection(str(path))
        self.db.pragma("journal_mode", "WAL")
        self.db.pragma("synchronous", "FULL")
        self.db.execute("CREATE TABLE page(id INTEGER PRIMARY KEY, body TEXT)")

    def turn(self, turn: Turn) -> None:
        with self.db:
            self.db.executemany("INSERT INTO page(body) VALUES(?)", [(json.dumps(message),) for message in turn])


class Naive:
    """A list of messages, the newest that fit the window serialised anew at each turn."""

    def __init__(self, window: int, source: Iterator[Turn], pages: int) -> None:
        self.window = window
        self.messages: list[dict[str, Any]] = [message for turn in islice(source, pages // 2) for message in turn]

    def turn(self, turn: Turn) -> None:
        self.messages.extend(turn)
        left = self.window
        kept = []
        for message in reversed(self.messages):
            left -= len(json.dumps(message)) // 4
            if left < 0:
                break
            kept.append(message)
        json.dumps(kept[::-1])


class Session:
    """A Kilburn session of so many pages, the last thousand of them under its own policy."""

    def __init__(self, path: Path, pages: int, window: int, policy: str, tokenizer: str, embedder: str | None = None) -> None:
        self.source = turns(SIZE)
        if pages > 2 * OWN and not path.exists():
            with kilburn.open(path, window=window, policy="fifo", tokenizer=tokenizer, embedder=None, durable=False) as store:
                fill(store.session("s"), self.source, pages - OWN, batch=OWN)
        self.store = kilburn.open(path, window=window, policy=policy, tokenizer=tokenizer, embedder=embedder)
        self.session = self.store.session("s")
        if self.session.window.last < pages:
            fill(self.session, self.source, pages)
        if embedder is not None:
            # From the first search on the background embeds what waits.
            self.session.search("anything")

    def turn(self, turn: Turn) -> None:
        self.session.append(*turn)
        self.session.render()


def _rounds(
    subjects: dict[str, Callable[[Turn], None]], source: Iterator[Turn], rounds: int
) -> dict[str, list[tuple[float, float]]]:
    """For each subject and round the seconds, and those of the processor that its thread took."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in subjects}
    for at, turn in enumerate(islice(source, WARM + rounds)):
        for name, work in subjects.items():
            start, begun = time.perf_counter(), time.thread_time()
            work(turn)
            if at >= WARM:
                found[name].append((time.perf_counter() - start, time.thread_time() - begun))
    return found


def measure(
    policy: str, sizes: list[int], window: int, tokenizer: str, rounds: int, keep: str | None, embedder: str | None
) -> list[Row]:
    """Rows for one policy; the baseline of the ratios is the bare insert."""
    with nullcontext(keep) if keep else tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder)
        sessions = {
            f"{policy}, {pages:,} pages": Session(place / f"{pages}.db", pages, window, policy, tokenizer, embedder)
            for pages in sizes
        }
        for stale in place.glob("bare.db*"):
            stale.unlink()
        bare = Bare(place / "bare.db")
        subjects: dict[str, Callable[[Turn], None]] = {name: session.turn for name, session in sessions.items()}
        subjects |= {BARE: bare.turn, "naive list, not stored": Naive(window, turns(), min(max(sizes), 10_000)).turn}
        # No call has the id of one of an earlier run.
        last = max(session.session.window.last for session in sessions.values())
        times = _rounds(subjects, turns(SIZE, start=10_000_000 + last), rounds)
        stored = [session.session.stats() for session in sessions.values()]
        assert not any(stats.overflow for stats in stored)
        for session in sessions.values():
            session.store.close()
        bare.db.close()
    base = {at: quantile([one[at] for one in times[BARE]], 0.5) for at in (0, 1)}
    rows: list[Row] = []
    for name, values in times.items():
        middle, high = (quantile([seconds for seconds, _ in values], share) for share in (0.5, 0.95))
        own, most = (quantile([cpu for _, cpu in values], share) for share in (0.5, 0.95))
        row: Row = {"one more turn": name + (f", {embedder} at work" if embedder and name in sessions else "")}
        row |= {"p50 ms": middle * 1e3, "x bare": middle / base[0], "goal": "3" if name in sessions else ""}
        row |= {"p95 ms": high * 1e3, "x bare ": high / base[0], "goal ": "8" if name in sessions else ""}
        row |= {"processor p50 ms": own * 1e3, "p95": most * 1e3, "x bare  ": own / base[1]}
        rows.append(row)
    return rows


def count_calls(policy: str, pages: int) -> list[Row]:
    """Rows: what one append with room enters, in a session that has been used for a while."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        session = Session(Path(folder) / "calls.db", pages, 100_000_000, policy, "auto")
        for call, result in islice(session.source, 3):
            session.session.append(call)
            session.session.append(result)
            session.session.render()
        call, result = next(session.source)
        for name, message in (("a call", call), ("its result", result), ("words", {"role": "user", "content": "Go on, please."})):
            found = entered(lambda message=message: session.session.append(message))  # type: ignore[misc]
            rows.append({"policy": policy, "append of": name, "functions": len(found), "files": len({file for file, _ in found})})
            for area in ("kernel", "backends", "wire", "tokens", "policies"):
                rows[-1][area] = sum(file.startswith(area) for file, _ in found)
        session.store.close()
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--calls", action="store_true", help="count the functions that an append enters")
    options.add_argument("--policy", action="append", help="may be given several times; hybrid where none is")
    options.add_argument("--pages", type=int, action="append", help=f"may be given several times; {SIZES} where none is given")
    options.add_argument("--embedder", help="measure again with this embedder at work in the background, such as minilm")
    options.add_argument("--keep", help="a folder in which the sessions stay, for another run")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--tokenizer", default="auto")
    options.add_argument("--rounds", type=int, default=400)
    asked = options.parse_args()
    sizes = asked.pages or SIZES
    if asked.calls:
        counted = [row for policy in asked.policy or ["hybrid"] for row in count_calls(policy, min(sizes))]
        emit("turn", counted, asked.json, f"What one append with room enters; Kilburn {kilburn.__version__}.")
        return
    rows = [
        row
        for policy in asked.policy or ["hybrid"]
        for embedder in ([None, asked.embedder] if asked.embedder else [None])
        for row in measure(policy, sizes, asked.window, asked.tokenizer, asked.rounds, asked.keep, embedder)
    ]
    note = f"A turn is a call and its result, {SIZE} characters each, then render(); Kilburn {kilburn.__version__}."
    emit("turn", rows, asked.json, note)


if __name__ == "__main__":
    main()

"""What one more turn costs: `append` (durable) and `render`, in a short session and in a long one.

Baselines of the same run: a bare synced SQLite insert of the same bytes, and what an agent without
Kilburn does: keep a list, cut it to the window, and serialise it. Rounds of all are interleaved, so
that a noisy moment hits all of them.

With `--calls` it counts instead what one append with room enters: functions of Kilburn, and their files.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import apsw

import kilburn
from append import entered
from corpus import SIZE, Turn, fill, open_store, turns
from figures import Row, emit, parser, quantile


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
    """A Kilburn session of so many pages."""

    def __init__(self, path: Path, pages: int, window: int, policy: str, tokenizer: str, calls: int) -> None:
        self.store = open_store(str(path), window, policy, tokenizer)
        self.session = self.store.session("s")
        self.source = turns(SIZE)
        fill(self.session, self.source, pages)
        self.calls = calls

    def turn(self, turn: Turn) -> None:
        if self.calls == 1:
            self.session.append(*turn)
        else:
            for message in turn:
                self.session.append(message)
        self.session.render()


def _rounds(subjects: dict[str, Callable[[Turn], None]], source: Iterator[Turn], rounds: int) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {name: [] for name in subjects}
    for turn in islice(source, rounds):
        for name, work in subjects.items():
            start = time.perf_counter()
            work(turn)
            found[name].append(time.perf_counter() - start)
    return found


def measure(policy: str, short: int, long: int, window: int, tokenizer: str, rounds: int) -> list[Row]:
    """Rows for one policy; the baseline of the ratios is the short session with one append a turn."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        place = Path(folder)
        sessions = {
            f"{policy}, {pages} pages, {calls} append{'s' * (calls - 1)}": Session(
                place / f"{pages}-{calls}.db", pages, window, policy, tokenizer, calls
            )
            for pages in (short, long)
            for calls in (1, 2)
        }
        bare = Bare(place / "bare.db")
        subjects: dict[str, Callable[[Turn], None]] = {name: session.turn for name, session in sessions.items()}
        subjects |= {"bare SQLite insert, synced": bare.turn, "naive list, not stored": Naive(window, turns(), long).turn}
        times = _rounds(subjects, turns(SIZE, start=10_000_000), rounds)
        stored = [session.session.stats() for session in sessions.values()]
        assert not any(stats.overflow for stats in stored)
        for session in sessions.values():
            session.store.close()
        bare.db.close()
    base = quantile(next(iter(times.values())), 0.5)
    synced = quantile(times["bare SQLite insert, synced"], 0.5)
    return [
        {
            "one more turn": name,
            "p50 ms": quantile(values, 0.5) * 1e3,
            "p95 ms": quantile(values, 0.95) * 1e3,
            "max ms": max(values) * 1e3,
            "x short": quantile(values, 0.5) / base,
            "x bare insert": quantile(values, 0.5) / synced,
        }
        for name, values in times.items()
    ]


def count_calls(policy: str, pages: int) -> list[Row]:
    """Rows: what one append with room enters, in a session that has been used for a while."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        session = Session(Path(folder) / "calls.db", pages, 100_000_000, policy, "auto", 2)
        for turn in islice(session.source, 3):
            session.turn(turn)
        call, result = next(session.source)
        for name, message in (("a call", call), ("its result", result), ("words", {"role": "user", "content": "Go on, please."})):
            found = entered(lambda message=message: session.session.append(message))  # type: ignore[misc]
            rows.append({"policy": policy, "append of": name, "functions": len(found), "files": len({file for file, _ in found})})
            for area in ("kernel", "stores", "wire", "tokens", "policies"):
                rows[-1][area] = sum(file.startswith(area) for file, _ in found)
        session.store.close()
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--calls", action="store_true", help="count the functions that an append enters")
    options.add_argument("--policy", action="append", help="may be given several times; hybrid where none is")
    options.add_argument("--short", type=int, default=200, help="pages of the short session")
    options.add_argument("--long", type=int, default=10_000, help="pages of the long session")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--tokenizer", default="auto")
    options.add_argument("--rounds", type=int, default=400)
    asked = options.parse_args()
    if asked.calls:
        counted = [row for policy in asked.policy or ["hybrid"] for row in count_calls(policy, asked.short)]
        emit("turn", counted, asked.json, f"What one append with room enters; Kilburn {kilburn.__version__}.")
        return
    rows = [
        row
        for policy in asked.policy or ["hybrid"]
        for row in measure(policy, asked.short, asked.long, asked.window, asked.tokenizer, asked.rounds)
    ]
    note = f"A turn is a call and its result, {SIZE} characters each, then render(); Kilburn {kilburn.__version__}."
    emit("turn", rows, asked.json, note)


if __name__ == "__main__":
    main()

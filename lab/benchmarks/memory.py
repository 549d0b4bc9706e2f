"""What a session takes in memory, and how long it takes to open it again; each in a session of its own.

Baseline of the same run: an interpreter that has imported Kilburn and opened an empty store.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from corpus import SIZE, fill, open_store, turns
from figures import Row, emit, parser, peak_megabytes


def _work(asked: argparse.Namespace) -> dict[str, float]:
    """In the child: fill or reopen, take a turn, say what it took."""
    start = time.perf_counter()
    with open_store(asked.path, asked.window, asked.policy) as store:
        session = store.session("s")
        opened = time.perf_counter() - start
        held = len(session.contents.pages())
        if asked.work == "fill":
            fill(session, turns(SIZE), asked.fill, batch=10)
        if session.contents.pages():
            session.append({"role": "user", "content": "go on"})
            session.render()
        tokens = session.stats().tokens_seen
    return {"open ms": opened * 1e3, "peak MB": peak_megabytes(), "tokens": tokens, "held": held}


def _child(work: str, path: Path, pages: int, asked: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, __file__, "--work", work, "--path", str(path), "--fill", str(pages)]
    command += ["--window", str(asked.window), "--policy", asked.policy]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found


def measure(asked: argparse.Namespace) -> list[Row]:
    """Rows; the baseline of the ratios is the empty store."""
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=".") as folder:
        empty = [_child("open", Path(folder) / f"empty{number}.db", 0, asked) for number in range(2)][1]
        rows.append({"session": "empty", "doing": "open", "peak MB": empty["peak MB"], "open ms": empty["open ms"], "x": 1.0})
        for pages in asked.pages or [10_000, 100_000]:
            path = Path(folder) / f"{pages}.db"
            name = f"{pages} pages"
            filled = _child("fill", path, pages, asked)
            size = os.path.getsize(path) / 1e6
            rows.append(
                {
                    "session": name,
                    "doing": "append all",
                    "tokens": int(filled["tokens"]),
                    "file MB": size,
                    "peak MB": filled["peak MB"],
                }
            )
            again = [_child("open", path, pages, asked) for _ in range(3)]
            again.sort(key=lambda found: found["open ms"])
            middle = again[1]
            rows.append(
                {
                    "session": name, "doing": "open again, one turn", "peak MB": middle["peak MB"],
                    "open ms": middle["open ms"], "x": middle["open ms"] / empty["open ms"],
                }
            )  # fmt: skip
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, action="append", help="10000 and 100000 where none is given")
    options.add_argument("--window", type=int, default=8000)
    options.add_argument("--policy", default="hybrid")
    options.add_argument("--work", choices=("fill", "open"), help=argparse.SUPPRESS)
    options.add_argument("--path", help=argparse.SUPPRESS)
    options.add_argument("--fill", type=int, default=0, help=argparse.SUPPRESS)
    asked = options.parse_args()
    if asked.work:
        print(json.dumps(_work(asked)))
        return
    emit(
        "memory",
        measure(asked),
        asked.json,
        "peak MB is the most that was resident; open ms is open() and process(), replay included.",
    )


if __name__ == "__main__":
    main()

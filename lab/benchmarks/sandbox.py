"""What a sandbox costs: opening one, a cell, and a cell that calls a function of ours, for each that this machine has.

The baseline is the same code in this program, by `exec`, which is what a sandbox replaces.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from figures import Row, emit, median, parser, seconds_of
from kilburn.errors import KilburnError
from kilburn.recursion.sandbox import DEFAULT_ORDER, Bounds, open_sandbox

CELL = "total = 0\nfor number in range(100):\n    total = total + number"
CALL = "word = echo('word')"
SEARCH = "found = text.count('needle')"


def echo(word: str) -> str:
    return word


def bare(code: str, times: int, text: str) -> float:
    names: dict[str, Any] = {"echo": echo, "text": text}
    return median(seconds_of(lambda: exec(code, names), times))  # noqa: S102 -- it is our own


def measure(opens: int, times: int, megabytes: int) -> list[Row]:
    text = "a needle in the hay " * (megabytes * 50_000)
    rows: list[Row] = [
        {"sandbox": "none", "cell ms": bare(CELL, times, text) * 1e3, "call ms": bare(CALL, times, text) * 1e3}
        | {"search ms": bare(SEARCH, min(times, 20), text) * 1e3}
    ]
    with TemporaryDirectory() as folder:
        path = Path(folder) / "text"
        path.write_text(text)
        for name in DEFAULT_ORDER:
            try:
                cold = []
                for files in [{}] * opens + [{"text": path}]:
                    begun = time.perf_counter()
                    sandbox = open_sandbox(name, calls={"echo": echo}, files=files, bounds=Bounds())
                    cold.append(time.perf_counter() - begun)
                    if not files:
                        sandbox.close()
            except KilburnError as error:
                rows.append({"sandbox": f"{name}: {error.what}"})
                continue
            with sandbox:
                row: Row = {"sandbox": name, "open ms": median(cold[:-1]) * 1e3, f"open with {megabytes} MB ms": cold[-1] * 1e3}
                for what, code in (("cell", CELL), ("call", CALL), ("search", SEARCH)):
                    many = min(times, 20) if what == "search" else times
                    seconds = median(seconds_of(partial(sandbox.run, code), many))
                    row[f"{what} ms"] = seconds * 1e3
                rows.append(row)
    for row in rows:
        for what in ("cell", "call"):
            if f"{what} ms" in row:
                row[f"x {what} of none"] = float(row[f"{what} ms"]) / float(rows[0][f"{what} ms"])
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--opens", type=int, default=10, help="how often each is opened")
    options.add_argument("--times", type=int, default=1000, help="cells of each kind")
    options.add_argument("--megabytes", type=int, default=40, help="size of the file that code searches")
    asked = options.parse_args()
    emit("sandbox", measure(asked.opens, asked.times, asked.megabytes), asked.json, "Medians. open: cold, of another process.")


if __name__ == "__main__":
    main()

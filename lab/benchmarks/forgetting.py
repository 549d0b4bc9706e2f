"""What forgetting a page costs in files of several sizes: the commit that erases it, and the pass that wipes its bytes out of
the file.

Baseline: the commit alone, in the same file. The first forget is apart: it finds what was left in all pages so far.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from figures import Row, emit, median, parser
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.testing.stores import batch_of

PAGES = 60
"""Pages a batch; one in six has words for the text index, the rest is a tool's output that is not indexed."""


def fill(path: Path, megabytes: float, chance: random.Random) -> None:
    """Make a file of this size."""
    words = ["".join(chance.choices("abcdefghijklmnopqrstuvwxyz", k=chance.randint(3, 9))) for _ in range(20_000)]
    with Sqlite(path, synchronous="OFF") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        head = 0
        while path.stat().st_size < megabytes * 1e6:
            numbers = range(head * PAGES + 1, head * PAGES + PAGES + 1)
            texts = {
                number: " ".join(chance.choices(words, k=100)) if number % 6 == 0 else chance.randbytes(1500).hex()
                for number in numbers
            }
            backend.commit(info.number, batch_of(head, texts, index=[number for number in numbers if number % 6 == 0]))
            head += 1


def forgets(backend: Sqlite, pages: list[int]) -> tuple[list[float], list[float]]:
    """Seconds of each commit, and of each with the pass over the file."""
    heads = {info.number: info.head for info in backend.segments()}
    commits, wholes = [], []
    for page in pages:
        start = time.perf_counter()
        with backend.erasing():
            backend.commit(1, Batch(head=heads[1], erase=[page]))
            commits.append(time.perf_counter() - start)
        wholes.append(time.perf_counter() - start)
    return commits, wholes


def measure(sizes: list[float], times: int) -> list[Row]:
    """Rows; the baseline is the commit without the pass."""
    rows: list[Row] = []
    for size in sizes:
        with tempfile.TemporaryDirectory(dir=".") as name:
            path = Path(name) / "k.db"
            fill(path, size, random.Random(1))
            with Sqlite(path) as backend:
                pages = [6 * number for number in range(1, times + 2)]
                _, (first,) = forgets(backend, pages[:1])
                began = time.process_time()
                commits, wholes = forgets(backend, pages[1:])
                processor = (time.process_time() - began) / times
            megabytes, base = round(path.stat().st_size / 1e6), median(commits)
            rows += [
                {"MB": megabytes, "doing": "the commit alone", "p50 ms": base * 1e3, "x": 1.0},
                {
                    "MB": megabytes, "doing": "forget a page", "p50 ms": median(wholes) * 1e3, "x": median(wholes) / base,
                    "processor ms": processor * 1e3, "the first ms": first * 1e3,
                },
            ]  # fmt: skip
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--megabytes", type=float, action="append", help="sizes of files; 10, 100 and 1000 where none is given")
    options.add_argument("--times", type=int, default=20)
    asked = options.parse_args()
    emit("forgetting", measure(asked.megabytes or [10, 100, 1000], asked.times), asked.json)


if __name__ == "__main__":
    main()

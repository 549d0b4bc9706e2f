"""What a copy of a store costs, what cold texts save, and what reading one back costs, in processor time.

    python lab/benchmarks/copying.py --pages 100000
    python lab/benchmarks/copying.py --pages 5000 --reads 500 --all

Ratios are of one run: a cold read beside a read of the same texts from the file.
"""

from __future__ import annotations

import random
import tempfile
import time
from functools import partial
from pathlib import Path

import apsw
import msgspec

import kilburn
from figures import Row, emit, parser
from kilburn.backend import Batch
from kilburn.backends.cold import new_place
from kilburn.backends.sqlite import Sqlite
from kilburn.event import Act, Event
from kilburn.page import digest_of
from kilburn.testing.stores import page_of

WORDS = ("lamp", "oil", "wick", "brig", "fog", "bell", "wind", "noon", "rain", "tide", "keeper", "parser", "token", "ledger")
SESSIONS = 100


def fill(path: Path, pages: int) -> None:
    chance = random.Random(1)
    with Sqlite(path, synchronous="NORMAL") as backend:
        for session in range(SESSIONS):
            info = backend.segment(f"session {session}", time=1.0)
            assert info is not None
            head = 0
            for first in range(1, pages // SESSIONS + 1, 50):
                texts = {}
                made = []
                for number in range(first, min(first + 50, pages // SESSIONS + 1)):
                    text = f"{session} {number} " + " ".join(f"{chance.choice(WORDS)}{chance.randrange(999)}" for _ in range(80))
                    made.append(page_of(number, text))
                    texts[digest_of(text)] = text
                events = [
                    Event(number=head + 1 + at, act=Act.ADMIT, time=float(page.id), pages=(page.id,))
                    for at, page in enumerate(made)
                ]
                batch = Batch(head=head, events=events, pages=made, texts=texts, index=[page.id for page in made])
                backend.commit(info.number, batch)
                head += len(events)


def timed(work: object) -> tuple[float, object]:
    began = time.process_time()
    made = work()  # type: ignore[operator]
    return time.process_time() - began, made


def read(backend: Sqlite, digests: list[str]) -> None:
    for digest in digests:
        backend.contents.texts([digest])


def rows_of(pages: int, reads: int, everything: bool) -> tuple[list[Row], str]:
    """The rows, and in words how large the files are."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.db", Path(folder) / "b.db"
        filling, _ = timed(lambda: fill(source, pages))
        copying, _ = timed(lambda: kilburn.copy(str(source), str(target), note=False))
        again, _ = timed(lambda: kilburn.copy(str(source), str(target), note=False))
        each = (("making the source", filling), ("copy, and compare", copying), ("copy again, nothing new", again))
        rows: list[Row] = [{"doing": what, "us each": 1e6 * took / pages, "x": took / filling} for what, took in each]
        note = f"{source.stat().st_size:,} bytes; the copy {target.stat().st_size:,}"
        chance = random.Random(2)
        for name, key in (("a folder", ""), ("a folder, encrypted", str(Path(folder) / "key"))):
            with Sqlite(target) as backend:
                backend.settings.put("cold", msgspec.json.encode(new_place(str(Path(folder) / name[:12] / "x"), key)).decode())
                digests = sorted({page.digest for info in backend.segments() for page, _ in backend.pages(info.number)})
                some = chance.sample(digests, min(reads, len(digests)))
                hot, _ = timed(partial(read, backend, some))
                moving, _ = timed(partial(backend.contents.chill, some))
                cold, _ = timed(partial(read, backend, some))
                for what, took in (("a read from the file", hot), (f"a read from {name}", cold), (f"a move to {name}", moving)):
                    rows.append({"doing": what, "us each": 1e6 * took / len(some), "x": took / hot})
                if everything and not key:
                    backend.contents.chill(digests)
            if everything and not key:
                note += f"; with all texts cold, after VACUUM, {vacuumed(target):,}"
            with Sqlite(target) as backend:
                # Back before another place is set: there nobody would find it.
                backend.contents.warm()
        return rows, note


def vacuumed(path: Path) -> int:
    db = apsw.Connection(str(path))
    db.create_scalar_function("needs_a_kilburn_of_format_5", lambda: None, 0)
    db.execute("VACUUM")
    db.close()
    return path.stat().st_size


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--pages", type=int, default=100_000)
    options.add_argument("--reads", type=int, default=2000)
    options.add_argument("--all", action="store_true", help="move everything, and see what the file is then")
    asked = options.parse_args()
    rows, note = rows_of(asked.pages, asked.reads, asked.all)
    emit("copying", rows, asked.json, note)


if __name__ == "__main__":
    main()

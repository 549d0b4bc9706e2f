"""What a copy of a store costs, what cold texts save, and what reading one back costs, in processor time.

    python lab/benchmarks/copying.py --pages 100000
    python lab/benchmarks/copying.py --pages 5000 --reads 500 --all

Ratios are of one run: a cold read beside a read of the same texts from the file.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from functools import partial
from pathlib import Path

import msgspec

import kilburn
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
        backend.texts([digest])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--pages", type=int, default=100_000)
    parser.add_argument("--reads", type=int, default=2000)
    parser.add_argument("--all", action="store_true", help="move everything, and see what the file is then")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder) / "a.db", Path(folder) / "b.db"
        filling, _ = timed(lambda: fill(source, given.pages))
        copying, copied = timed(lambda: kilburn.copy(str(source), str(target), note=False))
        again, _ = timed(lambda: kilburn.copy(str(source), str(target), note=False))
        figures = {
            "pages": copied.pages,  # type: ignore[attr-defined]
            "filling_pages_per_s": round(given.pages / filling),
            "copy_pages_per_s": round(given.pages / copying),
            "nothing_new_pages_per_s": round(given.pages / again),
            "source_bytes": source.stat().st_size,
            "copy_bytes": target.stat().st_size,
        }
        print(json.dumps(figures), flush=True)
        chance = random.Random(2)
        for name, key in (("plain", ""), ("encrypted", str(Path(folder) / "key"))):
            with Sqlite(target) as backend:
                backend.keep_setting("cold", msgspec.json.encode(new_place(str(Path(folder) / name), key)).decode())
                digests = sorted({page.digest for info in backend.segments() for page, _ in backend.pages(info.number)})
                some = chance.sample(digests, min(given.reads, len(digests)))
                hot, _ = timed(partial(read, backend, some))
                moving, moved = timed(partial(backend.chill, some))
                cold, _ = timed(partial(read, backend, some))
                wall = time.perf_counter()
                read(backend, some)
                wall = time.perf_counter() - wall
                objects = [path.stat().st_size for path in (Path(folder) / name).rglob("*") if path.is_file()]
                figures[name] = {
                    "texts": len(some),
                    "row_bytes_moved": moved.bytes,  # type: ignore[attr-defined]
                    "object_bytes": sum(objects),
                    "read_hot_us": round(1e6 * hot / len(some)),
                    "read_cold_us": round(1e6 * cold / len(some)),
                    "read_cold_wall_us": round(1e6 * wall / len(some)),
                    "move_us": round(1e6 * moving / len(some)),
                }
                if not key and given.all:
                    backend.chill(digests)
            with Sqlite(target) as backend:
                # Back before another place is set: there nobody would find it.
                if key or not given.all:
                    backend.warm()
            if not key and given.all:
                with Sqlite(target) as backend:
                    import apsw

                    db = apsw.Connection(str(target))
                    db.create_scalar_function("needs_a_kilburn_of_format_5", lambda: None, 0)
                    db.execute("VACUUM")
                    db.close()
                figures["bytes_all_cold_vacuumed"] = target.stat().st_size
                with Sqlite(target) as backend:
                    assert len(backend.cold()) == len(digests)
                    warming, _ = timed(backend.warm)
                    figures["warm_us"] = round(1e6 * warming / len(digests))
        print(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()

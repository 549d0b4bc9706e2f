"""What durability costs on this disk: fsync alone, a bare SQLite commit and Kilburn's commit, with and
without full sync, for one page and for many in one commit.

Baseline: a bare commit without sync. It says how much of a turn is the disk's.
"""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path

import apsw

from bulk import batches, text_of
from figures import Row, emit, parser, quantile, seconds_of
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.event import Act, Event
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page, digest_of


def _fsync(folder: Path, times: int) -> list[float]:
    with open(folder / "plain", "wb", buffering=0) as file:

        def write() -> None:
            file.write(b"x" * 4096)
            os.fsync(file.fileno())

        return seconds_of(write, times)


def _bare(folder: Path, synchronous: str, size: int, times: int) -> list[float]:
    db = apsw.Connection(str(folder / f"bare-{synchronous}-{size}.db"))
    db.pragma("journal_mode", "WAL")
    db.pragma("synchronous", synchronous)
    db.execute("CREATE TABLE page(id INTEGER PRIMARY KEY, body TEXT)")
    found = []
    for batch in batches(size * times, size):
        start = time.perf_counter()
        with db:
            db.executemany("INSERT INTO page(body) VALUES(?)", [(text_of(message),) for message in batch])
        found.append(time.perf_counter() - start)
    db.close()
    return found


def _commit(folder: Path, synchronous: str, size: int, times: int) -> list[float]:
    found = []
    with Sqlite(folder / f"store-{synchronous}-{size}.db", synchronous=synchronous) as backend:
        info = backend.segment("s", time=0.0)
        assert info is not None
        at = 0
        for head, messages in enumerate(batches(size * times, size)):
            pages, given = [], {}
            for message in messages:
                at += 1
                text = text_of(message)
                digest = digest_of(text)
                given[digest] = text
                pages.append(
                    Page(
                        id=at, digest=digest, kind=Kind.TEXT, role=Role.USER, message=at, tokens=100,
                        time=0.0, trust=Trust.USER, order=(at, 0),
                    )
                )  # fmt: skip
            ids = [page.id for page in pages]
            event = Event(number=head + 1, act=Act.ADMIT, time=0.0, pages=tuple(ids))
            start = time.perf_counter()
            backend.commit(info.number, Batch(head=head, events=[event], pages=pages, texts=given, index=ids))
            found.append(time.perf_counter() - start)
    return found


def measure(sizes: list[int], times: int) -> list[Row]:
    """Rows; the baseline is a bare commit of one page without sync."""
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        found = {("write 4 KiB and fsync", "", 1): _fsync(folder, times)}
        for size in sizes:
            for synchronous in ("OFF", "NORMAL", "FULL"):
                found["bare SQLite commit", synchronous, size] = _bare(folder, synchronous, size, times)
                found["store.commit", synchronous, size] = _commit(folder, synchronous, size, times)
    base = quantile(found["bare SQLite commit", "OFF", sizes[0]], 0.5)
    return [
        {
            "doing": doing, "synchronous": synchronous, "pages": size, "p50 ms": quantile(values, 0.5) * 1e3,
            "p95 ms": quantile(values, 0.95) * 1e3, "us a page": quantile(values, 0.5) / size * 1e6,
            "x": quantile(values, 0.5) / base,
        }
        for (doing, synchronous, size), values in found.items()
    ]  # fmt: skip


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--size", type=int, action="append", help="pages a commit; 1, 10 and 100 where none is given")
    options.add_argument("--times", type=int, default=100)
    asked = options.parse_args()
    emit("syncing", measure(asked.size or [1, 10, 100], asked.times), asked.json)


if __name__ == "__main__":
    main()

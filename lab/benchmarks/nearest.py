"""Compare search in PostgreSQL with search in a file, by words and by vectors, and measure an index of vectors.

    python lab/benchmarks/nearest.py
    python lab/benchmarks/nearest.py --counts 1000 --searches 10
    python lab/benchmarks/nearest.py --counts 30000 --vectors passages.npy
    python lab/benchmarks/nearest.py --counts 25000 --searches 50 --crowd
    python lab/benchmarks/nearest.py --counts 10000,100000 --searches 40 --each

The vectors are synthetic, around topics, or read from a file. With `--crowd` another tenant of the database has the same vectors.
`back` is the number of hits out of 50. Processor time is the sum of this process and the server. A round trip is a reply that the
client waits for. `--each` searches as a user does, by `Store.search`, one question after another, and reports the processor time
of the client and of the server separately.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

import kilburn
from figures import Row, emit, parser, quantile
from kilburn.backend import Backend, Batch
from kilburn.backends.postgres.connection import BoundedConnection
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.sqlite import Sqlite
from kilburn.kernel.resolve import resolve
from kilburn.retrieval import Ranking
from kilburn.search.scan import Scan, pack
from kilburn.search.search import RANKING, Searcher
from kilburn.search.vectors import Vectors
from kilburn.testing.stores import batch_of, start

NAME = "nearest:Ready"
SESSIONS = 10
STEP = 500
NEAREST = 10
_SOME = "parser bicycle meeting porto lisbon rain milk error module line file cache window policy branch token"
WORDS = _SOME.split()

TICK = os.sysconf("SC_CLK_TCK")


class Ready:
    """Gives vectors that are ready, by the number in a text."""

    name = NAME

    def __init__(self, queries: Any) -> None:
        self._queries, self.dimensions = queries, queries.shape[1]

    def embed(self, texts: Sequence[str]) -> Any:
        """A row for each text."""
        return np.stack([self._queries[int(text.split()[-1]) % len(self._queries)] for text in texts])


def made_up(count: int) -> Any:
    """Return unit vectors around random topics, which differ most in few directions, like the vectors of texts."""
    generator = np.random.default_rng(1)
    reach = (np.arange(1, 385) ** -0.5).astype(np.float32)
    topics = generator.normal(size=(max(8, count // 50), len(reach))).astype(np.float32) * reach
    vectors = topics[generator.integers(len(topics), size=count)]
    vectors += 0.6 * generator.normal(size=vectors.shape).astype(np.float32) * reach
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def text_of(number: int) -> str:
    """A text of a dozen words, some of which are common and some rare."""
    picked = " ".join(WORDS[number * step % len(WORDS)] for step in (1, 3, 7))
    return f"{picked} and then step {number} of item{number % 997} in src/module_{number % 89}/file{number % 13}.py"


def fill(backend: Backend, vectors: Any) -> None:
    """Passages in sessions, with a vector each."""
    done = 0
    for session in range(SESSIONS):
        segment, share = start(backend, f"session {session}"), len(vectors) // SESSIONS
        for head, at in enumerate(range(0, share, STEP)):
            many = min(STEP, share - at)
            backend.commit(segment, batch_of(head, {at + one + 1: text_of(done + at + one) for one in range(many)}))
            waiting = sorted((entry for entry, _ in backend.vectors.unembedded(NAME, many)), reverse=True)
            part = vectors[done + at : done + at + many]
            backend.vectors.add(NAME, list(zip(waiting, pack(part), strict=True)))
        done += share


def server_seconds(backend: Postgres) -> float:
    """Processor time of the server's processes for this program's connections, so far."""
    return sum(spent_by(server_processes(backend)).values())


def server_processes(backend: Postgres) -> list[int]:
    """The server's processes for this program's connections."""
    return [pid for (pid,) in backend._ask("SELECT pid FROM pg_stat_activity WHERE application_name = 'kilburn'")]


def spent_by(processes: Sequence[int]) -> dict[int, float]:
    """Seconds of processor time of each of these processes that is still there; exact where the machine counts it so, else in
    hundredths."""
    found: dict[int, float] = {}
    for pid in processes:
        with suppress(FileNotFoundError, ProcessLookupError):
            counted = Path(f"/proc/{pid}/schedstat")
            if counted.exists():
                found[pid] = int(counted.read_text().split()[0]) / 1e9
            else:
                fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
                found[pid] = (int(fields[11]) + int(fields[12])) / TICK
    return found


class Counted:
    """Counts the answers that are waited for."""

    def __init__(self) -> None:
        self.waits = 0
        whole = BoundedConnection.wait

        def wait(connection: Any, *given: Any, **more: Any) -> Any:
            self.waits += 1
            return whole(connection, *given, **more)

        BoundedConnection.wait = wait  # type: ignore[method-assign]


def measured(backend: Backend, do: Callable[[int], object], times: int, counted: Counted) -> tuple[float, float]:
    """Milliseconds of processor for each, and round trips."""
    do(0)
    there = server_seconds(backend) if isinstance(backend, Postgres) else 0.0
    before, waits = time.process_time(), counted.waits
    for number in range(1, times + 1):
        do(number)
    mine, waits = time.process_time() - before, counted.waits - waits
    there = server_seconds(backend) - there if isinstance(backend, Postgres) else 0.0
    return (mine + there) / times * 1e3, waits / times


def back(vectors: Vectors, searches: int) -> float:
    """How many of 50 come back."""
    return sum(len(vectors.nearest(f"query {number}", None, 50)) for number in range(searches)) / searches


def recall(backend: Backend, queries: Any, count: int) -> float:
    """The share of the ten nearest that are found."""
    scan = Scan(queries.shape[1])
    rows = list(backend.vectors.read(NAME))
    scan.add([row.entry for row in rows], [row.data for row in rows])
    vectors = Vectors(backend, Ready(queries))
    found = 0
    for number, query in enumerate(queries):
        hits = {passage.entry for passage, _ in vectors.nearest(f"query {number}", None, NEAREST)}
        entries, cosines = scan._products(query, np.arange(len(scan)))
        found += len(hits & set(entries[np.lexsort((entries, -cosines))[:NEAREST]].tolist()))
    return found / len(queries) / NEAREST


def rows_of(backend: Backend, kind: str, count: int, queries: Any, searches: int, counted: Counted) -> list[Row]:
    vectors = Vectors(backend, Ready(queries))
    ranking: Ranking = resolve("search.rankings", RANKING)
    infos = backend.segments()

    def both(number: int) -> object:
        searcher = Searcher(backend, ranking, vectors, infos, everywhere=True)
        return searcher.ranked(f"{text_of(number * 31)} for query {number}", 1e9, 500)

    made: list[Row] = []
    for what, do in (
        ("words", lambda number: backend.words.search(text_of(number * 31), limit=50)),
        ("vectors", lambda number: vectors.nearest(f"query {number}", None, 50)),
        ("words and vectors", both),
        ("vectors of a session", lambda number: vectors.nearest(f"query {number}", [1 + number % SESSIONS], 50)),
    ):
        processor, waits = measured(backend, do, searches, counted)  # type: ignore[arg-type]
        made.append({"search": what, "passages": count, "in": kind, "processor ms": processor, "round trips": waits})
    made[1]["recall@10"] = recall(backend, queries[: 2 * searches], count)
    made[1]["back"] = back(vectors, searches)
    return made


def each(place: str, tenant: str, kind: str, count: int, queries: Any, searches: int, only: str = "") -> list[Row]:
    """What each of so many questions to a store costs its client and the server: by words, and by words and vectors."""
    made: list[Row] = []
    for what, embedder in (("words", None), ("words and vectors", Ready(queries))):
        if only not in ("", what):
            continue
        with kilburn.open(place, tenant=tenant, embedder=embedder, tokenizer="chars/4") as store:
            backend = store.backend
            client, server, found = [], [], []
            # The first one opens what stays open.
            for number in range(searches + 1):
                processes = server_processes(backend) if isinstance(backend, Postgres) else []
                there, own = spent_by(processes), time.process_time()
                hits = store.search(f"{text_of(number * 37 % count)} for query {number}")
                client.append((time.process_time() - own) * 1e3)
                server.append(sum(now - there.get(pid, now) for pid, now in spent_by(processes).items()) * 1e3)
                found.append(len(hits))
        row: Row = {"search": what, "passages": count, "in": kind, "hits, least": min(found)}
        for whose, times in (("client", client[1:]), ("server", server[1:])):
            row |= {f"{whose} p50 ms": quantile(times, 0.5), f"{whose} p95 ms": quantile(times, 0.95)}
        made.append(row)
    return made


def compared(file: str, url: str, tenant: str, count: int, queries: Any, searches: int) -> list[Row]:
    """The same questions to a file and to PostgreSQL, there before and after the index of vectors is built."""
    rows = each(file, "default", "file", count, queries, searches)
    rows += each(url, tenant, "PostgreSQL", count, queries, searches)
    with Postgres(url, tenant=tenant) as database:
        built = database.vectors.tend()
    if built:
        rows += each(url, tenant, "PostgreSQL, index", count, queries, searches, "words and vectors")
    for row in rows:
        base = next(one for one in rows if one["search"] == row["search"])
        own, other = (float(one["client p50 ms"]) + float(one["server p50 ms"]) for one in (row, base))
        row["x"] = own / other
    return rows


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--counts", default="1000,10000,100000")
    options.add_argument("--searches", type=int, default=50)
    options.add_argument("--vectors", type=Path, help="an array of vectors, one a row (.npy); the last 100 are asked for")
    options.add_argument("--crowd", action="store_true", help="another tenant has as many vectors")
    options.add_argument("--each", action="store_true", help="each question by itself: client's and server's, p50 and p95")
    asked = options.parse_args()
    counted, rows = Counted(), []
    counts = [int(one) for one in asked.counts.split(",")]
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        server = OwnServer(Path(folder) / "s", ("fsync=off",))
        server.start()
        try:
            for count in counts:
                tenant = f"of {count}"
                whole = made_up(count + 100) if asked.vectors is None else np.load(asked.vectors, allow_pickle=False)
                vectors, queries = whole[: min(count, len(whole) - 100)], whole[-100:]
                if asked.crowd:
                    with Postgres(server.url, tenant=f"crowd of {count}") as crowd:
                        fill(crowd, vectors)
                        crowd.vectors.tend()
                with Sqlite(f"{folder}/{count}.db") as file, Postgres(server.url, tenant=tenant) as database:
                    for backend in (file, database):
                        fill(backend, vectors)
                    if asked.each:
                        rows += compared(file.path, server.url, tenant, len(vectors), queries, asked.searches)
                        continue
                    own = rows_of(file, "file", len(vectors), queries, asked.searches, counted)
                    rows += own
                    there = rows_of(database, "PostgreSQL", len(vectors), queries, asked.searches, counted)
                    before = time.perf_counter()
                    if database.vectors.tend():
                        built: Row = {"search": "building the index", "passages": count, "in": "PostgreSQL"}
                        rows.append(built | {"seconds": time.perf_counter() - before})
                        some = rows_of(database, "PostgreSQL, index", len(vectors), queries, asked.searches, counted)
                        there += some[1:]
                    for row in (*own, *there):
                        base = next(one for one in own if one["search"] == row["search"])
                        row["x"] = float(row["processor ms"]) / float(base["processor ms"])
                    rows += there
                    before = time.perf_counter()
                    database.commit(1, Batch(head=-(-len(vectors) // SESSIONS // STEP), erase=[1]))
                    gone: Row = {"search": "forgetting a page", "passages": count, "in": "PostgreSQL"}
                    rows.append(gone | {"seconds": time.perf_counter() - before})
        finally:
            server.stop("immediate")
    note = "x: client's and server's p50 together." if asked.each else "Seconds are of the wall."
    emit("nearest", rows, asked.json, note)


if __name__ == "__main__":
    main()

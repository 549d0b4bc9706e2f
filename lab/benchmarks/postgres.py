"""What PostgreSQL costs beside a file: appends and searches, in one run, on a server of its own that syncs.

    python lab/benchmarks/postgres.py
    python lab/benchmarks/postgres.py --appends 200 --plain
    python lab/benchmarks/postgres.py --beside 1000,10000,100000,300000

`--plain` sends each statement by itself, and waits for its answer: without pipeline mode. `--beside` appends to a session in a
database where 1,000 other tenants have so many pages together, and by turns in an empty one. These pages are copies of rows.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psycopg

import kilburn
from figures import Row, emit, parser
from kilburn.backends.postgres import connection
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.testing.stores import batch_of, start
from nearest import server_seconds, text_of

TENANTS = 1000
COPIED = ("counter", "segment", "content", "page", "event", "passage", "posting", "mention")
ROUNDS = 8

TEXT = "step {number}: I looked at line {line} of src/module_{number}/file.py, and nothing there explains error{number}. " * 4


def measured(do: Callable[[int], object], times: int) -> tuple[float, float]:
    """Milliseconds of the wall (the median) and of this process's processor (the mean) for each."""
    walls, before = [], time.process_time()
    for number in range(times):
        began = time.perf_counter()
        do(number)
        walls.append(time.perf_counter() - began)
    return statistics.median(walls) * 1e3, (time.process_time() - before) / times * 1e3


def run(place: str, appends: int) -> dict[str, tuple[float, float]]:
    with kilburn.open(place, window=4000, policy="lru", tokenizer="chars/4", embedder=None, tenant=os.urandom(4).hex()) as store:
        session = store.session("s")

        def append(number: int) -> None:
            role = "user" if number % 2 else "assistant"
            session.append({"role": role, "content": TEXT.format(number=number, line=number * 7)})

        found = {"append": measured(append, appends)}
        found["search"] = measured(lambda number: store.search(f"error{number} module line"), appends // 4)
        found["open"] = measured(lambda number: store.backend.segment("s", time=0.0, create=False), appends // 4)
        return found


def fill(url: str, before: int, pages: int) -> None:
    """Bring the tenants of a database from so many pages together to so many: a session each time, of which they get copies."""
    share = (pages - before) // TENANTS
    with Postgres(url, tenant=f"with {pages}") as first:
        first.commit(start(first), batch_of(0, {number + 1: text_of(number) for number in range(share)}))
    with psycopg.connect(url, autocommit=True) as sql:
        for name in COPIED:
            columns = sql.execute(
                "SELECT string_agg(quote_ident(attname), ', ') FROM pg_attribute WHERE attrelid = to_regclass(%s)"
                " AND attnum > 0 AND NOT attisdropped AND attname <> 'tenant'",
                (f"kilburn.{name}",),
            ).fetchall()[0][0]
            copy = psycopg.sql.SQL(
                "INSERT INTO {table}(tenant, {columns}) SELECT {from_} + copy, {columns} FROM {table},"
                " generate_series(1, {copies}) AS copy WHERE tenant = (SELECT id FROM kilburn.tenant WHERE name = {name})"
            )
            sql.execute(
                copy.format(
                    table=psycopg.sql.Identifier("kilburn", name),
                    columns=psycopg.sql.SQL(columns),
                    from_=psycopg.sql.Literal(1_000_000 + before),
                    copies=psycopg.sql.Literal(TENANTS - 1),
                    name=psycopg.sql.Literal(f"with {pages}".encode()),
                )
            )
        sql.execute("VACUUM (ANALYZE)")


def appending(url: str, appends: int, number: int) -> tuple[float, float]:
    """Milliseconds of this process's processor and of the server's for an append to a session of a tenant of its own."""
    with kilburn.open(url, window=4000, policy="lru", tokenizer="chars/4", embedder=None, tenant=f"own {number}") as store:
        session = store.session("s")
        backend = store.backend
        assert isinstance(backend, Postgres)

        def append(number: int) -> None:
            session.append({"role": "user", "content": TEXT.format(number=number, line=number * 7)})

        for number in range(20):
            append(number)
        there, own = server_seconds(backend), time.process_time()
        for number in range(20, 20 + appends):
            append(number)
        own = time.process_time() - own
        return own / appends * 1e3, (server_seconds(backend) - there) / appends * 1e3


def beside(counts: list[int], appends: int) -> list[Row]:
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        servers = [OwnServer(Path(folder) / name, ("fsync=off",)) for name in ("e", "f")]
        try:
            for server in servers:
                server.start()
            before = 0
            for count in counts:
                fill(servers[1].url, before, count)
                before, found = count, []
                for number in range(ROUNDS):
                    turn = [appending(server.url, appends // ROUNDS, 1000 * count + number) for server in servers]
                    found.append(turn)
                own, there = ([statistics.median(turn[which][part] for turn in found) for which in (0, 1)] for part in (0, 1))
                ratio = sum(sum(turn[1]) for turn in found) / sum(sum(turn[0]) for turn in found)
                row: Row = {"doing": f"append beside {count:,} pages of {TENANTS:,} tenants"}
                rows.append(
                    row | {"processor ms": own[1], "server's": there[1], "in an empty one": own[0], "": there[0], "x": ratio}
                )
        finally:
            for server in servers:
                server.stop("immediate")
    return rows


def rows_of(appends: int) -> list[Row]:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        server = OwnServer(Path(folder) / "s")
        server.start()
        try:
            file = run(f"{folder}/agent.db", appends)
            both = (("file", file), ("PostgreSQL", run(server.url, appends)))
        finally:
            server.stop("immediate")
    return [
        {"in": kind, "doing": what, "wall ms, median": wall, "processor ms": processor, "x": wall / file[what][0]}
        for kind, found in both
        for what, (wall, processor) in found.items()
    ]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--appends", type=int, default=400)
    options.add_argument("--plain", action="store_true", help="without pipeline mode")
    options.add_argument("--beside", help="pages of other tenants, such as 1000,100000")
    asked = options.parse_args()
    if asked.beside:
        counts = sorted(int(one) for one in asked.beside.split(","))
        note = "Processor time: medians of the rounds. x: client's and server's together, in the one by those in the other."
        emit("postgres", beside(counts, asked.appends), asked.json, note)
        return
    if asked.plain:
        connection.BoundedConnection.pipeline = lambda self: nullcontext()  # type: ignore[method-assign]
    emit("postgres", rows_of(asked.appends), asked.json, "Processor time is of this process, without the server's.")


if __name__ == "__main__":
    main()

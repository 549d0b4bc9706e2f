"""What a message takes on the disk, in a file and in PostgreSQL: rows, indexes, TOAST, the write-ahead log, and a vector.

    python lab/benchmarks/storage.py
    python lab/benchmarks/storage.py --messages 20000

`anew` is what the tables take when they have just been written anew (`VACUUM FULL`): without the room of rows that were changed.

A message is a page of 400 characters of Python's own library, and half of the pages are calls with reasoning. Each turn is one
append, which is one transaction. Vectors have 384 numbers, as minilm's, and are random: what they say does not change their size.
"""

from __future__ import annotations

import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import apsw
import psycopg

import kilburn
from corpus import SIZE, fill, turns
from figures import Row, emit, parser
from kilburn.backend import Backend
from kilburn.backends.postgres.server import OwnServer

NUMBERS = 384
"""Numbers of a vector; each takes a byte, and there is a scale of four bytes."""

ALL, VECTOR = "all, without vectors", "a vector (bytes each)"

TABLES = """
SELECT relname, pg_relation_size(oid), pg_indexes_size(oid),
    coalesce(pg_total_relation_size(nullif(reltoastrelid, 0)), 0)
FROM pg_class WHERE relkind = 'r' AND relnamespace = 'kilburn'::regnamespace ORDER BY pg_total_relation_size(oid) DESC
"""

LOG = "SELECT pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint"


def fill_store(place: str, messages: int) -> None:
    with kilburn.open(place, window=8000, policy="hybrid", tokenizer="chars/4", embedder=None) as store:
        fill(store.session("s"), turns(SIZE), messages, batch=1)


def vectors(backend: Backend) -> int:
    """Store a vector for each passage; returns how many."""
    chance, count = random.Random(1), 0
    while rows := backend.vectors.unembedded("random", 500):
        backend.vectors.add("random", [(entry, chance.randbytes(NUMBERS + 4)) for entry, _ in rows])
        count += len(rows)
    return count


def of_file(folder: Path, messages: int) -> Iterator[Row]:
    place = folder / "agent.db"
    fill_store(str(place), messages)
    with kilburn.open(str(place), embedder=None) as store:
        before = _parts(place)
        count = vectors(store.backend)
    after = _parts(place)
    for name, size in sorted(before.items(), key=lambda part: -part[1]):
        if size > 10 * messages:
            yield {"in": "file", "part": name, "bytes a message": size / messages}
    yield {"in": "file", "part": ALL, "bytes a message": sum(before.values()) / messages}
    size = sum(after.values()) - sum(before.values())
    yield {"in": "file", "part": VECTOR, "bytes a message": size / count}


def _parts(place: Path) -> dict[str, int]:
    """The bytes of each table with its indexes."""
    database = apsw.Connection(str(place))
    try:
        database.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()
        select = (
            "SELECT coalesce(tbl_name, stat.name), sum(pgsize) FROM dbstat AS stat LEFT JOIN sqlite_schema USING(name) GROUP BY 1"
        )
        return dict(database.execute(select).fetchall())
    finally:
        database.close()


def of_server(folder: Path, messages: int) -> Iterator[Row]:
    server = OwnServer(folder / "s")
    server.start()
    try:
        with kilburn.open(server.url, embedder=None), psycopg.connect(server.url, autocommit=True) as sql:
            # What is written for the schema is nobody's message.
            before = _log(sql)
            fill_store(server.url, messages)
            log = _log(sql) - before
            sql.execute("VACUUM (ANALYZE)")
            tables = sql.execute(TABLES).fetchall()
            sql.execute("VACUUM FULL")
            anew = {name: sum(sizes) for name, *sizes in sql.execute(TABLES).fetchall()}
            with kilburn.open(server.url, embedder=None) as store:
                tight = sql.execute(TABLES).fetchall()
                before = _log(sql)
                count = vectors(store.backend)
                vector_log = _log(sql) - before
            sql.execute("VACUUM (ANALYZE)")
            fresh = sql.execute(TABLES).fetchall()
    finally:
        server.stop("immediate")
    for name, rows, indexes, toast in tables:
        if rows + indexes + toast > 10 * messages:
            row: Row = {"in": "PostgreSQL", "part": name, "bytes a message": (rows + indexes + toast) / messages}
            yield row | {
                "rows": rows / messages,
                "indexes": indexes / messages,
                "TOAST": toast / messages,
                "anew": anew[name] / messages,
            }
    sums = [sum(column) / messages for column in zip(*(row[1:] for row in tables), strict=True)]
    row = {"in": "PostgreSQL", "part": ALL, "bytes a message": sum(sums)}
    row |= {"rows": sums[0], "indexes": sums[1], "TOAST": sums[2], "anew": sum(anew.values()) / messages}
    yield row | {"log": log / messages}
    grown = [(sum(a) - sum(b)) / count for a, b in zip(*_columns(fresh, tight), strict=True)]
    row = {"in": "PostgreSQL", "part": VECTOR, "bytes a message": sum(grown)}
    yield row | {"rows": grown[0], "indexes": grown[1], "TOAST": grown[2], "log": vector_log / count}


def _columns(*tables: list[tuple[str, int, int, int]]) -> list[list[tuple[int, ...]]]:
    return [list(zip(*(row[1:] for row in table), strict=True)) for table in tables]


def _log(sql: psycopg.Connection[tuple[int]]) -> int:
    found = sql.execute(LOG).fetchone()
    assert found is not None
    return found[0]


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--messages", type=int, default=5000)
    asked = options.parse_args()
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        rows = [*of_file(Path(folder), asked.messages), *of_server(Path(folder), asked.messages)]
    whole = {row["part"]: row["bytes a message"] for row in rows if row["in"] == "file"}
    for row in rows:
        if row["part"] in (ALL, VECTOR):
            row["x"] = float(row["bytes a message"]) / float(whole[row["part"]])
    note = (
        f"{asked.messages:,} messages of {SIZE} characters, each turn of two an append. Tables of under 10 bytes are in the sum."
    )
    emit("storage", rows, asked.json, note)


if __name__ == "__main__":
    main()

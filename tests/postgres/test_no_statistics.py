"""What PostgreSQL reads before autovacuum has looked at a table: a plan that was made in an empty one is kept as it grows."""

from __future__ import annotations

import psycopg
import pytest

from kilburn.backends.postgres.store import Postgres
from kilburn.testing.stores import batch_of
from waiting import until

pytestmark = pytest.mark.slow

OTHERS = 4000
"""Sessions, words and vectors that come in between."""

_FILL = """
SET session_replication_role = replica;
INSERT INTO kilburn.segment SELECT tenant, id + n, name || convert_to(n::text, 'UTF8'), created, kind, owner, seal, used, head,
    pages, tokens, passages, characters, counters_seal, epoch, writer
    FROM (SELECT * FROM kilburn.segment WHERE name = 'first') AS first, generate_series(1000, 1000 + {others}) AS n;
INSERT INTO kilburn.posting SELECT tenant, word, block + (n::bigint << 40), lows
    FROM (SELECT * FROM kilburn.posting LIMIT 1) AS one, generate_series(1, {others}) AS n;
INSERT INTO kilburn.page
    SELECT tenant, segment + n, id, content, extra, call, place, pinned, importance, valid_until, state_seal,
        first_passage, last_passage, record, seal
    FROM (SELECT page.* FROM kilburn.page JOIN kilburn.segment ON segment.id = page.segment WHERE name = 'first' LIMIT 1) AS one,
    generate_series(1000, 1000 + {others}) AS n;
INSERT INTO kilburn.vector(tenant, embedder, id, entry, data, seal)
    SELECT tenant, embedder, id + 1000 + n, entry + (n::bigint << 40), data, seal
    FROM (SELECT * FROM kilburn.vector LIMIT 1) AS one, generate_series(1, {others}) AS n;
"""


def use(backend: Postgres, name: str) -> None:
    """A session of some messages, and what is done with it."""
    segment = backend.begin(name, batch_of(0, {1: "the river carries sand"}), time=1.0).number
    for head in range(1, 9):
        backend.commit(segment, batch_of(head, {head + 1: f"the river carries gold {head}"}))
        keys = [(segment, page) for page in range(1, head + 1)]
        assert len(backend.read(keys)) == head
        entries = [passage.entry for passage in backend.words.entries(keys)[segment, head]]
        backend.vectors.add("hashing(8)", [(entry, b"\0\0\x80\x3f" + bytes(8)) for entry in entries])
        assert backend.segments(name) == []


def test_a_write_reads_nobody_elses_rows_in_tables_without_statistics(url: str) -> None:
    """Counted are the entries of indexes that are read, by the server."""
    with Postgres(f"{url}&connections=1") as backend:
        use(backend, "first")
        with psycopg.connect(url, autocommit=True) as connection:
            for statement in _FILL.format(others=OTHERS).split(";\n"):
                connection.execute(statement)
        use(backend, "second")
    with psycopg.connect(url, autocommit=True) as connection:
        # What a connection has read is known when it has ended.
        ended = "SELECT count(*) = 1 FROM pg_stat_activity WHERE datname = current_database() AND backend_type = 'client backend'"
        until(lambda: connection.execute(ended).fetchone() == (True,))
        read: dict[str, int] = dict(
            connection.execute(
                "SELECT relname, sum(idx_tup_read)::bigint FROM pg_stat_user_indexes WHERE schemaname = 'kilburn' GROUP BY 1"
            ).fetchall()
        )
    assert read["segment"] > 0
    assert {table: rows for table, rows in read.items() if rows >= OTHERS} == {}

"""Where a store in PostgreSQL comes to an end with many tenants: a simulated day, from what a message was measured to take.

    python lab/benchmarks/tenants.py
    python lab/benchmarks/tenants.py --tenants 1000000 --workers 8 --day 5

First some messages are appended to a server of its own, which gives bytes, log and processor time a message, and what it takes to
write tables anew after a forgetting. Then tenants are drawn: how much each says is heavy-tailed (lognormal), so that some say a
thousand times as much as others, and the day has a peak. With workers, tenants are laid on shards by a hash, as Citus does, and
the fullest worker counts. A wipe writes the tables of all tenants anew and takes away what all of them have forgotten: up to
1 GiB each forgetting is one, above that there is one a day. What is not measured is an option, and stands in the note: nobody has
run a million tenants here.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import psycopg

import kilburn
from corpus import SIZE, fill, turns
from figures import Row, emit, parser
from kilburn.backends.postgres.connection import CONNECTIONS
from kilburn.backends.postgres.erasing import MAX_REWRITE_BYTES, WORDS
from kilburn.backends.postgres.server import OwnServer
from storage import LOG, TABLES

SPREAD = 2.0
"""Sigma of the lognormal: the busiest hundredth of the tenants says about two fifths of all."""

PEAK = 2.5
"""How many times the mean a second of the busiest hour has."""

SHARDS = 32
"""Shards of a worker."""

DRAWN = 200_000
"""Tenants that are drawn; a larger number is drawn so often, and multiplied."""


class Measured(NamedTuple):
    """What a message takes: bytes in the tables and in their log, milliseconds of the server's and of the gateway's processor;
    seconds of the server's processor to write a gigabyte of tables anew; how many tables there are, whatever the tenants."""

    bytes: float
    log: float
    server: float
    gateway: float
    anew: float
    tables: int


class Node(NamedTuple):
    """What one server has to offer."""

    cores: float
    gigabytes: float
    log: float
    connections: int
    lock: float


def measured(messages: int, bulk: int) -> Measured:
    with tempfile.TemporaryDirectory(prefix="pg", dir="/tmp", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o711)
        server = OwnServer(Path(folder) / "s")
        server.start()
        try:
            with psycopg.connect(server.url, autocommit=True) as sql:
                return _measured(server, sql, messages, bulk)
        finally:
            server.stop("immediate")


def _measured(server: OwnServer, sql: psycopg.Connection[tuple[int]], messages: int, bulk: int) -> Measured:
    with kilburn.open(server.url, window=8000, policy="hybrid", tokenizer="chars/4", embedder=None) as store:
        session, source = store.session("s"), turns(SIZE)
        fill(session, source, 10, batch=1)
        log, busy, own = sql.execute(LOG).fetchall()[0][0], _busy(server), time.process_time()
        fill(session, source, messages + 10, batch=1)
        own, busy = time.process_time() - own, _busy(server) - busy
        log = sql.execute(LOG).fetchall()[0][0] - log
        fill(session, source, messages + bulk + 10, batch=250)
        before = _busy(server)
        for name in WORDS:
            sql.execute(psycopg.sql.SQL("VACUUM (FULL) {}").format(psycopg.sql.Identifier("kilburn", name)))
        anew = _busy(server) - before
        sql.execute("VACUUM (FULL)")
        sizes = [sum(row[1:]) for row in sql.execute(TABLES).fetchall()]
    size = sum(sizes)
    return Measured(
        size / (messages + bulk), log / messages, 1e3 * busy / messages, 1e3 * own / messages, anew / (size / 1e9), len(sizes)
    )


def _busy(server: OwnServer) -> float:
    """Seconds of processor that the server's processes have taken, those that have ended too."""
    parent = (server.data / "postmaster.pid").read_text(encoding="ascii").split()[0]
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if path.parent.name == parent:
            ticks += sum(map(int, fields[11:15]))
        elif fields[1] == parent:
            ticks += sum(map(int, fields[11:13]))
    return ticks / 100


def fullest(tenants: int, workers: int, chance: random.Random) -> float:
    """The share of all that is said which falls on the fullest worker."""
    drawn = min(tenants, DRAWN)
    shards = [0.0] * (workers * SHARDS)
    times = math.ceil(tenants / drawn)
    for number in range(drawn):
        says = chance.lognormvariate(0, SPREAD)
        for again in range(times):
            digest = hashlib.blake2b(f"{number}/{again}".encode(), digest_size=4).digest() if workers > 1 else b"\0"
            shards[int.from_bytes(digest, "big") % len(shards)] += says
    loads = [sum(shards[first::workers]) for first in range(workers)]
    return max(loads) / sum(loads)


def day(tenants: int, workers: int, asked: argparse.Namespace, known: Measured, node: Node) -> Row:
    """What the fullest worker has to bear, and what it lacks first."""
    share = fullest(tenants, workers, random.Random(1))
    messages = tenants * asked.day
    appends = PEAK * messages / 86_400
    tables = messages * asked.keep * known.bytes / 1e9
    size = share * tables
    lock = size * known.anew * (1 if size * 1e9 > MAX_REWRITE_BYTES else max(1, tenants * share * asked.forgets))
    gateways = max(1, math.ceil(appends * known.gateway / 1e3 / 0.7))
    takes = {
        "processor": appends * share * known.server / 1e3 / (0.7 * node.cores),
        "disk": tables * share * 2 / node.gigabytes,
        "log": appends * share * known.log / 1e6 / node.log,
        "connections": gateways * CONNECTIONS / node.connections,
        "wiping": lock / node.lock,
    }
    first = max(takes, key=takes.__getitem__)
    return {
        "tenants": f"{tenants:,}",
        "workers": workers,
        "messages/s": appends,
        "cores": appends * share * known.server / 1e3,
        "GB": tables * share,
        "log MB/s": appends * share * known.log / 1e6,
        "gateways": gateways,
        "connections": gateways * CONNECTIONS,
        "locked s/day": lock,
        "tables": known.tables,
        "fullest": share * workers,
        "first wall": first,
        "of it": takes[first],
    }


def main() -> None:
    options = parser(__doc__ or "")
    options.add_argument("--tenants", type=int, action="append", help="1000, 10000, 100000 and 1000000 where none is given")
    options.add_argument("--messages", type=int, default=2000, help="messages that are measured")
    options.add_argument("--bulk", type=int, default=20_000, help="further messages, to write larger tables anew")
    options.add_argument(
        "--workers", type=int, action="append", help="servers that share the tenants; 1 and 16 where none is given"
    )
    options.add_argument("--day", type=float, default=20.0, help="messages of a tenant and a day, the mean")
    options.add_argument("--keep", type=float, default=90.0, help="days that a message is kept")
    options.add_argument("--forgets", type=float, default=0.001, help="forgettings of a tenant and a day")
    options.add_argument("--cores", type=float, default=16)
    options.add_argument("--disk", type=float, default=4000, help="gigabytes; half of them stay free for writing tables anew")
    options.add_argument("--log", type=float, default=200, help="megabytes a second that the disk takes of the log")
    options.add_argument("--connections", type=int, default=500)
    options.add_argument("--lock", type=float, default=3600, help="seconds of a day that tables may be locked")
    asked = options.parse_args()
    known, node = measured(asked.messages, asked.bulk), Node(asked.cores, asked.disk, asked.log, asked.connections, asked.lock)
    numbers = asked.tenants or [1000, 10_000, 100_000, 1_000_000]
    rows = [day(tenants, workers, asked, known, node) for workers in asked.workers or [1, 16] for tenants in numbers]
    rows = [{**row, "x": float(row["of it"]) / float(rows[0]["of it"])} for row in rows]
    note = (
        f"Measured over {asked.messages:,} messages: {known.bytes:,.0f} bytes, {known.log:,.0f} of log, {known.server:.2f} ms of "
        f"the server's processor and {known.gateway:.2f} of the gateway's each; and over {asked.bulk:,} more, {known.anew:,.1f} "
        f"s of the server to write a GB anew. Assumed: {asked.day:g} messages a day of a tenant, kept {asked.keep:g} days, "
        f"{asked.forgets:g} forgettings a day, a peak of {PEAK:g}; a server of {node.cores:g} cores, {node.gigabytes:g} GB, "
        f"{node.log:g} MB/s of log, {node.connections} connections, and {node.lock:g} s a day for wiping. of it: how much of "
        f"that is taken; above 1 it does not do."
    )
    emit("tenants", rows, asked.json, note)


if __name__ == "__main__":
    main()

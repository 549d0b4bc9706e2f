"""Counts what the gateways over one database let in together.

What was let in is counted by a function of the database, so it takes one round trip, and its clock is the database's. Its tables
are not logged: nothing waits for the disk, and after a crash of the server everyone begins with full allowances.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping, Sequence

from kilburn.backends.counting import IDLE, LEASE, Demand, Ruling
from kilburn.backends.postgres.connection import Database, checked_url, split_connections
from kilburn.backends.postgres.statements import ServerAnswer, Statements

_TAKE = "SELECT * FROM kilburn.take(%s, %s, %s::bytea[], %s, %s::bigint[], %s::bigint[], %s::bytea[], %s::bigint[], %s::bigint[])"

_OLD = (
    "DELETE FROM kilburn.running WHERE until < extract(epoch FROM clock_timestamp()) - %s",
    "DELETE FROM kilburn.allowance WHERE name IN (SELECT name FROM kilburn.allowance"
    " WHERE full_at < extract(epoch FROM clock_timestamp()) - %s ORDER BY name LIMIT 1000 FOR UPDATE SKIP LOCKED)",
)


PATIENCE = 5.0
"""Seconds to wait for a connection, or for another gateway."""


class PostgresTurnstile:
    """Counts in a database, for gateways on any number of machines. Its store must have been opened for writing before.

    Args:
        url: see `kilburn.backends.postgres.store.Postgres`.
    """

    def __init__(self, url: str) -> None:
        # The store's connections: a program has as many as its URL says, whatever it does with them.
        _, connections = split_connections(url)
        self._db = Database(checked_url(url), patience=PATIENCE, durable=False, connections=connections)
        self._gateway, self._tidied = secrets.token_bytes(8), -IDLE

    def count(self, requests: Sequence[Sequence[Demand]], answering: Mapping[bytes, int]) -> list[Ruling]:
        """See `Turnstile`."""
        rows = [(request, place, *demand) for request, demands in enumerate(requests) for place, demand in enumerate(demands)]
        columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], [], []]
        values = (self._gateway, LEASE, list(answering), list(answering.values()), *columns)

        tidies = time.monotonic() >= self._tidied + IDLE
        if tidies:
            self._tidied = time.monotonic()

        def do(statements: Statements) -> ServerAnswer:
            if tidies:
                for delete in _OLD:
                    statements.send(delete, IDLE)
            return statements.send(_TAKE, *values)

        # What it answers is read when all was sent: it is one round trip.
        answer = self._db.write("counting", do, single=True)
        rulings = {request: Ruling(refused, wait) for request, refused, wait in answer.fetchall()}
        return [rulings.get(request, Ruling()) for request in range(len(requests))]

    def close(self) -> None:
        """See `Turnstile`."""
        if self._db.closed:
            return
        delete = "DELETE FROM kilburn.running WHERE gateway = %s"
        try:
            self._db.write("counting", lambda statements: statements.send(delete, self._gateway))
        finally:
            self._db.close()

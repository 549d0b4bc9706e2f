"""What gateways over one database share besides the store: what they have let in together, and a place for the keys that let in.

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

SHARED = """
-- The keys of the gateways over this database. `changed` counts the changes: whoever knows some reads what came later.
CREATE TABLE kilburn.key(
    name text PRIMARY KEY,
    changed bigint NOT NULL UNIQUE,
    body bytea NOT NULL
);

-- What each key and end user has taken of its requests per minute: the time at which all would be there again.
CREATE UNLOGGED TABLE kilburn.allowance(
    name bytea PRIMARY KEY,
    at double precision NOT NULL
) WITH (fillfactor = 50);

-- How many requests of each the gateways are answering, and until when that holds if a gateway says nothing more.
-- Who changes or sums up the rows of a name has locked its allowance.
CREATE UNLOGGED TABLE kilburn.running(
    name bytea NOT NULL,
    gateway bytea NOT NULL,
    count bigint NOT NULL,
    until double precision NOT NULL,
    PRIMARY KEY(name, gateway)
) WITH (fillfactor = 50);
CREATE INDEX running_gateway ON kilburn.running(gateway);

-- See kilburn.backends.counting.Turnstile.count: demands come with the number of their request, and their own in it.
CREATE FUNCTION kilburn.take(
    mine bytea, lease double precision, held_names bytea[], held_counts bigint[],
    requests bigint[], places bigint[], names bytea[], rates bigint[], mosts bigint[]
) RETURNS TABLE(request bigint, refused bigint, wait double precision) LANGUAGE plpgsql AS $$
DECLARE
    moment double precision;
    known double precision;
    there bigint;
    demand record;
BEGIN
    -- Everyone locks in the same order.
    INSERT INTO kilburn.allowance AS old(name, at)
        SELECT each.name, 0 FROM (SELECT DISTINCT one AS name FROM unnest(names || held_names) AS one) AS each ORDER BY each.name
        ON CONFLICT ON CONSTRAINT allowance_pkey DO UPDATE SET at = old.at;
    moment := extract(epoch FROM clock_timestamp());
    INSERT INTO kilburn.running AS r(name, gateway, count, until)
        SELECT held.name, mine, held.count, moment + lease FROM unnest(held_names, held_counts) AS held(name, count)
        ON CONFLICT ON CONSTRAINT running_pkey DO UPDATE SET count = excluded.count;
    DELETE FROM kilburn.running AS r WHERE r.gateway = mine AND r.count = 0;
    UPDATE kilburn.running AS r SET until = moment + lease WHERE r.gateway = mine;
    FOR request IN SELECT DISTINCT one FROM unnest(requests) AS one ORDER BY one LOOP
        refused := -1;
        wait := 0;
        FOR demand IN SELECT * FROM unnest(requests, places, names, rates, mosts) AS one(request, place, name, rate, most)
                WHERE one.request = take.request ORDER BY one.place LOOP
            IF demand.rate > 0 THEN
                SELECT a.at INTO known FROM kilburn.allowance AS a WHERE a.name = demand.name;
                wait := greatest(0, known - moment - (greatest(1, demand.rate / 4.0) - 1) * 60.0 / demand.rate);
                IF wait > 0 THEN
                    refused := demand.place;
                    EXIT;
                END IF;
            END IF;
            IF demand.most > 0 THEN
                SELECT coalesce(sum(r.count), 0) INTO there FROM kilburn.running AS r
                    WHERE r.name = demand.name AND (r.until > moment OR r.gateway = mine);
                IF there >= demand.most THEN
                    refused := demand.place;
                    EXIT;
                END IF;
            END IF;
        END LOOP;
        IF refused = -1 THEN
            FOR demand IN SELECT * FROM unnest(requests, places, names, rates, mosts) AS one(request, place, name, rate, most)
                    WHERE one.request = take.request LOOP
                IF demand.rate > 0 THEN
                    UPDATE kilburn.allowance AS a SET at = greatest(a.at, moment) + 60.0 / demand.rate WHERE a.name = demand.name;
                END IF;
                IF demand.most > 0 THEN
                    INSERT INTO kilburn.running AS r(name, gateway, count, until) VALUES(demand.name, mine, 1, moment + lease)
                        ON CONFLICT ON CONSTRAINT running_pkey DO UPDATE SET count = r.count + 1;
                END IF;
            END LOOP;
        END IF;
        RETURN NEXT;
    END LOOP;
END $$;
"""
"""A part of the schema: see `kilburn.backends.postgres.schema`."""

TABLES = ("key", "allowance", "running")

_TAKE = "SELECT * FROM kilburn.take(%s, %s, %s::bytea[], %s, %s::bigint[], %s::bigint[], %s::bytea[], %s::bigint[], %s::bigint[])"

_OLD = (
    "DELETE FROM kilburn.running WHERE until < extract(epoch FROM clock_timestamp()) - %s",
    "DELETE FROM kilburn.allowance WHERE name IN (SELECT name FROM kilburn.allowance"
    " WHERE at < extract(epoch FROM clock_timestamp()) - %s ORDER BY name LIMIT 1000 FOR UPDATE SKIP LOCKED)",
)


class PostgresTurnstile:
    """Counts in a database, for gateways on any number of machines. Its store must have been opened for writing before.

    Args:
        url: see `kilburn.backends.postgres.store.Postgres`.
        patience: seconds to wait for a connection, or for another gateway.
    """

    def __init__(self, url: str, patience: float = 5.0) -> None:
        # The store's connections: a program has as many as its URL says, whatever it does with them.
        _, connections = split_connections(url)
        self._db = Database(checked_url(url), patience=patience, durable=False, connections=connections)
        self._gateway, self._tidied = secrets.token_bytes(8), -IDLE

    def count(self, asked: Sequence[Sequence[Demand]], held: Mapping[bytes, int]) -> list[Ruling]:
        """See `Turnstile`."""
        rows = [(request, place, *demand) for request, demands in enumerate(asked) for place, demand in enumerate(demands)]
        columns = [list(column) for column in zip(*rows, strict=True)] if rows else [[], [], [], [], []]
        given = (self._gateway, LEASE, list(held), list(held.values()), *columns)

        tidies = time.monotonic() >= self._tidied + IDLE
        if tidies:
            self._tidied = time.monotonic()

        def do(statements: Statements) -> ServerAnswer:
            if tidies:
                for delete in _OLD:
                    statements.send(delete, IDLE)
            return statements.send(_TAKE, *given)

        # What it answers is read when all was sent: it is one round trip.
        answer = self._db.write("counting", do)
        rulings = {request: Ruling(refused, wait) for request, refused, wait in answer.fetchall()}
        return [rulings.get(request, Ruling()) for request in range(len(asked))]

    def close(self) -> None:
        """See `Turnstile`."""
        if self._db.closed:
            return
        delete = "DELETE FROM kilburn.running WHERE gateway = %s"
        try:
            self._db.write("counting", lambda statements: statements.send(delete, self._gateway))
        finally:
            self._db.close()

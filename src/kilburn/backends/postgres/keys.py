"""The keys of gateways in a database, by their names; what a key is, `kilburn.gateway.keys` says."""

from __future__ import annotations

import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from kilburn.backends.postgres import schema
from kilburn.backends.postgres.connection import Database, checked_url, connected, is_pooled, split_connections
from kilburn.backends.postgres.statements import Statements

_INSERT = (
    "INSERT INTO kilburn.key(name, changed, body) VALUES(%s, %s, %s)"
    " ON CONFLICT(name) DO UPDATE SET changed = excluded.changed, body = excluded.body"
)


LOOK = 10.0
"""Seconds after which keys are read again though nobody has said that they were changed."""

POOLED_LOOK = 1.0
"""The same behind a pooler, which passes no notifications on."""


class StoredKeys:
    """Where the keys are. The schema is made, or brought up to date, as by a store that is opened.

    Raises:
        StoreError: the database cannot be reached, or read.
    """

    def __init__(self, url: str) -> None:
        _, connections = split_connections(url)
        url = self._url = checked_url(url)
        self._db = Database(url, patience=5.0, durable=True, connections=connections)
        try:
            with connected(url, "reading keys") as connection:
                schema.prepare_schema(connection, self._db.shown)
        except BaseException:
            self._db.close()
            raise

    def since(self, changed: int) -> list[tuple[int, str, bytes]]:
        """The keys that were changed after this change, in order: the number of each one's change, its name, and what it is."""
        select = "SELECT changed, name, body FROM kilburn.key WHERE changed > %s ORDER BY changed"
        return self._db.rows("reading keys", select, changed)

    def changes(self, ended: threading.Event, look: float = LOOK) -> Iterator[None]:
        """Yield at once, and whenever keys may have been changed: each program that changes them says so.

        Args:
            ended: ends this within a second.
            look: seconds after which it yields without being told.

        Raises:
            StoreError: the connection is lost.
        """
        with connected(self._url, "waiting for keys") as connection:
            pause = POOLED_LOOK if is_pooled(connection) else look
            if pause == look:
                connection.execute("LISTEN kilburn_keys")
            poll = select.poll()
            poll.register(connection.fileno(), select.POLLIN)
            while not ended.is_set():
                yield
                until, is_told = time.monotonic() + pause, False
                while not is_told and not ended.is_set() and time.monotonic() < until:
                    is_told = bool(poll.poll(1000 * min(pause, 1.0)))
                if is_told:
                    connection.pgconn.consume_input()
                    while connection.pgconn.notifies() is not None:
                        pass

    @contextmanager
    def changing(self) -> Iterator[dict[str, bytes]]:
        """Yield all keys by name, and write those that differ when the block ends. Other writers of keys wait meanwhile."""
        with self._db.together():
            last, stored_bodies = self._db.write("changing keys", self._locked)
            bodies = dict(stored_bodies)
            yield bodies
            changed = [(name, body) for name, body in bodies.items() if stored_bodies.get(name) != body]

            def write(statements: Statements) -> None:
                for number, (name, body) in enumerate(changed, last + 1):
                    statements.send(_INSERT, name, number, body)
                statements.send("SELECT pg_notify('kilburn_keys', '')")

            self._db.write("changing keys", write)

    @staticmethod
    def _locked(statements: Statements) -> tuple[int, dict[str, bytes]]:
        statements.send("LOCK TABLE kilburn.key IN SHARE ROW EXCLUSIVE MODE")
        rows = statements.rows("SELECT changed, name, body FROM kilburn.key ORDER BY changed")
        return max((changed for changed, _, _ in rows), default=0), {name: body for _, name, body in rows}

    def close(self) -> None:
        """Give the connections back; idempotent."""
        self._db.close()

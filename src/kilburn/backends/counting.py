"""Counts the requests of several gateways together, in a file on their machine.

Keys and users are named by digests: see `kilburn.gateway.tally`. `kilburn.backends.postgres.counting` counts in a database.
"""

from __future__ import annotations

import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import apsw

from kilburn.backends.connection import translate_errors

LEASE = 10.0
"""Seconds for which the running requests of a silent gateway still count."""

IDLE = 3600.0
"""Seconds after which the rows of an idle name are deleted."""


class Demand(NamedTuple):
    """The limits of one key or user for a request: see `kilburn.gateway.limits.RequestBounds`.

    Args:
        name: digest of the key or user.
        rate: allowed requests per minute, 0 for any number; a quarter of them may come at once.
        limit: allowed concurrent requests, 0 for any number.
    """

    name: bytes
    rate: int
    limit: int


class Ruling(NamedTuple):
    """Whether a request is admitted.

    Args:
        refused: index of the demand that exceeds its limit; -1 if the request is admitted.
        wait: seconds until the rate allows another request; 0 if there are too many concurrent ones.
    """

    refused: int = -1
    wait: float = 0.0


class Turnstile(Protocol):
    """Counts the requests of one gateway and of the others. One thread uses it at a time."""

    def count(self, requests: Sequence[Sequence[Demand]], answering: Mapping[bytes, int]) -> list[Ruling]:
        """Admit requests, each with all of its demands or not at all, and renew this gateway's lease.

        Args:
            requests: the demands of each request.
            answering: how many requests of a name this gateway is answering apart from these, where that may have changed.

        Raises:
            StoreError: the requests were not counted, or it is unknown whether they were: repeat the true numbers in
                `answering`.
        """
        ...

    def close(self) -> None:
        """Remove the gateway's counts; idempotent."""
        ...


TABLES = """
CREATE TABLE IF NOT EXISTS allowance(name BLOB PRIMARY KEY, at REAL NOT NULL) STRICT, WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS running(
    name BLOB NOT NULL, gateway BLOB NOT NULL, count INTEGER NOT NULL, until REAL NOT NULL, PRIMARY KEY(name, gateway)
) STRICT, WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS running_gateway ON running(gateway);
"""


MAX_ATTEMPTS, ATTEMPT_PAUSE = 100, 0.05
"""Attempts to open the file while other processes create it, and the seconds between two."""


class FileTurnstile:
    """Counts in a file, for gateways on one machine. The file need not survive a power cut.

    Args:
        path: the file; the first count creates it if there is none.
        clock: seconds since the epoch.
    """

    def __init__(self, path: str | os.PathLike[str], clock: Callable[[], float] = time.time) -> None:
        self._path, self._clock, self._lock = os.fspath(path), clock, threading.Lock()
        self._gateway, self._closed, self._tidied = secrets.token_bytes(8), False, 0.0
        self._opened: apsw.Connection | None = None

    @property
    def _db(self) -> apsw.Connection:
        if self._opened is None:
            db = apsw.Connection(self._path)
            db.set_busy_timeout(5000)
            self._create(db)
            self._opened = db
        return self._opened

    def _create(self, db: apsw.Connection) -> None:
        """Create the tables. SQLite does not wait for another process that changes the journal mode at the same time."""
        for attempt in range(MAX_ATTEMPTS):
            try:
                db.execute("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF")
                db.execute(TABLES)
                return
            except apsw.BusyError:
                if attempt == MAX_ATTEMPTS - 1:
                    raise
                time.sleep(ATTEMPT_PAUSE)

    def count(self, requests: Sequence[Sequence[Demand]], answering: Mapping[bytes, int]) -> list[Ruling]:
        """See `Turnstile`."""
        with self._lock, translate_errors(self._path, "counting"):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                time_ = self._clock()
                self._hold(answering, time_)
                rulings = [self._take(demands, time_) for demands in requests]
                self._db.execute("COMMIT")
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            return rulings

    def _hold(self, answering: Mapping[bytes, int], time_: float) -> None:
        run, gateway = self._db.execute, self._gateway
        for name, count in answering.items():
            run("INSERT OR REPLACE INTO running(name, gateway, count, until) VALUES(?, ?, ?, 0)", (name, gateway, count))
        run("DELETE FROM running WHERE gateway = ? AND count = 0", (gateway,))
        run("UPDATE running SET until = ? WHERE gateway = ?", (time_ + LEASE, gateway))
        if time_ >= self._tidied + IDLE:
            self._tidied = time_
            run("DELETE FROM running WHERE until < ?", (time_ - IDLE,))
            run("DELETE FROM allowance WHERE at < ?", (time_ - IDLE,))

    def _take(self, demands: Sequence[Demand], time_: float) -> Ruling:
        run, full = self._db.execute, []
        for number, (name, rate, limit) in enumerate(demands):
            if rate:
                at = max(time_, next((at for (at,) in run("SELECT at FROM allowance WHERE name = ?", (name,))), time_))
                wait = at - time_ - (max(1.0, rate / 4) - 1) * 60 / rate
                if wait > 0:
                    return Ruling(number, wait)
                full.append((name, at + 60 / rate))
            if limit:
                select = "SELECT coalesce(sum(count), 0) FROM running WHERE name = ? AND (until > ? OR gateway = ?)"
                ((count,),) = run(select, (name, time_, self._gateway))
                if count >= limit:
                    return Ruling(number)
        for row in full:
            run("INSERT INTO allowance(name, at) VALUES(?, ?) ON CONFLICT(name) DO UPDATE SET at = excluded.at", row)
        insert = (
            "INSERT INTO running(name, gateway, count, until) VALUES(?, ?, 1, ?)"
            " ON CONFLICT(name, gateway) DO UPDATE SET count = count + 1"
        )
        for name, _, limit in demands:
            if limit:
                run(insert, (name, self._gateway, time_ + LEASE))
        return Ruling()

    def close(self) -> None:
        """See `Turnstile`."""
        with self._lock, translate_errors(self._path, "counting"):
            if not self._closed and self._opened is not None:
                self._opened.execute("DELETE FROM running WHERE gateway = ?", (self._gateway,))
                self._opened.close()
            self._closed = True

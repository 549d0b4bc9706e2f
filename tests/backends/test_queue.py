"""Threads of one store that wait for a writer outside it."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import apsw
import pytest

from kilburn.backends.sqlite import Sqlite
from kilburn.errors import StoreBusy


def test_threads_and_a_transaction_of_several_batches_wait_together(tmp_path: Path) -> None:
    """Whoever looks for the others when the file is free needs the lock that `together` holds."""
    path = str(tmp_path / "a.db")
    with Sqlite(path, synchronous="OFF", busy_timeout=60.0) as backend:
        foreign = apsw.Connection(path)
        foreign.execute("BEGIN IMMEDIATE")
        held = threading.Event()

        def several() -> None:
            with backend.together():
                backend.settings.put("several", "x")

        def one(name: str) -> None:
            backend.settings.put(name, "x")

        threads = [threading.Thread(target=one, args=(f"one {number}",)) for number in range(4)]
        threads[0].start()
        while not backend._queue.locked():
            time.sleep(0.001)
        threads.append(threading.Thread(target=several))
        for thread in threads[1:]:
            thread.start()
        # Long enough that all of them wait; whichever order they come in, they are done once the file is free.
        held.wait(0.1)
        foreign.execute("ROLLBACK")
        foreign.close()
        for thread in threads:
            thread.join()
        assert set(backend.settings.all()) == {"several", *(f"one {number}" for number in range(4))}
        assert not backend._queue.locked()


def test_all_that_wait_are_told_in_time(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with Sqlite(path, synchronous="OFF", busy_timeout=0.05) as backend:
        foreign = apsw.Connection(path)
        foreign.execute("BEGIN IMMEDIATE")
        told: list[str] = []

        def one() -> None:
            with pytest.raises(StoreBusy):
                backend.settings.put("name", "x")
            told.append("busy")

        threads = [threading.Thread(target=one) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert told == ["busy"] * 5
        assert not backend._queue.locked()
        foreign.execute("ROLLBACK")
        foreign.close()
        backend.settings.put("name", "x")

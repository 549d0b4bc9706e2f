"""When the write-ahead log is moved into the file: not after each commit, and not so late that it grows for ever."""

from __future__ import annotations

import os
from pathlib import Path

import apsw

from kilburn.backends.sqlite import Sqlite
from kilburn.backends.storefile import MAX_LOG_GROWTH

COMMITS = 2 * MAX_LOG_GROWTH // 10
FRAME = 4096 + 24


def text(number: int) -> str:
    """Ten pages that differ from those of other numbers."""
    return f"{number:08}" * 5_000


def test_a_log_that_somebody_always_reads_is_moved_now_and_then(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    moves = 0
    with Sqlite(path, synchronous="OFF") as backend:
        reader = apsw.Connection(str(path))
        for number in range(COMMITS):
            # Who reads what is newest keeps the log from being begun anew.
            reader.execute("BEGIN; SELECT count(*) FROM setting").fetchall()
            os.utime(path, ns=(0, 0))
            backend.settings.put(f"long {number}", text(number))
            moves += os.stat(path).st_mtime_ns > 0
            reader.execute("ROLLBACK")
        reader.close()
    assert 1 <= moves <= 4


def test_a_log_of_two_writers_does_not_grow(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Sqlite(path, synchronous="OFF") as backend, Sqlite(path, synchronous="OFF") as other:
        for number in range(COMMITS):
            (backend, other)[number % 2].settings.put("long", text(number))
        assert os.stat(f"{path}-wal").st_size < 2 * MAX_LOG_GROWTH * FRAME


def test_a_commit_does_not_wait_for_a_reader_of_what_was_before(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with Sqlite(path, synchronous="OFF", busy_timeout=0.0) as backend:
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM setting").fetchall()
        for number in range(COMMITS):
            backend.settings.put("long", text(number))
        assert reader.execute("SELECT count(*) FROM setting").get == 0
        reader.execute("ROLLBACK")
        backend.settings.put("short", "after the reader")
        assert backend.settings.all()["short"] == "after the reader"
        reader.close()

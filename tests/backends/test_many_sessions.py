"""What a new session costs does not grow with the sessions that are there."""

from __future__ import annotations

from pathlib import Path

import pytest

from kilburn.backends.sqlite import Sqlite
from kilburn.errors import StoreCorrupt


def steps_of_a_new_one(backend: Sqlite, name: str) -> int:
    """The steps of SQLite's machine, in tens, until a session is there."""
    steps = 0

    def count() -> bool:
        nonlocal steps
        steps += 1
        return False

    backend._db.set_progress_handler(count, 10)
    assert backend.segment(name, time=0.0) is not None
    backend._db.set_progress_handler(None)
    return steps


def test_a_new_session_among_many_is_made_in_as_many_steps_as_among_few(tmp_path: Path) -> None:
    with Sqlite(str(tmp_path / "a.db"), synchronous="OFF") as backend:
        backend.segment("first", time=0.0)
        few = steps_of_a_new_one(backend, "among few")
        with backend.together():
            for number in range(2_000):
                backend.segment(f"session {number}", time=0.0)
        assert steps_of_a_new_one(backend, "among many") <= 2 * few


def test_a_file_that_others_wrote_to_is_looked_at_again(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with Sqlite(path, synchronous="OFF") as backend, Sqlite(path, synchronous="OFF") as other:
        backend.segment("first", time=0.0)
        few = steps_of_a_new_one(backend, "among few")
        with other.together():
            for number in range(500):
                other.segment(f"session {number}", time=0.0)
        assert steps_of_a_new_one(backend, "after the other") > few
        assert steps_of_a_new_one(backend, "and then") <= 2 * few


def test_of_others_sessions_each_is_looked_at_once(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with Sqlite(path, synchronous="OFF") as backend, Sqlite(path, synchronous="OFF") as other:
        backend.segment("first", time=0.0)
        other.segment("of the other", time=0.0)
        few = steps_of_a_new_one(backend, "among few")
        with other.together():
            for number in range(2_000):
                other.segment(f"session {number}", time=0.0)
        steps_of_a_new_one(backend, "after many")
        other.segment("one more", time=0.0)
        assert steps_of_a_new_one(backend, "among many") <= 2 * few


def test_a_session_that_is_lost_while_others_write_is_missed(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with Sqlite(path, synchronous="OFF") as backend, Sqlite(path, synchronous="OFF") as other:
        for name in ("first", "second", "third"):
            backend.segment(name, time=0.0)
        other.segment("of the other", time=0.0)
        backend.segment("then", time=0.0)
        with other.together():
            other.segment("fourth", time=0.0)
            other._db.pragma("foreign_keys", False)
            other._db.execute("DELETE FROM segment WHERE name = 'fourth'")
        with pytest.raises(StoreCorrupt, match="may be here already"):
            backend.segment("fourth", time=0.0)

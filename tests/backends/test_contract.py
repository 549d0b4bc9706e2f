"""Every store keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from kilburn.backend import Backend, Passage, WordIndex
from kilburn.backends.sqlite import Sqlite
from kilburn.testing.stores import CHECKS, check_store


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_store_keeps_each_promise(kind: str, check: Callable[[Backend], None], tmp_path: Path) -> None:
    makers: dict[str, Callable[[], Backend]] = {
        "file": lambda: Sqlite(tmp_path / "kilburn.db"),
        "memory": lambda: Sqlite(":memory:"),
    }
    backend = makers[kind]()
    try:
        check(backend)
    finally:
        backend.close()


def test_check_store_runs_all_and_names_the_broken_promise() -> None:
    check_store(lambda: Sqlite(":memory:"))

    class NoHits:
        def __init__(self, words: WordIndex) -> None:
            self.newest, self.entries, self.passages = words.newest, words.entries, words.passages

        def search(self, query: str, *, segments: Collection[int] | None = None, limit: int = 20) -> list[Passage]:
            return []

    class Forgetful(Sqlite):
        def __init__(self) -> None:
            super().__init__(":memory:")
            self.words = NoHits(self.words)

    with pytest.raises(AssertionError) as caught:
        check_store(Forgetful)
    assert "check_all_or_nothing" in "".join(caught.value.__notes__)

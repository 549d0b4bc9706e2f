"""Every store keeps the contract."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from kilburn.store import Store
from kilburn.stores.sqlite import Sqlite
from kilburn.testing import Memory
from kilburn.testing.stores import CHECKS, check_store


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
@pytest.mark.parametrize("kind", ["file", "memory"])
def test_store_keeps_each_promise(kind: str, check: Callable[[Store], None], tmp_path: Path) -> None:
    makers: dict[str, Callable[[], Store]] = {
        "file": lambda: Sqlite(tmp_path / "kilburn.db"),
        "memory": Memory,
    }
    store = makers[kind]()
    try:
        check(store)
    finally:
        store.close()


def test_check_store_runs_all_and_names_the_broken_promise() -> None:
    check_store(Memory)

    class Forgetful(Memory):
        def search(self, query: str, *, processes: Collection[int] | None = None, limit: int = 20) -> list:  # type: ignore[type-arg]
            return []

    with pytest.raises(AssertionError) as caught:
        check_store(Forgetful)
    assert "check_all_or_nothing" in "".join(caught.value.__notes__)

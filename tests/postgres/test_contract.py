"""PostgreSQL keeps the contract of a store, and a session lives in it as in a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import psycopg
import pytest

import kilburn
from kilburn.backend import Backend
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.upkeep import inspect_store
from kilburn.testing import check_laws
from kilburn.testing.stores import CHECKS


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_store_keeps_each_promise(check: Callable[[Backend], None], backend: Postgres, shared_url: str, tenant: str) -> None:
    check(backend)
    with Postgres(shared_url, tenant=tenant) as again:
        assert inspect_store(again) == [], "`fsck` finds nothing wrong"


def test_a_damaged_setting_is_left_out(backend: Postgres, shared_url: str) -> None:
    backend.settings.put("one", "1")
    backend.settings.put("two", "2")
    with psycopg.connect(shared_url) as connection:
        connection.execute("UPDATE kilburn.setting SET value = 'x' WHERE name = 'one' AND tenant = %s", (backend._number,))
    assert backend.settings.all() == {"two": "2"}


def test_a_session_a_search_a_fact_a_branch_and_a_forgetting(shared_url: str, tenant: str) -> None:
    options: dict[str, Any] = {"tenant": tenant, "window": 600, "policy": "lru", "tokenizer": "chars/4", "embedder": None}
    with kilburn.open(shared_url, **options) as store:
        session = store.session("session-1")
        first = session.append({"role": "user", "content": "The secret word is heliotrope."})
        for number in range(60):
            session.append({"role": "assistant", "content": f"step {number}: nothing odd in line {number * 7}, marker{number}"})
            session.append({"role": "user", "content": f"go on, number {number}"})
        assert len(session.render()) < 121, "older pages have left the window"
        check_laws(session)
        assert session.recall(first) == "The secret word is heliotrope."
        assert store.search("marker17")[0].address == "p36"
        store.memory("ana").remember("Ana lives in Porto")
        branch = session.fork("look around")
        branch.append({"role": "user", "content": "only on the branch"})
    with kilburn.open(shared_url, **options) as store:
        session = store.session("session-1")
        assert session.recall(first) == "The secret word is heliotrope."
        check_laws(session)
        assert [hit.text for hit in store.memory("ana").search("Porto")] == ["Ana lives in Porto"]
        assert [each.name for each in store.sessions()] == ["session-1", branch.name]
        store.forget(session="session-1", address=first)
        assert not store.search("heliotrope")
        assert "heliotrope" not in repr([*store.backend.pages(session.number), *store.backend.events(session.number)])

"""While nobody asks anything, the gateway ends the sessions whose time is over, and goes on as if they had never been."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.jobs.ending import TimeToLive, keep_rule
from waiting import until


def names(db: Any) -> list[str]:
    with Sqlite(db, readonly=True) as backend:
        return [info.name for info in backend.segments() if info.kind == "session"]


def test_a_session_ends_while_the_gateway_rests(gateway: Callable[..., Any]) -> None:
    setup = gateway("first", "second", "third", tend=0.05)
    setup.chat([{"role": "user", "content": "canary question"}])
    assert len(names(setup.db)) == 1
    with Sqlite(setup.db) as backend:
        keep_rule(backend, TimeToLive(forget=0.0))
    until(lambda: names(setup.db) == [])
    with Sqlite(setup.db) as backend:
        keep_rule(backend, None)
        assert inspect_store(backend) == []
    history = [{"role": "user", "content": "canary question"}, {"role": "assistant", "content": "first"}]
    reply, _ = setup.chat([*history, {"role": "user", "content": "and now?"}])
    assert reply.choices[0].message.content == "second"
    assert len(names(setup.db)) == 1


def test_without_a_rule_nothing_ends(gateway: Callable[..., Any]) -> None:
    setup = gateway("first", "second", tend=0.01)
    setup.chat([{"role": "user", "content": "one"}])
    reply, _ = setup.chat([{"role": "user", "content": "two"}])
    assert reply.choices[0].message.content == "second"
    assert len(names(setup.db)) == 2

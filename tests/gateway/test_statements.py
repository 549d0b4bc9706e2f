"""Statements that an append makes while it holds the file: other gateways wait for as long."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import apsw
import pytest

from gateway.talk import said, user

MOST = 13
"""Of a question or a reply: begin, one for each table that it writes, one for what it knows already, commit."""


@pytest.fixture
def commits() -> Iterator[list[list[str]]]:
    """The statements of each transaction that writes, of all connections that are opened."""
    found: list[list[str]] = []

    def opened(db: apsw.Connection) -> None:
        mine: list[str] = []

        def trace(event: dict[str, Any]) -> None:
            nonlocal mine
            if event["sql"] == "BEGIN IMMEDIATE":
                mine = []
                found.append(mine)
            if not event["trigger"]:
                mine.append(event["sql"])

        db.trace_v2(apsw.SQLITE_TRACE_STMT, trace)

    apsw.connection_hooks.append(opened)
    yield found
    apsw.connection_hooks.remove(opened)


def test_an_append_makes_few_statements(commits: list[list[str]], gateway: Callable[..., Any]) -> None:
    setup = gateway(*[f"The answer {turn}." for turn in range(4)])
    talk = []
    for turn in range(4):
        talk.append(user(f"The question {turn}."))
        talk.append(said(setup.chat(talk)[0].choices[0].message.content))
    appends = [some for some in commits if any(sql.startswith("INSERT INTO page(") for sql in some)]
    assert len(appends) == 8
    # The first one makes the session.
    assert max(some.index("COMMIT") + 1 for some in appends[1:]) <= MOST

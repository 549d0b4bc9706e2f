"""What is forgotten is gone from the rows, from the files of the server, and from its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import psycopg
import pytest

import kilburn
from backends.server_files import files_with
from kilburn.backend import Batch
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.testing.stores import batch_of

CANARY = "heliotrope4711"


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.WARNING, "kilburn"):
        yield caplog


def test_no_byte_of_what_is_forgotten_stays_in_the_files(server: OwnServer, url: str) -> None:
    with kilburn.open(url, window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session(f"about {CANARY}", user=f"user {CANARY}")
        kept = session.append({"role": "user", "content": "what stays"})
        told = session.append({"role": "user", "content": f"the password is {CANARY} and nothing else"})
        long = session.append({"role": "user", "content": " ".join(f"{CANARY} word{n * n}" for n in range(3000))})
        session.append(
            {
                "role": "assistant",
                "tool_calls": [{"id": f"c-{CANARY}", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
            }
        )
        assert files_with(server, CANARY), "it is found where it is"
        session.forget(f"{told}-{long}")
        store.forget(session=session.name)
        assert files_with(server, CANARY) == []
        assert kept == "p1"


def test_what_a_reader_still_needs_is_wiped_later(server: OwnServer, url: str, messages: pytest.LogCaptureFixture) -> None:
    with Postgres(url, busy_timeout=0.2) as backend:
        info = backend.segment("a", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: f"so {CANARY}", 2: "stays"}))
        with psycopg.connect(url) as reader:
            reader.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
            reader.execute("SELECT 1")
            backend.commit(info.number, Batch(head=1, erase=[1]))
            assert "still reads it" in messages.text
            assert backend.search(CANARY) == []
        assert files_with(server, CANARY)
        backend.commit(info.number, batch_of(1, {3: "the next write"}))
        assert files_with(server, CANARY) == []


def test_a_program_that_was_killed_before_it_wiped_is_followed_by_one_that_does(server: OwnServer, url: str) -> None:
    backend = Postgres(url)
    info = backend.segment("a", time=1.0)
    assert info is not None
    backend.commit(info.number, batch_of(0, {1: f"so {CANARY}"}))
    with backend.erasing():
        backend.commit(info.number, Batch(head=1, erase=[1]))
        assert files_with(server, CANARY)
        Postgres(url).close()
        assert files_with(server, CANARY) == []
    backend.close()

"""What is forgotten is gone from the rows, from the files of the server, and from its log."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack

import psycopg
import pytest

import kilburn
from backends.server_files import files_with
from kilburn.backend import Batch
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.testing.stores import batch_of, start

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


@pytest.mark.slow
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
            assert backend.words.search(CANARY) == []
        assert files_with(server, CANARY)
        backend.commit(info.number, batch_of(1, {3: "the next write"}))
        assert files_with(server, CANARY) == []


@pytest.mark.slow
def test_who_writes_and_reads_nothing_at_the_moment_is_waited_for_too(
    server: OwnServer, url: str, messages: pytest.LogCaptureFixture
) -> None:
    with Postgres(url, busy_timeout=0.2) as backend:
        info = backend.segment("a", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: f"so {CANARY}", 2: "stays"}))
        with psycopg.connect(url) as writer:
            # As long as this transaction goes on, the server takes no row away that it might still ask for.
            writer.execute("SELECT pg_current_xact_id()")
            backend.commit(info.number, Batch(head=1, erase=[1]))
            assert "still reads it" in messages.text
        backend.commit(info.number, batch_of(1, {3: "the next write"}))
        assert files_with(server, CANARY) == []


@pytest.mark.slow
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


@pytest.mark.slow
def test_one_writing_anew_is_for_all_tenants_that_had_erased_by_then(server: OwnServer, url: str) -> None:
    def written_anew(sql: psycopg.Connection[tuple[int]]) -> int:
        return sql.execute("SELECT pg_relation_filenode('kilburn.content')").fetchall()[0][0]

    with ExitStack() as opened:
        sql = opened.enter_context(psycopg.connect(url, autocommit=True))
        tenants = [opened.enter_context(Postgres(url, tenant=f"t{number}")) for number in range(3)]
        for tenant in tenants:
            tenant.commit(start(tenant), batch_of(0, {1: f"so {CANARY}"}))
        (info, *_), first, *others = tenants[0].segments(), *tenants
        with ExitStack() as late:
            for other in others:
                late.enter_context(other.erasing())
                other.commit(other.segments()[0].number, Batch(head=1, erase=[1]))
            before = written_anew(sql)
            first.commit(info.number, Batch(head=1, erase=[1]))
            once = written_anew(sql)
            assert once != before
            assert files_with(server, CANARY) == []
        # Nothing is left to do for the others, and they know it.
        assert written_anew(sql) == once
        assert sql.execute("SELECT count(*) FROM kilburn.erasure").fetchall() == [(0,)]
        # What is erased after that is another matter.
        others[0].commit(others[0].segments()[0].number, batch_of(1, {2: f"again {CANARY}"}))
        others[0].commit(others[0].segments()[0].number, Batch(head=2, erase=[2]))
        assert written_anew(sql) != once
        assert files_with(server, CANARY) == []


@pytest.mark.slow
def test_a_wipe_by_command_is_for_all_tenants(server: OwnServer, url: str) -> None:
    with Postgres(url, tenant="t1") as backend, Postgres(url) as own:
        backend.commit(start(backend), batch_of(0, {1: f"so {CANARY}"}))
        with backend.erasing():
            backend.commit(backend.segments()[0].number, Batch(head=1, erase=[1]))
            assert files_with(server, CANARY)
            own.wipe()
            assert files_with(server, CANARY) == []
        assert not any("postgres wipe" in place for place in backend.contents.unreached())

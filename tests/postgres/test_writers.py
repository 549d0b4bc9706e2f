"""Several writers at once: the segment's row is lock and fence, and what one cites or finds another cannot take away."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress

import msgspec
import psycopg
import pytest

from kilburn.backend import Batch
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import Forgotten, KilburnError, StoreBusy, StoreStale
from kilburn.page import digest_of
from kilburn.testing.stores import batch_of, cited_batch, start

ROUNDS = 12


def at_once(*jobs: Callable[[], None]) -> list[KilburnError]:
    """Do these in threads that begin together; returns what they were refused with."""
    refused: list[KilburnError] = []
    ready = threading.Barrier(len(jobs))

    def run(job: Callable[[], None]) -> None:
        ready.wait()
        try:
            job()
        except KilburnError as error:
            refused.append(error)

    threads = [threading.Thread(target=run, args=(job,)) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return refused


@pytest.mark.slow
def test_four_writers_lose_nothing_and_write_nothing_twice(url: str) -> None:
    backends = [Postgres(url) for _ in range(4)]
    segment = start(backends[0])
    written: list[int] = []

    def write(backend: Postgres, number: int) -> None:
        done = 0
        while done < ROUNDS:
            info = backend.segment("session", time=1.0)
            assert info is not None
            page = number * 1000 + done + 1
            try:
                backend.commit(segment, batch_of(info.head, {page: f"text {page}"}))
            except StoreStale:
                continue
            written.append(page)
            done += 1

    assert at_once(*[lambda one=one, number=number: write(one, number) for number, one in enumerate(backends)]) == []  # type: ignore[misc]
    assert sorted(page.id for page, _ in backends[0].pages(segment)) == sorted(written)
    assert [event.number for event in backends[0].events(segment)] == list(range(1, 4 * ROUNDS + 1))
    for backend in backends:
        backend.close()


def test_a_write_that_does_not_know_the_last_one_is_refused_by_the_database(url: str) -> None:
    with Postgres(url) as backend, psycopg.connect(url) as connection:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "a"}))
        late = "UPDATE kilburn.segment SET head = 7, epoch = 1 WHERE id = %s"
        with pytest.raises(psycopg.Error, match="is at write 1, not 0"):
            connection.execute(late, (segment,))


def test_who_will_not_wait_is_told_at_once(url: str) -> None:
    with Postgres(url) as backend, psycopg.connect(url) as connection:
        segment = start(backend)
        connection.execute("SELECT 1 FROM kilburn.segment WHERE id = %s FOR UPDATE", (segment,))
        with pytest.raises(StoreBusy):
            backend.commit(segment, msgspec.structs.replace(batch_of(0, {1: "a"}), wait=False))
        connection.rollback()
        backend.commit(segment, msgspec.structs.replace(batch_of(0, {1: "a"}), wait=False))


def test_who_waits_too_long_is_told(url: str) -> None:
    with Postgres(url, busy_timeout=0.1) as backend, psycopg.connect(url) as connection:
        segment = start(backend)
        connection.execute("SELECT 1 FROM kilburn.segment WHERE id = %s FOR UPDATE", (segment,))
        with pytest.raises(StoreBusy, match="try again"):
            backend.commit(segment, batch_of(0, {1: "a"}))


def test_of_two_that_begin_a_session_one_does(url: str) -> None:
    with Postgres(url) as one, Postgres(url) as other:
        for number in range(ROUNDS):
            name = f"session {number}"
            refused = at_once(
                *[
                    lambda backend=backend, name=name: backend.begin(name, batch_of(0, {1: "first"}), time=1.0)  # type: ignore[misc]
                    for backend in (one, other)
                ]
            )
            assert [type(error) for error in refused] == [StoreStale]
        assert [info.number for info in one.segments()] == list(range(1, ROUNDS + 1))


def test_what_is_cited_is_not_forgotten_meanwhile(url: str) -> None:
    """Of a page that cites and a forgetting of what it cites, one is refused, whoever is first."""
    outcomes = set()
    with Postgres(url) as one, Postgres(url) as other:
        for number in range(ROUNDS):
            talk, memory = start(one, f"talk {number}"), start(one, f"memory {number}")
            one.commit(talk, batch_of(0, {1: f"told {number}"}))
            batch = batch_of(0, {-1: f"a fact {number}"})
            batch.pages = [msgspec.structs.replace(batch.pages[0], cites=((talk, 1),))]
            refused = at_once(
                lambda memory=memory, batch=batch: one.commit(memory, batch),  # type: ignore[misc]
                lambda talk=talk: other.commit(talk, Batch(head=1, erase=[1])),  # type: ignore[misc]
            )
            assert [type(error) for error in refused] == [StoreStale]
            cited = one.citing(talk, [1]) == [(memory, -1)]
            assert cited == (not one.forgotten(talk))
            outcomes.add(cited)
    assert outcomes


def test_a_text_that_another_session_needs_stays(url: str) -> None:
    """One session forgets a text while another begins to use it."""
    with Postgres(url) as one, Postgres(url) as other:
        for number in range(ROUNDS):
            text = f"shared {number}"
            first, second = start(one, f"first {number}"), start(one, f"second {number}")
            one.commit(first, batch_of(0, {1: text}))
            refused = at_once(
                lambda first=first: one.commit(first, Batch(head=1, erase=[1])),  # type: ignore[misc]
                lambda second=second, text=text: other.commit(second, batch_of(0, {1: text})),  # type: ignore[misc]
            )
            assert refused == []
            assert one.contents.texts([digest_of(text)]) == {digest_of(text): text}


def test_a_mark_that_could_not_be_taken_away_goes_with_the_next_write_that_stays(url: str) -> None:
    with Postgres(url, busy_timeout=0.2) as backend, psycopg.connect(url) as busy:
        talk, other = start(backend, "talk"), start(backend, "other")
        backend.commit(talk, batch_of(0, {1: "I moved to Porto"}))
        for number, write in enumerate(("commit", "begin"), 1):
            with backend.leaving([(talk, 1)]):
                busy.execute("LOCK TABLE kilburn.citation IN EXCLUSIVE MODE")
            busy.rollback()
            cites = cited_batch(number - 1, number, "it was said", cites=((talk, 1),))
            with suppress(RuntimeError), backend.together():
                backend.commit(talk, Batch(head=1))
                raise RuntimeError
            with Postgres(url) as second, pytest.raises(Forgotten):
                second.commit(other, cites)
            if write == "commit":
                backend.commit(talk, Batch(head=1))
            else:
                backend.begin("new", batch_of(0, {1: "hello"}), time=1.0)
            with Postgres(url) as second:
                second.commit(other, cites)


def test_a_transaction_of_several_steps_that_the_server_gave_up_is_not_said_to_be_written(url: str) -> None:
    with Postgres(url, busy_timeout=0.2) as backend, psycopg.connect(url) as busy:
        segment = start(backend)
        busy.execute("LOCK TABLE kilburn.setting IN ACCESS EXCLUSIVE MODE")

        def write() -> None:
            with backend.together():
                backend.commit(segment, batch_of(0, {1: "a text"}))
                # A server does nothing more in a transaction in which it could not answer something.
                with suppress(StoreBusy):
                    backend.settings.all()

        with pytest.raises(StoreStale, match="nothing of it was written"):
            write()
        busy.rollback()
        assert list(backend.pages(segment)) == []
        write()
        assert [page.id for page, _ in backend.pages(segment)] == [1]

"""Search by meaning in PostgreSQL keeps the promises that it keeps in a file, though the server looks for what is near."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.memory import test_vectors as promises

from kilburn import Store
from kilburn.backend import Backend
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.budget import Budget
from kilburn.search.choice import vectors_for
from kilburn.search.vectors import Vectors
from kilburn.testing.stores import batch_of, start

PROMISES: list[Callable[[Backend], None]] = [
    promises.test_what_was_just_stored_is_found_at_once,
    promises.test_a_long_backlog_waits_for_catch_up_which_goes_on_where_it_stopped,
    promises.test_a_search_among_few_processes_returns_as_many_as_there_are,
    promises.test_what_is_forgotten_is_found_no_more_and_its_place_is_filled,
    promises.test_after_a_change_of_embedder_the_old_vectors_serve_until_the_new_ones_are_there,
    promises.test_vectors_of_another_length_are_made_again_and_never_served,
    promises.test_a_passage_that_is_refused_holds_up_no_other,
]


@pytest.mark.parametrize("promise", PROMISES, ids=lambda promise: promise.__name__)
def test_vectors_keep_each_promise(promise: Callable[[Backend], None], backend: Postgres) -> None:
    promise(backend)
    assert inspect_store(backend) == []


def test_nothing_that_is_stored_is_read_into_memory(url: str) -> None:
    with Postgres(url) as backend:
        backend.commit(start(backend), batch_of(0, {number: f"needle {number}" for number in range(1, 21)}))
        vectors = Vectors(backend, "hashing(64)")
        assert len(vectors.nearest("needle", None, 20)) == 20
        assert len(vectors._kept.scan) == 0


def test_a_reader_finds_what_it_may_not_store_beside_what_is_stored(url: str) -> None:
    with Postgres(url) as writer, Postgres(url, readonly=True) as backend:
        segment = start(writer)
        writer.commit(segment, batch_of(0, {1: "needle one", 2: "hay"}))
        Vectors(writer, "hashing(64)").catch_up()
        writer.commit(segment, batch_of(1, {3: "needle two", 4: "straw"}))
        vectors = Vectors(backend, "hashing(64)")
        for _ in range(2):
            found = vectors.nearest("needle", None, 4)
            assert {passage.page for passage, _ in found[:2]} == {1, 3}
            assert len(found) == 4
        assert len(vectors.similar("needle", [passage.entry for passage, _ in found])) == 4


def test_vectors_that_were_dropped_beneath_a_program_are_made_again(url: str) -> None:
    """Another may store what the server cannot look through."""
    with Postgres(url) as backend:
        backend.commit(start(backend), batch_of(0, {1: "needle", 2: "hay"}))
        vectors = Vectors(backend, "hashing(64)")
        assert len(vectors.nearest("needle", None, 4)) == 2
        backend.vectors.drop("hashing(64)")
        ((entry, _), _) = backend.vectors.unembedded("hashing(64)", 2)
        backend.vectors.add("hashing(64)", [(entry, b"\0\0\xc0\x7f" + bytes(64))])
        assert len(vectors.nearest("needle", None, 4)) == 2
        assert not vectors._kept.asked


TOLD = [
    "The parser fails on an empty file, and nobody knows why.",
    "Ana moved to Porto in May.",
    "We should buy milk, bread and a new bicycle pump.",
    "The meeting about the parser is in room 4711.",
    "It rained in Lisbon the whole afternoon.",
]


def found(backend: Backend) -> list[Any]:
    vectors = vectors_for(backend, "hashing(64)")
    with Store(backend, Budget(4000), tokenizer="chars/4", clock=lambda: 100.0, vectors=vectors) as store:
        session = store.session("session-1")
        for number in range(40):
            session.append({"role": "user", "content": f"{TOLD[number % len(TOLD)]} That was number {number // 7}."})
        other = store.session("session-2")
        other.append({"role": "user", "content": "Ana sells her bicycle."})
        facts = store.memory("ana")
        for town, until in (("Lisbon", 60.0), ("Porto", None)):
            facts.remember(f"Ana lives in {town}", until=until)
        return [
            [(hit.session, hit.address, hit.text, hit.score) for hit in hits]
            for query in ("an empty file", "where does Ana live", "bicycle")
            for hits in (store.search(query), store.search(query, where="facts"), other.search(query), facts.search(query))
        ]


def test_a_search_finds_the_same_in_the_same_order_as_in_a_file(url: str, tmp_path: Path) -> None:
    with Postgres(url) as database, Sqlite(str(tmp_path / "a.db")) as file:
        there = found(database)
        assert there == found(file)
        assert [len(hits) > 0 for hits in there].count(True) > 6

"""A search finds in PostgreSQL what it finds in a file: the same passages, in the same order, with the same scores."""

from __future__ import annotations

import itertools

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from effort import rounds
from kilburn.backend import Backend, Batch
from kilburn.backends.postgres.connection import Statements
from kilburn.backends.postgres.postings import AHEAD, BLOCK, Postings
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.ranked import ROWS, Extents
from kilburn.backends.sqlite import Sqlite
from kilburn.message import Role
from kilburn.testing.stores import batch_of, start

WORDS = [
    "the",
    "and",
    "parser",
    "parsing",
    "getUserName",
    "src/kilburn/backend.py",
    "foo_bar",
    "Zürich",
    "東京都",
    "x" * 90,
    "4711",
]
TEXT = st.lists(st.sampled_from(WORDS) | st.text(st.characters(exclude_categories=["Cs"]), max_size=12), max_size=30).map(
    " ".join
)
QUERY = st.lists(st.sampled_from([*WORDS, "user", "backend", "absent", "NEAR", '"', "*"]), min_size=1, max_size=8).map(" ".join)

tenants = itertools.count()


def fill(backend: Backend, sessions: list[list[str]]) -> list[int]:
    numbers = []
    for at, texts in enumerate(sessions):
        number = start(backend, f"session {at}")
        for head, text in enumerate(texts):
            batch = batch_of(head, {head + 1: text})
            role = Role.TOOL if head % 3 else Role.USER
            batch.pages = [msgspec.structs.replace(page, role=role) for page in batch.pages]
            backend.commit(number, batch)
        numbers.append(number)
    return numbers


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow], max_examples=rounds(5, 25))
@given(
    st.lists(st.lists(TEXT, min_size=1, max_size=5), min_size=1, max_size=3),
    st.lists(QUERY, min_size=1, max_size=6),
    st.integers(0, 6),
    st.booleans(),
)
def test_both_find_the_same(shared_url: str, sessions: list[list[str]], queries: list[str], limit: int, forgets: bool) -> None:
    with Sqlite(":memory:") as file, Postgres(shared_url, tenant=f"ranked {next(tenants)}") as database:
        numbers = fill(file, sessions)
        assert fill(database, sessions) == numbers
        if forgets:
            for backend in (file, database):
                backend.commit(numbers[0], Batch(head=len(sessions[0]), erase=[1]))
        for query in queries:
            assert database.words.search(query, limit=limit) == file.words.search(query, limit=limit)
            by_user = database.words.search(query, segments=numbers, limit=limit, by_user=True)
            assert by_user == file.words.search(query, segments=numbers, limit=limit, by_user=True)
            assert all(hit.page % 3 == 1 for hit in by_user)
            assert database.words.search(query, segments=numbers[::2], limit=limit) == file.words.search(
                query, segments=numbers[::2], limit=limit
            )
            pairs = [(query, ""), (query, queries[0])]
            assert database.words.newest(numbers[-1], pairs, limit) == file.words.newest(numbers[-1], pairs, limit)


@pytest.mark.slow
def test_both_find_the_same_where_words_are_common(url: str) -> None:
    """More passages than are visited for a word: frequencies are estimated, and common words looked up among rarer ones."""
    texts = {
        number: f"common {'often' if number % 2 else 'seldom'} word{number % 97} rare{number % 997} and item{number}"
        for number in range(1, ROWS + 900)
    }
    with Sqlite(":memory:") as file, Postgres(url) as database:
        for backend in (file, database):
            one, other = start(backend, "one"), start(backend, "other")
            backend.commit(one, batch_of(0, texts))
            backend.commit(other, batch_of(0, {number: text for number, text in texts.items() if number % 5 == 0}))
        for query in (
            "common",
            "common often",
            "seldom word3",
            "common often rare500 word7",
            "and item77 common",
            "often seldom common",
        ):
            for segments in (None, [1], [2], [1, 2]):
                assert database.words.search(query, segments=segments, limit=9) == file.words.search(
                    query, segments=segments, limit=9
                ), query


@pytest.mark.slow
def test_both_find_the_same_where_a_session_has_many_blocks(url: str) -> None:
    """Entries lie in blocks of 256: what is in several, and is forgotten in some of them."""
    texts = {
        number: f"common {'often' if number % 2 else 'seldom'} word{number % 97} rare{number % 7 * number} and item{number}"
        for number in range(1, 3 * BLOCK - 50)
    }
    gone = [1, 2, 97, BLOCK, BLOCK + 1, BLOCK + 97, 2 * BLOCK, 600]
    with Sqlite(":memory:") as file, Postgres(url) as database:
        for backend in (file, database):
            one, other = start(backend, "one"), start(backend, "other")
            backend.commit(one, batch_of(0, texts))
            for head in range(40):
                backend.commit(other, batch_of(head, {head + 1: f"{texts[head + 1]} again"}))
            backend.commit(one, Batch(head=1, erase=gone))
            backend.commit(other, Batch(head=40, erase=[2, 40]))
        for query in ("common", "often common word3", "item256 seldom item98", "rare0 and item600 item194", "again word2 word3"):
            for segments in (None, [1], [2], [1, 2]):
                assert database.words.search(query, segments=segments, limit=3) == file.words.search(
                    query, segments=segments, limit=3
                ), query
            for pairs in ([(query, "")], [("common", query)], [("word3", "often seldom")]):
                for segment in (1, 2):
                    assert database.words.newest(segment, pairs, 9) == file.words.newest(segment, pairs, 9)


@pytest.mark.slow
@pytest.mark.parametrize("ahead", [0, 300, AHEAD])
def test_both_find_the_same_however_much_is_read_ahead(url: str, ahead: int) -> None:
    """Of words that are not known to their end, the rest is looked up among the passages with a rarer word."""
    common = "common often and then file window policy branch token cache line error module"
    with Sqlite(":memory:") as file, Postgres(url) as database:
        for backend in (file, database):
            for at in range(90):
                texts = {page: f"{common} rare{at % 5} seldom{page % 3} item{at * page}" for page in range(1, 9)}
                backend.commit(start(backend, f"session {at}"), batch_of(0, texts))
        sizes = [len(f"{common} rare{at % 5} seldom{page % 3} item{at * page}") for at in range(90) for page in range(1, 9)]
        every = [(at + 1, 8, sum(sizes[8 * at : 8 * at + 8])) for at in range(90)]

        def search(query: str, made: list[tuple[int, int, int]], limit: int) -> list[tuple[int, float]]:
            def do(statements: Statements) -> list[tuple[int, float]]:
                index = Postings(statements, database._number, ahead=ahead)
                return index.search(query, Extents(made), limit, apart=made != every)

            return database._db.read("searching", do)

        for query in (f"{common} rare3 item14", f"{common} seldom1 rare2", f"{common} rare1 rare2 rare3", common):
            for made in (every, every[3:70], every[::2]):
                for limit in (1, 2, 9):
                    segments = None if made == every else [number for number, *_ in made]
                    found = file.words.search(query, segments=segments, limit=limit)
                    assert search(query, made, limit) == [(hit.entry, hit.score) for hit in found], query

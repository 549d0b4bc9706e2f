"""A search skims its candidates, and shows only what it has verified: it finds what a search that reads all of them would."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apsw
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn import Store
from kilburn.backend import ContentStore, SegmentKind, State
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.collections.collecting import is_true
from kilburn.kernel.resolve import resolve
from kilburn.move import Add, Retire
from kilburn.page import Page
from kilburn.retrieval import Candidate, Query
from kilburn.search.found import DamageWarning, Found
from kilburn.search.search import MAX_DEPTH, MIN_DEPTH
from kilburn.testing.clock import FakeClock

NOW = 1_600_000_000.0
WORDS = [f"{one}{two}{three}k" for one in "bdfgk" for two in "aeiou" for three in "mprst"]


class CountedContents:
    """Counts how often texts are read."""

    def __init__(self, contents: ContentStore) -> None:
        self.whole, self.reads = contents, 0

    def texts(self, digests: Iterable[str]) -> dict[str, str]:
        self.reads += 1
        return self.whole.texts(digests)


class Counting(Sqlite):
    """Counts the pages that are read and verified."""

    def __init__(self, path: str) -> None:
        super().__init__(path)
        self.pages = 0
        self.contents = CountedContents(self.contents)

    def read(self, keys: Iterable[tuple[int, int]]) -> dict[tuple[int, int], tuple[Page, State]]:
        wanted = list(keys)
        self.pages += len(wanted)
        return super().read(wanted)


def opened(path: str | Path = ":memory:") -> tuple[Counting, Store]:
    backend = Counting(str(path))
    return backend, Store(backend, Budget(4000), "fifo", tokenizer="chars/4", clock=FakeClock(NOW, tick=0.0))


def by_reading_all(store: Store, query: str, tokens: int, at: float | None) -> list[tuple[str, float]]:
    """The texts and scores of all facts that a search may find, best first, each of them read and verified."""
    depth = max(MIN_DEPTH, min(MAX_DEPTH, tokens // 10))
    seen: dict[tuple[int, int], Any] = {}
    for hit in store.backend.words.search(query, limit=depth):
        seen.setdefault((hit.segment, hit.page), hit)
    candidates = []
    for key, hit in seen.items():
        page, state = store.backend.read([key])[key]
        if is_true(page, state, NOW if at is None else at, now=at is None):
            kind = SegmentKind.MEMORY
            candidates.append(Candidate(segment=key[0], kind=kind, page=page, state=state, span=hit.span, words=hit.score))
    ranked = resolve("search.rankings", "blend").rank(Query(text=query, now=NOW if at is None else at), candidates)
    pages = [(candidates[one.index].page, one.score) for one in ranked]
    return [(store.backend.contents.texts([page.digest])[page.digest], score) for page, score in pages]


@settings(max_examples=15, deadline=None)
@given(st.integers(0, 2**32))
def test_it_finds_what_reading_all_candidates_finds(seed: int) -> None:
    chance = random.Random(seed)
    backend, store = opened()
    with store:
        for user in ("ana", "bo"):
            memory, made = store.memory(user), 0
            for _ in range(4):
                adds = []
                for number in range(40):
                    text = " ".join([*chance.choices(WORDS[:30], k=chance.randint(2, 30)), f"{user}{made}x{number}"])
                    since = chance.choice([None, None, NOW - 100, NOW + 100])
                    until = chance.choice([None, None, NOW + 150, NOW + 300])
                    adds.append(Add(text=text, since=since, until=until, importance=chance.choice([0.0, 0.0, 0.5, 1.0])))
                memory.collection.apply(*adds)
                memory.collection.apply(Retire(tuple(made + page for page in chance.sample(range(1, 41), 5)), until=NOW - 50))
                made += 40
        for _ in range(6):
            query = " ".join(chance.choices(WORDS[:40], k=chance.randint(1, 6)))
            at = chance.choice([None, NOW - 70, NOW + 200])
            tokens = chance.choice([300, 1000, 4000])
            expected = by_reading_all(store, query, tokens, at)
            backend.pages = 0
            found: list[Found] = list(store.search(query, tokens, limit=7, at=at))
            left = tokens
            for (text, score), hit in zip(expected, found, strict=False):
                assert (hit.text, hit.score) == (text, score)
                left -= hit.tokens
            assert len(found) == min(7, len(expected)) or left < 100
            assert backend.pages <= 7, "no more than what is shown is verified"


def damaged(path: Path, change: str, page: int) -> None:
    db = apsw.Connection(str(path))
    db.execute(f"UPDATE page SET {change} WHERE segment = 1 AND id = ?", (page,))
    db.close()


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.db"
    _, store = opened(path)
    with store:
        store.memory("ana").collection.apply(Add(text="the walrus is grey"), Add(text="the walrus eats clams all day"))
        store.memory("bo").collection.apply(Add(text="a walrus of another sea is brown"))
        store.memory("ana").collection.apply(Retire((1,), why="wrong"))
    return path


@pytest.mark.parametrize("change", ["place = 'out', valid_until = NULL", "valid_until = 9e9"])
def test_what_was_retired_is_not_shown_though_the_file_was_altered_to_say_that_it_is_true(file: Path, change: str) -> None:
    damaged(file, change, 1)
    _, store = opened(file)
    with store, pytest.warns(DamageWarning, match="@memory/ana"):
        hits = store.search("walrus grey")
    assert [hit.text for hit in hits] == ["a walrus of another sea is brown"]


@pytest.mark.parametrize("change", ["importance = 0.5", "record = CAST(replace(CAST(record AS TEXT), 'clams', 'chips') AS BLOB)"])
def test_a_page_whose_row_was_altered_is_never_shown(file: Path, change: str) -> None:
    damaged(file, change, 2)
    _, store = opened(file)
    with store:
        with pytest.warns(DamageWarning, match="@memory/ana"):
            hits = store.search("walrus clams")
        with pytest.warns(DamageWarning, match="@memory/ana"):
            either = store.search("walrus clams", abstain=True)
    assert [hit.text for hit in hits] == ["a walrus of another sea is brown"]
    assert "@memory/ana" not in {hit.session for hit in (*either, *either.withheld)}


def test_damage_of_what_is_not_shown_hides_nothing(file: Path) -> None:
    damaged(file, "importance = 0.001", 2)
    _, store = opened(file)
    with store, warnings.catch_warnings():
        warnings.simplefilter("error")
        hits = store.search("brown walrus of another sea", limit=1)
    assert [hit.text for hit in hits] == ["a walrus of another sea is brown"]


@pytest.fixture
def doubting(tmp_path: Path) -> Path:
    """p1 is doubted by p2, as f1 says; both have the same words."""
    path = tmp_path / "b.db"
    _, store = opened(path)
    with store:
        store.memory("ana").remember("The walrus lives in Porto.")
        store.memory("ana").remember("The walrus lives in Leeds.")
    return path


@pytest.mark.parametrize("change", ["importance = 0.5", "record = CAST(replace(CAST(record AS TEXT), 'later', 'older') AS BLOB)"])
def test_a_doubt_whose_row_was_altered_is_never_used(doubting: Path, change: str) -> None:
    damaged(doubting, change, -1)
    _, store = opened(doubting)
    with store, pytest.warns(DamageWarning, match="@memory/ana"):
        assert not store.search("walrus Porto", where="facts", user="ana")


def test_a_doubter_whose_text_is_damaged_does_not_stop_the_search(doubting: Path) -> None:
    db = apsw.Connection(str(doubting))
    db.execute("DELETE FROM content WHERE id = (SELECT content FROM page WHERE segment = 1 AND id = 2)")
    db.close()
    _, store = opened(doubting)
    with store, pytest.warns(DamageWarning, match="p2"):
        hits = store.search("walrus Porto", where="facts", user="ana")
    assert [(hit.text, bool(hit.doubted)) for hit in hits] == [("The walrus lives in Porto.", True)]


def test_the_last_tokens_of_a_budget_take_few_reads_of_texts() -> None:
    backend, store = opened()
    store.memory("ana").collection.apply(*(Add(text=f"lamp {number} " + "x y z " * 20) for number in range(400)))
    backend.text_reads = 0
    hits = store.search("lamp", 3990, None)
    # 40 texts, then 160, then the rest.
    assert 3900 < sum(hit.tokens for hit in hits) < 3990
    assert backend.contents.reads <= 4
    store.close()

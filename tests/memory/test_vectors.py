"""Vectors of a store's passages: what waits, what serves, what vanishes."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kilburn.backend import Backend, Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import ModelError, Refused, SpecError, StoreError, Unavailable
from kilburn.search.choice import vectors_for
from kilburn.search.embedders.hashing import Hashing
from kilburn.search.scan import BLOCK, Scan, pack
from kilburn.search.vectors import SHORT, Vectors
from kilburn.testing.stores import batch_of, start
from waiting import until

Open = Callable[..., Backend]


@pytest.fixture(params=["memory", "sqlite"])
def backend(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Backend]:
    made: Backend = Sqlite(":memory:") if request.param == "memory" else Sqlite(str(tmp_path / "a.db"))
    yield made
    made.close()


class Counting(Hashing):
    """Hashing that counts its calls, and fails on demand."""

    def __init__(self, dimensions: int = 64, name: str = "") -> None:
        super().__init__(dimensions)
        self.name = name or self.name
        self.calls: list[int] = []
        self.fail: Callable[[Sequence[str]], Exception | None] = lambda texts: None

    def embed(self, texts: Sequence[str]) -> Any:
        self.calls.append(len(texts))
        error = self.fail(texts)
        if error is not None:
            raise error
        return super().embed(texts)


def text_of(backend: Backend, entry: int, texts: dict[int, str]) -> str:
    passage = backend.words.passages([entry])[entry]
    return texts[passage.page][slice(*passage.span)]


def units(count: int, dimensions: int = 64, seed: int = 0) -> np.ndarray[Any, Any]:
    found = np.random.default_rng(seed).normal(size=(count, dimensions)).astype(np.float32)
    return found / np.linalg.norm(found, axis=1, keepdims=True)


def test_what_was_just_stored_is_found_at_once(backend: Backend) -> None:
    segment = start(backend)
    texts = {1: "the parser fails on an empty file", 2: "a dinner with friends in Lisbon", 3: "rain in the afternoon"}
    backend.commit(segment, batch_of(0, texts))
    vectors = Vectors(backend, "hashing(64)")
    (nearest, cosine), *_ = vectors.nearest("empty files and the parser", None, 3)
    best = nearest.entry
    assert text_of(backend, best, texts) == texts[1]
    assert 0.2 < cosine <= 1
    backend.commit(segment, batch_of(1, {4: "zebra crossings"}))
    ((passage, _),) = vectors.nearest("zebra crossing", None, 1)
    found = passage.entry
    assert backend.words.passages([found]) == {found: passage}
    assert passage.page == 4
    assert vectors.similar("zebra crossings", [found, best, 17])[found] == pytest.approx(1, abs=0.01)
    assert vectors.similar("zebra crossings", [found, best, 17]).keys() == {found, best}
    assert vectors.nearest("  ", None, 3) == []
    assert vectors.nearest("zebra", None, 0) == []
    assert vectors.nearest("zebra", [], 3) == []


def test_a_long_backlog_waits_for_catch_up_which_goes_on_where_it_stopped(backend: Backend) -> None:
    segment = start(backend)
    backend.commit(segment, batch_of(0, {number: f"passage number{number}" for number in range(1, 201)}))
    embedder = Counting()
    vectors = Vectors(backend, embedder)
    assert vectors.nearest("number7", None, 3) == []
    assert embedder.calls == [1], "only the query was embedded"
    seen: list[int] = []

    def stop(done: int) -> None:
        seen.append(done)
        if done >= 64:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        vectors.catch_up(progress=stop, batch=32)
    assert seen == [32, 64]
    assert vectors.catch_up(10) == 10
    assert vectors.catch_up() == 126
    assert vectors.catch_up() == 0
    assert len(vectors.nearest("number7", None, 300)) == 200


def test_a_search_among_few_processes_returns_as_many_as_there_are(backend: Backend) -> None:
    many, few = start(backend, "many"), start(backend, "few")
    backend.commit(many, batch_of(0, {number: f"the needle number{number}" for number in range(1, 300)}))
    backend.commit(few, batch_of(0, {1: "hay", 2: "straw and needles", 3: "grass"}))
    vectors = Vectors(backend, "hashing(64)")
    vectors.catch_up()
    found = vectors.nearest("the needle", [few], 10)
    assert [passage.segment for passage, _ in found] == [few] * 3
    assert found == sorted(found, key=lambda one: -one[1])
    assert len(vectors.nearest("the needle", [few, many, 99], 5)) == 5


def test_what_is_forgotten_is_found_no_more_and_its_place_is_filled(backend: Backend) -> None:
    segment = start(backend)
    backend.commit(segment, batch_of(0, {number: f"needle {number}" for number in range(1, 21)}))
    vectors, other = Vectors(backend, "hashing(64)"), Vectors(backend, "hashing(64)")
    before = vectors.nearest("needle", None, 20)
    assert len(before) == len(other.nearest("needle", None, 20)) == 20
    backend.commit(segment, Batch(head=1, erase=list(range(1, 11)), unindex=[11]))
    for one in (vectors, other):
        found = one.nearest("needle", None, 9)
        assert len(found) == 9
        assert {passage.page for passage, _ in found} <= set(range(12, 21))
    assert len(vectors.similar("needle", [passage.entry for passage, _ in before])) == 9


def test_another_writer_is_followed(tmp_path: Path) -> None:
    with Sqlite(str(tmp_path / "a.db")) as one, Sqlite(str(tmp_path / "a.db")) as two:
        reader, embedder = Vectors(one, Counting()), Counting()
        assert reader.nearest("needle", None, 5) == []
        segment = start(two)
        two.commit(segment, batch_of(0, {1: "needle"}))
        Vectors(two, embedder).catch_up()
        assert len(reader.nearest("needle", None, 5)) == 1
        assert sum(reader.embedder.calls) == 1, "the other's vectors are used, not made again"  # type: ignore[attr-defined]


def test_a_store_that_is_only_read_is_searched_and_left_as_it_is(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with Sqlite(path) as writer:
        segment = start(writer)
        writer.commit(segment, batch_of(0, {1: "needle", 2: "hay"}))
        with Sqlite(path, readonly=True) as backend:
            embedder = Counting()
            vectors = Vectors(backend, embedder)
            vectors.start()
            assert len(vectors.nearest("needle", None, 5)) == 2
            assert len(vectors.nearest("needle", None, 5)) == 2
            assert embedder.calls == [2, 1]
            vectors.close()
        assert len(writer.vectors.unembedded(embedder.name, 5)) == 2


def test_after_a_change_of_embedder_the_old_vectors_serve_until_the_new_ones_are_there(backend: Backend) -> None:
    segment = start(backend)
    count = SHORT + 10
    backend.commit(segment, batch_of(0, {number: f"passage {number}" for number in range(1, count + 1)}))
    Vectors(backend, "hashing(32)").catch_up()
    vectors = Vectors(backend, "hashing(64)")
    assert len(vectors.nearest("passage", None, 100)) == count
    assert len(list(backend.vectors.read("hashing(64)"))) == 0, "it was the old index that served"
    assert vectors.similar(np.eye(32)[0], []) == {}
    with pytest.raises(SpecError, match="dimensions"):
        vectors.similar(np.eye(64)[0], [])
    vectors.catch_up(5)
    assert len(vectors.nearest("passage", None, 100)) == count
    vectors.catch_up()
    assert backend.vectors.embedders() == ["hashing(64)"]
    assert len(vectors.nearest("passage", None, 100)) == count
    assert vectors_for(backend, "auto").embedder.name == "hashing(64)"
    backend.vectors.drop("hashing(64)")
    backend.vectors.add("gone(1)", [(backend.vectors.unembedded("x", 1)[0][0], b"12345")])
    assert Vectors(backend, "hashing(64)").nearest("passage", None, 5) == [], "words serve until it is made again"
    assert vectors_for(backend, "auto") is None


def test_vectors_of_another_length_are_made_again_and_never_served(backend: Backend) -> None:
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "needle", 2: "hay"}))
    backend.vectors.add("hashing(64)", [(entry, bytes(36)) for entry, _ in backend.vectors.unembedded("hashing(64)", 5)])
    vectors = Vectors(backend, "hashing(64)")
    assert vectors.nearest("needle", None, 5) == []
    ((_, cosine), _) = vectors.nearest("needle", None, 5)
    assert cosine == pytest.approx(1, abs=0.01)


class Wrong(Hashing):
    """Gives what it was told to."""

    def __init__(self, gives: Any) -> None:
        super().__init__(8)
        self.gives = gives

    def embed(self, texts: Sequence[str]) -> Any:
        return self.gives


@pytest.mark.parametrize("gives", [np.ones((1, 9)), np.ones((2, 8)), np.ones(8), np.zeros((1, 8)), np.full((1, 8), np.nan)])
def test_an_embedder_that_gives_something_else_is_named(backend: Backend, gives: Any) -> None:
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "needle"}))
    with pytest.raises(ModelError, match="hashing"):
        Vectors(backend, Wrong(gives)).catch_up()
    assert list(backend.vectors.read("hashing(8)")) == []


def test_a_passage_that_is_refused_holds_up_no_other(backend: Backend) -> None:
    segment = start(backend)
    backend.commit(segment, batch_of(0, {1: "good", 2: "evil", 3: "fair"}))
    embedder = Counting()
    embedder.fail = lambda texts: Refused("no") if any("evil" in text for text in texts) else None
    vectors = Vectors(backend, embedder)
    assert vectors.catch_up() == 3
    assert [round(cosine) for _, cosine in vectors.nearest("good", None, 5)] == [1, 0, 0]
    backend.commit(segment, batch_of(1, {4: "more"}))
    embedder.fail = lambda texts: Refused("no key")
    with pytest.raises(Refused):
        vectors.catch_up()
    assert len(backend.vectors.unembedded(embedder.name, 5)) == 1


def test_the_background_embeds_and_says_what_is_wrong(backend: Backend) -> None:
    segment = start(backend)
    backend.commit(segment, batch_of(0, {number: f"passage {number}" for number in range(1, 101)}))
    embedder = Counting()
    failed, healed = threading.Event(), threading.Event()

    def fail(texts: Sequence[str]) -> Exception | None:
        failed.set()
        return None if healed.is_set() else Unavailable("down")

    embedder.fail = fail
    vectors = Vectors(backend, embedder)
    vectors.start(0.01, busy=lambda: False)
    assert failed.wait(600)
    until(lambda: bool(vectors.trouble))
    assert "down" in vectors.trouble
    healed.set()
    until(lambda: not backend.vectors.unembedded(embedder.name, 1))
    vectors.close()
    vectors.close()
    assert len(vectors.nearest("passage", None, 200)) == 100
    backend.close()
    with pytest.raises(StoreError):
        vectors.nearest("passage", None, 5)


def test_the_background_sees_whether_other_threads_compute(backend: Backend) -> None:
    vectors = Vectors(backend, "hashing(64)")
    until(lambda: not vectors._others_compute())
    done = threading.Event()

    def compute() -> None:
        while not done.is_set():
            pass

    thread = threading.Thread(target=compute)
    thread.start()
    try:
        until(vectors._others_compute)
        assert thread.is_alive()
    finally:
        done.set()
        thread.join()


EXIT = """
import atexit, sys, threading
from kilburn.search.embedders.hashing import Hashing
from kilburn.search.vectors import Vectors
from kilburn.backends.sqlite import Sqlite
from kilburn.testing.stores import batch_of, start

class Counting(Hashing):
    batches, fourth, ended = 0, threading.Event(), threading.Event()

    def embed(self, texts):
        Counting.batches += 1
        if Counting.batches > 3:
            self.fourth.set()
            self.ended.wait()
        return super().embed(texts)

store = Sqlite(sys.argv[1])
store.commit(start(store), batch_of(0, {number: f"passage {number}" for number in range(1, 2000)}))
vectors = Vectors(store, Counting(64))
vectors.start(0.0)
Counting.fourth.wait()

@atexit.register
def end():
    # Before what `native` does at the end: the batch goes on until then.
    Counting.ended.set()
"""


def test_a_program_that_ends_while_something_is_embedded_waits_for_one_batch(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    done = subprocess.run([sys.executable, "-c", EXIT, path], capture_output=True, text=True, check=False, timeout=600)
    assert (done.returncode, done.stderr) == (0, "")
    with Sqlite(path) as backend:
        assert 3 * 16 <= 1999 - len(backend.vectors.unembedded("hashing(64)", 5000)) < 1000
        assert Vectors(backend, "hashing(64)").catch_up() > 1000


def test_many_threads_search_and_write(tmp_path: Path) -> None:
    with Sqlite(str(tmp_path / "a.db")) as backend:
        vectors = Vectors(backend, "hashing(64)")
        wrong: list[BaseException] = []

        def work(number: int) -> None:
            try:
                segment = start(backend, f"session {number}")
                for head in range(5):
                    backend.commit(segment, batch_of(head, {head + 1: f"word{number}x{head}"}))
                    found = vectors.nearest(f"word{number}x{head}", [segment], 10)
                    assert len(found) == head + 1
            except BaseException as error:
                wrong.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
        assert len(vectors.nearest("word", None, 100)) == 20


def test_a_scan_finds_what_a_plain_product_finds() -> None:
    data, scan = units(5000), Scan(64)
    entries = [(number % 7 + 1) << 32 | number for number in range(5000)]
    for first in range(0, 5000, 777):
        scan.add(entries[first : first + 777], pack(data[first : first + 777]))
    order = np.random.default_rng(1).permutation(5000)
    gone = [entries[at] for at in order[:600]]
    scan.remove([*gone, 12345])
    scan.add(entries[:50], pack(units(50, seed=5)))
    data[:50] = units(50, seed=5)
    there = [at for at in range(5000) if at < 50 or entries[at] not in set(gone)]
    assert len(scan) == len(there)
    hits = []
    for vector in units(20, seed=9):
        for segments in (None, [2], [1, 3, 5, 6]):
            mine = [at for at in there if segments is None or entries[at] >> 32 in segments]
            cosines = data[mine] @ vector
            wanted = [entries[mine[at]] for at in np.argsort(-cosines)[:10]]
            found = scan.nearest(vector, 10, segments)
            assert [cosine for _, cosine in found] == sorted((cosine for _, cosine in found), reverse=True)
            hits.append(len({entry for entry, _ in found} & set(wanted)))
            assert len(found) == 10
        known = scan.similar(vector, entries)
        assert known.keys() == {entries[at] for at in there}
        assert all(abs(known[entries[at]] - data[at] @ vector) < 0.02 for at in there)
    # Vectors without any order are the hardest case for signs.
    assert sum(hits) / len(hits) > 8
    scan.remove(entries)
    assert len(scan) == 0
    assert scan.nearest(data[0], 5) == []


def test_a_scan_of_several_blocks() -> None:
    count = 2 * BLOCK + 100
    data, scan = units(count, 16), Scan(16)
    scan.add(range(1, count + 1), pack(data))
    for at in (0, BLOCK - 1, BLOCK, count - 1):
        assert scan.nearest(data[at], 1)[0][0] == at + 1
    scan.remove(range(1, BLOCK + 1))
    assert len(scan) == BLOCK + 100
    assert scan.nearest(data[count - 1], 1)[0][0] == count
    assert scan.nearest(data[0], 1)[0][0] > BLOCK

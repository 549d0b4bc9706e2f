"""Vectors of passages: whole or not there, and gone with their passages, whatever happens to the file."""

from __future__ import annotations

import hashlib
import random
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from effort import rounds
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, repair_store
from kilburn.errors import StoreError, StoreFull, StoreReadOnly
from kilburn.page import digest_of
from kilburn.testing.faults import FaultVFS
from kilburn.testing.stores import batch_of


def vector_of(text: str) -> bytes:
    """Bytes that are another for another text."""
    return hashlib.sha256(text.encode()).digest() * 12


def embed(backend: Sqlite, limit: int = 1000) -> int:
    """Give the passages that wait their vectors; how many."""
    waiting = backend.vectors.unembedded("hash", limit)
    backend.vectors.add("hash", [(entry, vector_of(text)) for entry, text in waiting])
    return len(waiting)


def filled(path: Path, pages: int = 30) -> None:
    with Sqlite(path) as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(
            info.number, batch_of(0, {number: f"page{number} " + "word " * (50 * number) for number in range(1, pages)})
        )
        embed(backend)


def change(path: Path, statement: str, *values: object) -> None:
    """Write behind Kilburn's back."""
    db = apsw.Connection(str(path))
    try:
        db.execute(statement, values)
        assert db.changes() > 0
    finally:
        db.close()


def served(backend: Sqlite) -> dict[int, bytes]:
    return {vector.entry: vector.data for vector in backend.vectors.read("hash")}


@pytest.mark.parametrize(
    ("statement", "left"),
    [
        ("UPDATE vector SET data = zeroblob(384) WHERE id = 3", -1),
        ("UPDATE vector SET data = x'' WHERE id = 3", -1),
        ("UPDATE vector SET entry = 77 WHERE id = 3", -1),
        ("UPDATE vector SET seal = x'00' WHERE id > 5", None),
        ("DELETE FROM vector WHERE id = 3", -1),
        ("UPDATE embedded SET passages_done = passages_done + 5", 0),
        ("UPDATE embedder SET name = 'other'", None),
        ("INSERT INTO vector(embedder, entry, data, seal) SELECT embedder, 99, data, seal FROM vector WHERE id = 3", 0),
    ],
)
def test_a_damaged_vector_is_never_served_and_made_again(tmp_path: Path, statement: str, left: int | None) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as store:
        whole = served(store)
        assert embed(store) == 0
    change(path, statement)
    with Sqlite(path) as backend:
        assert served(backend).items() <= whole.items()
        if left is not None:
            assert len(served(backend)) == len(whole) + left
        if "done" in statement:
            # More passages than there are do no harm but to those that come.
            backend.commit(1, batch_of(1, {100: "comes later"}))
        found = inspect_store(backend)
        assert {(one.kind, one.derived) for one in found} == {("vector", True)}
        assert repair_store(backend) == []
        embed(backend)
        assert served(backend).items() >= whole.items()
        assert {vector_of("comes later")} <= set(served(backend).values()) or "done" not in statement
        assert embed(backend) == 0
        assert inspect_store(backend) == []


def test_a_repair_keeps_the_vectors_of_passages(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as store:
        store.commit(1, Batch(head=1, erase=[4], unindex=[5]))
        before = served(store), store.words.search("page7", limit=50)
    change(path, "DELETE FROM text_1_data")
    change(path, "DELETE FROM passage WHERE page = 7")
    with Sqlite(path) as backend:
        assert inspect_store(backend)
        assert repair_store(backend) == []
        assert (served(backend), backend.words.search("page7", limit=50)) == before
        assert embed(backend) == 0
        # No number is given twice.
        backend.commit(1, batch_of(1, {100: "new"}))
        ((entry, text),) = backend.vectors.unembedded("hash", 9)
        assert text == "new"
        assert entry not in before[0]


def test_a_page_that_has_not_its_passages_gets_new_ones(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as store:
        before = served(store)
    change(path, "UPDATE page SET last_passage = last_passage + 32 WHERE id = 7")
    with Sqlite(path) as backend:
        assert {one.kind for one in inspect_store(backend)} >= {"index"}
        assert repair_store(backend) == []
        gone = before.keys() - served(backend).keys()
        assert embed(backend) == len(gone) > 0
        assert set(served(backend).values()) == set(before.values())


def test_no_byte_of_a_vector_is_left_after_a_forget(tmp_path: Path) -> None:
    chance = random.Random(1)
    path = tmp_path / "k.db"
    with Sqlite(path) as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {number: f"page {number}" for number in range(1, 60)}))
        waiting = backend.vectors.unembedded("hash", 100)
        kept = {text: (entry, chance.randbytes(384)) for entry, text in waiting}
        backend.vectors.add("hash", list(kept.values()))
        backend.vectors.add("other", [(entry, data[::-1]) for entry, data in kept.values()])
        secrets = [kept[f"page {number}"][1] for number in range(3, 60, 7)]
        secrets += [data[::-1] for data in secrets]
        files = b"".join(one.read_bytes() for one in tmp_path.iterdir())
        assert all(secret[at : at + 12] in files for secret in secrets for at in (0, 100, 300)), "or this test sees nothing"
        backend.commit(info.number, Batch(head=1, erase=list(range(3, 60, 7))))
        files = b"".join(one.read_bytes() for one in tmp_path.iterdir())
        assert not [secret for secret in secrets if any(secret[at : at + 8] in files for at in range(0, 376, 4))]
        assert len(list(backend.vectors.read("hash"))) == len(list(backend.vectors.read("other"))) == 59 - 9
        assert inspect_store(backend) == []


def test_a_reader_of_the_file_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path, readonly=True) as backend:
        assert backend.vectors.unembedded("other", 3)
        assert served(backend)
        with pytest.raises(StoreReadOnly):
            backend.vectors.add("hash", [])
        with pytest.raises(StoreReadOnly):
            backend.vectors.drop("hash")


def test_tenants_have_their_own_vectors(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path, tenant="other") as other, Sqlite(path) as backend:
        info = other.segment("s", time=1.0)
        assert info is not None
        other.commit(info.number, batch_of(0, {1: "mine"}))
        assert [text for _, text in other.vectors.unembedded("hash", 99)] == ["mine"]
        entries = list(served(backend))
        other.vectors.add("hash", [(entry, b"x") for entry in entries])
        assert list(other.vectors.read("hash")) == []
        assert other.words.passages(entries) == other.read([(1, 1)]) == {}
        assert other.words.entries([(1, 1)]) == {}
        assert other.citing(1, [1]) == []
        other.vectors.drop("hash")
        assert list(served(backend)) == entries
        assert inspect_store(backend) == inspect_store(other) == []


def test_one_learns_of_new_vectors_while_another_writes_and_forgets(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as reader, Sqlite(path) as writer:
        known = list(reader.vectors.read("hash"))
        writer.commit(1, batch_of(1, {100: "new"}))
        waiting = writer.vectors.unembedded("hash", 5)
        writer.commit(1, Batch(head=2, erase=[100]))
        # The vector was made while the page was forgotten.
        writer.vectors.add("hash", [(entry, vector_of(text)) for entry, text in waiting])
        assert list(reader.vectors.read("hash", known[-1].number)) == []
        writer.commit(1, batch_of(2, {101: "newer"}))
        embed(writer)
        (new,) = reader.vectors.read("hash", known[-1].number)
        assert new.data == vector_of("newer")


def run(folder: Path, seed: int, operation: int, power: bool) -> bool:
    """Writing with a fault at `operation`, then a crash; whether the fault was met."""
    path = folder / f"{seed}.db"
    vfs = FaultVFS(f"vector{seed}", seed=seed, broken=seed % 3 == 0)
    written: dict[str, bytes] = {}
    acknowledged: set[str] = set()
    met = False
    backend = Sqlite(path, vfs=vfs.name)
    try:
        backend.segment("s", time=1.0)
        vfs.arm(operation)
        for head in range(6):
            texts = {10 * head + at: f"page {head} {at}" for at in range(1, 6)}
            backend.commit(1, batch_of(head, texts))
            rows = [(entry, vector_of(text)) for entry, text in backend.vectors.unembedded("hash", 99)]
            written |= {text: vector_of(text) for text in texts.values()}
            backend.vectors.add("hash", rows)
            acknowledged |= set(texts.values())
            if head == 3:
                acknowledged.discard("page 1 3")
                backend.commit(1, Batch(head=4, erase=[13]))
                written.pop("page 1 3")
    except StoreError:
        met = True
    finally:
        if power:
            vfs.break_down()
        with suppress(StoreError):
            backend.close()
        if power:
            vfs.lose_power()
        vfs.unregister()
    with Sqlite(path, synchronous="OFF") as again:
        assert inspect_store(again) == []
        there = set(served(again).values())
        assert there <= {vector_of(text) for text in written} | {vector_of("page 1 3")}
        assert {vector_of(text) for text in acknowledged} <= there
        passages = sum(len(hits) for hits in again.words.entries([(1, page.id) for page, _ in again.pages(1)]).values())
        assert len(again.vectors.unembedded("hash", 999)) + len(there) == passages
        embed(again)
        assert len(served(again)) == passages
    return met


def test_whatever_the_disk_does_vectors_are_whole_and_none_is_missed(tmp_path: Path) -> None:
    chance = random.Random(11)
    runs = rounds(40, 160)
    met = sum(run(tmp_path, seed, chance.randrange(1, 100), power=seed % 2 == 0) for seed in range(runs))
    assert met > runs // 4


def test_a_full_disk_keeps_no_half_of_the_vectors(tmp_path: Path) -> None:
    vfs = FaultVFS("fullvectors", seed=1, faults=("full",))
    with Sqlite(tmp_path / "k.db", vfs="fullvectors") as backend:
        backend.segment("s", time=1.0)
        backend.commit(1, batch_of(0, {number: f"text {number}" for number in range(1, 200)}))
        vfs.arm(1)
        with pytest.raises(StoreFull):
            embed(backend)
        assert served(backend) == {}
        vfs.disarm()
        assert embed(backend) == 199
        assert inspect_store(backend) == []
    vfs.unregister()


def test_a_name_and_a_text_are_data(tmp_path: Path) -> None:
    hostile = """") or true or ("'; DROP TABLE vector; -- %s {} \U0001f600"""
    with Sqlite(tmp_path / "k.db") as backend:
        info = backend.segment(hostile, time=1.0, user=hostile)
        assert info is not None
        assert info.user == hostile
        backend.commit(info.number, batch_of(0, {1: hostile}))
        ((entry, text),) = backend.vectors.unembedded(hostile, 5)
        assert text == hostile
        backend.vectors.add(hostile, [(entry, b"data")])
        assert [vector.data for vector in backend.vectors.read(hostile)] == [b"data"]
        assert list(backend.vectors.read("hash")) == []
        assert backend.words.search(hostile)[0].entry == entry
        assert backend.contents.texts([digest_of(hostile)])
        assert inspect_store(backend) == []

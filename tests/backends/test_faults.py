"""Whatever the disk does: what was acknowledged is there, exactly, and nothing half done is."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

import kilburn
from effort import rounds
from kilburn import Store
from kilburn.backend import Batch, State
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.budget import Budget
from kilburn.errors import StoreError, StoreFull
from kilburn.page import digest_of
from kilburn.testing.faults import FaultVFS
from kilburn.testing.stores import batch_of

RUNS = rounds(80, 640)


def steps(seed: int) -> Iterator[tuple[Batch, dict[int, str], set[int]]]:
    """Batches of a made-up session, with the texts and the indexed pages that must be there after each."""
    chance = random.Random(seed)
    texts: dict[int, str] = {}
    indexed: set[int] = set()
    head = 0
    for _ in range(6):
        new = {
            number: f"page{number} seed{seed} "
            + " ".join(chance.choices(["alpha", "beta", "gamma", "delta", "foo_bar", "src/a.py"], k=chance.choice((3, 60, 400))))
            for number in range(len(texts) + 1, len(texts) + 1 + chance.randrange(1, 5))
        }
        batch = batch_of(head, new, states={number: State("in") for number in new})
        texts = texts | new
        indexed = indexed | set(new)
        if indexed and chance.random() < 0.5:
            gone = chance.choice(sorted(indexed - set(new)) or [0])
            batch.unindex = [gone] if gone else []
            indexed = indexed - {gone}
        if chance.random() < 0.3:
            gone = chance.choice(sorted(set(texts) - set(new)) or [0])
            batch.erase = [gone] if gone else []
            texts = texts | ({gone: ""} if gone else {})
            indexed = indexed - {gone}
        head += len(batch.events)
        yield batch, texts, indexed


def run(folder: Path, seed: int, operation: int, power: bool, synchronous: str = "FULL") -> tuple[int, list[str]]:
    """One session with a fault at `operation`; the acknowledged commits and the faults that happened."""
    path = str(folder / f"{seed}.db")
    vfs = FaultVFS(f"fault{seed}", seed=seed, broken=seed % 3 == 0)
    acknowledged = 0
    wanted: list[tuple[dict[int, str], set[int]]] = [({}, set())]
    attempted = 0
    backend = None
    try:
        backend = Sqlite(path, vfs=vfs.name, synchronous=synchronous)
        info = backend.segment("s", time=1.0)
        assert info is not None
        vfs.arm(operation)
        for batch, texts, indexed in steps(seed):
            attempted += 1
            wanted.append((texts, indexed))
            backend.commit(info.number, batch)
            acknowledged = attempted
    except StoreError:
        pass
    finally:
        crash(backend, vfs, power)
    check(path, wanted, acknowledged, attempted)
    return acknowledged, vfs.failed


def crash(backend: Sqlite | None, vfs: FaultVFS, power: bool) -> None:
    """End without the tidy close that would write the log into the file."""
    if power:
        vfs.break_down()
    if backend is not None:
        with suppress(StoreError):
            backend.close()
    if power:
        vfs.lose_power()
    vfs.unregister()


def check(path: str, wanted: list[tuple[dict[int, str], set[int]]], acknowledged: int, attempted: int) -> None:
    with Sqlite(path, synchronous="OFF") as backend:
        assert inspect_store(backend) == []
        info = backend.segment("s", time=1.0, create=False)
        assert info is not None
        events = list(backend.events(info.number))
        # The commit under way may have reached the disk although its writer was told of an error.
        assert acknowledged <= len(events) <= attempted
        texts, indexed = wanted[len(events)]
        pages = {page.id: page for page, _ in backend.pages(info.number)}
        assert set(pages) == set(texts)
        for number, text in texts.items():
            assert pages[number].digest == (digest_of(text) if text else "")
            assert not text or backend.contents.texts([pages[number].digest]) == {pages[number].digest: text}
        # Every page's own number is in the index exactly where it should be; parts of it match others too.
        hits = {number: {hit.page for hit in backend.words.search(f"page{number}", limit=1000)} for number in texts}
        assert {number for number in texts if number in hits[number]} == indexed
        backend.commit(info.number, batch_of(len(events), {1000: "life goes on"}))


def test_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    chance = random.Random(7)
    faults: set[str] = set()
    hit = 0
    for seed in range(RUNS):
        acknowledged, failed = run(tmp_path, seed, chance.randrange(1, 120), power=seed % 2 == 0)
        faults.update(name.split()[0] for name in failed)
        hit += acknowledged < 6
        for name in os.listdir(tmp_path):
            os.unlink(tmp_path / name)
    assert faults >= {"write", "torn", "full", "sync"}
    assert hit > RUNS // 4


def test_the_power_cut_is_real(tmp_path: Path) -> None:
    lost = 0
    for seed in range(0, 40, 2):
        try:
            run(tmp_path, seed, 10_000, power=True, synchronous="OFF")
        except (AssertionError, StoreError):
            lost += 1
    assert lost > 5, "a store that never syncs must lose something, or these tests see nothing"


def test_a_full_disk_says_so_and_the_store_lives_on(tmp_path: Path) -> None:
    vfs = FaultVFS("full", seed=1, faults=("full",))
    backend = Sqlite(tmp_path / "full.db", vfs="full")
    info = backend.segment("s", time=1.0)
    assert info is not None
    backend.commit(info.number, batch_of(0, {1: "kept"}))
    vfs.arm(1)
    with pytest.raises(StoreFull, match="free some space"):
        backend.commit(info.number, batch_of(1, {2: "refused"}))
    assert [page.id for page, _ in backend.pages(info.number)] == [1]
    backend.commit(info.number, batch_of(1, {3: "written once there is space"}))
    assert [page.id for page, _ in backend.pages(info.number)] == [1, 3]
    assert inspect_store(backend) == []
    backend.close()
    vfs.unregister()


def test_an_append_that_the_disk_refused_leaves_no_trace_of_its_message(tmp_path: Path) -> None:
    vfs = FaultVFS("refused", seed=1, faults=("full",))
    backend = Sqlite(tmp_path / "refused.db", vfs="refused")
    with Store(backend, Budget(400), "hybrid", tokenizer="chars/4") as store:
        session = store.session("s")
        refused = 0
        for number in range(40):
            before = session.stats().turns, len(session.contents.pages()), len(session.ledger.receipts())
            if number % 2:
                vfs.arm(1)
            try:
                session.append({"role": "user", "content": f"{number} " + "word " * 60})
            except StoreError:
                refused += 1
                assert (session.stats().turns, len(session.contents.pages()), len(session.ledger.receipts())) == before
            vfs.disarm()
        assert refused > 10
    with kilburn.open(str(tmp_path / "refused.db"), window=400, tokenizer="chars/4") as again:
        session = again.session("s")
        assert session.stats().turns == session.window.turn == 40 - refused
    vfs.unregister()

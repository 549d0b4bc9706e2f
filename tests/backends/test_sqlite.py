"""What a user meets with the SQLite file itself: modes, tenants, broken files, old libraries."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
import threading
from pathlib import Path

import apsw
import pytest

from kilburn.backend import Batch, State
from kilburn.backends.schema import check_library
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, repair_store
from kilburn.errors import StoreBusy, StoreCorrupt, StoreError, StoreReadOnly, StoreStale, StoreVersion
from kilburn.page import digest_of
from kilburn.testing.stores import batch_of, start


def filled(path: Path, tenant: str = "default") -> None:
    with Sqlite(path, tenant=tenant) as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        texts = {number: f"needle {tenant} page{number} " + "filling " * 100 for number in range(1, 40)}
        backend.commit(info.number, batch_of(0, texts, states={1: State("in", True, 0.5)}))


def read_all(path: Path, readonly: bool) -> None:
    with Sqlite(path, readonly=readonly) as backend:
        backend.contents.texts([page.digest for page, _ in backend.pages(1)])


def test_only_the_owner_can_read_the_files(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        backend = Sqlite(tmp_path / "k.db")
    finally:
        os.umask(before)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"k.db", "k.db-wal", "k.db-shm"}
    assert {stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()} == {0o600}
    backend.close()


def test_it_comes_back_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as store:
        first = list(store.pages(1)), list(store.events(1)), store.segments(), store.words.search("page7")
    with Sqlite(path) as backend:
        assert (list(backend.pages(1)), list(backend.events(1)), backend.segments(), backend.words.search("page7")) == first
        assert first[0][0][1] == State("in", True, 0.5)


def test_settings_that_durability_and_erasure_rest_on(tmp_path: Path) -> None:
    filled(tmp_path / "k.db")
    other = apsw.Connection(str(tmp_path / "k.db"))
    assert other.pragma("journal_mode") == "wal"
    assert other.execute("SELECT v FROM text_1_config WHERE k = 'secure-delete'").get == 1
    other.close()


def test_an_old_sqlite_is_refused() -> None:
    for version in ("3.40.1", "3.51.2", "3.9.0"):
        with pytest.raises(StoreVersion, match="pip install"):
            check_library(version)
    check_library("3.51.3")
    check_library("4.0.0")


def test_a_newer_file_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with apsw.Connection(str(path)) as db:
        db.pragma("user_version", 99)
    db.close()
    before = path.read_bytes()
    for readonly in (False, True):
        with pytest.raises(StoreVersion, match="schema 99"):
            Sqlite(path, readonly=readonly)
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_a_file_of_a_development_version_is_refused_and_left_alone(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "k.db"
    db = apsw.Connection(str(path))
    db.pragma("journal_mode", "WAL")
    db.execute("CREATE TABLE process(id INTEGER PRIMARY KEY, name TEXT NOT NULL) STRICT")
    db.pragma("application_id", 0x4B494C42)
    db.pragma("user_version", 8)
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreVersion, match="development version") as refused:
        Sqlite(path, readonly=readonly)
    assert "kilburn export" in str(refused.value)
    assert "kilburn import" in str(refused.value)
    assert path.read_bytes() == before


def test_a_foreign_database_is_refused_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    db = apsw.Connection(str(path))
    db.execute("CREATE TABLE mine(x); INSERT INTO mine VALUES(1)")
    db.close()
    before = path.read_bytes()
    with pytest.raises(StoreCorrupt, match="not a Kilburn store"):
        Sqlite(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("readonly", [False, True])
def test_garbage_and_truncated_files_are_corrupt(tmp_path: Path, readonly: bool) -> None:
    garbage = tmp_path / "garbage.db"
    garbage.write_bytes(os.urandom(20_000))
    with pytest.raises(StoreCorrupt, match="fsck"):
        Sqlite(garbage, readonly=readonly)
    short = tmp_path / "short.db"
    filled(short)
    short.write_bytes(short.read_bytes()[:9000])
    with pytest.raises(StoreCorrupt):
        read_all(short, readonly)


def test_a_changed_byte_is_never_served(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    text = "needle default page9 " + "filling " * 100
    with Sqlite(path) as store:
        assert store.contents.texts([digest_of(text)])[digest_of(text)] == text
    db = apsw.Connection(str(path))
    data = db.execute("SELECT data FROM content WHERE digest = ?", (bytes.fromhex(digest_of(text)),)).get
    for at in range(0, len(data), 3):
        broken = data[:at] + bytes([data[at] ^ 0x40]) + data[at + 1 :]
        db.execute("UPDATE content SET data = ? WHERE digest = ?", (broken, bytes.fromhex(digest_of(text))))
        with Sqlite(path) as store, pytest.raises(StoreCorrupt, match=digest_of(text)):
            store.contents.texts([digest_of(text)])
    db.close()
    with Sqlite(path) as backend:
        assert [finding.kind for finding in inspect_store(backend)] == ["content"]
        assert [finding.kind for finding in repair_store(backend)] == ["content"]
        assert backend.words.search("page8")
        with pytest.raises(StoreCorrupt):
            backend.contents.texts([digest_of(text)])


def test_what_is_derived_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as store:
        whole = store.words.search("page7 needle", limit=50)
    db = apsw.Connection(str(path))
    db.execute("DELETE FROM passage WHERE page = 7")
    db.execute("INSERT INTO text_1(text_1, rowid, words) SELECT 'delete', first_passage, 'needle' FROM page WHERE id = 8")
    db.execute("INSERT INTO content(tenant, digest, size, codec, data) VALUES(1, x'00', 0, 0, x'')")
    db.close()
    with Sqlite(path) as backend:
        assert {finding.kind for finding in inspect_store(backend)} == {"index", "orphan", "content"}
        assert repair_store(backend) == []
        assert backend.words.search("page7 needle", limit=50) == whole


def test_reading_only(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with pytest.raises(StoreError, match="there is no file"):
        Sqlite(path, readonly=True)
    assert not path.exists()
    filled(path)
    with Sqlite(path, readonly=True) as store:
        assert store.words.search("page7")[0].page == 7
        assert len(list(store.pages(1))) == 39
        assert store.segment("new", time=1.0, create=False) is None
        with pytest.raises(StoreReadOnly):
            store.segment("new", time=1.0)
        with pytest.raises(StoreReadOnly):
            store.commit(1, Batch(head=1))
        with pytest.raises(StoreReadOnly):
            repair_store(store)
    with Sqlite(path, tenant="nobody", readonly=True) as backend:
        assert (backend.segments(), backend.words.search("needle"), list(backend.pages(1)), inspect_store(backend)) == (
            [],
            [],
            [],
            [],
        )
    path.with_name("empty.db").touch()
    with pytest.raises(StoreCorrupt, match="empty"):
        Sqlite(path.with_name("empty.db"), readonly=True)


def test_paths_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no folder"):
        Sqlite(tmp_path / "none" / "k.db")
    with pytest.raises(StoreError, match="not a file"):
        Sqlite(tmp_path)
    with pytest.raises(StoreError, match="synchronous"):
        Sqlite(tmp_path / "k.db", synchronous="MAYBE")


def test_a_store_that_waits_for_the_disk_only_when_it_is_told_to(tmp_path: Path) -> None:
    with Sqlite(tmp_path / "k.db", synchronous="NORMAL") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: "one"}))
        backend.sync()
        log = tmp_path / "k.db-wal"
        log.rename(tmp_path / "away")
        backend.sync()  # there is nothing to wait for
        backend.commit(info.number, batch_of(1, {2: "two"}))
        with pytest.raises(StoreError, match="syncing"):
            backend.sync()
        (tmp_path / "away").rename(log)
        backend.sync()
        assert len(list(backend.pages(info.number))) == 2


def test_a_folder_that_cannot_be_written() -> None:
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    filled(folder / "k.db")
    folder.chmod(0o555)
    (folder / "k.db").chmod(0o444)
    # Root may write anywhere, so become somebody who may not.
    before = os.geteuid()
    if before == 0:
        os.seteuid(65534)
    try:
        for path in (folder / "new.db", folder / "k.db"):
            with pytest.raises(StoreReadOnly):
                Sqlite(path)
        with Sqlite(folder / "k.db", readonly=True) as backend:
            assert backend.words.search("page7")
            assert inspect_store(backend) == []
    finally:
        os.seteuid(before)
        folder.chmod(0o700)
        shutil.rmtree(folder)


def test_tenants_see_nothing_of_each_other(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path, "a")
    filled(path, "b'; DROP TABLE page; --")
    with Sqlite(path, tenant="a") as a, Sqlite(path, tenant="b'; DROP TABLE page; --") as b:
        (mine,), (other,) = a.segments(), b.segments()
        assert mine.number != other.number
        assert {hit.segment for hit in a.words.search("needle DROP TABLE", limit=100)} == {mine.number}
        assert a.words.search("needle", segments=[other.number]) == []
        assert list(a.pages(other.number)) == []
        assert list(a.events(other.number)) == []
        (page, _) = next(iter(b.pages(other.number)))
        with pytest.raises(StoreCorrupt, match="missing"):
            a.contents.texts([page.digest])
        with pytest.raises(StoreError, match="no segment"):
            a.commit(other.number, Batch(head=1, erase=[1]))
        # The same text lies there twice: neither can tell that the other has it.
        for backend, number in ((a, mine.number), (b, other.number)):
            backend.commit(number, batch_of(1, {100: "the very same"}))
        a.commit(mine.number, Batch(head=2, erase=[100]))
        assert b.contents.texts([digest_of("the very same")])
        assert inspect_store(a) == inspect_store(b) == []


def test_a_second_writer_waits_then_gets_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with Sqlite(path, busy_timeout=0.1) as store, pytest.raises(StoreBusy, match="another process"):
        store.commit(1, batch_of(1, {100: "refused"}))
    with Sqlite(path, busy_timeout=120.0) as backend:
        timer = threading.Timer(0.2, lambda: other.execute("COMMIT"))
        timer.start()
        backend.commit(1, batch_of(1, {100: "waited"}))
        timer.join()
        assert backend.words.search("waited")
    other.close()


def test_a_batch_that_fails_leaves_the_file_to_the_next_writer(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as one, Sqlite(path, busy_timeout=0.0) as other:
        batch = batch_of(1, {100: "half"})
        batch.erase = [999]
        with pytest.raises(StoreError, match="999"):
            one.commit(1, batch)
        with pytest.raises(StoreError):
            one.contents.texts([digest_of("half")])
        other.commit(1, batch_of(1, {100: "whole"}))
        assert one.contents.texts([digest_of("whole")])


def test_a_check_sees_the_text_index_as_another_process_left_it(tmp_path: Path) -> None:
    """FTS5 remembers of which pieces an index is made. Others merge these."""
    path = tmp_path / "k.db"
    with Sqlite(path) as writer, Sqlite(path) as checker:
        number = start(writer)
        for head in range(24):
            writer.commit(number, batch_of(head, {head + 1: " ".join(f"word{head * 99 + at}" for at in range(99))}))
            if head % 4 == 0:
                assert inspect_store(checker) == []
                checker.words.search("word1")


def test_of_two_writers_the_slower_is_stale(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    filled(path)
    with Sqlite(path) as fast, Sqlite(path) as slow:
        fast.commit(1, batch_of(1, {100: "first"}))
        with pytest.raises(StoreStale, match="reopen"):
            slow.commit(1, batch_of(1, {100: "second"}))
        assert slow.contents.texts([digest_of("first")])
        slow.commit(1, batch_of(2, {101: "second"}))
        assert {hit.page for hit in fast.words.search("first second")} == {100, 101}

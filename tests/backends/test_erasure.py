"""After a forget no byte of the page is left in any of the store's files."""

from __future__ import annotations

import random
import signal
import string
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import apsw
import pytest

from backends import remains
from kilburn.backend import Batch
from kilburn.backends.slack import wipe
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.errors import StoreError
from kilburn.event import Act, Event
from kilburn.page import digest_of
from kilburn.testing.faults import FaultVFS
from kilburn.testing.stores import batch_of, page_of


def word(chance: random.Random) -> str:
    """A word that shares no beginning or end with others, so that prefix compression cannot hide it."""
    return "".join(chance.choices(string.ascii_lowercase, k=20)) + "x"


def everything(folder: Path) -> bytes:
    return b"".join(path.read_bytes() for path in sorted(folder.iterdir()))


def traces(folder: Path, words: list[str]) -> list[str]:
    """The words of which any ten letters in a row are in any file."""
    files = everything(folder)
    return [one for one in words if any(one[at : at + 10].encode() in files for at in range(len(one) - 9))]


@pytest.mark.parametrize("together", [True, False], ids=["in one batch", "one by one"])
@pytest.mark.parametrize("later", [0, 60], ids=["at once", "after merges"])
def test_nothing_of_an_erased_page_is_left(tmp_path: Path, together: bool, later: int) -> None:
    chance = random.Random(3)
    secrets = {number: [word(chance) for _ in range(3)] for number in range(10, 90, 8)}
    texts = {
        number: " ".join(
            [*chance.choices(["the", "quick", "brown", "fox", "jumps", "over", "it"], k=30), *secrets.get(number, [])]
        )
        * (1 + number % 3)
        for number in range(1, 90)
    }
    with Sqlite(tmp_path / "k.db", synchronous="OFF") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        head = 0
        for group in [texts] if together else [{number: text} for number, text in texts.items()]:
            backend.commit(info.number, batch_of(head, group))
            head += 1
        for number in range(1000, 1000 + later):
            backend.commit(info.number, batch_of(head, {number: f"later {number} " + word(chance)}))
            head += 1
        words = [secret for group in secrets.values() for secret in group]
        assert traces(tmp_path, words) == words
        backend.commit(info.number, Batch(head=head, erase=list(secrets)))
        assert traces(tmp_path, words) == []
        assert inspect_store(backend) == []
        assert all(backend.words.search(secret) == [] for secret in words)
    assert traces(tmp_path, words) == []


def test_labels_calls_extras_digests_and_reasons_go_too(tmp_path: Path) -> None:
    page = page_of(1, "canarytext " * 50, extra='{"canaryextra": 1}', label="canarylabel", call="canarycall")
    texts = {digest_of(text): text for text in ("canarytext " * 50, '{"canaryextra": 1}')}
    event = Event(
        number=1,
        act=Act.ADMIT,
        time=1.0,
        pages=(1,),
        why="canarywhy",
        data={"digest": page.digest, "label": ["canarylabel"], "kept": 7},
    )
    with Sqlite(tmp_path / "k.db") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, Batch(head=0, events=[event], pages=[page], texts=texts, index=[1]))
        backend.commit(info.number, Batch(head=1, erase=[1]))
        files = everything(tmp_path)
        assert b"canary" not in files
        assert page.digest.encode() not in files
        assert bytes.fromhex(page.digest) not in files
        assert next(backend.events(info.number)).data == {"digest": "", "label": [""], "kept": 7}


def test_a_reader_delays_the_scrubbing_of_the_log_but_not_the_erasure(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, busy_timeout=0.05) as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: "canarytext alone"}))
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM page").fetchall()
        backend.commit(info.number, Batch(head=1, erase=[1]))
        assert backend.words.search("canarytext") == []
        reader.close()
        backend.commit(info.number, batch_of(1, {2: "another"}))
        assert b"canarytext" not in everything(tmp_path)


FORGETFUL = """
import sys
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
store = Sqlite(sys.argv[1], busy_timeout=0.0)
store.commit(1, Batch(head=1, erase=[1]))
print("forgotten", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("end", ["killed", "closed"])
def test_the_next_writer_finishes_an_erasure(tmp_path: Path, end: str) -> None:
    """A reader kept the log when the page was forgotten, and the writer ended before it could cut it."""
    path = tmp_path / "k.db"
    with Sqlite(path) as store:
        info = store.segment("s", time=1.0)
        assert info is not None
        store.commit(info.number, batch_of(0, {1: "canarytext alone", 2: "kept"}))
    reader = apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY)
    reader.execute("BEGIN; SELECT count(*) FROM page").fetchall()
    with subprocess.Popen([sys.executable, "-c", FORGETFUL, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"forgotten\n"
        if end == "killed":
            writer.send_signal(signal.SIGKILL)
    reader.close()
    if end == "killed":
        assert b"canarytext" in everything(tmp_path), "or this test sees nothing"
    with Sqlite(path) as backend:
        assert b"canarytext" not in everything(tmp_path)
        assert inspect_store(backend) == []
    assert b"canarytext" not in everything(tmp_path)


def test_an_erasure_is_tried_again_by_any_writer_and_waits_for_nobody(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, busy_timeout=0.0) as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: "canarytext alone"}))
        reader = apsw.Connection(str(path))
        reader.execute("BEGIN; SELECT count(*) FROM page").fetchall()
        # This one would wait an hour for the reader.
        with Sqlite(path, busy_timeout=3600.0) as other:
            backend.commit(info.number, Batch(head=1, erase=[1]))
            other.commit(info.number, batch_of(1, {2: "another"}))
            reader.close()
            other.commit(info.number, batch_of(2, {3: "and another"}))
            assert b"canarytext" not in everything(tmp_path)


def test_of_an_erased_process_neither_name_nor_user_nor_ledger_is_left(tmp_path: Path) -> None:
    with Sqlite(tmp_path / "k.db") as backend:
        for number in range(30):
            info = backend.segment(f"canaryname {number}", time=1.0, user=f"canaryuser {number}")
            assert info is not None
            note = Event(number=2, act=Act.NOTE, time=1.0, why="canarywhy", data={"canarykey": ["canarydata"]})
            backend.commit(info.number, batch_of(0, {1: f"canarytext {number}"}))
            backend.commit(info.number, Batch(head=1, events=[note]))
            backend.commit(info.number, Batch(head=2, erase=[1]))
        kept = backend.segment("kept", time=1.0, user="keeper")
        assert kept is not None
        for info in backend.segments():
            if info.name != "kept":
                backend.erase(info.number)
        assert b"canary" not in everything(tmp_path)
        assert inspect_store(backend) == []
        assert backend.segments()[-1] == kept
    assert b"canary" not in everything(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_of_a_store_of_many_operations_nothing_forgotten_is_left(tmp_path: Path, seed: int) -> None:
    """SQLite has moved its rows from page to page before they are erased, and two objects remember the pages as they were."""
    found, done = remains.run(tmp_path, seed, 800)
    assert found == []
    assert done["forget"] > 50


def test_the_judge_sees_what_is_left(tmp_path: Path) -> None:
    trial = remains.Trial(tmp_path, 1)
    for _ in range(40):
        trial.add()
    assert trial.left() == []
    trial.gone = list(trial.kept.values())
    trial.kept = {}
    words = {word for one in trial.gone for word in one.words}
    found = " ".join(trial.left())
    assert len([word for word in words if word in found]) > len(words) // 2
    assert "a frame in" in found
    trial.backend.close()
    trial.other.close()


def numbers(backend: Sqlite, count: int) -> int:
    """A session of which each page has a number of its own, as accounts have: its neighbours differ in the last letter."""
    info = backend.segment("s", time=1.0)
    assert info is not None
    backend.commit(info.number, batch_of(0, {number: f"canaryaccount{number:05}" for number in range(1, count + 1)}))
    return info.number


def left_of(folder: Path, gone: list[int]) -> list[int]:
    files = everything(folder)
    return [number for number in gone if f"account{number:05}".encode() in files]


def test_the_pages_of_the_text_index_are_not_found_by_forgotten_words(tmp_path: Path) -> None:
    """FTS5 keeps the first word that a page of its index had, to find the page."""
    gone = [number for number in range(1, 3001) if number % 5]
    with Sqlite(tmp_path / "k.db", synchronous="OFF") as backend:
        segment = numbers(backend, 3000)
        with backend.erasing():
            for at in range(0, len(gone), 300):
                backend.commit(segment, Batch(head=1, erase=gone[at : at + 300]))
        assert left_of(tmp_path, gone) == []
        assert inspect_store(backend) == []
        for number in range(1, 3001, 7):
            hits = [hit.page for hit in backend.words.search(f"{number:05}")]
            assert hits == ([] if number % 5 else [number])


def test_a_word_that_left_the_index_before_its_page_is_forgotten_is_not_left(tmp_path: Path) -> None:
    gone = [number for number in range(1, 3001) if number % 5]
    with Sqlite(tmp_path / "k.db", synchronous="OFF") as backend:
        segment = numbers(backend, 3000)
        backend.commit(segment, Batch(head=1, unindex=gone))
        backend.commit(segment, Batch(head=1, erase=gone))
        assert left_of(tmp_path, gone) == []
        assert inspect_store(backend) == []


def page_at(path: Path, number: int) -> bytes:
    return path.read_bytes()[(number - 1) * 4096 : number * 4096]


def put_in_slack(path: Path, word: bytes) -> int:
    """Write a word into the unused middle of a page of the ledger, as SQLite does when it moves rows; the page's number."""
    with apsw.Connection(str(path), flags=apsw.SQLITE_OPEN_READONLY) as db:
        number = db.execute("SELECT pageno FROM dbstat WHERE name = 'event' AND pagetype = 'leaf' AND unused > 200").get
    db.close()
    with path.open("r+b") as file:
        file.seek((number - 1) * 4096)
        page = file.read(4096)
        cells, content = int.from_bytes(page[3:5]), int.from_bytes(page[5:7])
        assert content - (8 + 2 * cells) > 200
        file.seek((number - 1) * 4096 + (8 + 2 * cells + content) // 2)
        file.write(word)
    return int(number)


def one_of_two(path: Path) -> int:
    """A store with two pages and a word in the slack of its ledger; the segment's number."""
    with Sqlite(path, synchronous="OFF") as backend:
        info = backend.segment("s", time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, {1: "forgotten", 2: "kept"}, events=3))
    put_in_slack(path, b"canarytext")
    return info.number


@pytest.mark.parametrize("who", ["the same", "another"])
def test_what_is_in_memory_does_not_come_back(tmp_path: Path, who: str) -> None:
    """Whoever has read a page before it was wiped writes it again."""
    path = tmp_path / "k.db"
    segment = one_of_two(path)
    with Sqlite(path) as backend, Sqlite(path) as other:
        writer = backend if who == "the same" else other
        for one in (backend, other):
            assert len(list(one.events(segment))) == 3
        assert b"canarytext" in everything(tmp_path)
        backend.commit(segment, Batch(head=3, erase=[1]))
        assert b"canarytext" not in everything(tmp_path)
        writer.commit(segment, batch_of(3, {3: "more"}))
        assert b"canarytext" not in everything(tmp_path)
    assert b"canarytext" not in everything(tmp_path)


def test_whatever_the_disk_does_it_is_wiped_in_the_end(tmp_path: Path) -> None:
    """A fault at each operation of a forget."""
    operation, failed, wiped = 0, 1, 0
    while failed:
        operation += 1
        folder = tmp_path / str(operation)
        folder.mkdir()
        segment = one_of_two(folder / "k.db")
        vfs = FaultVFS(f"wiping{operation}", seed=operation)
        with Sqlite(folder / "k.db", vfs=vfs.name) as store:
            vfs.arm(operation)
            try:
                store.commit(segment, Batch(head=3, erase=[1]))
            except StoreError:
                erased = False
            else:
                erased = True
            vfs.disarm()
            failed = len(vfs.failed)
            if erased:
                wiped += failed
                store.commit(segment, batch_of(3, {3: "more"}))
                assert b"canarytext" not in everything(folder)
        vfs.unregister()
        with Sqlite(folder / "k.db", synchronous="OFF") as backend:
            if not erased:
                backend.commit(segment, Batch(head=3, erase=[1]))
            assert b"canarytext" not in everything(folder)
            assert inspect_store(backend) == []
    assert operation > wiped > 10


FORGETTING = """
import sys
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
with Sqlite(sys.argv[1], synchronous="OFF") as store:
    for number in range(1, 400):
        store.commit(1, Batch(head=1, erase=[number]))
        print(number, flush=True)
"""


@pytest.mark.parametrize("after", [1, 8, 40])
def test_what_a_killed_process_has_forgotten_is_gone_when_the_file_is_opened(tmp_path: Path, after: int) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, synchronous="OFF") as store:
        numbers(store, 1000)
    put_in_slack(path, b"canarytext")
    with subprocess.Popen([sys.executable, "-c", FORGETTING, str(path)], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        for line in child.stdout:
            if int(line) == after:
                child.send_signal(signal.SIGKILL)
    with Sqlite(path) as backend:
        gone = [page.id for page, _ in backend.pages(1) if not page.digest]
        assert gone == list(range(1, len(gone) + 1))
        assert len(gone) >= after
        assert left_of(tmp_path, gone) == []
        assert b"canarytext" not in everything(tmp_path)
        assert inspect_store(backend) == []


@pytest.mark.parametrize("size", [512, 1024, 4096, 65536])
def test_rows_of_any_database_are_left_as_they_are(tmp_path: Path, size: int) -> None:
    chance = random.Random(size)
    db = apsw.Connection(str(tmp_path / "a.db"))
    db.execute(f"PRAGMA page_size = {size:d}; PRAGMA secure_delete = 1; PRAGMA synchronous = OFF")
    db.execute("CREATE TABLE a(id INTEGER PRIMARY KEY, word TEXT); CREATE INDEX b ON a(word)")
    db.execute("CREATE TABLE c(word TEXT PRIMARY KEY) WITHOUT ROWID")
    there: dict[int, str] = {}
    gone: list[remains.Secret] = []
    slack = 0
    for _ in range(6):
        with db:
            for _ in range(300):
                number = chance.randrange(600)
                if number in there:
                    gone.append(remains.Secret({there[number].rstrip(".")}))
                    db.execute("DELETE FROM a WHERE id = ?", (number,))
                    db.execute("DELETE FROM c WHERE word = ?", (there.pop(number),))
                else:
                    there[number] = remains.word_of(chance) + "." * chance.choice((0, 0, 9, 90, 900, 9000))
                    db.execute("INSERT INTO a VALUES(?, ?)", (number, there[number]))
                    db.execute("INSERT INTO c VALUES(?)", (there[number],))
        kept = [remains.Secret({text.rstrip(".")}) for text in there.values()]
        slack += len(remains.remains(tmp_path, gone, kept))
        db.release_memory()
        db.execute("BEGIN IMMEDIATE")
        assert wipe(db) == []
        db.execute("COMMIT")
        db.release_memory()
        assert remains.remains(tmp_path, gone, kept) == []
        assert db.execute("PRAGMA integrity_check").get == "ok"
        assert dict(db.execute("SELECT id, word FROM a")) == there
        assert sorted(there.values()) == [text for (text,) in db.execute("SELECT word FROM c ORDER BY word")]
    db.close()
    assert slack > 0, "or this test sees nothing"


@pytest.mark.parametrize("at", [1, 3, 5, 7, 8, 9], ids=["free block", "cells", "content", "fragments", "pointer", "its end"])
def test_a_page_that_contradicts_itself_is_left_as_it_is(tmp_path: Path, at: int) -> None:
    path = tmp_path / "k.db"
    one_of_two(path)
    number = put_in_slack(path, b"canarytext")
    with path.open("r+b") as file:
        file.seek((number - 1) * 4096 + at)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 5]))
    before = page_at(path, number)
    db = apsw.Connection(str(path))
    db.execute("BEGIN IMMEDIATE")
    # With a gap that ends before the word or begins after it, the page seems to be clean.
    assert wipe(db) == [number] or at in (3, 5)
    db.execute("ROLLBACK")
    db.close()
    assert page_at(path, number) == before


def read_pages(work: Callable[[], object]) -> int:
    """How many pages of the file a piece of work looks at for slack."""
    count = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        code = frame.f_code
        count += event == "call" and code.co_name == "_is_clean" and code.co_filename.endswith("slack.py")

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def test_a_forget_looks_at_what_was_written_since_the_last_one(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, synchronous="OFF") as backend:
        segment = numbers(backend, 4000)
        # All that was moved into a new file was wiped.
        assert read_pages(backend._move_log) > 200
        assert read_pages(lambda: backend.commit(segment, Batch(head=1, erase=[7]))) < 60
        backend.commit(segment, batch_of(1, {5001: "more"}))
    with Sqlite(path, synchronous="OFF") as backend:
        assert read_pages(lambda: backend.commit(segment, Batch(head=2, erase=[8]))) < 60
        assert left_of(tmp_path, [7, 8]) == []


@pytest.mark.parametrize("when", ["open", "closed"])
def test_a_forget_looks_at_all_where_another_program_has_written_to_the_file(tmp_path: Path, when: str) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path, synchronous="OFF") as backend:
        segment = numbers(backend, 4000)
        if when == "open":
            remains.move_log(path)
    if when == "closed":
        put_in_slack(path, b"canarytext")
    with Sqlite(path, synchronous="OFF") as backend:
        assert read_pages(lambda: backend.commit(segment, Batch(head=1, erase=[7]))) > 200
        assert read_pages(lambda: backend.commit(segment, Batch(head=1, erase=[8]))) < 60
    assert left_of(tmp_path, [7, 8]) == []
    assert b"canarytext" not in everything(tmp_path)

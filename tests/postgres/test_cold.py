"""Cold texts of a store in PostgreSQL: read back exactly, deleted when they are forgotten, and never lost."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import psycopg
import pytest

import kilburn
from backends.server_files import files_with
from backends.test_cold import DIGESTS, TEXTS, altered, cut, emptied, lost, objects, swapped
from cli.terminal import kilburn as command
from kernel.talk import user
from kilburn.backend import Batch, Moved
from kilburn.backends.codec import parted, unpack
from kilburn.backends.cold import MARK, new_place
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import SpecError, StoreCorrupt, StoreError
from kilburn.page import digest_of
from kilburn.testing.stores import batch_of

pytest.importorskip("obstore")

PROMPT: dict[str, Any] = {"window": 4000, "policy": "fifo", "tokenizer": "chars/4", "embedder": None}


def filled(url: str, folder: Path, key: str = "") -> Postgres:
    """A store with six texts and a cold place; the text of p1 is that of another session's p1, too."""
    backend = Postgres(url)
    backend.keep_setting("cold", msgspec.json.encode(new_place(str(folder), key)).decode())
    for name, texts in (("one", TEXTS), ("two", {1: TEXTS[1]})):
        info = backend.segment(name, time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, texts))
    return backend


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_cold_text_is_read_back_exactly(tmp_path: Path, url: str, encrypted: bool) -> None:
    folder, key = tmp_path / "cold place", str(tmp_path / "key") if encrypted else ""
    whole = {DIGESTS[number]: text for number, text in TEXTS.items()}
    with filled(url, folder, key) as backend, Postgres(url) as other:
        waiting = backend.unembedded("hash", 9)
        moved = backend.chill(DIGESTS.values())
        assert moved.texts == 6
        assert moved.bytes > 0
        assert len(objects(folder)) == 6
        assert backend.cold() == other.cold() == {digest: len(text) for digest, text in whole.items()}
        assert backend.texts(whole) == other.texts(whole) == whole
        assert 3 in {hit.page for hit in other.search("canaryword3")}
        assert other.unembedded("hash", 9) == waiting
        assert other.chill(DIGESTS.values()) == Moved()
        assert backend.scrub() == []
        other.commit(1, Batch(head=1, unindex=[4]))
        assert 4 not in {hit.page for hit in other.search("canaryword4")}
        other.commit(1, Batch(head=1, index=[4]))
        assert 4 in {hit.page for hit in other.search("canaryword4")}
        with Postgres(url, readonly=True) as reader:
            assert reader.texts([DIGESTS[4]])[DIGESTS[4]] == TEXTS[4]
        if encrypted:
            assert not any(b"canaryword" in path.read_bytes() for path in objects(folder))
        assert other.warm([DIGESTS[1]]).texts == 1
        assert backend.warm().texts == 5
        assert backend.cold() == {}
        assert objects(folder) == []
        assert backend.texts(whole) == whole


def test_forgetting_deletes_the_object_and_every_byte(tmp_path: Path, url: str, server: OwnServer) -> None:
    folder = tmp_path / "cold"
    with filled(url, folder) as backend:
        backend.chill(DIGESTS.values())
        names = {path.name: path for path in objects(folder)}
        backend.commit(1, Batch(head=1, erase=[1, 2]))
        assert len(objects(folder)) == 5
        assert backend.texts([DIGESTS[1]])[DIGESTS[1]] == TEXTS[1]
        backend.commit(2, Batch(head=1, erase=[1]))
        assert len(objects(folder)) == 4
        with backend.erasing():
            backend.commit(1, Batch(head=1, erase=[3]))
            assert len(objects(folder)) == 4
            backend.commit(1, Batch(head=1, erase=[4]))
        assert len(objects(folder)) == 2
        assert backend.scrub() == []
        with backend.together():
            backend.commit(1, Batch(head=1, erase=[5]))
            assert len(objects(folder)) == 2
        assert len(objects(folder)) == 1
        left = {path.name for path in objects(folder)}
        for name in names:
            assert bool(files_with(server, name)) == (name in left)
        for number in range(1, 6):
            assert files_with(server, f"canaryword{number}") == []


def test_what_is_rolled_back_deletes_nothing(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "cold"

    def give_up(backend: Postgres) -> None:
        with backend.together():
            backend.commit(1, Batch(head=1, erase=[3]))
            raise InterruptedError

    with filled(url, folder) as backend:
        backend.chill(DIGESTS.values())
        with pytest.raises(InterruptedError):
            give_up(backend)
        assert len(objects(folder)) == 6
        assert backend.texts([DIGESTS[3]])[DIGESTS[3]] == TEXTS[3]
        assert backend.scrub() == []


def test_a_text_that_is_said_again_comes_back(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "cold"
    with filled(url, folder) as backend:
        backend.chill(DIGESTS.values())
        backend.commit(2, batch_of(1, {2: TEXTS[3]}))
        assert DIGESTS[3] not in backend.cold()
        assert backend.texts([DIGESTS[3]])[DIGESTS[3]] == TEXTS[3]
    with Postgres(url) as backend:
        assert len(objects(folder)) == 5
        assert backend.scrub() == []


@pytest.mark.parametrize("damage", [lost, cut, altered, emptied, swapped])
def test_damage_is_said_and_never_hidden(tmp_path: Path, url: str, damage: Callable[[Path], None]) -> None:
    folder = tmp_path / "cold"
    with filled(url, folder, str(tmp_path / "key")) as backend:
        backend.chill(DIGESTS.values())
        damage(sorted(objects(folder))[0])
        wrong = []
        for number, digest in DIGESTS.items():
            try:
                assert backend.texts([digest])[digest] == TEXTS[number]
            except StoreCorrupt:
                wrong.append(number)
        assert len(wrong) == 1
        with pytest.raises(StoreCorrupt) as caught:
            backend.texts([DIGESTS[wrong[0]]])
        assert "backup of the cold place" in caught.value.advice
        assert len(backend.scrub()) == 1
        before = backend.cold()
        with pytest.raises(StoreCorrupt):
            backend.warm()
        assert backend.cold() == before
        # What nobody can read any more can still be forgotten, with its words in the index.
        for segment in [2, 1] if wrong[0] == 1 else [1]:
            backend.commit(segment, Batch(head=1, erase=wrong))
        assert wrong[0] not in {hit.page for hit in backend.search(f"canaryword{wrong[0]}")}
        assert backend.scrub() == []
        with psycopg.connect(url) as connection:
            left = connection.execute(
                "SELECT count(DISTINCT (block, substr(lows, at, 2)))"
                " FROM kilburn.posting, generate_series(1, length(lows), 2) AS at"
            ).fetchone()
            passages = connection.execute("SELECT count(*) FROM kilburn.passage").fetchone()
        assert left == passages


def test_another_key_is_refused_and_to_forget_nobody_needs_it(tmp_path: Path, url: str) -> None:
    key = tmp_path / "key"
    with filled(url, tmp_path / "cold", str(key)) as backend:
        backend.chill(DIGESTS.values())
        backend.commit(1, Batch(head=1, unindex=[2]))
    right = key.read_text()
    key.write_text("ab" * 32)
    with Postgres(url) as backend:
        with pytest.raises(SpecError, match="key"):
            backend.texts([DIGESTS[1]])
        backend.commit(1, Batch(head=1, erase=[2]))
        assert len(objects(tmp_path / "cold")) == 5
    key.write_text(right)
    with Postgres(url) as backend:
        assert backend.texts([DIGESTS[1]])


def test_a_place_that_cannot_be_written_leaves_everything_where_it_was(tmp_path: Path, url: str) -> None:
    folder = tmp_path / "cold"
    with filled(url, folder) as backend:
        inner = folder / msgspec.json.decode(backend.settings()["cold"])["folder"]
        shutil.rmtree(inner)
        inner.write_text("a file stands in the way")
        with pytest.raises(StoreError, match="cold place"):
            backend.chill(DIGESTS.values())
        assert backend.cold() == {}
        assert backend.texts(DIGESTS.values())
        inner.unlink()
        assert backend.chill(DIGESTS.values()).texts == 6
        assert backend.scrub() == []
        stray = inner / "zz" / "zz-nobody"
        stray.parent.mkdir()
        stray.write_bytes(b"nobody's")
        assert len(backend.scrub()) == 1
        assert backend.scrub(repair=True) == []
        assert not stray.exists()


def test_without_a_place_nothing_moves_and_a_short_text_stays(tmp_path: Path, url: str) -> None:
    with Postgres(url) as backend:
        with pytest.raises(SpecError, match="no cold place"):
            backend.chill([DIGESTS[1]])
        assert backend.warm() == Moved()
        assert backend.scrub() == []
    with filled(url, tmp_path / "cold") as backend:
        backend.commit(2, batch_of(1, {2: "short"}))
        assert backend.chill([digest_of("short")]) == Moved()


def test_readers_never_miss_a_text_that_goes_and_comes(tmp_path: Path, url: str) -> None:
    over, wrong = threading.Event(), list[Exception]()
    whole = {DIGESTS[number]: text for number, text in TEXTS.items()}

    def read(reader: Postgres) -> None:
        while not over.is_set():
            try:
                assert reader.texts(whole) == whole
            except Exception as error:
                wrong.append(error)

    with filled(url, tmp_path / "cold") as backend, Postgres(url, readonly=True) as reader:
        threads = [threading.Thread(target=read, args=(reader,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert backend.chill(whole).texts == 6
            assert backend.warm().texts == 6
        over.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert objects(tmp_path / "cold") == []


KILLED = """
import os, signal, sys
from kilburn.backend import Batch
from kilburn.backends.postgres.store import Postgres
from backends.test_cold import DIGESTS

url, what, left = sys.argv[1], sys.argv[2], int(sys.argv[3])

def step():
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

# Every object that is written is then opened, to be synced.
sys.addaudithook(lambda event, given: step() if event == "open" and "/cold" in str(given[0]) else None)

backend = Postgres(url)
write = backend._db.write

def stepping(*given, **more):
    step()
    made = write(*given, **more)
    step()
    return made

backend._db.write = stepping
if what == "chill":
    backend.chill(DIGESTS.values())
elif what == "warm":
    backend.warm()
else:
    with backend.erasing():
        for segment, pages in ((2, [1]), (1, [1, 2, 3])):
            there = set(pages) - set(backend.forgotten(segment))
            if there:
                backend.commit(segment, Batch(head=1, erase=sorted(there)))
"""


@pytest.mark.slow
@pytest.mark.parametrize("what", ["chill", "warm", "forget"])
def test_killed_at_some_steps_nothing_is_lost_and_nothing_stays(tmp_path: Path, url: str, what: str) -> None:
    tests, folder = str(Path(__file__).parents[1]), tmp_path / "cold"
    environment = os.environ | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"}
    with filled(url, folder) as backend:
        if what != "chill":
            backend.chill(DIGESTS.values())
    kills = 0
    for left in {"chill": (1, 2, 3, 10, 26, 27, 28, 29, 1000)}.get(what, (1, 2, 3, 4, 5, 6, 1000)):
        words = [sys.executable, "-c", KILLED, url, what, str(left)]
        done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
        assert done.returncode in (0, -9), done.stderr
        kills += done.returncode == -9
        with Postgres(url) as backend:
            gone = set(backend.forgotten(1)) - ({1} - set(backend.forgotten(2)))
            kept = {digest: TEXTS[number] for number, digest in DIGESTS.items() if number not in gone}
            assert backend.texts(kept) == kept
            assert backend.scrub(repair=True) == []
            assert len(objects(folder)) == len(backend.cold())
            if what == "warm":
                backend.chill(kept)
            elif what == "chill" and left < 1000:
                backend.warm()
    assert kills >= 3


def test_the_verbs_move_texts_and_a_copy_reads_them(tmp_path: Path, url: str) -> None:
    with kilburn.open(url, **PROMPT) as store:
        for number, text in TEXTS.items():
            store.session(f"s{number}").append(user(text))
    assert command("cold", "set", tmp_path / "cold", "--key", tmp_path / "key", "--db", url).status == 0
    moved = command("cold", "move", "--older-than", "0s", "--least", 10, "--db", url, "--json")
    assert moved.json["texts"] == 6, moved.err
    assert command("recall", "s3", "p1", "--db", url).out.strip() == TEXTS[3]
    kilburn.copy(url, str(tmp_path / "whole.db"))
    with kilburn.open(str(tmp_path / "whole.db"), **PROMPT) as store:
        assert store.session("s5").recall("p1") == TEXTS[5]
        assert store.backend.cold() == {}
    assert command("cold", "scrub", "--db", url).status == 0
    assert command("forget", "--session", "s3", "--yes", "--db", url).status == 0
    assert len(objects(tmp_path / "cold")) == 5
    assert command("cold", "back", "--db", url).status == 0
    assert objects(tmp_path / "cold") == []


def test_a_backup_forgets_again_what_has_no_object_any_more(tmp_path: Path, url: str) -> None:
    with kilburn.open(url, **PROMPT) as store:
        for number, text in TEXTS.items():
            store.session(f"s{number}").append(user(text), user("That is all."))
    assert command("cold", "set", tmp_path / "cold", "--db", url).status == 0
    assert command("forget", "--list", tmp_path / "list", "--db", url).status == 0
    assert command("cold", "move", "--older-than", "0s", "--least", 10, "--db", url).status == 0
    # As it is in a backup from before p1 of s3 was forgotten.
    (gone,) = (path for path in objects(tmp_path / "cold") if b"canaryword3" in unpacked(path))
    gone.unlink()
    text = re.sub('"check":.*\n', "", (tmp_path / "list").read_text())
    (tmp_path / "list").write_text(text.replace('"gone":[\n', '"gone":[\n{"segment":3}'))
    done = command("forget", "--again", tmp_path / "list", "--yes", "--db", url)
    assert done.status == 0, done.err
    assert "forgotten: all of s3" in done.out
    assert command("cold", "scrub", "--db", url).status == 0


def unpacked(path: Path) -> bytes:
    """The text of an object that is not encrypted."""
    body = path.read_bytes()[len(MARK) + 1 :]
    for number, digest in DIGESTS.items():
        try:
            return unpack(*parted(body), len(TEXTS[number]), bytes.fromhex(digest)).encode()
        except StoreCorrupt:
            continue
    raise AssertionError(path)

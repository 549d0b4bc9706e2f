"""Cold texts: read back exactly, deleted when they are forgotten, and never lost, whatever is killed or damaged.

The tests that take `held` run over PostgreSQL too: see tests/postgres/test_cold.py.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.terminal import kilburn as command
from kilburn.backend import Backend, Batch, Moved
from kilburn.backends.chilling import Chilling
from kilburn.backends.cold import new_place
from kilburn.backends.places import open_backend
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, repair_store
from kilburn.errors import SpecError, StoreCorrupt, StoreError, StoreStale
from kilburn.page import digest_of
from kilburn.testing.stores import batch_of

pytest.importorskip("obstore")

TEXTS = {
    number: f"page {number} with canaryword{number} " + " ".join(digest_of(f"{number} {word}") for word in range(40))
    for number in range(1, 7)
}
DIGESTS = {number: digest_of(text) for number, text in TEXTS.items()}


class Held:
    """Where the store of a test is.

    Args:
        place: a file or a URL.
        traces: whether its files have these letters somewhere.
        reads: whether a text has to be read to be forgotten, as the index of a file wants its words.
    """

    def __init__(self, place: str, traces: Callable[[str], bool], *, reads: bool) -> None:
        self.place, self.traces, self.reads = place, traces, reads

    def open(self, *, readonly: bool = False) -> Any:
        return open_backend(self.place, readonly=readonly)

    def check_index(self) -> None:
        """Check that it has the words of each passage and no others, as far as `findings` does not."""

    def filled(self, folder: Path, key: str = "") -> Any:
        backend = self.open()
        fill(backend, folder, key)
        return backend


def check_stray(backend: Any, folder: Path) -> None:
    """What lies there and belongs to nobody is said, and removed when asked."""
    stray = folder / "zz" / "zz-nobody"
    stray.parent.mkdir()
    stray.write_bytes(b"nobody's")
    assert [(finding.kind, finding.derived) for finding in inspect_store(backend)] == [("cold", True)]
    assert [finding.what for finding in inspect_store(backend)] == backend.contents.scrub()
    assert backend.contents.scrub(repair=True) == []
    assert not stray.exists()


@pytest.fixture
def held(tmp_path: Path) -> Held:
    def traces(letters: str) -> bool:
        return any(letters.encode() in path.read_bytes() for path in tmp_path.glob("a.db*"))

    return Held(str(tmp_path / "a.db"), traces, reads=True)


def fill(backend: Backend, folder: Path, key: str = "") -> None:
    """Six texts and a cold place; the text of p1 is that of another session's p1, too."""
    backend.settings.put("cold", msgspec.json.encode(new_place(str(folder), key)).decode())
    for name, texts in (("one", TEXTS), ("two", {1: TEXTS[1]})):
        info = backend.segment(name, time=1.0)
        assert info is not None
        backend.commit(info.number, batch_of(0, texts))


def filled(path: Path, folder: Path, key: str = "") -> Sqlite:
    """A file with them."""
    backend = Sqlite(path)
    fill(backend, folder, key)
    return backend


def objects(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


@pytest.mark.parametrize("change", ["forget", "warm"])
def test_a_snapshot_says_that_a_cold_text_was_forgotten_or_moved_meanwhile(tmp_path: Path, change: str) -> None:
    path, folder = tmp_path / "a.db", tmp_path / "cold"
    with filled(path, folder) as backend, Sqlite(path) as other:
        backend.contents.chill(DIGESTS.values())
        with backend.snapshot():
            assert list(backend.pages(1))
            if change == "forget":
                other.commit(2, Batch(head=1, erase=[1]))
                other.commit(1, Batch(head=1, erase=[1, 2, 3]))
            else:
                other.contents.warm()
            with pytest.raises(StoreStale, match="since this snapshot began"):
                backend.contents.texts([DIGESTS[1]])
        with backend.snapshot():
            assert list(backend.pages(1))
            for each in objects(folder):
                each.unlink()
            if change == "forget":
                with pytest.raises(StoreCorrupt, match="is not in"):
                    backend.contents.texts([DIGESTS[4]])


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_cold_text_is_read_back_exactly(tmp_path: Path, held: Held, encrypted: bool) -> None:
    folder, key = tmp_path / "cold place", str(tmp_path / "key") if encrypted else ""
    whole = {DIGESTS[number]: text for number, text in TEXTS.items()}
    with held.filled(folder, key) as backend, held.open() as other:
        waiting = backend.vectors.unembedded("hash", 9)
        moved = backend.contents.chill(DIGESTS.values())
        assert moved.texts == 6
        assert moved.bytes > 0
        assert len(objects(folder)) == 6
        assert all(each.stat().st_mode & 0o077 == 0 for each in folder.iterdir())
        assert backend.contents.cold() == other.contents.cold() == {digest: len(text) for digest, text in whole.items()}
        assert backend.contents.texts(whole) == other.contents.texts(whole) == whole
        assert 3 in {hit.page for hit in other.words.search("canaryword3")}
        assert other.vectors.unembedded("hash", 9) == waiting
        assert backend.contents.chill(DIGESTS.values()) == other.contents.chill(DIGESTS.values()) == Moved()
        assert inspect_store(backend) == backend.contents.scrub() == []
        other.commit(1, Batch(head=1, unindex=[4]))
        assert 4 not in {hit.page for hit in other.words.search("canaryword4")}
        other.commit(1, Batch(head=1, index=[4]))
        assert 4 in {hit.page for hit in other.words.search("canaryword4")}
        with held.open(readonly=True) as reader:
            assert reader.contents.texts([DIGESTS[4]])[DIGESTS[4]] == TEXTS[4]
        if encrypted:
            assert not any(b"canaryword" in path.read_bytes() for path in objects(folder))
        assert other.contents.warm([DIGESTS[1]]).texts == 1
    with held.open() as backend:
        assert backend.contents.warm().texts == 5
        assert backend.contents.cold() == {}
        assert objects(folder) == []
        assert backend.contents.texts(whole) == whole
        assert inspect_store(backend) == []


def test_forgetting_deletes_the_object_when_no_page_has_the_text_and_every_byte(tmp_path: Path, held: Held) -> None:
    folder = tmp_path / "cold"
    with held.filled(folder) as backend:
        backend.contents.chill(DIGESTS.values())
        names = [path.name for path in objects(folder)]
        assert all(map(held.traces, names))
        backend.commit(1, Batch(head=1, erase=[1, 2]))
        assert len(objects(folder)) == 5
        assert backend.contents.texts([DIGESTS[1]])[DIGESTS[1]] == TEXTS[1]
        backend.commit(2, Batch(head=1, erase=[1]))
        assert len(objects(folder)) == 4
        with backend.erasing():
            backend.commit(1, Batch(head=1, erase=[3]))
            assert len(objects(folder)) == 4
            backend.commit(1, Batch(head=1, erase=[4]))
        assert len(objects(folder)) == 2
        assert inspect_store(backend) == backend.contents.scrub() == []
        with backend.together():
            backend.commit(1, Batch(head=1, erase=[5]))
            assert len(objects(folder)) == 2
        assert len(objects(folder)) == 1
        left = {path.name for path in objects(folder)}
        for name in names:
            assert held.traces(name) == (name in left)
        for number in range(1, 6):
            assert not held.traces(f"canaryword{number}")


def test_what_is_rolled_back_deletes_nothing(tmp_path: Path, held: Held) -> None:
    folder = tmp_path / "cold"

    def give_up(backend: Backend) -> None:
        with backend.together():
            backend.commit(1, Batch(head=1, erase=[3]))
            raise InterruptedError

    with held.filled(folder) as backend:
        backend.contents.chill(DIGESTS.values())
        with pytest.raises(InterruptedError):
            give_up(backend)
        assert len(objects(folder)) == 6
        assert backend.contents.texts([DIGESTS[3]])[DIGESTS[3]] == TEXTS[3]
        assert backend.contents.scrub() == []


def test_a_text_that_is_said_again_comes_back(tmp_path: Path, held: Held) -> None:
    folder = tmp_path / "cold"
    with held.filled(folder) as backend:
        backend.contents.chill(DIGESTS.values())
        backend.commit(2, batch_of(1, {2: TEXTS[3]}))
        assert DIGESTS[3] not in backend.contents.cold()
        assert backend.contents.texts([DIGESTS[3]])[DIGESTS[3]] == TEXTS[3]
    with held.open() as backend:
        assert len(objects(folder)) == 5
        assert backend.contents.scrub() == []


def lost(path: Path) -> None:
    path.unlink()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def altered(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[-3] ^= 1
    path.write_bytes(body)


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def swapped(path: Path) -> None:
    other = next(each for each in objects(path.parents[2]) if each != path)
    path.write_bytes(other.read_bytes())


@pytest.mark.parametrize("damage", [lost, cut, altered, emptied, swapped])
@pytest.mark.parametrize("encrypted", [False, True])
def test_damage_is_said_and_never_hidden(tmp_path: Path, held: Held, damage: Callable[[Path], None], encrypted: bool) -> None:
    folder = tmp_path / "cold"
    with held.filled(folder, str(tmp_path / "key") if encrypted else "") as backend:
        backend.contents.chill(DIGESTS.values())
        damage(sorted(objects(folder))[0])
        wrong = []
        for number, digest in DIGESTS.items():
            try:
                assert backend.contents.texts([digest])[digest] == TEXTS[number]
            except StoreCorrupt:
                wrong.append(number)
        assert len(wrong) == 1
        with pytest.raises(StoreCorrupt) as caught:
            backend.contents.texts([DIGESTS[wrong[0]]])
        assert "backup of the cold place" in caught.value.advice
        assert [finding.kind for finding in inspect_store(backend)] == ["content"]
        assert len(backend.contents.scrub()) == 1
        before = backend.contents.cold()
        with pytest.raises(StoreCorrupt):
            backend.contents.warm()
        assert backend.contents.cold() == before
        # What nobody can read any more can still be forgotten, with its words in the index.
        segments = [2, 1] if wrong[0] == 1 else [1]
        if held.reads:
            # To take a text out of the index it must be read; a repair gives up the index of what cannot be.
            with pytest.raises(StoreCorrupt):
                backend.commit(segments[0], Batch(head=1, erase=wrong))
            repair_store(backend)
        for segment in segments:
            backend.commit(segment, Batch(head=1, erase=wrong))
        assert wrong[0] not in {hit.page for hit in backend.words.search(f"canaryword{wrong[0]}")}
        assert inspect_store(backend) == backend.contents.scrub() == []
        held.check_index()


def test_another_key_or_none_is_refused_and_to_forget_nobody_needs_it(tmp_path: Path, held: Held) -> None:
    key = tmp_path / "key"
    with held.filled(tmp_path / "cold", str(key)) as backend:
        backend.contents.chill(DIGESTS.values())
        assert key.stat().st_mode & 0o777 == 0o600
    right = key.read_text()
    for wrong in ("ab" * 32, "ab", "", "no hex"):
        key.write_text(wrong)
        with held.open() as backend, pytest.raises(SpecError, match="key"):
            backend.contents.texts([DIGESTS[1]])
    key.write_text(right)
    with held.open() as backend:
        backend.commit(1, Batch(head=1, unindex=[2, 3]))
    key.write_text("ab" * 32)
    with held.open() as backend:
        backend.commit(1, Batch(head=1, erase=[2]))
        assert len(objects(tmp_path / "cold")) == 5
    key.unlink()
    with held.open() as backend:
        backend.commit(1, Batch(head=1, erase=[3]))
        assert len(objects(tmp_path / "cold")) == 4
    key.write_text(right)
    with held.open() as backend:
        assert backend.contents.texts([DIGESTS[1]])
        assert inspect_store(backend) == []


def test_a_place_that_cannot_be_written_leaves_everything_where_it_was(tmp_path: Path, held: Held) -> None:
    folder = tmp_path / "cold"
    with held.filled(folder) as backend:
        inner = folder / msgspec.json.decode(backend.settings.all()["cold"])["folder"]
        shutil.rmtree(inner)
        inner.write_text("a file stands in the way")
        with pytest.raises(StoreError, match="cold place"):
            backend.contents.chill(DIGESTS.values())
        assert backend.contents.cold() == {}
        assert backend.contents.texts(DIGESTS.values())
        inner.unlink()
        assert backend.contents.chill(DIGESTS.values()).texts == 6
        assert backend.contents.scrub() == []
        check_stray(backend, inner)


def test_a_receipt_says_what_is_late_and_what_cannot_be_looked_at(tmp_path: Path, held: Held) -> None:
    with held.filled(tmp_path / "cold") as backend:
        backend.contents.chill(DIGESTS.values())
        before = backend.contents.unreached()
        kept = backend.settings.all()["cold"]
        backend.settings.put("cold", "no place")
        (said,) = set(backend.contents.unreached()) - set(before)
        assert "cannot be opened" in said
        backend.settings.put("cold", kept.replace("}", ',"versions":true}').replace('"versions":false,', ""))
    with held.open() as backend:
        (said,) = set(backend.contents.unreached()) - set(before)
        assert "older versions" in said


def test_a_short_text_stays(tmp_path: Path, held: Held) -> None:
    with held.filled(tmp_path / "cold") as backend:
        backend.commit(2, batch_of(1, {2: "short", 3: "the same again and again " * 100}))
        assert backend.contents.chill([digest_of("short"), digest_of("the same again and again " * 100)]) == Moved()


def test_without_a_place_nothing_moves(held: Held) -> None:
    with held.open() as backend:
        with pytest.raises(SpecError, match="no cold place"):
            backend.contents.chill([DIGESTS[1]])
        assert backend.contents.warm() == Moved()
        assert backend.contents.scrub() == []


def test_readers_never_miss_a_text_that_goes_and_comes(tmp_path: Path, held: Held) -> None:
    over, wrong = threading.Event(), list[Exception]()
    whole = {DIGESTS[number]: text for number, text in TEXTS.items()}

    def read(reader: Backend) -> None:
        while not over.is_set():
            try:
                assert reader.contents.texts(whole) == whole
            except Exception as error:
                wrong.append(error)

    with held.filled(tmp_path / "cold") as backend, held.open(readonly=True) as reader:
        threads = [threading.Thread(target=read, args=(reader,)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for _ in range(8):
            assert backend.contents.chill(whole).texts == 6
            assert backend.contents.warm().texts == 6
        over.set()
        for thread in threads:
            thread.join()
        assert not wrong
        assert objects(tmp_path / "cold") == []


def test_texts_on_their_way_do_not_go_to_a_place_that_is_the_tenants_no_more(tmp_path: Path, held: Held) -> None:
    before, after = tmp_path / "cold", tmp_path / "other"
    with held.filled(before) as backend:

        def meanwhile() -> Iterator[str]:
            # By now it knows the place.
            assert command("cold", "set", after, "--db", held.place).status == 0
            yield from DIGESTS.values()

        assert backend.contents.chill(meanwhile()) == Moved()
        assert objects(before) == objects(after) == []
        assert backend.contents.texts(DIGESTS.values()) == {DIGESTS[number]: text for number, text in TEXTS.items()}
        assert backend.contents.chill(DIGESTS.values()).texts == len(objects(after)) == 6
        assert command("cold", "set", before, "--db", held.place).status == 2
        assert inspect_store(backend) == backend.contents.scrub() == []


def test_what_two_move_at_once_and_one_cannot_write_is_deleted(tmp_path: Path, held: Held) -> None:
    folder = tmp_path / "cold"
    with held.filled(folder) as backend, held.open() as other:
        own = folder / msgspec.json.decode(backend.settings.all()["cold"])["folder"]
        blocked: list[Path] = []

        def change(do: Any, *, wait: bool = True) -> Any:
            made = backend._change_cold(do, wait=wait)
            names = list(backend._read_cold(lambda rows: rows.strays()))
            if names and not blocked:
                # They are announced. Another gives them up, and one of them cannot be written then.
                assert other.contents.chill(DIGESTS.values()).texts == 6
                blocked.append(own / names[-1][:2])
                blocked[0].mkdir(parents=True, exist_ok=True)
                blocked[0].rename(tmp_path / "aside")
                blocked[0].write_bytes(b"")
            return made

        chilling = Chilling("a", backend._read_cold, change, backend.sync, lambda: False)
        with pytest.raises(StoreError):
            chilling.chill(DIGESTS.values())
        blocked[0].unlink()
        (tmp_path / "aside").rename(blocked[0])
        assert backend.contents.chill(DIGESTS.values()) == Moved()
        assert len(objects(folder)) == 6
        assert inspect_store(backend) == backend.contents.scrub() == []


class Killed(BaseException):
    """Nothing that comes after this happens."""


def test_what_a_mover_writes_that_was_given_up_and_is_killed_then_is_deleted(tmp_path: Path, held: Held) -> None:
    folder = tmp_path / "cold"
    with held.filled(folder) as backend, held.open() as other:
        steps: list[str] = []

        def change(do: Any, *, wait: bool = True) -> Any:
            if steps:
                raise Killed
            made = backend._change_cold(do, wait=wait)
            steps.append("announced")
            other.commit(1, Batch(head=1, unindex=[2]))
            with other.erasing():
                other.commit(1, Batch(head=1, erase=[2]))
            return made

        chilling = Chilling("a", backend._read_cold, change, backend.sync, lambda: False)
        with pytest.raises(Killed):
            chilling.chill(DIGESTS.values())
        assert len(objects(folder)) == 6
        assert any("may be writing" in place for place in other._chilling.unreached())
        # Whoever forgets next, moves next, or opens the store.
        other._chilling.sweep()
        assert objects(folder) == []
        assert other.contents.chill(DIGESTS.values()).texts == 5
        assert inspect_store(other) == other.contents.scrub() == []
        assert all(len(path.read_bytes()) > 0 for path in objects(folder))


FORKED = """
import os, sys
from kilburn.opening import open_backend
with open_backend(sys.argv[1]) as backend:
    assert backend.contents.texts([sys.argv[2]])
    child = os.fork()
    if not child:
        os._exit(0 if backend.contents.texts([sys.argv[2]]) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_of_a_fork_reads_what_is_cold(tmp_path: Path) -> None:
    with filled(tmp_path / "a.db", tmp_path / "cold") as backend:
        assert backend.contents.chill(DIGESTS.values()).texts == 6
    command = [sys.executable, "-W", "ignore", "-c", FORKED, str(tmp_path / "a.db"), DIGESTS[1]]
    assert subprocess.run(command, timeout=60, check=False).returncode == 0


FORKED_BUCKET = """
import os
from kilburn.backends.cold import ColdPlace, ColdSite
from kilburn.errors import StoreError

place = ColdPlace(ColdSite(url="memory:///", folder="a"))
name = place.put(b"text", digest=b"")
assert place.get(name, b"") == b"text"
child = os.fork()
if not child:
    for held in (place, ColdPlace(ColdSite(url="memory:///", folder="a"))):
        try:
            held.get(name, b"")
        except StoreError as error:
            assert "forked" in str(error)
        else:
            os._exit(1)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
"""


def test_a_child_of_a_fork_is_told_that_it_cannot_use_an_object_store() -> None:
    assert subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED_BUCKET], timeout=60, check=False).returncode == 0


def test_an_object_that_cannot_be_deleted_is_deleted_later(tmp_path: Path) -> None:
    folder = tmp_path / "cold"
    with filled(tmp_path / "a.db", folder) as backend:
        backend.contents.chill(DIGESTS.values())
        own = folder / msgspec.json.decode(backend.settings.all()["cold"])["folder"]
        objects_before = objects(folder)
        # A folder where a file was: it cannot be deleted as one.
        gone = backend._db.execute("SELECT CAST(data AS TEXT) FROM content WHERE digest = ?", (bytes.fromhex(DIGESTS[2]),))
        ((name,),) = list(gone)
        backend.commit(1, Batch(head=1, unindex=[2]))
        (own / name[:2] / name).unlink()
        (own / name[:2] / name / "inside").mkdir(parents=True)
        backend.commit(1, Batch(head=1, erase=[2]))
        assert [(finding.kind, finding.derived) for finding in inspect_store(backend)] == [("cold", True)]
        (own / name[:2] / name / "inside").rmdir()
        (own / name[:2] / name).rmdir()
        (own / name[:2] / name).write_bytes(b"")
        assert backend.contents.scrub() == []
        assert len(objects(folder)) == len(objects_before) - 1
        check_stray(backend, own)


KILLED = """
import os, shutil, signal, sys, traceback
from contextlib import contextmanager
from pathlib import Path
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from backends.test_cold import DIGESTS, TEXTS, filled, objects

root, what = Path(sys.argv[1]), sys.argv[2]
left = None

def step():
    global left
    if left is not None:
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

# Every object that is written is then opened, to be synced.
sys.addaudithook(lambda event, given: step() if event == "open" and "/cold" in str(given[0]) else None)

class Killing(Sqlite):
    @contextmanager
    def _writing(self, *given, **more):
        step()
        with Sqlite._writing(self, *given, **more):
            yield
            step()
        step()

def begin():
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    with filled(root / "a.db", root / "cold", str(root / "key")) as backend:
        if what != "chill":
            backend.contents.chill(DIGESTS.values())

def do(backend):
    if what == "chill":
        backend.contents.chill(DIGESTS.values())
    elif what == "warm":
        backend.contents.warm()
    else:
        with backend.erasing():
            backend.commit(2, Batch(head=1, erase=[1]))
            backend.commit(1, Batch(head=1, erase=[1, 2, 3]))

def dies():
    global left
    with Killing(root / "a.db") as backend:
        left = kills + 1
        do(backend)

def check():
    with Sqlite(root / "a.db") as backend:
        gone = set(backend.forgotten(1)) - ({1} - set(backend.forgotten(2)))
        kept = {digest: TEXTS[number] for number, digest in DIGESTS.items() if number not in gone}
        assert backend.contents.texts(kept) == kept
        backend.contents.chill(kept)
        assert backend.contents.scrub(repair=True) == []
        assert len(objects(root / "cold")) == len(backend.contents.cold()) == len(kept), kills
        assert inspect_store(backend) == []

def apart(work):
    # The library of the cold place has threads, which no fork takes along: each part is a process of its own.
    if os.fork() == 0:
        try:
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.wait()[1]

kills = 0
while True:
    assert apart(begin) == 0
    status = apart(dies)
    if status == 0:
        print(kills)
        break
    assert status == signal.SIGKILL, status
    kills += 1
    assert apart(check) == 0, kills
"""


@pytest.mark.slow
@pytest.mark.parametrize(("what", "least"), [("chill", 20), ("warm", 6), ("forget", 6)])
def test_killed_at_every_step_nothing_is_lost_and_nothing_stays(tmp_path: Path, what: str, least: int) -> None:
    words = [sys.executable, "-c", KILLED, str(tmp_path / "root"), what]
    tests = str(Path(__file__).parents[1])
    environment = os.environ | {"PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"}
    done = subprocess.run(words, capture_output=True, text=True, timeout=600, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= least

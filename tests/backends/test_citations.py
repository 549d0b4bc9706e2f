"""Who cites whom, across segments: found when it is damaged, and never dangling, whoever writes, dies or forgets."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
from pathlib import Path

import apsw
import pytest

from kilburn.backend import Batch, SegmentKind, State
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store, quarantine_segment, repair_store
from kilburn.errors import Forgotten, StoreCorrupt, StoreStale
from kilburn.page import Place
from kilburn.testing.faults import FaultVFS
from kilburn.testing.stores import batch_of, cited_batch

TALK, MEMORY = 1, 2


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A session of ten pages, and a memory with a fact from p1 and one from that."""
    with Sqlite(tmp_path / "k.db") as backend:
        backend.segment("talk", time=1.0)
        backend.segment("@memory/ana", time=1.0, kind=SegmentKind.MEMORY, user="ana")
        backend.commit(TALK, batch_of(0, {number: f"told {number}" for number in range(1, 11)}))
        backend.commit(MEMORY, cited_batch(0, -1, "a fact", cites=((TALK, 1),), depth=1))
        backend.commit(MEMORY, cited_batch(1, -2, "a fact of it", sources=(-1,), depth=2))
        backend.commit(MEMORY, Batch(head=2, states={-1: State(Place.RETIRED, until=7.0)}))
    return tmp_path / "k.db"


def change(path: Path, statement: str, *values: object) -> None:
    """Write behind Kilburn's back."""
    db = apsw.Connection(str(path))
    try:
        db.execute(statement, values)
        assert db.changes() > 0
    finally:
        db.close()


@pytest.mark.parametrize(
    "statement",
    [
        "DELETE FROM citation WHERE citing_page = -1",
        "DELETE FROM citation WHERE citing_page = -2",
        "UPDATE citation SET page = 2 WHERE citing_page = -1",
        "INSERT INTO citation VALUES(1, 3, 2, -2)",
    ],
)
def test_an_index_that_disagrees_with_the_pages_is_found_and_made_again(path: Path, statement: str) -> None:
    change(path, statement)
    with Sqlite(path) as backend:
        found = inspect_store(backend)
        assert {(one.kind, one.derived, one.segment) for one in found} == {("index", True, MEMORY)}
        assert repair_store(backend) == []
        assert backend.citing(TALK, [1, 2, 3]) == [(MEMORY, -1)]
        assert backend.citing(MEMORY, [-1]) == [(MEMORY, -2)]


def test_a_forgetting_that_was_killed_half_way_is_found_and_goes_on(path: Path) -> None:
    """Nothing new cites what somebody has begun to forget, until it is forgotten, or repaired."""
    kill = (
        "import os, signal, sys\n"
        "from kilburn.backends.sqlite import Sqlite\n"
        "with Sqlite(sys.argv[1]) as backend, backend.leaving([(1, 1), (1, 2)]):\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    assert subprocess.run([sys.executable, "-c", kill, str(path)]).returncode == -signal.SIGKILL
    with Sqlite(path) as backend:
        found = inspect_store(backend)
        leave = {(TALK, 1), (TALK, 2), (MEMORY, -1), (MEMORY, -2)}
        assert {(one.kind, one.derived, one.segment, one.page) for one in found} == {("index", True, *one) for one in leave}
        assert all("forget it again" in one.what for one in found)
        for page in (1, 2):
            with pytest.raises(Forgotten, match="is being forgotten"):
                backend.commit(MEMORY, cited_batch(2, -3, "a new fact", cites=((TALK, page),)))
        backend.commit(TALK, Batch(head=1, erase=[2]))
        assert {one.page for one in inspect_store(backend)} == {1, -1, -2}
        assert repair_store(backend) == []
        backend.commit(MEMORY, cited_batch(2, -3, "a new fact", cites=((TALK, 1),)))


def test_what_stays_after_all_can_be_cited_once_the_disk_works_again(tmp_path: Path) -> None:
    """A forgetting that ends with an error leaves no page behind that nobody may cite."""
    vfs = FaultVFS("leaving", seed=1, faults=("full",))
    cites = cited_batch(0, -1, "a fact", cites=((TALK, 1),))
    with Sqlite(tmp_path / "k.db", vfs=vfs.name) as backend:
        backend.segment("talk", time=1.0)
        backend.segment("@memory/ana", time=1.0, kind=SegmentKind.MEMORY, user="ana")
        backend.commit(TALK, batch_of(0, {1: "told"}))
        with backend.leaving([(TALK, 1)]):
            vfs.break_down()
        assert vfs.failed
        vfs.disarm()
        with pytest.raises(StoreStale):
            backend.commit(TALK, batch_of(7, {2: "told"}))
        assert inspect_store(backend) == []
        backend.commit(MEMORY, cites)
    vfs.unregister()


@pytest.mark.parametrize(
    "statement", ["DELETE FROM page WHERE segment = 1 AND id = 1", "UPDATE page SET content = NULL WHERE segment = 1 AND id = 1"]
)
def test_a_citation_of_a_page_that_is_not_there_is_found(path: Path, statement: str) -> None:
    change(path, statement)
    with Sqlite(path) as backend:
        found = [one for one in inspect_store(backend) if one.kind == "citation"]
        assert [(one.segment, one.page, one.derived) for one in found] == [(MEMORY, -1, False)]
        assert "p1 of segment 1" in found[0].what


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE segment SET kind = 'session' WHERE id = 2",
        "UPDATE segment SET kind = 'document' WHERE id = 2",
        "UPDATE segment SET owner = 'bob' WHERE id = 2",
        "UPDATE segment SET owner = '' WHERE id = 2",
        "UPDATE segment SET owner = 'ana' WHERE id = 1",
    ],
)
def test_a_process_never_changes_its_kind_or_its_user_silently(path: Path, statement: str) -> None:
    change(path, statement)
    with Sqlite(path) as backend:
        assert [bool(info.damaged) for info in backend.segments()] == ["id = 1" in statement, "id = 2" in statement]
        assert {one.kind for one in inspect_store(backend)} == {"session"}
        assert {hit.segment for hit in backend.words.search("told fact")} == {TALK if "id = 2" in statement else MEMORY}


@pytest.mark.parametrize(("until", "page"), [(None, -1), (8.0, -1), (9.0, -2)])
def test_the_end_of_validity_never_changes_silently(path: Path, until: float | None, page: int) -> None:
    change(path, "UPDATE page SET valid_until = ? WHERE segment = 2 AND id = ?", until, page)
    with Sqlite(path) as backend:
        with pytest.raises(StoreCorrupt, match="state"):
            backend.read([(MEMORY, page)])
        assert backend.read([(MEMORY, -3 - page)])
        assert [(one.kind, one.derived, one.page) for one in inspect_store(backend)] == [("state", True, page)]


def test_of_two_writers_one_forgets_and_one_cites(path: Path) -> None:
    with Sqlite(path) as one, Sqlite(path) as other:
        other.commit(MEMORY, cited_batch(2, -3, "just learned", cites=((TALK, 2),), depth=1))
        with pytest.raises(StoreStale, match="f3 of segment 2"):
            one.commit(TALK, Batch(head=1, erase=[2, 3]))
        assert next(page for page, _ in one.pages(TALK) if page.id == 3).digest
        one.commit(TALK, Batch(head=1, erase=[3]))
        with pytest.raises(StoreStale, match="forgotten"):
            other.commit(MEMORY, cited_batch(3, -4, "too late", cites=((TALK, 2), (TALK, 3)), depth=1))
        assert other.citing(TALK, [2, 3]) == [(MEMORY, -3)]
        assert inspect_store(one) == inspect_store(other) == []


def test_a_quarantined_session_is_erased_after_what_cites_it(path: Path) -> None:
    change(path, "UPDATE page SET record = x'c1' WHERE segment = 1 AND id = 5")
    with Sqlite(path) as backend:
        quarantine_segment(backend, TALK)
        with pytest.raises(StoreStale, match="f1 of segment 2"):
            backend.erase(TALK)
        backend.commit(MEMORY, Batch(head=2, erase=[-2, -1]))
        backend.erase(TALK)
        assert inspect_store(backend) == []


CITER = """
import random, sys
from kilburn.errors import Forgotten, StoreStale
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.testing.stores import batch_of, cited_batch

chance = random.Random(int(sys.argv[2]))
with Sqlite(sys.argv[1], busy_timeout=120, synchronous="OFF") as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for _ in range(10_000):
        try:
            info = store.segment("@memory/ana", time=1.0)
            page = -1 - info.pages
            cites = tuple((1, number) for number in sorted(chance.sample(range(1, 11), 2)))
            sources = (chance.randint(page + 1, -1),) if page < -1 and chance.random() < 0.5 else ()
            if sources and store.read([(2, sources[0])])[2, sources[0]][0].digest == "":
                sources = ()
            store.commit(2, cited_batch(info.head, page, f"fact {page}", cites=cites, sources=sources, depth=1))
            print("cited", flush=True)
        except (Forgotten, StoreStale):
            pass
"""

FORGETTER = """
import random, sys
from contextlib import ExitStack
from kilburn.errors import StoreStale
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.testing.stores import batch_of

def forget(store, process, page):
    for by, citing in store.citing(process, [page]):
        forget(store, by, citing)
    info = next(info for info in store.segments() if info.number == process)
    store.commit(process, Batch(head=info.head, erase=[page]))

chance = random.Random(int(sys.argv[2]))
with Sqlite(sys.argv[1], busy_timeout=120, synchronous="OFF") as store:
    print("ready", flush=True)
    sys.stdin.readline()
    for page in chance.sample(range(1, 11), 8):
        with ExitStack() as leaving:
            while True:
                try:
                    forget(store, 1, page)
                    break
                except StoreStale:
                    # The other process was first, and would always be.
                    leaving.enter_context(store.leaving([(1, page)]))
        print("forgot", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("seed", range(4))
def test_nothing_dangles_when_writers_are_killed(path: Path, seed: int) -> None:
    chance = random.Random(seed)
    writers = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(path), str(seed)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for program in (CITER, FORGETTER)
    ]
    try:
        for writer in writers:
            assert writer.stdout is not None
            assert writer.stdout.readline() == "ready\n"
        for writer in writers:
            assert writer.stdin is not None
            writer.stdin.write("go\n")
            writer.stdin.flush()
        for writer in writers:
            assert writer.stdout is not None
            for _ in range(chance.randint(1, 3)):
                assert writer.stdout.readline()
    finally:
        for writer in writers:
            writer.send_signal(signal.SIGKILL)
            writer.communicate()
    with Sqlite(path) as backend:
        assert [one for one in inspect_store(backend) if "is being forgotten" not in one.what] == []
        forgotten = {page.id for page, _ in backend.pages(TALK) if not page.digest}
        assert forgotten
        assert backend.citing(TALK, forgotten) == []
        # What the killed one had only begun to forget can be cited again.
        assert repair_store(backend) == []


def test_a_page_that_cites_the_same_page_twice_is_one_row(path: Path) -> None:
    cites = tuple((TALK, number) for number in range(1, 11))
    with Sqlite(path) as backend:
        backend.commit(MEMORY, cited_batch(2, -3, "of all", cites=cites * 3, depth=1))
        assert backend.citing(TALK, range(1, 11)) == [(MEMORY, -3), (MEMORY, -1)]
        assert inspect_store(backend) == []

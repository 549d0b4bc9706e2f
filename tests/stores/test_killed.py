"""Real processes: killed while they commit, reading while another writes, writing side by side."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from kilburn.page import digest_of
from kilburn.stores.sqlite import Sqlite
from kilburn.testing.stores import batch_of

KILLS = 110

WRITER = """
import sys
from kilburn.store import Batch
from kilburn.stores.sqlite import Sqlite
from kilburn.testing.stores import batch_of

with Sqlite(sys.argv[1], busy_timeout=120) as store:
    number = store.process(sys.argv[2], time=1.0).number
    print("open", flush=True)
    while True:
        head = store.process(sys.argv[2], time=1.0).head
        batch = batch_of(head, {head + 1: f"{sys.argv[2]} page{head + 1} " + "words to compress " * (head % 200)})
        if head % 7 == 6:
            batch.erase = [head - 2]
        store.commit(number, batch)
        print(head + 1, flush=True)
"""


def writer(path: Path, name: str) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(path), name], stdout=subprocess.PIPE, text=True)


def text_of(number: int, name: str) -> str:
    return f"{name} page{number} " + "words to compress " * ((number - 1) % 200)


def check(store: Sqlite, name: str, acknowledged: int) -> None:
    info = store.process(name, time=1.0, create=False)
    assert info is not None
    assert acknowledged <= info.head <= acknowledged + 1
    assert [event.number for event in store.events(info.number)] == list(range(1, info.head + 1))
    pages = [page for page, _ in store.pages(info.number)]
    assert [page.id for page in pages] == list(range(1, info.head + 1))
    erased = {head - 2 for head in range(6, info.head, 7)}
    assert {page.id for page in pages if not page.digest} == erased
    texts = store.texts([page.digest for page in pages if page.digest])
    assert all(texts[page.digest] == text_of(page.id, name) for page in pages if page.digest)


def test_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    chance = random.Random(5)
    path = tmp_path / "k.db"
    acknowledged = [0, 0]
    for _ in range(KILLS // 2):
        # Two at a time, so that one dies while the other holds or wants the lock.
        children = [writer(path, "one"), writer(path, "two")]
        # Each has written some batches, however slow the machine is; then a moment that is anywhere in a batch.
        for at, child in enumerate(children):
            assert child.stdout is not None
            assert child.stdout.readline() == "open\n"
            for _ in range(chance.randint(1, 5)):
                acknowledged[at] = int(child.stdout.readline())
        time.sleep(chance.uniform(0.0, 0.01))
        for at, child in enumerate(children):
            child.send_signal(signal.SIGKILL)
            out, _ = child.communicate()
            acknowledged[at] = max([acknowledged[at], *map(int, out.split())])
        with Sqlite(path) as store:
            check(store, "one", acknowledged[0])
            check(store, "two", acknowledged[1])
            heads = {info.name: info.head for info in store.processes()}
            acknowledged = [heads["one"], heads["two"]]
    with Sqlite(path) as store:
        assert store.findings() == []
    assert min(acknowledged) > KILLS // 2


def test_readers_see_whole_batches_while_one_writes(tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path) as store:
        store.process("one", time=1.0)
    child = writer(path, "one")
    try:
        with Sqlite(path, readonly=True) as first, Sqlite(path, readonly=True) as second:
            seen = 0
            deadline = time.monotonic() + 120
            while seen < 30 and time.monotonic() < deadline:
                for store in (first, second):
                    pages = len(list(store.pages(1)))
                    events = len(list(store.events(1)))
                    assert pages <= events
                    seen = pages
                    assert len(store.search("words", limit=10)) <= 10
            assert seen >= 30
    finally:
        child.kill()
        child.communicate()
    with Sqlite(path) as store:
        assert store.findings() == []
        number = len(list(store.pages(1))) + 1
        store.commit(1, batch_of(number - 1, {number: "after"}))
        assert store.texts([digest_of("after")])


OPENER = """
import sys
from kilburn.stores.sqlite import Sqlite

print("ready", flush=True)
sys.stdin.readline()
with Sqlite(sys.argv[1], busy_timeout=120) as store:
    store.process("one", time=1.0)
"""


def opener(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OPENER, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_several_may_make_the_same_new_file_at_once(tmp_path: Path) -> None:
    for attempt in range(6):
        path = tmp_path / f"{attempt}.db"
        openers = [opener(path) for _ in range(3)]
        for one in openers:
            assert one.stdout is not None
            assert one.stdout.readline() == "ready\n"
        for one in openers:
            assert one.stdin is not None
            one.stdin.write("go\n")
            one.stdin.flush()
        for one in openers:
            one.communicate(timeout=120)
        assert [one.returncode for one in openers] == [0, 0, 0]
        with Sqlite(path) as store:
            assert [info.name for info in store.processes()] == ["one"]
            assert store.findings() == []

"""Real processes: killed while they commit, reading while another writes, writing side by side."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import pytest

from effort import rounds
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.page import digest_of
from kilburn.testing.stores import batch_of
from waiting import MINUTES

KILLS = rounds(20, 110)

WRITERS = """
import os, signal, sys
from kilburn.backends.sqlite import Sqlite
from kilburn.testing.stores import batch_of

def write(path, name, out):
    with Sqlite(path, busy_timeout=120) as store:
        number = store.segment(name, time=1.0).number
        print("open", file=out)
        while True:
            head = store.segment(name, time=1.0).head
            batch = batch_of(head, {head + 1: f"{name} page{head + 1} " + "words to compress " * (head % 200)})
            if head % 7 == 6:
                batch.erase = [head - 2]
            store.commit(number, batch)
            print(head + 1, file=out)

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    path, name, pipe = line.rstrip("\\n").split("\\t")
    if os.fork() == 0:
        with open(pipe, "w", buffering=1) as out:
            print(os.getpid(), file=out)
            write(path, name, out)
"""
"""A process that has imported everything, and for each line it reads becomes a writer once more."""


class Writer:
    """A process that writes batches until it is killed, and prints each head that was acknowledged."""

    def __init__(self, out: TextIO) -> None:
        self.out = out
        self.number = int(out.readline())

    def kill(self) -> list[int]:
        """Kill it; the heads that nobody has read yet."""
        os.kill(self.number, signal.SIGKILL)
        with self.out:
            # The pipe ends when the segment is gone.
            return [int(line) for line in self.out if line != "open\n"]


class Writers:
    """Starts writers."""

    def __init__(self, server: subprocess.Popen[str], folder: Path) -> None:
        self.server, self.pipe = server, folder / "pipe"

    def start(self, path: Path, name: str) -> Writer:
        os.mkfifo(self.pipe)
        assert self.server.stdin is not None
        self.server.stdin.write(f"{path}\t{name}\t{self.pipe}\n")
        self.server.stdin.flush()
        writer = Writer(self.pipe.open(encoding="utf-8"))
        self.pipe.unlink()
        return writer


@pytest.fixture(scope="module")
def writers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Writers]:
    with subprocess.Popen([sys.executable, "-c", WRITERS], stdin=subprocess.PIPE, text=True) as server:
        yield Writers(server, tmp_path_factory.mktemp("writers"))


def text_of(number: int, name: str) -> str:
    return f"{name} page{number} " + "words to compress " * ((number - 1) % 200)


def check(backend: Sqlite, name: str, acknowledged: int) -> None:
    info = backend.segment(name, time=1.0, create=False)
    assert info is not None
    assert acknowledged <= info.head <= acknowledged + 1
    assert [event.number for event in backend.events(info.number)] == list(range(1, info.head + 1))
    pages = [page for page, _ in backend.pages(info.number)]
    assert [page.id for page in pages] == list(range(1, info.head + 1))
    erased = {head - 2 for head in range(6, info.head, 7)}
    assert {page.id for page in pages if not page.digest} == erased
    texts = backend.contents.texts([page.digest for page in pages if page.digest])
    assert all(texts[page.digest] == text_of(page.id, name) for page in pages if page.digest)


def test_a_killed_writer_loses_nothing_acknowledged(writers: Writers, tmp_path: Path) -> None:
    chance = random.Random(5)
    path = tmp_path / "k.db"
    acknowledged = [0, 0]
    for _ in range(KILLS // 2):
        # Two at a time, so that one dies while the other holds or wants the lock.
        children = [writers.start(path, "one"), writers.start(path, "two")]
        # Each has written some batches, however slow the machine is; then a moment that is anywhere in a batch.
        for at, child in enumerate(children):
            assert child.out.readline() == "open\n"
            for _ in range(chance.randint(1, 5)):
                acknowledged[at] = int(child.out.readline())
        time.sleep(chance.uniform(0.0, 0.01))
        for at, child in enumerate(children):
            acknowledged[at] = max([acknowledged[at], *child.kill()])
        with Sqlite(path) as store:
            check(store, "one", acknowledged[0])
            check(store, "two", acknowledged[1])
            heads = {info.name: info.head for info in store.segments()}
            acknowledged = [heads["one"], heads["two"]]
    with Sqlite(path) as backend:
        assert inspect_store(backend) == []
    assert min(acknowledged) > KILLS // 2


def test_readers_see_whole_batches_while_one_writes(writers: Writers, tmp_path: Path) -> None:
    path = tmp_path / "k.db"
    with Sqlite(path) as backend:
        backend.segment("one", time=1.0)
    child = writers.start(path, "one")
    try:
        with Sqlite(path, readonly=True) as first, Sqlite(path, readonly=True) as second:
            seen = 0
            end = time.monotonic() + MINUTES
            while seen < 30 and time.monotonic() < end:
                for backend in (first, second):
                    pages = len(list(backend.pages(1)))
                    events = len(list(backend.events(1)))
                    assert pages <= events
                    seen = pages
                    assert len(backend.words.search("words", limit=10)) <= 10
            assert seen >= 30
    finally:
        child.kill()
    with Sqlite(path) as backend:
        assert inspect_store(backend) == []
        number = len(list(backend.pages(1))) + 1
        backend.commit(1, batch_of(number - 1, {number: "after"}))
        assert backend.contents.texts([digest_of("after")])


OPENER = """
import sys
from kilburn.backends.sqlite import Sqlite

print("ready", flush=True)
sys.stdin.readline()
with Sqlite(sys.argv[1], busy_timeout=120) as store:
    store.segment("one", time=1.0)
"""


def opener(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", OPENER, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def test_several_may_make_the_same_new_file_at_once(tmp_path: Path) -> None:
    for attempt in range(rounds(2, 6)):
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
            one.communicate(timeout=600)
        assert [one.returncode for one in openers] == [0, 0, 0]
        with Sqlite(path) as backend:
            assert [info.name for info in backend.segments()] == ["one"]
            assert inspect_store(backend) == []

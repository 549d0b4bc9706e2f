"""Programs that are killed, and a server that is: what was acknowledged is there, and nothing of what was not is half there."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

import kilburn
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import StoreError
from kilburn.testing import check_laws
from kilburn.testing.stores import batch_of, start

pytestmark = pytest.mark.slow

WRITER = """
import sys, kilburn
url, first = sys.argv[1], int(sys.argv[2])
with kilburn.open(url, window=500, policy="summarize", tokenizer="chars/4", embedder=None) as store:
    session = store.session("s")
    number = first
    while True:
        session.append({"role": "user", "content": f"message {number} of the talk, about nothing in particular"})
        session.render()
        print(number, flush=True)
        number += 1
"""


def killed_after(url: str, first: int, lines: int) -> int:
    """Run a writer, kill it when it has said so many lines, and return the last number that it acknowledged."""
    last = first - 1
    with subprocess.Popen([sys.executable, "-c", WRITER, url, str(first)], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        for _ in range(lines):
            last = int(program.stdout.readline())
        program.send_signal(signal.SIGKILL)
        rest = program.stdout.read().split()
        return int(rest[-1]) if rest else last


def numbers(session: kilburn.Session) -> list[int]:
    return [int(str(message["content"]).split()[1]) for message in session.contents.messages()]


def test_a_killed_writer_is_taken_over_by_the_next(url: str) -> None:
    last = 0
    for lines in (3, 1, 8, 2):
        last = killed_after(url, last + 1, lines)
        with kilburn.open(url, window=500, policy="summarize", tokenizer="chars/4", embedder=None) as store:
            session = store.session("s")
            found = numbers(session)
            # The one that it was at may be there, too: it was not acknowledged, and nothing of it is half there.
            assert found in (list(range(1, last + 1)), list(range(1, last + 2)))
            last = found[-1]
            check_laws(session)


def test_a_server_that_crashes_keeps_what_was_acknowledged(server: OwnServer, url: str) -> None:
    with kilburn.open(url, window=500, policy="lru", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        said = 0
        for _ in range(3):
            for _ in range(5):
                said += 1
                session.append({"role": "user", "content": f"message {said}"})
            server.stop("immediate")
            with pytest.raises(StoreError):
                session.append({"role": "user", "content": "message 0"})
            server.start()
            session = store.session("s")
            assert numbers(session) == list(range(1, said + 1))
            check_laws(session)


def test_a_connection_that_is_cut_within_a_transaction_leaves_nothing(url: str) -> None:
    with Postgres(url) as backend:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "first"}))

        def write() -> None:
            with backend.together():
                backend.commit(segment, batch_of(1, {2: "second"}))
                joined = backend._db.joined
                assert joined is not None
                joined.close()
                backend.commit(segment, batch_of(2, {3: "third"}))

        with pytest.raises(StoreError):
            write()
        assert [page.id for page, _ in backend.pages(segment)] == [1]
        backend.commit(segment, batch_of(1, {2: "again"}))


FORKED = """
import os, sys
from kilburn.backends.postgres.store import Postgres
from kilburn.testing.stores import batch_of, start

def texts(store, segment):
    return [store.contents.texts([page.digest])[page.digest] for page, _ in store.pages(segment)]

url = sys.argv[1]
ana, ben = Postgres(url, tenant="ana"), Postgres(url, tenant="ben")
one, other = start(ana), start(ben)
ana.commit(one, batch_of(0, {1: "of ana"}))
ben.commit(other, batch_of(0, {1: "of ben"}))
child = os.fork()
store, segment, own = (ana, one, "of ana") if child else (ben, other, "of ben")
for _ in range(100):
    assert texts(store, segment) == [own]
store.commit(segment, batch_of(1, {2: own}))
assert texts(store, segment) == [own, own]
if not child:
    ben.close()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert texts(ana, one) == ["of ana"] * 2
ana.close()
ben.close()
"""


def test_a_child_process_has_no_part_in_the_connections_of_its_parent(url: str) -> None:
    """Before this, each read what the server answered to the other."""
    done = subprocess.run([sys.executable, "-c", FORKED, url], capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr[-2000:]

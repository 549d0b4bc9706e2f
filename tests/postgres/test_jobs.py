"""Workers over one database: killed at any step, two and three at once, each for its tenant; none lost, none twice in effect."""

from __future__ import annotations

import subprocess
import sys
from contextlib import closing
from pathlib import Path
from typing import LiteralString

import psycopg
import pytest

import kilburn
from jobs.work import EMBEDDER, exchange
from kilburn.backends.postgres.store import Postgres
from kilburn.backends.upkeep import inspect_store
from kilburn.jobs.claims import try_again
from kilburn.jobs.worker import Did, JobKind, Ways, Worker, standing

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_that_are_killed_do_everything_once(url: str, tmp_path: Path, workers: int) -> None:
    given = [sys.executable, "-m", "jobs.killing", "together", url, str(tmp_path / "receipts"), str(workers), str(workers)]
    done = subprocess.run(given, capture_output=True, text=True, timeout=600, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > workers, "some were killed"


def test_a_damaged_text_is_named_and_holds_up_no_other(url: str) -> None:
    with kilburn.open(url, embedder=None, tokenizer="chars/4") as store:
        for name in ("before", "bad", "after"):
            store.session(name).append(*exchange(f"This is said in {name}."))
        digest = next(page.digest for page, _ in store.backend.pages(store.session("bad").number) if page.id == 1)
    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute("UPDATE kilburn.content SET data = '\\x00' WHERE digest = decode(%s, 'hex')", [digest])
    did: list[Did] = []
    with Worker(url, ways=Ways(kinds=(JobKind.EMBED,), embedder=EMBEDDER), report=did.append) as worker:
        while worker.once():
            pass
    assert [(one.count, one.error.partition(":")[0]) for one in did] == [(0, "StoreCorrupt"), (5, "")]
    with closing(Postgres(url)) as backend:
        assert backend.vectors.unembedded(EMBEDDER, 10) == []
        (finding,) = inspect_store(backend)
        bad = next(info.number for info in backend.segments() if info.name == "bad")
        assert (finding.kind, finding.segment, finding.page) == ("content", bad, 1)


def test_an_erasure_without_the_right_to_it_stays_open_and_is_tried_again(
    url: str, gateway: str, operator: psycopg.Connection[tuple[object, ...]], give_tables: LiteralString
) -> None:
    with kilburn.open(gateway, embedder=None, tokenizer="chars/4") as store:
        session = store.session("s")
        session.append(*exchange("This is forgotten."))
        session.forget("p1")
    did: list[Did] = []
    with Worker(gateway, ways=Ways(kinds=(JobKind.ERASE,)), report=did.append) as worker:
        assert worker.once() == 1
        assert did[0].error.startswith("StoreReadOnly")
        assert "kilburn" in did[0].error
        with kilburn.open(gateway, embedder=None) as store:
            assert [(job.kind, job.state) for job in standing(store)] == [("erase", "pausing")]
            assert try_again(store.backend) == 1
        operator.execute(give_tables)
        worker.once()
    with kilburn.open(gateway, embedder=None) as store:
        assert standing(store) == []
    assert operator.execute("SELECT count(*) FROM kilburn.erasure").fetchall() == [(0,)]

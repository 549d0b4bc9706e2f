"""Workers over a file: every kind of work, models and embedders that fail, kills at every step, and the command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import apsw
import pytest

import kilburn
from jobs.killing import Keeping
from jobs.work import DAY, EMBEDDER, check_done, exchange, fill
from kilburn import Store
from kilburn.backend import SegmentKind
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.cli import main
from kilburn.effect import Answer, Effect
from kilburn.errors import SpecError, StoreCorrupt, Unavailable
from kilburn.event import Act
from kilburn.jobs.claims import FAILED, JobName, kept, take, try_again
from kilburn.jobs.ending import TimeToLive, keep_rule
from kilburn.jobs.worker import Did, JobKind, Ways, Worker, standing
from kilburn.memory.plain import Plain
from kilburn.memory.view import MemoryView
from kilburn.model import Request
from kilburn.move import Add, Retire
from kilburn.search.embedders.hashing import Hashing
from kilburn.testing import Scripted

CANARY = "heliotrope4711"

PLAIN = Ways(learn=("plain",), embedder=None)


def said(place: Path, name: str, *texts: str, user: str = "ana", tenant: str = "default") -> None:
    with kilburn.open(str(place), tenant=tenant, embedder=None, tokenizer="chars/4") as store:
        for text in texts:
            store.session(name, user=user).append(*exchange(text))


def facts(place: Path, user: str = "ana", tenant: str = "default") -> list[str]:
    with kilburn.open(str(place), tenant=tenant, embedder=None, tokenizer="chars/4") as store:
        memory = store.memory(user)
        return [
            memory.collection.contents.text(page.id) for page, state in memory.pages() if page.digest and page.claim is not None
        ]


def worked(place: Path, ways: Ways = PLAIN, tenants: Sequence[str] = ("default",)) -> list[Did]:
    """What a worker does until nothing is to be done."""
    did: list[Did] = []
    with Worker(str(place), tenants, ways, report=did.append) as worker:
        while worker.once():
            pass
    return did


def test_all_kinds_are_done_once(tmp_path: Path) -> None:
    fill(str(tmp_path / "a.db"))
    ways = Ways(learn=("consolidate('core/human')",), model=Keeping(), embedder=EMBEDDER)
    did = worked(tmp_path / "a.db", ways)
    assert sorted({one.kind for one in did}) == ["embed", "expire", "forget", "learn"]
    assert [one.receipt.whole for one in did if one.receipt] == [("old 0/b1", "old 0"), ("old 1",)]
    check_done(str(tmp_path / "a.db"), tmp_path / "receipts")
    assert worked(tmp_path / "a.db", ways) == []


@pytest.mark.slow
def test_a_worker_that_is_killed_at_any_step_is_followed_by_one_that_goes_on(tmp_path: Path) -> None:
    # Every step where KILBURN_EVERY_STEP is set; else some of them.
    every = "1" if os.environ.get("KILBURN_EVERY_STEP") else "9"
    given = [sys.executable, "-m", "jobs.killing", "each", str(tmp_path), "1", every]
    done = subprocess.run(given, capture_output=True, text=True, timeout=3000, cwd=Path(__file__).parent.parent)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) > 50, "there are as many steps"


def test_without_a_policy_only_what_a_gateway_wants_is_learned_from(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    said(place, "wanted", "I live in Porto.")
    said(place, "private", "I live in Lima.")
    with kilburn.open(str(place), embedder=None, tokenizer="chars/4") as store:
        session = store.session("wanted")
        session.ledger.record(Act.NOTE, policy="gateway", learns=True)
        session.append(*exchange("My name is Ana."))
    assert [one.session for one in worked(place, Ways(embedder=None))] == ["wanted"]
    assert any("Porto" in fact for fact in facts(place))
    assert not any("Lima" in fact for fact in facts(place))


def test_a_turn_is_learned_from_when_it_is_answered_or_when_nobody_speaks(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    with kilburn.open(str(place), embedder=None, tokenizer="chars/4") as store:
        store.session("s", user="ana").append({"role": "user", "content": "I live in Porto."})
    assert worked(place, Ways(learn=("plain",), embedder=None, idle=DAY)) == []
    assert len(worked(place, Ways(learn=("plain",), embedder=None, idle=0.0))) == 1
    said(place, "t", "I drink tea.")
    assert worked(place, Ways(learn=("plain",), embedder=None, idle=DAY, turns=2)) == []
    said(place, "t", "I like boats.")
    assert len(worked(place, Ways(learn=("plain",), embedder=None, idle=DAY, turns=2))) == 1


class Lying(Scripted):
    """A model that repeats what it is shown where an error should stand, or answers with rubbish."""

    def stream(self, request: Request) -> Iterator[Any]:
        """An error that quotes the prompt."""
        self.enqueue(Unavailable(str(request.messages)) if len(self.requests) % 2 == 0 else "")
        return super().stream(request)


def test_a_lying_model_holds_up_nobody_and_leaves_none_of_its_words(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    said(place, "s", f"The password is {CANARY}.")
    ways = Ways(learn=("consolidate('core/human')", "plain"), model=Lying(), embedder=EMBEDDER)
    did = worked(place, ways)
    assert [(one.kind, bool(one.error)) for one in did if one.kind == "learn"] == [("learn", True)]
    assert [one.kind for one in did if not one.error] == ["embed"]
    with Sqlite(place) as backend:
        (job,) = kept(backend)
        assert job.kind == JobKind.LEARN
        assert CANARY not in repr(backend.settings.all())
        assert worked(place, ways) == [], "it rests"
        assert try_again(backend) == 1
        assert CANARY not in repr(worked(place, ways))
    with kilburn.open(str(place), embedder=None, tokenizer="chars/4") as store:
        store.forget(session="s")
    worked(place, ways)
    with Sqlite(place) as backend:
        assert kept(backend) == {}, "what was kept of a forgotten session goes"
    assert not [path for path in tmp_path.glob("a.db*") if CANARY.encode() in path.read_bytes()]


class Choosy(Hashing):
    """An embedder that fails at some texts."""

    def embed(self, texts: Sequence[str]) -> Any:
        """Vectors, unless one of the texts is poison."""
        if any("poison" in text for text in texts):
            raise RuntimeError("it quotes poison")
        return super().embed(texts)


def test_a_passage_that_cannot_be_embedded_rests_and_the_others_go_on(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    said(place, "good", "I live in Porto.")
    said(place, "bad", "This is poison.", "I drink tea.")
    ways = Ways(kinds=(JobKind.ERASE, JobKind.EMBED), embedder=Choosy(64))
    did = worked(place, ways)
    assert [(one.count, one.error) for one in did if not one.segment] == [(5, "")]
    assert [(one.segment > 0, one.error) for one in did if one.segment] == [(True, "RuntimeError")]
    said(place, "more", "I like boats.")
    assert [one.count for one in worked(place, ways) if not one.error] == [2], "others are embedded while it rests"
    with Sqlite(place) as backend:
        assert len(backend.vectors.unembedded(EMBEDDER, 10)) == 1
        assert try_again(backend) == 1
        worked(place, Ways(kinds=(JobKind.ERASE, JobKind.EMBED), embedder=EMBEDDER))
        assert backend.vectors.unembedded(EMBEDDER, 10) == []
        assert kept(backend) == {}


class Broken(Hashing):
    """An embedder that fails always."""

    def embed(self, texts: Sequence[str]) -> Any:
        """Nothing."""
        raise Unavailable("its server is away", advice="start it")


class Deadly(Plain):
    """Kills who learns from a session of which it dies."""

    def plan(self, view: MemoryView) -> Generator[Effect, Answer, Sequence[Add | Retire]]:
        """What `Plain` plans."""
        if any("deadly" in said.text for said in view.new):
            os.kill(os.getpid(), signal.SIGKILL)
        return super().plan(view)


def test_a_session_that_kills_its_workers_rests_and_the_others_of_its_user_go_on(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    said(place, "deadly", "I live in Porto, and that is deadly.")
    said(place, "other", "I like tea.")
    lease = 0.3
    dies = (
        "import sys; from jobs.test_worker import Deadly, worked; from kilburn.jobs.worker import Ways;"
        f"worked(sys.argv[1], Ways(kinds=('learn',), learn=(Deadly(),), embedder=None, lease={lease}))"
    )
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", dies, str(place)], timeout=120, cwd=Path(__file__).parent.parent)
        assert done.returncode == -signal.SIGKILL
        time.sleep(lease)
    (did,) = worked(place, Ways(kinds=(JobKind.LEARN,), learn=(Deadly(),), embedder=None, lease=lease))
    assert (did.session, did.count, did.error) == ("other", 1, "")
    with Store(Sqlite(place), Budget(4000), "fifo") as store:
        (shown,) = standing(store)
        assert (shown.session, shown.state, shown.error) == ("deadly", "pausing", "its worker was killed")


def test_an_embedder_that_is_away_is_tried_again_later(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    said(place, "s", "I live in Porto.")
    (did,) = worked(place, Ways(kinds=(JobKind.EMBED,), embedder=Broken(64)))
    assert (did.error, did.tries, did.count) == ("Unavailable: start it", 1, 0)
    assert worked(place, Ways(kinds=(JobKind.EMBED,), embedder=EMBEDDER)) == []
    with Sqlite(place) as backend:
        try_again(backend)
    assert [one.count for one in worked(place, Ways(kinds=(JobKind.EMBED,), embedder=EMBEDDER))] == [2]


def test_each_tenant_has_its_own(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    for tenant, city in (("one", "Porto"), ("two", "Lima")):
        said(place, "s", f"I live in {city}.", tenant=tenant)
    did = worked(place, tenants=("one",))
    assert {one.tenant for one in did} == {"one"}
    assert facts(place, tenant="two") == []
    assert {one.tenant for one in worked(place, tenants=("one", "two"))} == {"two"}
    assert not any("Lima" in fact for fact in facts(place, tenant="one"))
    assert any("Lima" in fact for fact in facts(place, tenant="two"))


def test_a_worker_that_should_stop_begins_nothing(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    fill(str(place))
    with Worker(str(place), ways=PLAIN, stopped=lambda: True) as worker:
        assert worker.once() == 0
    with Sqlite(place) as backend:
        assert kept(backend) == {}
        assert sorted(info.name for info in backend.segments())[-1] == "talk 1"


def test_who_stops_within_a_job_gives_it_back(tmp_path: Path) -> None:
    place, over = tmp_path / "a.db", [False]
    said(place, "s", "I live in Porto.", "I drink tea.")

    class Stopping(Keeping):
        def stream(self, request: Request) -> Iterator[Any]:
            over[0] = True
            return super().stream(request)

    ways = Ways(kinds=(JobKind.LEARN,), learn=("consolidate('core/human', messages=2)",), model=Stopping(), embedder=None)
    with Worker(str(place), ways=ways, stopped=lambda: over[0]) as worker:
        worker.once()
    with Sqlite(place) as backend:
        assert kept(backend) == {}
    worked(place, Ways(learn=ways.learn, model=Keeping(), embedder=None))
    with kilburn.open(str(place), embedder=None, tokenizer="chars/4") as store:
        assert sorted(store.notes("ana").read("core/human").text.split("\n")) == ["I drink tea.", "I live in Porto."]


def test_a_policy_that_is_none_is_known_at_once(tmp_path: Path) -> None:
    said(tmp_path / "a.db", "s", "I live in Porto.")
    with pytest.raises(SpecError):
        Worker(str(tmp_path / "a.db"), ways=Ways(learn=("nothing_like_it",)))


def test_cold_texts_move(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    place = tmp_path / "a.db"
    old = time.time() - 9 * DAY
    with Store(Sqlite(place), Budget(4000), "fifo", tokenizer="chars/4", clock=lambda: old) as store:
        store.session("s").append(*exchange(" ".join(f"word{number * number}" for number in range(300))))
    assert main(["cold", "set", str(tmp_path / "cold"), "--db", str(place)]) == 0
    assert [one.count for one in worked(place, Ways(kinds=(JobKind.COOL,), embedder=None, cold_after=DAY))] == [1]
    with Sqlite(place) as backend:
        assert len(backend.contents.cold()) == 1


def test_what_a_person_holds_is_not_forgotten_nor_tried_for_ever(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    fill(str(place))
    with Store(Sqlite(place), Budget(4000), "fifo", tokenizer="chars/4", clock=lambda: time.time() - 9 * DAY) as store:
        store.session("old 1").pin("p1")
    worked(place, Ways(kinds=(JobKind.EXPIRE,), embedder=None))
    with Sqlite(place) as backend:
        assert "old 1" in [info.name for info in backend.segments()]
        assert kept(backend) == {}


def test_the_command_works_once_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = str(tmp_path / "a.db")
    fill(place)
    given = ["worker", place, "--once", "--embedder", EMBEDDER]
    assert main([*given, "--learn", "plain", "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {row["kind"] for row in rows} == {"forget", "expire", "learn", "embed"}
    assert all(row["tenant"] == "default" for row in rows)
    assert main(given) == 0
    assert capsys.readouterr().out == ""
    assert main(["worker", place, "--status"]) == 0
    assert "0 jobs" in capsys.readouterr().out


def test_the_command_shows_what_failed_and_tries_it_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "a.db"
    said(place, "s", "I live in Porto.")
    given = ["worker", str(place), "--once", "--learn", "consolidate('core/human')", "--embedder", "none"]
    assert main(given) == 1
    assert "learn failed, 1 time so far" in capsys.readouterr().err
    with Sqlite(place) as backend:
        (job,) = kept(backend)
        entry = json.loads(backend.settings.all()[job.name])
        backend.settings.put(job.name, json.dumps(entry | {"tries": FAILED}))
    assert main(["worker", str(place), "--status"]) == 1
    assert "failed" in capsys.readouterr().out
    assert main(["worker", str(place), "--status", "--json"]) == 1
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["session"], row["state"], row["tries"]) == ("s", "failed", FAILED)
    assert main(["worker", str(place), "--retry"]) == 0
    assert "1 job" in capsys.readouterr().out
    again = ["worker", str(place), "--retry", "--once"]
    assert main([*again, "--status"]) == 2
    assert "give it alone" in capsys.readouterr().err
    assert main([*again, "--learn", "plain", "--embedder", "none"]) == 0
    out = capsys.readouterr().out
    assert "1 job released for another attempt" in out
    assert "learned" in out
    assert main(["worker", str(place), "--status", "--json"]) == 0


def test_the_command_refuses_what_it_does_not_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said(tmp_path / "a.db", "s", "I live in Porto.")
    assert main(["worker", str(tmp_path / "a.db"), "--kinds", "sing"]) == 2
    assert "there are erase, expire, learn, embed, cool" in capsys.readouterr().err
    assert main(["worker", str(tmp_path / "none.db")]) == 2
    assert main(["worker", str(tmp_path / "a.db"), "--idle", "soon"]) == 2


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_after_the_step_in_hand(tmp_path: Path, how: signal.Signals) -> None:
    place = tmp_path / "a.db"
    said(place, "s", "I live in Porto.")
    run = "from kilburn.cli import main; raise SystemExit(main())"
    given = [sys.executable, "-c", run, "worker", str(place), "--learn", "plain", "--embedder", "none", "--json"]
    with subprocess.Popen(given, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            assert json.loads(program.stdout.readline())["kind"] == "learn"
            program.send_signal(how)
            assert program.wait(600) == 0
        finally:
            program.kill()


def test_what_is_in_hand_is_shown(tmp_path: Path) -> None:
    said(tmp_path / "a.db", "s", "I live in Porto.")
    with Store(Sqlite(tmp_path / "a.db"), Budget(4000), "fifo") as store:
        number = store.sessions()[0].number
        assert take(store.backend, JobName(JobKind.LEARN, number)) is not None
        (shown,) = standing(store)
        assert (shown.session, shown.state, shown.tries, shown.error) == ("s", "working", 1, "")


def damage(place: Path, sql: str) -> None:
    db = apsw.Connection(str(place))
    db.execute(sql)
    db.close()


def test_a_damaged_text_is_named_and_holds_up_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path / "a.db"
    said(place, "before", "I live in Porto.")
    said(place, "bad", "I drink tea.", user="eve")
    said(place, "after", "My name is Ana.")
    page = "SELECT content FROM page JOIN segment ON segment.id = segment WHERE name = 'bad' AND page.id = 1"
    damage(place, f"UPDATE content SET data = zeroblob(length(data)) WHERE id = ({page})")
    ways = Ways(kinds=(JobKind.LEARN, JobKind.EMBED), learn=("plain",), embedder=EMBEDDER)
    did = worked(place, ways)
    assert {one.session for one in did if one.kind == "learn" and not one.error} == {"before", "after"}
    (bad,) = {one.segment for one in did if one.error}
    assert {(one.kind, one.error.partition(":")[0]) for one in did if one.error} == {
        ("embed", "StoreCorrupt"),
        ("learn", "StoreCorrupt"),
    }
    with Sqlite(place) as backend:
        assert backend.vectors.unembedded(EMBEDDER, 10) == [], "the others are embedded"
        damaged: dict[int, StoreCorrupt] = {}
        assert backend.vectors.unembedded(EMBEDDER, 10, damaged) == []
        assert {entry >> 32 for entry in damaged} == {bad}
        assert [info.name for info in backend.segments() if info.number == bad] == ["bad"]
    assert worked(place, ways) == [], "it rests"
    assert main(["worker", str(place), "--status"]) == 0
    assert "bad" in capsys.readouterr().out
    assert main(["fsck", "--db", str(place)]) == 1
    assert "p1" in capsys.readouterr().out


def test_a_damaged_ledger_holds_up_no_other(tmp_path: Path) -> None:
    place = tmp_path / "a.db"
    with Store(Sqlite(place), Budget(4000), "fifo", tokenizer="chars/4", clock=lambda: time.time() - 9 * DAY) as store:
        for name in ("bad", "old"):
            store.session(name, user="ana").append(*exchange("I live in Porto."))
        keep_rule(store.backend, TimeToLive(forget=DAY))
    said(place, "new", "I drink tea.")
    of_bad = "segment = (SELECT id FROM segment WHERE name = 'bad')"
    damage(place, f"UPDATE page SET record = zeroblob(length(record)) WHERE {of_bad}")
    damage(place, f"UPDATE event SET body = zeroblob(length(body)) WHERE {of_bad}")
    did = worked(place)
    assert [one.receipt.whole for one in did if one.receipt] == [("old",)]
    assert {one.session for one in did if one.kind == "learn" and not one.error} == {"new"}
    with Sqlite(place) as backend:
        assert sorted(info.name for info in backend.segments() if info.kind is SegmentKind.SESSION) == ["bad", "new"]


def test_an_idle_worker_only_asks_whether_something_was_written(tmp_path: Path) -> None:
    place = str(tmp_path / "a.db")
    with Worker(place) as worker, kilburn.open(place, tokenizer="chars/4", embedder=None) as store:
        assert worker.has_changed()
        assert not worker.has_changed()
        store.session("s").append({"role": "user", "content": "one"})
        assert worker.has_changed()
        assert not worker.has_changed()
        store.forget(session="s")
        assert worker.has_changed()

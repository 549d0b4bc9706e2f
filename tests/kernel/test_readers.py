"""Reading is current, and works when writing does not: beside other writers, behind a lock, on a full disk."""

from __future__ import annotations

import contextlib
import json
import operator
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import apsw
import pytest

import kilburn
from gateway.test_lost_writes import lost
from kernel.talk import user
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.errors import Forgotten, KernelError, StoreStale
from kilburn.event import Act
from kilburn.kernel.pending import GATHERED
from kilburn.message import Kind, Message, Part, Role
from kilburn.move import Evict
from kilburn.testing import check_laws

CANARY = "canaryword"


def opened(path: Path, *, readonly: bool = False, window: int = 2000) -> Store:
    return kilburn.open(str(path), window=window, policy="fifo", tokenizer="chars/4", readonly=readonly)


@pytest.mark.parametrize("readonly", [False, True])
def test_what_another_forgot_is_in_no_answer(tmp_path: Path, readonly: bool) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        store.session("a").append(user("go"), user(f"my {CANARY} is secret"), user("on"))
    with opened(path, readonly=readonly) as agent:
        session = agent.session("a")
        assert CANARY in json.dumps(session.render())
        assert CANARY in session.recall("p2")
        with opened(path) as person:
            person.session("a").forget("p2")
        assert CANARY not in json.dumps(session.render())
        with pytest.raises(Forgotten):
            session.recall("p2")
        assert session.recall("p3") == "on"
        assert session.search(CANARY) == []
        assert agent.search(CANARY) == []
        assert CANARY not in json.dumps(session.contents.messages())
        assert {page.id: state.at for page, state in session.contents.pages()}[2] == "dropped"
        assert CANARY not in repr(list(session.ledger.events()))
        if not readonly:
            session.append(user("and goes on"))
            check_laws(session)
    with opened(path, readonly=True) as store:
        assert [message["content"] for message in store.session("a").contents.messages()][-1] == (
            "on" if readonly else "and goes on"
        )


def test_the_same_in_memory() -> None:
    backend = Sqlite(":memory:")
    agent = Store(backend, Budget(2000), "fifo", tokenizer="chars/4").session("a")
    agent.append(user("go"), user(CANARY))
    assert CANARY in json.dumps(agent.render())
    Store(backend, Budget(2000), "fifo", tokenizer="chars/4").session("a").forget("p2")
    assert CANARY not in json.dumps(agent.render())


def test_a_smaller_window_holds_after_another_wrote(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path, window=20_000) as large, opened(path, window=500) as small:
        session = small.session("a")
        for number in range(20):
            large.session("a").append(user(f"{number} " + "word " * 100))
        prompt = session.render()
        assert 0 < prompt.tokens <= 500
        session.append(user("more"))
        check_laws(session)


def test_changes_that_are_not_written_forbid_a_new_look(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as one, opened(path) as two:
        one.session("a").append(user("go"), user("fine"), user("on"))
        session = two.session("a")

        def look_in_the_middle() -> None:
            with session._kernel.batch():
                session._kernel.carry(Evict(pages=(2,)))
                one.session("a").append(user("meanwhile"))
                session.render()

        with pytest.raises(KernelError, match="in the middle of a change"):
            look_in_the_middle()
        assert len(session.contents.messages()) == 4


def test_observations_survive_a_new_look(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as one, opened(path) as two:
        first, second = one.session("a"), two.session("a")
        first.append(user("go"))
        assert second.recall("p1") == "go"
        first.append(user("on"))
        assert second.recall("p2") == "on"
        assert second.stats().hits == 2
        assert [event.pages for event in second.ledger.events() if event.act == "fault"] == [(1,), (2,)]


@pytest.mark.parametrize("why", ["locked", "full"])
def test_reading_goes_on_where_nothing_can_be_written(tmp_path: Path, why: str) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        store.session("a").append(user("go"), user("needle"))
    # Whoever waits for the lock here waits for a minute.
    sqlite = Sqlite(path, busy_timeout=60.0)
    store = Store(sqlite, Budget(2000), "fifo", tokenizer="chars/4")
    session = store.session("a")
    other = apsw.Connection(str(path))
    if why == "locked":
        other.execute("BEGIN IMMEDIATE")
    else:
        sqlite._db.pragma("max_page_count", 1)
    asked = 3 * GATHERED
    for _ in range(asked):
        assert session.recall("p2") == "needle"
    assert session.render()
    assert session.search("needle")
    assert session.contents.messages()
    assert len(session._kernel.pending.events) <= GATHERED
    session.stats()
    assert any("lost" in event.data for event in session.ledger.events())
    if why == "locked":
        other.execute("ROLLBACK")
    else:
        sqlite._db.pragma("max_page_count", 1 << 30)
    stats = session.stats()
    lost = sum(event.data.get("lost", 0) for event in session.ledger.events())
    assert stats.lost == lost > 0
    assert stats.hits + stats.searches + lost == asked + 1 + 1, "each was written or is counted as lost"
    session.append(user("more"))
    store.close()
    with opened(path, readonly=True) as again:
        assert again.session("a").stats().lost == lost


def test_closing_tells_of_observations_that_were_not_written(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        store.session("a").append(user("go"))
    store = Store(Sqlite(path, busy_timeout=0.0), Budget(2000), "fifo", tokenizer="chars/4")
    store.session("a").recall("p1")
    other = apsw.Connection(str(path))
    other.execute("BEGIN IMMEDIATE")
    with pytest.warns(UserWarning, match="1 observations of session 'a'"):
        store.close()


def test_another_thread_reads_while_one_waits_to_write(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        store.session("a").append(user("go"))
        store.session("b").append(user("needle"))
        other = apsw.Connection(str(path))
        other.execute("BEGIN IMMEDIATE")
        writer = threading.Thread(target=lambda: store.session("a").append(user("waits")))
        writer.start()
        for _ in range(50):
            assert store.backend.words.search("needle")
        assert writer.is_alive()
        other.execute("ROLLBACK")
        writer.join()
        assert store.session("a").recall("p2") == "waits"


BUSY = """
import sys, kilburn
print("ready", flush=True)
number = 0
while True:
    with kilburn.open(sys.argv[1], window=500, policy="fifo", tokenizer="chars/4") as store:
        store.session("a").append({"role": "user", "content": f"{number} " + "w" * 200})
    number += 1
"""


def test_readers_wait_for_a_writer_that_comes_and_goes(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store:
        store.session("a").append(user("go"))
    with subprocess.Popen([sys.executable, "-c", BUSY, str(path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        try:
            for _ in range(80):
                with opened(path, readonly=True) as store:
                    assert store.session("a").recall("p1") == "go"
        finally:
            writer.kill()


@pytest.mark.parametrize("verb", ["contents.pages", "contents.messages", "stats", "edits.view", "ledger.events"])
def test_a_list_never_shows_what_another_thread_has_only_begun(tmp_path: Path, verb: str) -> None:
    seen: list[str] = []
    with opened(tmp_path / "a.db") as store:
        session = store.session("a")
        session.append(user("go"))
        begun, done = threading.Event(), threading.Event()

        def change() -> None:
            with contextlib.suppress(ZeroDivisionError), session._kernel.batch():
                session._kernel.take_in([Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text=CANARY),))])
                begun.set()
                done.wait(0.3)
                raise ZeroDivisionError

        writer = threading.Thread(target=change)
        writer.start()
        begun.wait()
        found = operator.attrgetter(verb)(session)()
        pages = [page.id for page, _ in found] if verb == "contents.pages" else None
        seen.append(repr(pages or (list(found) if verb == "ledger.events" else found)))
        done.set()
        writer.join()
    assert CANARY not in seen[0]
    assert verb != "contents.pages" or seen == ["[1]"]


def test_another_thread_may_look_at_any_moment() -> None:
    before = sys.getswitchinterval()
    with kilburn.open(":memory:", window=3000, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        session.append(*({"role": "user", "content": f"message {number}"} for number in range(300)))
        done, failed = threading.Event(), []

        def look(read: Callable[[], object]) -> None:
            while not done.is_set():
                try:
                    read()
                except Exception as error:
                    failed.append(repr(error))

        looks = [
            lambda: session.contents.closure("p1"),
            lambda: session.prompts.use,
            lambda: session.contents.resolve("p1-p9"),
            lambda: session.contents.text(1),
        ]
        threads = [threading.Thread(target=look, args=(read,)) for read in looks]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for number in range(60):
                session.append({"role": "assistant", "content": f"reply {number} " + "word " * 30})
        finally:
            done.set()
            for thread in threads:
                thread.join()
            sys.setswitchinterval(before)
        assert not failed


def test_data_of_an_observation_cannot_pass_for_pages() -> None:
    with kilburn.open(":memory:", window=3000, tokenizer="chars/4") as store:
        session = store.session("s")
        with pytest.raises(KernelError, match="'new'"):
            session.ledger.record(Act.CACHE, policy="me", cached=5, new=["p1"])
        assert session.append({"role": "user", "content": "well"}) == "p1"


@pytest.mark.parametrize("broken", [False, True], ids=["", "after an error"])
def test_a_session_whose_last_events_were_lost_and_replaced_by_as_many_others_is_read_again(tmp_path: Path, broken: bool) -> None:
    path = tmp_path / "a.db"
    with opened(path) as store, opened(path) as other:
        session = store.session("a")
        session.append(user("one"))
        if broken:
            with contextlib.suppress(ZeroDivisionError), session._kernel.batch():
                raise ZeroDivisionError
        there = other.session("a")
        with lost(path):
            session.append(user("two"))
        there.append(user("three"))
        assert there.ledger.head == session.ledger.head
        with pytest.raises(StoreStale):
            session.append(user("four"))
        session.ledger.refresh()
        session.append(user("four"))
        assert [message["content"] for message in there.contents.messages()] == ["one", "three", "four"]
        there.ledger.refresh()
        with lost(path):
            session.append(user("five"))
        there.append(user("six"))
        assert [message["content"] for message in session.contents.messages()] == ["one", "three", "four", "six"]
        check_laws(session)


def test_what_another_writer_only_observed_does_not_disturb_an_append(tmp_path: Path) -> None:
    with opened(tmp_path / "a.db") as store, opened(tmp_path / "a.db") as other:
        session = store.session("a")
        session.append(user("one"), user("two"))
        session.recall("p1")
        reader = other.session("a")
        reader.render()
        reader.recall("p2")
        reader.search("two")
        assert reader.ledger.flush()
        assert session.append(user("three")) == "p3"
        reader.recall("p1")
        assert reader.ledger.flush()
        session.recall("p2")
        session.pin("p2")
        stats = session.stats()
        assert (stats["prompts"], stats["hits"], stats["searches"]) == (1, 5, 1)
        check_laws(session)
        # What it changed does.
        reader.render()
        reader.append(user("four"))
        with pytest.raises(StoreStale):
            session.append(user("five"))


CHILD = """
import os, sys
import kilburn

with kilburn.open(sys.argv[1], window=2000, policy="fifo", tokenizer="chars/4") as store:
    session = store.session("a")
    session.append({"role": "user", "content": "one"})
    child = os.fork()
    session.render()
    if child:
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert session.append({"role": "user", "content": "two"}) == "p2"
"""


def test_a_child_that_renders_and_exits_leaves_its_parent_as_it_was(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", CHILD, str(tmp_path / "a.db")], check=True, timeout=60)
    with opened(tmp_path / "a.db", readonly=True) as store:
        assert [event.act for event in store.session("a").ledger.events()].count(Act.SHIP) == 2

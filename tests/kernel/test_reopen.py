"""A session outlives its process: same state, same bytes; other windows, rulers and policies; other writers."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

import msgspec
import pytest

import kilburn
from effort import each_value
from kernel.talk import FORMS, assistant, call_of, tool, user
from kilburn.backend import Batch
from kilburn.backends.sqlite import Sqlite
from kilburn.errors import PinsExceedWindow, StoreCorrupt, StoreFull, StoreReadOnly, StoreStale
from kilburn.event import Act
from kilburn.kernel.kernel import Kernel
from kilburn.kernel.resolve import names
from kilburn.memory import memory_tools
from kilburn.move import Drop
from kilburn.page import Place
from kilburn.testing import check_laws


def filled(path: Path, policy: str = "fifo", form: str = "chat", window: int = 1500) -> tuple[str, str]:
    with kilburn.open(str(path), window=window, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        for message in FORMS[form](7, 20):
            session.append(message)
        session.rate("p2", 0.5)
        return json.dumps(session.render()), json.dumps(session.render("messages"))


@pytest.mark.parametrize(("policy", "form"), each_value([name for name in names("policies") if name != "chain"], list(FORMS)))
def test_same_state_same_bytes(policy: str, form: str, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    before = filled(path, policy, form)
    with kilburn.open(str(path), window=1500, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        assert (json.dumps(session.render()), json.dumps(session.render("messages"))) == before
        assert session.window.importance[2] == 0.5
        check_laws(session)
        session.append(user("go on"))
        assert session.render()[-1] == user("go on")


@pytest.mark.parametrize(
    ("tokenizer", "window"),
    each_value(["chars/4", "chars/2", "chars/1", "auto", "gpt-4o", "claude-sonnet-4"], [300, 700, 20_000]),
)
def test_another_window_and_another_ruler(tokenizer: str, window: int, tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    filled(path)
    with kilburn.open(str(path), window=window, policy="lru", tokenizer=tokenizer) as store:
        session = store.session("a")
        if session.prompts.excess:
            assert window == 300
            with pytest.raises(PinsExceedWindow):
                session.render()
            return
        assert session.render().tokens <= window
        for number in range(5):
            session.append(user(f"more {number} " + "w" * 400))
            assert session.render().tokens <= window
        assert session.stats().overflow == 0
        check_laws(session)
    with kilburn.open(str(path), window=1500, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        assert session.render().tokens <= 1500
        assert session.contents.messages()[:5] == list(FORMS["chat"](7, 20))[:5]
        check_laws(session)


def test_an_open_call_is_still_open(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, window=1500, policy="fifo", tokenizer="chars/4") as store:
        store.session("a").append(user("go"), assistant(None, call_of("c")))
    with kilburn.open(path, window=1500, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(tool("c", "late"))
        assert session.render()[-1]["content"] == "late"
        # A call of the same id is another call.
        session.append(assistant(None, call_of("c")), tool("c", "again"))
        assert [message["content"] for message in session.render() if message["role"] == "tool"] == ["late", "again"]


def test_threads_share_one_process(tmp_path: Path) -> None:
    failed: list[BaseException] = []
    with kilburn.open(str(tmp_path / "a.db"), window=600, policy="lru", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(user("go"))

        def work(name: str) -> None:
            try:
                for number in range(15):
                    text = f"{name}-{number} " + "w" * 100
                    address = session.append(user(text))
                    assert session.recall(address) == text
                    assert session.render().tokens <= 600
                    session.search(name)
                    if number % 5 == 0:
                        session.rate(address)
            except BaseException as error:
                failed.append(error)
                raise

        threads = [threading.Thread(target=work, args=(f"thread{number}",)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failed
        said = [message["content"].split()[0] for message in session.contents.messages()[1:]]
        assert len(said) == len(set(said)) == 90
        for number in range(6):
            own = [text for text in said if text.startswith(f"thread{number}-")]
            assert own == [f"thread{number}-{step}" for step in range(15)], "each thread's order is kept"
        check_laws(session)


def test_two_handles_on_one_session_cannot_overwrite_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with (
        kilburn.open(path, policy="fifo", tokenizer="chars/4") as one,
        kilburn.open(path, policy="fifo", tokenizer="chars/4") as two,
    ):
        first, second = one.session("a"), two.session("a")
        first.append(user("from one"))
        with pytest.raises(StoreStale) as caught:
            second.append(user("from two"))
        assert "(" in str(caught.value), "it says what to do"
        assert second.render() == first.render() == [user("from one")], "a look at it shows what the other wrote"
        two.session("b").append(user("another session is free"))
        first.append(user("again"))
    with kilburn.open(path, policy="fifo", tokenizer="chars/4") as store:
        assert [message["content"] for message in store.session("a").contents.messages()] == ["from one", "again"]


WRITER = """
import sys, kilburn
with kilburn.open(sys.argv[1], window=500, policy="fifo", tokenizer="chars/4") as store:
    session = store.session(sys.argv[2])
    for number in range(25):
        session.append({"role": "user", "content": f"{sys.argv[2]} {number} " + "w" * 200})
"""


def test_two_processes_of_the_system_on_one_file(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    with kilburn.open(path, policy="fifo", tokenizer="chars/4") as store:
        store.session("watch").append(user("x"))
        running = [
            subprocess.Popen([sys.executable, "-c", WRITER, path, name], stderr=subprocess.PIPE) for name in ("left", "right")
        ]
        errors = [process.communicate(timeout=600)[1] for process in running]
        assert [process.returncode for process in running] == [0, 0], errors
        for name in ("left", "right"):
            session = store.session(name)
            assert [message["content"].split()[:2] for message in session.contents.messages()] == [
                [name, str(number)] for number in range(25)
            ]
            check_laws(session)


def test_a_killed_writer_loses_nothing_acknowledged(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    program = WRITER.replace(
        '" + "w" * 200})', '"})\n        print(number, flush=True)\n        if number == 11: import os; os.kill(os.getpid(), 9)'
    )
    done = subprocess.run([sys.executable, "-c", program, path, "s"], capture_output=True, timeout=600, check=False)
    assert done.returncode == -9
    acknowledged = len(done.stdout.split())
    with kilburn.open(path, window=500, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        assert len(session.contents.messages()) == acknowledged == 12
        check_laws(session)
        session.append(user("on"))


FULL = """
import resource, signal, sys, kilburn
from kilburn.errors import StoreError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import random
with kilburn.open(sys.argv[1], window=500, policy="fifo", tokenizer="chars/4") as store:
    session = store.session("s")
    resource.setrlimit(resource.RLIMIT_FSIZE, (400_000, resource.RLIM_INFINITY))
    done = 0
    try:
        while done < 1000:
            session.append({"role": "user", "content": f"{done} " + "%x" % random.Random(done).getrandbits(40_000)})
            done += 1
    except StoreError as error:
        before = session.contents.pages()
        print(done, type(error).__name__, error, flush=True)
        assert sum(page.id > 0 for page, _ in before) == done, (len(before), done)
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    session.append({"role": "user", "content": "room again"})
    assert session.recall(f"p{done}").startswith(f"{done - 1} ")
"""


def test_a_disk_that_is_full(tmp_path: Path) -> None:
    path = str(tmp_path / "a.db")
    done = subprocess.run([sys.executable, "-c", FULL, path], capture_output=True, timeout=600, check=False, text=True)
    assert done.returncode == 0, done.stderr
    count, name, *said = done.stdout.split()
    assert name in ("StoreFull", "StoreError")
    assert said[0] == "store:"
    with kilburn.open(path, window=500, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        assert len(session.contents.messages()) == int(count) + 1
        assert session.contents.messages()[-1]["content"] == "room again"
        check_laws(session)


def test_a_full_store_leaves_every_operation_undone() -> None:
    from kilburn.backends.sqlite import Sqlite
    from kilburn.budget import Budget
    from kilburn.kernel.store import Store

    class Full(Sqlite):
        full = False

        def commit(self, segment: int, batch: object) -> None:
            if self.full:
                raise StoreFull("no space left", advice="make room")
            super().commit(segment, batch)  # type: ignore[arg-type]

    store = Full(":memory:")
    session = Store(store, Budget(400), "fifo", tokenizer="chars/4").session("a")
    for number in range(20):
        session.append(assistant(f"{number} " + "w" * 100))
    session.stats()
    before = (session.render(), session.contents.pages(), session.prompts.use)
    store.full = True
    for verb in (
        lambda: session.append(user("x" * 3000)),
        lambda: session.pin("p2"),
        lambda: session.rate("p2"),
        lambda: session.forget("p2"),
        lambda: session.edits.apply(kilburn.move.Evict((20,))),
        lambda: session.edits.apply(kilburn.move.Fold((19, 20), text="short")),
        lambda: session.edits.resize(Budget(100)),
    ):
        with pytest.raises(StoreFull):
            verb()
        assert (session.render(), session.contents.pages(), session.prompts.use) == before
        assert session.prompts.budget == Budget(400)
    said = memory_tools.call(session, "pin", '{"address": "p2"}')
    assert said.text.startswith("error: store:")
    store.full = False
    session.append(user("room again"))
    check_laws(session)


def test_a_folder_that_is_read_only(tmp_path: Path) -> None:
    program = """
import os, sys, kilburn
if os.getuid() == 0: os.setgid(65534); os.setuid(65534)
try: kilburn.open(sys.argv[1] + "/new.db", policy="fifo")
except kilburn.errors.StoreError as error: print(type(error).__name__, error)
"""
    folder = tmp_path / "locked"
    folder.mkdir()
    for part in (folder, *folder.parents):
        if part.owner() != "root" or not part.stat().st_mode & 1:
            part.chmod(part.stat().st_mode | 0o555)
        if part == tmp_path.parent.parent:
            break
    folder.chmod(0o555)
    done = subprocess.run([sys.executable, "-c", program, str(folder)], capture_output=True, text=True, timeout=600, check=False)
    if "PermissionError" in done.stderr or "ModuleNotFoundError" in done.stderr:
        pytest.skip("another user cannot run this Python here")
    assert done.stdout.split()[:2] in (["StoreReadOnly", "store:"], ["StoreError", "store:"]), done.stderr
    assert issubclass(StoreReadOnly, kilburn.KilburnError)


def _work_of_reopening(path: Path, messages: int) -> tuple[int, int]:
    """Reopen a session of so many messages in a window of a tenth: calls of Python functions of the kernel and the
    policies, and how often the whole window was read."""
    with kilburn.open(str(path), window=10**7, policy="fifo", tokenizer="chars/4") as store:
        session = store.session("a")
        session.append(*((user if number % 2 else assistant)(f"{number} " + "w" * 100) for number in range(messages)))
        window = session.prompts.use // 10
    calls, readings = 0, 0

    def count(frame: FrameType, event: str, argument: object) -> None:
        nonlocal calls, readings
        if event == "call" and "/kernel/" in frame.f_code.co_filename:
            calls += 1
            readings += frame.f_code.co_name == "resident"

    with kilburn.open(str(path), window=window, policy="fifo", tokenizer="chars/4") as store:
        before = sys.getprofile()
        sys.setprofile(count)
        try:
            session = store.session("a")
        finally:
            sys.setprofile(before)
        assert 0 < session.prompts.use <= window
        assert session.stats().evictions > messages * 8 // 10
        check_laws(session)
    return calls, readings


def test_reopening_in_a_smaller_window_takes_work_in_proportion(tmp_path: Path) -> None:
    calls, readings = _work_of_reopening(tmp_path / "a.db", 200)
    more, again = _work_of_reopening(tmp_path / "b.db", 800)
    assert more < 4.4 * calls
    assert again == readings, "the whole window was read again for more pages"


def test_another_ruler_counts_also_when_the_session_is_opened_again(tmp_path: Path) -> None:
    path = tmp_path / "a.db"
    filled(path)
    uses = []
    for _ in range(3):
        with kilburn.open(str(path), window=20_000, policy="lru", tokenizer="chars/2") as store:
            session = store.session("a")
            uses.append(session.prompts.use)
            check_laws(session)
    assert len(set(uses)) == 1, "the pages' costs were by the first counter again"


@pytest.mark.parametrize(("policy", "window"), each_value(["fifo", "lru", "hybrid"], [60, 150, 400]))
def test_opening_a_session_again_moves_nothing(policy: str, window: int, tmp_path: Path) -> None:
    """Not even the user's message, where the live window had no room for it and has some now."""
    for seed in range(4):
        path = str(tmp_path / f"{seed}.db")
        for message in list(FORMS["chat"](seed, 12)):
            with kilburn.open(path, window=window, policy=policy, tokenizer="chars/4") as store:
                session = store.session("a")
                try:
                    session.append(message)
                except PinsExceedWindow:
                    break
                before = dict(session.window.states)
            with kilburn.open(path, window=window, policy=policy, tokenizer="chars/4") as store:
                assert store.session("a").window.states == before


def _drop_and_fail(kernel: Kernel, page: int) -> None:
    kernel.carry(Drop(pages=(page,)))
    raise PinsExceedWindow("undone")


@pytest.mark.parametrize("tokenizer", ["chars/2", "chars/8"])
@pytest.mark.parametrize("seed", range(4))
def test_forgetting_what_another_tokenizer_counted(tmp_path: Path, tokenizer: str, seed: int) -> None:
    chance = Random(seed)
    path = str(tmp_path / "a.db")
    with kilburn.open(path, window=700, policy="lru", tokenizer="chars/4", embedder=None) as store:
        session = store.session("a")
        for number in range(12):
            session.append({"role": "user", "content": f"{number} " + "word " * chance.randint(5, 60)})
        session.fork("look at it")
    with kilburn.open(path, window=700, policy="lru", tokenizer=tokenizer, embedder=None) as store:
        session, branch = store.session("a"), store.session("a").branches.open("b1")
        for page in chance.sample(range(1, 13), 3):
            session.forget(f"p{page}")
            session.append({"role": "user", "content": "and then"})
            check_laws(session)
        left = next(page.id for page, state in session.contents.pages() if page.id < 13 and state.at is not Place.DROPPED)
        with pytest.raises(PinsExceedWindow), session.edits.batch() as kernel:
            _drop_and_fail(kernel, left)
        check_laws(session)
        branch.ledger.refresh()
        check_laws(branch)
    for other in ("chars/4", tokenizer):
        with kilburn.open(path, window=700, policy="lru", tokenizer=other, embedder=None) as store:
            check_laws(store.session("a"))
            check_laws(store.session("a").branches.open("b1"))


@pytest.mark.parametrize(
    "forged",
    [
        {"pages": (2,)},
        {"pages": (3, 3)},
        {"pages": (3, 1)},
        {"data": {"to": 5}},
        {"data": {"to": {"in": 5}}},
    ],
    ids=str,
)
def test_an_event_that_no_kernel_wrote_is_damage_and_no_other_error(tmp_path: Path, forged: dict[str, Any]) -> None:
    path = tmp_path / "a.db"
    with kilburn.open(str(path), window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        for words in ("one", "two", "three"):
            session.append({"role": "user", "content": words * 20})
        number = session.number
    with Sqlite(path) as backend:
        (last,) = [event for event in backend.events(number, act=Act.ADMIT) if event.pages == (3,)]
        head = next(info.head for info in backend.segments() if info.number == number)
        backend.commit(number, Batch(head=head, replaced=[msgspec.structs.replace(last, **forged)], copied=True))
    with kilburn.open(str(path), window=4000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        with pytest.raises(StoreCorrupt, match="makes no sense"):
            store.session("s")
        assert store.session("another").append({"role": "user", "content": "hello"})

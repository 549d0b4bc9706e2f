"""A network that refuses, hangs or breaks at any step: a typed error within a bounded time, nothing lost and nothing twice."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from typing import TypeVar

import psycopg
import pytest

import kilburn
from cli.terminal import kilburn as run
from kilburn import Store
from kilburn.backends.postgres.connection import BOUNDS, REACH, Connection, _Pool, _Reach
from kilburn.backends.postgres.server import OwnServer
from kilburn.backends.postgres.statements import Statements
from kilburn.backends.postgres.store import Postgres
from kilburn.errors import KilburnError, StoreBusy, StoreError, StoreStale, StoreUnavailable
from kilburn.testing import check_laws
from kilburn.testing.stores import batch_of, start
from ways import COMMITTED, Link, Way, way_to

pytestmark = pytest.mark.slow

T = TypeVar("T")

EVERY = int(os.environ.get("KILBURN_TEST_EVERY", "6"))
"""Every so many steps of an append are tried by default; `KILBURN_TEST_EVERY=1` tries each."""

STEPS = 60
"""Messages that an append sends, at most."""


@pytest.fixture
def path(server: OwnServer) -> str:
    return str(server.folder / ".s.PGSQL.5432")


@pytest.fixture
def way(path: str, url: str) -> Iterator[Way]:
    with way_to(path, url) as made:
        yield made


def pages(url: str, segment: int, tenant: str = "default") -> list[int]:
    with Postgres(url, tenant=tenant) as backend:
        assert [event.number for event in backend.events(segment)] == list(range(1, len(list(backend.pages(segment))) + 1))
        return [page.id for page, _ in backend.pages(segment)]


def when_it_answers(do: Callable[[], T]) -> T:
    """What this does, as soon as a server that said nothing is tried again."""
    while True:
        with suppress(StoreUnavailable):
            return do()
        time.sleep(0.02)


@pytest.fixture(params=["refused", "no such name", "silent"])
def nowhere(request: pytest.FixtureRequest) -> Iterator[str]:
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        place = f"127.0.0.1:{listener.getsockname()[1]}"
        if request.param == "refused":
            listener.close()
        host = "no-such-host.invalid" if request.param == "no such name" else place
        yield f"postgresql://ana:hunter2@{host}/x?connect_timeout=2"


def test_where_no_server_is_a_verb_says_so(nowhere: str) -> None:
    for verb in ("ps", "fsck"):
        done = run(verb, "--db", nowhere)
        assert done.status == 1
        assert "check that the server runs" in done.err
        assert "hunter2" not in done.out + done.err
        assert "Traceback" not in done.err


def test_a_server_is_waited_for_once_and_not_in_each_step_of_a_request() -> None:
    """What is counted are the attempts to connect to a server that hangs up."""
    attempts = 0

    def hang_up(listener: socket.socket) -> None:
        nonlocal attempts
        with suppress(OSError):
            while True:
                came, _ = listener.accept()
                attempts += 1
                came.close()

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=hang_up, args=(listener,))
        thread.start()
        pool = _Pool(f"postgresql://ana@127.0.0.1:{listener.getsockname()[1]}/x", 1)

        def tried(patience: float) -> int:
            before = attempts
            with pytest.raises(psycopg.OperationalError), pool.connection(patience):
                pass
            return attempts - before

        pool.rests = 3600.0
        once = tried(0.0)
        # Whoever waits does so for an hour.
        assert once == tried(3600.0) == tried(3600.0)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()


@pytest.fixture
def silent() -> Iterator[tuple[str, Callable[[], int]]]:
    """The URL of a server that says nothing to who comes, and how many have come."""
    came: list[socket.socket] = []

    def accept(listener: socket.socket) -> None:
        with suppress(OSError):
            while True:
                came.append(listener.accept()[0])

    with closing(socket.create_server(("127.0.0.1", 0))) as listener:
        thread = threading.Thread(target=accept, args=(listener,))
        thread.start()
        # psycopg makes two seconds of less.
        yield f"postgresql://ana@127.0.0.1:{listener.getsockname()[1]}/x?connect_timeout=2", lambda: len(came)
        listener.shutdown(socket.SHUT_RDWR)
        thread.join()
        for one in came:
            one.close()


def test_a_server_that_says_nothing_is_waited_for_once_whoever_asks_for_how_long(silent: tuple[str, Callable[[], int]]) -> None:
    url, came = silent
    pool = _Pool(url, 1)
    pool.reach.rests = 3600.0
    for patience in (0.0, 3600.0, 3600.0):
        with pytest.raises(psycopg.errors.ConnectionTimeout), pool.connection(patience):
            pass
    assert came() == 1
    # And by one, where some come when it may be tried again.
    pool.reach.rests = 0.0
    with pytest.raises(psycopg.errors.ConnectionTimeout), pool.connection(0.0):
        pass
    assert came() == 1


def test_a_server_that_says_why_it_lets_nobody_in_is_not_silent(silent: tuple[str, Callable[[], int]]) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as closed:
        # Nobody listens there any more.
        refused = f"postgresql://ana@127.0.0.1:{closed.getsockname()[1]}/x"
    reach = _Reach(silent[0])
    reach.rests = 0.0
    with pytest.raises(psycopg.errors.ConnectionTimeout):
        reach.connect()
    reach._url = refused
    with reach._trying:
        # While one tries, others are told to go on without it; who waits for an answer sees for itself.
        with pytest.raises(psycopg.errors.ConnectionTimeout):
            reach.connect()
        assert reach.answers()
        with pytest.raises(psycopg.OperationalError, match="refused"):
            reach.connect()
    reach._url, reach.rests = silent[0], 3600.0
    assert not reach.answers()
    reach._url = refused
    assert not reach.answers()


def test_a_connection_that_says_nothing_is_given_up_where_a_new_one_hears_nothing_either(way: Way) -> None:
    """Before this it was waited for as long as a statement may take."""
    pool = _Pool(way.url, 1)
    with pool.connection(1.0) as connection:
        connection.silence = 3600.0
        assert connection.longer(0.0) == REACH
        # It is busy: others are let in.
        assert connection.longer(REACH) == REACH
        assert connection.longer(4 * REACH) == 4 * REACH
        assert connection.longer(3599.0) == 1.0
        way.hang()
        began = way.connects
        with pytest.raises(psycopg.OperationalError, match="nothing came"):
            connection.longer(REACH)
        assert connection.closed
    with pytest.raises(psycopg.errors.ConnectionTimeout), pool.connection(3600.0):
        pass
    assert way.connects == began + 1
    way.heal()


class Asking(Connection):
    """Waits no longer when it has asked four times."""

    asked: list[float]

    def longer(self, silent: float) -> float:
        self.asked.append(silent)
        if len(self.asked) == 4:
            raise psycopg.OperationalError("no longer")
        return 0.2


def by_psycopg(connection: Connection) -> None:
    connection.execute("SELECT 1")


def by_statements(connection: Connection) -> None:
    with Statements(connection, prepares=False) as statements:
        statements.rows("SELECT 1")


@pytest.mark.parametrize("wait", [by_psycopg, by_statements])
def test_whoever_waits_for_an_answer_asks_whether_to_wait_longer(way: Way, wait: Callable[[Connection], None]) -> None:
    with closing(Asking.connect(way.url, autocommit=True)) as connection:
        way.hang()
        connection.asked = []
        with pytest.raises(psycopg.OperationalError, match="no longer"):
            wait(connection)
        assert connection.asked[0] == 0.0
        assert [round(5 * silent) for silent in connection.asked] == [0, 1, 2, 3]
    way.heal()


def test_a_network_that_hangs_at_any_step_of_an_append(path: str, url: str) -> None:
    """All at once, as each waits for as long as a server may say nothing."""
    went: dict[int, object] = {}

    def hang(step: int) -> None:
        tenant = f"tenant {step}"
        with way_to(path, url) as way, Postgres(way.url, tenant=tenant, busy_timeout=1.0) as backend:
            segment = start(backend)
            backend.commit(segment, batch_of(0, {1: "first"}))
            way.count()
            way.asked = lambda link, number: way.hang() if number == step else None
            try:
                backend.commit(segment, batch_of(1, {2: "second"}))
                went[step] = None
            except KilburnError as error:
                went[step] = error
            way.asked = lambda link, number: None
            way.heal()
            # The database knows whether it was written.
            with suppress(StoreStale):
                when_it_answers(lambda: backend.commit(segment, batch_of(1, {2: "second"})))
            backend.commit(segment, batch_of(2, {3: "third"}))
        assert pages(url, segment, tenant) == [1, 2, 3]
        went.setdefault(-step, None)

    steps = range(1, STEPS, EVERY)
    threads = [threading.Thread(target=hang, args=(step,)) for step in steps]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {step for step in went if step < 0} == {-step for step in steps}, went
    hung = [error for step, error in went.items() if step > 0 and error is not None]
    assert len(hung) > len(steps) // 4
    assert {type(error) for error in hung} == {StoreUnavailable}


def test_a_connection_that_breaks_at_any_step_of_an_append_is_made_anew(way: Way, url: str) -> None:
    """Before the server has a message, and before its answer comes."""
    broken = 0
    with Postgres(way.url) as backend:
        segment = start(backend)
        head = 0
        for before in (True, False):
            for step in range(1, STEPS, 1 if before else 2):
                cut: list[Link] = []

                def cut_at(link: Link, wanted: int, number: int, cut: list[Link] = cut) -> None:
                    if number == wanted and not cut:
                        cut.append(link)
                        link.cut()

                answers = iter(range(1, 1000))

                def answered(link: Link, message: bytes, step: int = step, answers: Iterator[int] = answers) -> bytes:
                    cut_at(link, step, next(answers))
                    return message

                way.count()
                if before:
                    way.asked = lambda link, number, step=step: cut_at(link, step, number)  # type: ignore[misc]
                else:
                    way.answered = answered
                backend.commit(segment, batch_of(head, {head + 1: f"text {step}"}))
                way.asked, way.answered = (lambda link, number: None), (lambda link, message: message)
                head += 1
                broken += len(cut)
    assert pages(url, segment) == list(range(1, head + 1))
    assert broken > 30


def test_a_server_that_ends_the_connection_at_any_step_of_an_append(way: Way, url: str) -> None:
    killed = 0
    with Postgres(way.url) as backend, psycopg.connect(url, autocommit=True) as connection:
        segment = start(backend)
        head = 0
        for step in range(1, STEPS):
            ended: list[int] = []

            def end(link: Link, number: int, step: int = step, ended: list[int] = ended) -> None:
                if number == step and not ended:
                    # With this the server waits until it is gone.
                    assert connection.execute("SELECT pg_terminate_backend(%s, 60000)", (link.pid,)).fetchone() == (True,)
                    ended.append(link.pid)

            way.count()
            way.asked = end
            backend.commit(segment, batch_of(head, {head + 1: f"text {step}"}))
            way.asked = lambda link, number: None
            head += 1
            killed += len(ended)
    assert pages(url, segment) == list(range(1, head + 1))
    assert killed > 15


def without_the_answer(do: Callable[[], None]) -> Callable[[Link, bytes], bytes]:
    """When the server says that something is written, the client does not hear it, and this is done."""

    def answered(link: Link, message: bytes) -> bytes:
        if message == COMMITTED:
            do()
            link.stop()
        return message

    return answered


def test_a_commit_that_was_written_and_not_answered_is_found_out(way: Way, url: str) -> None:
    with Postgres(way.url, busy_timeout=0.2) as backend:
        segment = start(backend)
        way.answered = without_the_answer(lambda: setattr(way, "answered", lambda link, message: message))
        backend.commit(segment, batch_of(0, {1: "once"}))
    assert pages(url, segment) == [1]


def test_a_commit_that_was_not_answered_is_found_out_though_others_have_gone_on(way: Way, url: str) -> None:
    """Before this it was refused as stale, and whoever then did it again did it twice."""
    with Postgres(way.url, busy_timeout=0.2) as backend, Postgres(url) as other:

        def cut_when_written(do: Callable[[], object]) -> None:
            def answered(link: Link, message: bytes) -> bytes:
                if message == COMMITTED:
                    way.answered = lambda link, message: message
                    do()
                    link.cut()
                return message

            way.answered = answered

        def go_on(name: str, head: int, times: int) -> None:
            info = other.segment(name, time=1.0, create=False)
            assert info is not None
            for number in range(head, head + times):
                other.commit(info.number, batch_of(number, {number + 1: f"text {number}"}))

        cut_when_written(lambda: go_on("s", 1, 2))
        number = backend.begin("s", batch_of(0, {1: "first"}), time=1.0).number
        cut_when_written(lambda: go_on("s", 4, 7))
        backend.commit(number, batch_of(3, {4: "mine"}))
        # Another one's write is not taken for it.
        with pytest.raises(StoreStale):
            backend.commit(number, batch_of(3, {4: "mine"}))
    assert pages(url, number) == list(range(1, 12))


def test_a_commit_that_was_not_answered_is_found_out_on_the_second_connection_too(way: Way, url: str) -> None:
    """The first one was lost before: the server has ended it, for example."""
    with Postgres(way.url, busy_timeout=0.2) as backend:
        segment = start(backend)
        lost: list[Link] = []

        def asked(link: Link, number: int) -> None:
            if not lost:
                lost.append(link)
                link.cut()

        def answered(link: Link, message: bytes) -> bytes:
            if message == COMMITTED and len(lost) == 1:
                lost.append(link)
                link.cut()
            return message

        way.asked, way.answered = asked, answered
        backend.commit(segment, batch_of(0, {1: "once"}))
        assert len(lost) == 2
    assert pages(url, segment) == [1]


def test_of_several_steps_that_were_not_answered_it_is_said_that_nobody_knows(way: Way, url: str) -> None:
    with Postgres(way.url, busy_timeout=0.2) as backend:
        segment = start(backend)

        def write() -> None:
            with backend.together():
                backend.commit(segment, batch_of(0, {1: "once"}))

        way.answered = without_the_answer(lambda: setattr(way, "answered", lambda link, message: message))
        with pytest.raises(StoreUnavailable, match="whether it was written is not known"):
            write()
        with pytest.raises(StoreStale):
            write()
    assert pages(url, segment) == [1]


def test_a_session_that_was_begun_and_not_answered_is_found_out(way: Way, url: str) -> None:
    with Postgres(way.url, busy_timeout=0.2) as backend:
        way.answered = without_the_answer(lambda: setattr(way, "answered", lambda link, message: message))
        info = backend.begin("s", batch_of(0, {1: "once"}), time=1.0)
        assert (info.name, info.head, info.pages) == ("s", 1, 1)
        with pytest.raises(StoreStale):
            backend.begin("s", batch_of(0, {1: "another"}), time=2.0)
    assert pages(url, info.number) == [1]


def test_a_connection_that_breaks_at_any_step_of_a_beginning_begins_one_session(way: Way, url: str) -> None:
    broken = 0
    with Postgres(way.url) as backend:
        for step in range(1, STEPS, EVERY):
            cut: list[Link] = []

            def cut_at(link: Link, number: int, step: int = step, cut: list[Link] = cut) -> None:
                if number == step and not cut:
                    cut.append(link)
                    link.cut()

            way.count()
            way.asked = cut_at
            info = backend.begin(f"s{step}", batch_of(0, {1: f"text {step}"}), time=1.0)
            way.asked = lambda link, number: None
            assert pages(url, info.number) == [1]
            broken += len(cut)
        assert len(backend.segments()) == len(range(1, STEPS, EVERY))
    assert broken > 3


def test_a_commit_that_nobody_answers_is_neither_lost_nor_doubled(way: Way, url: str) -> None:
    hello = {"role": "user", "content": "hello"}
    with Store(Postgres(way.url, busy_timeout=0.2), kilburn.Budget(500), "fifo", tokenizer="chars/4") as store:
        session = store.session("s")
        session.append({"role": "user", "content": "before"})
        way.answered = without_the_answer(way.hang)
        with pytest.raises(StoreUnavailable, match=r"whether it was written is not known.*not written twice"):
            session.append(hello)
        way.answered = lambda link, message: message
        way.heal()
        with pytest.raises(StoreStale):
            when_it_answers(lambda: session.append(hello))
        assert [message["content"] for message in session.contents.messages()] == ["before", "hello"]
        session.append({"role": "assistant", "content": "after"})
        check_laws(session)
    with kilburn.open(url, window=500, tokenizer="chars/4", embedder=None) as store:
        assert [message["content"] for message in store.session("s").contents.messages()] == ["before", "hello", "after"]


def test_who_hangs_with_a_lock_gives_it_up(way: Way, url: str) -> None:
    """The one that hangs is still there for the server: it says nothing, and holds the session."""
    with psycopg.connect(url) as connection:
        if connection.info.server_version < BOUNDS:
            pytest.skip("needs PostgreSQL 17: before, the server's tcp_keepalives_idle says how long")
    with Postgres(way.url, busy_timeout=0.1) as hanging, Postgres(url, busy_timeout=0.1) as other:
        segment = start(hanging)
        hanging.commit(segment, batch_of(0, {1: "first"}))
        locked = threading.Event()
        seen = iter(range(1000))

        def answered(link: Link, message: bytes) -> bytes:
            # The second row is the session's, after that of the settings.
            if message[:1] == b"D" and next(seen) == 1:
                locked.set()
                way.hang()
            return message

        way.answered = answered
        with pytest.raises(StoreUnavailable):
            hanging.commit(segment, batch_of(1, {2: "never"}))
        assert locked.is_set()
        while True:
            try:
                other.commit(segment, batch_of(1, {2: "second"}))
                break
            except StoreBusy:
                continue
    assert pages(url, segment) == [1, 2]


def test_connections_that_died_while_nobody_used_them_are_not_noticed(server: OwnServer, url: str) -> None:
    """Also by a write whose commit cannot be found out."""
    with Postgres(url) as backend, psycopg.connect(url, autocommit=True) as connection:
        backend.commit(start(backend), batch_of(0, {1: "word"}))
        for round_ in range(3):
            threads = [threading.Thread(target=backend.words.search, args=("word",)) for _ in range(6)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            ended = "SELECT bool_and(pg_terminate_backend(pid, 60000)) FROM pg_stat_activity WHERE application_name = 'kilburn'"
            assert connection.execute(f"{ended} AND datname = current_database()").fetchone() == (True,)
            backend.settings.put("number", str(round_))
            backend.vectors.drop("none")
        assert backend.settings.all() == {"number": "2"}


def test_a_server_that_is_stopped_and_comes_back(server: OwnServer, url: str) -> None:
    with Postgres(url, busy_timeout=0.2) as backend:
        segment = start(backend)
        backend.commit(segment, batch_of(0, {1: "first"}))
        server.stop("fast")
        try:
            with pytest.raises(StoreUnavailable, match="check that the server runs"):
                backend.commit(segment, batch_of(1, {2: "second"}))
            with pytest.raises(StoreError):
                Postgres(url)
        finally:
            server.start()
        backend.commit(segment, batch_of(1, {2: "second"}))
    assert pages(url, segment) == [1, 2]

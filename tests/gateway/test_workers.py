"""Several processes serve at one address: sessions move between them, figures add up, and no restart loses a request."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest
import uvicorn

import kilburn
from cli.terminal import kilburn as command
from gateway.crew import REQUESTS, Crew, Talker, check_talks, reply, texts_of
from gateway.talk import user
from kilburn.cli.serve import shared_folder
from kilburn.gateway.app import Gateway, Settings
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.worker import Neighbours, Parent, WorkerServer
from kilburn.gateway.workers import AT_ONCE, MAX_PAUSE, MINUTE, Pace, together
from kilburn.search.vectors import Vectors
from kilburn.testing.upstream import Upstream, serving
from waiting import until


@pytest.fixture(scope="module")
def far() -> Iterator[str]:
    with serving(Upstream(otherwise=reply)) as url:
        yield url


@pytest.fixture(scope="module")
def crew(far: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Crew]:
    folder = tmp_path_factory.mktemp("crew")
    made = Crew(folder, far, str(folder / "a.db"))
    yield made
    made.close()


def test_a_rolling_restart_loses_no_request_and_no_count(crew: Crew) -> None:
    before, old = crew.series().get(REQUESTS, 0), set(crew.workers)
    talkers = [Talker(crew.url, f"rolling{number}", keeps=number < 2) for number in range(3)]
    for talker in talkers:
        talker.start()
    until(lambda: all(len(talker.talk) > 4 for talker in talkers))
    crew.restart()
    assert len(crew.workers) == 2
    assert old.isdisjoint(crew.workers)
    check_talks(crew, str(Path(crew.told.split("store is ")[1].split("\n")[0])), talkers)
    asked = sum(len(talker.talk) // 2 for talker in talkers)
    assert crew.series()[REQUESTS] == before + asked
    rows = httpx2.get(f"{crew.url}/sessions", timeout=600).json()["sessions"]
    assert {row["session"]: row["requests"] for row in rows if row["session"].startswith("rolling")} == {
        talker.named: len(talker.talk) // 2 for talker in talkers
    }


def test_a_worker_that_is_killed_is_replaced_and_what_it_counted_stays(crew: Crew) -> None:
    talker = Talker(crew.url, "killed", keeps=False)
    talker.start()
    until(lambda: len(talker.talk) > 8)
    talker.end()
    before = crew.series()
    for worker in crew.workers:
        os.kill(worker, signal.SIGKILL)
    until(lambda: crew.told.count("ended by SIGKILL; another one is started now") >= 2)
    after = until(lambda: found if (found := crew.series())["kilburn_workers"] == 2 else None)
    assert after["kilburn_workers_ended_total"] == before["kilburn_workers_ended_total"] + 2
    for name, figure in before.items():
        if re.search(r"_(total|count|sum|bucket)(\{|$)", name):
            assert after[name] >= figure, name
    assert after[REQUESTS] == before[REQUESTS]


class Slow(Upstream):
    """A provider that answers when it is told to."""

    def __init__(self) -> None:
        super().__init__(otherwise="at last")
        self.asked, self.go = threading.Semaphore(0), threading.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            self.asked.release()
            while not self.go.is_set():
                await asyncio.sleep(0.01)
        await super().__call__(scope, receive, send)


class Asking(threading.Thread):
    """A client that asks once."""

    def __init__(self, url: str, text: str) -> None:
        super().__init__(daemon=True)
        self._url, self._text = url, text
        self.status, self.heard = 0, ""

    def run(self) -> None:
        body = {"model": "m", "messages": [user(self._text)]}
        with suppress(httpx2.HTTPError):
            answer = httpx2.post(f"{self._url}/v1/chat/completions", json=body, timeout=600)
            self.status, self.heard = answer.status_code, answer.text


@pytest.mark.parametrize(("workers", "drain"), [(2, 600), (1, 0)])
def test_requests_in_flight_are_ended_within_their_time_and_no_others_begun(workers: int, drain: int, tmp_path: Path) -> None:
    slow = Slow()
    with ExitStack() as stack:
        upstream = stack.enter_context(serving(slow))
        stack.callback(slow.go.set)
        crew = Crew(tmp_path, upstream, str(tmp_path / "a.db"), workers, drain=drain)
        stack.callback(crew.close)
        clients = [Asking(crew.url, text) for text in ("one", "two", "three")]
        for client in clients:
            client.start()
            slow.asked.acquire()
        crew.process.terminate()
        until(lambda: _refused(crew.url))
        if drain:
            slow.go.set()
        assert crew.process.wait(600) == (0 if workers > 1 else -signal.SIGTERM), crew.told
        for client in clients:
            client.join(600)
    if drain:
        assert [(client.status, "at last" in client.heard) for client in clients] == [(200, True)] * 3
    else:
        assert not any("at last" in client.heard or client.status == 200 for client in clients)
    said = texts_of(str(tmp_path / "a.db"))
    assert sorted(said.values()) == [[text, "at last"][: 2 if drain else 1] for text in ("one", "three", "two")]


def _refused(url: str) -> bool:
    try:
        httpx2.get(f"{url}/health", timeout=600)
    except httpx2.ConnectError:
        return True
    except httpx2.HTTPError:
        return False
    return False


def test_who_is_signed_in_is_so_at_every_worker_and_after_a_restart(far: str, tmp_path: Path) -> None:
    _, key = add_key(tmp_path / "keys.json", Key(note="ana"))
    crew = Crew(tmp_path, far, str(tmp_path / "a.db"), keys=tmp_path / "keys.json", dashboard=True)
    try:
        ours = {"origin": crew.url, "sec-fetch-site": "same-origin"}
        wrong = httpx2.post(f"{crew.url}/dashboard/sign-in", data={"key": "kilburn-x"}, headers=ours, timeout=600)
        assert (wrong.status_code, "unknown here" in wrong.text) == (401, True)
        let = httpx2.post(f"{crew.url}/dashboard/sign-in", data={"key": key}, headers=ours, timeout=600)
        assert let.status_code == 303, let.text
        cookie = {"cookie": let.headers["set-cookie"].partition(";")[0]}

        def looks() -> list[int]:
            # Each takes a new connection, which any worker may get.
            return [httpx2.get(f"{crew.url}/dashboard/", headers=cookie, timeout=600).status_code for _ in range(9)]

        assert looks() == [200] * 9
        page = httpx2.get(f"{crew.url}/dashboard/", headers=cookie, timeout=600).text
        word = re.search(r'name="word" value="([^"]+)"', page)
        assert word is not None, page
        crew.restart()
        assert looks() == [200] * 9
        left = httpx2.post(f"{crew.url}/dashboard/sign-out", data={"word": word[1]}, headers={**ours, **cookie}, timeout=600)
        assert left.status_code == 303, left.text
        assert looks() == [401] * 9
        (tmp_path / "keys.json").write_text("{")
        refused = httpx2.post(f"{crew.url}/dashboard/sign-in", data={"key": key}, headers=ours, timeout=600)
        assert (refused.status_code, "cannot read its keys" in refused.text) == (503, True)
        assert crew.stop(signal.SIGINT) == 130
    finally:
        crew.close()


def test_what_cannot_begin_says_why(far: str, tmp_path: Path) -> None:
    given = ("serve", "--upstream", far, "--port", "0", "--workers", "2")
    (tmp_path / "text.db").write_text("This is a text, and no database.")
    for words, said, status in (
        (("--db", ":memory:"), "give a file or a URL with --db", 2),
        (("--db", tmp_path / "text.db"), "is not a database", 1),
        (("--db", tmp_path / "a.db", "--keys", tmp_path / "none.json"), "there is no keys file", 2),
        (("--db", tmp_path / "a.db", "--drain", "-1"), "drain", 2),
    ):
        done = command(*given, *words)
        assert (done.status, said in done.err) == (status, True), done.err
        assert "Traceback" not in done.err


@pytest.mark.slow
def test_a_worker_that_is_killed_before_all_serve_ends_all_at_once(far: str, tmp_path: Path) -> None:
    words = ("--port=0", "--upstream", far, "--workers=2", "--drain=3600", "--db", str(tmp_path / "a.db"))
    process = subprocess.Popen([sys.executable, "-m", "kilburn", "serve", *words], stderr=subprocess.PIPE, text=True)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    until(lambda: len(children.read_text().split()) == 2)
    os.kill(int(children.read_text().split()[0]), signal.SIGKILL)
    _, told = process.communicate(timeout=600)  # it does not wait for --drain: there are no requests
    assert (process.returncode, told) == (1, "a worker ended before it served; what it said stands above\n")


def test_workers_that_end_again_and_again_are_started_more_slowly() -> None:
    now = [0.0]
    pace = Pace(lambda: now[0])
    assert [pace.pause() for _ in range(AT_ONCE + 7)] == [0.0] * AT_ONCE + [1, 2, 4, 8, 16, MAX_PAUSE, MAX_PAUSE]
    now[0] = MINUTE
    assert pace.pause() == 0.0


def test_what_is_so_now_is_added_where_each_has_its_own() -> None:
    one = [("sessions_open", "a", 2.0), ("store_bytes", "", 10.0), ("embedding_behind", "a", 1.0), ("spans_waiting", "", 1.0)]
    other = [("sessions_open", "a", 3.0), ("sessions_open", "b", 1.0), ("store_bytes", "", 12.0), ("embedding_behind", "a", 0.0)]
    assert {(name, tenant): figure for name, tenant, figure in together([one, other])} == {
        ("sessions_open", "a"): 5.0,
        ("sessions_open", "b"): 1.0,
        ("store_bytes", ""): 12.0,
        ("embedding_behind", "a"): 1.0,
        ("spans_waiting", ""): 1.0,
    }


def test_one_of_the_workers_does_what_is_done_in_the_background(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    with one, other:
        parents = [Parent(line, str(tmp_path), place) for place, line in enumerate((one, other), 1)]
        assert [parent.leads("a") for parent in parents] == [True, False]
        assert [parent.leads("b") for parent in reversed(parents)] == [True, False]
        assert [parent.leads("a") for parent in parents] == [True, False], "it stays so"
        parents[0].stop_leading()
        assert parents[1].leads("a")
        for parent in parents:
            parent.stop_leading()


def test_what_is_done_in_the_background_waits_for_requests_to_any_worker(tmp_path: Path) -> None:
    one, other = (Neighbours(str(tmp_path), place) for place in (1, 2))
    settings = Settings(db=str(tmp_path / "a.db"), upstream="http://127.0.0.1:9/v1", embedder=None)
    Gateway(settings, last_request=one.used).use()
    assert time.monotonic() >= other.used[0] > 0


@pytest.mark.skipif(shutil.which("systemd-tmpfiles") is None, reason="needs systemd-tmpfiles")
def test_what_workers_share_stays_where_temporary_files_are_deleted(tmp_path: Path) -> None:
    """It was gone after weeks on a machine with systemd, and a worker that was killed had no successor."""
    rule, place = tmp_path / "rule.conf", tmp_path / "tmp"
    place.mkdir(mode=0o700)
    (place / "other").mkdir()
    rule.write_text(f"d {place} 0700 - - 0\n")
    with shared_folder(str(place)) as folder:
        first = Neighbours(folder, 1)
        first.has(8)
        subprocess.run(["systemd-tmpfiles", "--clean", str(rule)], check=True)
        assert not (place / "other").exists()
        assert Neighbours(folder, 2).has(9), "who begins now sees the others"
    assert not list(place.iterdir())


def test_a_worker_knows_whether_another_has_fewer_connections(tmp_path: Path) -> None:
    one, other = (Neighbours(str(tmp_path), place) for place in (1, 2))
    assert not one.has(7), "the other one takes none"
    assert not other.has(7)
    assert one.has(8)
    assert not one.has(7)
    assert not one.has(6)
    assert other.has(7)
    one.leave()
    assert not other.has(7)
    assert Neighbours(str(tmp_path), 1).has(8), "what is begun in its place sees the same"


@pytest.mark.parametrize(("shares", "connections"), [(2, 8), (1, 3)])
async def test_connections_that_stay_are_shared_out_and_none_waits_for_a_worker_that_does_not_come(
    shares: int, connections: int, tmp_path: Path
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body", "body": b""})

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGHUP, signal.SIGTERM)}
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        if shares == 1:
            Neighbours(str(tmp_path), 9).has(0)  # says that it has none, and never takes one
        servers, lines, tasks = list[WorkerServer](), list[socket.socket](), list[asyncio.Task[None]]()
        for place in range(1, shares + 1):
            line, theirs = socket.socketpair()
            lines.append(stack.enter_context(line))
            config = uvicorn.Config(app, log_level="warning", lifespan="off", ws="none")
            servers.append(WorkerServer(config, listener.dup(), Parent(theirs, str(tmp_path), place)))
            tasks.append(asyncio.create_task(servers[-1].serve()))
            assert b"ready" in await asyncio.to_thread(line.recv, 100)

        async def answered(connection: socket.socket) -> asyncio.StreamWriter:
            reader, writer = await asyncio.open_connection(sock=connection)
            writer.write(b"GET / HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert b"200" in await reader.readuntil(b"\r\n\r\n")
            return writer

        def taken() -> list[int]:
            return [len(server.server_state.connections) for server in servers]

        def told() -> list[int]:
            return [count - 1 for count in servers[0]._parent.neighbours._counts[1 : shares + 1]]

        for at_once in (False, True, True):
            writers = []
            if at_once:
                waiting = [socket.create_connection(listener.getsockname()) for _ in range(connections)]
                writers = await asyncio.gather(*map(answered, waiting))
            else:
                for _ in range(connections):
                    writers.append(await answered(socket.create_connection(listener.getsockname())))
            assert taken() == told() == [connections // shares] * shares
            for writer in writers:
                writer.close()
            while any(taken()):
                await asyncio.sleep(0.001)
            assert not any(told()), "the others see that they are gone"
        for line in lines:
            line.close()  # the parent is gone
        await asyncio.gather(*tasks)
    for number, handler in before.items():
        signal.signal(number, handler)


class Letters:
    """Makes vectors of nothing but a text's first letters."""

    name, dimensions = "letters", 4

    def embed(self, texts: Sequence[str]) -> Any:
        return np.asarray([[ord(letter) for letter in f"{text:4}"[:4]] for text in texts], np.float32)


def test_who_has_not_the_turn_embeds_nothing_and_sees_what_the_other_has_embedded(tmp_path: Path) -> None:
    path, turn = str(tmp_path / "a.db"), threading.Event()
    with ExitStack() as stack:
        one, other = (stack.enter_context(kilburn.open(path, tokenizer="chars/4", embedder=None)) for _ in range(2))
        one.session("s").append(user("The river ends in the sea."))
        idle, busy = Vectors(one.backend, Letters()), Vectors(other.backend, Letters())
        asked = threading.Semaphore(0)
        idle.start(0.0, busy=lambda: False, turn=lambda: bool(asked.release()))
        for _ in range(2):
            asked.acquire()
        assert one.backend.vectors.unembedded("letters", 9), "it was asked whether it may, and did not"
        turn.set()
        busy.start(0.0, busy=lambda: False, turn=turn.is_set)
        until(lambda: not one.backend.vectors.unembedded("letters", 9))
        found = until(lambda: idle.nearest("The river", None, 1))
        assert found[0][0].page == 1
        idle.close()
        busy.close()


def test_sessions_are_ended_by_whose_turn_it_is(tmp_path: Path) -> None:
    asked: list[str] = []

    def turn(tenant: str) -> bool:
        asked.append(tenant)
        return False

    gateway = Gateway(Settings(db=str(tmp_path / "a.db"), upstream="http://127.0.0.1:9/v1", embedder=None), turn)
    gateway.check()
    gateway.tend()
    asyncio.run(gateway.close())
    assert asked == ["default"]


def test_workers_let_in_what_one_would(far: str, tmp_path: Path) -> None:
    rate = 4  # one request at once, and one every 15 seconds
    _, secret = add_key(str(tmp_path / "keys.json"), Key(rate=rate))
    crew = Crew(tmp_path, far, str(tmp_path / "a.db"), keys=tmp_path / "keys.json")
    try:
        began, answered = time.monotonic(), []
        for number in range(6):
            body = {"model": "m", "messages": [user(f"question {number}")]}
            headers = {"authorization": f"Bearer {secret}"}
            answered.append(httpx2.post(f"{crew.url}/v1/chat/completions", json=body, headers=headers, timeout=600).status_code)
        assert set(answered) == {200, 429}
        assert rate // 4 <= answered.count(200) <= rate // 4 + (time.monotonic() - began) * rate / 60
    finally:
        crew.close()

"""A store that fails: the client is refused, or served unread if the operator wants it; and what anybody is told of it."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from gateway.talk import said, user
from gateway.test_crash import Served
from kilburn.errors import SpecError, StoreFull
from kilburn.gateway.app import Settings, build
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.status import FREE, Trouble
from kilburn.testing.upstream import Break, Refusal, Upstream, calling, serving
from waiting import until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
NOBODY = "session-of-nobody"
FILLER = "The river carries sand, and the sand carries gold. " * 6
CANARY = "canary-91c4"
Json = dict[str, Any]


class House:
    """A gateway in this process over a store that others may hold or damage."""

    def __init__(self, folder: Path, stack: ExitStack, *script: Any, form: str = "chat", **options: Any) -> None:
        self.upstream = Upstream(*script, otherwise="Fine.")
        self.folder = folder / CANARY
        self.folder.mkdir()
        self.db = self.folder / "a.db"
        far = stack.enter_context(serving(self.upstream))
        given = {"db": str(self.db), "tokenizer": "chars/4", "embedder": None, "window": 4000, "fail": "open"}
        self.options: Json = {**given, "upstream": f"{far}/v1" if form == "chat" else far, **options}
        self.http = stack.enter_context(httpx2.Client(timeout=600, trust_env=False))
        self._stack = stack
        self.bytes = b""

    def start(self) -> None:
        self.url = self._stack.enter_context(serving(build(Settings(**self.options))))

    def ask(self, path: str, talk: Any, *, stream: bool = False, **headers: str) -> httpx2.Response:
        body = {"model": "m", "max_tokens": 99, "input" if path == RESPONSES else "messages": talk, "stream": stream}
        return self.post(path, json.dumps(body).encode(), **headers)

    def post(self, path: str, body: bytes, **headers: str) -> httpx2.Response:
        given = {"content-type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
        return self.told(self.http.post(self.url + path, content=body, headers=given))

    def get(self, path: str, **headers: str) -> httpx2.Response:
        return self.told(
            self.http.get(self.url + path, headers={name.replace("_", "-"): value for name, value in headers.items()})
        )

    def told(self, answer: httpx2.Response) -> httpx2.Response:
        self.bytes += str(answer.headers).encode() + answer.content
        return answer

    def sessions(self) -> dict[str, list[str]]:
        with kilburn.open(str(self.db), readonly=True, embedder=None, tokenizer="chars/4", window=9000, policy="fifo") as store:
            return {
                info.name: ["".join(part.text for part in each.parts) for each in store.session(info.name).contents.originals()]
                for info in store.sessions()
                if not info.name.startswith("@")
            }


@pytest.fixture
def house(tmp_path: Path) -> Iterator[Callable[..., House]]:
    with ExitStack() as stack:

        def start(*script: Any, **options: Any) -> House:
            it = House(tmp_path, stack, *script, **options)
            it.start()
            return it

        yield start


@pytest.fixture
def held() -> Iterator[Callable[[Path], subprocess.Popen[str]]]:
    """Another program that holds a store's file for itself until it is killed."""
    code = "import sqlite3, sys\ndb = sqlite3.connect(sys.argv[1])\ndb.execute('BEGIN EXCLUSIVE')\n"
    code += "print('held', flush=True)\ninput()"
    running: list[subprocess.Popen[str]] = []

    def hold(db: Path) -> subprocess.Popen[str]:
        made = subprocess.Popen([sys.executable, "-c", code, db], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(made)
        assert made.stdout is not None
        assert made.stdout.readline() == "held\n"
        return made

    yield hold
    for each in running:
        each.kill()
        each.communicate()


def text_of(answer: httpx2.Response) -> str:
    assert answer.status_code == 200, answer.text
    if not answer.headers["content-type"].startswith("text/event-stream"):
        whole = answer.json()
        if "choices" in whole:
            return str(whole["choices"][0]["message"]["content"])
        return "".join(part["text"] for part in whole.get("content") or whole["output"][0]["content"])
    events = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    if events and events[0].get("type") in ("message_start", "response.created"):
        deltas = [event.get("delta", "") for event in events]
        return "".join(each if isinstance(each, str) else each.get("text", "") for each in deltas)
    return "".join(choice["delta"].get("content") or "" for event in events for choice in event["choices"])


def unread(it: House) -> dict[str, float]:
    lines = [line for line in it.get("/metrics").text.splitlines() if line.startswith("kilburn_unread_total{")]
    return {line.split('reason="')[1].split('"')[0]: float(line.rsplit(" ", 1)[1]) for line in lines}


PATHS = [(CHAT, False), (CHAT, True), (MESSAGES, False), (MESSAGES, True), (RESPONSES, False), (RESPONSES, True)]


@pytest.mark.parametrize(("path", "stream"), PATHS)
def test_a_store_that_another_program_holds(
    house: Callable[..., House], held: Callable[[Path], subprocess.Popen[str]], path: str, stream: bool
) -> None:
    it = house(form="messages" if path == MESSAGES else "chat")
    talk = [user(f"q0 {FILLER}")]
    first = it.ask(path, talk, stream=stream)
    name, talk = first.headers["x-kilburn-session"], [*talk, said(text_of(first)), user("q1")]
    holder = held(it.db)
    for turn in range(2, 4):
        answer = it.ask(path, talk, stream=stream)
        assert answer.headers["x-kilburn-unread"] == "store-busy"
        assert "x-kilburn-session" not in answer.headers
        assert it.upstream.sent[-1].body["input" if path == RESPONSES else "messages"] == talk
        talk += [said(text_of(answer)), user(f"q{turn}")]
    # A request is counted behind the last byte of its answer, and what `/health` says may be a moment old.
    assert until(lambda: unread(it) == {"store-busy": 2.0})
    health = until(lambda: (answer := it.get("/health")).json()["status"] == "unread" and answer)
    assert (health.status_code, health.json()["problem"]) == (200, "StoreBusy")
    holder.kill()
    holder.wait(600)

    def read_again() -> httpx2.Response | None:
        answer = it.ask(path, talk, stream=stream)
        return answer if "x-kilburn-unread" not in answer.headers else None

    answer = until(read_again)
    assert answer.headers["x-kilburn-session"] == name
    assert [text.strip() for text in it.sessions()[name]] == [each["content"].strip() for each in talk] + ["Fine."]
    assert until(lambda: it.get("/health").json()["status"] == "ok")
    assert CANARY.encode() not in it.bytes


def test_closed_it_is_refused_and_health_takes_it_out(
    house: Callable[..., House], held: Callable[[Path], subprocess.Popen[str]]
) -> None:
    it = house(fail="closed")
    assert it.ask(CHAT, [user("q0")]).status_code == 200
    holder = held(it.db)
    for stream in (False, True):
        answer = it.ask(CHAT, [user("q1")], stream=stream)
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unavailable")
    assert len(it.upstream.sent) == 1
    health = it.get("/health")
    assert (health.status_code, health.json()["status"]) == (503, "failing")
    holder.kill()
    holder.wait(600)
    assert it.ask(CHAT, [user("q1")]).status_code == 200
    assert until(lambda: it.get("/health").status_code == 200)
    assert CANARY.encode() not in it.bytes
    assert unread(it) == {}


@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_is_damaged(tmp_path: Path, stream: bool) -> None:
    with ExitStack() as stack:
        it = House(tmp_path, stack)
        talk = [user(f"q0 {FILLER}")]
        with serving(build(Settings(**it.options))) as it.url:
            talk += [said(text_of(it.ask(CHAT, talk))), user("q1")]
        whole = it.db.read_bytes()
        it.db.write_bytes(whole[:4096] + os.urandom(len(whole) - 4096))
        with serving(build(Settings(**it.options))) as it.url:
            for turn in range(2):
                answer = it.ask(CHAT, [*talk, user(str(turn))], stream=stream)
                assert text_of(answer) == "Fine."
                assert answer.headers["x-kilburn-unread"] == "store-damaged"
            health = it.get("/health")
            assert (health.status_code, health.json()["status"], health.json()["problem"]) == (200, "unread", "StoreCorrupt")
            assert unread(it) == {"store-damaged": 2.0}
        it.db.write_bytes(whole)
        with serving(build(Settings(**it.options))) as it.url:
            assert it.ask(CHAT, talk, stream=stream).headers["x-kilburn-session"]
        assert CANARY.encode() not in it.bytes


def test_a_store_that_is_no_store_at_the_start(tmp_path: Path) -> None:
    with ExitStack() as stack:
        it = House(tmp_path, stack)
        it.db.write_text("This is a text, and no database.")
        it.start()
        answer = it.ask(CHAT, [user("Hi")])
        assert (text_of(answer), answer.headers["x-kilburn-unread"]) == ("Fine.", "store-damaged")
        it.db.unlink()
        assert "x-kilburn-session" in it.ask(CHAT, [user("Hi")]).headers
        assert CANARY.encode() not in it.bytes


ODD: list[bytes] = [
    b'{"model": "m", "messages": [{"role": "king", "content": "x"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "hologram", "x": 1}, 5]}]}',
    b'{"model": "m", "messages": [{"role": "tool", "tool_call_id": "nobody", "content": "x"}]}',
    b'{"model": "m", "messages": [1, 1]}',
    b'{"model": "m", "messages": [], "n": 1.5}',
    b"[1]",
    b"{",
    b"\xff\xfe",
    b"[" * 50_000,
]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_a_shape_that_nobody_here_knows_is_the_upstreams_to_judge(house: Callable[..., House], path: str) -> None:
    it = house(form="messages" if path == MESSAGES else "chat")
    for body in ODD:
        body = body.replace(b'"messages"', b'"input"') if path == RESPONSES else body
        before = len(it.upstream.sent)
        answer = it.post(path, body)
        if "x-kilburn-unread" not in answer.headers:
            # It is read, or a name may be in it that cannot be seen.
            assert answer.status_code in (200, 400)
            continue
        assert answer.headers["x-kilburn-unread"] == "unknown-shape"
        assert [sent.raw for sent in it.upstream.sent[before:]] == [body]
    assert unread(it)["unknown-shape"] >= 3
    assert it.ask(path, [user("Hi")]).headers["x-kilburn-session"]


def test_a_window_that_is_too_small_for_what_must_stay(house: Callable[..., House]) -> None:
    it = house(window=1000)
    calls = [
        {"id": f"c{n}", "type": "function", "function": {"name": "read", "arguments": json.dumps({"path": FILLER * 9})}}
        for n in range(9)
    ]
    talk = [user("Go"), {"role": "assistant", "content": None, "tool_calls": calls}]
    talk += [{"role": "tool", "tool_call_id": f"c{n}", "content": "x"} for n in range(9)]
    assert text_of(it.ask(CHAT, talk)) == "Fine."


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "king", "content": "[p3-p6 out: 4 pages, 225 tokens]"}]},
        {"messages": [{"role": "king", "tool_call_id": "kilburn_c1", "content": "x"}]},
    ],
)
def test_what_only_the_gateway_could_read_is_never_served_unread(house: Callable[..., House], body: Json) -> None:
    it = house()
    answer = it.post(CHAT, json.dumps({"model": "m", **body}).encode())
    assert answer.status_code == 400
    assert not it.upstream.sent


def test_a_wall_that_cannot_be_checked_stays_shut(tmp_path: Path, held: Callable[[Path], subprocess.Popen[str]]) -> None:
    with ExitStack() as stack:
        it = House(tmp_path, stack)
        it.options["keys"] = str(tmp_path / "keys.json")
        keys = {who: add_key(it.options["keys"], Key(tenant=who))[1] for who in ("ana", "bob")}
        it.start()
        first = it.ask(RESPONSES, "Hi", x_api_key=keys["ana"])
        name = first.json()["id"]
        held(it.db)
        before = len(it.upstream.sent)
        for who, status in (("ana", 503), ("bob", 404)):
            body = {"model": "m", "input": "?", "previous_response_id": f"{name}-unknown"}
            assert it.post(RESPONSES, json.dumps(body).encode(), x_api_key=keys[who]).status_code == status
        assert len(it.upstream.sent) == before
        answer = it.ask(RESPONSES, [user("Hi")], x_api_key=keys["bob"])
        assert answer.headers["x-kilburn-unread"] == "store-busy"
        assert CANARY.encode() not in it.bytes


def test_what_was_forgotten_is_not_sent_on_because_it_is_unread(house: Callable[..., House]) -> None:
    it = house(Refusal(status=529))
    it.ask(CHAT, [user("My secret is 12345.")])
    [name] = it.sessions()
    with kilburn.open(str(it.db), embedder=None, tokenizer="chars/4", window=9000, policy="fifo") as store:
        store.session(name).forget("p1")
    answer = it.ask(CHAT, [user("My secret is 12345.")])
    assert answer.status_code == 400
    assert len(it.upstream.sent) == 1
    assert unread(it) == {}


# A disk that is full


FULL = ("store-full", "store-failed")


class Program:
    """`kilburn serve` with a limit on its files in place of a full disk."""

    def __init__(self, folder: Path, upstream: str, fail: str) -> None:
        self.folder = folder / CANARY
        self.folder.mkdir()
        self.db = self.folder / "a.db"
        self.served = Served(self.db, upstream, window=8000, fail=fail)
        self.bytes = b""

    def limit(self, room: int | None) -> None:
        hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        most = max(file.stat().st_size for file in self.folder.iterdir() if file.name.startswith("a.db"))
        resource.prlimit(self.served.process.pid, resource.RLIMIT_FSIZE, (hard if room is None else most + room, hard))

    def ask(self, talk: Any, *, path: str = CHAT, stream: bool = False) -> httpx2.Response:
        body = {"model": "m", "messages": talk, "stream": stream, "max_tokens": 99}
        answer = httpx2.post(self.served.url + path, json=body, timeout=600)
        self.bytes += str(answer.headers).encode() + answer.content
        return answer

    def health(self) -> httpx2.Response:
        answer = httpx2.get(f"{self.served.url}/health", timeout=600)
        self.bytes += answer.content
        return answer


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    with ExitStack() as stack:

        def start(upstream: Upstream, fail: str = "open") -> Program:
            made = Program(tmp_path, stack.enter_context(serving(upstream)), fail)
            stack.callback(made.served.stop)
            return made

        yield start


@pytest.mark.parametrize(("fail", "stream"), [("open", False), ("closed", True)])
def test_a_full_disk_before_the_upstream_is_asked(program: Callable[..., Program], fail: str, stream: bool) -> None:
    it = program(Upstream(otherwise="Fine."), fail)
    talk = [user(f"q0 {FILLER}")]
    first = it.ask(talk)
    name, talk = first.headers["x-kilburn-session"], [*talk, said(text_of(first)), user("q1 " + os.urandom(40_000).hex())]
    it.limit(2_000)
    answer = it.ask(talk, stream=stream)
    health = it.health()
    if fail == "closed":
        assert (answer.status_code, health.status_code, health.json()["status"]) == (503, 503, "failing")
    else:
        # What stands in for a full disk is an error of the disk to SQLite.
        assert (answer.headers["x-kilburn-unread"] in FULL, text_of(answer)) == (True, "Fine.")
        assert (health.status_code, health.json()["status"]) == (200, "unread")
        assert health.json()["problem"] in ("StoreFull", "StoreError")
        talk += [said("Fine."), user("q2")]
    it.limit(None)
    answer = it.ask(talk, stream=stream)
    assert text_of(answer) == "Fine."
    assert answer.headers["x-kilburn-session"] == name
    assert until(lambda: it.health().status_code == 200 and it.health().json()["status"] == "ok")
    assert CANARY.encode() not in it.bytes
    log = it.db.with_suffix(".log").read_text()
    assert ('"unread":"store-f' in log) is (fail == "open")


@pytest.mark.parametrize(("path", "stream"), [(CHAT, True), (MESSAGES, False)])
def test_a_disk_that_is_full_when_the_answer_comes(program: Callable[..., Program], path: str, stream: bool) -> None:
    long = "And so on: " + os.urandom(60_000).hex()

    def reply(sent: Any) -> Any:
        if b"fill" in sent.raw and not full:
            full.append(1)
            it.limit(2_000)
            return long
        return "Fine."

    full: list[int] = []
    it = program(Upstream(otherwise=reply, piece=4000))
    talk = [user("fill")]
    answer = it.ask(talk, path=path, stream=stream)
    if stream:
        assert answer.status_code == 200
        assert "event: error" not in answer.text
        assert ("[DONE]" if path == CHAT else "message_stop") in answer.text
    else:
        assert answer.headers["x-kilburn-unread"] in FULL
    name = answer.headers["x-kilburn-session"]
    assert until(lambda: it.health().json().get("problem")) in ("StoreFull", "StoreError")
    it.limit(None)
    whole = said(long)
    again = it.ask([*talk, whole, user("And?")], path=path)
    assert again.headers["x-kilburn-session"] == name
    assert "x-kilburn-unread" not in again.headers
    assert CANARY.encode() not in it.bytes


def test_the_room_on_the_disk_is_asked_for(tmp_path: Path) -> None:
    trouble = Trouble(str(tmp_path / "a.db"), "default")
    with kilburn.open(str(tmp_path / "a.db"), window=1000, policy="fifo", tokenizer="chars/4", embedder=None):
        trouble.check()
        before = (tmp_path / "a.db-wal").stat().st_size
        for _ in range(50):
            trouble.check()
        assert (tmp_path / "a.db-wal").stat().st_size == before, "nothing is written for a health check"
        trouble.close()
    # A file system without any room.
    full = Trouble("/proc/a.db", "default")
    assert os.statvfs("/proc").f_bavail < FREE
    with pytest.raises(StoreFull):
        full.check()


def test_no_such_way_to_fail() -> None:
    with pytest.raises(SpecError, match="fail 'half'"):
        build(Settings(upstream="http://127.0.0.1:9", fail="half"))


# What clients are told


def test_no_error_names_a_file_of_the_machine_or_a_session_of_somebody_else(
    tmp_path: Path, held: Callable[[Path], subprocess.Popen[str]]
) -> None:
    names = ["session-canary-of-ana", "session-canary-of-carol"]
    with ExitStack() as stack:
        recalls = calling(
            *[("recall", {"address": f"{name} p1"}) for name in (*names, NOBODY)],
            *[("search_memory", {"query": "locker", "session": name, "tokens": 30}) for name in (*names, NOBODY)],
            ("recall", {"address": "p999"}),
            ("search_memory", {"query": "canary locker", "tokens": 30}),
        )
        it = House(tmp_path, stack, fail="closed", window=1000)
        it.options["keys"] = str(it.folder / "keys.json")
        keys = {who: add_key(it.options["keys"], Key(tenant="app", user=who))[1] for who in ("ana", "bob")}
        keys["app"] = add_key(it.options["keys"], Key(tenant="app"))[1]
        keys["far"] = add_key(it.options["keys"], Key(tenant="far"))[1]
        it.start()
        long = [each for n in range(9) for each in (user(f"{n} the locker {FILLER}"), said("Noted."))]
        assert it.ask(CHAT, [*long, user("?")], x_api_key=keys["ana"], x_kilburn_session=names[0]).status_code == 200
        carol = {"x_api_key": keys["app"], "x_kilburn_user": "carol"}
        assert it.ask(CHAT, [*long, user("?")], x_kilburn_session=names[1], **carol).status_code == 200
        it.bytes = b""
        since = len(it.upstream.sent)
        others = [{"x_api_key": keys["bob"]}, {"x_api_key": keys["app"], "x_kilburn_user": "bob"}, {"x_api_key": keys["far"]}]

        def provoke(*replies: Any) -> None:
            """With replies of the provider, where a request reaches it at all."""
            for who in others:
                for path in (CHAT, MESSAGES, RESPONSES):
                    for body in ODD:
                        it.post(path, body, **who)
                    for stream in (False, True):
                        it.ask(path, [user("Hi")], stream=stream, **who)
                        it.ask(path, [user("Hi")], stream=stream, x_kilburn_session="@memory", **who)
                        it.ask(path, [user("Hi")], stream=stream, x_kilburn_session="\x07" if stream else "x" * 300, **who)
                        it.upstream.enqueue(*replies[:1])
                        it.ask(path, [*long, user("What of the locker?")], stream=stream, **who)
                        it.upstream.enqueue(*replies[1:])
                        it.ask(path, [*long, user("cut")], **who)
                for path in (
                    "/health",
                    "/metrics",
                    "/sessions",
                    "/v1/files",
                    "/v1/files/file-12345678",
                    "/v1/models",
                    "/nothing",
                ):
                    it.get(path, **who)
                it.get("/sessions", **{**who, "x_kilburn_user": "bob"})

        provoke(recalls, Break(how="cut", after=2))
        sent = b"".join(each.raw for each in it.upstream.sent[since:])
        bodies = [each.body for each in it.upstream.sent[since:]]
        holder = held(it.db)
        for who in others:
            it.ask(CHAT, [user("Hi")], **who)
        it.get("/health")
        holder.kill()
        holder.wait(600)
        kept = Path(it.options["keys"])
        whole = kept.read_bytes()
        kept.write_bytes(b"{")
        assert it.get("/v1/models", x_api_key=keys["bob"]).status_code == 503
        kept.write_bytes(whole)
        for name in os.listdir(it.folder):
            if name.startswith("a.db") and not name.endswith("-shm"):
                with (it.folder / name).open("r+b") as file:
                    file.write(os.urandom(os.path.getsize(file.name)))
        provoke()
        for found in (it.bytes, sent):
            for word in (CANARY, str(tmp_path), os.getcwd(), sys.prefix, "/site-packages", "a.db"):
                assert word.encode() not in found, word
        for name in (*names, "carol"):
            assert name.encode() not in it.bytes
        # The client's model may ask for any name. It is told the same of another user's as of one that nobody has.
        talks = [[each for each in body.get("messages", ()) if isinstance(each, dict)] for body in bodies]
        told = [[each["content"] for each in talk if each["role"] == "tool"] for talk in talks]
        groups = [group for group in told if len(group) == 8]
        assert groups, told
        for group in groups:
            for kind in (group[:3], group[3:6]):
                plain = {text.replace(name, "NAME") for text, name in zip(kind, (*names, NOBODY), strict=True)}
                assert len(plain) == 1, plain


def test_an_end_user_sees_its_own_sessions_alone(tmp_path: Path) -> None:
    with ExitStack() as stack:
        it = House(tmp_path, stack)
        it.options["keys"] = str(tmp_path / "keys.json")
        keys = {who: add_key(it.options["keys"], Key(tenant="app", user=who))[1] for who in ("ana", "bob")}
        keys["app"] = add_key(it.options["keys"], Key(tenant="app"))[1]
        keys["figures"] = add_key(it.options["keys"], Key(figures=True))[1]
        it.start()
        who: dict[str, Json] = {
            "ana": {"x_api_key": keys["ana"]},
            "bob": {"x_api_key": keys["bob"]},
            "ana/x": {"x_api_key": keys["ana"], "x_kilburn_user": "x"},
            "x": {"x_api_key": keys["app"], "x_kilburn_user": "x"},
            "y": {"x_api_key": keys["app"], "x_kilburn_user": "y"},
            "app": {"x_api_key": keys["app"]},
        }
        for name, headers in who.items():
            assert it.ask(CHAT, [user("Hi")], x_kilburn_session=f"of-{name}", **headers).status_code == 200
        it.bytes = b""

        def seen(**headers: str) -> set[str]:
            return {row["session"][3:] for row in it.get("/sessions", **headers).json()["sessions"]}

        assert {name: seen(**headers) for name, headers in who.items()} == {
            "ana": {"ana", "ana/x"},
            "bob": {"bob"},
            "ana/x": {"ana/x"},
            "x": {"x"},
            "y": {"y"},
            "app": {"app", "x", "y"},
        }
        assert seen(x_api_key=keys["figures"]) == set(who)

"""Who comes in over a real server: Host, Origin, keys, sizes, slowness; and who is told what."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx2
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import rounds
from kilburn.gateway.access import Access
from kilburn.gateway.exchange import Exchange
from kilburn.gateway.keys import Key, add_key, revoke_key
from kilburn.gateway.keys import Keys as KeysOf
from kilburn.gateway.limits import RequestBounds
from waiting import until

CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"


class Mirror:
    """An application that answers with what reached it, and remembers the headers."""

    def __init__(self) -> None:
        self.headers: list[tuple[bytes, bytes]] = []
        self.calls = 0
        self.wait: threading.Event | None = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            while True:
                kind = (await receive())["type"]
                await send({"type": f"{kind}.complete"})
                if kind == "lifespan.shutdown":
                    return
        self.calls += 1
        self.headers = scope["headers"]
        message = await receive()
        if scope["path"] == "/fail":
            raise ValueError("canary-in-an-error")
        await send({"type": "http.response.start", "status": 200, "headers": []})
        if scope["path"] == "/flood":
            left = asyncio.ensure_future(receive())
            while not left.done():
                await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
                await asyncio.sleep(0)
        if scope["path"] == "/break":
            raise ValueError("canary-in-an-error")
        if scope["path"] == "/wait":
            await send({"type": "http.response.body", "body": b"begun", "more_body": True})
            left = asyncio.ensure_future(receive())
            while not left.done() and self.wait is not None and not self.wait.is_set():
                await asyncio.sleep(0.01)
            left.cancel()
        key = scope["state"].get("key")
        said = {"tenant": key.tenant if key else None, "bytes": len(message["body"]), "more": message["more_body"]}
        await send({"type": "http.response.body", "body": json.dumps(said).encode(), "more_body": False})


class Door:
    """A served Access with what it observed."""

    def __init__(self, serving: Callable[..., int], folder: Path, *, keyed: bool = True, **options: Any) -> None:
        self.seen: list[Exchange] = []
        self.mirror = Mirror()
        self.file = folder / "keys.json"
        self.ana = add_key(self.file, Key(tenant="acme", user="ana"))
        self.ben = add_key(self.file, Key(tenant="bricks"))
        limits = options.pop("limits", RequestBounds())
        keys = KeysOf(self.file) if keyed else None
        self.access = Access(self.mirror, keys=keys, limits=limits, observe=self.seen.append, **options)
        self.port = serving(self.access, limits)
        self.http = httpx2.Client(base_url=f"http://127.0.0.1:{self.port}", timeout=600)
        self.bearer = {"authorization": f"Bearer {self.ana[1]}"}

    def post(self, path: str = CHAT, headers: Any = None, **given: Any) -> httpx2.Response:
        return self.http.post(path, headers=self.bearer if headers is None else headers, **given)

    def head(self, path: str, length: int) -> bytes:
        lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"X-Api-Key: {self.ana[1]}", f"Content-Length: {length}"]
        return "\r\n".join([*lines, "", ""]).encode()

    def raw(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=600)


@pytest.fixture
def door(serving: Callable[..., int], tmp_path: Path) -> Iterator[Callable[..., Door]]:
    made: list[Door] = []

    def build(**options: Any) -> Door:
        made.append(Door(serving, tmp_path, **options))
        return made[-1]

    yield build
    for each in made:
        each.http.close()


def rest_of(made: socket.socket) -> bytes:
    """All that comes until the other side closes."""
    found = b""
    while True:
        try:
            piece = made.recv(65_536)
        except ConnectionError:
            return found
        if not piece:
            return found
        found += piece


def test_a_key_comes_in_by_either_header_and_goes_no_further(door: Callable[..., Door]) -> None:
    it = door()
    for headers in (
        {"authorization": f"Bearer {it.ana[1]}"},
        {"authorization": f"bearer  {it.ana[1]}"},
        {"x-api-key": it.ana[1]},
    ):
        answer = it.post(headers=headers, content=b"{}")
        assert answer.json() == {"tenant": "acme", "bytes": 2, "more": False}
        assert not [value for _, value in it.mirror.headers if b"kilburn-" in value]
    both = {"authorization": "Bearer sk-mine", "x-api-key": it.ben[1]}
    assert it.post(headers=both).json()["tenant"] == "bricks"
    assert (b"authorization", b"Bearer sk-mine") in it.mirror.headers


def test_without_a_valid_key_nothing_is_reached(door: Callable[..., Door]) -> None:
    it = door()
    name, secret = it.ana[0].name, it.ana[1]
    wrong = secret[:-1] + ("A" if secret[-1] != "A" else "B")
    refused = [{}, {"authorization": "Bearer sk-1"}, {"authorization": f"Basic {secret}"}, {"x-api-key": wrong}]
    for headers in refused:
        for path in (
            CHAT,
            MESSAGES,
            "/v1/models",
            "/metrics",
            "/",
            "/health/",
            "/Health",
            "//health",
            "/%68ealth/x",
            "/x/../health/",
        ):
            answer = it.post(path, headers=headers)
            assert answer.status_code == 401, (path, headers)
            assert answer.headers["www-authenticate"] == "Bearer"
            assert wrong not in answer.text
    revoke_key(it.file, name)
    assert it.post().status_code == 401
    assert [exchange.key for exchange in it.seen if exchange.status == 401] == [None] * len(
        [e for e in it.seen if e.status == 401]
    )
    clash = {"authorization": f"Bearer {secret}", "x-api-key": it.ben[1]}
    assert it.post(headers=clash).status_code == 400


def test_a_keys_file_that_breaks_shuts_the_door_until_it_is_mended(door: Callable[..., Door]) -> None:
    it = door()
    whole = it.file.read_bytes()
    it.file.write_bytes(b"{")
    answer = it.post()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "keys_unreadable"
    assert str(it.file) not in answer.text
    it.file.write_bytes(whole)
    assert it.post().status_code == 200


FALSE_HOSTS = (
    *("evil.example", "127.0.0.1.evil.example", "localhost@evil.example", "127.0.0.1:80/x?"),
    *("[::1", "", "0.0.0.0", "xn--localhost"),
)


@pytest.mark.parametrize("keyed", [True, False])
def test_a_host_header_that_lies_is_refused(door: Callable[..., Door], keyed: bool) -> None:
    it = door(keyed=keyed)
    for host in FALSE_HOSTS:
        for path in (CHAT, "/health"):
            answer = it.post(path, headers={**it.bearer, "host": host})
            assert answer.status_code in (400, 421), (host, answer.text)
    assert it.mirror.calls == 0


def test_the_machines_own_names_are_hosts(door: Callable[..., Door]) -> None:
    it = door(keyed=False)
    for host in (f"127.0.0.1:{it.port}", "localhost", "LOCALHOST:8000", "[::1]:8000", "[::1]"):
        assert it.post(headers={"host": host}).status_code == 200


def test_two_host_headers_and_a_target_with_another_host(door: Callable[..., Door]) -> None:
    it = door(keyed=False)
    for request in (
        b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n",
        b"GET /v1/models HTTP/1.1\r\n\r\n",
        b"GET /v1/models HTTP/1.0\r\n\r\n",
    ):
        with it.raw() as made:
            made.sendall(request)
            assert rest_of(made).startswith(b"HTTP/1.1 400")
    assert it.mirror.calls == 0


def test_a_page_in_a_browser_does_not_come_in(door: Callable[..., Door]) -> None:
    it = door(keyed=False)
    for origin in ("https://evil.example", "null", f"http://127.0.0.1:{it.port}", "http://localhost"):
        answer = it.post(headers={"origin": origin, "content-type": "text/plain"}, content=b"{}")
        assert answer.status_code == 403
        assert "access-control-allow-origin" not in answer.headers
    assert it.http.options(CHAT, headers={"origin": "https://evil.example"}).status_code == 403
    assert it.mirror.calls == 0


def test_a_page_that_is_allowed_still_needs_a_key(door: Callable[..., Door]) -> None:
    it = door(origins=["https://app.example"])
    asking = {
        "origin": "https://app.example",
        "access-control-request-method": "POST",
        "access-control-request-headers": "x-api-key",
    }
    asked = it.http.options(CHAT, headers=asking)
    assert asked.status_code == 200
    assert asked.headers["access-control-allow-origin"] == "https://app.example"
    assert it.mirror.calls == 0
    assert it.post(headers={"origin": "https://app.example"}).status_code == 401
    assert it.post(headers={"origin": "https://app.example", **it.bearer}).status_code == 200
    assert it.post(headers={"origin": "https://other.example", **it.bearer}).status_code == 403


def test_an_error_has_the_form_of_its_provider(door: Callable[..., Door]) -> None:
    it = door()
    said = it.post(headers={}).json()
    assert set(said) == {"error"}
    assert set(said["error"]) == {"message", "type", "param", "code"}
    assert said["error"]["code"] == "invalid_api_key"
    for path in (MESSAGES, f"{MESSAGES}/count_tokens"):
        said = it.post(path, headers={}).json()
        assert said["type"] == "error"
        assert said["error"]["type"] == "authentication_error"
        assert said["request_id"].startswith("req_")


def test_the_official_clients_understand_the_refusals(door: Callable[..., Door]) -> None:
    import anthropic
    import openai

    it = door(limits=RequestBounds(body=10_000))
    hello: Any = [{"role": "user", "content": "hello"}]
    large: Any = [{"role": "user", "content": "x" * 3_000_000}]
    with openai.OpenAI(base_url=f"{it.http.base_url}/v1", api_key="wrong", max_retries=0) as client:
        with pytest.raises(openai.AuthenticationError, match=r"unknown here|needs a key"):
            client.chat.completions.create(model="m", messages=hello)
        client.api_key = it.ana[1]
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model="m", messages=large)
        assert caught.value.status_code == 413
    with anthropic.Anthropic(base_url=str(it.http.base_url), api_key="wrong", max_retries=0) as other:
        with pytest.raises(anthropic.AuthenticationError):
            other.messages.create(model="m", max_tokens=5, messages=hello)
        other.api_key = it.ana[1]
        with pytest.raises(anthropic.RequestTooLargeError):
            other.messages.create(model="m", max_tokens=5, messages=large)


def test_a_body_of_100_mb_is_refused_early_and_memory_stays_flat(door: Callable[..., Door]) -> None:
    it = door(limits=RequestBounds(body=1_000_000))
    me = psutil.Process()
    chunk = b"x" * 1_000_000
    highest = before = me.memory_info().rss

    def pieces() -> Iterator[bytes]:
        nonlocal highest
        for _ in range(100):
            highest = max(highest, me.memory_info().rss)
            yield chunk

    for headers in ({**it.bearer, "content-length": "100000000"}, it.bearer):
        answer = it.post(headers=headers, content=pieces())
        assert answer.status_code == 413
        assert answer.headers["connection"] == "close"
    assert highest - before < 20_000_000
    assert it.mirror.calls == 0
    with it.raw() as made:
        made.sendall(
            b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999\r\nX-Api-Key: " + it.ana[1].encode() + b"\r\n\r\n"
        )
        # No byte of the body was ever sent.
        assert made.recv(100).startswith(b"HTTP/1.1 413")


def test_a_body_is_not_read_before_the_key(door: Callable[..., Door]) -> None:
    it = door()
    with it.raw() as made:
        made.sendall(b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n")
        assert made.recv(100).startswith(b"HTTP/1.1 401")
    with it.raw() as made:
        made.sendall(b"POST /health HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5000\r\n\r\n{")
        time.sleep(0.2)
    assert it.access._held == 0


def test_many_large_bodies_together_are_bounded(door: Callable[..., Door]) -> None:
    it = door(limits=RequestBounds(bodies=300_000))
    it.mirror.wait = threading.Event()
    with it.http.stream("POST", "/wait", headers=it.bearer, content=b"x" * 200_000) as first:
        pieces = first.iter_raw()
        assert next(pieces) == b"begun"
        assert it.post(content=b"x" * 200_000).status_code == 503
        assert it.post(content=b"x" * 50_000).status_code == 200
        it.mirror.wait.set()
    until(lambda: it.access._held == 0)
    assert it.post(content=b"x" * 200_000).status_code == 200
    until(lambda: it.access._held == 0)


def test_too_many_headers(door: Callable[..., Door]) -> None:
    it = door()
    for headers in ({f"x-{number}": "1" for number in range(150)}, {"x-long": "y" * 33_000}):
        assert it.post(headers={**it.bearer, **headers}).status_code == 431
    with it.raw() as made:
        made.sendall(b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Endless: ")
        for _ in range(100):
            try:
                made.sendall(b"y" * 10_000)
            except ConnectionError:
                break
            time.sleep(0.002)
        assert b"HTTP/1.1 200" not in rest_of(made)
    assert it.mirror.calls == 0
    assert it.post().status_code == 200


ENDLESS = {
    "the address": b"GET /",
    "the name of a header": b"POST / HTTP/1.1\r\nHost: localhost\r\nX-",
    "what describes a piece": b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5;x=",
    "a header behind the body": (
        b"POST / HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\nX-Endless: "
    ),
}


@pytest.mark.parametrize("case", ENDLESS)
def test_what_never_ends_is_not_held(door: Callable[..., Door], case: str) -> None:
    it = door(keyed=False)
    with it.raw() as made:
        sent = 0
        try:
            made.sendall(ENDLESS[case])
            while sent < 50_000_000:
                made.sendall(b"y" * 10_000)
                sent += 10_000
        except ConnectionError:
            pass
        assert sent < 50_000_000
    assert it.mirror.calls == 0
    assert it.post().status_code == 200


def test_a_header_behind_the_body_says_nothing(door: Callable[..., Door]) -> None:
    it = door(keyed=False)
    with it.raw() as made:
        head = b"POST /v1/x HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        made.sendall(head + b"5\r\nhello\r\n0\r\nX-Api-Key: kilburn-x\r\n\r\n")
        assert b'"bytes": 5' in rest_of(made)
    assert b"x-api-key" not in dict(it.mirror.headers)


@pytest.mark.parametrize(("asked", "answered"), [(10, 10), (5_000, 1)])
def test_requests_that_come_before_the_answers_are_few(door: Callable[..., Door], asked: int, answered: int) -> None:
    it = door(keyed=False)
    with it.raw() as made:
        with suppress(ConnectionError):
            made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n" * (asked - 1))
            made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        told = rest_of(made)
    assert told.count(b"HTTP/1.1 200") <= answered
    assert (told.count(b"HTTP/1.1 200") == answered) == (asked == answered)


def test_a_compressed_body_is_refused(door: Callable[..., Door]) -> None:
    it = door()
    assert it.post(headers={**it.bearer, "content-encoding": "gzip"}, content=b"\x1f\x8b").status_code == 415


def test_headers_that_never_end_are_cut(door: Callable[..., Door]) -> None:
    it = door(limits=RequestBounds(patience=2.0))
    with it.raw() as silent, it.raw() as slow:
        try:
            for letter in b"POST / HTTP/1.1\r\nHost: localhost\r\nX-Slow: ":
                slow.sendall(bytes([letter]))
                time.sleep(0.06)
        except ConnectionError:
            pass
        assert rest_of(slow) == b""
        assert rest_of(silent) == b""


def test_a_second_request_whose_headers_never_end_is_cut(door: Callable[..., Door]) -> None:
    it = door(limits=RequestBounds(patience=2.0))
    with it.raw() as made:
        made.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert made.recv(1000).startswith(b"HTTP/1.1 200")
        made.sendall(b"GET /health HT")
        assert rest_of(made).count(b"HTTP/1.1") <= 1


def test_a_body_that_drips_is_refused_while_a_slow_honest_one_comes_in(door: Callable[..., Door]) -> None:
    def head(it: Door) -> bytes:
        key = it.ana[1].encode()
        return b"POST /v1/messages HTTP/1.1\r\nHost: localhost\r\nX-Api-Key: " + key + b"\r\nContent-Length: 20000\r\n\r\n"

    it = door(limits=RequestBounds(patience=2.0, pace=10_000.0))
    with it.raw() as made:
        made.sendall(head(it))
        said = b""
        # It is told before the body is whole.
        for _ in range(19_999):
            made.sendall(b"x")
            made.settimeout(0.05)
            with suppress(TimeoutError):
                said = made.recv(1000)
                break
        assert said.startswith(b"HTTP/1.1 408")
    # Each piece is worth minutes here, so what the machine does meanwhile does not matter.
    it = door(limits=RequestBounds(patience=2.0, pace=10.0))
    with it.raw() as made:
        made.sendall(head(it) + b"x" * 10_000)
        time.sleep(2.2)
        made.sendall(b"x" * 10_000)
        assert made.recv(1000).startswith(b"HTTP/1.1 200")


def test_a_client_that_does_not_read_is_cut(door: Callable[..., Door]) -> None:
    it = door(limits=RequestBounds(patience=2.0))
    with it.raw() as made:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        made.sendall(it.head("/flood", 0))
        until(lambda: it.seen)
    it = door(limits=RequestBounds(patience=600))
    with it.http.stream("GET", "/flood", headers=it.bearer) as reading:
        pieces = reading.iter_raw()
        assert sum(len(next(pieces)) for _ in range(200)) > 0


def test_half_closed_sockets_leave_nothing_behind(door: Callable[..., Door]) -> None:
    it = door()
    it.mirror.wait = threading.Event()
    head = it.head("/wait", 10)
    for sent in (head, head + b"0123", head + b"0123456789"):
        with it.raw() as made:
            made.sendall(sent)
            time.sleep(0.05)
            made.shutdown(socket.SHUT_WR)
            rest_of(made)
    until(lambda: len(it.seen) == 3)
    assert [exchange.status for exchange in it.seen[:2]] == [499, 499]
    assert it.access._held == 0
    assert not it.access._running


def test_one_key_may_not_take_all_places(door: Callable[..., Door]) -> None:
    it = door(limits=RequestBounds(per_key=2, running=3))
    it.mirror.wait = threading.Event()
    streams = [it.http.stream("POST", "/wait", headers=it.bearer) for _ in range(2)]
    # A reply is closed when nobody holds what iterates over it.
    opened = [stream.__enter__().iter_raw() for stream in streams]
    assert [next(pieces) for pieces in opened] == [b"begun"] * 2
    full = it.post()
    assert full.status_code == 429
    assert full.headers["retry-after"] == "1"
    ben = {"x-api-key": it.ben[1]}
    with it.http.stream("POST", "/wait", headers=ben) as third:
        last = third.iter_raw()
        assert next(last) == b"begun"
        assert it.post(MESSAGES, headers=ben).json()["error"]["type"] == "overloaded_error"
        assert it.http.get("/health").status_code == 200
    it.mirror.wait.set()
    for stream in streams:
        stream.__exit__(None, None, None)
    until(lambda: not it.access._running)
    assert it.post().status_code == 200


def test_a_rate_is_of_one_key(door: Callable[..., Door]) -> None:
    # The next request is allowed a minute later.
    it = door(limits=RequestBounds(rate=1))
    assert [it.post().status_code for _ in range(2)] == [200, 429]
    refused = it.post()
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert 1 <= int(refused.headers["retry-after"]) <= 60
    assert it.post(headers={"x-api-key": it.ben[1]}).status_code == 200


def test_an_error_inside_tells_the_client_nothing_and_the_log_where(door: Callable[..., Door]) -> None:
    it = door()
    for path, form in (("/fail", "server_error"), ("/break", "")):
        try:
            answer = it.http.post(path, headers=it.bearer)
            assert (answer.status_code, answer.json()["error"]["type"]) == (500, form)
            assert "canary" not in answer.text
        except httpx2.RemoteProtocolError:
            assert path == "/break"
    assert all("test_access.py" in exchange.trace and "canary" not in exchange.trace for exchange in it.seen)
    assert [exchange.problem for exchange in it.seen] == ["internal_error"] * 2


def test_what_is_no_http_gets_400(door: Callable[..., Door]) -> None:
    it = door()
    for rubbish in (
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"GET\r\n\r\n",
        b"\x00" * 100 + b"\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -1\r\n\r\n",
    ):
        with it.raw() as made:
            made.sendall(rubbish)
            made.shutdown(socket.SHUT_WR)
            assert b"HTTP/1.1 200" not in rest_of(made)
    assert it.mirror.calls == 0
    assert it.post().status_code == 200


UNCLEAR = {
    "both": b"Content-Length: 4\r\nTransfer-Encoding: chunked",
    "both, the other way round": b"Transfer-Encoding: chunked\r\nContent-Length: 4",
    "both, and no body": b"Content-Length: 0\r\nTransfer-Encoding: chunked",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 4",
    "a list of two lengths": b"Content-Length: 5, 4",
    "a negative length": b"Content-Length: -1",
    "a length with a sign": b"Content-Length: +5",
    "a length twice": b"Content-Length: 5\r\nContent-Length: 5",
    "a length twice in a line": b"Content-Length: 5, 5",
    "a length in another base": b"Content-Length: 0x5",
    "a length with a line": b"Content-Length: 1_0",
    "no length": b"Content-Length: ",
    "an endless length": b"Content-Length: " + b"9" * 30,
    "a blank before the colon": b"Content-Length : 5",
    "two codings": b"Transfer-Encoding: gzip, chunked",
    "a coding twice": b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked",
    "no coding": b"Transfer-Encoding: identity",
    "almost a coding": b"Transfer-Encoding: xchunked\r\nContent-Length: 5",
    "a coding with a strange blank": b"Transfer-Encoding: \x0bchunked\r\nContent-Length: 5",
    "a break of line in a header": b"X-A: a\rContent-Length: 4\r\nContent-Length: 5",
}


@pytest.mark.parametrize("line", [b"POST /v1/x HTTP/1.1", b"GET /health HTTP/1.1", b"OPTIONS /v1/x HTTP/1.1"])
def test_where_a_request_ends_is_said_once(door: Callable[..., Door], line: bytes) -> None:
    it = door(keyed=False, origins=("http://a.example",))
    more = b"Host: localhost\r\nOrigin: http://a.example\r\nAccess-Control-Request-Method: POST\r\n"
    for case, headers in UNCLEAR.items():
        request = line + b"\r\n" + more + headers + b"\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
        with it.raw() as made:
            made.sendall(request + b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
            answers = rest_of(made)
        # The connection is closed: what follows is not read as another request.
        assert (answers[:13], answers.count(b"HTTP/1.1 ")) == (b"HTTP/1.1 400 ", 1), case
    assert it.mirror.calls == 0


def test_a_coding_in_the_old_protocol_is_refused(door: Callable[..., Door]) -> None:
    it = door(keyed=False)
    head = b"POST /v1/x HTTP/1.0\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nhello\r\n0\r\n\r\n"
    with it.raw() as made:
        made.sendall(head)
        assert rest_of(made).startswith(b"HTTP/1.1 400 ")
    assert it.mirror.calls == 0


async def call(access: Access, headers: list[tuple[bytes, bytes]], path: str, pieces: list[bytes]) -> tuple[int, bytes]:
    """One request, without a server."""
    messages = [{"type": "http.request", "body": piece, "more_body": at + 1 < len(pieces)} for at, piece in enumerate(pieces)]
    sent: list[Any] = []

    async def receive() -> Any:
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "method": "POST", "path": path, "headers": headers, "client": ("127.0.0.1", 1), "state": {}}
    await access(scope, receive, send)
    if not sent:
        return 0, b""
    return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])


names = st.sampled_from([b"host", b"origin", b"authorization", b"x-api-key", b"content-length", b"content-encoding", b"x-other"])
values = st.one_of(
    st.binary(max_size=60), st.sampled_from([b"localhost", b"Bearer kilburn-", b"kilburn-12345678-" + b"A" * 43, b"5", b"0"])
)


@settings(max_examples=rounds(60, 300))
@given(
    headers=st.lists(st.tuples(names, values), max_size=8),
    path=st.one_of(st.sampled_from([CHAT, MESSAGES, "/metrics", "/sessions"]), st.text(max_size=20)),
    pieces=st.lists(st.binary(max_size=50), min_size=1, max_size=4),
)
def test_no_headers_bring_anyone_in_without_a_key(
    tmp_path_factory: pytest.TempPathFactory, headers: list[tuple[bytes, bytes]], path: str, pieces: list[bytes]
) -> None:
    file = tmp_path_factory.getbasetemp() / "fuzz.json"
    if not file.exists():
        add_key(file, Key())
    mirror = Mirror()
    access = Access(mirror, keys=KeysOf(file), limits=RequestBounds(body=100))
    status, body = asyncio.run(call(access, headers, path, pieces))
    assert mirror.calls == 0 or path == "/health"
    assert path == "/health" or 400 <= status < 500
    assert path == "/health" or json.loads(body)
    assert access._held == 0
    assert not access._running


async def test_a_refused_body_that_came_whole_is_not_waited_for() -> None:
    access = Access(Mirror(), limits=RequestBounds(depth=2))
    pieces: list[Any] = [{"type": "http.request", "body": b'{"x":[[[1]]]}', "more_body": False}]
    sent: list[Any] = []

    async def receive() -> Any:
        return pieces.pop()  # an error, if it is asked for more

    async def send(message: Any) -> None:
        sent.append(message)

    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": CHAT, "headers": [(b"host", b"localhost")]}
    await access(scope, receive, send)
    assert sent[0]["status"] == 400
    assert not sent[-1]["more_body"]

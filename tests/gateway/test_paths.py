"""Every path of a provider goes through: as it was sent, to that provider alone, and nobody gets what another one keeps there."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest

import kilburn
from kilburn.errors import StoreError
from kilburn.gateway.app import Settings, build
from kilburn.gateway.connection import uvicorn_options
from kilburn.gateway.kept import Kept
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.limits import RequestBounds
from kilburn.gateway.problems import Problem
from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import serving
from waiting import until

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
CHUNK = b"\x00\xff\r\n--b" * 150_000


class Asked:
    """One request as the provider got it."""

    def __init__(self, scope: Any) -> None:
        self.method, self.raw = scope["method"], scope["raw_path"].decode()
        self.query = scope["query_string"].decode()
        self.headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        self.size, self.digest, self.gone = 0, hashlib.sha256(), threading.Event()
        self.body = b""


class Provider:
    """Keeps things under ids, as a provider does, and answers with whatever `say` says."""

    def __init__(self) -> None:
        self.asked: list[Asked] = []
        self.say: Callable[[Asked], tuple[int, dict[str, str], bytes] | None] = lambda asked: None
        self.early = False
        self._made = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        asked = Asked(scope)
        self.asked.append(asked)
        more = not self.early
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                asked.gone.set()
                return
            piece, more = message.get("body", b""), message.get("more_body", False)
            asked.digest.update(piece)
            asked.size += len(piece)
            asked.body += piece if asked.size < 1_000_000 else b""
        status, headers, body = self.say(asked) or self._kept(asked)
        listed = [(name.encode(), value.encode()) for name, value in headers.items()]
        await send({"type": "http.response.start", "status": status, "headers": listed})
        await send({"type": "http.response.body", "body": body})

    def _kept(self, asked: Asked) -> tuple[int, dict[str, str], bytes]:
        kind = asked.raw.split("/")[2]
        if asked.method == "POST" and asked.raw.count("/") == 2:
            self._made += 1
            said: Any = {"id": f"{kind}-{self._made:08d}", "object": kind, "metadata": {}}
            if kind == "chat":
                said = {}
        elif kind == "batches":
            said = {"id": asked.raw.split("/")[3], "output_file_id": f"file-out-{asked.raw[-4:]}"}
        else:
            said = {"object": "list", "data": [{"id": "file-00000001", "filename": "canary"}]}
        return 200, {"content-type": "application/json"}, json.dumps(said).encode()


class House:
    """A gateway with keys for two tenants, and a client for each."""

    def __init__(self, folder: Path, stack: ExitStack, **options: Any) -> None:
        self.provider = Provider()
        self.far = stack.enter_context(serving(self.provider))
        self.file, self.db = folder / "keys.json", folder / "house.db"
        keyed = options.pop("keyed", False)
        named = options.pop("variable", "UPSTREAM_KEY")
        self.keys = {who: add_key(self.file, Key(tenant=who, upstream=named))[1] for who in ("ana", "bob") if keyed}
        given = {"db": str(self.db), "upstream": f"{self.far}/v1", "tokenizer": "chars/4", "embedder": None}
        self.options = {**given, "keys": str(self.file) if keyed else None, **options}
        self._stack = stack
        self.http = stack.enter_context(httpx2.Client(timeout=600, trust_env=False))
        self.start()

    def start(self) -> None:
        self._running = ExitStack()
        self._stack.push(self._running)
        serves = serving(build(Settings(**self.options)), **uvicorn_options(RequestBounds()))
        self.url = self._running.enter_context(serves)

    def again(self) -> None:
        self._running.close()
        self.start()

    def ask(self, method: str, path: str, who: str = "", user: str = "", **more: Any) -> httpx2.Response:
        headers = {**({"x-api-key": self.keys[who]} if who else {}), **({"x-kilburn-user": user} if user else {})}
        return self.http.request(method, self.url + path, headers={**headers, **more.pop("headers", {})}, **more)

    def raw(self, head: str, body: bytes = b"", *, whole: bool = False) -> bytes:
        """The answer to what is written by hand: its status, or all of it."""
        host, port = self.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=600) as made:
            made.sendall(f"{head}\r\nhost: {host}\r\nconnection: close\r\n\r\n".encode() + body)
            answer = made.makefile("rb")
            return answer.read() if whole else answer.readline()


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., House]]:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-upstream-canary")
    with ExitStack() as stack:
        yield lambda **options: House(tmp_path, stack, **options)


THROUGH = [
    ("GET", "/v1/files?limit=2&after=a%20b"),
    ("GET", "/v1/files/"),
    ("DELETE", "/v1/files/file-1"),
    ("GET", "/v1/files/file-1/content"),
    ("POST", "/v1/files"),
    ("PATCH", "/v1/vector_stores/vs_1"),
    ("PUT", "/v1/skills/a%2Fb%3Fc%23d%C3%A9"),
    ("HEAD", "/v1/batches/b//x"),
    ("POST", "/v1/completions"),
    ("POST", "/v1/embeddings"),
    ("POST", "/v1/rerank"),
    ("POST", "/v1/moderations"),
    ("POST", "/v1/images/generations"),
    ("POST", "/v1/audio/speech"),
    ("GET", "/v1/conversations/conv_1/items"),
    ("GET", "/v1/messages/batches/msgbatch_1/results"),
    ("POST", "/v1/messages/count_tokens"),
    ("GET", "/v1/chat/completions?limit=1"),
    ("GET", "/v1/models/org/model:1@2"),
    ("POST", "/v1/what/nobody/knows?x=1&x=2"),
]


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_what_is_asked_arrives_as_it_was_sent_and_what_is_answered_too(house: Callable[..., House], form: str) -> None:
    it = house()
    if form == "messages":
        it.options["upstream"] = it.far
        it.again()
    binary = bytes(range(256)) * 9
    said = {"content-type": "audio/mpeg", "content-range": "bytes 0-2303/9999", "etag": '"x"', "content-length": "2304"}
    it.provider.say = lambda asked: (206, said, binary)
    for method, target in THROUGH:
        body = b'{"input": 1.0}' if method in ("POST", "PUT", "PATCH") else b""
        head = f"{method} {target} HTTP/1.1\r\nrange: bytes=0-2303\r\nif-none-match: x\r\ncontent-length: {len(body)}"
        head += "\r\ncontent-type: application/json" if body else ""
        answer = it.raw(head, body, whole=True)
        asked = it.provider.asked[-1]
        path, _, query = target.partition("?")
        assert (asked.method, asked.raw, asked.query, asked.body) == (method, path, query, body)
        assert (asked.headers["range"], asked.headers["if-none-match"]) == ("bytes=0-2303", "x")
        assert asked.headers["host"] == it.far.removeprefix("http://")
        top, _, rest = answer.partition(b"\r\n\r\n")
        assert top.startswith(b"HTTP/1.1 206")
        for name, value in said.items():
            assert f"\r\n{name}: {value}".encode() in top.lower()
        assert rest == (b"" if method == "HEAD" else binary)


@pytest.mark.parametrize("upstream", ["/openai/v1", "/v1", ""])
@pytest.mark.parametrize("keyed", [False, True])
def test_azure_paths_are_served_as_the_chat_form_and_passed_on(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, keyed: bool, upstream: str
) -> None:
    monkeypatch.setenv("AZURE_OPENAI_API_KEY", "azure-key")
    it = house(keyed=keyed, variable="")
    it.options["upstream"] = it.far + upstream
    it.again()
    message = {"role": "assistant", "content": "Fine."}
    said = {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    it.provider.say = lambda asked: (200, {"content-type": "application/json"}, json.dumps(said).encode())
    key = it.keys["ana"] if keyed else "client-key"
    azure = openai.AzureOpenAI(azure_endpoint=it.url, api_key=key, api_version="2024-10-21", max_retries=0, timeout=600)
    v1 = openai.OpenAI(base_url=f"{it.url}/openai/v1", api_key=key, max_retries=0, timeout=600)
    messages: list[Any] = [{"role": "user", "content": "Hello."}]
    with azure, v1:
        for client, path in ((azure, "/openai/deployments/my-gpt/chat/completions"), (v1, "/openai/v1/chat/completions")):
            raw = client.chat.completions.with_raw_response.create(model="my-gpt", messages=messages)
            assert raw.headers["x-kilburn-session"]
            asked = it.provider.asked[-1]
            assert (asked.raw, asked.query) == (path, "api-version=2024-10-21" if client is azure else "")
            assert json.loads(asked.body)["messages"] == messages
            sent = asked.headers.get("api-key") or asked.headers["authorization"].removeprefix("Bearer ")
            assert sent == ("azure-key" if keyed else "client-key")
            messages += [message, {"role": "user", "content": "And now?"}]
    with kilburn.open(str(it.db), window=9000, tenant="ana" if keyed else "default", embedder=None) as store:
        (info,) = store.sessions()
        assert len(store.session(info.name).contents.messages()) == 4
    for path in ("/openai/deployments/../files", "/openai/deployments/x%2F../files", "/openai/v1/../files"):
        assert it.raw(f"GET {path} HTTP/1.1\r\nx-api-key: {key}").split()[1] == b"404"


def test_a_base_url_with_a_version_of_its_own_is_kept(house: Callable[..., House]) -> None:
    it = house()
    message = {"role": "assistant", "content": "Fine."}
    chat = {"id": "c", "object": "chat.completion", "choices": [{"index": 0, "message": message, "finish_reason": "stop"}]}
    text = {"type": "text", "text": "Fine."}
    messages = {"id": "m", "type": "message", "role": "assistant", "content": [text], "stop_reason": "end_turn"}
    it.provider.say = lambda asked: (
        200,
        {"content-type": "application/json"},
        json.dumps(messages if "messages" in asked.raw else chat).encode(),
    )
    for base, form in (
        *((base, CHAT) for base in ("/v1beta/openai", "/v1beta/openai/", "/openai/v1", "/api/v1", "/compatible-mode/v1")),
        *((base, CHAT) for base in ("/api/paas/v4", "/v1/projects/p/locations/l/endpoints/openapi", "/v1/account/gate/openai")),
        *((base, MESSAGES) for base in ("/anthropic", "/anthropic/v1", "/api", "/v1/account/gate/anthropic")),
    ):
        it.options["upstream"] = it.far + base
        it.again()
        own = base.rstrip("/") if form == CHAT else f"{base.removesuffix('/v1')}/v1"
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": f"Hello by {base}."}]}
        answer = it.ask("POST", form, json=body)
        assert (answer.status_code, "x-kilburn-session" in answer.headers) == (200, True)
        assert it.provider.asked[-1].raw == own + form.removeprefix("/v1")
        it.ask("GET", "/v1/models")
        assert it.provider.asked[-1].raw == f"{own}/models"


def test_other_apis_are_refused_with_the_compatible_path_and_a_probe_is_answered(house: Callable[..., House]) -> None:
    it = house(keyed=True)
    for path, instead in (
        ("/v1beta/models/gemini-3-pro:generateContent", "/v1beta/openai/"),
        ("/v1beta/openai/chat/completions", "/v1beta/openai/"),
        ("/api/chat", "Ollama's /v1"),
        ("/api/generate", "Ollama's /v1"),
    ):
        answer = it.ask("POST", path, "ana", json={})
        assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unsupported_api")
        assert instead in answer.json()["error"]["message"]
    assert it.ask("HEAD", "/").status_code == 200
    assert it.ask("GET", "/", "ana").status_code == 404
    assert not it.provider.asked


def test_a_status_and_its_words_are_the_providers(house: Callable[..., House]) -> None:
    it = house()
    for status in (204, 304, 302, 401, 404, 409, 500, 529):
        words = b"" if status in (204, 304) else b"<no>"
        told = (status, {"x-request-id": "r", "location": "http://other/x"}, words)
        it.provider.say = lambda asked, told=told: told  # type: ignore[misc]
        answer = it.ask("GET", "/v1/files/file-1", follow_redirects=False)
        assert (answer.status_code, answer.content, answer.headers["x-request-id"]) == (status, words, "r")


@pytest.mark.parametrize("length", [True, False])
def test_a_file_of_100_mb_goes_through_piece_by_piece(house: Callable[..., House], length: bool) -> None:
    it = house(limits=RequestBounds(bodies=1_000_000, body=500_000))
    pieces = 100_000_000 // len(CHUNK)

    def file() -> Iterator[bytes]:
        for number in range(pieces):
            yield CHUNK
            # A gateway that held the file would not have sent this on. The last megabytes may be in sockets.
            least = (number - 8) * len(CHUNK)
            until(lambda least=least: it.provider.asked and it.provider.asked[0].size >= least)

    headers = {"content-type": "multipart/form-data; boundary=b"}
    headers |= {"content-length": str(pieces * len(CHUNK))} if length else {}
    answer = it.ask("POST", "/v1/files", headers=headers, content=file())
    assert answer.status_code == 200
    [asked] = it.provider.asked
    assert asked.size == pieces * len(CHUNK) > 99_000_000
    assert asked.digest.hexdigest() == hashlib.sha256(CHUNK * pieces).hexdigest()
    assert asked.headers.get("content-length") == headers.get("content-length")
    assert asked.headers["content-type"] == headers["content-type"]


def test_a_file_of_100_mb_comes_back_piece_by_piece(house: Callable[..., House]) -> None:
    it = house()
    it.provider.say = lambda asked: (200, {"content-type": "application/octet-stream"}, CHUNK * 100)
    with httpx2.stream("GET", f"{it.url}/v1/files/f/content", timeout=600) as answer:
        digest = hashlib.sha256()
        for piece in answer.iter_bytes():
            digest.update(piece)
    assert digest.hexdigest() == hashlib.sha256(CHUNK * 100).hexdigest()


def test_a_file_over_the_limit_or_too_slow_is_refused(house: Callable[..., House]) -> None:
    it = house(limits=RequestBounds(upload=2_000_000, patience=3.0, pace=1e9))
    kind = {"content-type": "application/octet-stream"}
    assert it.ask("POST", "/v1/files", headers=kind, content=iter([CHUNK] * 5)).status_code == 413
    assert it.raw("POST /v1/files HTTP/1.1\r\ncontent-type: image/png\r\ncontent-length: 3000000").startswith(b"HTTP/1.1 413")
    head = "POST /v1/files HTTP/1.1\r\ncontent-type: image/png\r\ncontent-length: 9"
    assert it.raw(head, b"x").startswith(b"HTTP/1.1 408")
    assert it.ask("POST", "/v1/files", headers=kind, content=b"fine").status_code == 200


def test_who_leaves_in_the_middle_of_a_file_ends_the_request_upstream(house: Callable[..., House]) -> None:
    it = house()
    host, port = it.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=600) as made:
        head = f"POST /v1/files HTTP/1.1\r\nhost: {host}\r\ncontent-type: image/png\r\ncontent-length: 99999\r\n\r\n"
        made.sendall(head.encode() + b"x" * 999)
        until(lambda: it.provider.asked and it.provider.asked[0].size)
    until(lambda: it.provider.asked[0].gone.is_set())
    assert it.ask("GET", "/v1/files/file-1").status_code == 200


def test_an_answer_that_comes_before_the_file_is_over_reaches_its_client(house: Callable[..., House]) -> None:
    it = house()
    it.provider.early = True
    it.provider.say = lambda asked: (413, {"content-type": "application/json"}, b'{"error": "too large"}')
    for _ in range(3):
        answer = it.ask("POST", "/v1/files", headers={"content-type": "audio/wav"}, content=iter([CHUNK] * 30))
        assert (answer.status_code, answer.content) == (413, b'{"error": "too large"}')


NOT_THROUGH = [
    "http://evil.example/v1/files",
    "//evil.example/v1/files",
    "/v1/../admin",
    "/v1/files/../../admin",
    "/v1/files/%2e%2e/%2e%2e/admin",
    "/v1/files/..%2f..%2fadmin",
    "/v1/files/..%5cadmin",
    "/v1/files/..;x=1/admin",
    "/v1/files/%252e%252e/admin",
    "/v1/files/%00",
    "/v1/files/a%0d%0ax:y",
    "/v1",
    "/v2/rerank",
    "/V1/files",
    "/",
    "*",
]


def test_no_path_leads_elsewhere(house: Callable[..., House]) -> None:
    it = house()
    for target in NOT_THROUGH:
        for method in ("GET", "POST", "DELETE"):
            answer = it.raw(f"{method} {target} HTTP/1.1\r\ncontent-length: 0")
            assert answer.split()[1] in (b"400", b"404", b"405"), answer
    assert not it.provider.asked


def test_what_looks_like_another_host_stays_a_path(house: Callable[..., House]) -> None:
    it = house()
    for target in ("/v1/@evil.example/x", "/v1//evil.example/x", "/v1/a#b", "/v1/:80/x", "/v1/http://evil.example/"):
        assert it.raw(f"GET {target} HTTP/1.1\r\nx-forwarded-host: evil.example").startswith(b"HTTP/1.1 200")
        assert it.provider.asked[-1].raw == target.replace("#", "%23")
    assert it.raw("GET /v1/files HTTP/1.1\r\nhost: evil.example").startswith(b"HTTP/1.1 400")


def test_other_methods_are_refused(house: Callable[..., House]) -> None:
    it = house()
    for method in ("TRACE", "CONNECT", "OPTIONS", "PROPFIND"):
        assert it.raw(f"{method} /v1/files HTTP/1.1").split()[1] in (b"400", b"404", b"405")
    assert not it.provider.asked


def test_a_websocket_is_refused_in_plain_words(house: Callable[..., House]) -> None:
    it = house()
    head = "GET /v1/realtime?model=m HTTP/1.1\r\nupgrade: websocket\r\nsec-websocket-key: x\r\nsec-websocket-version: 13"
    answer = it.raw(head, whole=True)
    assert answer.startswith(b"HTTP/1.1 501")
    assert b"websockets" in answer
    assert not it.provider.asked


def test_a_model_of_this_process_has_no_files(house: Callable[..., House]) -> None:
    it = house(upstream=None, model=Scripted([]))
    assert it.ask("GET", "/v1/files/file-1").json()["error"]["code"] == "unknown_url"
    assert it.ask("POST", "/v1/files", headers={"content-type": "audio/wav"}, content=b"x").status_code == 404
    assert it.ask("GET", "/v1/models").status_code == 200


# The provider's key


@pytest.mark.parametrize("path", ["/v1/files", "/v1/messages/count_tokens", "/v1/messages/batches", MESSAGES])
@pytest.mark.parametrize("form", ["chat", "messages"])
def test_a_provider_gets_its_own_key_and_no_other(
    house: Callable[..., House], monkeypatch: pytest.MonkeyPatch, form: str, path: str
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-openai")
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-anthropic")
    it = house()
    it.options["upstream"] = f"{it.far}/v1" if form == "chat" else it.far
    it.again()
    said = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "Hi"}]}
    it.ask("POST", path, json=said, headers={"anthropic-version": "2023-06-01", "x-api-key": "kilburn"})
    headers = str(it.provider.asked[-1].headers)
    assert ("sk-openai" in headers, "sk-anthropic" in headers) == (form == "chat", form == "messages")


def test_a_keys_of_the_gateway_is_needed_and_stays_here(house: Callable[..., House]) -> None:
    it = house(keyed=True)
    for path in ("/v1/files", "/v1/batches", "/v1/audio/speech", "/v1/files/f"):
        for kind in ("application/json", "multipart/form-data; boundary=x"):
            assert it.ask("POST", path, content=b"{}", headers={"content-type": kind}).status_code == 401
    assert not it.provider.asked
    assert it.ask("POST", "/v1/files", "ana", content=b"x", headers={"content-type": "audio/wav"}).status_code == 200
    headers = it.provider.asked[-1].headers
    assert headers["authorization"] == "Bearer sk-upstream-canary"
    assert it.keys["ana"] not in str(headers)


def test_a_rate_is_of_all_paths(house: Callable[..., House]) -> None:
    it = house(keyed=True, limits=RequestBounds(rate=8))
    codes = [it.ask("POST", "/v1/audio/speech", "ana", json={"input": "x"}).status_code for _ in range(6)]
    assert codes == [200, 200, 429, 429, 429, 429]


# What others keep there


@pytest.mark.parametrize("wall", ["tenants", "users"])
def test_what_one_keeps_nobody_else_reads_names_or_deletes(house: Callable[..., House], wall: str) -> None:
    it = house(keyed=True)

    def ask(who: str, method: str, path: str, **more: Any) -> httpx2.Response:
        return it.ask(method, path, who, **more) if wall == "tenants" else it.ask(method, path, "ana", user=who, **more)

    def posted(who: str, path: str, **more: Any) -> str:
        answer = ask(who, "POST", path, **more)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["id"])

    file = posted("ana", "/v1/files", content=b"--b--", headers={"content-type": "multipart/form-data; boundary=b"})
    batch = posted("ana", "/v1/batches", json={"input_file_id": file})
    thread = posted("ana", "/v1/threads", json={"messages": []})
    talk = posted("ana", "/v1/conversations", json={})
    store = posted("ana", "/v1/vector_stores", json={"file_ids": [file]})
    result = ask("ana", "GET", f"/v1/batches/{batch}").json()["output_file_id"]
    hello = [{"role": "user", "content": "Hi"}]
    part = {"type": "file", "file": {"file_id": file}}
    source = {"type": "document", "source": {"type": "file", "file_id": file}}
    bodies: list[tuple[str, Any]] = [
        (CHAT, {"messages": [{"role": "user", "content": [part]}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [source]}], "max_tokens": 9}),
        (RESPONSES, {"input": [{"role": "user", "content": [{"type": "input_file", "file_id": result}]}]}),
        (RESPONSES, {"input": "?", "tools": [{"type": "file_search", "vector_store_ids": ["vs_of_nobody", store]}]}),
        (RESPONSES, {"input": "?", "conversation": talk}),
        ("/v1/batches", {"input_file_id": file}),
        ("/v1/vector_stores", {"file_ids": [file]}),
        ("/v1/threads/runs", {"thread_id": thread}),
        ("/v1/fine_tuning/jobs", {"training_file": "x", "hyper": {"validation_file_id": file}}),
    ]
    for again in (False, True):
        if again:
            it.again()
        before = len(it.provider.asked)
        for method in ("GET", "POST", "DELETE", "PATCH", "HEAD"):
            for path in (f"/v1/files/{file}", f"/v1/files/{file}/content", f"/v1/batches/{batch}/cancel", f"/v1/FILES/{result}",
                         f"/v1/threads/{thread}/messages", f"/v1/conversations/{talk}/items", f"/v1/x/y/{file}",
                         f"/v1/vector_stores/vs_own/files/{file}", f"/v1/files/%66{file[1:]}", f"/v1/files/{file};x",
                         f"/v1/files/{file}/"):  # fmt: skip
                assert ask("bob", method, path).status_code == 404, path
        for path, body in bodies:
            written = json.dumps({"model": "m", **body})
            escaped = written.replace(file, f"\\u0066{file[1:]}").replace("file_id", "fil\\u0065_id")
            for text in (written, escaped):
                json_ = {"content-type": "application/json"}
                assert ask("bob", "POST", path, content=text, headers=json_).status_code == 404, text
                odd = {**json_, "x-kilburn": "off"}
                assert ask("bob", "POST", path, content=text, headers=odd).status_code == 404, text
            utf16 = ask("bob", "POST", path, content=written.encode("utf-16-le"), headers={"content-type": "application/json"})
            assert utf16.status_code == 400
        assert len(it.provider.asked) == before
        assert ask("ana", "GET", f"/v1/files/{result}/content").status_code == 200
        assert ask("ana", "POST", "/v1/batches", json={"input_file_id": file}).status_code == 200
        assert ask("bob", "POST", CHAT, json={"model": "m", "messages": hello}).status_code in (200, 502)


LISTS = [
    ("GET", "/v1/files"),
    ("HEAD", "/v1/files/"),
    ("GET", "/v1/files;1"),
    ("GET", "/v1/files%3Flimit=12345678"),
    ("GET", "/v1//files"),
    ("GET", "/v1/batches?limit=100"),
    ("GET", "/v1/messages/batches"),
    ("GET", "/v1/fine_tuning/jobs"),
    ("GET", CHAT),
    ("GET", f"{CHAT}/chatcmpl-12345678"),
    ("DELETE", f"{CHAT}/chatcmpl-12345678"),
    ("DELETE", "/v1/models/ft:12345678"),
    ("POST", "/v1/organization/admin_api_keys"),
    ("GET", "/v1/organizations/users/12345678"),
    ("GET", "/v1/Organization/12345678"),
]


def test_a_list_of_what_all_keep_is_nobodys_below_a_key(house: Callable[..., House]) -> None:
    it = house(keyed=True)
    own = {"x-api-key": it.keys["ana"], "authorization": "Bearer sk-her-own"}
    for method, path in LISTS:
        for headers in ({}, own):
            answer = it.ask(method, path, "ana", headers=headers)
            assert answer.status_code == 403, path
            assert "canary" not in answer.text
    assert not it.provider.asked


def test_a_key_of_ones_own_at_the_provider_lists_what_is_under_it(house: Callable[..., House]) -> None:
    it = house(keyed=True, variable="")
    both = {"x-api-key": it.keys["ana"], "authorization": "Bearer sk-her-own"}
    assert it.http.get(f"{it.url}/v1/files", headers=both).status_code == 200
    assert it.provider.asked[-1].headers["authorization"] == "Bearer sk-her-own"


def test_without_keys_and_users_there_are_no_walls(house: Callable[..., House]) -> None:
    it = house()
    made = it.ask("POST", "/v1/files", headers={"content-type": "audio/wav"}, content=b"x").json()["id"]
    for path in ("/v1/files", f"/v1/files/{made}"):
        assert it.ask("GET", path).status_code == 200


def test_what_is_known_of_ids_is_bounded_in_memory_and_whole_in_the_store(tmp_path: Path) -> None:
    ana, bob = Key(name="0" * 8, tenant="ana"), Key(name="1" * 8, tenant="bob")
    names = [f"resp_{number:08d}" for number in range(300)]
    with kilburn.open(str(tmp_path / "a.db"), window=1000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        kept = Kept(lambda: store, max_ids=20)
        for name in names:
            assert kept.check("POST", RESPONSES, json.dumps({"previous_response_id": name, "input": "?"}).encode(), ana)
        assert len(kept._owners) <= 20
        for known in (kept, Kept(lambda: store, max_ids=20), Kept(lambda: store)):
            for name in (*names[:3], *names[-3:]):
                with pytest.raises(Problem):
                    known.check("GET", f"{RESPONSES}/{name}", b"", bob)
                assert known.check("GET", f"{RESPONSES}/{name}", b"", ana)
                assert len(known._owners) <= 300
            known.claim([*map(_digest_of, names[:5])], bob)
            known.write()
            with pytest.raises(Problem):
                known.check("GET", f"{RESPONSES}/{names[0]}", b"", bob)


def _digest_of(name: str) -> str:
    return hashlib.blake2b(name.encode(), digest_size=12).hexdigest()


def test_whose_an_id_is_waits_for_a_store_that_cannot_be_written(tmp_path: Path) -> None:
    ana, bob = Key(name="0" * 8, tenant="ana"), Key(name="1" * 8, tenant="bob")
    with (
        kilburn.open(str(tmp_path / "a.db"), window=1000, policy="fifo", tokenizer="chars/4", embedder=None) as store,
        kilburn.open(str(tmp_path / "a.db"), window=1000, policy="fifo", tokenizer="chars/4", embedder=None) as other,
    ):
        kept = Kept(lambda: store, max_ids=5)
        kept.claim([_digest_of("resp_first")], ana)
        kept.write()
        with other.backend.together():
            for number in range(400):
                kept.claim([_digest_of(f"resp_{number:08d}")], ana)
            with pytest.raises(StoreError):
                kept.write()
            with pytest.raises(Problem):
                kept.check("GET", f"{RESPONSES}/resp_00000007", b"", bob)
        kept.write()
        with pytest.raises(Problem):
            Kept(lambda: other).check("GET", f"{RESPONSES}/resp_00000007", b"", bob)


def test_a_body_full_of_names_is_read_once(tmp_path: Path) -> None:
    with kilburn.open(str(tmp_path / "a.db"), window=1000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        kept = Kept(lambda: store)
        for piece in (
            b'"file_id":[',
            b'"file_id":"',
            b'"file_id" ',
            b'"' + b"a" * 40,
            b'"file_id":["a","',
            b"\\u0022file_id\\u0022:[",
        ):
            # If each of them were read to the end, this would not end in an hour.
            kept.check("POST", CHAT, b"{" + piece * 400_000, Key(name="0" * 8, tenant="ana"))

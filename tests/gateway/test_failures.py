"""Upstreams that fail, lie or speak less than they should, seen from the official SDKs in all three forms."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx2
import openai
import pytest

import kilburn
from effort import pairwise
from kilburn.errors import Overlong, Unavailable
from kilburn.gateway.app import Settings, build
from kilburn.gateway.events import Events
from kilburn.kernel.store import Store
from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import Break, Refusal, Upstream, calling, serving

FILLER = "The river carries sand, and the sand carries gold. "
FORMS = ["chat", "messages", "responses"]
BODIES = {
    "chat": {"choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "Fine."}}]},
    "messages": {"type": "message", "role": "assistant", "content": [{"type": "text", "text": "Fine."}],
                 "stop_reason": "end_turn"},
    "responses": {
        "object": "response",
        "status": "completed",
        "output": [
            {"type": "message", "id": "m1", "role": "assistant", "status": "completed", "content": [
                {"type": "output_text", "text": "Fine.", "annotations": []}
            ]}
        ],
    },
}  # fmt: skip


def talk(turns: int = 1) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for turn in range(turns):
        out += [{"role": "user", "content": f"q{turn} {FILLER * 10}"}, {"role": "assistant", "content": f"a{turn} {FILLER * 10}"}]
    return [*out, {"role": "user", "content": "?"}]


def ask(setup: Any, form: str, given: Any = None, *, streamed: bool = False, **more: Any) -> str:
    """The text of a reply, by the SDK of the form."""
    given = given or talk()
    if form == "messages":
        if not streamed:
            whole = setup.anthropic.messages.create(model="m", max_tokens=99, messages=given, **more)
            return "".join(block.text for block in whole.content if block.type == "text")
        with setup.anthropic.messages.stream(model="m", max_tokens=99, messages=given, **more) as events:
            return str(events.get_final_text())
    if form == "chat":
        if not streamed:
            return str(setup.openai.chat.completions.create(model="m", messages=given, **more).choices[0].message.content)
        chunks = list(setup.openai.chat.completions.create(model="m", messages=given, stream=True, **more))
        return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    if not streamed:
        return str(setup.openai.responses.create(model="m", input=given, **more).output_text)
    with setup.openai.responses.stream(model="m", input=given, **more) as events:
        return str(events.get_final_response().output_text)


class Far:
    """A provider that sends bytes: `say` answers each request, and `asked` holds them."""

    def __init__(self) -> None:
        self.asked: list[tuple[dict[str, str], bytes]] = []
        self.say: Callable[[dict[str, Any]], tuple[int, list[tuple[str, str]], list[bytes]]] = lambda body: (200, [], [b"{}"])

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            return
        raw = b""
        while (message := await receive()).get("more_body"):
            raw += message["body"]
        raw += message.get("body", b"")
        headers = [(name.decode(), value.decode("latin-1")) for name, value in scope["headers"]]
        self.asked.append((dict(headers), raw))
        status, said, pieces = self.say({"path": scope["path"], "headers": headers, **(json.loads(raw) if raw else {})})
        packed = [(name.encode(), value.encode()) for name, value in said]
        await send({"type": "http.response.start", "status": status, "headers": packed})
        for piece in pieces:
            await send({"type": "http.response.body", "body": piece, "more_body": True})
        await send({"type": "http.response.body", "body": b""})


class Near:
    """A gateway before it, clients, and its store."""

    def __init__(self, url: str, db: Path) -> None:
        self.url, self.db = url, db
        self.openai = openai.OpenAI(base_url=f"{url}/v1", api_key="key", max_retries=0, timeout=600)
        self.anthropic = anthropic.Anthropic(base_url=url, api_key="key", max_retries=0, timeout=600)

    def store(self) -> Store:
        """The store, opened a second time."""
        return kilburn.open(str(self.db), window=1_000_000, policy="fifo", embedder=None)


def post(near: Any, form: str, given: Any = None, **more: Any) -> httpx2.Response:
    """The answer to a request as it comes; the fields of the request may be anything."""
    path, key = {"chat": "chat/completions"}.get(form, form), "input" if form == "responses" else "messages"
    body = {"model": "m", "max_tokens": 99, key: given or talk(), **more}
    return httpx2.post(f"{near.url}/v1/{path}", json=body, timeout=600)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[Callable[..., tuple[Far, Near]]]:
    with ExitStack() as stack:

        def start(form: str = "chat", **settings: Any) -> tuple[Far, Near]:
            made = Far()
            url = stack.enter_context(serving(made))
            upstream = url if form == "messages" else f"{url}/v1"
            given = {"db": str(tmp_path / "far.db"), "upstream": upstream, "tokenizer": "chars/4", "one_user": True, **settings}
            near = Near(stack.enter_context(serving(build(Settings(**given)))), tmp_path / "far.db")
            stack.callback(near.openai.close)
            stack.callback(near.anthropic.close)
            return made, near

        yield start


JSON = [("content-type", "application/json")]
EVENTS = [("content-type", "text/event-stream")]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_prompt_that_is_too_long_is_made_shorter_once(gateway: Any, form: str, streamed: bool) -> None:
    far = "messages" if form == "messages" else "chat"
    setup = gateway(upstream=Upstream(otherwise="Fits.", window=2500), window=100_000, form=far)
    assert ask(setup, form, talk(10), streamed=streamed) == "Fits."
    assert [sent.status for sent in setup.upstream.sent] == [400, 200]
    setup.upstream.enqueue(Refusal(overlong=True), Refusal(overlong=True))
    before = len(setup.upstream.sent)
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
        ask(setup, form, [{"role": "user", "content": "Another. " + FILLER}, *talk(9)[1:]], streamed=streamed)
    assert len(setup.upstream.sent) == before + 2


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_this_process_is_asked_again_too(gateway: Any, form: str, streamed: bool) -> None:
    model = Scripted([Overlong("m: prompt is too long"), "Fits.", Overlong("m: prompt is too long")] + [Overlong("still")] * 2)
    setup = gateway(model=model, window=100_000)
    assert ask(setup, form, talk(10), streamed=streamed) == "Fits."
    first, second = (len(str(request.messages)) for request in model.requests)
    assert second < 0.9 * first
    with pytest.raises((openai.BadRequestError, anthropic.BadRequestError)):
        ask(setup, form, [{"role": "user", "content": "Another."}, *talk(9)[1:]], streamed=streamed)
    assert len(model.requests) == 4


def test_a_stream_that_only_says_that_the_prompt_is_too_long_is_asked_for_again(far: Any) -> None:
    made, near = far(window=100_000)
    begun = {"id": "r1", "object": "response", "created_at": 1, "status": "in_progress", "model": "m", "output": [], "tools": [],
             "parallel_tool_calls": True, "tool_choice": "auto"}  # fmt: skip
    error = {"code": "context_length_exceeded", "message": "Your input exceeds the context window of this model."}
    whole = {**begun, **BODIES["responses"]}

    def event(kind: str, number: int, **data: Any) -> bytes:
        return f"event: {kind}\ndata: {json.dumps({'type': kind, 'sequence_number': number, **data})}\n\n".encode()

    def say(body: dict[str, Any]) -> Any:
        head = event("response.created", 0, response={**begun, "id": f"r{len(made.asked)}"})
        if len(made.asked) % 2:
            failed = event("response.failed", 1, response={**begun, "status": "failed", "error": error})
            return 200, EVENTS, [head, failed] if len(made.asked) == 1 else [head + failed]
        return 200, EVENTS, [head, event("response.completed", 1, response={**whole, "id": f"r{len(made.asked)}"})]

    made.say = say
    for count in (2, 4):
        events = list(
            near.openai.responses.create(model="m", input=[{"role": "user", "content": str(count)}, *talk(9)], stream=True)
        )
        assert [each.type for each in events] == ["response.created", "response.completed"]
        assert [each.sequence_number for each in events] == [0, 1]
        # One reply, whose first event may have been told already.
        assert events[-1].response.id == events[0].response.id
        assert events[0].response.id in ({"r1", "r2"} if count == 2 else {"r4"})
        assert len(made.asked) == count
        assert len(made.asked[-1][1]) < 0.9 * len(made.asked[-2][1])


@pytest.mark.parametrize("form", ["chat", "messages"])
def test_an_error_at_the_beginning_of_a_stream(far: Any, form: str) -> None:
    made, near = far(form, window=100_000)
    name = "event: error\n" if form == "messages" else ""

    def say(body: dict[str, Any]) -> Any:
        said = {"type": "error", "error": {"type": "invalid_request_error", "message": "prompt is too long: 9 > 8"}}
        return 200, EVENTS, [f"{name}data: {json.dumps(said)}\n\n".encode()]

    made.say = say
    with pytest.raises((openai.APIError, anthropic.APIError), match="too long"):
        ask(near, form, talk(9), streamed=True)
    assert len(made.asked) == 2


def test_a_client_of_several_replies_has_its_prompt_shortened_too(gateway: Any) -> None:
    setup = gateway(Refusal(overlong=True), ("One.", "Two."), window=100_000)
    reply, _ = setup.chat(talk(9), n=2)
    assert [choice.message.content for choice in reply.choices] == ["One.", "Two."]


@pytest.mark.parametrize(("status", "form", "streamed"), pairwise([429, 500, 529], FORMS, [False, True]))
def test_statuses_and_their_words_are_told_as_they_were(gateway: Any, form: str, status: int, streamed: bool) -> None:
    setup = gateway(Refusal(status=status, words="Not now.", retry_after=7), form="messages" if form == "messages" else "chat")
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        ask(setup, form, streamed=streamed)
    assert caught.value.status_code == status
    assert caught.value.response.headers["retry-after"] == "7"
    assert "Not now." in caught.value.message
    with setup.store() as store:
        (info,) = store.sessions()
        assert info.pages == 3


@pytest.mark.parametrize("form", FORMS)
def test_a_hidden_round_is_asked_again_where_the_client_cannot(gateway: Any, form: str) -> None:
    busy = [Refusal(status=429, retry_after=0), Refusal(status=529), Break(how="error", after=0, error=Refusal(status=529))]
    upstream = Upstream(calling(("recall", {"address": "p1"})), *busy, "Found.")
    setup = gateway(upstream=upstream, window=2000, form="messages" if form == "messages" else "chat")
    assert ask(setup, form, talk(12), streamed=True) == "Found."
    assert [sent.status for sent in upstream.sent] == [200, 429, 529, 200, 200]
    with setup.store() as store:
        (info,) = store.sessions()
        assert store.session(info.name).recall("p1").startswith("q0")


@pytest.mark.parametrize(("pause", "asked"), [(0, 5), (3600, 2)])
@pytest.mark.parametrize("form", FORMS)
def test_a_hidden_round_is_asked_again_a_few_times_and_soon_or_not(gateway: Any, form: str, pause: float, asked: int) -> None:
    busy = [Refusal(status=429, words="Not now.", retry_after=pause)] * 9
    upstream = Upstream(calling(("recall", {"address": "p1"})), *busy)
    setup = gateway(upstream=upstream, window=2000, form="messages" if form == "messages" else "chat")
    text = post(setup, form, talk(12), stream=True).text
    assert "Not now" in text.rstrip().rpartition("data: ")[2]
    assert len(upstream.sent) == asked


@pytest.mark.parametrize("status", [401, 404, 429, 503])
@pytest.mark.parametrize("form", ["chat", "messages"])
def test_a_status_is_kept_where_the_upstream_speaks_the_other_form(gateway: Any, form: str, status: int) -> None:
    setup = gateway(Refusal(status=status, words="Not now."), form="chat" if form == "messages" else "messages")
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError), match="Not now") as caught:
        ask(setup, form)
    assert caught.value.status_code == status


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("how", ["cut", "torn", "error", "silent"])
def test_a_stream_that_breaks_ends_with_an_error_of_the_form(gateway: Any, form: str, how: Any) -> None:
    far = "messages" if form == "messages" else "chat"
    broken = Break(how=how, after=4, reply="This is a longer reply, é, of several pieces.")
    setup = gateway(upstream=Upstream(broken, "Whole.", pause=0.02), form=far, timeout=2.0 if how == "silent" else 600.0)
    path = {"chat": "chat/completions"}.get(form, form)
    key = "input" if form == "responses" else "messages"
    body = {"model": "m", "max_tokens": 50, "stream": True, key: talk()}
    with httpx2.stream("POST", f"{setup.url}/v1/{path}", json=body, timeout=600) as reply:
        assert reply.status_code == 200
        text = reply.read().decode()
    last = json.loads(text.rstrip().rpartition("data: ")[2])
    if form == "messages":
        assert (last["type"], set(last["error"])) == ("error", {"type", "message"})
        assert text.count("event: error") == 1
    elif form == "chat":
        assert set(last["error"]) == {"message", "type", "param", "code"}
    else:
        assert set(last) == {"type", "code", "message", "param", "sequence_number"}
        assert last["type"] == "error"
    assert ask(setup, form) == "Whole."
    with setup.store() as store:
        (info,) = store.sessions()
        assert info.pages == 4


NONSENSE = [
    ("text/html", b"<html>Bad gateway</html>"),
    ("application/json", b""),
    ("application/json", b"[]"),
    ("application/json", b'{"choices": 7, "content": 7, "output": 7}'),
    ("application/json", b'{"choices": [{}], "content": [{}], "output": [{}]}'),
    ("application/json", b'{"choices": [], "content": [5], "output": [5]}'),
    ("application/json", b'{"choices": [{"message": {"role": "assistant", "content": 5, "tool_calls": 3}}], "usage": 3}'),
    ("application/json", b"[" * 100_000),
    ("application/json", b'{"choices": "\xff"}'),
    ("text/event-stream", b"data: {}\n\n"),
    ("text/event-stream", b"data: 5\n\ndata: \xff\n\n"),
    ("text/event-stream", b"\x00\x01\x02"),
    ("text/event-stream", b"data: " + b"[" * 100_000 + b"\n\n"),
]


@pytest.mark.parametrize("form", FORMS)
def test_what_is_no_reply_goes_through_as_it_is(far: Any, form: str) -> None:
    made, near = far(form)
    for streamed, (kind, body) in itertools.product((False, True), NONSENSE):
        made.say = lambda _, kind=kind, body=body: (200, [("content-type", kind)], [body])
        said = post(near, form, stream=streamed)
        assert (said.status_code, said.headers["content-type"], said.content) == (200, kind, body)
    made.say = lambda _: (200, JSON, [json.dumps(BODIES[form]).encode()])
    assert ask(near, form) == "Fine."
    with near.store() as store:
        (info,) = store.sessions()
        assert store.session(info.name).contents.messages()[-1]["role"] == "assistant"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("status", [400, 413, 503])
def test_an_error_goes_through_as_it_is(far: Any, form: str, status: int) -> None:
    made, near = far(form)
    said = [("retry-after", "3"), ("x-ratelimit-remaining-tokens", "7"), ("request-id", "req_1")]
    bodies = [("text/html", b"<html>no</html>"), ("application/json", b'{"detail":  "no", "type": "far"}'), ("text/plain", b"")]
    bodies.append(("application/json", b'{"error": {"message": "caf\xe9"}}'))
    for streamed, (kind, body) in itertools.product((False, True), bodies):
        made.say = lambda _, kind=kind, body=body: (status, [("content-type", kind), *said], [body])
        reply = post(near, form, stream=streamed)
        assert (reply.status_code, reply.headers["content-type"], reply.content) == (status, kind, body)
        assert all(reply.headers[name] == value for name, value in said)
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        ask(near, form)
    assert (caught.value.status_code, caught.value.response.headers["retry-after"]) == (status, "3")


@pytest.mark.parametrize("form", FORMS)
def test_a_compressed_answer_is_read(far: Any, form: str) -> None:
    made, near = far(form)
    packed = gzip.compress(json.dumps(BODIES[form]).encode())
    made.say = lambda _: (200, [*JSON, ("content-encoding", "gzip")], [packed])
    assert ask(near, form) == "Fine."
    assert made.asked[0][0]["accept-encoding"] == "identity"
    made.say = lambda _: (200, [*JSON, ("content-encoding", "gzip")], [packed[:20]])
    with pytest.raises((openai.APIStatusError, anthropic.APIStatusError)) as caught:
        ask(near, form)
    assert caught.value.status_code == 502


class Searched(bytearray):
    """What waits for the end of an event; counts the bytes that are searched for it."""

    bytes = 0

    def find(self, part: Any, start: Any = 0, *rest: Any) -> int:
        self.bytes += len(self) - start
        return super().find(part, start, *rest)


def test_an_event_may_be_very_long_and_each_byte_is_looked_at_once(far: Any) -> None:
    made, near = far()
    text = "é" * 4_000_000
    chunk = {"id": "c", "choices": [{"index": 0, "delta": {"role": "assistant", "content": text}, "finish_reason": None}]}
    last = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
    raw = b"".join(b"data: " + json.dumps(each, ensure_ascii=False).encode() + b"\r\n\r\n" for each in (chunk, last))
    made.say = lambda _: (200, EVENTS, [raw[at : at + 9_999] for at in range(0, len(raw), 9_999)])
    assert ask(near, "chat", streamed=True) == text
    events = Events()
    for size in (4 << 20, 16 << 20):
        events._left = searched = Searched()
        for _ in range(size >> 12):
            assert not events.feed(b"x" * 4096)
        assert events._left is searched, "it grows, and is not copied"
        assert size <= searched.bytes <= size + (size >> 12)
        assert len(events.feed(b"\n\n")) == 1
    for _ in range(64):
        events.feed(b"x" * (1 << 20))
    with pytest.raises(Unavailable, match="does not end"):
        events.feed(b"x")


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_line_ends_of_all_kinds_wherever_they_are_torn(size: int) -> None:
    raw = b": hi\r\n\r\nevent: a\rdata: 1\r\rdata: 2\n\ndata: 3\r\ndata: 4\r\n\r\n"
    events = Events()
    found = [event for at in range(0, len(raw), size) for event in (*events.feed(raw[at : at + size]), *events.feed(b""))]
    assert [(event.name, event.data) for event in found] == [("", b""), ("a", b"1"), ("", b"2"), ("", b"3\n4")]
    assert not events.open


def test_headers_of_a_connection_and_cookies_stay_there(far: Any) -> None:
    made, near = far()
    said = [("set-cookie", "a=1"), ("set-cookie", "b=2"), ("connection", "x-once"), ("x-once", "1"), ("alt-svc", 'h3=":443"'),
            ("x-many", "1"), ("x-many", "2"), ("via", "1.1 far")]  # fmt: skip
    made.say = lambda _: (200, [*JSON, *said], [json.dumps(BODIES["chat"]).encode()])
    given = [("connection", "x-mine, keep-alive"), ("x-mine", "1"), ("te", "trailers"), ("cookie", "s=1"), ("openai-beta", "a"),
             ("openai-beta", "b")]  # fmt: skip
    for _ in range(2):
        reply = httpx2.post(f"{near.url}/v1/chat/completions", json={"model": "m", "messages": talk()}, headers=given)
        assert reply.status_code == 200
        assert not [name for name in ("set-cookie", "x-once", "alt-svc") if name in reply.headers]
        assert reply.headers["x-many"] == "1, 2"
        sent = made.asked[-1][0]
        assert not [name for name in ("x-mine", "te", "cookie") if name in sent]
        assert sent["openai-beta"] == "a, b"


def test_a_client_that_expects_100_gets_it_after_its_key_and_before_its_body(far: Any) -> None:
    made, near = far()
    made.say = lambda _: (200, JSON, [json.dumps(BODIES["chat"]).encode()])
    body = json.dumps({"model": "m", "messages": talk()}).encode()
    with socket.create_connection(("127.0.0.1", int(near.url.rsplit(":", 1)[1])), timeout=600) as made_by_hand:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
        made_by_hand.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode())
        assert made_by_hand.recv(100).startswith(b"HTTP/1.1 100")
        made_by_hand.sendall(body)
        assert made_by_hand.recv(1000).startswith(b"HTTP/1.1 200")
    assert "expect" not in made.asked[0][0]


@contextmanager
def bare(raw: bytes) -> Iterator[str]:
    """The address of an upstream that sends these bytes at once, and closes its connection."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            while True:
                try:
                    with listening.accept()[0] as one:
                        one.recv(65536)
                        one.sendall(raw)
                except OSError:
                    return

        threading.Thread(target=answer, daemon=True).start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1"


@pytest.mark.parametrize("window", [100_000, 1500])
def test_what_came_before_a_stream_broke_off_is_heard(tmp_path: Path, window: int) -> None:
    def chunk(delta: Any, finish: str | None) -> bytes:
        return b"data: " + json.dumps({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]}).encode() + b"\n\n"

    events = chunk({"content": "Fi"}, None) + chunk({"content": "ne."}, "stop")
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
    for framed in (
        b"content-length: 9999\r\n\r\n" + events + b'data: {"cho',
        b"transfer-encoding: chunked\r\n\r\n%x\r\n%s\r\n3\r\nd" % (len(events), events),
    ):
        with bare(head + framed) as url, ExitStack() as stack:
            given = Settings(db=str(tmp_path / "a.db"), upstream=url, tokenizer="chars/4", embedder=None, window=window)
            near = stack.enter_context(serving(build(given)))
            body = {"model": "m", "stream": True, "messages": talk(1 if window > 1500 else 9)}
            said = httpx2.post(f"{near}/v1/chat/completions", json=body, timeout=600).content
            assert said.startswith(events)
            assert b"error" in said.removeprefix(events)


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{",
        b"HTTP/9 nonsense\r\n\r\n",
        b"",
        b"\x00" * 99,
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n{}",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 99_999 + b"\r\n\r\n{}",
        b"HTTP/1.1 101 Switching\r\nupgrade: x\r\n\r\n",
        b"HTTP/1.1 302 Found\r\nlocation: /\r\n\r\n",
    ],
)
def test_an_upstream_that_does_not_speak_http(tmp_path: Path, raw: bytes) -> None:
    with bare(raw) as url, ExitStack() as stack:
        given = Settings(db=str(tmp_path / "a.db"), upstream=url, tokenizer="chars/4", timeout=3)
        near = stack.enter_context(serving(build(given)))
        for path in ("chat/completions", "embeddings"):
            with httpx2.stream("POST", f"{near}/v1/{path}", json={"model": "m", "messages": talk()}, timeout=600) as reply:
                try:
                    text = reply.read().decode()
                except httpx2.RemoteProtocolError:
                    text = ""
            if path == "chat/completions":
                assert reply.status_code in (502, 504)
                assert json.loads(text)["error"]["type"] == "server_error"


@pytest.mark.parametrize("streamed", [False, True])
def test_an_upstream_without_the_responses_form_is_asked_for_chat_completions(gateway: Any, streamed: bool) -> None:
    class ChatOnly(Upstream):
        async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
            if scope.get("path") == "/v1/responses":
                absent.append(1)
                await send({"type": "http.response.start", "status": 404, "headers": [(b"content-type", b"text/plain")]})
                await send({"type": "http.response.body", "body": b"404 page not found"})
            else:
                await super().__call__(scope, receive, send)

    absent: list[int] = []
    tool = {"type": "function", "name": "read", "parameters": {"type": "object", "properties": {}}, "strict": False}
    busy, first = Refusal(status=429, retry_after=3), calling(("read", {"path": "a"}, "c1"), text="I read.")
    setup = gateway(upstream=ChatOnly(busy, first, "Done."))
    with pytest.raises(openai.RateLimitError):
        setup.openai.responses.create(model="m", input="Go")
    options = {"model": "m", "tools": [tool], "instructions": "Rules."}
    given: list[Any] = [{"role": "user", "content": "Go"}]
    reply = setup.openai.responses.create(input=given, **options)
    assert [item.type for item in reply.output] == ["message", "function_call"]
    given += [item.model_dump(exclude_none=True) for item in reply.output]
    given += [
        {"id": "rs_1", "type": "reasoning", "summary": [], "encrypted_content": "xyz"},
        {"type": "web_search_call", "id": "ws", "status": "completed"},
        {"type": "function_call_output", "call_id": "c1", "output": "file"},
    ]
    assert ask(setup, "responses", given, streamed=streamed, tools=[tool]) == "Done."
    assert len(absent) == 2
    assert not setup.upstream.refused
    assert [message["role"] for message in setup.upstream.sent[-1].body["messages"]] == ["user", "assistant", "tool"]
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        setup.openai.responses.create(model="m", input="And?", previous_response_id="resp_of_another_one")
    assert setup.openai.responses.create(model="m", input="And?", previous_response_id=reply.id).output_text == "OK."
    assert "Go" in str(setup.upstream.sent[-1].body["messages"]), "what the upstream does not keep is sent"
    assert not setup.upstream.refused


def test_a_model_that_is_not_there_is_told_as_the_provider_does(far: Any) -> None:
    made, near = far()
    error = {"error": {"message": "The model `m` does not exist", "type": "invalid_request_error", "code": "model_not_found"}}
    made.say = lambda _: (404, JSON, [json.dumps(error).encode()])
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        near.openai.responses.create(model="m", input="Hi")


@pytest.mark.parametrize("more", [{"previous_response_id": "resp_1"}, {"conversation": "conv_1"}, {"background": True}, {}])
def test_what_a_provider_keeps_is_not_to_be_had_from_a_model_here(gateway: Any, more: dict[str, Any]) -> None:
    setup = gateway(model=Scripted([]))
    given: Any = "And?" if more else [{"type": "item_reference", "id": "msg_1"}, {"role": "user", "content": "And?"}]
    with pytest.raises(openai.BadRequestError, match="send the whole conversation"):
        setup.openai.responses.create(model="m", input=given, **more)
    with setup.store() as store:
        assert not store.sessions()


def test_items_that_are_only_named_go_to_the_provider_who_has_them(gateway: Any) -> None:
    setup = gateway("Hello.", "Kept.")
    reply = setup.openai.responses.create(model="m", input="Hi")
    given = [
        {"role": "user", "content": "Hi"},
        {"type": "item_reference", "id": reply.output[0].id},
        {"role": "user", "content": "?"},
    ]
    assert setup.openai.responses.create(model="m", input=given).output_text == "Kept."
    assert setup.upstream.sent[-1].body["input"] == given


@pytest.mark.parametrize("form", FORMS)
def test_a_model_of_this_process_may_fail_in_any_way(gateway: Any, form: str) -> None:
    setup = gateway(model=Scripted([ValueError("canary"), TypeError("canary"), "Fine."]))
    for _ in range(2):
        with pytest.raises((openai.InternalServerError, anthropic.InternalServerError)) as caught:
            ask(setup, form)
        assert caught.value.status_code == 502
        assert "canary" not in caught.value.message
    assert ask(setup, form) == "Fine."


@pytest.mark.parametrize("form", FORMS)
def test_memory_is_put_beside_the_question_in_every_form(gateway: Any, form: str) -> None:

    setup = gateway(upstream=Upstream(otherwise="Noted."), memory=300, form="messages" if form == "messages" else "chat")
    with setup.store() as store:
        store.memory().remember("The locker of the user is number 12.")
    question = "What is the number of my locker?"
    texts: list[Any] = [[{"role": "user", "content": question}]]
    if form == "responses":
        texts += [question, [{"role": "user", "content": [{"type": "input_text", "text": question}]}]]
    for given in texts:
        for streamed in (False, True):
            assert ask(setup, form, given, streamed=streamed) == "Noted."
            assert re.search(r"locker.*<memory-.*number 12", setup.upstream.sent[-1].raw.decode(), re.S)
    assert not setup.upstream.refused


def test_settings_that_both_forms_have_are_translated(gateway: Any) -> None:
    model, other = Scripted(["Fine."] * 3), Scripted(["Fine."] * 2, form="messages")
    setup, second = gateway(model=model), gateway(model=other)
    ask(setup, "chat", stop="END", top_p=0.5)
    ask(setup, "messages", stop_sequences=["END"])
    ask(setup, "responses", top_p=0.25)
    ask(second, "chat", stop=["END", "."])
    assert [request.options for request in model.requests] == [
        {"stop": ["END"], "top_p": 0.5},
        {"stop": ["END"]},
        {"top_p": 0.25},
    ]
    assert other.requests[0].options == {"stop_sequences": ["END", "."]}
    for wrong in (
        {"n": 2},
        {"temperature": "hot"},
        {"max_tokens": -1},
        {"seed": 1.5},
        {"tools": [{"type": "function", "function": {"name": 5}}]},
    ):
        with pytest.raises(openai.BadRequestError):
            ask(second, "chat", extra_body=wrong)
    assert ask(second, "chat") == "Fine."


def test_a_first_request_that_is_refused_leaves_nothing_and_does_not_read_the_whole_store(gateway: Any) -> None:
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.endswith("slack.py"):
            entered.append(frame.f_code.co_name)

    threading.setprofile(note)
    try:
        setup = gateway(window=2000)
        setup.chat(talk())
        calls = [{"id": f"c{n}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for n in range(1000)]
        waiting = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": calls}]
        with pytest.raises(openai.BadRequestError, match="may not leave"):
            setup.chat(waiting)
        seen = list(entered)
    finally:
        threading.setprofile(None)
    assert "wipe" not in seen
    with setup.store() as store:
        assert len(store.sessions()) == 1

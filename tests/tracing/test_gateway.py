"""Spans of requests through the gateway, by the official SDKs against a scripted provider; and what a request shipped."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import httpx2
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter, SpanExportResult

import kilburn
from gateway.talk import TALK, user
from kilburn.cli import main
from kilburn.event import Act
from kilburn.testing.upstream import Break, Refusal, Upstream, calling
from tracing.conftest import Told
from tracing.test_agents import KNOWN, given
from waiting import until

CANARY = "canary-5b7e"

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
FROM = {"traceparent": f"00-{TRACE}-{PARENT}-01"}

WEB = {"http.request.method", "http.route", "http.response.status_code"}


def check_names(told: Told) -> None:
    for span in told.spans:
        for name in given(span):
            assert name in KNOWN | WEB or name.startswith("kilburn.") or name == "error.type", name
        assert CANARY not in f"{span.name} {given(span)} {span.status.description} {[event.attributes for event in span.events]}"


def test_a_request_of_openai_is_a_tree_below_its_client_and_above_its_upstream(gateway: Callable[..., Any], told: Told) -> None:
    setup = gateway(calling(("recall", {"address": "p2"})), f"It was {CANARY}.", window=900, policy="summarize")
    messages = [*TALK, user(f"what was the first? {CANARY}")]
    reply, headers = setup.chat(messages, extra_headers={**FROM, "X-Client-Request-Id": "order-7"})
    assert reply.choices[0].message.content == f"It was {CANARY}."
    [served], [first, second] = told.named("POST /v1/chat/completions"), told.named("chat m")
    assert {f"{span.context.trace_id:032x}" for span in told.spans} == {TRACE}
    assert f"{served.parent.span_id:016x}" == PARENT
    assert given(served)["kilburn.request.id"] == headers["x-kilburn-request"]
    assert given(served)["kilburn.request.client"] == "order-7"
    assert given(served)["gen_ai.conversation.id"] == headers["x-kilburn-session"]
    assert told.above(first) == told.above(second) == ["POST /v1/chat/completions"]
    assert [given(span)["kilburn.round"] for span in (first, second)] == [1, 2]
    # The upstream works for the call, and not for whoever asked the gateway.
    sent = [one.headers["traceparent"] for one in setup.upstream.sent]
    assert sent == [f"00-{TRACE}-{span.context.span_id:016x}-01" for span in (first, second)]
    assert [given(span)["gen_ai.usage.input_tokens"] for span in (first, second)] == [one.tokens for one in setup.upstream.sent]
    [recalled] = told.named("execute_tool recall")
    assert given(recalled)["kilburn.pages"] == "p2"
    assert told.above(recalled) == ["POST /v1/chat/completions"]
    [compacted, *_] = told.named("compact")
    assert told.above(compacted)[-1] == "POST /v1/chat/completions"
    assert given(second)["gen_ai.conversation.compacted"] is True
    assert first.start_time <= first.end_time <= second.start_time
    check_names(told)


def test_a_request_of_anthropic_has_spans_as_a_stream_too(gateway: Callable[..., Any], told: Told) -> None:
    setup = gateway(f"Hello {CANARY}.", "Again.", form="messages")
    talk: Any = [{"role": "user", "content": CANARY}]
    with setup.anthropic.messages.stream(model="m", max_tokens=50, messages=talk, extra_headers=FROM) as stream:
        assert stream.get_final_text() == f"Hello {CANARY}."
    [served], [called] = told.named("POST /v1/messages"), told.named("chat m")
    assert f"{served.context.trace_id:032x}" == TRACE
    assert given(called)["gen_ai.provider.name"] == "anthropic"
    assert given(called)["gen_ai.request.stream"] is True
    assert given(called)["gen_ai.response.finish_reasons"] == ("stop",)
    assert "gen_ai.conversation.compacted" not in given(called)
    check_names(told)


def test_what_fails_is_told_by_its_kind(gateway: Callable[..., Any], told: Told) -> None:
    setup = gateway(Refusal(status=529, words=CANARY), Break(how="cut", after=2), "x", window=900)
    for stream in (False, True):
        with httpx2.Client(base_url=setup.url, timeout=600) as client, suppress(httpx2.HTTPError):
            client.post("/v1/chat/completions", json={"model": "m", "messages": [user(CANARY)], "stream": stream})
    until(lambda: len(told.named("POST")) == 2)
    kinds = [given(span).get("error.type") for span in told.named("POST")]
    assert all(kinds)
    check_names(told)


HOSTILE = [
    b"x" * 20_000,
    b"\xff\xfe",
    b"a b",
    b"\x1b[31m",
    "ŝ".encode(),
    b"",
    b"..%2f..%2f",
    b"{{7*7}}",
    b"' OR 1=1 --",
]


def raw(url: str, headers: list[tuple[bytes, bytes]], body: bytes) -> bytes:
    """What a request gets whose headers no client would send."""
    host, _, port = url.removeprefix("http://").partition(":")
    with socket.create_connection((host, int(port)), timeout=60) as line:
        lines = [
            b"POST /v1/chat/completions HTTP/1.1",
            b"host: localhost",
            b"content-type: application/json",
            b"connection: close",
        ]
        lines += [b"content-length: " + str(len(body)).encode(), *(name + b": " + value for name, value in headers)]
        line.sendall(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        got = b""
        while piece := line.recv(65536):
            got += piece
    return got


def test_hostile_ids_are_data(gateway: Callable[..., Any], told: Told) -> None:
    setup = gateway(upstream=Upstream(otherwise="Fine."))
    body = json.dumps({"model": "m", "messages": [user("hello")]}).encode()
    names = (b"x-client-request-id", b"x-request-id", b"traceparent", b"tracestate")
    for value in HOSTILE:
        got = raw(setup.url, [(name, value) for name in names], body)
        assert got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")), got[:100]
        assert b"\x1b" not in got
    # A newline in a value, and 1 MB of it, are no request at all.
    for value in (b"a\r\nx-kilburn-request: forged", b"x" * (1 << 20)):
        try:
            got = raw(setup.url, [(b"x-request-id", value)], body)
        except OSError:
            continue
        assert b"forged" not in got
        assert got.startswith((b"HTTP/1.1 200", b"HTTP/1.1 4")), got[:100]
    kept = {given(span).get("kilburn.request.client") for span in told.named("POST")}
    assert kept <= {None, "..%2f..%2f", "{{7*7}}", "a"}
    assert all(span.parent is None for span in told.named("POST"))
    assert httpx2.get(f"{setup.url}/health").json()["status"] == "ok"


class Slow(SpanExporter):
    """An exporter that waits until it is told to go on."""

    def __init__(self) -> None:
        self.go, self.exported = threading.Event(), 0

    def export(self, spans: Any) -> SpanExportResult:
        self.go.wait(60)
        self.exported += len(spans)
        raise RuntimeError(CANARY)


def test_an_exporter_that_hangs_and_fails_keeps_no_request_waiting(gateway: Callable[..., Any], told: Told) -> None:
    slow = Slow()
    told.provider.add_span_processor(SimpleSpanProcessor(slow))
    setup = gateway(upstream=Upstream(otherwise="Fine."))
    try:
        for _ in range(5):
            assert setup.chat([user("hello")])[0].choices[0].message.content == "Fine."
        assert slow.exported == 0, "all were answered before anything was exported"
    finally:
        slow.go.set()
    assert len(told.spans) >= 10
    assert slow.exported >= 10


def shipped(setup: Any, wanted: str, capsys: pytest.CaptureFixture[str]) -> Any:
    assert main(["window", "shipped", wanted, "--db", str(setup.db), "--json"]) == 0
    return json.loads(capsys.readouterr().out)["prompts"]


def test_a_request_is_followed_from_the_clients_id_to_the_pages_that_it_shipped(
    gateway: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    setup = gateway(upstream=Upstream(otherwise="Fine."), window=900, policy="fifo")
    messages: list[dict[str, Any]] = []
    ids = {}
    for turn in range(12):
        messages.append(user(f"question {turn} " + "about the parser and its tests " * 12))
        reply, headers = setup.chat(
            messages, extra_headers={"X-Client-Request-Id": f"order-{turn}", **(FROM if turn == 9 else {})}
        )
        ids[turn] = headers["x-kilburn-request"]
        messages.append({"role": "assistant", "content": reply.choices[0].message.content})
    capsys.readouterr()
    for wanted in ("order-9", ids[9], TRACE):
        [found] = shipped(setup, wanted, capsys)
        assert found["session"] == headers["x-kilburn-session"]
        assert found["request"] == {"id": ids[9], "client": "order-9", "trace": TRACE}
        sent = json.dumps(setup.upstream.sent[9].body["messages"])
        with setup.store() as store:
            session = store.session(found["session"])
            shown, gone = ([session.recall(each) for each in found[name]] for name in ("pages", "out"))
        said = [text for recalled in shown for text in recalled.parts]
        assert all(text in sent for text in said)
        assert sum("question" in text for text in said) == sent.count("question"), "and none is missing"
        left = [text for recalled in gone for text in recalled.parts if "question" in text]
        assert left
        assert not any(text in sent for text in left)
    assert shipped(setup, "order-99", capsys) == []


def test_the_same_id_of_two_clients_finds_both_and_never_another_tenants(
    gateway: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    setup = gateway(upstream=Upstream(otherwise="Fine."))
    for text in ("one", "two"):
        setup.chat([user(text)], extra_headers={"X-Request-Id": "same"})
    capsys.readouterr()
    assert len({found["session"] for found in shipped(setup, "same", capsys)}) == 2
    assert main(["window", "shipped", "same", "--db", str(setup.db), "--tenant", "other", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["prompts"] == []


def test_what_another_program_wrote_of_a_request_stops_nobody(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    with kilburn.open(tmp_path / "a.db", window=500, tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        session.append(user("hello"))
        odd: Any
        for odd in ("words", ["a"], {"id": ["a"], "x": "a"}, {"id": "a"}):
            session.ledger.record(Act.SHIP, request=odd, turn="no", again=0, window=1)  # type: ignore[arg-type]
    assert main(["window", "shipped", "a", "--db", str(tmp_path / "a.db"), "--json"]) == 0
    assert [one["pages"] for one in json.loads(capsys.readouterr().out)["prompts"]] == [["p1"], ["p1"]]


def test_every_answer_has_the_id_of_its_request(gateway: Callable[..., Any]) -> None:
    setup = gateway(upstream=Upstream(otherwise="Fine."))
    with httpx2.Client(base_url=setup.url, timeout=600) as client:
        answers = [
            client.get("/health"),
            client.get("/nothing"),
            client.post("/v1/chat/completions", content=b"{"),
            client.get("/v1/models"),
        ]
    ids = [answer.headers.get_list("x-kilburn-request") for answer in answers]
    assert all(len(each) == 1 and len(each[0]) == 16 for each in ids)
    assert len({each[0] for each in ids}) == 4

"""The messages endpoint through the official SDK, against a real HTTP server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kilburn.errors import Overlong, RateLimited, Refused, Unavailable
from kilburn.message import Kind
from kilburn.model import Delta, Reply, Request, Tokens, ToolSpec, complete
from kilburn.models.messages import Messages
from kilburn.models.retry import Retry
from kilburn.testing.models import check_model
from kilburn.wire import messages as wire
from models.loopback import CUT, STALL, Answer, Loopback, loopback

HELLO = Request(messages=[{"role": "user", "content": "hello"}], max_tokens=9)
ONCE = Retry(attempts=1)


def event(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **more})}\n\n".encode()


def start(**usage: int) -> bytes:
    message = {"id": "msg_1", "type": "message", "role": "assistant", "model": "m", "content": [], "stop_reason": None}
    return event("message_start", message={**message, "usage": {"input_tokens": 10, "output_tokens": 1, **usage}})


def block(index: int, content: dict[str, Any], *deltas: dict[str, Any]) -> bytes:
    pieces = [event("content_block_delta", index=index, delta=delta) for delta in deltas]
    first, last = event("content_block_start", index=index, content_block=content), event("content_block_stop", index=index)
    return b"".join([first, *pieces, last])


def text(index: int, *pieces: str) -> bytes:
    return block(index, {"type": "text", "text": ""}, *({"type": "text_delta", "text": piece} for piece in pieces))


def end(reason: str = "end_turn", tokens: int = 2) -> bytes:
    delta = event("message_delta", delta={"stop_reason": reason, "stop_sequence": None}, usage={"output_tokens": tokens})
    return delta + event("message_stop")


def told(*events: bytes | str) -> Answer:
    return Answer(events=events)


def plain() -> Answer:
    return told(start(), event("ping"), text(0, "Hel", "lo"), end())


def open_messages(server: Loopback, **more: Any) -> Messages:
    return Messages("m", server.url, "key", **{"retry": ONCE, **more})


def ask(*events: bytes | str) -> Reply:
    with loopback(told(*events)) as server, open_messages(server) as model:
        return complete(model, HELLO)


def test_contract() -> None:
    thinking = block(0, {"type": "thinking", "thinking": ""}, {"type": "thinking_delta", "thinking": "hm"})
    with loopback(told(start(), thinking, text(1, "Red", "."), end()), forever=True) as server:
        check_model(lambda: open_messages(server))


def test_reply_streams_and_counts() -> None:
    usage = {"cache_read_input_tokens": 300, "cache_creation_input_tokens": 50}
    with loopback(told(start(**usage), text(0, "Hel", "lo"), end("max_tokens", 7))) as server:
        with open_messages(server) as model:
            pieces = list(model.stream(HELLO))
        asked = server.asked[0]
    assert pieces[:-1] == [Delta("Hel"), Delta("lo")]
    reply = pieces[-1]
    assert isinstance(reply, Reply)
    assert (reply.text, reply.finish) == ("Hello", "length")
    assert reply.usage == Tokens(prompt=360, reply=7, cached=300, written=50)
    assert asked.path == "/v1/messages"
    assert "key" in (asked.headers.get("x-api-key"), asked.headers.get("authorization", "").removeprefix("Bearer "))
    assert (asked.body["max_tokens"], asked.body["stream"]) == (9, True)


def test_request_is_sent_whole() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    request = Request(
        messages=HELLO.messages,
        system="Be brief.",
        tools=(ToolSpec(name="look", description="Looks.", parameters=schema),),
        temperature=0.0,
        schema=schema,
        options={"thinking": {"type": "enabled", "budget_tokens": 1024}},
    )
    with loopback(plain()) as server, open_messages(server) as model:
        complete(model, request)
        body = server.asked[0].body
    assert body["system"] == "Be brief."
    assert body["tools"] == [{"name": "look", "description": "Looks.", "input_schema": schema}]
    assert body["output_config"] == {"format": {"type": "json_schema", "schema": schema}}
    assert (body["temperature"], body["thinking"]["budget_tokens"]) == (0.0, 1024)


def test_cache_marks_system_and_last_two_messages_and_leaves_the_request_alone() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]
    request = Request(messages=[{"role": "user", "content": "first"}, {"role": "user", "content": blocks}], system="Be brief.")
    with loopback(plain()) as server, open_messages(server, cache=True) as model:
        complete(model, request)
        body = server.asked[0].body
    mark = {"type": "ephemeral"}
    assert body["system"] == [{"type": "text", "text": "Be brief.", "cache_control": mark}]
    assert body["messages"][0] == {"role": "user", "content": [{"type": "text", "text": "first", "cache_control": mark}]}
    assert [part.get("cache_control") for part in body["messages"][1]["content"]] == [mark, None]
    assert blocks == [{"type": "text", "text": "a"}, {"type": "text", "text": ""}]


def test_calls_keep_the_arguments_as_written() -> None:
    use = {"type": "tool_use", "name": "look", "input": {}}
    pieces = ({"type": "input_json_delta", "partial_json": piece} for piece in ('{"a":  ', "1}"))
    first = block(1, {**use, "id": "t1"}, *pieces)
    reply = ask(start(), text(0, "I look."), first, block(2, {**use, "id": "t2"}), end("tool_use"))
    assert reply.finish == "calls"
    assert [(part.call, part.name, part.text) for part in reply.calls] == [("t1", "look", '{"a":  1}'), ("t2", "look", "{}")]


def test_thinking_keeps_its_signature() -> None:
    deltas = (
        {"type": "thinking_delta", "thinking": "think"},
        {"type": "thinking_delta", "thinking": "ing"},
        {"type": "signature_delta", "signature": "c2ln"},
    )
    thinking = block(0, {"type": "thinking", "thinking": "", "signature": ""}, *deltas)
    hidden = block(1, {"type": "redacted_thinking", "data": "eHg="})
    reply = ask(start(), thinking, hidden, text(2, "42"), end())
    assert [part.kind for part in reply.message.parts] == [Kind.REASONING, Kind.REASONING, Kind.TEXT]
    assert wire.write([reply.message])["content"] == [
        {"type": "thinking", "thinking": "thinking", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "eHg="},
        {"type": "text", "text": "42"},
    ]


@pytest.mark.parametrize(("reason", "finish"), [("refusal", "refused"), ("stop_sequence", "stop"), ("tomorrow's reason", "stop")])
def test_ends_are_named(reason: str, finish: str) -> None:
    assert ask(start(), text(0, "ok"), end(reason)).finish == finish


def test_empty_reply_is_one_empty_text() -> None:
    assert [(part.kind, part.text) for part in ask(start(), end()).message.parts] == [(Kind.TEXT, "")]


def failure(status: int, kind: str, message: str, **headers: str) -> Answer:
    return Answer(status, headers, {"type": "error", "error": {"type": kind, "message": message}})


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (failure(400, "invalid_request_error", "prompt is too long: 200001 tokens > 200000 maximum"), Overlong),
        (failure(413, "request_too_large", "Request exceeds the maximum allowed number of bytes"), Overlong),
        (failure(400, "invalid_request_error", "max_tokens: must be positive"), Refused),
        (failure(401, "authentication_error", "invalid x-api-key"), Refused),
        (failure(529, "overloaded_error", "Overloaded"), Unavailable),
        (failure(500, "api_error", "Internal server error"), Unavailable),
        (told(start(), event("error", error={"type": "overloaded_error", "message": "Overloaded"})), Unavailable),
        (told(start(), text(0, "Hel"), CUT), Unavailable),
        (told(start(), text(0, "Hel")), Unavailable),
        (told(start(), b"event: content_block_delta\ndata: {broken\n\n"), Unavailable),
        (told(event("content_block_delta", index=3, delta={"type": "text_delta", "text": "x"})), Unavailable),
    ],
)
def test_errors_are_typed(answer: Answer, kind: type[Exception]) -> None:
    with loopback(answer) as server, open_messages(server) as model, pytest.raises(kind):
        complete(model, HELLO)


def test_busy_provider_is_waited_for() -> None:
    slept: list[float] = []
    busy, limited = (
        failure(529, "overloaded_error", "Overloaded"),
        failure(429, "rate_limit_error", "slow", **{"retry-after": "3"}),
    )
    with (
        loopback(busy, limited, plain()) as server,
        open_messages(server, retry=Retry(sleep=slept.append, dice=lambda: 0.5)) as model,
    ):
        assert complete(model, HELLO).text == "Hello"
    assert slept == [0.25, 3.0]


def test_rate_limit_tells_how_long() -> None:
    busy = failure(429, "rate_limit_error", "slow", **{"retry-after": "90"})
    with loopback(busy) as server, open_messages(server) as model, pytest.raises(RateLimited) as caught:
        complete(model, HELLO)
    assert caught.value.retry_after == 90.0


@pytest.mark.parametrize("before", [(), (start(), text(0, "Hel"))])
def test_time_is_kept(before: tuple[bytes, ...]) -> None:
    with loopback(told(*before, STALL)) as server, open_messages(server) as model:
        with pytest.raises(Unavailable, match="in time"):
            complete(model, Request(messages=HELLO.messages, timeout=0.25))
        # On a busy machine the time can be over before the server was asked anything.
        assert not server.asked or server.gone.wait(600)


def test_closing_a_stream_hangs_up() -> None:
    with loopback(told(start(), text(0, "Hel"), STALL)) as server, open_messages(server) as model:
        stream = model.stream(HELLO)
        assert next(stream) == Delta("Hel")
        stream.close()  # type: ignore[attr-defined]
        assert server.gone.wait(600)


def test_nobody_listening_is_unavailable() -> None:
    with loopback() as server:
        url = server.url
    with Messages("m", url, retry=ONCE) as model, pytest.raises(Unavailable, match="is anything listening"):
        complete(model, HELLO)


def test_key_is_asked_for_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.delenv("ANTHROPIC_AUTH_TOKEN", raising=False)
    with Messages("m") as model, pytest.raises(Refused, match="ANTHROPIC_API_KEY"):
        complete(model, HELLO)
    with loopback(plain()) as server, Messages("m", server.url) as model:
        assert complete(model, HELLO).text == "Hello"


@pytest.mark.parametrize("lie", ["twelve", [1], 12.5, -30_000, 2**70], ids=str)
@pytest.mark.parametrize(
    "key", ["input_tokens", "output_tokens", "cache_read_input_tokens", "cache_creation_input_tokens", "iterations"]
)
def test_a_usage_that_cannot_be_is_unknown(key: str, lie: Any) -> None:
    stop = {"delta": {"stop_reason": "end_turn", "stop_sequence": None}}
    last = event("message_delta", **stop, usage={"output_tokens": 2, key: lie}) + event("message_stop")
    reply = ask(start(), text(0, "Hello"), last)
    assert (reply.text, reply.usage) == ("Hello", None)


@pytest.mark.parametrize("usage", ["twelve", [1], 7], ids=str)
def test_a_usage_of_another_shape_is_unknown(usage: Any) -> None:
    last = event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage) + event("message_stop")
    reply = ask(start(), text(0, "Hello"), last)
    assert (reply.text, reply.usage) == ("Hello", None)


@pytest.mark.parametrize("count", ["many", -7, 2**70], ids=str)
def test_a_compaction_of_an_unknown_cost_loses_no_reply(count: Any) -> None:
    iterations = [{"type": "compaction", "input_tokens": count, "output_tokens": 1}]
    usage = {"output_tokens": 2, "iterations": iterations}
    last = event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage) + event("message_stop")
    reply = ask(start(), text(0, "Hello"), last)
    assert (reply.text, reply.usage) == ("Hello", None)


def test_nulls_at_the_end_leave_what_the_start_said() -> None:
    usage = {"output_tokens": 2, "input_tokens": None, "cache_read_input_tokens": None}
    last = event("message_delta", delta={"stop_reason": "end_turn"}, usage=usage) + event("message_stop")
    assert ask(start(), text(0, "Hello"), last).usage == Tokens(prompt=10, reply=2)


def test_a_character_cut_in_two_is_joined() -> None:
    pieces = text(0, "a\ud83d", "\ude00b", "\ud83d")
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    halves = [{"type": "input_json_delta", "partial_json": part} for part in ('{"a":"\ud83d', '\ude00\ud83d"}')]
    with loopback(told(start(), pieces, block(1, call, *halves), end("tool_use"))) as server, open_messages(server) as model:
        *deltas, reply = model.stream(HELLO)
    assert deltas == [Delta("a"), Delta("😀b"), Delta("\ufffd")]
    assert isinstance(reply, Reply)
    assert reply.text == "a😀b\ufffd"
    assert [part.text for part in reply.calls] == ['{"a":"😀\ufffd"}']

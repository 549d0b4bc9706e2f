"""The chat endpoint through the official SDK, against a real HTTP server and against llama.cpp's own."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from typing import Any

import pytest

import kilburn
from kilburn.agents.loop import Agent, Limits
from kilburn.errors import Overlong, RateLimited, Refused, Unavailable
from kilburn.message import Kind
from kilburn.model import Delta, Reply, Request, Tokens, ToolSpec, complete
from kilburn.models.chat import Chat
from kilburn.models.retry import Retry
from kilburn.testing.models import check_model
from models.loopback import CUT, STALL, Answer, Loopback, loopback

HELLO = Request(messages=[{"role": "user", "content": "hello"}], max_tokens=9)
LOOK = ToolSpec(name="look", description="Looks.", parameters={"type": "object", "properties": {}})
ONCE = Retry(attempts=1)


def event(delta: dict[str, Any] | None = None, finish: str | None = None, **more: Any) -> bytes:
    choices = [] if delta is None else [{"index": 0, "delta": delta, "finish_reason": finish}]
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices, **more}
    return b"data: " + json.dumps(chunk).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"
USAGE = {"prompt_tokens": 40, "completion_tokens": 2, "total_tokens": 42, "prompt_tokens_details": {"cached_tokens": 30}}


def told(*events: bytes | str) -> Answer:
    return Answer(events=events)


def plain() -> Answer:
    return told(event({"role": "assistant", "content": ""}), event({"content": "Hel"}), event({"content": "lo"}, "stop"), DONE)


def call(index: int | None, arguments: str, name: str | None = None, call_id: str | None = None) -> dict[str, Any]:
    piece: dict[str, Any] = {"function": {"arguments": arguments}}
    if index is not None:
        piece["index"] = index
    if name:
        piece["function"]["name"] = name
    if call_id:
        piece |= {"id": call_id, "type": "function"}
    return {"tool_calls": [piece]}


def open_chat(server: Loopback, **more: Any) -> Chat:
    return Chat("m", f"{server.url}/v1", "key", **{"retry": ONCE, **more})


def ask(*events: bytes | str, request: Request = HELLO) -> Reply:
    with loopback(told(*events)) as server, open_chat(server) as model:
        return complete(model, request)


def test_contract() -> None:
    usage = {"prompt_tokens": 4, "completion_tokens": 2, "total_tokens": 6}
    said = (event({"reasoning_content": "hm"}), event({"content": "Red"}), event({"content": "."}, "stop"))
    answer = told(*said, event(usage=usage), DONE)
    with loopback(answer, forever=True) as server:
        check_model(lambda: open_chat(server))


def test_reply_streams_and_counts() -> None:
    with loopback(told(event({"content": "Hel"}), event({"content": "lo"}, "length"), event(usage=USAGE), DONE)) as server:
        with open_chat(server) as model:
            pieces = list(model.stream(HELLO))
        asked = server.asked[0]
    assert pieces[:-1] == [Delta("Hel"), Delta("lo")]
    reply = pieces[-1]
    assert isinstance(reply, Reply)
    assert (reply.text, reply.finish, reply.usage) == ("Hello", "length", Tokens(prompt=40, reply=2, cached=30))
    assert asked.path == "/v1/chat/completions"
    assert asked.headers["authorization"] == "Bearer key"
    assert asked.body["max_tokens"] == 9
    assert asked.body["stream_options"] == {"include_usage": True}


def test_request_is_sent_whole() -> None:
    schema = {"type": "object", "properties": {"n": {"type": "integer"}}}
    request = Request(
        messages=HELLO.messages, tools=(LOOK,), temperature=0.0, seed=7, schema=schema, options={"top_k": 3, "max_tokens": 5}
    )
    with loopback(plain()) as server, open_chat(server) as model:
        complete(model, request)
        body = server.asked[0].body
    assert body["tools"][0]["function"] == {"name": "look", "description": "Looks.", "parameters": LOOK.parameters}
    assert (body["temperature"], body["seed"], body["top_k"], body["max_tokens"]) == (0.0, 7, 3, 5)
    assert body["response_format"]["json_schema"]["schema"] == schema


def test_tool_calls_are_assembled() -> None:
    reply = ask(
        event({"content": "I look."}),
        event(call(0, "", "look", "c1")),
        event(call(0, '{"a": ')),
        event(call(1, '{"b":', "look", "c2")),
        event(call(0, " 1}")),
        event(call(1, "2}")),
        event({}, "tool_calls"),
        DONE,
    )
    assert reply.finish == "calls"
    assert [(part.call, part.name, part.text) for part in reply.calls] == [("c1", "look", '{"a":  1}'), ("c2", "look", '{"b":2}')]
    assert reply.text == "I look."


@pytest.mark.parametrize("index", [None, 0])
def test_tool_calls_without_numbers_are_told_apart_by_id(index: int | None) -> None:
    pieces = (call(index, "{", "look", "c1"), call(index, "}"), call(index, "{}", "find", "c2"))
    reply = ask(*map(event, pieces), event({}, "stop"), DONE)
    assert [(part.call, part.name, part.text) for part in reply.calls] == [("c1", "look", "{}"), ("c2", "find", "{}")]
    assert reply.finish == "calls"


def test_calls_without_ids_get_one_each() -> None:
    reply = ask(event(call(0, "{}", "look")), event(call(1, "{}", "look")), event({}, "tool_calls"), DONE)
    ids = [part.call for part in reply.calls]
    assert len(set(ids)) == 2
    assert all(ids)


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning"])
def test_reasoning_is_kept_apart(key: str) -> None:
    answer = told(event({key: "think"}), event({key: "ing"}), event({"content": "42"}, "stop"), DONE)
    with loopback(answer) as server, open_chat(server) as model:
        pieces = list(model.stream(HELLO))
    assert pieces[:3] == [Delta("think", True), Delta("ing", True), Delta("42")]
    assert isinstance(pieces[3], Reply)
    assert [(part.kind, part.text) for part in pieces[3].message.parts] == [(Kind.REASONING, "thinking"), (Kind.TEXT, "42")]


def test_reasoning_under_both_names_is_kept_once() -> None:
    reply = ask(event({"reasoning": "hm", "reasoning_content": "hm"}), event({"content": "ok"}, "stop"), DONE)
    assert [part.text for part in reply.message.parts] == ["hm", "ok"]


def test_refusals_are_marked() -> None:
    assert ask(event({"refusal": "I will not."}, "stop"), DONE).finish == "refused"
    assert ask(event({"content": "no"}, "content_filter"), DONE).finish == "refused"


def test_empty_reply_is_one_empty_text() -> None:
    reply = ask(event({"role": "assistant", "content": ""}), event({}, "stop"), DONE)
    assert [(part.kind, part.text) for part in reply.message.parts] == [(Kind.TEXT, "")]


def test_rate_limit_is_waited_for() -> None:
    slept: list[float] = []
    busy = Answer(429, {"retry-after": "2"}, {"error": {"message": "slow down"}})
    with loopback(busy, Answer(500, body={"error": {"message": "oops"}}), plain()) as server:
        with open_chat(server, retry=Retry(sleep=slept.append, dice=lambda: 0.5)) as model:
            assert complete(model, HELLO).text == "Hello"
        assert len(server.asked) == 3
    assert slept == [2.0, 0.5]


def test_rate_limit_tells_how_long() -> None:
    busy = Answer(429, {"retry-after": "120"}, {"error": {"message": "slow down"}})
    with loopback(busy) as server, open_chat(server) as model, pytest.raises(RateLimited) as caught:
        complete(model, HELLO)
    assert caught.value.retry_after == 120.0


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, {"error": {"message": "Too long.", "code": "context_length_exceeded"}}, Overlong),
        (400, {"error": {"message": "no such parameter"}}, Refused),
        (401, {"error": {"message": "bad key"}}, Refused),
        (403, b"<html>forbidden</html>", Refused),
        (503, b"", Unavailable),
    ],
)
def test_errors_are_typed_and_not_repeated(status: int, body: Any, kind: type[Exception]) -> None:
    with loopback(Answer(status, body=body)) as server, open_chat(server) as model:
        with pytest.raises(kind):
            complete(model, HELLO)
        assert len(server.asked) == 1


def test_error_inside_the_stream_is_typed() -> None:
    error = {"error": {"message": "Context size has been exceeded.", "type": "exceed_context_size_error", "code": 400}}
    with pytest.raises(Overlong):
        ask(event({"content": "Hel"}), b"data: " + json.dumps(error).encode() + b"\n\n")


@pytest.mark.parametrize("end", [(CUT,), (), (DONE,), (b"data: {not json}\n\n",)])
def test_broken_stream_is_unavailable_and_not_repeated(end: tuple[bytes | str, ...]) -> None:
    with loopback(told(event({"content": "Hel"}), *end)) as server, open_chat(server, retry=Retry()) as model:
        got: list[Delta | Reply] = []
        with pytest.raises(Unavailable):
            got.extend(model.stream(HELLO))
        assert got == [Delta("Hel")]
        assert len(server.asked) == 1


def test_answer_that_is_no_stream_is_unavailable() -> None:
    with loopback(Answer(body={"hello": "world"})) as server, open_chat(server) as model, pytest.raises(Unavailable):
        complete(model, HELLO)


def test_cut_before_the_first_piece_is_tried_again() -> None:
    with loopback(told(CUT), plain()) as server, open_chat(server, retry=Retry(sleep=lambda _: None)) as model:
        assert complete(model, HELLO).text == "Hello"


def trickling(client_has_gone: threading.Event) -> Iterator[bytes]:
    """A sign of life again and again for as long as the client stays, a minute at most."""
    for _ in range(3000):
        if client_has_gone.wait(0.02):
            return
        yield b": still here\n\n"


@pytest.mark.parametrize("trickle", [False, True])
def test_time_is_kept_with_a_silent_and_with_a_trickling_server(trickle: bool) -> None:
    with loopback(told(event({"content": "Hel"}), STALL)) as server, open_chat(server) as model:
        if trickle:
            server.script[0] = Answer(events=trickling(server.gone))
        with pytest.raises(Unavailable, match="in time"):
            complete(model, Request(messages=HELLO.messages, timeout=0.25))
        # On a busy machine the time can be over before the server was asked anything.
        assert not server.asked or server.gone.wait(600)


def test_closing_a_stream_hangs_up() -> None:
    with loopback(told(event({"content": "Hel"}), STALL), plain()) as server, open_chat(server) as model:
        stream = model.stream(HELLO)
        assert next(stream) == Delta("Hel")
        stream.close()  # type: ignore[attr-defined]
        assert server.gone.wait(600)
        assert complete(model, HELLO).text == "Hello"


def test_nobody_listening_is_unavailable() -> None:
    with loopback() as server:
        url = server.url
    with Chat("m", url, retry=ONCE) as model, pytest.raises(Unavailable, match="is anything listening"):
        complete(model, HELLO)


def test_key_is_asked_for_where_one_is_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    with pytest.raises(Refused, match="OPENAI_API_KEY"):
        Chat("m")
    with loopback(plain()) as server, Chat("m", server.url) as model:
        assert complete(model, HELLO).text == "Hello"


LIES: list[Any] = ["twelve", [1], 12.5, None, -30_000, 2**70, {}]


@pytest.mark.parametrize("lie", LIES, ids=str)
@pytest.mark.parametrize("key", ["prompt_tokens", "completion_tokens"])
def test_a_usage_that_cannot_be_is_unknown(key: str, lie: Any) -> None:
    reply = ask(event({"content": "Hello"}, "stop"), event(usage={**USAGE, key: lie}), DONE)
    assert (reply.text, reply.usage) == ("Hello", None)


@pytest.mark.parametrize(
    "usage",
    [
        "twelve",
        [1],
        7,
        {**USAGE, "prompt_tokens_details": "many"},
        {**USAGE, "prompt_tokens_details": {"cached_tokens": "thirty"}},
        {**USAGE, "prompt_tokens_details": {"cached_tokens": -1}},
        {**USAGE, "prompt_tokens_details": {"cached_tokens": 41}},
    ],
    ids=str,
)
def test_a_usage_of_another_shape_is_unknown(usage: Any) -> None:
    reply = ask(event({"content": "Hello"}, "stop"), event(usage=usage), DONE)
    assert (reply.text, reply.usage) == ("Hello", None)


@pytest.mark.parametrize("details", [None, {}, {"cached_tokens": None}], ids=str)
def test_a_usage_that_says_nothing_of_a_cache_is_known(details: Any) -> None:
    reply = ask(event({"content": "Hello"}, "stop"), event(usage={**USAGE, "prompt_tokens_details": details}), DONE)
    assert reply.usage == Tokens(prompt=40, reply=2)


@pytest.mark.parametrize("usage", [{**USAGE, "prompt_tokens": "twelve"}, {**USAGE, "prompt_tokens": -30_000}, "many"], ids=str)
def test_an_agent_keeps_its_reply_and_its_limit_whatever_the_usage_says(usage: Any) -> None:
    said = told(event(call(0, "{}", "look", "c1")), event({}, "tool_calls"), event(usage=usage), DONE)

    def look() -> str:
        """Looks."""
        return "a tree"

    session = kilburn.open(":memory:", window=4000, policy="fifo", tokenizer="chars/4").session("a")
    with loopback(said, forever=True) as server, open_chat(server) as model:
        outcome = Agent(model, [look], session, limits=Limits(steps=20, tokens=2000)).run("go")
    assert outcome.finish == "tokens"
    assert outcome.tokens >= 2000
    assert session.contents.messages()[-1]["role"] == "tool"


HIGH, LOW = "\ud83d", "\ude00"


@pytest.mark.parametrize(
    ("pieces", "told_as"),
    [
        (("a" + HIGH, LOW + "b"), ["a", "😀b"]),
        ((HIGH, "", LOW), ["😀"]),
        ((HIGH, "b"), ["\ufffdb"]),
        (("a", LOW), ["a", "\ufffd"]),
        (("a" + HIGH,), ["a", "\ufffd"]),
        ((HIGH, HIGH, LOW), ["\ufffd", "😀"]),
    ],
    ids=ascii,
)
@pytest.mark.parametrize("key", ["content", "reasoning_content"])
def test_a_character_cut_in_two_is_joined(key: str, pieces: tuple[str, ...], told_as: list[str]) -> None:
    events = [event({key: piece}) for piece in pieces]
    with loopback(told(*events, event({}, "stop"), DONE)) as server, open_chat(server) as model:
        *deltas, reply = model.stream(HELLO)
    assert deltas == [Delta(text, key != "content") for text in told_as]
    assert isinstance(reply, Reply)
    assert "".join(part.text for part in reply.message.parts) == "".join(told_as)


def test_arguments_cut_in_a_character_are_joined() -> None:
    pieces = (call(0, '{"a":"' + HIGH, "look", "c1"), call(0, LOW + HIGH + '"}'))
    reply = ask(*map(event, pieces), event({}, "tool_calls"), DONE)
    assert [part.text for part in reply.calls] == ['{"a":"😀\ufffd"}']

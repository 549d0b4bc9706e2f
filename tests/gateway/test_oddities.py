"""Odd but usable: what real providers answer and real clients ask beside their references goes through, and is read as far as it
can be."""

from __future__ import annotations

import gzip
import itertools
import json
import random
import re
from contextlib import suppress
from typing import Any

import httpx2
import pytest

from gateway.test_failures import BODIES, FORMS, far, post, talk
from kilburn.models.scripted import Scripted

__all__ = ["far"]

Json = dict[str, Any]

JSON, EVENTS = "application/json", "text/event-stream"


def event(said: Any, name: str = "") -> bytes:
    data = said if isinstance(said, bytes) else json.dumps(said).encode()
    return (f"event: {name}\n".encode() if name else b"") + b"data: " + data + b"\n\n"


def chunk(delta: Any = None, finish: str | None = None, **more: Any) -> bytes:
    return event({"id": "c", "choices": [{"index": 0, "delta": delta or {}, "finish_reason": finish}], **more})


def call(**more: Any) -> Json:
    return {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path": "a"}'}, **more}


def counting(usage: str) -> bytes:
    return said(FINE).replace(b'"id": "c"', b'"usage": ' + usage.encode())


def said(message: Any, **more: Any) -> bytes:
    return json.dumps({"id": "c", "choices": [{"index": 0, "message": message, **more}]}).encode()


DONE = b"data: [DONE]\n\n"
FINE = {"role": "assistant", "content": "Fine."}

BOTH = [{"function": {"name": "read", "arguments": {"a": 1}}}, {"function": {"name": "list"}}]

# What is sent, and what of it is kept: a text, names of calls, or None for nothing.
CHAT: dict[str, tuple[str, bytes, Any]] = {
    "no finish reason": (JSON, said(FINE), "Fine."),
    "no role": (JSON, said({"content": "Fine."}, finish_reason="stop"), "Fine."),
    "content in blocks": (JSON, said({"role": "assistant", "content": [{"type": "text", "text": "Fine."}]}), "Fine."),
    "content null": (JSON, said({"role": "assistant", "content": None}, finish_reason="stop"), ""),
    "no content": (JSON, said({"role": "assistant"}, finish_reason="stop"), ""),
    "content a number": (JSON, said({"role": "assistant", "content": 5}, finish_reason="stop"), ""),
    "refusal": (JSON, said({"role": "assistant", "content": None, "refusal": "Fine."}, finish_reason="stop"), "Fine."),
    "audio": (JSON, said({"role": "assistant", "content": None, "audio": {"id": "a1", "data": "AAAA"}}), ""),
    "arguments as an object": (
        JSON, said({"content": None, "tool_calls": [call(function={"name": "read", "arguments": {"path": "a"}})]}), ["read"]),
    "arguments null": (JSON, said({"tool_calls": [call(function={"name": "read", "arguments": None})]}), ["read"]),
    "no id": (JSON, said({"tool_calls": [{"function": {"name": "read", "arguments": "{}"}}] * 2}), ["read", "read"]),
    "one id twice": (JSON, said({"tool_calls": [call(), call()]}, finish_reason="tool_calls"), ["read", "read"]),
    "calls no list": (JSON, said({"tool_calls": call()}, finish_reason="tool_calls"), ["read"]),
    "calls null": (JSON, said({**FINE, "tool_calls": None}), "Fine."),
    "usage null": (JSON, counting("null"), "Fine."),
    "usage in floats": (JSON, counting('{"prompt_tokens": 9.0, "completion_tokens": 1.0}'), "Fine."),
    "usage a number": (JSON, counting("3"), "Fine."),
    "a name that is none": (JSON, said({"tool_calls": [call(function={"name": {}, "arguments": "{}"})]}), ["{}"]),
    "a function that is none": (JSON, said({"tool_calls": [call(function="read")]}), ["_"]),
    "a finish reason that is none": (JSON, said(FINE, finish_reason={}), "Fine."),
    "no choices": (JSON, b'{"choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 0}}', None),
    "an error with 200": (JSON, b'{"error": {"message": "Busy.", "code": 500}}', None),
    "html": ("text/html", b"<html>Bad gateway</html>", None),
    "no bytes": (JSON, b"", None),
    "a mark before": (JSON, b"\xef\xbb\xbf" + said(FINE), "Fine."),
    "blanks before": (JSON, b"\r\n\n  " + said(FINE) + b"\n\n", "Fine."),
    "events": (EVENTS, chunk({"content": "Fi"}) + chunk({"content": "ne."}) + chunk({}, "stop") + DONE, "Fine."),
    "events without [DONE]": (EVENTS, chunk({"content": "Fine."}) + chunk({}, "stop"), "Fine."),
    "events without a finish": (EVENTS, chunk({"content": "Fine."}) + DONE, "Fine."),
    "events without an end": (EVENTS, chunk({"content": "Fine."}), None),
    "events with an empty finish": (EVENTS, chunk({"content": "Fine."}) + chunk({}, "") + DONE, "Fine."),
    "a text that ends": (EVENTS, chunk({"content": "Fi"}) + chunk({"content": "ne."}, "stop") + DONE, "Fine."),
    "[DONE] alone": (EVENTS, DONE, None),
    "events named JSON": (JSON, chunk({"content": "Fine."}) + DONE, "Fine."),
    "lines of all kinds": (
        EVENTS,
        b": ping\r\n\r\nid: 7\r\nretry: 10\r\nevent: x\r\n"
        + chunk({"content": "Fine."}).replace(b"\n", b"\r\n") + b": end\n\n" + DONE,
        "Fine.",
    ),
    "a mark before events": (EVENTS, b"\xef\xbb\xbf" + chunk({"content": "Fine."}) + DONE, "Fine."),
    "data in lines": (EVENTS, chunk({"content": "Fine."}).replace(b", ", b",\ndata: ") + DONE, "Fine."),
    "no blank line at the end": (EVENTS, chunk({"content": "Fine."}) + b"data: [DONE]", "Fine."),
    "no UTF-8": (EVENTS, chunk({"content": "Fine."}) + b'data: {"choices": [{"delta": {"content": "\xff"}}]}\n\n' + DONE, None),
    "no JSON": (EVENTS, chunk({"content": "Fi"}) + b"data: {torn\n\n" + chunk({"content": "ne."}, "stop") + DONE, None),
    "message for delta": (EVENTS, chunk({}).replace(b'"delta": {}', b'"message": {"content": "Fine."}') + DONE, "Fine."),
    "usage at the end": (
        EVENTS, chunk({"content": "Fine."}, "stop") + event({"choices": [], "usage": {"prompt_tokens": 1.5}}) + DONE, "Fine."),
    "calls without an index": (
        EVENTS,
        chunk({"tool_calls": [{"id": "c1", "function": {"name": "read", "arguments": '{"a"'}}]})
        + chunk({"tool_calls": [{"function": {"arguments": ": 1}"}}]})
        + chunk({"tool_calls": [{"id": "c2", "function": {"name": "list", "arguments": "{}"}}]}, "tool_calls") + DONE,
        ["read", "list"],
    ),
    "calls with neither index nor id": (
        EVENTS,
        chunk({"tool_calls": BOTH}) + DONE,
        ["read", "list"],
    ),
    "an id that comes later": (
        EVENTS,
        chunk({"tool_calls": [{"index": 0, "function": {"name": "read", "arguments": ""}}]})
        + chunk({"tool_calls": [{"index": 0, "id": "c1", "function": {"arguments": "{}"}}]}, "tool_calls") + DONE,
        ["read"],
    ),
    "an error in the middle": (EVENTS, chunk({"content": "Fi"}) + event({"error": {"message": "Busy."}}) + DONE, None),
    "an error of null": (EVENTS, chunk({"content": "Fine."}, error=None) + DONE, "Fine."),
}  # fmt: skip


def begun(**more: Any) -> bytes:
    message = {"id": "m", "type": "message", "role": "assistant", "content": [], "usage": {"input_tokens": 1, "output_tokens": 0}}
    return event({"type": "message_start", "message": {**message, **more}}, "message_start")


def of(index: int | None, text: str = "Fine.") -> bytes:
    at = {} if index is None else {"index": index}
    start = {"type": "content_block_start", **at, "content_block": {"type": "text", "text": ""}}
    delta = {"type": "content_block_delta", **at, "delta": {"type": "text_delta", "text": text}}
    return (
        event(start, start["type"])
        + event(delta, delta["type"])
        + event({"type": "content_block_stop", **at}, "content_block_stop")
    )


def whole(content: Any, **more: Any) -> bytes:
    return json.dumps({"id": "m", "type": "message", "role": "assistant", "content": content, **more}).encode()


STOP = event({"type": "message_stop"}, "message_stop")
TEXT = [{"type": "text", "text": "Fine."}]
MESSAGES: dict[str, tuple[str, bytes, Any]] = {
    "no stop reason": (JSON, whole(TEXT), "Fine."),
    "content a string": (JSON, whole("Fine.", stop_reason="end_turn"), "Fine."),
    "content null": (JSON, whole(None, stop_reason="end_turn"), ""),
    "no content": (JSON, b'{"type": "message", "stop_reason": "end_turn"}', ""),
    "text null": (JSON, whole([{"type": "text", "text": None}], stop_reason="end_turn"), ""),
    "a block of no type": (JSON, whole([{"text": "Fine."}]), "Fine."),
    "a block of a new type": (JSON, whole([*TEXT, {"type": "hologram", "data": [1]}]), "Fine."),
    "input as text": (JSON, whole([{"type": "tool_use", "id": "t", "name": "read", "input": '{"a": 1}'}]), ["read"]),
    "no input": (JSON, whole([{"type": "tool_use", "id": "t", "name": "read"}]), ["read"]),
    "no ids": (JSON, whole([{"type": "tool_use", "name": "read", "input": {}}] * 2), ["read", "read"]),
    "one id twice": (JSON, whole([{"type": "tool_use", "id": "t", "name": "read", "input": {}}] * 2), ["read", "read"]),
    "usage null": (JSON, whole(TEXT, usage=None), "Fine."),
    "usage in floats": (JSON, whole(TEXT, usage={"input_tokens": 3.0, "output_tokens": 1.0}), "Fine."),
    "usage a number": (JSON, whole(TEXT, usage=3), "Fine."),
    "an error with 200": (JSON, b'{"type": "error", "error": {"type": "api_error", "message": "Busy."}}', None),
    "html": ("text/html", b"<html>Bad gateway</html>", None),
    "no bytes": (JSON, b"", None),
    "events": (EVENTS, begun() + of(0) + STOP, "Fine."),
    "events without a beginning": (EVENTS, of(0) + STOP, "Fine."),
    "events without an end": (EVENTS, begun() + of(0), None),
    "no index": (EVENTS, begun() + of(None) + STOP, "Fine."),
    "an index as text": (
        EVENTS,
        begun() + of(0).replace(b'"content_block_stop", "index": 0', b'"content_block_stop", "index": "0"')
        + of(1, "Good.") + STOP,
        "Fine.Good."),
    "no block's beginning": (
        EVENTS,
        begun() + event({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "Fine."}}) + STOP,
        "Fine."),
    "[DONE] at the end": (EVENTS, begun() + of(0) + STOP + DONE, "Fine."),
    "[DONE] alone": (EVENTS, DONE, None),
    "events of new types": (EVENTS, begun() + event({"type": "weather"}) + of(0) + event({"type": "ping"}) + STOP, "Fine."),
    "lines of all kinds": (EVENTS, b": hi\r\n\r\n" + (begun() + of(0) + STOP).replace(b"\n", b"\r\n"), "Fine."),
    "usage of null in events": (EVENTS, begun(usage=None) + of(0) + STOP, "Fine."),
    "input in odd pieces": (
        EVENTS,
        begun() + event({"type": "content_block_start", "index": 0, "content_block": {"type": "tool_use", "name": "read"}})
        + event({"type": "content_block_delta", "index": 0, "delta": {"type": "input_json_delta", "partial_json": '{"a": '}})
        + STOP,
        ["read"],
    ),
    "an error in the middle": (EVENTS, begun() + of(0) + event({"type": "error", "error": {"message": "Busy."}}, "error"), None),
    "no JSON": (EVENTS, begun() + of(0) + b"event: x\ndata: {torn\n\n" + STOP, None),
}  # fmt: skip


def response(output: Any, **more: Any) -> Json:
    return {"id": "r", "object": "response", "status": "completed", "output": output, **more}


SAID = {
    "type": "message",
    "id": "m",
    "role": "assistant",
    "content": [{"type": "output_text", "text": "Fine.", "annotations": []}],
}
CREATED = event({"type": "response.created", "response": response([], status="in_progress")}, "response.created")
ADDED = event({"type": "response.output_item.done", "output_index": 0, "item": SAID}, "response.output_item.done")
COMPLETED = event({"type": "response.completed", "response": response([SAID])}, "response.completed")
RESPONSES: dict[str, tuple[str, bytes, Any]] = {
    "no status": (JSON, json.dumps({"output": [SAID]}).encode(), "Fine."),
    "content a string": (JSON, json.dumps(response([{**SAID, "content": "Fine."}])).encode(), "Fine."),
    "content null": (JSON, json.dumps(response([{**SAID, "content": None}])).encode(), ""),
    "output a string": (JSON, json.dumps(response("Fine.")).encode(), "Fine."),
    "arguments as an object": (
        JSON, json.dumps(response([{"type": "function_call", "call_id": "c", "name": "read", "arguments": {"a": 1}}])).encode(),
        ["read"]),
    "no ids": (JSON, json.dumps(response([{"type": "function_call", "name": "read"}] * 2)).encode(), ["read", "read"]),
    "an item of a new type": (JSON, json.dumps(response([{"type": "hologram", "data": 1}, SAID])).encode(), "Fine."),
    "usage null": (JSON, json.dumps(response([SAID], usage=None)).encode(), "Fine."),
    "usage in floats": (JSON, json.dumps(response([SAID], usage={"input_tokens": 3.0, "output_tokens": 1.0})).encode(), "Fine."),
    "error null": (JSON, json.dumps(response([SAID], error=None)).encode(), "Fine."),
    "tools that are none": (JSON, json.dumps(response([SAID], tools=[[], {"type": "function", "name": {}}])).encode(), "Fine."),
    "a type that is none": (EVENTS, CREATED + ADDED + COMPLETED.replace(b'"type": "response.completed"', b'"type": []'), "Fine."),
    "failed": (JSON, json.dumps(response([], status="failed", error={"message": "Busy."})).encode(), None),
    "html": ("text/html", b"<html>Bad gateway</html>", None),
    "no bytes": (JSON, b"", None),
    "events": (EVENTS, CREATED + ADDED + COMPLETED, "Fine."),
    "an end without output": (EVENTS, CREATED + ADDED + event({"type": "response.completed", "response": response([])}), "Fine."),
    "an end without a response": (EVENTS, CREATED + ADDED + event({"type": "response.completed"}), "Fine."),
    "events without an end": (EVENTS, CREATED + ADDED, None),
    "[DONE] at the end": (EVENTS, CREATED + COMPLETED + DONE, "Fine."),
    "[DONE] alone": (EVENTS, DONE, None),
    "events of new types": (EVENTS, CREATED + event({"type": "response.weather", "sun": 1}) + COMPLETED, "Fine."),
    "lines of all kinds": (EVENTS, b": hi\r\n\r\n" + (CREATED + COMPLETED).replace(b"\n", b"\r\n"), "Fine."),
    "an error in the middle": (EVENTS, CREATED + event({"type": "error", "message": "Busy."}, "error"), None),
}  # fmt: skip

TABLE = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
ROWS = [(form, name) for form, rows in TABLE.items() for name in rows]


def answer(kind: str, raw: bytes, size: int | None = None) -> Any:
    pieces = [raw] if size is None else [raw[at : at + size] for at in range(0, len(raw), size)]
    return lambda _: (200, [("content-type", kind), ("request-id", "req_1")], pieces)


def kept(near: Any) -> list[Any]:
    """Of each session, what the assistant says at its end: a text, or names of calls; None if the user spoke last."""
    out = []
    with near.store() as store:
        for info in store.sessions():
            last = store.session(info.name).contents.originals()[-1]
            calls = [part.name for part in last.parts if part.kind == "call"]
            texts = "".join(part.text for part in last.parts if part.kind == "text")
            out.append(None if last.role != "assistant" else calls or texts)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_odd_replies_go_through_byte_for_byte_and_are_kept_as_far_as_they_can_be_read(far: Any, form: str) -> None:
    made, near = far("messages" if form == "messages" else "chat", embedder=None)
    for number, (name, (kind, raw, expected)) in enumerate(TABLE[form].items()):
        given = [{"role": "user", "content": f"Question {number}"}]
        for streamed, size in ((True, None), (False, None), (True, 3)):
            made.say = answer(kind, raw, size)
            got = post(near, form, [{"role": "user", "content": f"{name} {streamed} {size}"}], stream=streamed)
            assert (got.status_code, got.headers["content-type"], got.headers["request-id"]) == (200, kind, "req_1"), name
            assert got.content == raw, name
            assert kept(near)[-1] == expected, (name, streamed, size)
        # The session goes on, with what the client makes of it.
        made.say = answer(JSON, json.dumps(BODIES[form]).encode())
        given = [{"role": "user", "content": f"{name} True 3"}, {"role": "assistant", "content": "Whatever."}]
        assert post(near, form, [*given, {"role": "user", "content": "Go on."}]).status_code == 200, name


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_odd_replies_are_passed_on_also_where_our_tools_are_in_the_request(far: Any, form: str) -> None:
    made, near = far("messages" if form == "messages" else "chat", embedder=None, window=1500)
    for name, (kind, raw, expected) in TABLE[form].items():
        for streamed in (True, False):
            made.say = answer(kind, raw)
            got = post(near, form, [{"role": "user", "content": f"{name} {streamed}"}, *talk(9)], stream=streamed)
            assert b"search_memory" in made.asked[-1][1]
            assert (got.status_code, got.content) == (200, raw), name
            if expected is not None:
                assert kept(near)[-1] == expected, name


RECALL = {"name": "recall", "arguments": '{"address": "p1"}'}


@pytest.mark.parametrize("form", FORMS)
def test_events_are_written_anew_only_where_something_of_ours_is_in_them(far: Any, form: str) -> None:
    made, near = far("messages" if form == "messages" else "chat", embedder=None, window=1500)
    if form == "chat":
        first, last = chunk({"role": "assistant", "content": "Let me look."}), chunk({}, "tool_calls", usage={"prompt_tokens": 1})
        hidden = first + chunk({"tool_calls": [{"index": 0, "id": "c", "function": RECALL}]}) + last + DONE
        then = chunk({"content": "Fine."}) + chunk({}, "stop", usage={"prompt_tokens": 2}) + DONE
        usage = b'"usage":{"prompt_tokens":2,"kilburn_rounds":[{"prompt_tokens":1},{"prompt_tokens":2}]}'
    elif form == "messages":
        block = {"type": "tool_use", "id": "t", "name": "recall", "input": {"address": "p1"}}
        first = begun() + of(0, "Let me look.")
        last = event({"type": "message_delta", "delta": {"stop_reason": "tool_use"}, "usage": {"output_tokens": 1}}) + STOP
        hidden = first + event({"type": "content_block_start", "index": 1, "content_block": block}) + last
        then = begun() + of(0) + last.replace(b"tool_use", b"end_turn")
        usage = b'"kilburn_rounds":[{"input_tokens":1,"output_tokens":1},{"input_tokens":1,"output_tokens":1}]'
    else:
        item = {"type": "function_call", "id": "f", "call_id": "c", **RECALL}
        first = CREATED + ADDED.replace(b"Fine.", b"Let me look.")
        done = {"type": "response.output_item.done", "output_index": 1, "item": item}
        hidden = first + event(done) + event({"type": "response.completed", "response": response([item], usage={"x": 1})})
        then = CREATED + ADDED + event({"type": "response.completed", "response": response([SAID], usage={"x": 2})})
        usage = b'"usage":{"x":2,"kilburn_rounds":[{"x":1},{"x":2}]}'
    raws = [hidden, then]
    made.say = lambda _: (200, [("content-type", EVENTS)], [raws.pop(0)])
    got = post(near, form, talk(9), stream=True).content
    assert got.startswith(first)
    assert b"recall" not in got.removeprefix(first)
    assert b"Fine." in got.removeprefix(first)
    assert usage in got
    # A call of the client's own, and no other round: every byte is as it came.
    raws[:] = [hidden.replace(b'"recall"', b'"read"')]
    assert post(near, form, [*talk(9), {"role": "user", "content": "!"}], stream=True).content == hidden.replace(
        b'"recall"', b'"read"'
    )


def test_what_is_said_with_the_reason_for_the_end_is_heard_also_if_the_reply_goes_on(far: Any) -> None:
    made, near = far(embedder=None, window=1500)
    ours = chunk({"tool_calls": [{"index": 0, "id": "c", "function": RECALL}]})
    raws = [chunk({"content": "Let me look."}, "tool_calls") + ours + DONE, chunk({"content": "Fine."}, "stop") + DONE]
    made.say = lambda _: (200, [("content-type", EVENTS)], [raws.pop(0)])
    assert "".join(pieces(post(near, "chat", talk(9), stream=True).text)) == "Let me look.\n\nFine."


@pytest.mark.slow
@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("form", "spoken"), [("messages", "chat"), ("chat", "messages"), ("responses", "messages")])
def test_odd_replies_are_translated(far: Any, form: str, spoken: str, streamed: bool) -> None:
    made, near = far("chat" if spoken == "chat" else "messages", embedder=None)
    for name, (kind, raw, expected) in TABLE[spoken].items():
        made.say = answer(kind, raw, 5)
        got = post(near, form, [{"role": "user", "content": name}], stream=streamed)
        assert got.status_code in ((200,) if expected is not None else (200, 502)), (name, got.text)
        if isinstance(expected, list):
            if form == "messages":  # which takes only these in a tool's name
                expected = [re.sub(r"[^a-zA-Z0-9_-]", "_", each) for each in expected]
            assert all(each in got.text for each in expected), (name, got.text)
        elif expected:
            text = got.text if not streamed else "".join(pieces(got.text))
            assert "Fine." in text, (name, got.text)
        if expected is not None:
            assert kept(near)[-1] == expected, name


def pieces(text: str) -> list[str]:
    """The texts of a stream's events."""
    out = []
    for line in text.splitlines():
        if line.startswith("data: {"):
            said = json.loads(line[6:])
            delta = said.get("delta") or (said.get("choices") or [{}])[0].get("delta") or {}
            out.append(delta if isinstance(delta, str) else delta.get("text") or delta.get("content") or "")
    return out


@pytest.mark.parametrize(("form", "spoken"), [("messages", "chat"), ("chat", "messages"), ("responses", "messages")])
def test_errors_are_told_in_the_clients_form_with_their_words_and_headers(far: Any, form: str, spoken: str) -> None:
    made, near = far(spoken)
    headers = [("retry-after", "3"), ("x-ratelimit-remaining-tokens", "7"), ("request-id", "req_1")]
    for status, streamed in itertools.product((400, 401, 404, 429, 500, 529), (False, True)):
        for kind, body in (
            (JSON, b'{"error": {"message": "Not now."}}'),
            ("text/html", b"Not now."),
            (JSON, b'{"error": "Not now."}'),
        ):
            made.say = lambda _, s=status, k=kind, b=body: (s, [("content-type", k), *headers], [b])
            got = post(near, form, stream=streamed)
            assert (got.status_code, got.json()["error"]["message"]) == (status, "Not now.")
            assert all(got.headers[name] == value for name, value in headers)


def test_a_key_is_sent_only_to_its_provider(far: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "of-anthropic")
    monkeypatch.setenv("OPENAI_API_KEY", "of-openai")
    made, near = far("chat")
    made.say = answer(JSON, json.dumps(BODIES["chat"]).encode())
    body = {"model": "m", "max_tokens": 9, "messages": talk()}
    for given, expected in (("kilburn", "Bearer of-openai"), ("mine", "Bearer mine")):
        headers = {"x-api-key": given, "anthropic-version": "2023-06-01", "anthropic-beta": "b"}
        assert httpx2.post(f"{near.url}/v1/messages", json=body, headers=headers, timeout=600).status_code == 200
        sent = made.asked[-1][0]
        assert sent["authorization"] == expected
        assert not [name for name in sent if name.startswith(("anthropic", "x-api"))]


REQUESTS: dict[str, list[tuple[str, Any, Json]]] = {
    "chat": [
        ("a number with a point", None, {"max_tokens": 100.0, "n": 1.0, "seed": 7.0}),
        ("fields of null", None, {"stop": None, "n": None, "stream": None, "tools": None, "max_tokens": None, "functions": None}),
        ("fields of an odd type", None, {"max_tokens": "9", "n": "1", "model": 5, "stream": "no", "tools": {"a": 1}}),
        ("no tools and a choice of them", None, {"tools": [], "tool_choice": "auto"}),
        ("what nobody knows", None, {"moon": {"phase": 1}}),
        ("content null", [{"role": "user", "content": None}, {"role": "user", "content": "Hi"}], {}),
        ("no content", [{"role": "user"}, {"role": "assistant"}, {"role": "user", "content": "Hi"}], {}),
        ("content a number", [{"role": "user", "content": 7}], {}),
        ("blocks as strings", [{"role": "user", "content": ["Hi", {"text": "you"}]}], {}),
        ("roles of old", [{"role": "developer", "content": "Brief."}, {"role": "user", "content": "Hi"},
                          {"role": "assistant", "content": None, "function_call": {"name": "read", "arguments": "{}"}},
                          {"role": "function", "name": "read", "content": "file"}],
         {"functions": [{"name": "read", "parameters": {}}], "function_call": "auto"}),
        ("no ids", [{"role": "user", "content": "Hi"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": {"a": 1}}},
                                                         {"id": "", "function": {"name": "read", "arguments": "{}"}}]},
                    {"role": "tool", "name": "read", "content": "one"},
                    {"role": "tool", "tool_call_id": None, "content": {"a": "two"}},
                    {"role": "user", "content": "Again"},
                    {"role": "assistant", "tool_calls": [{"function": {"name": "read", "arguments": "{}"}}]},
                    {"role": "tool", "tool_call_id": "", "content": None}], {}),
        ("one id twice", [{"role": "user", "content": "Hi"}, {"role": "assistant", "tool_calls": [call(), call()]},
                          {"role": "tool", "tool_call_id": "c1", "content": "one"},
                          {"role": "tool", "tool_call_id": "c1", "content": "two"}], {}),
    ],
    "messages": [
        ("a number with a point", None, {"max_tokens": 100.0}),
        ("fields of null", None, {"stop_sequences": None, "tools": None, "system": None}),
        ("content null", [{"role": "user", "content": None}, {"role": "user", "content": "Hi"}], {}),
        ("text null", [{"role": "user", "content": [{"type": "text", "text": None}, "Hi"]}], {}),
        ("no ids", [{"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": [{"type": "tool_use", "name": "read", "input": None},
                                                      {"type": "tool_use", "name": "read", "input": '{"a": 1}'}]},
                    {"role": "user", "content": [{"type": "tool_result", "content": "one"},
                                                 {"type": "tool_result", "content": {"a": "two"}}]}], {}),
    ],
    "responses": [
        ("a number with a point", None, {"max_output_tokens": 100.0}),
        ("content null", [{"role": "user", "content": None}, {"role": "user", "content": "Hi"}], {}),
        ("no ids", [{"role": "user", "content": "Hi"},
                    {"type": "function_call", "name": "read", "arguments": {"a": 1}}, {"type": "function_call", "name": "read"},
                    {"type": "function_call_output", "output": "one"}, {"type": "function_call_output", "output": {"a": "two"}}],
         {}),
    ],
}  # fmt: skip


@pytest.mark.parametrize("form", FORMS)
def test_requests_that_real_upstreams_take_are_not_refused(far: Any, form: str) -> None:
    spoken = "messages" if form == "messages" else "chat"
    made, near = far(spoken, embedder=None)
    made.say = answer(JSON, json.dumps(BODIES[form]).encode())
    for name, given, more in REQUESTS[form]:
        given = given or [{"role": "user", "content": name}]
        got = post(near, form, given, **more)
        assert got.status_code == 200, (name, got.text)
        asked = json.loads(made.asked[-1][1])
        assert asked[("input" if form == "responses" else "messages")] == given, name
        assert {key: asked[key] for key in more} == more
        # It goes on, and is the same session.
        key = got.headers["x-kilburn-session"]
        again = post(
            near, form, [*given, {"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Go on."}], **more
        )
        assert (again.status_code, again.headers["x-kilburn-session"]) == (200, key), name


@pytest.mark.parametrize(("form", "spoken"), [("messages", "chat"), ("chat", "messages"), ("responses", "messages")])
def test_they_are_translated(far: Any, form: str, spoken: str) -> None:
    made, near = far(spoken, embedder=None)
    made.say = answer(JSON, json.dumps(BODIES[spoken]).encode())
    for name, given, more in REQUESTS[form]:
        if name in ("fields of an odd type", "fields of null"):
            continue
        got = post(near, form, given or [{"role": "user", "content": name}], **more)
        assert got.status_code == 200, (name, got.text)
        asked = made.asked[-1][1].decode()
        if name == "no ids":
            assert asked.index("one") < asked.index("two")
            ids = [each["id"] for each in _calls(json.loads(asked))]
            assert len(set(ids)) == len(ids) >= 2
    assert made.asked


def _calls(asked: Json) -> list[Json]:
    listed = [message.get("tool_calls") or message.get("content") or [] for message in asked["messages"]]
    blocks = [block for each in listed if isinstance(each, list) for block in each]
    return [block for block in blocks if block.get("type") in ("function", "tool_use")]


@pytest.mark.parametrize("form", FORMS)
def test_a_request_without_a_conversation_is_the_providers_to_answer(far: Any, form: str) -> None:
    made, near = far("messages" if form == "messages" else "chat")
    key = "input" if form == "responses" else "messages"
    path = {"chat": "chat/completions"}.get(form, form)
    made.say = lambda _: (400, [("content-type", JSON)], [b'{"error":  {"message": "No."}}'])
    for more in ({}, {key: []}, {key: None}, {"prompt": {"id": "pmpt_1"}}):
        body = {"model": "m", **more}
        got = httpx2.post(f"{near.url}/v1/{path}", json=body, timeout=600)
        assert (got.status_code, got.content) == (400, b'{"error":  {"message": "No."}}')
        assert json.loads(made.asked[-1][1]) == body
    made.say = answer(JSON, json.dumps(BODIES[form]).encode())
    got = httpx2.post(f"{near.url}/v1/{path}", json={"model": "m", "prompt": {"id": "pmpt_1"}}, timeout=600)
    assert got.json() == BODIES[form]
    with near.store() as store:
        assert not store.sessions()


def test_functions_and_tools_are_not_sent_together(far: Any) -> None:
    made, near = far("chat", window=1500, embedder=None)
    made.say = answer(JSON, json.dumps(BODIES["chat"]).encode())
    functions = {"functions": [{"name": "read", "parameters": {"type": "object", "properties": {}}}]}
    old = talk(9)
    old[2] = {"role": "user", "content": f"The locker of the parser has number 12. {'It is made of blue steel. ' * 20}"}
    got = post(near, "chat", [*old[:-1], {"role": "user", "content": "What number has the locker of the parser?"}], **functions)
    asked = json.loads(made.asked[-1][1])
    assert "tools" not in asked
    assert asked["functions"] == functions["functions"]
    assert "number 12" in json.dumps(asked), "what has left is searched for instead"
    assert got.headers["x-kilburn-brought"]


def test_a_reply_in_a_zip_is_unpacked_and_read(far: Any) -> None:
    made, near = far("chat")
    raw = CHAT["events"][1]
    made.say = lambda _: (200, [("content-type", EVENTS), ("content-encoding", "gzip")], [gzip.compress(raw)])
    got = post(near, "chat", stream=True)
    assert got.content == raw
    assert kept(near) == ["Fine."]


@pytest.mark.parametrize("form", FORMS)
def test_a_status_goes_through_and_a_redirection_is_an_error(far: Any, form: str) -> None:
    made, near = far("messages" if form == "messages" else "chat")
    whole = json.dumps(BODIES[form]).encode()
    for status, body in ((201, whole), (203, b"accepted"), (204, b"")):
        made.say = lambda _, status=status, body=body: (status, [("content-type", JSON)], [body] if body else [])
        for streamed in (False, True):
            got = post(near, form, stream=streamed)
            assert (got.status_code, got.content) == (status, body)
    made.say = lambda _: (302, [("location", "http://127.0.0.1:9/")], [])
    assert post(near, form).status_code == 502


def test_several_replies_go_through_as_they_are(far: Any) -> None:
    made, near = far("chat")
    both = [{"index": at, "message": {"role": "assistant", "content": text}} for at, text in enumerate(("One.", "Two."))]
    streamed = b"".join(event({"choices": [{"index": at, "delta": {"content": "x"}}]}) for at in (0, 1, 0)) + DONE
    for raw, kind in ((json.dumps({"choices": both}).encode(), JSON), (streamed, EVENTS), (DONE, EVENTS), (b"{}", JSON)):
        made.say = answer(kind, raw)
        assert post(near, "chat", n=2.0, stream=kind == EVENTS).content == raw


def test_a_model_of_this_process_takes_odd_requests(gateway: Any) -> None:
    count = sum(map(len, REQUESTS.values()))
    setup = gateway(model=Scripted(["Fine."] * count, form="messages"))
    for form, rows in REQUESTS.items():
        for name, given, more in rows:
            if name not in ("fields of an odd type", "fields of null"):
                got = post(setup, form, given or [{"role": "user", "content": name}], **more)
                assert got.status_code == 200, (name, got.text)


def odd(value: Any, dice: random.Random) -> Any:
    """A value with something in it left out, put twice, or of another type."""
    if dice.random() < 0.06:
        return dice.choice([None, "", 5, 1.5, True, [], {}, [None], "x", {"type": "x"}, -1, "\u00e9"])
    if isinstance(value, dict):
        made = {key: odd(each, dice) for key, each in value.items() if dice.random() > 0.05}
        return made if dice.random() > 0.05 else {**made, "extra": 1}
    if isinstance(value, list):
        return [odd(each, dice) for each in value for _ in range(2 if dice.random() < 0.05 else 1) if dice.random() > 0.05]
    return value


def torn(raw: bytes, dice: random.Random) -> bytes:
    """Events or a body with something odd in them."""
    out = []
    for part in raw.split(b"\n\n"):
        head, mark, data = part.partition(b"data: ")
        with suppress(ValueError):
            part = head + mark + json.dumps(odd(json.loads(data if mark else part), dice)).encode()
        out += [part] * (0 if dice.random() < 0.05 else 2 if dice.random() < 0.05 else 1)
    made = dice.choice([b"\n\n", b"\r\n\r\n", b"\n\n: ping\n\n"]).join(out)
    return made[: dice.randrange(len(made) + 1)] if dice.random() < 0.1 else made


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_any_odd_reply_goes_through(far: Any, form: str) -> None:
    dice = random.Random(f"replies {form}")
    made, near = far("messages" if form == "messages" else "chat", embedder=None)
    rows = list(TABLE[form].values())
    for number in range(100):
        kind, raw, _ = dice.choice(rows)
        raw, kind = torn(raw, dice), dice.choice([kind, kind, JSON, EVENTS, "text/plain"])
        made.say = answer(kind, raw, dice.choice([None, 1, 7, 100]))
        given = [{"role": "user", "content": f"Question {number}"}]
        got = post(near, form, given, stream=dice.random() < 0.5)
        assert (got.status_code, got.content, got.headers["content-type"]) == (200, raw, kind), (number, raw)
        made.say = answer(JSON, json.dumps(BODIES[form]).encode())
        given += [{"role": "assistant", "content": "Fine."}, {"role": "user", "content": "Go on."}]
        assert post(near, form, given).status_code == 200, number
    with near.store() as store:
        for info in store.sessions():
            store.session(info.name).render()


@pytest.mark.slow
@pytest.mark.parametrize(("form", "spoken"), [("messages", "chat"), ("chat", "messages"), ("responses", "messages")])
def test_any_odd_reply_is_translated_or_an_error_of_the_form(far: Any, form: str, spoken: str) -> None:
    dice = random.Random(f"translated {form}")
    made, near = far(spoken, embedder=None)
    rows = list(TABLE[spoken].values())
    for number in range(100):
        kind, raw, _ = dice.choice(rows)
        made.say = answer(kind, torn(raw, dice), dice.choice([None, 1, 100]))
        streamed = dice.random() < 0.5
        got = post(near, form, [{"role": "user", "content": f"Question {number}"}], stream=streamed)
        assert got.status_code in (200, 400, 404, 429, 500, 502, 503), (number, raw, got.text)
        if got.headers["content-type"] == JSON:
            assert isinstance(got.json(), dict)
        else:
            assert all(isinstance(json.loads(line[6:]), dict) for line in got.text.splitlines() if line.startswith("data: {"))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("spoken", ["chat", "messages"])
def test_any_odd_request_is_answered_in_some_way(far: Any, form: str, spoken: str) -> None:
    dice = random.Random(f"requests {form} {spoken}")
    made, near = far(spoken, embedder=None, window=4000)
    reply = BODIES[form if (form == "messages") == (spoken == "messages") else spoken]
    made.say = answer(JSON, json.dumps(reply).encode())
    for number in range(100):
        _, given, more = dice.choice(REQUESTS[form])
        given = odd(given or talk(dice.randrange(12)), dice)
        got = post(near, form, given or [], **{key: odd(value, dice) for key, value in more.items()})
        assert got.status_code in (200, 400), (number, given, got.text)
    assert len(made.asked) > 30

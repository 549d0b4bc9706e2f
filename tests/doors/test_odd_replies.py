"""Odd replies: what a provider sends reaches the client byte for byte, and the session can go on.

So also where the gateway offers recall and has to read the stream ("small": something has left the window).

Valid replies in three dialects, streamed and not, are changed: fields dropped, doubled, of another type; no finish; JSON for a
stream and a stream for JSON; cut off in the middle; errors with any status and body; gzip, CRLF, bytes that are no UTF-8.

A long run: `PYTHONPATH=src:tests python tests/doors/test_odd_replies.py --trials 2000 --seed 1`.
"""

from __future__ import annotations

import copy
import gzip
import json
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from doors.stub import Answer, Part, Seen, answer_of, refusal, stream, whole
from doors.visit import Got, Ground, Json, Trial, check, find_broken, format_broken, gateway, prose, run
from effort import rounds

FORMS = ("chat", "messages", "responses")
OTHER = (None, "", "x", 0, -1, 1.5, True, [], {}, [None], [[]], {"a": 1}, [{"type": "text"}], 10**30)
STATUSES = (400, 401, 402, 403, 405, 408, 409, 413, 418, 422, 424, 425, 429, 451, 500, 501, 502, 503, 504, 520, 529)
ERRORS = (
    b"",
    b"no",
    b"null",
    b"[]",
    b'"busy"',
    b"<html><body><h1>502 Bad Gateway</h1></body></html>",
    b'{"detail": "Not allowed"}',
    b'{"detail": [{"loc": ["body", "x"], "msg": "field required", "type": "missing"}]}',
    b'{"error": "busy"}',
    b'{"error": null}',
    b'{"error": {"code": 400, "message": "Unknown name", "status": "INVALID_ARGUMENT", "details": [{"@type": "x"}]}}',
    b'[{"error": {"code": 429, "message": "Quota", "status": "RESOURCE_EXHAUSTED"}}]',
    b'{"object": "error", "message": "bad", "type": "BadRequestError", "param": null, "code": 400}',
    b'{"message": "no Route matched", "request_id": "1"}',
    b'{"type": "error", "error": {"type": "overloaded_error", "message": "Overloaded"}, "request_id": "req_1"}',
    b'{"fault": {"faultstring": "Rate limit quota violation", "detail": {"errorcode": "policies"}}}',
    b'{"error": {"message": "caf\xe9"}}',
    b'{"error":',
)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The ways to all that is in a JSON value."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*at, key)
        yield from places(inner, (*at, key))


def changed(rng: random.Random, value: Any) -> tuple[Any, str]:
    """A JSON value with something dropped, doubled or of another type."""
    value = copy.deepcopy(value)
    ways = list(places(value))
    if not ways:
        return value, "nothing"
    *above, key = rng.choice(ways)
    inside = value
    for step in above:
        inside = inside[step]
    name = ".".join(map(str, (*above, key)))
    how = rng.choice(("drop", "retype", "retype", "double", "wrap", "text"))
    if how == "drop":
        del inside[key]
    elif how == "double" and isinstance(inside, list):
        inside.insert(key, copy.deepcopy(inside[key]))
    elif how == "wrap":
        inside[key] = [inside[key]]
    elif how == "text" and not isinstance(inside[key], str):
        inside[key] = json.dumps(inside[key])
    else:
        inside[key] = copy.deepcopy(rng.choice(OTHER))
        return value, f"{name} = {inside[key]!r}"
    return value, f"{how} {name}"


def arguments(rng: random.Random, form: str, reply: Json) -> tuple[Json, str]:
    """Arguments of a call that are an object, or text that is none."""
    reply = copy.deepcopy(reply)
    given = rng.choice(({"a": 1}, None, "", "{", "nul", [], 5, '{"a": 1} '))
    if form == "chat":
        for call in reply["choices"][0]["message"].get("tool_calls", ()):
            call["function"]["arguments"] = given
    elif form == "responses":
        for item in reply["output"]:
            if item["type"] == "function_call":
                item["arguments"] = given
    else:
        for block in reply["content"]:
            if block["type"] == "tool_use":
                block["input"] = given
    return reply, f"arguments = {given!r}"


def unfinished(rng: random.Random, form: str, reply: Json) -> tuple[Json, str]:
    """No finish reason, or one that nobody knows."""
    reply = copy.deepcopy(reply)
    inside, key = {
        "chat": lambda: (reply["choices"][0], "finish_reason"),
        "messages": lambda: (reply, "stop_reason"),
        "responses": lambda: (reply, "status"),
    }[form]()
    given = rng.choice(("DROP", None, "", "eos", "COMPLETE", 1))
    if given == "DROP":
        del inside[key]
    else:
        inside[key] = given
    return reply, f"{key} = {given!r}"


def odd_json(rng: random.Random, form: str, reply: Json) -> tuple[Answer, str]:
    """A reply that is not streamed, and not quite right."""
    how = rng.choice(("change", "change", "change", "change", "arguments", "finish", "bytes", "stream", "type", "more"))
    if how in ("change", "more"):
        what = []
        for _ in range(rng.choice((1, 1, 2, 3))):
            reply, words = changed(rng, reply)
            what.append(words)
        if how == "more" and isinstance(reply, dict):
            reply["x_unknown"] = {"deep": [1, {"er": None}]}
        return Answer([json.dumps(reply).encode()]), "; ".join(what)
    if how in ("arguments", "finish"):
        reply, words = (arguments if how == "arguments" else unfinished)(rng, form, reply)
        return Answer([json.dumps(reply).encode()]), words
    if how == "stream":
        return answer_of(form, reply, True), "a stream for JSON"
    raw = json.dumps(reply, ensure_ascii=False).encode()
    if how == "type":
        kind = rng.choice(
            ("", "text/plain", "application/octet-stream", "text/event-stream", "application/json; charset=latin-1")
        )
        return Answer([raw], type=kind), f"content-type {kind!r}"
    raws = {
        "nothing": b"",
        "null": b"null",
        "a list": b"[]",
        "a number": b"7",
        "html": b"<html>ok</html>",
        "[DONE]": b"data: [DONE]\n\n",
        "BOM": b"\xef\xbb\xbf" + raw,
        "blanks": b"\r\n \n" + raw + b"\n\n ",
        "no UTF-8": raw.replace(b"river", b"riv\xe9r", 1),
        "a lone surrogate": raw.replace(b"river", b"\\ud800", 1),
        "a zero": raw.replace(b"river", b"\\u0000", 1),
        "NaN": raw.replace(b"15", b"NaN", 1),
        "a doubled key": raw[:-1] + b', "id": "other", "model": 5}',
        "half": raw[: len(raw) // 2],
        "two": raw + b"\n" + raw,
        "an array of it": b"[" + raw + b"]",
    }
    name = rng.choice(sorted(raws))
    return Answer([raws[name]]), name


def odd_stream(rng: random.Random, form: str, reply: Json) -> tuple[Answer, str]:
    """A stream that is not quite right."""
    sent = stream(form, reply)
    how = rng.choice(
        (
            "drop",
            "drop",
            "double",
            "swap",
            "change",
            "change",
            "change",
            "end",
            "bytes",
            "json",
            "arguments",
            "finish",
            "comment",
            "type",
        )
    )
    at = rng.randrange(len(sent))
    words = f"{how} {at} of {len(sent)}: {sent[at][:80]!r}"
    kind = "text/event-stream"
    if how == "drop":
        del sent[at]
    elif how == "double":
        sent.insert(at, sent[at])
    elif how == "swap":
        other = rng.randrange(len(sent))
        sent[at], sent[other] = sent[other], sent[at]
        words += f" with {other}"
    elif how == "change":
        at = rng.randrange(len(sent) - (form == "chat"))
        head, _, data = sent[at].partition(b"data: ")
        value, what = changed(rng, json.loads(data))
        sent[at] = head + b"data: " + json.dumps(value).encode() + b"\n\n"
        words = f"event {at} of {len(sent)}: {what}"
    elif how == "end":
        sent = sent[:at]
        words = f"ends in good order after {at} of {len(stream(form, reply))}"
    elif how == "comment":
        sent.insert(
            at, rng.choice((b": ping\n\n", b"\n", b"retry: 10\n\n", b"id: 7\n\n", b"event: ping\ndata: {}\n\n", b"data:\n\n"))
        )
        words = f"{sent[at]!r} at {at}"
    elif how in ("arguments", "finish"):
        if form == "messages" and how == "arguments":
            sent = [piece.replace(b'"input": {}', b'"input": {"a": 1}') for piece in sent]
            words = "input in the start of the block"
        else:
            odd, words = (arguments if how == "arguments" else unfinished)(rng, form, reply)
            if how == "finish" and "DROP" in words:
                sent = [
                    piece.replace(b'"finish_reason": "stop"', b'"x": 0').replace(b'"stop_reason": "end_turn"', b'"x": 0')
                    for piece in sent
                ]
            elif how == "finish":
                sent = stream(form, odd)
            else:
                sent = [piece.replace(b'"arguments": ""', b'"arguments": {"a": 1}') for piece in sent]
                words = "arguments = object in the first event of the call"
    elif how == "json":
        return replace(
            answer_of(form, reply, False), type=rng.choice(("application/json", "text/event-stream"))
        ), "JSON for a stream"
    elif how == "type":
        kind = rng.choice(("", "text/plain", "application/json", "application/octet-stream", "application/x-ndjson"))
        words = f"content-type {kind!r}"
    else:
        joined = b"".join(sent)
        raws = {
            "nothing": b"",
            "[DONE] alone": b"data: [DONE]\n\n",
            "CRLF": joined.replace(b"\n", b"\r\n"),
            "CR": joined.replace(b"\n", b"\r"),
            "no blank": joined.replace(b"data: ", b"data:"),
            "no blank at the end": joined[:-2],
            "no UTF-8": joined.replace(b"river", b"riv\xe9r", 1),
            "a lone surrogate": joined.replace(b"river", b"\\ud800", 1),
            "BOM": b"\xef\xbb\xbf" + joined,
            "lines of two": joined.replace(b", ", b",\ndata: "),
            "no names": b"\n".join(line for line in joined.split(b"\n") if not line.startswith(b"event:")),
            "NDJSON": b"\n".join(line[6:] for line in joined.split(b"\n") if line.startswith(b"data: ")),
            "garbage": joined.replace(b"\n\n", b"\n\ndata: {no json\n\n", 2),
        }
        words = rng.choice(sorted(raws))
        sent = [raws[words]]
    if rng.random() < 0.3:
        joined = b"".join(sent)
        size = rng.choice((1 + len(joined) // 40, 7 + len(joined) // 9, 1 + len(joined)))
        sent = [joined[at : at + size] for at in range(0, len(joined), size)]
    return Answer(sent, type=kind, framing=rng.choice(("chunked", "close"))), words


def odd(rng: random.Random, form: str, streamed: bool, reply: Json) -> tuple[Answer, str]:
    """What the provider sends, and in words how it is odd."""
    if rng.random() < 0.2:
        status, body = rng.choice(STATUSES), rng.choice(ERRORS)
        kind = rng.choice(("application/json", "text/html", "text/plain", ""))
        return Answer([body], status=status, type=kind), f"status {status}: {body!r} as {kind!r}"
    answer, words = (odd_stream if streamed else odd_json)(rng, form, reply)
    chance = rng.random()
    if chance < 0.1 and len(answer.body) > 20:
        keep = rng.randrange(1, len(answer.body))
        return replace(
            answer, pieces=[answer.body[:keep]], cut=True, framing=rng.choice(("length", "chunked"))
        ), f"cut after {keep} of: {words}"
    if chance < 0.15:
        return replace(answer, pieces=[gzip.compress(answer.body)], headers={"content-encoding": "gzip"}), f"gzip of: {words}"
    return answer, words


def request(form: str, talk: list[tuple[str, str]], streamed: bool, **more: Any) -> Json:
    body: Json = {"model": "m"} | ({"stream": True} if streamed else {}) | more
    said = [{"role": role, "content": text} for role, text in talk]
    if form == "responses":
        return body | {"input": said}
    return body | {"messages": said} | ({"max_tokens": 500} if form == "messages" else {})


def plain(answer: Answer) -> bytes:
    return gzip.decompress(answer.body) if answer.headers.get("content-encoding") == "gzip" else answer.body


def compare(got: Got, answer: Answer, shown: Any) -> None:
    """What a client received is what was sent."""
    body = plain(answer)
    if answer.cut:
        if answer.type.startswith("text/event-stream"):
            whole_events = body[: body.rfind(b"\n\n") + 2] if b"\n\n" in body else b""
            check(got.body.startswith(whole_events), "what came before a stream broke off is there", shown)
            check(got.broken or b"error" in got.body, "a stream that breaks off does not look whole", shown)
        else:
            check(got.broken or got.status >= 500, "a body that breaks off does not look whole", shown)
        return
    check(
        answer.status >= 300 or got.status < 500, f"no 5xx of the gateway's own where the upstream gave 200: {got.words}", shown
    )
    check(got.status == answer.status, "the status is the upstream's", shown)
    check(not got.broken, "a body that came whole is whole", shown)
    check(got.body == body, "the body is byte for byte the upstream's", shown)
    if answer.type:
        check(got.headers.get("content-type", "") == answer.type, "the content type is the upstream's", shown)
    check(got.headers.get("x-told") == "yes", "the upstream's headers go through", shown)


def trial(rng: random.Random, *, ground: Ground, form: str, small: bool, now: dict[str, Answer | None]) -> None:
    """One odd reply in a session of its own, then a plain one."""
    streamed = rng.random() < 0.5
    calls = rng.random() < 0.4
    parts: list[Part] = [("R", prose(rng, 5))] if rng.random() < 0.3 else []
    parts += [("M", "river " + prose(rng, 8))] if rng.random() < 0.8 or not calls else []
    parts += [("F", "look", {"path": "a.py", "line": 5})] * calls
    answer, words = odd(rng, form, streamed, whole(form, parts))
    answer = replace(answer, headers=answer.headers | {"x-told": "yes"})
    talk = [("user", f"{rng.random()} " + prose(rng, 6)), ("assistant", prose(rng, 6))]
    if small:
        talk = [(role, f"{text} {number} " + prose(rng, 90)) for number in range(6) for role, text in talk]
    talk.append(("user", "And now? " + prose(rng, 6)))
    shown: Json = {"form": form, "streamed": streamed, "small": small, "odd": words}
    now["answer"] = answer
    accepts = {"accept-encoding": "gzip"} if answer.headers.get("content-encoding") else {}
    got = ground.ask(form, request(form, talk, streamed), headers=accepts)
    shown |= {"upstream": [answer.status, answer.body[-300:]], "client": [got.status, got.body[-300:], got.broken]}
    now["answer"] = None
    compare(got, answer, shown)
    again = ground.ask(form, request(form, talk, False))
    check(
        again.status == 200 and b"All is well" in again.body,
        "the next request of the session works",
        shown | {"then": again.body[:200]},
    )
    if got.status == 200 and not streamed and not answer.cut and form != "responses":
        try:
            said = got.json["choices"][0]["message"]["content"] if form == "chat" else got.json["content"][0]["text"]
        except (ValueError, LookupError, TypeError):
            return
        if isinstance(said, str) and said.strip() and "\ud800" not in said:
            more = [*talk, ("assistant", said), ("user", "Go on.")]
            third = ground.ask(form, request(form, more, False))
            check(third.status == 200, "the odd reply can be sent back", shown | {"then": third.body[:200]})


@contextmanager
def odd_replies(form: str, small: bool) -> Iterator[Trial]:
    now: dict[str, Answer | None] = {"answer": None}

    def answer(seen: Seen) -> Answer:
        if seen.method != "POST" or not seen.form:
            return refusal(form, "no such path", 404)
        return now["answer"] or Answer([json.dumps(whole(form, [("M", "All is well.")])).encode()])

    with gateway(answer, form=form, window=1500 if small else 1_000_000) as ground:
        yield partial(trial, ground=ground, form=form, small=small, now=now)


FUZZERS: dict[str, Callable[[], Any]] = {
    f"{form}-{'small' if small else 'large'}": partial(odd_replies, form, small) for form in FORMS for small in (False, True)
}


@pytest.mark.parametrize("name", FUZZERS)
def test_odd_replies_go_through(name: str) -> None:
    with FUZZERS[name]() as trial:
        broken = find_broken(trial, trials=rounds(15, 60))
    assert not broken, format_broken(broken)


if __name__ == "__main__":
    run(FUZZERS, __doc__ or "")

"""What a body may take: every array that a client can send, with thousands of elements, is answered or refused in memory that
grows with the body alone; and bounds on how much JSON it is hold before anybody reads it."""

from __future__ import annotations

import gc
import json
import random
import socket
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx2
import pytest

import kilburn
from effort import rounds
from gateway.bodies import ARRAYS, CHAT, MESSAGES, RESPONSES, Body
from kilburn.gateway.app import Settings, build
from kilburn.gateway.chat import ChatForm
from kilburn.gateway.form import MAX_PARTS, Form
from kilburn.gateway.history import Histories
from kilburn.gateway.limits import BodyTally, RequestBounds
from kilburn.gateway.messages import MessagesForm
from kilburn.gateway.responses import ResponsesForm
from kilburn.kernel.render import to_send
from kilburn.testing.upstream import Upstream, serving
from kilburn.wire.digests import canonical
from kilburn.wire.plain import VALUES, load_object

SIZE = 60_000

MOST = 10
"""Bytes of memory for each byte of a body's weight (see `BodyTally`)."""

READ = 200
"""Bytes of memory for each value in the arguments of a call, which are JSON in a text; they are read one call after the other."""

FIXED = 400_000
"""Bytes that a request takes whatever it is."""

FORMS = {CHAT: ChatForm(), MESSAGES: MessagesForm(), RESPONSES: ResponsesForm()}

REPLIES = {
    CHAT: {"choices": [{"index": 0, "message": {"role": "assistant", "content": "r"}, "finish_reason": "stop"}]},
    MESSAGES: {
        "type": "message",
        "role": "assistant",
        "content": [{"type": "text", "text": "r"}],
        "stop_reason": "end_turn",
        "usage": {"input_tokens": 1, "output_tokens": 1},
    },
    RESPONSES: {
        "id": "resp_1",
        "status": "completed",
        "output": [{"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "r"}]}],
    },
}


@contextmanager
def provider() -> Iterator[str]:
    """A provider that takes anything, keeps nothing of it, and so takes no memory of its own."""
    server = socket.create_server(("127.0.0.1", 0))
    opened: list[socket.socket] = []

    def answer(made: socket.socket) -> None:
        with made, made.makefile("rb", 1 << 16) as lines:
            while line := lines.readline():
                path, length = line.split()[1].decode(), 0
                while header := lines.readline().strip():
                    name, _, value = header.partition(b":")
                    length = int(value) if name.lower() == b"content-length" else length
                while length:
                    length -= len(lines.read(min(length, 1 << 16)))
                body = json.dumps(REPLIES.get(path, {})).encode()
                head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
                made.sendall(head.encode() + body)

    def accept() -> None:
        while True:
            try:
                made, _ = server.accept()
            except OSError:
                return
            opened.append(made)
            threading.Thread(target=answer, args=(made,)).start()

    thread = threading.Thread(target=accept)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
    finally:
        server.shutdown(socket.SHUT_RDWR)
        server.close()
        thread.join()
        for made in opened:
            made.close()


@pytest.fixture
def door(tmp_path: Path) -> Iterator[Callable[..., int]]:
    """Starts a gateway for a path; returns its port."""
    with ExitStack() as stack:

        def start(path: str, **more: Any) -> int:
            far = stack.enter_context(provider())
            upstream = far if path.startswith(MESSAGES) else f"{far}/v1"
            given = {"tokenizer": "chars/4", "embedder": None, "window": 8000, **more}
            url = stack.enter_context(serving(build(Settings(db=str(tmp_path / "g.db"), upstream=upstream, **given))))
            return int(url.rpartition(":")[2])

        yield start


def post(port: int, path: str, body: bytes) -> tuple[int, bytes]:
    """Send a body as it is; returns the status and what was answered."""
    with socket.create_connection(("127.0.0.1", port), timeout=600) as made:
        made.sendall(
            f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode()
        )
        with suppress(ConnectionError):  # it may be refused before its end
            made.sendall(body)
        found = b""
        while piece := made.recv(1 << 16):
            found += piece
    head, _, rest = found.partition(b"\r\n\r\n")
    return int(head.split()[1]), rest


def warm(port: int, path: str) -> None:
    post(port, path, b'{"model":"m","max_tokens":9,"messages":[{"role":"user","content":"w"}],"input":"w"}')


def weight(body: bytes) -> int:
    tally = BodyTally()
    tally.feed(body)
    return tally.weight


@contextmanager
def traced() -> Iterator[Callable[[], int]]:
    """The most memory that was taken since, in bytes."""
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield lambda: tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.slow
@pytest.mark.parametrize("name", ARRAYS)
def test_the_memory_for_every_array_that_a_client_can_send_grows_with_the_body_alone(door: Callable[..., int], name: str) -> None:
    path = ARRAYS[name].path
    port = door(path)
    warm(port, path)
    body = ARRAYS[name].sized(SIZE)
    with traced() as taken:
        status, said = post(port, path, body)
        most = taken()
    assert status in (200, 400), said
    assert status == 200 or "error" in json.loads(said)
    read = READ * body.count(b"{}") if name.endswith("arguments") else 0
    assert most <= MOST * weight(body) + FIXED + read, f"{most / len(body):.0f} bytes of memory a byte"


def test_arguments_of_very_many_values_are_not_read() -> None:
    few, many = ('{"a": [' + ",".join("{}" for _ in range(number)) + "]}" for number in (VALUES // 2 - 1, VALUES))
    assert load_object(few) == json.loads(few)
    with traced() as taken:
        assert load_object(many) is None
        assert taken() < len(many)


def steps(path: str, body: bytes, folder: Path) -> int:
    """Calls of functions that a request takes until its prompt is there."""
    form, count = FORMS[path], 0

    def counting(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    db = str(folder / f"{len(body)}.db")
    with kilburn.open(db, window=1000, policy="cost", tokenizer="chars/4", embedder=None, foreign=False) as store:
        histories = Histories(store)
        sys.setprofile(counting)
        try:
            if form.unread(body):
                return count
            asked = form.open(body)
            conversation = histories.take(form, asked, None, "", link=False)
            form.splice(asked, to_send(conversation.session.render(form.rendered)), ())
        except kilburn.errors.KilburnError:
            pass  # it is refused; that too takes steps
        finally:
            sys.setprofile(None)
        return count


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, body in ARRAYS.items() if body.path in FORMS])
def test_the_steps_for_every_array_that_becomes_messages_grow_with_the_body_alone(tmp_path: Path, name: str) -> None:
    array = ARRAYS[name]
    # Both take more than the window, so a policy acts on both.
    few, many = array.sized(SIZE), array.sized(2 * SIZE)
    assert steps(array.path, many, tmp_path) <= 1.5 * len(many) / len(few) * steps(array.path, few, tmp_path)


@pytest.mark.parametrize(
    ("path", "body", "status", "code"),
    [
        (CHAT, Body(CHAT, '{"model":"m","messages":[', "1", "]}").of(2_000_000), 413, "too_many_values"),
        (CHAT, b'{"model":"m","x":' + b'{"a":' * 129 + b"1" + b"}" * 129 + b',"messages":[]}', 400, "nested_too_deep"),
        (MESSAGES, Body(CHAT, '{"model":"m","messages":[],"x":{', '"#":{}', "}}").of(300_000), 413, "too_many_values"),
        (MESSAGES, b'{"model":"m","messages":' + b"[" * 1_000_000, 400, "nested_too_deep"),
        (RESPONSES, Body(CHAT, '{"model":"m","messages":[', "1", "]}").of(600_000), 413, "too_many_values"),
        (RESPONSES, b'{"model":"m","messages":' + b"[" * 300_000, 400, "nested_too_deep"),
    ],
)
def test_a_body_with_more_json_than_is_allowed_is_refused_before_it_is_read(
    door: Callable[..., int], path: str, body: bytes, status: int, code: str
) -> None:
    port = door(path)
    warm(port, path)
    post(port, path, b"[" * 1_000)  # what a refusal loads once is no request's
    with traced() as taken:
        told, said = post(port, path, body)
        assert taken() <= 3 * len(body) + FIXED
    assert told == status
    error = json.loads(said)["error"]
    assert "have the operator raise" in error["message"]
    if path == MESSAGES:
        assert error["type"] == ("request_too_large" if status == 413 else "invalid_request_error")
    else:
        assert error["code"] == code


def test_the_bounds_are_the_operators(door: Callable[..., int]) -> None:
    port = door(CHAT, limits=RequestBounds(values=20, depth=5))
    short = Body(CHAT, '{"model":"m","messages":[', '{"role":"user","content":"a"}', "]}")
    assert post(port, CHAT, short.of(5))[0] == 200
    assert post(port, CHAT, short.of(7))[0] == 413
    assert post(port, CHAT, b'{"messages":[{"role":"user","content":"a","x":[[1]]}]}')[0] == 200
    assert post(port, CHAT, b'{"messages":[{"role":"user","content":"a","x":[[[1]]]}]}')[0] == 400
    # Text is text, whatever it looks like, and a file is none of it.
    assert post(port, CHAT, b'{"messages":[{"role":"user","content":"' + b'[{,\\\\\\"' * 1000 + b'"}]}')[0] == 200


def test_many_small_values_together_are_bounded_as_many_bytes_are(door: Callable[..., int]) -> None:
    limits = RequestBounds(bodies=1_000_000)
    port = door(CHAT, limits=limits)
    few = Body(CHAT, '{"model":"m","messages":[{"role":"user","content":"a"}],"x":[', "1", "]}")
    assert post(port, CHAT, few.of(7000))[0] == 200
    status, said = post(port, CHAT, few.of(9000))
    assert (status, json.loads(said)["error"]["code"]) == (503, "overloaded")
    assert post(port, CHAT, few.of(7000))[0] == 200


def walked(value: Any, depth: int = 0) -> tuple[int, int]:
    """The values and the depth of what JSON says."""
    if not isinstance(value, dict | list):
        return 0, depth
    below = [walked(each, depth + 1) for each in (value.values() if isinstance(value, dict) else value)]
    return 1 + max(0, len(below) - 1) + sum(values for values, _ in below), max([depth + 1, *(deep for _, deep in below)])


@pytest.mark.parametrize("seed", range(rounds(4, 20)))
def test_what_is_counted_is_what_a_reader_would_find(seed: int) -> None:
    choose = random.Random(seed)

    def text() -> str:
        return "".join(choose.choice('ab\\"[]{},: é😀\n\x01') for _ in range(choose.choice([0, 1, 3, 9])))

    def value(depth: int = 0) -> Any:
        kind = choose.random()
        if kind < 0.3 and depth < 8:
            return [value(depth + 1) for _ in range(choose.randrange(4))]
        if kind < 0.6 and depth < 8:
            return {text(): value(depth + 1) for _ in range(choose.randrange(4))}
        return choose.choice([1, -2.5, True, None, text(), text()])

    for _ in range(200):
        said = {text(): value() for _ in range(choose.randrange(5))}
        raw = b" \n" + json.dumps(said, ensure_ascii=choose.random() < 0.5, indent=choose.choice([None, 1])).encode()
        tally, at = BodyTally(), 0
        while at < len(raw):
            end = at + choose.choice([1, 2, 3, 7, 1000])
            tally.feed(raw[at:end])
            at = end
        assert (tally.size, tally.values, tally.depth) == (len(raw), *walked(said)), raw


def test_escapes_are_counted_alike_however_a_body_is_cut() -> None:
    raw = b'{"a\\\\": "\\"[", "\\\\\\"{": ["\\\\", "\\n", {}], "b": "]\\\\\\\\"}'
    expected = walked(json.loads(raw))
    for cut in range(len(raw)):
        for other in range(cut, len(raw)):
            tally = BodyTally()
            for piece in (raw[:cut], raw[cut:other], raw[other:]):
                tally.feed(piece)
            assert (tally.values, tally.depth) == expected


def test_what_a_reader_meets_before_an_error_is_counted() -> None:
    tally = BodyTally()
    tally.feed(b'{"a": ' + b"[" * 200 + b'\\"')
    assert tally.depth == 201


def test_what_is_no_object_has_no_values() -> None:
    for raw in (b"", b"[1,2,3]", b"--boundary\r\n{,,,[[[", b"\xef\xbb\xbf{}", b"null"):
        tally = BodyTally()
        tally.feed(raw)
        assert (tally.size, tally.values, tally.depth) == (len(raw), 0, 0)


@pytest.mark.parametrize(("form", "kind"), [(ChatForm(), "text"), (MessagesForm(), "text"), (ResponsesForm(), "input_text")])
def test_texts_of_a_message_with_many_parts_share_a_page(tmp_path: Path, form: Form, kind: str) -> None:
    texts = [str(at) for at in range(40_000)]
    parts = [{"type": kind, "text": text} for text in texts]
    marked = {"type": "text", "text": "marked", "cache_control": {"type": "ephemeral"}} if form.name != "responses" else None
    content = [*parts[:20_000], marked, *parts[20_000:]] if marked else parts
    body = json.dumps({"model": "m", form.key: [{"role": "user", "content": content}]}).encode()
    path = tmp_path / "g.db"
    with kilburn.open(str(path), window=200_000, tokenizer="chars/4", embedder=None) as store:
        conversation = Histories(store).take(form, form.open(body), None, "")
        pages = conversation.session.window.last
        assert pages == (3 if marked else 1)
        shown = "".join(conversation.session.contents.text(page) for page in range(1, pages + 1))
        assert shown == "".join(texts[:20_000]) + ("marked" if marked else "") + "".join(texts[20_000:])
        # A part that says the same in fewer parts is the same history.
        [message] = form.read(json.dumps({"role": "user", "content": [{"type": kind, "text": shown}]}).encode())
        assert canonical([message]) == conversation.digests
    assert path.stat().st_size < 4_000_000


def test_a_message_with_few_parts_has_a_page_for_each() -> None:
    parts = [{"type": "text", "text": "x"} for _ in range(MAX_PARTS)]
    [message] = ChatForm().read(json.dumps({"role": "user", "content": parts}).encode())
    assert len(message.parts) == MAX_PARTS


def test_memory_is_given_back(tmp_path: Path) -> None:
    form = ChatForm()

    def ask(histories: Histories, number: int) -> None:
        messages = [{"role": "user", "content": f"{number} {at}"} for at in range(200)]
        body = json.dumps({"model": "m", "messages": messages, "tools": [{"n": number, "x": "x" * 100_000}]}).encode()
        asked = form.open(body)
        conversation = histories.take(form, asked, None, "", link=False)
        conversation.cost(asked.beside[0])
        histories.give(conversation)

    with kilburn.open(str(tmp_path / "g.db"), window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        histories = Histories(store, RequestBounds(held=600_000))
        for number in range(8):
            ask(histories, number)
        with traced():
            before = tracemalloc.get_traced_memory()[0]
            for number in range(8, 16):
                ask(histories, number)
            gc.collect()
            # One session is kept. The digests of all messages stand in a table that is there from the start.
            assert tracemalloc.get_traced_memory()[0] - before < 200 * 2500 + 100_000
        # What was put away is found again.
        ask(histories, 0)
        assert len(store.sessions()) == 16


def test_refused_bodies_leave_nothing(door: Callable[..., int]) -> None:
    port = door(CHAT)
    warm(port, CHAT)
    numbers, deep = ARRAYS["chat/completions, numbers for messages"].sized(SIZE), b'{"x":' + b"[" * SIZE
    post(port, CHAT, numbers)
    with traced():
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(8):
            assert post(port, CHAT, numbers)[0] == 400
            assert post(port, CHAT, deep)[0] == 400
        warm(port, CHAT)
        gc.collect()
        assert tracemalloc.get_traced_memory()[0] - before < 4 * SIZE


def test_a_long_honest_session_with_many_parts_and_images_is_answered(tmp_path: Path) -> None:
    upstream = Upstream(otherwise="R")
    with serving(upstream) as far:
        settings = Settings(db=str(tmp_path / "g.db"), upstream=f"{far}/v1", tokenizer="chars/4", embedder=None, window=20_000)
        with serving(build(settings)) as url:
            image = {"type": "image_url", "image_url": {"url": "data:image/png;base64," + "iVBORw0KGgo" * 91_000}}
            messages: list[Any] = []
            for number in range(500):
                parts = [
                    {"type": "text", "text": f"Part {at} of message {number}, with [brackets], {{braces}}."} for at in range(5)
                ]
                parts += [image] if number % 50 == 7 else []
                messages += [{"role": "user", "content": parts}, {"role": "assistant", "content": f"Reply {number}."}]
            messages.append({"role": "user", "content": "Go on."})
            body = json.dumps({"model": "m", "messages": messages}).encode()
            assert len(body) > 10_000_000
            reply = httpx2.post(f"{url}{CHAT}", content=body, timeout=600)
            assert reply.status_code == 200, reply.text
    assert not upstream.refused

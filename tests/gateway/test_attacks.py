"""Clients and providers that do what they should not: what is promised must hold."""

from __future__ import annotations

import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import unquote

import anyio
import httpx2
import pytest

from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import Refusal, Upstream, calling, serving

FILLER = "The river carries sand, and the sand carries gold. "


def post(url: str, messages: list[Any], headers: dict[str, str] | None = None, **more: Any) -> httpx2.Response:
    body = {"model": "m", "messages": messages, **more}
    return httpx2.post(f"{url}/v1/chat/completions", json=body, headers=headers or {}, timeout=600)


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def said(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def sessions(setup: Any) -> dict[str, list[Any]]:
    with setup.store() as store:
        return {info.name: [m.get("content") for m in store.session(info.name).contents.messages()] for info in store.sessions()}


def test_a_session_that_another_writer_went_on_with_is_read_again(gateway: Any) -> None:
    setup = gateway(Refusal(status=500), "fine", "more")
    assert post(setup.url, [user("Hi")]).status_code == 500
    sessions(setup)  # another window resizes the session, and that is written
    again = post(setup.url, [user("Hi")])
    assert again.status_code == 200, again.text
    assert sessions(setup) == {again.headers["x-kilburn-session"]: ["Hi", "fine"]}


def test_a_reply_is_kept_though_another_writer_went_on_meanwhile(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(lambda sent: sessions(setup) and "kept"))
    first = post(setup.url, [user("Hi")])
    assert first.status_code == 200, first.text
    assert sessions(setup) == {first.headers["x-kilburn-session"]: ["Hi", "kept"]}


def test_histories_of_one_beginning_stay_apart(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="R", delay=0.1))

    def talk(number: int) -> str:
        post(setup.url, [user("Hi")])
        return post(setup.url, [user("Hi"), said("R"), user(f"secret {number}")]).headers["x-kilburn-session"]

    with ThreadPoolExecutor(6) as pool:
        names = list(pool.map(talk, range(6)))
    assert len(set(names)) == 6
    found = sessions(setup)
    assert sorted(found[name][2] for name in names) == [f"secret {number}" for number in range(6)]
    assert all(len(sent.body["messages"]) in (1, 3) for sent in setup.upstream.sent)


def test_the_forks_of_a_beginning_are_found_without_asking_for_each(gateway: Any) -> None:
    setup = gateway(*(f"R{number}" for number in range(9)), upstream=None)
    name = post(setup.url, [user("Hi")]).headers["x-kilburn-session"]
    for _ in range(8):
        post(setup.url, [user("Hi")])
    assert [*sessions(setup)] == [name, *(f"{name}~{number}" for number in range(2, 10))]


def test_what_a_client_edits_cuts_and_repeats_is_what_the_model_sees(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="R"))
    base = [user("a"), said("R"), user("b"), said("R"), user("c")]
    for end in (1, 3, 5):
        post(setup.url, base[:end])
    for history in (
        [user("a"), said("EDITED"), user("b"), said("R"), user("d")],
        base[:3],
        [user("b"), said("R"), user("a"), said("R"), user("c")],
        [user("a"), user("a"), user("a")],
        [*base, said("R"), *base],
        [*base, said("R"), said("R"), user("d")],
        base,
    ):
        assert post(setup.url, history).status_code == 200
        assert setup.upstream.sent[-1].body["messages"] == history
    assert any(history[:6] == ["a", "R", "b", "R", "c", "R"] for history in sessions(setup).values())


def test_the_time_in_the_system_prompt_forks_nothing(gateway: Any) -> None:
    setup = gateway(window=2000, upstream=Upstream(otherwise="R"))
    history: list[Any] = []
    names = set()
    for minute in range(16):
        history.append(user(f"q{minute} " + FILLER * 10))
        system = {"role": "system", "content": f"Be brief. It is 12:{minute:02}."}
        names.add(post(setup.url, [system, *history]).headers["x-kilburn-session"])
        assert setup.upstream.sent[-1].body["messages"][0] == system
        history.append(said("R"))
    assert len(names) == 1


NO_NAMES = {
    "a tab": b"a\tb",
    "too long": b"x" * 10_000,
    "a little too long, in letters": "ü".encode() * 201,
    "a memory": b"@memory/ana",
    "the memory": b"@memory",
    "a document": b"@document/x",
    "no document": b"@documents/x",
    "a forgotten one": b"@forgotten/1",
    "in Latin-1": "Größe".encode("latin-1"),
    "half a character": "Größe".encode()[:3],
    "with a zero-width space": "a\u200bb".encode(),
    "written backwards": "a\u202eb".encode(),
    "a surrogate": b"\xed\xa0\x80",
    "a control character in UTF-8": "a\x85b".encode(),
}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_session_name_that_is_none(gateway: Any, path: str) -> None:
    setup = gateway(upstream=Upstream(otherwise="R"))
    body = {"model": "m", "max_tokens": 9, "messages": [user("Hi")]}
    for case, name in NO_NAMES.items():
        reply = httpx2.post(setup.url + path, json=body, headers=[(b"x-kilburn-session", name)], timeout=600)
        assert reply.status_code == 400, (case, reply.text)
        assert reply.json()["error"]["type"] == "invalid_request_error", case
        assert ("type" in reply.json()) == (path == "/v1/messages")
    assert not setup.upstream.sent
    assert not sessions(setup)


def test_a_session_name_of_any_letters(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="R"))
    names = ["work", "Größe 7", "作業", "a/b", "a@b", "../x", "~", "a~b", "x" * 200]
    for name in names:
        history: list[Any] = []
        for _ in range(2):
            history.append(user("Hi"))
            body = {"model": "m", "messages": history}
            headers = [(b"x-kilburn-session", name.encode())]
            reply = httpx2.post(f"{setup.url}/v1/chat/completions", json=body, headers=headers, timeout=600)
            assert dict(reply.headers.raw)[b"x-kilburn-session"].decode() == name
            history.append(said("R"))
    assert sessions(setup) == {name: ["Hi", "R", "Hi", "R"] for name in names}


def test_a_client_that_sends_the_name_of_a_fork_back_goes_on_with_it(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="R"))
    post(setup.url, [user("a")], {"x-kilburn-session": "work"})
    history, name = [user("b")], "work"
    for words in ("c", "d"):
        name = post(setup.url, history, {"x-kilburn-session": name}).headers["x-kilburn-session"]
        history += [said("R"), user(words)]
    assert sessions(setup) == {"work": ["a", "R"], "work~2": ["b", "R", "c", "R"]}


def test_a_session_name_with_an_escape_never_reaches_a_terminal(gateway: Any) -> None:
    setup = gateway(upstream=Upstream(otherwise="R"))
    body = json.dumps({"model": "m", "messages": [user("Hi")]}).encode()
    with socket.create_connection(("127.0.0.1", int(setup.url.rsplit(":", 1)[1])), timeout=600) as connection:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\n"
        head += f"x-kilburn-session: a\x1b[2Jb\r\ncontent-length: {len(body)}\r\n\r\n"
        connection.sendall(head.encode() + body)
        assert b" 400 " in connection.recv(65536)[:20]
    assert not sessions(setup)


@pytest.mark.parametrize("kind", ["application/json", "text/html"])
def test_a_streamed_request_that_is_answered_with_no_stream_hears_what_was_said(gateway: Any, kind: str) -> None:
    async def far(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind.encode())]})
            await send({"type": "http.response.body", "body": b'{"error": {"message": "no"}}'})

    with serving(far) as url:
        setup = gateway(upstream=Upstream())
        with serving(build(Settings(db=str(setup.db), upstream=f"{url}/v1", tokenizer="chars/4", embedder=None))) as near:
            reply = post(near, [user("Hi")], stream=True)
            assert (reply.status_code, reply.text) == (200, '{"error": {"message": "no"}}')
            assert reply.headers["content-type"] == kind


@pytest.mark.parametrize("streamed", [False, True])
def test_an_answer_that_is_framed_wrongly_in_its_middle_is_an_error_at_once(gateway: Any, streamed: bool) -> None:
    far = socket.create_server(("127.0.0.1", 0))
    kind, begun = (b"text/event-stream", b": ") if streamed else (b"application/json", b"{ ")

    def answer() -> None:
        connection = far.accept()[0]
        with connection:
            connection.recv(1 << 16)
            connection.sendall(
                b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ntransfer-encoding: chunked\r\n\r\n2\r\n%s\r\n" % (kind, begun)
            )
            time.sleep(0.2)  # another packet
            connection.sendall(b"zz\r\nxx\r\n")
            connection.recv(1)

    settings = Settings(
        db=str(gateway(upstream=Upstream()).db),
        upstream=f"http://127.0.0.1:{far.getsockname()[1]}/v1",
        tokenizer="chars/4",
        embedder=None,
    )
    with far, serving(build(settings)) as near, ThreadPoolExecutor(1) as pool:
        answered = pool.submit(answer)
        reply = post(near, [user("Hi")], stream=streamed)
        assert reply.status_code == (200 if streamed else 502)
        assert "broke off" in reply.text
        answered.result(600)


@pytest.mark.parametrize("streamed", [False, True])
def test_endless_and_nonsensical_recalls_end(gateway: Any, streamed: bool) -> None:
    setup = gateway(window=2000, upstream=Upstream(otherwise="R"))
    history: list[Any] = []
    for turn in range(20):
        history.append(user(f"q{turn} " + FILLER * 10))
        assert post(setup.url, history).status_code == 200
        history.append(said("R"))
    before = len(setup.upstream.sent)
    nonsense = [{}, {"address": None}, {"address": "p" * 200}, {"address": "../../etc/passwd"}, {"address": "p1\x00"}, {"x": 1}]
    setup.upstream.otherwise = calling(*[("recall", each) for each in nonsense * 4], ("search_memory", {"query": None}))
    reply = post(setup.url, [*history, user("go")], stream=streamed)
    assert reply.status_code == 200
    assert '"recall"' not in reply.text
    assert len(setup.upstream.sent) - before < 10
    setup.upstream.otherwise = "fine"
    assert post(setup.url, [*history, user("go"), said("x"), user("next")]).status_code == 200
    assert not setup.upstream.refused


@pytest.mark.parametrize("method", ["GET", "POST", "DELETE"])
@pytest.mark.parametrize(
    "path", ["/v1/responses/%2e%2e/files/f1", "/v1/responses/..%2F..%2Fadmin", "/v1/responses/a/%2E%2E/../../admin"]
)
def test_a_path_never_leads_out_of_what_is_spoken(gateway: Any, method: str, path: str) -> None:
    setup = gateway()
    host, port = setup.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=600) as client:
        client.sendall(f"{method} {path} HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".encode())
        assert client.makefile("rb").readline() == b"HTTP/1.1 404 Not Found\r\n"
    assert not setup.upstream.sent


def test_a_name_in_a_path_stays_a_name(gateway: Any) -> None:
    setup = gateway()
    for name in ("org/model:1", "a%3Fb=c", "a%23b", "%C3%A9"):
        assert httpx2.get(f"{setup.url}/v1/models/{name}?after=x").status_code == 200
        assert setup.upstream.sent[-1].path == f"/v1/models/{unquote(name)}"


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages", "/v1/responses"])
def test_a_reply_is_over_though_the_upstream_keeps_its_stream_open(gateway: Any, path: str) -> None:
    provider, over = Upstream("Done."), threading.Event()

    async def lingering(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: dict[str, Any]) -> None:
            last = message["type"] == "http.response.body" and not message.get("more_body")
            await send({**message, "more_body": True} if last else message)
            if last:
                while not over.is_set():
                    await anyio.sleep(0.01)

        await provider(scope, receive, tell if scope["type"] == "http" else send)

    setup = gateway(upstream=lingering, form="messages" if path == "/v1/messages" else "chat")
    asked = {"model": "m", "stream": True, "max_tokens": 9, "input" if path == "/v1/responses" else "messages": [user("Hi")]}
    try:
        answer = httpx2.post(f"{setup.url}{path}", json=asked, timeout=600)
    finally:
        over.set()
    assert "Done" in answer.text
    assert "error" not in answer.text.replace('"error":null', "").replace('"error": null', "")
    [said] = sessions(setup).values()
    assert len(said) == 2

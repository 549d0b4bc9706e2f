"""A tenant's data is not reachable with another's key, by any route; bad bodies get an error, and leave the store sound."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

import kilburn
from kilburn.backends.sqlite import Sqlite
from kilburn.backends.upkeep import inspect_store
from kilburn.gateway.app import Settings, build
from kilburn.gateway.keys import Key, add_key
from kilburn.gateway.limits import RequestBounds
from kilburn.model import Delta, Reply, Request
from kilburn.models.scripted import Scripted
from kilburn.testing.upstream import Refusal, Sent, Upstream, calling, serving

CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"
FILLER = "The river carries sand, and the sand carries gold. " * 8
WHO = ("ana", "bob", "eve")


class Endless(Scripted):
    """A model that always has a reply."""

    def stream(self, request: Request) -> Iterator[Delta | Reply]:
        self.enqueue("Noted.")
        return super().stream(request)


class House:
    """A gateway with a key for each tenant, before a provider whose model asks for all that it can get."""

    def __init__(self, folder: Path, stack: ExitStack, **options: Any) -> None:
        self.upstream = Upstream(otherwise=self.said)
        file, self.db = folder / "keys.json", folder / "house.db"
        self.keys = {who: add_key(file, Key(tenant=f"tenant-{who}", upstream="UPSTREAM_KEY"))[1] for who in WHO}
        self.keys["ana2"] = add_key(file, Key(tenant="tenant-ana", user="other", upstream="UPSTREAM_KEY"))[1]
        far = stack.enter_context(serving(self.upstream))
        given: dict[str, Any] = {"db": str(self.db), "keys": str(file), "upstream": far, "tokenizer": "chars/4", "window": 700}
        self.url = stack.enter_context(serving(build(Settings(**{**given, **options}))))
        self.http = stack.enter_context(httpx2.Client(base_url=self.url, timeout=600))

    def said(self, sent: Sent) -> Any:
        """Recalls and searches whatever may be there, whenever it is offered."""
        offered = [tool.get("name") or tool["function"]["name"] for tool in sent.body.get("tools", ())]
        if (
            "recall" in offered
            and sent.body["messages"][-1]["role"] == "user"
            and "tool_result" not in str(sent.body["messages"][-1])
        ):
            return calling(("recall", {"address": "p3"}), ("search_memory", {"query": "secret canary of ana bob eve"}))
        return "Noted."

    def ask(self, who: str, path: str, messages: list[dict[str, Any]], **headers: str) -> httpx2.Response:
        body = {"model": "m", "max_tokens": 50, "messages": messages}
        return self.http.post(path, json=body, headers={"x-api-key": self.keys[who], **headers})


@pytest.fixture
def house(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., House]]:
    monkeypatch.setenv("UPSTREAM_KEY", "sk-upstream-canary")
    with ExitStack() as stack:
        yield lambda **options: House(tmp_path, stack, **options)


def secret(who: str) -> str:
    return f"canary-{who}-91c4"


def talk(who: str, turns: int, *, same: bool) -> list[dict[str, Any]]:
    """A history with the tenant's canary in it; its first messages may be those of everyone."""
    messages: list[dict[str, Any]] = []
    for turn in range(turns):
        words = f"Question {turn}. {FILLER}" if same and turn == 0 else f"Question {turn}: the secret is {secret(who)}. {FILLER}"
        messages += [{"role": "user", "content": words}, {"role": "assistant", "content": "Noted."}]
    return messages[:-1]


steps = st.lists(
    st.tuples(
        st.sampled_from(WHO),
        st.sampled_from([CHAT, MESSAGES]),
        st.sampled_from(["", "", "shared", "ana/shared", "@memory"]),
        st.integers(1, 9),
        st.booleans(),
    ),
    min_size=3,
    max_size=12,
)


def check_apart(house: House, who: str, answer: httpx2.Response, since: int) -> None:
    """Nothing that this tenant was told, or that was sent upstream for it, is another's."""
    others = [secret(other) for other in WHO if other != who]
    told = answer.text + str(answer.headers) + "".join(sent.raw.decode() for sent in house.upstream.sent[since:])
    assert not [each for each in others if each in told]


@pytest.mark.slow
def test_no_tenant_gets_anything_of_another(house: Callable[..., House]) -> None:
    it = house()

    @settings(max_examples=30)
    @given(steps=steps)
    def fuzz(steps: list[Any]) -> None:
        for who, path, name, turns, same in steps:
            since = len(it.upstream.sent)
            answer = it.ask(who, path, talk(who, turns, same=same), **({"x-kilburn-session": name} if name else {}))
            assert answer.status_code in (200, 400), answer.text
            check_apart(it, who, answer, since)

    fuzz()
    for who in WHO:
        for path in ("/metrics", "/sessions", "/v1/models", "/health", "/v1/models/x"):
            answer = it.http.get(path, headers={"x-api-key": it.keys[who]})
            check_apart(it, who, answer, len(it.upstream.sent))
            assert not [other for other in WHO if other != who and f"tenant-{other}" in answer.text]
    keys = [key.encode() for key in it.keys.values()]
    for sent in it.upstream.sent:
        assert not [key for key in keys if key in sent.raw or key.decode() in str(sent.headers)]


def test_the_recalls_of_the_fuzz_do_find_ones_own(house: Callable[..., House]) -> None:
    """Without this the test above could not fail."""
    it = house()
    for turns in (1, 4, 8, 9):
        it.ask("ana", CHAT, talk("ana", turns, same=True), **{"x-kilburn-session": "shared"})
    results = [
        str(message)
        for sent in it.upstream.sent
        for message in sent.body["messages"]
        if message["role"] == "tool" or "tool_result" in str(message)
    ]
    assert any(secret("ana") in result for result in results)


def test_a_session_of_another_user_of_the_tenant_is_not_continued(house: Callable[..., House]) -> None:
    it = house()
    it.keys["ana"], it.keys["first"] = it.keys["ana2"], it.keys["ana"]
    history = talk("ana", 2, same=False)
    named = {"x-kilburn-session": "shared"}
    assert it.ask("ana", CHAT, history, **named).status_code == 200
    file = it.db.parent / "keys.json"
    it.keys["third"] = add_key(file, Key(tenant="tenant-ana", user="third"))[1]
    more = [*history, {"role": "assistant", "content": "Noted."}, {"role": "user", "content": "?"}]
    own = it.ask("third", CHAT, more, **named)
    assert own.headers["x-kilburn-session"] == "shared~2"
    assert it.ask("ana", CHAT, more, **named).headers["x-kilburn-session"] == "shared"


def test_the_providers_key_is_sent_upstream_and_nowhere_else(house: Callable[..., House], tmp_path: Path) -> None:
    it = house()
    it.ask("ana", MESSAGES, talk("ana", 1, same=True), **{"anthropic-version": "2023-06-01"})
    assert it.upstream.sent[-1].headers["x-api-key"] == "sk-upstream-canary"
    it.ask("ana", CHAT, talk("ana", 1, same=True))
    assert it.upstream.sent[-1].headers["authorization"] == "Bearer sk-upstream-canary"
    written = b"".join(path.read_bytes() for path in tmp_path.iterdir() if path.is_file())
    assert b"sk-upstream-canary" not in written
    assert not [key for key in it.keys.values() if key.encode() in written]


def test_the_figures_of_real_requests(house: Callable[..., House]) -> None:
    it = house()
    for turns in (1, 4, 8, 9):
        assert it.ask("ana", CHAT, talk("ana", turns, same=True), **{"x-kilburn-session": "s"}).status_code == 200
    [row] = it.http.get("/sessions", headers={"x-api-key": it.keys["ana"]}).json()["sessions"]
    with kilburn.open(str(it.db), window=700, policy="fifo", tenant="tenant-ana", tokenizer="chars/4", embedder=None) as store:
        stats = store.session("s").stats()
        said = sum(len(str(message["content"])) for message in talk("ana", 9, same=True)) / 4
    assert row["requests"] == 4
    assert row["new"] == stats.tokens_seen
    assert row["shipped"] == stats.tokens_shipped
    assert row["faults"] == stats.faults > 0
    assert (row["hit_rate"], row["tokens_in_window"]) == (stats.hit_rate, stats.tokens_in_window)
    assert (row["window"], row["fill"]) == (700, stats.fill)
    assert said < row["sent"] < 4 * said
    assert row["replied"] > 0
    text = it.http.get("/metrics", headers={"x-api-key": it.keys["ana"]}).text
    found = {sample.name: sample.value for family in text_string_to_metric_families(text) for sample in family.samples}
    assert found["kilburn_upstream_calls_total"] == len(it.upstream.sent)
    assert found["kilburn_added_seconds_count"] == 4
    assert found["kilburn_added_seconds_sum"] > 0


def test_an_upstream_that_refuses_is_counted(house: Callable[..., House]) -> None:
    it = house()
    it.upstream.enqueue(Refusal(status=529))
    assert it.ask("ana", MESSAGES, talk("ana", 1, same=True)).status_code == 529
    text = it.http.get("/metrics", headers={"x-api-key": it.keys["ana"]}).text
    assert re.search(r'kilburn_requests_total\{route="/v1/messages",status="529",tenant="tenant-ana"\} 1.0', text)


BAD = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe{}",
    b'{"model": "m", "messages": "x"}',
    b'{"model": "m", "messages": [1]}',
    b'{"model": "m", "messages": [{}]}',
    b'{"model": "m", "messages": [{"role": "king", "content": "x"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\xff"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": {"a": 1}}]}',
    b'{"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
    b'{"model": "m", "messages": [{"role": "tool", "tool_call_id": "nobody", "content": "x"}]}',
    b'{"model": 5, "messages": [{"role": "user", "content": "x"}], "stream": "yes"}',
    b'{"model": "m", "max_tokens": -1, "n": "x", "messages": [{"role": "user", "content": "x"}], "tools": 7}',
    b"[" * 50_000,
    b'{"messages": ' + b"[" * 50_000,
    b'{"model": "m", "messages": [{"role": "user", "content": ' + b"[" * 50_000 + b"]" * 50_000 + b"}]}",
]


ODD = [
    b'{"model": "m", "%s": [{"role": "user", "content": {"a": 1}}]}',
    b'{"model": "m", "%s": [{"role": "user", "content": [{"type": "text", "text": 5}]}]}',
    b'{"model": 5, "%s": [{"role": "user", "content": "x"}], "stream": "yes"}',
    b'{"model": "m", "max_tokens": -1, "n": "x", "%s": [{"role": "user", "content": "x"}], "tools": 7}',
]
"""What the provider may take, and refuses or does not."""
ODD = [body % key for body in ODD for key in (b"messages", b"input")]


@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
def test_bad_bodies_get_an_error_of_the_clients(house: Callable[..., House], path: str) -> None:
    it = house(limits=RequestBounds(messages=500))
    headers = {"x-api-key": it.keys["ana"], "content-type": "application/json"}
    many = json.dumps({"model": "m", "messages": [{"role": "user", "content": "x"}] * 501, "max_tokens": 5}).encode()
    if path == RESPONSES:
        many = many.replace(b'"messages"', b'"input"')
    for body in [*BAD, many]:
        body = body.replace(b'"messages": "x"', b'"input": 5').replace(b'"messages"', b'"input"') if path == RESPONSES else body
        answer = it.http.post(path, content=body, headers=headers)
        if body in ODD:
            fell = answer.text == "Internal Server Error"  # the provider of this test, over tools that are no list
            assert fell or answer.status_code in (200, 400), (body[:100], answer.text)
            continue
        assert 400 <= answer.status_code < 500, (body[:100], answer.status_code, answer.text)
        error = answer.json()["error"]
        assert error["message"]
        assert error["type"]
    assert it.http.post(path, content=many, headers=headers).status_code == 413
    assert it.ask("ana", CHAT, talk("ana", 1, same=True)).status_code == 200
    assert it.http.get("/nothing", headers=headers).json()["error"]["code"] == "unknown_url"
    assert it.http.get(path, headers=headers).status_code == 403


words = st.sampled_from([
    "user", "assistant", "system", "developer", "tool", "function", "text", "tool_use", "tool_result", "thinking", "image", "c1",
    "redacted_thinking", "server_tool_use", "web_search_tool_result", "image_url", "message", "function_call", "custom_tool_call",
    "function_call_output", "reasoning", "item_reference", "web_search_call", "input_text", "output_text", "input_image", "{}",
    "refusal", "recall", "read", "custom", "auto", "ephemeral", "data:image/png;base64,AA", "base64", "url",
])  # fmt: skip
leaves = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(-1, 1, width=16) | st.text(max_size=8) | words
KEYS = (
    "type", "text", "id", "call_id", "tool_use_id", "tool_call_id", "name", "input", "arguments", "output", "content", "thinking",
    "signature", "data", "source", "image_url", "url", "cache_control", "function", "custom", "tool_calls", "summary", "detail",
    "refusal", "audio", "reasoning_content", "function_call", "encrypted_content", "clear_at", "output_config", "citations",
)  # fmt: skip
jsons = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(KEYS) | st.text(max_size=5), inner, max_size=4),
    max_leaves=9,
)
messages = st.fixed_dictionaries(
    {"role": words | jsons, "content": jsons}, optional={key: jsons for key in KEYS if key != "content"}
) | (
    st.fixed_dictionaries(
        {"type": words}, optional={**dict.fromkeys(KEYS[6:12], jsons), "call_id": st.just("c1"), "name": words, "role": words}
    )
)
fields = ("stream", "system", "tools", "tool_choice", "stop", "n", "instructions", "previous_response_id", "text", "temperature")
given_bodies = [
    st.fixed_dictionaries({key: st.lists(messages, max_size=4) | jsons}, optional=dict.fromkeys(fields, jsons))
    for key in ("messages", "input")
]


@pytest.mark.parametrize("settings_", [{"stop": 1}, {"stop": [1]}, {"stop": {"a": "b"}}, {"top_p": "much"}, {"top_p": True}])
@pytest.mark.parametrize("path", [CHAT, MESSAGES, RESPONSES])
@pytest.mark.parametrize("local", [False, True])
def test_settings_of_another_type_are_no_fault_of_the_gateway(
    house: Callable[..., House], local: bool, path: str, settings_: dict[str, Any]
) -> None:
    it = house(**({"upstream": None, "model": Endless()} if local else {}))
    said = {"input": "hello"} if path == RESPONSES else {"messages": [{"role": "user", "content": "hello"}]}
    answer = it.http.post(path, json={"model": "m", "max_tokens": 9, **said, **settings_}, headers={"x-api-key": it.keys["ana"]})
    # Messages know no `stop`, and what their provider does with it is its affair.
    assert answer.status_code in ((400,) if "stop" in settings_ and path != MESSAGES else (200, 400)), answer.text


@pytest.mark.slow
@pytest.mark.parametrize("local", [False, True])
def test_fuzzed_bodies_never_break_the_gateway(house: Callable[..., House], local: bool) -> None:
    it = house(**({"upstream": None, "model": Endless()} if local else {}))
    headers = {"x-api-key": it.keys["ana"], "content-type": "application/json"}

    @settings(max_examples=500)
    @given(path=st.sampled_from([CHAT, MESSAGES, RESPONSES]), data=st.data())
    def fuzz(path: str, data: Any) -> None:
        body = data.draw(given_bodies[path == RESPONSES])
        body |= {"model": "m", "max_tokens": 9} if data.draw(st.booleans()) else data.draw(given_bodies[0])
        raw = data.draw(st.just(json.dumps(body).encode()) | st.binary(max_size=60))
        answer = it.http.post(path, content=raw, headers=headers)
        assert answer.status_code < 500, (answer.status_code, answer.text)
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]

    fuzz()
    assert it.ask("ana", CHAT, talk("ana", 1, same=True)).status_code == 200
    with Sqlite(str(it.db), tenant="tenant-ana") as backend:
        assert not inspect_store(backend)

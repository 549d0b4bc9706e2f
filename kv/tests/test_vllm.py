"""The client for vLLM: against a server on the loopback that keeps a prefix cache as vLLM does, against llama.cpp's
own server, and against a real vLLM where KILBURN_VLLM says where one is.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.errors import Overlong, RateLimited, Refused, SpecError, Unavailable
from kilburn.kernel.resolve import resolve
from kilburn.model import Request, ToolSpec, complete
from kilburn.models.retry import Retry
from kilburn.models.weights import pull
from kilburn.testing.models import check_model
from kilburn_kv.vllm import SECRET, Prefix, Vllm, salt_of
from kilburn_kv.vllm_metrics import VllmMetrics, read_metrics, samples
from models.loopback import CUT, Answer, loopback

ONCE = Retry(attempts=1)
KEY = "a secret of the operator"
WINDOW = 4000
BLOCK = 8


class Paged(ThreadingHTTPServer):
    """Speaks vLLM's forms, and remembers full blocks of tokens under the hash of all before them, salt first."""

    daemon_threads = True

    def __init__(self, *, details: bool = True, current: bool = True) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.details, self.current = details, current
        self.blocks: set[tuple[Any, ...]] = set()
        self.queries = self.hits = 0
        self.asked: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def tokens(self, body: dict[str, Any]) -> list[int]:
        """A template as models have them, tools in the first message, four letters a token."""
        text = json.dumps(body.get("tools") or "") + json.dumps(body.get("chat_template_kwargs") or "")
        for message in body["messages"]:
            text += f"<{message['role']}>{message['content']}<end>"
        return [crc32(text[at : at + 4].encode()) for at in range(0, len(text), 4)] + [1]

    def read(self, body: dict[str, Any]) -> tuple[int, int]:
        """Tokens of the prompt, and how many of them were cached."""
        tokens = self.tokens(body)
        cached = 0
        with self.lock:
            whole = [(body.get("cache_salt"), *tokens[:end]) for end in range(BLOCK, len(tokens) + 1, BLOCK)]
            for end, block in zip(range(BLOCK, len(tokens), BLOCK), whole, strict=False):
                if block not in self.blocks:
                    break
                cached = end
            self.blocks.update(whole)
            self.queries += len(tokens)
            self.hits += cached
        return len(tokens), cached

    def metrics(self) -> str:
        labels = '{engine="0",model_name="m"}'
        prefix, usage = ("prefix_cache", "kv_cache_usage_perc") if self.current else ("gpu_prefix_cache", "gpu_cache_usage_perc")
        return (
            "# HELP python_info Python platform information.\n# TYPE python_info gauge\n"
            'python_info{implementation="CPython",major="3"} 1.0\n'
            f"# TYPE vllm:num_requests_running gauge\nvllm:num_requests_running{labels} 2.0\n"
            f'vllm:num_requests_waiting{labels} 3.0\nvllm:num_requests_waiting_by_reason{{engine="0",reason="capacity"}} 3.0\n'
            f"vllm:{usage}{labels} 0.25\n"
            f"# TYPE vllm:{prefix}_queries_total counter\nvllm:{prefix}_queries_total{labels} {float(self.queries)}\n"
            f"vllm:{prefix}_queries_created{labels} 1.7952560827379327e+09\n"
            f"vllm:{prefix}_hits_total{labels} {float(self.hits)}\n"
            f"vllm:num_preemptions_total{labels} 1.0\n"
            f'vllm:cache_config_info{{block_size="{BLOCK}",enable_prefix_caching="True",num_gpu_blocks="364"}} 1.0\n'
        )


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Paged

    def do_GET(self) -> None:
        self._send(200, self.server.metrics().encode(), "text/plain; version=0.0.4; charset=utf-8")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.keys.append(self.headers["authorization"])
        try:
            if self.path == "/tokenize":
                tokens = self.server.tokens(body)
                self._json(200, {"count": len(tokens), "max_model_len": WINDOW, "tokens": tokens, "token_strs": None})
            else:
                self._complete(body)
        except OSError:
            self.close_connection = True

    def _complete(self, body: dict[str, Any]) -> None:
        self.server.asked.append(body)
        if len(self.server.tokens(body)) > WINDOW:
            said = f"This model's maximum context length is {WINDOW} tokens. However, your prompt contains more."
            self._json(400, {"error": {"message": said, "type": "BadRequestError", "param": "input_tokens", "code": 400}})
            return
        prompt, cached = self.server.read(body)
        usage: dict[str, Any] = {"prompt_tokens": prompt, "total_tokens": prompt + 2, "completion_tokens": 2}
        usage["prompt_tokens_details"] = {"cached_tokens": cached, "created_cache_tokens": 0} if self.server.details else None
        chunk = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": body["model"]}
        pieces = [({"role": "assistant", "content": ""}, None), ({"content": "Re"}, None), ({"content": "d"}, "stop")]
        chunks = [{**chunk, "choices": [{"index": 0, "delta": delta, "finish_reason": end}]} for delta, end in pieces]
        events = [json.dumps(event) for event in [*chunks, {**chunk, "choices": [], "usage": usage}]]
        self._send(200, "".join(f"data: {event}\n\n" for event in [*events, "[DONE]"]).encode(), "text/event-stream")

    def _json(self, status: int, body: dict[str, Any]) -> None:
        self._send(status, json.dumps(body).encode(), "application/json")

    def _send(self, status: int, body: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        return

    def finish(self) -> None:
        with suppress(OSError):
            super().finish()


@contextmanager
def serving(kind: type[Paged] = Paged, **more: Any) -> Iterator[Paged]:
    server = kind(**more)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def paged() -> Iterator[Paged]:
    with serving() as server:
        yield server


def connect(server: Paged, tenant: str | None = None, **more: Any) -> Vllm:
    return Vllm("m", server.url, tenant=tenant, secret=KEY if tenant else None, **{"retry": ONCE, **more})


def say(*texts: str, **more: Any) -> Request:
    """A conversation in which user and assistant take turns."""
    messages = [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]
    return Request(messages=messages, **{"max_tokens": 8, "temperature": 0.0, **more})


def cached_of(model: Vllm, request: Request) -> int:
    usage = complete(model, request).usage
    assert usage is not None
    return usage.cached


def prefix_of(model: Vllm) -> Prefix:
    assert model.prefix is not None
    return model.prefix


LONG = ["the river is long and cold " * 4, "Noted.", "the city is loud and warm " * 4, "Noted too.", "And now?"]


def test_contract(paged: Paged) -> None:
    check_model(lambda: connect(paged, "a"))


def test_a_spec_names_it(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, KEY)
    with resolve("models", f"kilburn_kv.vllm:Vllm('m', base_url='{paged.url}/v1/', tenant='a')") as model:
        assert complete(model, say("hello")).text == "Red"
    assert paged.asked[0]["cache_salt"] == salt_of("a", KEY)


def test_a_salt_hides_its_tenant_and_fits_what_vllm_takes() -> None:
    salt = salt_of("acme", KEY)
    assert salt == salt_of("acme", KEY)
    assert len({salt, salt_of("acme2", KEY), salt_of("acme", KEY + "2")}) == 3
    assert "acme" not in salt
    assert KEY not in salt
    assert len(salt) <= 128
    assert not set(salt) & set("@/\\\0")


@pytest.mark.parametrize("secret", [None, "", "too short"])
def test_a_tenant_needs_a_secret(secret: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    with pytest.raises(SpecError, match="secret"):
        Vllm("m", tenant="a", secret=secret)


def test_without_a_tenant_no_salt_is_sent(paged: Paged) -> None:
    with connect(paged) as model:
        complete(model, say("hello", options={"top_k": 3}))
    assert "cache_salt" not in paged.asked[0]
    assert paged.asked[0]["top_k"] == 3


def test_a_request_cannot_leave_its_tenant(paged: Paged) -> None:
    with connect(paged, "a") as model, pytest.raises(Refused, match="cache_salt"):
        complete(model, say("hello", options={"cache_salt": salt_of("b", KEY)}))
    assert paged.asked == []


def test_the_key_of_another_provider_stays_here(paged: Paged, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-not-for-you")
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with connect(paged) as model:
        complete(model, say("hello"))
        model.preview(say("hello"))
    monkeypatch.setenv("VLLM_API_KEY", "k1")
    with connect(paged) as model:
        complete(model, say("hello"))
    assert set(paged.keys[:-1]) == {"Bearer none"}
    assert paged.keys[-1] == "Bearer k1"


def test_tenants_share_nothing_and_one_tenant_shares_all(paged: Paged) -> None:
    with connect(paged, "a") as one, connect(paged, "a") as same, connect(paged, "b") as other, connect(paged) as nobody:
        assert cached_of(one, say(*LONG)) == 0
        assert cached_of(same, say(*LONG)) > 0
        assert cached_of(other, say(*LONG)) == 0
        assert cached_of(nobody, say(*LONG)) == 0


LOOK = ToolSpec(
    name="look",
    description="Looks.",
    parameters={
        "type": "object",
        "properties": {"where": {"type": "string", "description": "a place"}, "again": {"type": "boolean"}},
        "required": ["where"],
    },
)
SAME_LOOK = ToolSpec(
    name="look",
    description="Looks.",
    parameters={
        "required": ["where"],
        "properties": {"where": {"description": "a place", "type": "string"}, "again": {"type": "boolean"}},
        "type": "object",
    },
)
FIND = ToolSpec(name="find", description="Finds.", parameters={"type": "object", "properties": {}})


def test_the_same_tools_are_the_same_prompt(paged: Paged) -> None:
    with connect(paged, "a") as model:
        complete(model, say(*LONG, tools=(LOOK, FIND)))
        first = cached_of(model, say(*LONG, tools=(FIND, SAME_LOOK)))
    assert first > 0
    assert prefix_of(model).change is None
    assert json.dumps(paged.asked[0]["tools"]) == json.dumps(paged.asked[1]["tools"])


def test_properties_keep_their_order(paged: Paged) -> None:
    """A model writes arguments in the order of the properties, so that order is not ours to change."""
    inner = {"type": "object", "properties": {"properties": {"type": "string"}, "a": {"type": "null"}}}
    data = {"z": 1, "a": 2}
    parameters = {
        "type": "object",
        "properties": {"thought": {"default": data}, "answer": inner},
        "$defs": {"b": {}, "a": {"anyOf": [{"z": 1, "a": 2}]}},
    }
    with connect(paged) as model:
        complete(model, say("hello", tools=(ToolSpec(name="t", description="", parameters=parameters),)))
    sent = paged.asked[0]["tools"][0]["function"]["parameters"]
    assert sent == parameters
    assert list(sent) == ["$defs", "properties", "type"]
    assert list(sent["$defs"]["a"]["anyOf"][0]) == ["a", "z"]
    assert list(sent["properties"]) == ["thought", "answer"]
    assert list(sent["properties"]["answer"]["properties"]) == ["properties", "a"]
    assert list(sent["properties"]["thought"]["default"]) == ["z", "a"]


def test_the_first_prompt_has_nothing_before_it(paged: Paged) -> None:
    with connect(paged, "a") as model:
        assert model.prefix is None
        complete(model, say(*LONG))
    prefix = prefix_of(model)
    assert (prefix.unit, prefix.previous, prefix.common, prefix.lost, prefix.change) == ("characters", 0, 0, 0, None)
    assert prefix.cached == 0


def test_a_prompt_that_only_grew_loses_nothing(paged: Paged) -> None:
    with connect(paged, "a") as model:
        complete(model, say(*LONG))
        grown = say(*LONG, "Red", "Why?")
        foreseen = model.preview(grown)
        cached = cached_of(model, grown)
    assert (prefix_of(model).change, prefix_of(model).lost) == (None, 0)
    assert cached > 0
    assert foreseen.reusable == prefix_of(model).cached == cached


@pytest.mark.parametrize(("at", "where"), [(0, "messages[0]"), (2, "messages[2]"), (4, "messages[4]")])
def test_an_edit_costs_what_is_behind_it(paged: Paged, at: int, where: str, caplog: pytest.LogCaptureFixture) -> None:
    edited = [text.replace("cold", "deep").replace("warm", "dark").replace("now", "then") for text in LONG[: at + 1]]
    request = say(*LONG[:at], edited[at], *LONG[at + 1 :])
    with connect(paged, "a") as model:
        complete(model, say(*LONG))
        foreseen = model.preview(request)
        with caplog.at_level(logging.INFO, "kilburn"):
            cached = cached_of(model, request)
    prefix = prefix_of(model)
    assert prefix.change == foreseen.change == where
    assert 0 < prefix.lost == prefix.previous - prefix.common
    assert foreseen.reusable == cached
    assert cached % BLOCK == 0
    assert where in caplog.text
    assert "river" not in caplog.text


@pytest.mark.parametrize(
    ("more", "where"),
    [
        ({"tools": (LOOK,)}, "tools"),
        ({"options": {"chat_template_kwargs": {"date": "today"}}}, "options"),
        ({"options": {"top_k": 3}, "temperature": 1.0}, None),
    ],
)
def test_what_stands_before_the_messages_changes_all(paged: Paged, more: dict[str, Any], where: str | None) -> None:
    with connect(paged, "a") as model:
        complete(model, say(*LONG))
        foreseen = model.preview(say(*LONG, **more))
        cached = cached_of(model, say(*LONG, **more))
    assert prefix_of(model).change == where
    assert cached == foreseen.reusable
    assert (cached == 0) is (where is not None)


def test_a_dropped_message_is_a_change(paged: Paged) -> None:
    with connect(paged) as model:
        complete(model, say(*LONG))
        complete(model, say(*LONG[:3]))
    assert prefix_of(model).change == "messages[3]"
    assert prefix_of(model).lost > 0


def test_the_order_of_a_messages_keys_is_no_change(paged: Paged) -> None:
    with connect(paged) as model:
        complete(model, Request(messages=[{"role": "user", "content": "hi"}]))
        complete(model, Request(messages=[{"content": "hi", "role": "user"}]))
    assert prefix_of(model).change is None


def test_a_preview_sends_nothing_to_the_model(paged: Paged) -> None:
    with connect(paged, "a") as model:
        complete(model, say(*LONG))
        before = prefix_of(model)
        first, second = model.preview(say("Other.")), model.preview(say("Other."))
        assert first == second
        assert first.change == "messages[0]"
        assert model.prefix == before
    assert len(paged.asked) == 1
    assert paged.queries == first.previous


def test_a_template_that_rewrites_the_past_is_found() -> None:
    """The messages only grew, and yet the server's template writes the earlier ones otherwise."""

    class Forgetful(Paged):
        def tokens(self, body: dict[str, Any]) -> list[int]:
            *old, last = body["messages"]
            kept = [{**message, "content": message["content"].split("</think>")[-1]} for message in old]
            return super().tokens({**body, "messages": [*kept, last]})

    with serving(Forgetful) as server, connect(server) as model:
        complete(model, say("question", "<think>long thoughts</think>answer"))
        foreseen = model.preview(say("question", "<think>long thoughts</think>answer", "more"))
    assert foreseen.change == "template"
    assert foreseen.lost > 0


def test_a_fork_goes_on_from_its_parent(paged: Paged) -> None:
    with connect(paged, "a") as parent:
        complete(parent, say(*LONG))
        child = parent.fork()
        complete(child, say(*LONG, "Red", "To the child."))
        complete(parent, say("Elsewhere."))
        complete(child, say(*LONG, "Red", "To the child.", "Yes.", "Go on."))
    assert prefix_of(child).change is None
    assert prefix_of(parent).change == "messages[0]"
    assert len({body["cache_salt"] for body in paged.asked}) == 1


def test_a_failed_call_changes_no_report(paged: Paged) -> None:
    with connect(paged, "a") as model:
        complete(model, say(*LONG))
        before = model.prefix
        with pytest.raises(Overlong, match="maximum context length"):
            complete(model, say("long " * WINDOW))
        with pytest.raises(Refused, match="no JSON"):
            complete(model, Request(messages=[{"role": "user", "content": object()}]))
        assert model.prefix == before


def test_a_prompt_that_was_read_counts_though_its_reply_broke_off() -> None:
    chunk = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    begun = json.dumps({**chunk, "choices": [{"index": 0, "delta": {"content": "Re"}, "finish_reason": None}]})
    with loopback(Answer(events=[f"data: {begun}\n\n".encode(), CUT])) as server, Vllm("m", server.url, retry=ONCE) as model:
        with pytest.raises(Unavailable):
            complete(model, say(*LONG))
        assert prefix_of(model).length > 0
        assert prefix_of(model).cached is None


def test_a_server_without_details_reads_as_nothing_cached() -> None:
    with serving(details=False) as server, connect(server, "a") as model:
        complete(model, say(*LONG))
        assert cached_of(model, say(*LONG)) == 0
        assert model.metrics().hits == server.hits > 0


@pytest.mark.parametrize("current", [True, False])
def test_metrics_are_read_under_either_name(current: bool) -> None:
    with serving(current=current) as server, connect(server, "a") as model:
        before = model.metrics()
        complete(model, say(*LONG))
        cached = cached_of(model, say(*LONG))
        after = model.metrics()
    assert (after.running, after.waiting, after.usage, after.preemptions) == (2, 3, 0.25, 1)
    assert (after.block, after.blocks, after.caching) == (BLOCK, 364, True)
    assert after.found["queries"] == ("vllm:prefix_cache_queries_total" if current else "vllm:gpu_prefix_cache_queries_total")
    passed = after.since(before)
    assert (passed.hits, passed.queries) == (cached, server.queries)
    assert passed.hit_rate == cached / server.queries
    assert before.hit_rate is None


def test_metrics_that_are_missing_are_none() -> None:
    found = read_metrics('vllm:num_requests_waiting{engine="0"} 4\nvllm:num_requests_waiting{engine="1"} 1 1795256082\n')
    assert found == VllmMetrics(waiting=5, found={"waiting": "vllm:num_requests_waiting"})
    assert read_metrics("") == VllmMetrics()


def test_engines_are_summed_and_the_fullest_counts() -> None:
    page = "".join(
        f'vllm:prefix_cache_hits_total{{engine="{at}"}} {at + 5}.0\nvllm:kv_cache_usage_perc{{engine="{at}"}} 0.{at}\n'
        for at in range(3)
    )
    assert (read_metrics(page).hits, read_metrics(page).usage) == (18, 0.2)


def test_a_restart_counts_from_zero() -> None:
    old, new = VllmMetrics(queries=900, hits=500, preemptions=2), VllmMetrics(queries=1000, hits=3, preemptions=0)
    assert new.since(old) == new


NAME = st.from_regex(r"[a-zA-Z_:][a-zA-Z0-9_:]*", fullmatch=True)
# Two underscores in front are Prometheus' own.
LABEL = st.from_regex(r"(?!__)[a-zA-Z_][a-zA-Z0-9_]*", fullmatch=True)
SERIES = st.tuples(NAME, st.dictionaries(LABEL, st.text(), max_size=3), st.floats(allow_nan=False))


@given(st.lists(SERIES, max_size=4))
def test_samples_are_read_as_they_were_written(series: list[tuple[str, dict[str, str], float]]) -> None:
    def escaped(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    lines = ["# HELP a b", "", "no sample", "x{ 1"]
    for name, labels, value in series:
        inner = ",".join(f'{label}="{escaped(text)}"' for label, text in labels.items())
        written = {float("inf"): "+Inf", float("-inf"): "-Inf"}.get(value, repr(value))
        lines.append(f"{name}{{{inner}}} {written}" if labels else f"{name} {written} 1795256082")
    assert list(samples("\n".join(lines))) == series


@given(st.text())
def test_no_page_breaks_the_reader(text: str) -> None:
    noise = f"{text}\nvllm:num_requests_running NaN\nvllm:prefix_cache_hits_total{{{text}}} 1e308\n"
    assert read_metrics(noise).running is None


def test_a_server_that_is_no_vllm_is_told_apart() -> None:
    with loopback(Answer(404, body={"error": "no"}), forever=True) as server, Vllm("m", server.url, retry=ONCE) as model:
        with pytest.raises(Refused, match="has no /metrics"):
            model.metrics()
        with pytest.raises(Refused, match="has no /tokenize"):
            model.preview(say("hello"))
    with (
        loopback(Answer(body={"tokens": []})) as server,
        Vllm("m", server.url) as model,
        pytest.raises(Refused, match="no tokens"),
    ):
        model.preview(say("hello"))


def test_metrics_of_something_else_are_refused() -> None:
    class Other(Paged):
        def metrics(self) -> str:
            return "llamacpp:requests_processing 1\n"

    with serving(Other) as server, connect(server) as model:
        with pytest.raises(Refused, match="nothing of vLLM's"):
            model.metrics()
        assert model.preview(say("hello")).reusable is None


def test_nobody_listening_is_unavailable() -> None:
    with serving() as server:
        url = server.url
    with Vllm("m", url, retry=ONCE) as model:
        for call in (model.metrics, lambda: model.preview(say("hello")), lambda: complete(model, say("hello"))):
            with pytest.raises(Unavailable, match="is anything listening"):
                call()


def test_a_busy_server_is_rate_limited() -> None:
    busy = Answer(429, {"retry-after": "7"}, {"error": {"message": "queue is full"}})
    with loopback(busy) as server, Vllm("m", server.url, retry=ONCE) as model, pytest.raises(RateLimited) as caught:
        complete(model, say("hello"))
    assert caught.value.retry_after == 7


WORDS = st.lists(st.sampled_from(["ab", "abcdefgh" * 3, "river " * 9, "é"]), min_size=1, max_size=6)


@pytest.fixture(scope="module")
def unused() -> Iterator[Vllm]:
    """A model that never had a prompt; its forks begin anew."""
    with serving() as server, connect(server, "a") as model:
        yield model


def shared_letters(one: str, other: str) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@settings(max_examples=40)
@given(talks=st.lists(WORDS, min_size=2, max_size=4))
def test_reports_agree_with_what_the_server_kept(unused: Vllm, talks: list[list[str]]) -> None:
    """Whatever is edited, dropped or added: common is the longest common prefix, and no less is cached than foreseen."""
    model, old = unused.fork(), ""
    for texts in talks:
        request = say(*texts)
        inner = [json.dumps(it, sort_keys=True, separators=(",", ":"), ensure_ascii=False) for it in request.messages]
        whole = "".join(["{}[]", *inner])
        foreseen = model.preview(request)
        cached = cached_of(model, request)
        prefix = prefix_of(model)
        assert (prefix.previous, prefix.length) == (len(old), len(whole))
        assert prefix.common == shared_letters(old, whole)
        assert (prefix.change is None) == whole.startswith(old)
        assert foreseen.reusable is not None
        assert foreseen.reusable <= cached < foreseen.length
        old = whole


@pytest.mark.model
def test_llama_cpp_answers_it_too() -> None:
    """Any endpoint of that form answers; what only vLLM has is refused in words."""
    import xllamacpp

    given = xllamacpp.CommonParams()
    given.model.path = str(pull("smollm2"))
    given.n_ctx, given.n_parallel, given.verbosity = 1024, 1, -1
    given.fit_params = given.warmup = given.ui = False
    given.cpuparams.n_threads = given.cpuparams_batch.n_threads = 1
    server = xllamacpp.Server(given)
    with Vllm("smollm2", server.listening_address, tenant="a", secret=KEY, retry=ONCE) as model:
        request = say("Name a colour. " * 20)
        assert complete(model, request).text
        reply = complete(model, request)
        assert reply.text
        assert reply.usage is not None
        assert prefix_of(model).change is None
        assert prefix_of(model).cached == reply.usage.cached > 0
        with pytest.raises(Refused, match="has no /metrics"):
            model.metrics()
        with pytest.raises(Refused, match="no tokens"):
            model.preview(request)


REAL = os.environ.get("KILBURN_VLLM", "")
real = pytest.mark.skipif(
    not REAL, reason="needs a vLLM: KILBURN_VLLM=http://127.0.0.1:8000 (docs/howto/vllm.md starts one), key in VLLM_API_KEY"
)
STORY = [
    text
    for at in range(12)
    for text in (f"Report {at}: " + "the river is long and blue and cold. " * 14, "Noted, I have read it.")
] + ["How is the river?"]


@pytest.fixture(scope="module")
def real_name() -> str:
    import openai

    root = REAL.rstrip("/").removesuffix("/v1")
    with openai.OpenAI(base_url=f"{root}/v1", api_key=os.environ.get("VLLM_API_KEY") or "none") as client:
        return client.models.list().data[0].id


def tenant(name: str, label: str) -> Vllm:
    """A tenant that no run before this one had."""
    return Vllm(name, REAL, tenant=label, secret=secrets.token_hex(16), retry=ONCE)


@real
def test_real_contract(real_name: str) -> None:
    check_model(lambda: tenant(real_name, "contract"))


@real
def test_real_prefixes_are_foreseen_to_the_token(real_name: str) -> None:
    with tenant(real_name, "a") as model:
        before = model.metrics()
        assert before.caching is True
        assert before.block is not None
        assert cached_of(model, say(*STORY)) == 0
        again = model.preview(say(*STORY))
        assert again.reusable is not None
        assert again.reusable >= again.length - 1 - before.block
        assert cached_of(model, say(*STORY)) == again.reusable
        for at in (20, 11, 0):
            request = say(*STORY[:at], STORY[at] + " (edited)", *STORY[at + 1 :])
            foreseen = model.preview(request)
            assert foreseen.change == f"messages[{at}]"
            assert cached_of(model, request) == foreseen.reusable
            complete(model, say(*STORY))
        after = model.metrics().since(before)
        assert after.hits is not None
        assert after.hits > 3 * again.reusable
        assert (after.running, after.waiting) == (0, 0)


@real
def test_real_tenants_are_apart(real_name: str) -> None:
    with tenant(real_name, "a") as one, tenant(real_name, "b") as other:
        complete(one, say("warm"))
        reply, again = complete(one, say(*STORY)), complete(one, say(*STORY))
        before = one.metrics()
        theirs = complete(other, say(*STORY))
        passed = one.metrics().since(before)
        assert reply.usage is not None
        assert again.usage is not None
        assert theirs.usage is not None
        assert (reply.usage.cached, theirs.usage.cached, passed.hits) == (0, 0, 0)
        assert again.usage.cached > 0


@real
def test_real_errors_are_typed(real_name: str) -> None:
    with tenant(real_name, "a") as model:
        with pytest.raises(Overlong):
            complete(model, say("word " * 200_000))
        assert complete(model, say("hello")).text
    with tenant("no-such-model", "a") as model, pytest.raises(Refused):
        complete(model, say("hello"))

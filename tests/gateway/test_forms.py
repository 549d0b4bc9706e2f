"""Whatever a client or a provider says goes through: in every form, at every level, also once something has left the window."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from effort import rounds
from gateway.test_failures import Far
from kilburn.gateway.app import Settings, build
from kilburn.testing.upstream import serving

Json = dict[str, Any]

FILLER = "The river carries sand, and the sand carries gold. " * 20
PATHS = {"chat": "chat/completions", "messages": "messages", "responses": "responses"}
PIXEL = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="

CHAT: list[Json] = [
    {"role": "user", "name": "ana", "content": [
        {"type": "text", "text": "Look."},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{PIXEL}", "detail": "low"}},
        {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}},
        {"type": "file", "file": {"file_id": "file-1"}},
    ]},
    {"role": "assistant", "content": "I call.", "reasoning_content": "Hm.", "tool_calls": [
        {"id": "c1", "type": "function", "function": {"name": "read", "arguments": '{"path":  "a"}'}},
        {"id": "c2", "type": "function", "function": {"name": "read", "arguments": "{}"}},
        {"id": "c3", "type": "custom", "custom": {"name": "shell", "input": "ls"}},
    ]},
    {"role": "tool", "tool_call_id": "c1", "content": "one"},
    {"role": "tool", "tool_call_id": "c2", "content": [{"type": "text", "text": "two"}]},
    {"role": "tool", "tool_call_id": "c3", "content": "three"},
    {"role": "developer", "content": "Be brief."},
    {"role": "assistant", "content": None, "refusal": "No."},
    {"role": "user", "content": "Go on."},
    {"role": "assistant", "content": None, "audio": {"id": "audio_1"}},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
MESSAGES: list[Json] = [
    {"role": "user", "content": [
        {"type": "text", "text": "Look."},
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
        {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": "x"}, "citations": {"enabled": True}},
    ]},
    {"role": "assistant", "content": [
        {"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
        {"type": "redacted_thinking", "data": "cmVk"},
        {"type": "server_tool_use", "id": "srv1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "srv1", "content": [
            {"type": "web_search_result", "url": "https://a", "title": "A", "encrypted_content": "e", "page_age": None}]},
        {"type": "text", "text": "Found.", "citations": [
            {"type": "web_search_result_location", "url": "https://a", "title": "A", "encrypted_index": "i", "cited_text": "t"}]},
        {"type": "tool_use", "id": "t1", "name": "read", "input": {"path": "a", "n": 1.5}},
        {"type": "tool_use", "id": "t2", "name": "read", "input": {}},
    ]},
    {"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one", "is_error": False},
        {"type": "tool_result", "tool_use_id": "t2", "content": [{"type": "text", "text": "two"}, {
            "type": "image", "source": {"type": "url", "url": "https://b/c.png"}}]},
        {"type": "text", "text": "Go on."},
    ]},
    {"role": "assistant", "content": "Yes."},
    {"role": "user", "content": "And now?"},
]  # fmt: skip
RESPONSES: list[Json] = [
    {"type": "message", "role": "user", "content": [
        {"type": "input_text", "text": "Look."},
        {"type": "input_image", "image_url": f"data:image/png;base64,{PIXEL}", "detail": "low"},
        {"type": "input_image", "file_id": "file-1", "detail": "auto"},
        {"type": "input_file", "file_id": "file-2"},
    ]},
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "Hm."}], "encrypted_content": "ZW5j"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "q"}},
    {"type": "message", "role": "assistant", "phase": "commentary", "content": [
        {"type": "output_text", "text": "I call.", "annotations": [
            {"type": "url_citation", "start_index": 0, "end_index": 1, "url": "https://a", "title": "A"}]}]},
    {"type": "reasoning", "id": "rs_2", "summary": [], "encrypted_content": "bW9yZQ"},
    {"type": "function_call", "call_id": "c1", "name": "read", "arguments": '{"path":  "a"}'},
    {"type": "function_call", "call_id": "c2", "name": "read", "arguments": "{}"},
    {"type": "custom_tool_call", "call_id": "c3", "name": "shell", "input": "ls"},
    {"type": "function_call_output", "call_id": "c1", "output": "one"},
    {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_text", "text": "two"}]},
    {"type": "custom_tool_call_output", "call_id": "c3", "output": "three"},
    {"type": "message", "role": "developer", "content": "Be brief."},
    {"type": "message", "role": "user", "content": "And now?"},
]  # fmt: skip
TALKS = {"chat": CHAT, "messages": MESSAGES, "responses": RESPONSES}
BESIDE: dict[str, Json] = {
    "chat": {"model": "m", "n": 1, "logprobs": True, "top_logprobs": 2, "stop": ["END"], "parallel_tool_calls": True, "seed": 7,
             "tools": [{"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}},
                       {"type": "custom", "custom": {"name": "shell"}}]},
    "messages": {"model": "m", "max_tokens": 99, "stop_sequences": ["END"],
                 "thinking": {"type": "enabled", "budget_tokens": 2000},
                 "system": [{"type": "text", "text": "Rules.", "cache_control": {"type": "ephemeral", "ttl": "1h"}}],
                 "tools": [{"name": "read", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}},
                           {"type": "web_search_20250305", "name": "web_search"}]},
    "responses": {"model": "m", "instructions": "Rules.", "store": False, "include": ["reasoning.encrypted_content"],
                  "reasoning": {"effort": "low", "summary": "auto"}, "truncation": "disabled",
                  "tools": [{"type": "function", "name": "read", "parameters": {"type": "object"}, "strict": True},
                            {"type": "web_search"}]},
}  # fmt: skip
REPLIES: dict[str, Json] = {
    "chat": {"id": "r", "object": "chat.completion", "choices": [{"index": 0, "finish_reason": "tool_calls",
             "logprobs": {"content": []},
             "message": {"role": "assistant", "content": "Here.", "annotations": [{"type": "url_citation"}], "tool_calls": [
                 {"id": "d1", "type": "function", "function": {"name": "read", "arguments": "{}"},
                  "extra_content": {"g": {"sig": "s"}}},
                 {"id": "d2", "type": "custom", "custom": {"name": "shell", "input": "ls"}}]}}]},
    "messages": {"id": "r", "type": "message", "role": "assistant", "model": "m", "stop_reason": "end_turn", "container": None,
                 "content": [{"type": "thinking", "thinking": "Hm.", "signature": "c2ln"},
                             {"type": "redacted_thinking", "data": "eA"},
                             {"type": "text", "text": "Here.", "citations": [{"type": "char_location", "cited_text": "t"}]}]},
    "responses": {"id": "r", "object": "response", "status": "completed", "output": [
        {"type": "reasoning", "id": "rs_9", "summary": [], "encrypted_content": "bGFzdA"},
        {"type": "message", "id": "msg_9", "role": "assistant", "status": "completed", "phase": "final_answer", "content": [
            {"type": "output_text", "text": "Here.", "annotations": [{"type": "url_citation"}], "logprobs": []}]}]},
}  # fmt: skip

plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def nests(value: Any, form: str, at: str = "body") -> Iterator[Json]:
    """The objects of a request in which a field may be that nobody knows yet."""
    if isinstance(value, list):
        for inner in value:
            yield from nests(inner, form, at)
    elif isinstance(value, dict):
        # A message of Anthropic's form is put together anew; its blocks are not.
        if not (form == "messages" and "role" in value and "type" not in value):
            yield value
        for key, inner in value.items():
            if key not in ("input", "parameters", "input_schema"):
                yield from nests(inner, form, key)


def old_turns(form: str) -> list[Json]:
    """More than fits the window."""
    old: list[Json] = []
    for turn in range(36):
        old += [{"role": "user", "content": f"q{turn} {FILLER}"}, {"role": "assistant", "content": f"a{turn} {FILLER}"}]
    if form == "responses":
        old = [{"type": "message", **each} for each in old]
        for each in old[1::2]:
            each["content"] = [{"type": "output_text", "text": each["content"]}]
    return old


class Through:
    """A gateway before a provider that sends bytes."""

    def __init__(self, folder: Path, stack: ExitStack, form: str) -> None:
        self.form, self.far = form, Far()
        far = stack.enter_context(serving(self.far))
        upstream = far if form == "messages" else f"{far}/v1"
        given: Json = {
            "db": str(folder / "a.db"),
            "upstream": upstream,
            "tokenizer": "chars/4",
            "window": 15_000,
            "policy": "fifo",
        }
        self.url = stack.enter_context(serving(build(Settings(**given))))
        self.http = stack.enter_context(httpx2.Client(base_url=f"{self.url}/v1/", timeout=600))
        self.key = "input" if form == "responses" else "messages"

    def ask(self, talk: list[Json], beside: Json, reply: bytes, **headers: str) -> tuple[bytes, bytes]:
        """What went upstream, and what came back."""
        kind = "text/event-stream" if beside.get("stream") else "application/json"
        self.far.say = lambda _: (200, [("content-type", kind)], [reply])
        body = json.dumps({**beside, self.key: talk}, ensure_ascii=False).encode()
        answer = self.http.post(PATHS[self.form], content=body, headers={"content-type": "application/json", **headers})
        assert answer.status_code == 200, answer.text
        sent = self.far.asked[-1][1]
        assert len(talk) > 30 or sent == body
        return sent, answer.content


@pytest.fixture
def through(tmp_path: Path) -> Iterator[Callable[[str], Through]]:
    with ExitStack() as stack:
        yield lambda form: Through(tmp_path, stack, form)


def same(value: Any, form: str) -> Any:
    """A message without what the how-to says is changed: marks for the cache, and the ids that OpenAI gives to items."""
    if isinstance(value, list):
        return [same(inner, form) for inner in value]
    if not isinstance(value, dict):
        return value
    gone = {"cache_control"} if form == "messages" else set()
    if form == "responses" and value.get("type") in ("message", "function_call", "custom_tool_call"):
        gone = {"id", "status"}
    return {key: same(inner, form) for key, inner in value.items() if key not in gone}


def blocks(message: Json, form: str) -> Json:
    """A message of Anthropic's form with its content as blocks, which is the same."""
    if form == "messages" and isinstance(message["content"], str):
        return {**message, "content": [{"type": "text", "text": message["content"]}]}
    return message


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", list(PATHS))
def test_what_nobody_knows_yet_goes_through(through: Any, form: str, streamed: bool) -> None:
    it = through(form)
    old, count = old_turns(form), itertools.count()

    @settings(max_examples=rounds(5, 15), deadline=None)
    @given(data=st.data())
    def check(data: Any) -> None:
        talk, beside, reply = (copy.deepcopy(each[form]) for each in (TALKS, BESIDE, REPLIES))
        old[0]["content"] = f"Talk {next(count)}. {FILLER}"  # what is unknown is no part of what a history is recognised by
        beside = {**beside, "stream": True} if streamed else beside
        places = [*nests(talk, form), *nests(beside, form), *nests(reply, form)]
        for place in data.draw(st.lists(st.sampled_from(range(len(places))), max_size=8)):
            places[place][data.draw(st.sampled_from(["x_new", "é", "$"]))] = data.draw(plain)
        raw = json.dumps(reply).encode() if not streamed else events(form, reply)
        _, came = it.ask(talk, beside, raw)
        assert came == raw
        sent, came = it.ask([*old, *talk], beside, raw)
        body = json.loads(sent)
        assert came == raw or streamed  # its end is written anew, because a call of ours might have been in it
        assert {key: body[key] for key in beside if key != "tools"} == {key: beside[key] for key in beside if key != "tools"}
        assert body["tools"][:-2] == beside["tools"]
        assert len(body[it.key]) < len(old)
        wanted = [blocks(message, form) for message in same(talk, form)]
        if form == "responses":
            wanted = [{"type": "message", **item} if "type" not in item else item for item in wanted]
        last = [blocks(message, form) for message in same(body[it.key][-len(talk) :], form)]
        if form == "messages":  # before the first there is a handle, in the same message
            first, before = wanted.pop(0), last.pop(0)
            assert before["content"][-len(first["content"]) :] == first["content"]
        assert last == wanted

    check()


def events(form: str, reply: Json) -> bytes:
    """A whole reply as the events of its form."""
    if form == "chat":
        choice = copy.deepcopy(reply["choices"][0])
        message = choice.pop("message")
        for index, call in enumerate(message.get("tool_calls", ())):
            call["index"] = index
        head = {key: value for key, value in reply.items() if key != "choices"}
        said: list[tuple[str, Any]] = [
            ("", {**head, "choices": [{**choice, "finish_reason": None, "delta": message}]}),
            ("", {**head, "choices": [{"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}]}),
        ]
    elif form == "messages":
        start = {**reply, "content": [], "stop_reason": None}
        said = [("message_start", {"message": start})]
        for index, block in enumerate(reply["content"]):
            said += [("content_block_start", {"index": index, "content_block": block}), ("content_block_stop", {"index": index})]
        said += [("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 1}}), ("message_stop", {})]
    else:
        said = [("response.created", {"sequence_number": 0, "response": {**reply, "output": [], "status": "in_progress"}})]
        for index, item in enumerate(reply["output"]):
            for kind in ("added", "done"):
                said.append((f"response.output_item.{kind}", {"sequence_number": len(said), "output_index": index, "item": item}))
        said.append(("response.completed", {"sequence_number": len(said), "response": reply}))
    out = b""
    for name, data in said:
        whole = {"type": name, **data} if name else data
        out += (f"event: {name}\n" if name else "").encode() + b"data: " + json.dumps(whole).encode() + b"\n\n"
    return out + (b"data: [DONE]\n\n" if form == "chat" else b"")


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("form", list(PATHS))
def test_what_a_provider_says_is_kept_whole(through: Any, form: str, streamed: bool) -> None:
    it = through(form)
    reply = REPLIES[form]
    beside = {**BESIDE[form], **({"stream": True} if streamed else {})}
    raw = events(form, reply) if streamed else json.dumps(reply).encode()
    talk = [*old_turns(form), {"role": "user", "content": "Hi."}]
    it.ask(talk, beside, raw)
    said: list[Json] = {
        "chat": lambda: [reply["choices"][0]["message"]],
        "messages": lambda: [{"role": "assistant", "content": reply["content"]}],
        "responses": lambda: reply["output"],
    }[form]()
    results = [{"role": "tool", "tool_call_id": call["id"], "content": "x"} for call in said[0].get("tool_calls", ())]
    asked = [*results, {"role": "user", "content": "Next."}]
    # The client sends less than it was told: what was told is in the session.
    less = copy.deepcopy(said)
    for message in less:
        message.pop("annotations", None)
        message.pop("phase", None)
        for call in message.get("tool_calls", ()):
            call.pop("extra_content", None)
    if form == "responses":
        less = [item for item in less if item["type"] != "reasoning"]
    sent, _ = it.ask([*talk, *less, *asked], beside, raw)
    last = json.loads(sent)[it.key]
    kept = [{"type": "message", **each} for each in asked] if form == "responses" else asked
    assert same(last[-len(said) - len(asked) :], form) == same([*said, *kept], form) or form == "messages"
    if form == "messages":
        assert same(last[-2]["content"], form) == same(reply["content"], form)
    assert len(it.http.get(it.url + "/sessions").json()["sessions"]) == 1

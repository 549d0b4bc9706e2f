"""What two writers of the same message say is the same; what differs in what it says is not."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest

from kilburn.message import Message
from kilburn.wire import chat, messages, responses
from kilburn.wire.digests import HIDDEN, canonical
from kilburn.wire.form import parse


def call(name: str, arguments: str, ident: str = "x") -> dict[str, Any]:
    return {"id": ident, "type": "function", "function": {"name": name, "arguments": arguments}}


def calling(*calls: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def said(*messages: dict[str, Any]) -> list[bytes]:
    return canonical(message for each in messages for message in parse(each))


SAME: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "blanks and marks": (
        [{"role": "user", "content": "go"}],
        [{"role": "user", "content": [{"type": "text", "text": "go\n", "cache_control": {"type": "ephemeral"}}]}],
    ),
    "arguments": (
        [{"role": "assistant", "content": "", "tool_calls": [call("f", '{"b":2,"a":1}')]}],
        [{"role": "assistant", "content": None, "tool_calls": [call("f", '{"a": 1, "b": 2}', "y")], "reasoning_content": "hm"}],
    ),
    "in two messages": (
        [{"role": "assistant", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "assistant", "content": "ab"}],
    ),
    "a call of ours": (
        [
            {"role": "assistant", "content": "I look. ", "tool_calls": [call("recall", "{}", f"{HIDDEN}1")]},
            {"role": "tool", "tool_call_id": f"{HIDDEN}1", "content": "secret"},
            {"role": "assistant", "content": "Done."},
        ],
        [{"role": "assistant", "content": "I look. Done."}],
    ),
    "results in one message": (
        [
            {
                "role": "assistant",
                "content": [{"type": "tool_use", "id": name, "name": "f", "input": {}} for name in ("1", "2")],
            },
            {
                "role": "user",
                "content": [{"type": "tool_result", "tool_use_id": name, "content": f"r{name}"} for name in ("1", "2")],
            },
        ],
        [
            {"role": "assistant", "content": None, "tool_calls": [call("f", "{}", "7"), call("f", "", "8")]},
            {"role": "tool", "tool_call_id": "7", "content": "r1"},
            {"role": "tool", "tool_call_id": "8", "content": "r2"},
        ],
    ),
}


@pytest.mark.parametrize("case", SAME)
def test_the_same_by_two_writers(case: str) -> None:
    one, other = SAME[case]
    assert said(*one) == said(*other)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"role": "user", "content": "a"}, {"role": "assistant", "content": "a"}),
        ({"role": "user", "content": "a"}, {"role": "user", "content": "b"}),
        (calling(call("f", '{"a":1}')), calling(call("g", '{"a":1}'))),
        (calling(call("f", '{"a":1}')), calling(call("f", '{"a":"1"}'))),
        ({"role": "user", "content": "a"}, {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}),
        (
            {"role": "assistant", "content": "x", "tool_calls": [call("f", "{}")]},
            {"role": "assistant", "content": "callf{}", "tool_calls": []},
        ),
    ],
)
def test_what_differs_has_another_digest(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert said(one) != said(other)


def test_what_says_nothing_has_no_digest() -> None:
    assert said({"role": "assistant", "content": " "}) == []
    asked = {"role": "user", "content": "a"}
    assert len(said(asked, {"role": "assistant", "content": ""}, asked)) == 2


MARK = {"type": "ephemeral"}
PLAIN = {"type": "text", "media_type": "text/plain", "data": "words of a file"}
PNG = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}

MESSAGES: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "document", "source": PLAIN, "title": "a title", "context": "of a context"},
            {"type": "document", "source": {"type": "file", "file_id": "file_1"}, "citations": {"enabled": True}},
            {"type": "document", "source": {"type": "content", "content": [{"type": "text", "text": "words in a document"}]}},
            {"type": "container_upload", "file_id": "file_2"},
            {"type": "search_result", "source": "https://a.b", "title": "found", "content": [{"type": "text", "text": "it"}]},
            {"type": "image", "source": PNG},
            {"type": "image", "source": {"type": "file", "file_id": "file_3"}},
            {"type": "text", "text": "what is this?"},
        ],
    },
    {
        "role": "assistant",
        "content": [
            {"type": "thinking", "thinking": "hm", "signature": "abc"},
            {"type": "text", "text": "I look."},
            {
                "type": "server_tool_use",
                "id": "srvtoolu_1",
                "name": "web_search",
                "input": {"query": "rivers", "cache_control": "x"},
            },
            {
                "type": "web_search_tool_result",
                "tool_use_id": "srvtoolu_1",
                "content": [{"type": "web_search_result", "url": "u"}],
            },
            {"type": "tool_use", "id": "toolu_1", "name": "read", "input": {"path": "a", "lines": 2, "deep": {"b": [1, 2]}}},
        ],
    },
    {
        "role": "user",
        "content": [
            {
                "type": "tool_result",
                "tool_use_id": "toolu_1",
                "content": [
                    {"type": "text", "text": "the file"},
                    {"type": "image", "source": PNG},
                    {"type": "document", "source": PLAIN},
                ],
            },
            {"type": "text", "text": "go on"},
        ],
    },
]

ITEMS: list[dict[str, Any]] = [
    {
        "role": "user",
        "content": [
            {"type": "input_text", "text": "what is this?"},
            {"type": "input_file", "file_id": "file_1", "filename": "a.pdf"},
            {"type": "input_image", "file_id": "file_2"},
            {"type": "input_image", "image_url": "https://a.b/c.png"},
        ],
    },
    {"type": "reasoning", "id": "rs_1", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "xyz"},
    {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "rivers"}},
    {"type": "message", "id": "msg_1", "role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
    {"type": "reasoning", "id": "rs_2", "summary": []},
    {"type": "function_call", "id": "fc_1", "call_id": "call_1", "name": "read", "arguments": '{"path": "a", "n": 1}'},
    {"type": "function_call_output", "call_id": "call_1", "output": [{"type": "input_text", "text": "the file"}]},
    {"type": "mcp_call", "id": "mcp_1", "name": "look", "arguments": "{}", "output": "what was found", "server_label": "s"},
    {"type": "message", "id": "msg_2", "role": "assistant", "content": [{"type": "output_text", "text": "Done."}]},
]

WORDS = (
    "text",
    "data",
    "title",
    "context",
    "file_id",
    "query",
    "url",
    "path",
    "arguments",
    "output",
    "image_url",
    "name",
    "lines",
)
"""Keys under which there is what somebody said."""


def read_messages(talk: list[dict[str, Any]]) -> list[Message]:
    return [message for each in talk for message in messages.read(each)]


def read_items(items: list[dict[str, Any]]) -> list[Message]:
    return [chat.read(responses.read(item)) for item in items]


def dicts(value: Any, key: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """All objects of a form, each with the key that it stands under; not those that are a call's arguments."""
    if isinstance(value, dict):
        yield key, value
        for name, inner in value.items():
            if name not in ("input", "action"):
                yield from dicts(inner, name)
    for inner in value if isinstance(value, list) else ():
        yield from dicts(inner, key)


def everything(value: Any) -> Iterator[Any]:
    yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for each in inner:
        yield from everything(each)


def rewritten(talk: list[dict[str, Any]], rng: random.Random) -> list[dict[str, Any]]:
    """What a provider calls the same."""
    talk = copy.deepcopy(talk)
    for key, each in list(dicts(talk)):
        kind = each.get("type")
        if kind is None or key in ("cache_control", "citations"):
            continue
        block = key in ("content", "output") or kind.endswith("_call")
        if block and rng.random() < 0.3:
            each["cache_control"] = MARK
        if block and kind in ("document", "text", "output_text") and rng.random() < 0.3:
            each.setdefault("citations" if kind != "output_text" else "annotations", rng.choice([None, []]))
        if kind == "document" and rng.random() < 0.3:
            each.setdefault("citations", {"enabled": False})
            each.setdefault("title", None)
        if kind == "output_text" and rng.random() < 0.5:
            each["logprobs"] = []
        if kind == "input_image" and rng.random() < 0.3:
            each["detail"] = "auto"
        if kind in ("thinking", "reasoning") and rng.random() < 0.5:
            each.update({"signature": "other", "encrypted_content": None, "id": "rs_9", "content": None})
        for name in ("id", "status"):
            if name in each and kind not in ("tool_use", "reasoning") and rng.random() < 0.3:
                del each[name]
        if kind == "tool_use" and rng.random() < 0.3:
            each["input"]["lines"] = float(each["input"]["lines"])
        if kind == "function_call" and rng.random() < 0.3:
            each["arguments"] = '{"n":1,"path":"a"}'
    for each in everything(talk):
        if isinstance(each, dict) and rng.random() < 0.5:
            turned = list(each.items())
            rng.shuffle(turned)
            each.clear()
            each.update(turned)
    return talk


@pytest.mark.parametrize("form", ["messages", "items"])
def test_what_a_provider_calls_the_same_has_the_digest(form: str) -> None:
    talk, read = (MESSAGES, read_messages) if form == "messages" else (ITEMS, read_items)
    for seed in range(300):
        again = rewritten(talk, random.Random(seed))
        assert canonical(read(again)) == canonical(read(talk)), seed
    assert again != talk


@pytest.mark.parametrize("form", ["messages", "items"])
def test_each_word_that_changes_changes_the_digest(form: str) -> None:
    talk, read = (MESSAGES, read_messages) if form == "messages" else (ITEMS, read_items)
    places = [(at, key) for at, each in enumerate(everything(talk)) if isinstance(each, dict) for key in each if key in WORDS]
    assert len(places) > 10
    for at, key in places:
        changed = copy.deepcopy(talk)
        holder = [*everything(changed)][at]
        if holder.get("type") == "summary_text":
            continue
        words = holder[key]
        if isinstance(words, list):
            continue
        holder[key] = '{"path": "b"}' if key == "arguments" else words + ("AAAA" if isinstance(words, str) else 1)
        assert canonical(read(changed)) != canonical(read(talk)), (at, key)


def test_a_mark_in_the_arguments_of_a_call_is_a_word() -> None:
    changed = copy.deepcopy(MESSAGES)
    changed[1]["content"][2]["input"]["cache_control"] = "y"
    assert canonical(read_messages(changed)) != canonical(read_messages(MESSAGES))

"""What two writers of the same message say is the same; what differs in what it says is not."""

from __future__ import annotations

from typing import Any

import pytest

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

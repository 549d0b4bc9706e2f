"""The checkers name what a provider would refuse."""

from __future__ import annotations

from typing import Any

import pytest

from kilburn.errors import DuplicateCall, InvalidMessage, OrphanResult, WireError
from kilburn.wire.validity import validate_chat, validate_messages

USER = {"role": "user", "content": "x"}


def calling(*ids: str, **body: Any) -> dict[str, Any]:
    function = {"name": "f", "arguments": "{}", **body}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": i, "type": "function", "function": function} for i in ids],
    }


def result(call: str, content: Any = "x") -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": call, "content": content}


IMAGE = {"type": "image_url", "image_url": {"url": "https://example.org/a.png"}}
BAD_CHATS: list[tuple[list[dict[str, Any]], type[WireError], str]] = [
    ([], InvalidMessage, "empty"),
    ([{"role": "wizard", "content": "x"}], InvalidMessage, "no role"),
    ([result("c1")], OrphanResult, r"messages\[0\]: no open call has the id 'c1'"),
    ([USER, calling("c1")], InvalidMessage, "the call 'c1' has no result"),
    ([USER, calling("c1"), USER, result("c1")], InvalidMessage, r"messages\[2\]: the call 'c1'"),
    ([USER, calling("c1"), result("c1"), result("c1")], OrphanResult, r"messages\[3\]"),
    ([USER, calling("c1", "c1"), result("c1")], DuplicateCall, "'c1'"),
    ([USER, calling("x" * 41)], InvalidMessage, "40 characters"),
    ([USER, calling("c1", name="functions.read")], InvalidMessage, "no name of a tool"),
    ([USER, calling("c1", arguments={})], InvalidMessage, "no call of a function"),
    ([USER, calling()], InvalidMessage, "tool_calls: not a list"),
    ([USER, calling("c1"), result("c1", [IMAGE])], InvalidMessage, "'image_url' cannot stand here"),
    ([{"role": "system", "content": [IMAGE]}], InvalidMessage, "cannot stand here"),
    ([{"role": "user", "content": []}], InvalidMessage, "content"),
    ([{"role": "user", "content": None}], InvalidMessage, "content"),
    ([{"role": "assistant", "content": None}], InvalidMessage, "without content and without calls"),
]


@pytest.mark.parametrize(("transcript", "error", "says"), BAD_CHATS, ids=range(len(BAD_CHATS)))
def test_a_chat_that_openai_refuses(transcript: list[dict[str, Any]], error: type[WireError], says: str) -> None:
    with pytest.raises(error, match=says):
        validate_chat(transcript)


def test_a_chat_that_openai_takes() -> None:
    answered = [USER, USER, calling("c1", "c2"), result("c2"), result("c1"), {"role": "assistant", "content": "y"}]
    assert validate_chat(answered) is None
    assert validate_chat([calling("c1"), result("c1"), calling("c1"), result("c1")]) is None


def use(call: str, **changes: Any) -> dict[str, Any]:
    return {"type": "tool_use", "id": call, "name": "f", "input": {}, **changes}


def says(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


def gives(*blocks: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(blocks)}


def outcome(call: str, **changes: Any) -> dict[str, Any]:
    return {"type": "tool_result", "tool_use_id": call, **changes}


TEXT = {"type": "text", "text": "x"}
BLANK = {"type": "text", "text": " \n"}
MARKED = {**TEXT, "cache_control": {"type": "ephemeral"}}
PHOTO = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
SERVED = {"type": "server_tool_use", "id": "s1", "name": "web_search", "input": {}}
SERVED_RESULT = {"type": "web_search_tool_result", "tool_use_id": "s1", "content": []}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
BAD_MESSAGES: list[tuple[list[dict[str, Any]], type[WireError], str]] = [
    ([], InvalidMessage, "empty"),
    ([says(TEXT)], InvalidMessage, "not the user's"),
    ([USER, USER], InvalidMessage, "second user message"),
    ([{"role": "system", "content": "x"}], InvalidMessage, "no role"),
    ([{**USER, "name": "x"}], InvalidMessage, "no other key"),
    ([{"role": "user", "content": " "}], InvalidMessage, "no visible character"),
    ([gives(BLANK)], InvalidMessage, "no visible character"),
    ([gives()], InvalidMessage, "content"),
    ([gives(outcome("t1"))], OrphanResult, "'t1'"),
    ([USER, says(use("t1"))], InvalidMessage, "the call 't1' has no result"),
    ([USER, says(use("t1"), use("t2")), gives(outcome("t1"))], InvalidMessage, "the call 't2' has no result"),
    ([USER, says(use("t1")), gives(TEXT, outcome("t1"))], InvalidMessage, "behind other blocks"),
    ([USER, says(use("t1"), use("t1"))], DuplicateCall, "'t1'"),
    ([USER, says(use("t1")), gives(outcome("t1")), says(use("t1"))], DuplicateCall, "'t1'"),
    ([USER, says(use("a b"))], InvalidMessage, "characters that the API refuses"),
    ([USER, says(use("t1", input="{}"))], InvalidMessage, "an object as its input"),
    ([USER, says(use("t1")), gives(outcome("t1", content=[BLANK]))], InvalidMessage, "visible character"),
    ([USER, says(use("t1")), gives(outcome("t1", content=None))], InvalidMessage, "neither a string"),
    ([USER, says(use("t1")), gives(outcome("t1", is_error=True))], InvalidMessage, "an error without a text"),
    ([USER, says(use("t1")), gives(outcome("t1", is_error=True, content=[PHOTO]))], InvalidMessage, "a result that is an error"),
    ([USER, says(PHOTO)], InvalidMessage, "a image block in an assistant message"),
    ([gives(use("t1"))], InvalidMessage, "a tool_use block in a user message"),
    ([USER, says(TEXT, THOUGHT)], InvalidMessage, "ends with its thinking"),
    ([USER, says({**THOUGHT, "signature": ""}, TEXT)], InvalidMessage, "unsigned"),
    ([USER, says(SERVED_RESULT)], OrphanResult, "without its call"),
    ([USER, says(SERVED), USER], InvalidMessage, "'s1' has no result"),
    ([gives(*[MARKED] * 5)], InvalidMessage, "5 cache breakpoints"),
]


@pytest.mark.parametrize(("transcript", "error", "names"), BAD_MESSAGES, ids=range(len(BAD_MESSAGES)))
def test_messages_that_anthropic_refuses(transcript: list[dict[str, Any]], error: type[WireError], names: str) -> None:
    with pytest.raises(error, match=names):
        validate_messages(transcript)


def test_messages_that_anthropic_takes() -> None:
    called = [USER, says(THOUGHT, TEXT, use("t1")), gives(outcome("t1", content=[PHOTO]), TEXT), says(SERVED)]
    assert validate_messages(called) is None
    assert validate_messages([USER, says(SERVED, SERVED_RESULT, TEXT), gives(*[MARKED] * 4)]) is None

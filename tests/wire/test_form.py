"""Reading foreign JSON loses nothing, changes nothing, and says exactly what is wrong with what it refuses."""

from __future__ import annotations

import copy
import json
from typing import Any

import anthropic.types
import openai.types.chat
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kilburn.errors import DuplicateCall, InvalidMessage
from kilburn.message import Kind, Message, Part, Role, Trust
from kilburn.wire import form
from wire.transcripts import anthropic_messages, chat_messages, transcripts


def exact(value: Any) -> str:
    """JSON text: equal texts mean equal values, types and order of keys."""
    return json.dumps(value)


UNKNOWN_KEY = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}", "strict": True}}


@given(st.lists(chat_messages | anthropic_messages, max_size=4))
@example([{"role": "assistant", "content": None, "tool_calls": [UNKNOWN_KEY]}])
def test_any_messages_come_back_exactly(originals: list[dict[str, Any]]) -> None:
    before = copy.deepcopy(originals)
    parsed = form.parse(originals)
    assert exact(originals) == exact(before), "the input was changed"
    assert exact(form.dump(parsed)) == exact(originals)
    assert form.parse(originals) == parsed
    assert form.parse(parsed) == parsed, "parsed messages are messages"


@given(transcripts())
def test_every_part_keeps_the_contract_of_messages(originals: list[dict[str, Any]]) -> None:
    for message in form.parse(originals):
        assert message.parts
        for part in message.parts:
            assert (part.kind is Kind.CALL) <= (message.role is Role.ASSISTANT and bool(part.call and part.name))
            assert (part.kind is Kind.RESULT) <= (message.role is Role.TOOL and bool(part.call))


@given(chat_messages)
def test_the_chat_form_gives_one_message_each(original: dict[str, Any]) -> None:
    assert len(form.parse(original)) == 1


def test_a_user_message_with_results_becomes_tool_and_user_messages_in_order() -> None:
    content = [
        {"type": "tool_result", "tool_use_id": "t1", "content": "one"},
        {
            "type": "tool_result",
            "tool_use_id": "t2",
            "content": [{"type": "text", "text": "two"}, {"type": "text", "text": "three"}],
        },
        {"type": "text", "text": "go on"},
    ]
    tool, user = form.parse({"role": "user", "content": content})
    assert (tool.role, user.role) == (Role.TOOL, Role.USER)
    assert [(part.call, part.text) for part in tool.parts] == [("t1", "one"), ("t2", "two\nthree")]
    assert [part.text for part in user.parts] == ["go on"]


def test_arguments_are_kept_as_the_model_wrote_them() -> None:
    broken = '{"path": "a.py", '
    call = {"id": "c1", "type": "function", "function": {"name": "read", "arguments": broken}}
    (message,) = form.parse({"role": "assistant", "content": None, "tool_calls": [call]})
    assert message.parts[0].text == broken


def test_an_image_in_a_tool_result_is_a_part_that_names_its_call() -> None:
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "QUJD"}}
    (tool,) = form.parse({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": [image]}]})
    assert [(part.kind, part.call, part.text) for part in tool.parts] == [
        (Kind.RESULT, "t1", ""),
        (Kind.IMAGE, "t1", "data:image/png;base64,QUJD"),
    ]


def nested(levels: int) -> Any:
    value: Any = "x"
    for _ in range(levels):
        value = [value]
    return value


def call(**changes: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}, **changes}


def calling(*calls: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls)}


def saying(*blocks: Any, role: str = "user") -> dict[str, Any]:
    return {"role": role, "content": list(blocks)}


REFUSED: list[tuple[Any, str]] = [
    ("hello", "str is no message"),
    (None, "NoneType is no message"),
    ([[]], r"messages\[0\]: list is no message"),
    ({}, "role: 'None' is no role"),
    ({"role": "wizard", "content": "x"}, "role: 'wizard' is no role"),
    ({"role": ["user"], "content": "x"}, "is no role"),
    ({"role": "user"}, "content: null"),
    ({"role": "user", "content": None}, "content: null"),
    ({"role": "user", "content": 3}, "content: int"),
    ({"role": "user", "content": {"type": "text"}}, "content: dict"),
    ({"role": "assistant"}, "neither content nor tool_calls"),
    ({"role": "tool", "content": "x"}, "tool_call_id is missing"),
    ({"role": "tool", "content": "x", "tool_call_id": ""}, "tool_call_id is empty"),
    ({"role": "tool", "content": "x", "tool_call_id": 7}, "tool_call_id is int"),
    ({"role": "tool", "content": None, "tool_call_id": "c"}, "content: null"),
    ({"role": "user", "content": "x", "tool_calls": [call()]}, "a user message cannot call tools"),
    ({"role": "assistant", "content": "", "tool_calls": "x"}, "tool_calls: str"),
    (calling("x"), r"tool_calls\[0\]: str"),
    (calling(call(id=None)), r"tool_calls\[0\].id is null"),
    (calling({"type": "function", "function": {"name": "f", "arguments": "{}"}}), "id is missing"),
    (calling(call(function={"arguments": "{}"})), "function.name is missing"),
    (calling(call(function={"name": "f", "arguments": {"a": 1}})), "function.arguments is dict"),
    (calling(call(function=None)), "function: null"),
    (saying("text"), r"content\[0\]: a content block is an object"),
    (saying({"text": "x"}), r"content\[0\]: a content block is an object"),
    (saying({"type": "text", "text": None}), r"content\[0\].text is null"),
    (saying({"type": "image_url", "image_url": "https://x"}), "image_url: str"),
    (saying({"type": "tool_result", "content": "x"}), "tool_use_id is missing"),
    (saying({"type": "tool_result", "tool_use_id": "t", "content": 3}), "content: int"),
    (saying({"type": "tool_use", "id": "t", "name": "f", "input": {}}), "a tool_use block in a user message"),
    (saying({"type": "tool_use", "id": "t", "name": "f", "input": "{}"}, role="assistant"), "input: str"),
    (saying({"type": "tool_use", "name": "f", "input": {}}, role="assistant"), "id is missing"),
    (saying({"type": "tool_result", "tool_use_id": "t", "content": ""}, role="assistant"), "a tool_result block in a assistant"),
    (saying(*[{"type": "tool_result", "tool_use_id": "t"}] * 2), "two results for the call 't'"),
    (saying({"type": "thinking", "thinking": None}, role="assistant"), "thinking is null"),
    ({"role": "user", "content": "ab\ud800c"}, r"message.content: lone surrogate U\+D800 at character 2"),
    ({"role": "user", "content": "x", "a\udfff": 1}, "lone surrogate"),
    ({"role": "user", "content": "x", 7: 1}, "the key '7' is int"),
    ({"role": "user", "content": "x", "w": float("nan")}, "message.w: nan"),
    ({"role": "user", "content": "x", "w": float("inf")}, "message.w: inf"),
    ({"role": "user", "content": "x", "w": 10**5000}, "an integer of"),
    ({"role": "user", "content": b"x"}, "content: bytes is not JSON"),
    ({"role": "user", "content": "x", "w": {1, 2}}, "w: set is not JSON"),
    ({"role": "user", "content": "x", "w": object()}, "w: object is not JSON"),
    ({"role": "user", "content": "x", "w": nested(5_000)}, "nested more than 100 levels"),
]


@pytest.mark.parametrize(("value", "says"), REFUSED, ids=[says[:40] for _, says in REFUSED])
def test_what_is_no_message_is_refused_by_name_and_place(value: Any, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        form.parse(value)


def test_a_structure_that_holds_itself_is_refused() -> None:
    value: dict[str, Any] = {"role": "user", "content": "x"}
    value["self"] = value
    with pytest.raises(InvalidMessage, match="nested"):
        form.parse(value)


def test_two_calls_with_one_id_are_refused() -> None:
    with pytest.raises(DuplicateCall, match="'c1'"):
        form.parse(calling(call(), call()))
    block = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
    with pytest.raises(DuplicateCall, match="'t1'"):
        form.parse(saying(block, block, role="assistant"))


def test_the_place_in_a_list_is_named() -> None:
    with pytest.raises(InvalidMessage, match=r"messages\[1\].content\[1\].text is int"):
        form.parse([{"role": "user", "content": "ok"}, saying({"type": "text", "text": "a"}, {"type": "text", "text": 3})])


def test_nul_is_text() -> None:
    assert form.parse({"role": "user", "content": "a\x00b"})[0].parts[0].text == "a\x00b"


TEXT = Part(kind=Kind.TEXT, text="x")
OWN_REFUSED = [
    (Message(role=Role.USER, parts=()), "at least one part"),
    (Message(role=Role.USER, parts=(TEXT,), trust=Trust.OPERATOR), "above what a user message"),
    (Message(role=Role.USER, parts=(TEXT,), extra="[]"), "not a JSON object"),
    (Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="x", extra="{"),)), "not a JSON object"),
    (Message(role=Role.USER, parts=(Part(kind=Kind.OPAQUE, text="x"),)), "not a JSON object"),
    (Message(role=Role.USER, parts=(Part(kind=Kind.TEXT, text="\udc00"),)), "lone surrogate"),
    (Message(role=Role.USER, parts=(Part(kind=Kind.FOLD, text="x"),)), "derived by the kernel"),
    (Message(role=Role.USER, parts=(Part(kind=Kind.CALL, text="{}", call="c", name="f"),)), "a CALL has"),
    (Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.CALL, text="{}", name="f"),)), "a CALL has"),
    (Message(role=Role.ASSISTANT, parts=(Part(kind=Kind.RESULT, text="{}", call="c"),)), "a RESULT has"),
    (Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text="{}"),)), "a RESULT has"),
]


@pytest.mark.parametrize(("message", "says"), OWN_REFUSED, ids=range(len(OWN_REFUSED)))
def test_own_messages_are_held_to_their_contract(message: Message, says: str) -> None:
    with pytest.raises(InvalidMessage, match=says):
        form.parse(message)


EDITED = [
    Message(role=Role.USER, parts=(TEXT,), extra='{"form":"chat","dict":7}'),
    Message(
        role=Role.USER,
        parts=(Part(kind=Kind.TEXT, text="x", extra='{"block":{"a":1}}'),),
        extra='{"form":"chat","shape":"list"}',
    ),
]


@pytest.mark.parametrize("message", EDITED, ids=range(len(EDITED)))
def test_leftovers_that_were_edited_by_hand_are_found(message: Message) -> None:
    with pytest.raises(InvalidMessage, match=r"line 3\.extra does not fit"):
        form.check_fit(message, "line 3")


def test_own_messages_pass_as_they_are() -> None:
    message = Message(role=Role.TOOL, parts=(Part(kind=Kind.RESULT, text="x", call="c"),), trust=Trust.TOOL, sources=(3,))
    assert form.parse([message]) == [message]
    assert form.dump([message]) == [{"role": "tool", "tool_call_id": "c", "content": "x"}]


def test_half_of_a_message_cannot_be_dumped() -> None:
    content = [{"type": "tool_result", "tool_use_id": "t1", "content": "one"}, {"type": "text", "text": "go on"}]
    tool, _ = form.parse({"role": "user", "content": content})
    with pytest.raises(InvalidMessage, match="ends in the middle"):
        form.dump([tool])


def test_openai_sdk_objects_are_read_as_the_server_sent_them() -> None:
    sent = calling(call())
    message = openai.types.chat.ChatCompletionMessage.model_validate(sent)
    assert form.dump(form.parse(message)) == [sent]
    assert form.dump(form.parse({"role": "assistant", "content": None, "tool_calls": message.tool_calls})) == [sent]


def test_anthropic_sdk_objects_are_read_whole_or_as_blocks() -> None:
    blocks = [
        {"type": "thinking", "thinking": "hm", "signature": "s"},
        {"type": "tool_use", "id": "t1", "name": "f", "input": {"a": 1}},
    ]
    sent: dict[str, Any] = {
        "id": "m",
        "type": "message",
        "role": "assistant",
        "model": "claude",
        "content": blocks,
        "stop_reason": "tool_use",
    }
    sent["usage"] = {"input_tokens": 1, "output_tokens": 2}
    message = anthropic.types.Message.model_validate(sent)
    assert form.dump(form.parse(message)) == [sent]
    assert form.dump(form.parse({"role": "assistant", "content": message.content})) == [{"role": "assistant", "content": blocks}]


FORMS = [
    ({"role": "user", "content": "x"}, "chat"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}]}, "chat"),
    ({"role": "developer", "content": "x"}, "chat"),
    ({"role": "assistant", "content": "x", "refusal": None}, "chat"),
    ({"role": "user", "content": [{"type": "image_url", "image_url": {"url": "u"}}]}, "chat"),
    ({"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "document", "source": {}}]}, "messages"),
    ({"role": "user", "content": [{"type": "image", "source": {}}]}, "messages"),
    ({"role": "system", "content": [{"type": "text", "text": "x", "cache_control": {"type": "ephemeral"}}]}, "messages"),
    ({"type": "message", "role": "assistant", "content": []}, "messages"),
]


@pytest.mark.parametrize(("source", "name"), FORMS)
def test_the_form_is_told_by_shape(source: dict[str, Any], name: str) -> None:
    assert form.detect(source) == name

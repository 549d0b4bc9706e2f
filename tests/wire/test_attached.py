"""What a provider of the chat form attached to calls survives a client of another form."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from kilburn.message import Kind, Message, Part
from kilburn.wire.attached import PREFIX, is_attached, pack_attached, restore_attached
from kilburn.wire.chat import render
from kilburn.wire.form import parse

CALL = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
FROM_CLIENT = {"role": "assistant", "content": [{"type": "text", "text": "I look."}], "tool_calls": [CALL]}


def sent_back(text: str, message: dict[str, Any] = FROM_CLIENT) -> Message:
    [parsed] = parse(message)
    block = Part(kind=Kind.REASONING, text="", extra=msgspec.json.encode({"block": {"data": text}}).decode())
    return msgspec.structs.replace(parsed, parts=(block, *parsed.parts))


@pytest.mark.parametrize(
    "beside",
    [
        {"reasoning_content": "I think."},
        {"reasoning": "I think.", "reasoning_details": [{"type": "reasoning.encrypted", "data": "AbCd"}]},
        {"tool_calls": [{**CALL, "extra_content": {"google": {"thought_signature": "c2ln"}}}]},
    ],
)
def test_what_was_attached_is_in_the_chat_form_again(beside: dict[str, Any]) -> None:
    reply = {"role": "assistant", "content": "I look.", "tool_calls": [CALL], **beside}
    text = pack_attached(parse(reply)[0])
    assert is_attached({"encrypted_content": text})
    [message] = render(restore_attached([sent_back(text)]))
    assert message == reply


def test_nothing_is_attached_without_calls_or_fields() -> None:
    for reply in ({"role": "assistant", "content": "I look.", "reasoning_content": "I think."}, FROM_CLIENT):
        assert pack_attached(parse(reply)[0]) == ""


@pytest.mark.parametrize("text", ["", "gAAAA", PREFIX, PREFIX + "%", PREFIX + base64.b64encode(b"[1]").decode()])
def test_reasoning_of_others_stays_as_it_is(text: str) -> None:
    message = sent_back(text)
    assert restore_attached([message]) == [message]

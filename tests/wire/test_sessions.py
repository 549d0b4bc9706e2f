"""Sessions of both forms under every policy: each prompt is one that the providers take, and weighs what was counted.

A long run: `PYTHONPATH=tests python -m wire.sessions 1 50`; a short one here, `FUZZ=20` takes so many seeds.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from wire.provider import Refused, check_chat, check_messages, check_speakers, weight
from wire.sessions import FORMS, POLICIES, WINDOWS, run

SEEDS = range(1, 1 + int(os.environ.get("FUZZ", "1")))

USER = {"role": "user", "content": "go"}
USE = {"type": "tool_use", "id": "a", "name": "read", "input": {}}
ANSWER = {"type": "tool_result", "tool_use_id": "a", "content": "x"}
RESULT = {"role": "user", "content": [ANSWER]}
THOUGHT = {"type": "thinking", "thinking": "hm", "signature": "s"}
HIDDEN = {"type": "redacted_thinking", "data": "ZZ"}


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_prompt_is_one_that_the_providers_take(policy: str, seed: int) -> None:
    number = POLICIES.index(policy) + seed
    chosen = sorted(FORMS)[number % 2] if len(SEEDS) == 1 else None
    for form in [chosen] if chosen else FORMS:
        print(f"seed {number}")
        assert run(form, policy, WINDOWS[number // 2 % 2], number, asked=number % 3 == 0, steps=9)


def said(*blocks: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": list(blocks)}


@pytest.mark.parametrize(
    ("prompt", "appended"),
    [
        ([], ()),
        ([{"role": "assistant", "content": "hi"}], ()),
        ([USER, said(*[USE]), USER], ()),
        ([USER, RESULT], ()),
        ([USER, said(*[USE]), {"role": "user", "content": [{"type": "text", "text": "x"}, ANSWER]}], ()),
        ([USER, said(*[USE, USE]), RESULT], ()),
        ([USER, said(*[{"type": "text", "text": " "}])], ()),
        ([USER, said(*[THOUGHT])], [said(*[THOUGHT])]),
        ([USER, said(*[USE]), RESULT], [said(*[HIDDEN, USE])]),
        ([USER, said(*[THOUGHT, USE]), RESULT], [said(*[THOUGHT, HIDDEN, USE])]),
        ([USER, said(*[{**THOUGHT, "thinking": "h"}, USE]), RESULT], [said(*[THOUGHT, USE])]),
        ([USER, said(*[{"type": "thinking", "thinking": "x"}, USE]), RESULT], ()),
    ],
)  # fmt: skip
def test_the_validator_refuses_what_the_provider_refuses(prompt: Any, appended: Any) -> None:
    with pytest.raises(Refused):
        check_messages(prompt, None, appended)


CALL = {"id": "a", "type": "function", "function": {"name": "read", "arguments": "{}"}}


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "tool", "tool_call_id": "a", "content": "x"}],
        [{"role": "assistant", "content": None, "tool_calls": [CALL]}],
        [
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            USER,
            {"role": "tool", "tool_call_id": "a", "content": "x"},
        ],
        [{"role": "assistant", "content": None, "tool_calls": [CALL, CALL]}],
        [{"role": "assistant", "content": None}],
        [{"role": "user", "content": [{"type": "text"}]}],
        [{"role": "system", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
    ],
)
def test_the_validator_of_chats_refuses_what_the_provider_refuses(prompt: Any) -> None:
    with pytest.raises(Refused):
        check_chat(prompt)


def test_the_validator_knows_who_spoke() -> None:
    check_speakers(
        [{"role": "user", "content": "[p1-p3 in part: marks abcdef; data]\nabcdef p1 tool read:\ntool-said\n[end abcdef]"}]
    )
    with pytest.raises(Refused):
        check_speakers([{"role": "user", "content": "[p1-p3 in part:]\np1:\ntool-said\n"}])
    with pytest.raises(Refused):
        check_speakers([{"role": "assistant", "content": [{"type": "text", "text": "my-thought"}]}])
    assert weight({"role": "user", "content": "four", "x_n": {"a": 12}}) == 4 + len("x_n") + len("a") + 2

"""The compaction block: round trip, what a reply reports, and where the provider is to find the block."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.errors import InvalidMessage
from kilburn.model import Tokens
from kilburn.wire.compaction import betas_for, block_in, compaction_block, put_block_first, read_block, read_report
from kilburn.wire.editing import write
from kilburn.wire.form import dump, parse

BLOCK = {"type": "compaction", "content": "Short.", "encrypted_content": "eHg="}
MAYBE = st.none() | st.text(min_size=1, max_size=9)
BLOCKS = st.fixed_dictionaries(
    {"type": st.just("compaction")},
    optional={
        "content": MAYBE,
        "encrypted_content": MAYBE,
        "signature": MAYBE,
        "tool_changes": st.none() | st.just([]),
        "later": MAYBE,
    },
)


@given(BLOCKS)
def test_blocks_round_trip(source: dict[str, Any]) -> None:
    block = read_block(source)
    assert write(block) == source
    assert block.stands == isinstance(source.get("content"), str)
    message = {"role": "assistant", "content": [source, {"type": "text", "text": "Going on."}]}
    (parsed,) = parse(message)
    assert dump([parsed]) == [message]
    assert compaction_block(parsed) == block


@pytest.mark.parametrize(
    "source", [{"type": "compaction", "content": ""}, {"type": "compaction", "content": 3}, {"type": "text"}, []]
)
def test_what_is_no_block_is_refused(source: Any) -> None:
    with pytest.raises(InvalidMessage):
        read_block(source)
    assert block_in(json.dumps(source, separators=(",", ":"))) is None


def said(role: str, *texts: str) -> dict[str, Any]:
    return {"role": role, "content": [{"type": "text", "text": text} for text in texts]}


def test_the_last_block_comes_first_alone_and_what_still_stands_before_it_behind_it() -> None:
    old = {"type": "compaction", "content": "Older."}
    failed = {"type": "compaction", "content": None}
    messages = [
        {"role": "user", "content": "Pinned."},
        {"role": "assistant", "content": [old, failed, {"type": "text", "text": "a"}]},
        said("user", "b"),
        {"role": "assistant", "content": [{"type": "text", "text": "c"}, BLOCK, {"type": "text", "text": "d"}]},
        said("user", "e"),
    ]
    before = json.dumps(messages)
    sent = put_block_first(messages)
    assert sent == [
        {"role": "assistant", "content": [BLOCK]},
        {"role": "user", "content": "Pinned."},
        said("assistant", "a"),
        said("user", "b"),
        said("assistant", "c", "d"),
        said("user", "e"),
    ]
    assert put_block_first(sent) == sent
    assert json.dumps(messages) == before
    assert put_block_first(messages[:3])[0] == {"role": "assistant", "content": [old]}, "a failed one behind it changes nothing"


WORDS = st.lists(st.sampled_from([BLOCK, {"type": "compaction", "content": None}, "a", "b", "c", "d"]), min_size=1, max_size=5)


@given(st.lists(WORDS, max_size=6))
def test_no_word_is_lost_or_said_twice(turns: list[list[Any]]) -> None:
    messages = [
        {
            "role": ("user", "assistant")[at % 2],
            "content": [word if isinstance(word, dict) else {"type": "text", "text": word} for word in turn],
        }
        for at, turn in enumerate(turns)
        if at % 2 or all(isinstance(word, str) for word in turn)
    ]
    sent = put_block_first(messages)
    assert [block["text"] for message in sent for block in message["content"] if "text" in block] == [
        block["text"] for message in messages for block in message["content"] if "text" in block
    ]
    blocks = [block for message in sent for block in message["content"] if block.get("content")]
    assert blocks == ([BLOCK] if any(BLOCK in message["content"] for message in messages) else [])
    if blocks:
        assert sent[0]["content"][0] == BLOCK
        assert all(one["role"] != two["role"] for one, two in pairwise(sent))


def test_thinking_behind_the_block_begins_its_turn() -> None:
    thought = {"type": "thinking", "thinking": "hm", "signature": "c2ln"}
    messages = [said("user", "a"), said("assistant", "b"), {"role": "assistant", "content": [BLOCK, thought]}]
    assert [message["content"][0] for message in put_block_first(messages) if isinstance(message["content"], list)][-1] == thought


def test_without_a_block_nothing_moves() -> None:
    messages = [said("user", "a"), {"role": "assistant", "content": [{"type": "compaction", "content": None}]}]
    assert put_block_first(messages) == messages


def test_headers_are_those_that_are_needed() -> None:
    signed = {"role": "assistant", "content": [{**BLOCK, "signature": "c2ln"}]}
    tools = {"edits": [{"type": "clear_tool_uses_20250919"}]}
    both = {"edits": [*tools["edits"], {"type": "compact_20260112"}]}
    assert betas_for({}, [said("user", "a")]) == []
    assert betas_for({"context_management": tools}, []) == ["context-management-2025-06-27"]
    assert betas_for({"context_management": both}, []) == ["context-management-2025-06-27", "compact-2026-01-12"]
    assert betas_for({}, [{"role": "assistant", "content": [BLOCK]}]) == ["compact-2026-01-12"]
    assert betas_for({}, [signed]) == ["compact-2026-09-04"]
    assert betas_for({"compaction": {"type": "summarize"}}, []) == ["compact-2026-09-04"]
    with pytest.raises(InvalidMessage):
        betas_for({"compaction": {"type": "summarize"}, "context_management": tools}, [])


def test_reports_are_read_and_compactions_counted_apart() -> None:
    cost = {"cache_creation_input_tokens": 5, "cache_read_input_tokens": 20, "later": 1}
    report = read_report(
        {
            "stop_reason": "compaction",
            "context_management": {"applied_edits": [{"type": "clear_tool_uses_20250919", "cleared_tool_uses": 4, "later": 2}]},
            "usage": {
                "iterations": [
                    {"type": "compaction", "input_tokens": 100, "output_tokens": 7, **cost},
                    {"type": "message", "input_tokens": 9, "output_tokens": 3},
                ]
            },
        }
    )
    assert report.paused
    assert (report.applied[0].cleared_tool_uses, report.applied[0].more) == (4, {"later": 2})
    assert report.beside == Tokens(prompt=125, reply=7, cached=20, written=5)
    assert read_report({}).beside is None
    for bad in ({"usage": {"iterations": [{}]}}, {"context_management": {"applied_edits": [{"type": 3}]}}, {"usage": 3}):
        with pytest.raises(InvalidMessage):
            read_report(bad)

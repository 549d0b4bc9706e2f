"""Context editing's request: read strictly, written back equal, and the same settings as a policy."""

from __future__ import annotations

from typing import Any, get_type_hints

import pytest
from anthropic.types import beta
from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from kilburn.errors import InvalidMessage, SpecError
from kilburn.kernel.resolve import resolve
from kilburn.wire.editing import Management, OtherEdit, policy_spec, provider_edits, read_management, read_summarize, write

OFFICIAL: dict[str, Any] = {
    "clear_thinking_20251015": beta.BetaClearThinking20251015EditParam,
    "clear_tool_uses_20250919": beta.BetaClearToolUses20250919EditParam,
    "compact_20260112": beta.BetaCompact20260112EditParam,
}
"""The official SDK's own types."""

UNKNOWN = st.dictionaries(st.sampled_from(["later", "beta_field"]), st.none() | st.integers() | st.lists(st.text(max_size=3)))


def tokens(least: int = 1) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda value: {"type": "input_tokens", "value": value}, st.integers(least, 10**7))


def uses(least: int = 1) -> st.SearchStrategy[dict[str, Any]]:
    return st.builds(lambda value: {"type": "tool_uses", "value": value}, st.integers(least, 99))


NAMES = st.lists(st.text(min_size=1, max_size=8), max_size=3)
TURNS = st.builds(lambda value: {"type": "thinking_turns", "value": value}, st.integers(1, 9))
THINKING = st.fixed_dictionaries(
    {"type": st.just("clear_thinking_20251015")}, optional={"keep": st.just("all") | TURNS | st.just({"type": "all"})}
)
TOOLS = st.fixed_dictionaries(
    {"type": st.just("clear_tool_uses_20250919")},
    optional={
        "trigger": tokens() | uses(),
        "keep": uses(0),
        "clear_at_least": st.none() | tokens(),
        "exclude_tools": st.none() | NAMES,
        "clear_tool_inputs": st.none() | st.booleans() | NAMES,
    },
)
COMPACT = st.fixed_dictionaries(
    {"type": st.just("compact_20260112")},
    optional={
        "trigger": st.none() | tokens(50_000),
        "pause_after_compaction": st.booleans(),
        "instructions": st.none() | st.text(max_size=30),
    },
)
EDITS = st.tuples(*(st.none() | edit for edit in (THINKING, TOOLS, COMPACT))).map(lambda edits: [edit for edit in edits if edit])


@given(edits=EDITS, more=UNKNOWN)
def test_round_trip_is_equal_and_unknown_fields_are_kept(edits: list[dict[str, Any]], more: dict[str, Any]) -> None:
    source = {"edits": [{**edit, **more} for edit in edits], **more}
    assert write(read_management(source)) == source


@given(edits=EDITS.filter(bool))
def test_settings_mean_the_same_here_and_there(edits: list[dict[str, Any]]) -> None:
    policy = resolve("policies", policy_spec({"edits": edits}))
    sent = provider_edits(policy)
    assert resolve("policies", policy_spec(sent)) == policy
    assert [edit["type"] for edit in sent["edits"]] == [edit["type"] for edit in edits]
    for edit in sent["edits"]:
        official = OFFICIAL[edit["type"]]
        assert edit.keys() <= official.__annotations__.keys()
        for name in edit.keys() - {"exclude_tools", "clear_tool_inputs"}:  # their types are not for validating
            TypeAdapter(get_type_hints(official)[name]).validate_python(edit[name], strict=True)


def test_defaults_are_the_providers() -> None:
    sent = provider_edits(resolve("policies", "chain(clear_thinking, clear_tool_uses, compact)"))
    assert sent == {
        "edits": [
            {"type": "clear_thinking_20251015", "keep": {"type": "thinking_turns", "value": 1}},
            {
                "type": "clear_tool_uses_20250919",
                "trigger": {"type": "input_tokens", "value": 100_000},
                "keep": {"type": "tool_uses", "value": 3},
                "clear_at_least": None,
                "exclude_tools": [],
                "clear_tool_inputs": False,
            },
            {
                "type": "compact_20260112",
                "trigger": {"type": "input_tokens", "value": 150_000},
                "pause_after_compaction": False,
                "instructions": None,
            },
        ]
    }


@pytest.mark.parametrize(
    ("source", "where"),
    [
        ([], "context_management"),
        ({"edits": {}}, "edits"),
        ({"edits": [3]}, "edits[0]"),
        ({"edits": [{}]}, "type"),
        ({"edits": [{"type": 3}]}, "type"),
        ({"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 49_999}}]}, "trigger.value"),
        ({"edits": [{"type": "compact_20260112", "trigger": {"type": "tool_uses", "value": 60_000}}]}, "trigger.type"),
        ({"edits": [{"type": "compact_20260112", "trigger": {"type": "input_tokens"}}]}, "trigger.value"),
        ({"edits": [{"type": "compact_20260112", "pause_after_compaction": "yes"}]}, "pause_after_compaction"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "keep": {"type": "tool_uses", "value": True}}]}, "keep.value"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "trigger": None}]}, "trigger"),
        ({"edits": [{"type": "clear_tool_uses_20250919", "exclude_tools": ["a", 3]}]}, "exclude_tools[1]"),
        ({"edits": [{"type": "clear_thinking_20251015", "keep": "none"}]}, "keep"),
        ({"edits": [{"type": "compact_20260112"}, {"type": "compact_20260112"}]}, "edits[1]"),
        ({"edits": [{"type": "compact_20260112"}, {"type": "clear_thinking_20251015"}]}, "edits[1]"),
    ],
)
def test_what_the_provider_would_refuse_is_refused_with_its_place(source: Any, where: str) -> None:
    with pytest.raises(InvalidMessage) as caught:
        read_management(source)
    assert where in str(caught.value)


def test_edits_of_tomorrow_are_carried_but_not_done_here() -> None:
    source = {"edits": [{"type": "clear_images_20270101", "keep": 3}]}
    assert read_management(source) == Management(edits=(OtherEdit(type="clear_images_20270101", more={"keep": 3}),))
    assert write(read_management(source)) == source
    for asked in (source, {"edits": []}, {"edits": [{"type": "compact_20260112", "later": 1}]}):
        with pytest.raises(SpecError):
            policy_spec(asked)


@pytest.mark.parametrize(
    "spec", ["fifo", "chain(clear_tool_uses, fifo)", "chain(compact, clear_thinking)", "compact(trigger=None)"]
)
def test_what_the_provider_cannot_do_is_said(spec: str) -> None:
    with pytest.raises(SpecError):
        provider_edits(resolve("policies", spec))


def test_on_demand_form() -> None:
    source = {"type": "summarize", "instructions": None, "later": [1]}
    assert write(read_summarize(source)) == source
    for bad in ({"type": "clear"}, {"type": "summarize", "instructions": 3}, "summarize"):
        with pytest.raises(InvalidMessage):
            read_summarize(bad)

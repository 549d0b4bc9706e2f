"""What an agent writes about its context in tags: well-formed, or a typed refusal; never an exception."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.selection.directives import Directive, Malformed, parse_directive, parse_state, within, without


def said(inner: str) -> str:
    return f"I will fold.<compress>{inner}</compress>Then I act."


def test_a_directive_is_read_from_the_reply_around_it() -> None:
    assert parse_directive(said('{"compress_range": [2, 5], "compress_text": "found it"}')) == Directive((2, 5), "found it")


def test_no_tag_is_no_directive() -> None:
    assert parse_directive("I will compress steps [1, 2] later.") is None


@pytest.mark.parametrize(
    "inner",
    [
        "",
        "null",
        "[]",
        "not json",
        '{"compress_range": [1, 2]}',
        '{"compress_text": "x"}',
        '{"compress_range": [1], "compress_text": "x"}',
        '{"compress_range": [1, 2, 3], "compress_text": "x"}',
        '{"compress_range": [1.0, 2], "compress_text": "x"}',
        '{"compress_range": [true, 2], "compress_text": "x"}',
        '{"compress_range": ["1", 2], "compress_text": "x"}',
        '{"compress_range": "1-2", "compress_text": "x"}',
        '{"compress_range": null, "compress_text": "x"}',
        '{"compress_range": [1, 2], "compress_text": ""}',
        '{"compress_range": [1, 2], "compress_text": "  \\n"}',
        '{"compress_range": [1, 2], "compress_text": 7}',
        '{"compress_range": [1, 2], "compress_text": "\\ud800"}',
        '{"compress_range": [1, 2], "compress_text": "x"} and more',
        "[" * 50_000,
        '{"compress_range": [1, 2], "compress_text": "x"}</compress><compress>{"compress_range": [1, 2], "compress_text": "y"}',
    ],
)
def test_garbage_is_refused(inner: str) -> None:
    assert isinstance(parse_directive(said(inner)), Malformed)


@pytest.mark.parametrize("text", ["<compress>{}", "</compress>", "</compress><compress>", "<compress><compress></compress>"])
def test_tags_that_do_not_match_are_refused(text: str) -> None:
    assert isinstance(parse_directive(text), Malformed)


def test_a_refusal_quotes_nothing() -> None:
    refused = parse_directive(said('{"compress_range": "SECRET", "compress_text": "SECRET"}'))
    assert isinstance(refused, Malformed)
    assert "SECRET" not in refused.why


def test_what_is_only_thought_is_no_directive() -> None:
    thought = "<think>maybe <compress>junk</compress></think>"
    assert parse_directive(thought + "I act.") is None
    assert parse_directive(thought + said('{"compress_range": [1, 1], "compress_text": "x"}')) == Directive((1, 1), "x")


@given(st.text(alphabet=st.sampled_from('<>/compres{}[]",:12\\ \n'), max_size=200))
def test_any_text_is_read_without_an_error(text: str) -> None:
    assert parse_directive(text) is None or isinstance(parse_directive(text), Directive | Malformed)
    assert parse_directive(said(text)) is None or isinstance(parse_directive(said(text)), Directive | Malformed)
    assert "<compress>" not in without(text, "compress")


@given(st.integers(), st.integers(), st.text(alphabet=st.characters(codec="utf-8"), min_size=1).filter(lambda t: bool(t.strip())))
def test_a_directive_survives_the_journey(first: int, last: int, text: str) -> None:
    wire = json.dumps({"compress_range": [first, last], "compress_text": text}).replace("<", "\\u003c")
    found = parse_directive(said(wire))
    assert found == Directive((first, last), text)


def test_a_state_is_read_and_is_wins_over_think() -> None:
    assert parse_state("<IS>town: X</IS><search>y</search>") == "town: X"
    assert parse_state("<think>town: X</think><search>y</search>") == "town: X"
    assert parse_state("<think>hm</think><IS>town: X</IS>") == "town: X"
    assert parse_state("nothing") is None


@pytest.mark.parametrize("text", ["<IS>cut off", "x</IS>", "</IS><IS>", "<IS>a</IS><IS>b</IS>", "<think></think><think>"])
def test_a_state_that_is_not_well_formed_is_refused(text: str) -> None:
    assert isinstance(parse_state(text), Malformed)


def test_tags_are_cut_out_with_what_they_hold() -> None:
    assert without("a<compress>b</compress>c<compress>d", "compress") == "ac"
    assert within("a<x></x>", "x") == ""

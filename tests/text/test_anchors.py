"""Anchors mean one stretch or nothing, and what is not deleted stays where it was."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kilburn.selection.anchors import Anchors, Exact, Resolved, Scanned, parse_anchors, resolve_anchors
from kilburn.selection.lines import complement


def page(number: int, text: str, *spans: tuple[int, int]) -> Scanned:
    return Scanned(number, text, spans or ((0, len(text)),))


FIRST = page(1, "alpha beta gamma delta beta2 omega")
SECOND = page(2, "one two three, alpha2, four five")


@pytest.mark.parametrize(
    ("prefix", "suffix", "outcome"),
    [
        ("gamma", "beta2", "deleted"),
        ("gamma", "gamma", "deleted"),
        ("nowhere", "omega", "unmatched"),
        ("gamma", "nowhere", "unmatched"),
        ("beta", "omega", "ambiguous"),
        ("alpha", "omega", "ambiguous"),
        ("gamma", "a", "ambiguous"),
        ("delta", "gamma", "reversed"),
        ("one", "omega", "reversed"),
        ("gamma", "three", "crossing"),
        ("", "omega", "empty"),
        ("gamma", " \n", "empty"),
        ("GAMMA", "delta", "unmatched"),
    ],
)
def test_anchors_mean_one_stretch_or_nothing(prefix: str, suffix: str, outcome: str) -> None:
    resolved = resolve_anchors([Anchors(prefix, suffix)], [FIRST, SECOND])
    assert {name for name, count in resolved.counts.items() if count} == {outcome}
    assert bool(resolved.cuts) is (outcome == "deleted")


def test_both_anchors_go_and_nothing_else() -> None:
    resolved = resolve_anchors([Anchors("beta gam", "delta ")], [FIRST])
    left = "".join(FIRST.text[start:stop] for start, stop in complement(FIRST.spans, resolved.cuts[1]))
    assert left == "alpha beta2 omega"


def test_an_anchor_that_overlaps_itself_is_ambiguous() -> None:
    assert resolve_anchors([Anchors("aa", "b")], [page(1, "xaaab")]).counts["ambiguous"] == 1


def test_a_gap_is_a_border() -> None:
    text = "head MID tail end"
    scanned = [page(1, text, (0, 5), (9, len(text)))]
    assert resolve_anchors([Anchors("head", "tail")], scanned).counts["crossing"] == 1
    assert resolve_anchors([Anchors("MID", "tail")], scanned).counts["unmatched"] == 1


def test_of_overlapping_spans_the_first_given_stands_and_touching_ones_both_do() -> None:
    resolved = resolve_anchors([Anchors("gamma", "delta"), Anchors("delta", "beta2"), Anchors("gamma", "delta")], [FIRST])
    assert resolved.counts["deleted"] == 1
    assert resolved.counts["overlapping"] == 2
    touching = resolve_anchors([Exact(1, 0, 4), Exact(1, 4, 8)], [FIRST])
    assert touching.cuts == {1: ((0, 8),)}


@pytest.mark.parametrize(
    ("directive", "outcome"),
    [(Exact(9, 0, 3), "unmatched"), (Exact(1, 3, 3), "empty"), (Exact(1, 5, 2), "reversed"), (Exact(1, 30, 99), "crossing")],
)
def test_exact_spans_are_checked_too(directive: Exact, outcome: str) -> None:
    resolved = resolve_anchors([directive], [FIRST])
    assert resolved == Resolved({}, resolved.counts)
    assert resolved.counts[outcome] == 1


WORDS = st.text(alphabet="ab \n", max_size=8)


@settings(max_examples=300, deadline=None)
@given(texts=st.lists(st.text(alphabet="ab \n", max_size=40), min_size=1, max_size=3), anchors=st.lists(st.tuples(WORDS, WORDS)))
def test_whatever_is_named_every_directive_is_counted_once_and_spans_are_sound(
    texts: list[str], anchors: list[tuple[str, str]]
) -> None:
    scanned = [page(number, text) for number, text in enumerate(texts, 1)]
    resolved = resolve_anchors([Anchors(*pair) for pair in anchors], scanned)
    assert sum(resolved.counts.values()) == len(anchors)
    for number, cuts in resolved.cuts.items():
        text = texts[number - 1]
        kept = complement(((0, len(text)),), cuts)
        assert sorted([*kept, *cuts]) == [*kept, *cuts] or sorted([*kept, *cuts])[0][0] == 0
        assert sum(stop - start for start, stop in (*kept, *cuts)) == len(text)
        assert all(start < stop for start, stop in (*kept, *cuts))


@settings(max_examples=200, deadline=None)
@given(before=st.text(), middle=st.text(min_size=1), after=st.text())
def test_a_stretch_named_in_full_is_exactly_what_goes(before: str, middle: str, after: str) -> None:
    text = f"{before}<<{middle}>>{after}"
    if "<" not in before + middle + after and ">" not in before + middle + after:
        resolved = resolve_anchors([Anchors("<<", ">>")], [page(1, text)])
        kept = complement(((0, len(text)),), resolved.cuts[1])
        assert "".join(text[start:stop] for start, stop in kept) == before + after


PAIR = {"prefix": "a", "suffix": "b"}


@pytest.mark.parametrize("reply", [json.dumps([PAIR]), json.dumps({"delete": [PAIR]}), f"```json\n{json.dumps([PAIR])}\n```"])
def test_a_reply_is_a_list_of_anchors(reply: str) -> None:
    assert parse_anchors(reply) == [Anchors("a", "b")]


@pytest.mark.parametrize(
    "reply",
    [
        "",
        "I cannot do that.",
        "null",
        "3",
        '{"delete": 3}',
        '{"a": [], "b": []}',
        '[["a", "b"]]',
        '[{"prefix": "a"}]',
        '[{"prefix": "a", "suffix": 3}]',
        '[{"prefix": "a", "suffix": "b", "page": 3}]',
        '[{"prefix": "a", "suffix": "b"}',
        json.dumps([PAIR] * 65),
        "[" * 100_000,
    ],
)
def test_anything_else_is_no_reply(reply: str) -> None:
    assert parse_anchors(reply) is None

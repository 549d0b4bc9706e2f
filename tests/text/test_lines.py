"""Spans of lines and excerpts: exact, ordered, whatever the line ends."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from kilburn.selection.lines import join, merge, sample, skeleton, units

WEIRD = st.text(st.sampled_from("ab1 .,;\t\n\r\x0b\x0c\x1c\x85\u2028\u2029\x00é漢😀_/\x1b["), max_size=400)
TEXTS = st.one_of(st.text(max_size=300), WEIRD)


def tiles(text: str, spans: list[tuple[int, int]]) -> bool:
    return "".join(text[start:end] for start, end in spans) == text and all(a[1] == b[0] for a, b in pairwise(spans))


@given(TEXTS, st.integers(6, 80))
def test_units_cover_the_text_exactly(text: str, most: int) -> None:
    spans = units(text, most)
    assert tiles(text, spans)
    assert all(0 < end - start <= most for start, end in spans)


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50))))
def test_merged_spans_are_sorted_apart_and_keep_every_character(spans: list[tuple[int, int]]) -> None:
    merged = merge(spans)
    assert all(start < end for start, end in merged)
    assert all(a[1] < b[0] for a, b in pairwise(merged))
    assert {at for span in merged for at in range(*span)} == {at for span in spans for at in range(*span)}


def test_a_gap_is_marked_once_and_kept_text_is_untouched() -> None:
    text = "one\ntwo\nthree\nfour\n"
    assert join(text, [(4, 8), (14, 19)]) == "…\ntwo\n…\nfour\n"
    assert join(text, [(0, len(text))]) == text


def test_repeated_log_lines_have_one_skeleton() -> None:
    assert skeleton("12:01:07 worker 3 at 0x7f01ab done\n") == skeleton("12:44:59  worker 12 at 0x55ff done")
    assert skeleton("worker done") != skeleton("worker failed")


def test_a_huge_text_is_sampled_at_both_ends_and_at_its_errors() -> None:
    filler = "all is well here\n" * 20_000
    text = "first line\n" + filler + "ValueError: in the middle\n" + filler + "last line\n"
    regions = sample(text, 40_000)
    kept = "".join(text[start:end] for start, end in regions)
    assert len(kept) < 80_000
    assert kept.startswith("first line\n")
    assert kept.endswith("last line\n")
    assert "ValueError: in the middle" in kept
    assert all(a[1] < b[0] for a, b in pairwise(regions))

"""What a summary holds is found again in its sources, and nothing else is."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kilburn.selection.extract import Piece, extract
from kilburn.selection.origins import all_origins, find_origins, words_at

TEXTS = {
    3: "The store listens on port 40123.\nNothing else here.\nBuild 9fce21aa07b1 was the last good one.\n",
    7: "decided: retry twice, because the link in src/net/link.py is slow\nand so on\n",
    9: "The store listens on port 40123.\n",
}


def test_lines_of_an_extract_are_found_where_they_stand() -> None:
    summary = (
        "p3 tool:\nThe store listens on port 40123.\n…\nBuild 9fce21aa07b1 was the last good one.\np7 assistant:\nand so on\n"
    )
    found = find_origins(summary, {3, 7}, TEXTS.__getitem__)
    assert words_at(TEXTS[3], found[3]) == ("The store listens on port 40123.\n…\nBuild 9fce21aa07b1 was the last good one.\n")
    assert words_at(TEXTS[7], found[7]) == "and so on\n"


def test_names_that_a_model_wrote_lead_to_the_lines_that_hold_them() -> None:
    summary = "They saw that 40123 is the port, and that link.py was slow; host zeppelin_9 was never there."
    found = find_origins(summary, {3, 7}, TEXTS.__getitem__)
    kept = {page: words_at(TEXTS[page], spans) for page, spans in found.items()}
    assert kept[3] == "The store listens on port 40123.\n"
    assert "src/net/link.py" in kept[7]


def test_lines_that_a_model_was_completed_with_are_found() -> None:
    found = find_origins("All is well.\n\nVerbatim:\np3: Build 9fce21aa07b1 was the last good one.\n", {3}, TEXTS.__getitem__)
    assert words_at(TEXTS[3], found[3]) == "Build 9fce21aa07b1 was the last good one.\n"


def test_invented_lines_and_foreign_addresses_are_not_found() -> None:
    summary = "p3 tool:\nThe store listens on port 50000.\np8 tool:\nand so on\n"
    assert find_origins(summary, {3, 7}, TEXTS.__getitem__) == {}


def test_what_several_summaries_hold_is_all_origins() -> None:
    assert all_origins([{3: ((0, 5),)}, {7: ((1, 2),), 3: ((4, 9), (12, 14))}]) == {3: ((0, 9), (12, 14)), 7: ((1, 2),)}


@given(st.lists(st.text(max_size=200), min_size=1, max_size=4), st.integers(10, 200))
def test_all_that_an_extract_kept_is_found(texts: list[str], tokens: int) -> None:
    by_page = dict(enumerate(texts, 1))
    pieces = [Piece(page, "tool", "result", text) for page, text in by_page.items()]
    made = extract(pieces, tokens, lambda text: len(text) // 4 + 1)
    found = find_origins(made.text, set(by_page), by_page.__getitem__)
    for page, spans in found.items():
        assert all(0 <= start < end <= len(by_page[page]) for start, end in spans)
        assert list(spans) == sorted(spans)


@given(st.text(max_size=400))
def test_any_summary_only_leads_to_places_in_the_sources(summary: str) -> None:
    for page, spans in find_origins(summary, set(TEXTS), TEXTS.__getitem__).items():
        assert all(0 <= start < end <= len(TEXTS[page]) for start, end in spans)

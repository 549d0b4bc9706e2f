"""A text in chunks is the text, and a change keeps what it did not touch."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("semantic_text_splitter")

from kilburn.memory.chunks import CAPACITY, chunks, rechunk

NAMES = ["a.md", "a.py", "a.txt", "a", ""]
PARAGRAPHS = "\n\n".join(f"## Part {number}\n\n" + f"The keeper of light {number} wrote a line. " * 30 for number in range(20))

texts = st.lists(
    st.sampled_from(
        [
            "# Head\n",
            "word ",
            "\n\n",
            "é😀",
            "汉字。",
            "\u202e",
            "\0",
            "```\ncode\n```\n",
            "  ",
            "x" * 900,
            "\r\n",
            ". ",
            "\n" * 900,
        ]
    ),
    max_size=60,
).map("".join)


@given(text=texts, name=st.sampled_from(NAMES))
def test_joined_they_are_the_text(text: str, name: str) -> None:
    made = chunks(text, name)
    assert "".join(made) == (text if text.strip() else "")
    assert all(chunk.strip() and len(chunk.rstrip()) - (len(chunk) - len(chunk.lstrip())) <= CAPACITY[1] for chunk in made)


@given(first=texts, second=texts, at=st.integers(0, 400), name=st.sampled_from(NAMES))
def test_a_changed_text_is_the_new_text(first: str, second: str, at: int, name: str) -> None:
    old = chunks(first, name)
    for changed in (first[:at] + second + first[at:], first[:at] + first[at + len(second) :], second, first + second):
        made = rechunk(old, changed, name)
        assert "".join(made) == (changed if changed.strip() else "")
        assert all(chunk.strip() for chunk in made)


def test_the_same_text_has_the_same_chunks() -> None:
    old = chunks(PARAGRAPHS, "a.md")
    assert len(old) > 20
    assert rechunk(old, PARAGRAPHS, "a.md") == old


@pytest.mark.parametrize("at", [0, 5000, len(PARAGRAPHS)])
def test_a_small_change_changes_few_chunks(at: int) -> None:
    old = chunks(PARAGRAPHS, "a.md")
    made = rechunk(old, PARAGRAPHS[:at] + "Fog. " + PARAGRAPHS[at:], "a.md")
    assert len(set(old) - set(made)) <= 1
    assert len(set(made) - set(old)) <= 2


def test_a_text_that_grows_line_by_line_does_not_fall_to_pieces() -> None:
    text = ""
    for front in (True, False):
        old: list[str] = []
        text = ""
        for number in range(200):
            line = f"Entry {number}: the lamp was lit.\n"
            text = line + text if front else text + line
            old = rechunk(old, text)
            assert "".join(old) == text
        assert len(old) < 3 * len(text) / CAPACITY[0]


def test_markdown_is_cut_at_its_headings() -> None:
    text = "# One\n\n" + "a line. " * 60 + "\n\n# Two\n\n" + "b line. " * 60
    assert [chunk.split("\n")[0] for chunk in chunks(text, "a.MD")] == ["# One", "# Two"]

"""Tags of blocks and mementos: found in any chunking, and a tag out of place is never overlooked."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kilburn.wire.mementos import BLOCK_END, BLOCK_START, SUMMARY_END, SUMMARY_START, Blocks, Parser, Where, parse

TAGS = [BLOCK_START, BLOCK_END, SUMMARY_START, SUMMARY_END]


def block(content: str, memento: str) -> str:
    return f"{BLOCK_START}{content}{BLOCK_END}{SUMMARY_START}{memento}{SUMMARY_END}"


def in_pieces(text: str, sizes: list[int]) -> Blocks:
    parser, at = Parser(), 0
    for size in sizes:
        parser.feed(text[at : at + size])
        at += size
    parser.feed(text[at:])
    return parser.close()


@given(
    st.lists(
        st.sampled_from([*TAGS, "words", " ", "\n", "<|", "<", "|>", "<|block", "é漢🙂", "<|block_start|", "x"]), max_size=14
    ),
    st.lists(st.integers(0, 9), max_size=30),
)
@example([BLOCK_START, BLOCK_END, " ", "words"], [2, 9, 9, 9])
def test_how_a_text_is_cut_makes_no_difference(parts: list[str], sizes: list[int]) -> None:
    text = "".join(parts)
    assert in_pieces(text, sizes) == parse(text)
    if parse(text).faults == ():
        assert [text.count(tag) for tag in TAGS] == [len(parse(text).blocks)] * 4


@given(st.lists(st.tuples(st.text("ab <|\n", max_size=9), st.text("ab <|", min_size=1, max_size=9)), max_size=5), st.text("xy\n"))
def test_a_well_formed_text_gives_its_blocks_back(pairs: list[tuple[str, str]], between: str) -> None:
    pairs = [(content, memento + "m") for content, memento in pairs]
    text = between + between.join(block(*pair) for pair in pairs) + between
    found = parse(text)
    assert found.faults == ()
    assert [(text[slice(*one.content)], text[slice(*one.memento)]) for one in found.blocks] == pairs
    assert all(text[one.start :].startswith(BLOCK_START) and text[: one.end].endswith(SUMMARY_END) for one in found.blocks)


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (f"{BLOCK_START}a{BLOCK_START}b{BLOCK_END}{SUMMARY_START}m{SUMMARY_END}", "block_start inside a block"),
        (f"{BLOCK_START}a", "a block that never ends"),
        (f"{BLOCK_START}a{BLOCK_END} ", "a block without a memento"),
        (f"{BLOCK_START}a{BLOCK_END}{SUMMARY_START}m", "a memento that never ends"),
        (f"{BLOCK_END}a{BLOCK_START}", "block_end outside of a block"),
        (f"{SUMMARY_START}m{SUMMARY_END}{BLOCK_START}a{BLOCK_END}", "summary_start outside of a block"),
        (f"{BLOCK_START}a{SUMMARY_START}m{SUMMARY_END}{BLOCK_END}", "summary_start inside a block"),
        (f"{BLOCK_START}a{BLOCK_END} well {SUMMARY_START}m{SUMMARY_END}", "text between a block and its memento"),
        (f"{BLOCK_START}a{BLOCK_END}{SUMMARY_START} \n{SUMMARY_END}", "an empty memento"),
        (block("a", f"m{BLOCK_START}"), "block_start inside a memento"),
        (f"{BLOCK_START}a{BLOCK_END}{block('b', 'm')}", "block_start before a memento"),
    ],
)
def test_a_tag_out_of_place_is_a_fault(text: str, fault: str) -> None:
    assert fault in [found.problem for found in parse(text).faults]


def test_where_the_stream_stands_is_known_at_every_tag() -> None:
    parser = Parser()
    assert parser.feed("so <|block_st") == []
    assert parser.where is Where.OUTSIDE
    assert parser.read == 3
    assert parser.feed("art|>thinking") == [BLOCK_START]
    assert parser.where is Where.BLOCK
    assert parser.feed(f"{BLOCK_END}\n{SUMMARY_START}done{SUMMARY_END} and") == [BLOCK_END, SUMMARY_START, SUMMARY_END]
    assert parser.where is Where.OUTSIDE
    assert len(parser.blocks) == 1

"""Which fold stands for which pages: as a plain dict would say it, and undone step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kilburn.kernel.cover import Cover

PAGES = st.lists(st.integers(1, 30), max_size=30, unique=True)
STEPS = st.lists(st.tuples(st.booleans(), PAGES), max_size=20)


def says(cover: Cover) -> dict[int, int]:
    said = dict(cover)
    for fold in range(-25, 0):
        assert cover.of(fold) == {page for page, own in said.items() if own == fold}
    return said


@given(STEPS, PAGES)
def test_it_says_what_a_dict_would_and_forgets_what_is_undone(steps: list[tuple[bool, list[int]]], asked: list[int]) -> None:
    cover, plain = Cover(), dict[int, int]()
    history = []
    for number, (takes, pages) in enumerate(steps, 1):
        history.append((dict(plain), cover.take(pages) if takes else cover.put(pages, -number)))
        for page in pages:
            plain.pop(page, None)
            if not takes:
                plain[page] = -number
        assert says(cover) == plain
        assert cover.over(set(asked)) == {plain[page] for page in asked if page in plain}
    for before, undo in reversed(history):
        undo()
        assert says(cover) == before


def test_a_successor_takes_over_what_it_cites() -> None:
    cover = Cover()
    cover.put(range(1, 5000), -1)
    cover.put(range(1, 5009), -2)
    assert len(cover.of(-2)) == 5008
    assert not cover.of(-1)
    assert cover[1] == cover[5008] == -2

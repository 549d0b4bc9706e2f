"""Which fold stands for which pages: as a plain dict would say it, and undone step by step."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kilburn.kernel.stand_ins import StandIns

PAGES = st.lists(st.integers(1, 30), max_size=30, unique=True)
STEPS = st.lists(st.tuples(st.booleans(), PAGES, st.integers(0, 5)), max_size=20)
"""Each takes pages, or puts them under a new fold (0), or under the one of that many steps before, which may be there still."""


def says(stand_ins: StandIns) -> dict[int, int]:
    said = dict(stand_ins)
    for fold in range(-25, 0):
        assert stand_ins.of(fold) == {page for page, own in said.items() if own == fold}
    return said


@given(STEPS, PAGES)
def test_it_says_what_a_dict_would_and_forgets_what_is_undone(steps: list[tuple[bool, list[int], int]], asked: list[int]) -> None:
    stand_ins, plain = StandIns(), dict[int, int]()
    history = []
    for number, (takes, pages, back) in enumerate(steps, 1):
        fold = -max(1, number - back)
        history.append((dict(plain), stand_ins.take(pages) if takes else stand_ins.put(pages, fold)))
        for page in pages:
            plain.pop(page, None)
            if not takes:
                plain[page] = fold
        assert says(stand_ins) == plain
        assert stand_ins.over(set(asked)) == {plain[page] for page in asked if page in plain}
    for before, undo in reversed(history):
        undo()
        assert says(stand_ins) == before


def test_a_successor_takes_over_what_it_cites() -> None:
    stand_ins = StandIns()
    stand_ins.put(range(1, 5000), -1)
    stand_ins.put(range(1, 5009), -2)
    assert len(stand_ins.of(-2)) == 5008
    assert not stand_ins.of(-1)
    assert stand_ins[1] == stand_ins[5008] == -2

"""The handles: one for all that is out between two things that stand, whatever is gone in between."""

from __future__ import annotations

import json
from bisect import bisect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from kernel.talk import assistant, user
from kilburn.budget import Budget
from kilburn.kernel.gaps import Gaps, Key
from kilburn.kernel.hierarchy import Hierarchy
from kilburn.kernel.process import Process
from kilburn.move import Drop, Evict, Fold, Load, Retire
from kilburn.testing import Memory, check_laws


def opened(window: int = 1000, policy: str = "fifo") -> Process:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").process("a")


def filled(pages: int, window: int) -> Process:
    process = opened(window)
    process.append(user("the task"), *(assistant(f"step {number} " + "w" * 40) for number in range(2, pages + 1)))
    return process


def lines_of(process: Process) -> list[str]:
    return [message["content"] for message in process.render() if " out: " in str(message["content"])]


@pytest.mark.parametrize("gone", [Drop, Retire])
def test_every_second_of_eight_hundred_pages_is_gone(gone: type[Drop | Retire]) -> None:
    process = filled(800, 900)
    for page in range(2, 760, 2):
        process.apply(gone((page,)))
    (line,) = lines_of(process)
    first, last = line[1:].split(" ")[0].split("-")
    shown = [page.id for page, state in process.pages() if state.at == "in"]
    out = [page.id for page, state in process.pages() if state.at == "out"]
    assert f"out: {len(out)} pages, " in line
    assert (first, last) == (f"p{out[0]}", f"p{out[-1]}")
    process.append(user("go on"))
    assert process.render().tokens <= 900
    assert len(shown) > 20, "the room is the pages' own"
    check_laws(process)


def test_a_range_with_forgotten_pages_recalls_what_is_left() -> None:
    process = filled(200, 900)
    for page in range(3, 150, 2):
        process.forget(f"p{page}")
    found = process.recall("p3-p20")
    assert [page.id for page in found.pages] == list(range(4, 21, 2))
    assert found.parts[0] == "step 4 " + "w" * 40


def test_a_summary_of_every_second_page_leaves_one_handle() -> None:
    process = filled(60, 900)
    process.apply(Evict(tuple(page.id for page, state in process.pages() if state.at == "in" and page.id not in (1, 60))))
    process.apply(Fold(tuple(range(3, 58, 2)), text="every second one"))
    assert len(lines_of(process)) == 1
    process.apply(Load((30,)))
    assert len(lines_of(process)) == 2
    check_laws(process)


def test_pages_of_a_summary_that_left_join_their_neighbours() -> None:
    process = filled(30, 2000)
    (fold,) = process.apply(Fold(tuple(range(10, 20)), text="ten to nineteen"))
    process.apply(Evict(tuple(range(2, 10))), Evict(tuple(range(20, 26))))
    assert len(lines_of(process)) == 2
    process.apply(Retire((12,)))
    assert fold not in json.dumps([state.at for _, state in process.pages()])
    (line,) = lines_of(process)
    assert line.startswith("[p2-p25 out: 23 pages,")
    check_laws(process)


def test_a_batch_that_fails_puts_the_gaps_back() -> None:
    process = filled(100, 900)
    process.forget("p10")
    before = list(process.window.gaps)
    with pytest.raises(kilburn.errors.KilburnError):
        process.apply(Load((5,)), Retire((20,)), Load((31,)), Evict((31,)), Load((20,)))
    assert list(process.window.gaps) == before
    check_laws(process)


def test_gaps_are_the_same_when_reopened() -> None:
    store = Memory()

    def process() -> Process:
        return Hierarchy(store, Budget(900), "fifo", tokenizer="chars/4").process("a")

    first = process()
    first.append(user("the task"), *(assistant(f"step {number} " + "w" * 40) for number in range(2, 200)))
    for page in range(2, 150, 3):
        first.forget(f"p{page}")
    first.apply(Load((6,)), Load((60,)))
    first.stats()
    again = process()
    assert list(again.window.gaps) == list(first.window.gaps)
    assert again.render() == first.render()
    check_laws(again)


WALLS = st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(-9, -1))


@settings(deadline=None)
@given(st.lists(st.one_of(st.tuples(st.just("page"), st.integers(1, 30)), st.tuples(st.just("wall"), WALLS)), max_size=80))
def test_gaps_are_what_they_would_be_made_anew(steps: list[tuple[str, int | Key]]) -> None:
    """Pages leave, stand again or are gone, walls come and go: the gaps follow from where everything is."""
    walls: list[Key] = []
    gaps = Gaps(len, walls)
    out: set[int] = set()

    def wall(key: Key) -> None:
        if key in walls:
            walls.remove(key)
            gaps.close(key)
        else:
            walls.insert(bisect(walls, key), key)
            gaps.part(key)

    for kind, what in steps:
        if isinstance(what, tuple):
            wall(what)
        elif what in out:
            out.discard(what)
            gaps.remove(what)
            if what % 2:
                wall((what, 0, what))
        else:
            if (what, 0, what) in walls:
                wall((what, 0, what))
            out.add(what)
            gaps.add(what, what)
        anew: dict[int, list[int]] = {}
        for page in sorted(out):
            anew.setdefault(bisect(walls, (page, 0, page)), []).append(page)
        expected = [(pages[0], pages[-1], len(pages), sum(pages)) for pages in anew.values()]
        assert list(gaps) == expected, (kind, what)
        assert all((page in gaps) == (page in out) for page in range(1, 31))

"""The handles: one for all that is out between two things that stand, whatever is gone in between."""

from __future__ import annotations

import json
from bisect import bisect

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from kernel.talk import assistant, user
from kilburn import Store
from kilburn.backends.sqlite import Sqlite
from kilburn.budget import Budget
from kilburn.kernel.gaps import Gaps, Key
from kilburn.kernel.session import Session
from kilburn.move import Drop, Evict, Fold, Load, Retire
from kilburn.testing import check_laws


def opened(window: int = 1000, policy: str = "fifo") -> Session:
    return kilburn.open(":memory:", window=window, policy=policy, tokenizer="chars/4").session("a")


def filled(pages: int, window: int) -> Session:
    session = opened(window)
    session.append(user("the task"), *(assistant(f"step {number} " + "w" * 40) for number in range(2, pages + 1)))
    return session


def lines_of(session: Session) -> list[str]:
    return [message["content"] for message in session.render() if " out: " in str(message["content"])]


@pytest.mark.parametrize("gone", [Drop, Retire])
def test_every_second_of_four_hundred_pages_is_gone(gone: type[Drop | Retire]) -> None:
    session = filled(400, 900)
    for page in range(2, 360, 2):
        session.edits.apply(gone((page,)))
    (line,) = lines_of(session)
    first, last = line[1:].split(" ")[0].split("-")
    shown = [page.id for page, state in session.contents.pages() if state.at == "in"]
    out = [page.id for page, state in session.contents.pages() if state.at == "out"]
    assert f"out: {len(out)} pages, " in line
    assert (first, last) == (f"p{out[0]}", f"p{out[-1]}")
    session.append(user("go on"))
    assert session.render().tokens <= 900
    assert len(shown) > 20, "the room is the pages' own"
    check_laws(session)


def test_a_range_with_forgotten_pages_recalls_what_is_left() -> None:
    session = filled(200, 900)
    for page in range(3, 150, 2):
        session.forget(f"p{page}")
    found = session.recall("p3-p20")
    assert [page.id for page in found.pages] == list(range(4, 21, 2))
    assert found.parts[0] == "step 4 " + "w" * 40


def test_a_summary_of_every_second_page_leaves_one_handle() -> None:
    session = filled(60, 900)
    session.edits.apply(
        Evict(tuple(page.id for page, state in session.contents.pages() if state.at == "in" and page.id not in (1, 60)))
    )
    session.edits.apply(Fold(tuple(range(3, 58, 2)), text="every second one"))
    assert len(lines_of(session)) == 1
    session.edits.apply(Load((30,)))
    assert len(lines_of(session)) == 2
    check_laws(session)


def test_pages_of_a_summary_that_left_join_their_neighbours() -> None:
    session = filled(30, 2000)
    (fold,) = session.edits.apply(Fold(tuple(range(10, 20)), text="ten to nineteen"))
    session.edits.apply(Evict(tuple(range(2, 10))), Evict(tuple(range(20, 26))))
    assert len(lines_of(session)) == 2
    session.edits.apply(Retire((12,)))
    assert fold not in json.dumps([state.at for _, state in session.contents.pages()])
    (line,) = lines_of(session)
    assert line.startswith("[p2-p25 out: 23 pages,")
    check_laws(session)


def test_a_batch_that_fails_puts_the_gaps_back() -> None:
    session = filled(100, 900)
    session.forget("p10")
    before = list(session.window.gaps)
    with pytest.raises(kilburn.errors.KilburnError):
        session.edits.apply(Load((5,)), Retire((20,)), Load((31,)), Evict((31,)), Load((20,)))
    assert list(session.window.gaps) == before
    check_laws(session)


def test_gaps_are_the_same_when_reopened() -> None:
    backend = Sqlite(":memory:")

    def session() -> Session:
        return Store(backend, Budget(900), "fifo", tokenizer="chars/4").session("a")

    first = session()
    first.append(user("the task"), *(assistant(f"step {number} " + "w" * 40) for number in range(2, 200)))
    for page in range(2, 150, 3):
        first.forget(f"p{page}")
    first.edits.apply(Load((6,)), Load((60,)))
    first.stats()
    again = session()
    assert list(again.window.gaps) == list(first.window.gaps)
    assert again.render() == first.render()
    check_laws(again)


WALLS = st.tuples(st.integers(1, 30), st.integers(0, 2), st.integers(-9, -1))


@settings(deadline=None)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("page"), st.integers(1, 30)),
            st.tuples(st.just("wall"), WALLS),
            st.tuples(st.just("many"), st.frozensets(st.integers(1, 30), min_size=1)),
        ),
        max_size=80,
    )
)
def test_gaps_are_what_they_would_be_made_anew(steps: list[tuple[str, int | Key | frozenset[int]]]) -> None:
    """Pages leave, stand again or are gone, one or many at once, walls come and go: the gaps follow from where everything is."""
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
        elif isinstance(what, frozenset):
            # As a fold takes pages that are out, and gives back others that it stood for.
            gone, back = what & out, {page for page in what - out if (page, 0, page) not in walls}
            gaps.remove_all(list(gone))
            gaps.add_all({page: page for page in back})
            out = out - gone | back
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

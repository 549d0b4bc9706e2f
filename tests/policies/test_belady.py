"""`belady` shows what will be needed: never less than any other choice could."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

import kilburn
from effort import rounds
from kilburn.kernel.session import Session
from kilburn.policies.belady import Belady
from kilburn.testing import check_laws

WORDS = "the line of page {:03d} that will be needed, 56 letters\n"
SIZE = len(WORDS.format(0)) - 1


def said(number: int, lines: int = 1) -> dict[str, str]:
    filler = "".join(f"nothing that anybody asks for, {number}, {n}\n" for n in range(lines))
    return {"role": "user", "content": WORDS.format(number) + filler}


def shown(session: Session) -> str:
    return "\n".join(str(message["content"]) for message in session.render())


def survivors(uses: dict[int, int], window: int, turns: int) -> int:
    """How many of the lines stand in the prompt at the turn that needs them."""
    future = {page: ((turn, ((0, SIZE),)),) for page, turn in uses.items()}
    with kilburn.open(":memory:", window=window, policy=Belady(future), tokenizer="chars/4") as store:
        session = store.session("a")
        given = [{"role": "user", "content": "task"}, *(said(number, 12) for number in range(2, turns + 1))]
        found = 0
        for turn, message in enumerate(given, 1):
            session.append(message)
            due = [page for page, when in uses.items() if when == turn]
            text = shown(session)
            found += sum(WORDS.format(page).strip() in text for page in due)
        check_laws(session, given)
        return found


def most(uses: dict[int, int], places: int) -> int:
    """The best of all choices: every set of lines of which at most `places` wait at the same time."""
    for size in range(len(uses), 0, -1):
        for chosen in combinations(uses.items(), size):
            if all(sum(page < turn <= due for page, due in chosen) <= places for turn in range(1, 40)):
                return size
    return 0


@settings(max_examples=rounds(15, 25), deadline=None)
@given(st.dictionaries(st.integers(2, 10), st.integers(1, 12), max_size=7))
def test_where_all_fits_nothing_that_will_be_needed_is_missing(waits: dict[int, int]) -> None:
    uses = {page: page + wait for page, wait in waits.items()}
    assert survivors(uses, window=900, turns=24) == len(uses)


@settings(max_examples=rounds(15, 25), deadline=None)
@given(st.dictionaries(st.integers(2, 10), st.integers(2, 12), max_size=7))
def test_in_a_narrow_window_it_shows_as_many_as_any_choice_of_its_places_could(waits: dict[int, int]) -> None:
    """The window has room for the newest message and some lines; how many, the plan itself reveals."""
    uses = {page: page + wait for page, wait in waits.items()}
    found = survivors(uses, window=330, turns=24)
    assert found >= most(uses, places=3)


def test_a_use_that_is_over_is_no_reason_to_keep_a_line() -> None:
    policy = Belady({3: ((5, ((0, 4),)), (9, ((4, 8),)))})
    assert policy.needed(3, 5) == [(5, (0, 4)), (9, (4, 8))]
    assert policy.needed(3, 6) == [(9, (4, 8))]
    assert policy.needed(3, 10) == []
    assert policy.needed(4, 1) == []


def test_a_message_that_is_too_long_for_the_window_keeps_the_line_that_will_be_needed() -> None:
    text = "".join(f"line {n} of a very long output\n" for n in range(400))
    start = text.index("line 201 ")
    policy = Belady({2: ((4, ((start, start + 30),)),)})
    with kilburn.open(":memory:", window=500, policy=policy, tokenizer="chars/4") as store:
        session = store.session("a")
        session.append({"role": "user", "content": "task"})
        session.append({"role": "assistant", "content": text})
        session.append({"role": "assistant", "content": "hm"})
        session.append({"role": "assistant", "content": "so"})
        assert "line 201 of a very long output" in shown(session)


def test_without_a_future_it_keeps_nothing_but_what_just_came() -> None:
    assert survivors({}, window=400, turns=20) == 0

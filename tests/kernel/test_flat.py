"""What a session costs does not grow with its history: the functions that are entered and SQLite's steps are counted."""

from __future__ import annotations

import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kilburn
from kilburn.backends.sqlite import Sqlite
from kilburn.kernel.session import Session
from kilburn.kernel.sheets import Sheets
from kilburn.move import Evict, Fold
from kilburn.testing import check_laws

SHORT, LONG = 200, 3000


def calls(work: Callable[[], object]) -> int:
    """How many functions of Kilburn a piece of work enters, comprehensions too."""
    found = 0
    home = str(Path(kilburn.__file__).parent)

    def note(frame: FrameType, event: str, argument: object) -> None:
        nonlocal found
        found += event == "call" and frame.f_code.co_filename.startswith(home)

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(before)
    return found


def steps(session: Session, work: Callable[[], object]) -> int:
    """How many hundreds of steps SQLite's machine takes for a piece of work."""
    backend, found = session.backend, 0
    assert isinstance(backend, Sqlite)

    def note() -> bool:
        nonlocal found
        found += 1
        return False

    backend._db.set_progress_handler(note, 100)
    try:
        work()
    finally:
        backend._db.set_progress_handler(None)
    return found


def turn(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
    function = {"name": "read", "arguments": f'{{"path": "file{number}"}}'}
    call = {"id": f"call{number}", "type": "function", "function": function}
    return (
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": f"call{number}", "content": f"line {number} of the file\n" * 4},
    )


def filled(session: Session, pages: int) -> None:
    session.append({"role": "user", "content": "Read the files."})
    for first in range(0, pages // 2, 100):
        some = range(first, min(first + 100, pages // 2))
        session.append(*(message for number in some for message in turn(number)))


def medians(tmp_path: Path, measured: Callable[[Session, int], int], pages: int) -> int:
    """The middle one of some turns in a session that was opened again."""
    path = tmp_path / f"{pages}.db"
    with kilburn.open(path, window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        filled(store.session("s"), pages)
    with kilburn.open(path, window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        found = [measured(session, 10_000 + number) for number in range(15)]
    return sorted(found[4:])[5]


def test_a_turn_of_a_long_session_does_what_one_of_a_short_session_does(tmp_path: Path) -> None:
    def asked(session: Session, number: int) -> int:
        return steps(session, lambda: (session.append(*turn(number)), session.render()))

    def entered(session: Session, number: int) -> int:
        return calls(lambda: (session.append(*turn(number)), session.render()))

    assert medians(tmp_path, asked, LONG) <= 1.5 * medians(tmp_path, asked, SHORT) + 2
    for file in tmp_path.iterdir():
        file.unlink()
    assert medians(tmp_path, entered, LONG) <= 1.1 * medians(tmp_path, entered, SHORT)


def test_forgetting_a_page_of_a_long_session_does_what_it_does_in_a_short_one(tmp_path: Path) -> None:
    def entered(session: Session, number: int) -> int:
        session.append(*turn(number))
        return calls(lambda: session.forget(f"p{21 + 2 * (number - 10_000)}"))

    def asked(session: Session, number: int) -> int:
        session.append(*turn(number))
        return steps(session, lambda: session.forget(f"p{21 + 2 * (number - 10_000)}"))

    short, long = medians(tmp_path, entered, SHORT), medians(tmp_path, entered, LONG)
    assert long <= 1.2 * short
    assert short < 3000
    for file in tmp_path.iterdir():
        file.unlink()
    assert medians(tmp_path, asked, LONG) <= 1.5 * medians(tmp_path, asked, SHORT) + 2


def test_a_turn_of_a_user_who_has_given_a_thousand_orders_costs_what_one_after_a_few_hundred_costs() -> None:
    def taken(orders: int) -> tuple[int, int]:
        with kilburn.open(":memory:", window=10**6, policy="fifo", tokenizer="chars/4", embedder=None) as store:
            session = store.session("s")
            session.append(*({"role": "user", "content": f"Never touch file {number}."} for number in range(orders)))
            entered = calls(lambda: session.append({"role": "user", "content": "Never touch the tests."}))
            return entered, len(str(list(session.ledger.events())[-1].data))

    few, many = taken(SHORT), taken(10 * SHORT)
    assert many[0] <= 1.1 * few[0], "functions that a turn enters"
    assert many[1] <= 1.3 * few[1], "characters in the ledger"


@pytest.mark.parametrize("pages", [SHORT, LONG])
def test_the_calls_of_an_append_are_looked_up_once(tmp_path: Path, pages: int) -> None:
    with kilburn.open(tmp_path / "a.db", window=10**9, policy="fifo", tokenizer="chars/4", embedder=None) as store:
        session = store.session("s")
        asked = 0
        find = session.window.calls.find

        def counted(among: Any) -> Any:
            nonlocal asked
            asked += 1
            assert find is not None
            return find(among)

        session.append({"role": "user", "content": "Read the files."})
        find = session.window.calls.find
        session.window.calls.find = counted
        session.append(*(message for number in range(pages // 2) for message in turn(number)))
    assert asked == 1


def test_an_excerpt_of_many_pages_is_remade_in_few_steps(tmp_path: Path) -> None:
    """What an excerpt stood for goes out and into the next one; each of these pages was moved by itself once."""

    def remade(pages: int) -> int:
        with kilburn.open(":memory:", window=10**9, policy="fifo", tokenizer="chars/4", embedder=None) as store:
            session = store.session("s")
            filled(session, pages)
            before, after = tuple(range(2, pages - 20)), tuple(range(4, pages - 18))
            session.edits.apply(Fold(before, text="what was read"))
            (fold,) = [page.id for page, state in session.contents.pages() if page.id < 0 and state.at == "in"]
            found = calls(lambda: session.edits.apply(Evict((fold,)), Fold(after, text="what was read since")))
            check_laws(session)
            with pytest.raises(kilburn.errors.KilburnError):
                session.edits.apply(Evict((fold - 1,)), Fold((), text="nothing"))
            check_laws(session)
            return found

    short = remade(SHORT)
    assert remade(10 * SHORT) < short + SHORT, "not one function for each page that it stands for"


def test_a_branch_of_a_long_session_begins_like_one_of_a_short_session(tmp_path: Path) -> None:
    def begun(pages: int) -> tuple[int, int]:
        with kilburn.open(tmp_path / f"{pages}.db", window=2000, policy="fifo", tokenizer="chars/4", embedder=None) as store:
            session = store.session("s")
            filled(session, pages)
            session.fork("The first one writes a checkpoint.").branches.exit("done")
            tracemalloc.start()
            session.fork("Look into it.")
            taken = tracemalloc.get_traced_memory()[1]
            tracemalloc.stop()
            asked = steps(session, lambda: session.fork("Look into it, too."))
            branch = session.fork("Read on.")
            branch.append(*turn(20_000))
            session.append(*turn(30_000))
            assert "file30000" not in str(branch.render())
            assert "file20000" not in str(session.render())
            check_laws(branch)
            check_laws(session)
            return taken, asked

    short, long = begun(SHORT), begun(LONG)
    assert long[0] <= short[0] + 100_000, "bytes: a few sheets"
    assert long[1] <= 1.5 * short[1] + 5


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-3000, 3000), st.integers(0, 3)), max_size=60))
def test_sheets_are_what_dicts_are(changes: list[tuple[int, int, int]]) -> None:
    """Several copies, each changed by itself."""
    sheets: list[Sheets[int]] = [Sheets({page: page for page in range(-5, 3000, 500)})]
    plain = [dict(sheets[0])]
    for which, page, what in changes:
        at = which % len(sheets)
        one, other = sheets[at], plain[at]
        if what == 0:
            sheets.append(one.copy())
            plain.append(other.copy())
        elif what == 1:
            assert one.pop(page, None) == other.pop(page, None)
        else:
            one[page] = other[page] = what
        for made, known in zip(sheets, plain, strict=True):
            assert made == known
            assert dict(made.items()) == known
            assert (len(made), made.get(page), page in made) == (len(known), known.get(page), page in known)

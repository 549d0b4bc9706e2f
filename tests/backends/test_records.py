"""Long lists of page ids are stored as stretches, and read back as they were."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.backends.records import decode_event, decode_page, record_of_event, record_of_page
from kilburn.event import Act, Event
from kilburn.message import Kind, Role, Trust
from kilburn.page import Page

IDS = st.one_of(
    st.lists(st.integers(-50, 50).filter(bool), max_size=80, unique=True),
    st.lists(st.tuples(st.integers(1, 400), st.integers(0, 60)), min_size=1, max_size=6).map(
        lambda runs: sorted({page for first, more in runs for page in range(first, first + more + 1)})
    ),
)


def fold(sources: tuple[int, ...]) -> Page:
    return Page(
        id=-1,
        digest="0" * 64,
        kind=Kind.FOLD,
        role=Role.USER,
        message=0,
        tokens=9,
        time=1.5,
        trust=Trust.TOOL,
        sources=sources,
        depth=1,
        order=(1, 0),
        label="[p1 in short:]",
    )


def event(pages: tuple[int, ...]) -> Event:
    return Event(number=7, act=Act.FOLD, time=1.5, pages=pages, why="short", data={"fold": -1, "to": {"out": [3]}})


@given(IDS.map(tuple))
def test_what_is_read_is_what_was_written(ids: tuple[int, ...]) -> None:
    assert decode_event(record_of_event(event(ids))) == event(ids)
    if ids:
        assert decode_page(record_of_page(fold(ids))) == fold(ids)


def test_a_memory_of_a_long_session_takes_little_room() -> None:
    ids = tuple(page for page in range(1, 5001) if page not in (17, 900))
    assert len(record_of_page(fold(ids))) < 400
    assert len(record_of_event(event(ids))) < 400


@pytest.mark.parametrize("runs", [(1,), (9, 3), (1, 10**12), (1, 2, 3)])
def test_stretches_that_make_no_sense_are_refused(runs: tuple[int, ...]) -> None:
    record = msgspec.to_builtins(fold(())) | {"runs": runs}
    with pytest.raises(msgspec.DecodeError):
        decode_page(msgspec.msgpack.encode(record))


@pytest.mark.parametrize("act", [Act.FAULT, Act.SEARCH, Act.FOLD])
def test_an_event_of_many_pages_is_read_as_it_was(act: Act) -> None:
    data: dict[str, object] = (
        {"missed": [*range(1, 60)]} if act is not Act.FOLD else {"to": {"folded": [*range(5, 90), 200]}, "fold": -1}
    )
    event = Event(number=1, act=act, time=1.0, pages=tuple(range(1, 60)), data=data)
    assert decode_event(record_of_event(event)) == event

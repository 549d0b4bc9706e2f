"""Dates and spans of time in questions."""

import datetime as dt
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kilburn.search.dates import DAY, closeness, times_in

NOW = dt.datetime(2023, 8, 16, 15, 0, tzinfo=dt.UTC).timestamp()  # a Wednesday


def days(text: str, now: float = NOW) -> list[tuple[str, str]]:
    """First and last day of each span."""
    read = dt.datetime.fromtimestamp
    return [
        (read(start, tz=dt.UTC).date().isoformat(), (read(end, tz=dt.UTC) - dt.timedelta(seconds=1)).date().isoformat())
        for start, end in times_in(text, now)
    ]


@pytest.mark.parametrize(
    ("text", "first", "last"),
    [
        ("What happened on 2023-07-07?", "2023-07-07", "2023-07-07"),
        ("in 2023-07", "2023-07-01", "2023-07-31"),
        ("on 7 July", "2023-07-07", "2023-07-07"),
        ("on the 7th of July, 2022", "2022-07-07", "2022-07-07"),
        ("on July 7th", "2023-07-07", "2023-07-07"),
        ("July 7, 2021", "2021-07-07", "2021-07-07"),
        ("March-15-2024", "2024-03-15", "2024-03-15"),
        ("am 07.07.2023", "2023-07-07", "2023-07-07"),
        ("last May", "2023-05-01", "2023-05-31"),
        ("last August", "2022-08-01", "2022-08-31"),
        ("in December", "2022-12-01", "2022-12-31"),
        ("in July 2020", "2020-07-01", "2020-07-31"),
        ("in 2023", "2023-01-01", "2023-12-31"),
        ("on 29 February", "2020-02-29", "2020-02-29"),
        ("yesterday", "2023-08-15", "2023-08-15"),
        ("the day before yesterday", "2023-08-14", "2023-08-14"),
        ("last night", "2023-08-15", "2023-08-15"),
        ("two weeks ago", "2023-07-31", "2023-08-06"),
        ("a couple of days ago", "2023-08-14", "2023-08-14"),
        ("3 days ago", "2023-08-13", "2023-08-13"),
        ("last week", "2023-08-07", "2023-08-13"),
        ("last weekend", "2023-08-12", "2023-08-13"),
        ("this month", "2023-08-01", "2023-08-31"),
        ("last month", "2023-07-01", "2023-07-31"),
        ("last year", "2022-01-01", "2022-12-31"),
        ("next Tuesday", "2023-08-22", "2023-08-22"),
        ("last Wednesday", "2023-08-09", "2023-08-09"),
        ("on Monday", "2023-08-14", "2023-08-14"),
        ("in the past two weeks", "2023-08-02", "2023-08-16"),
        ("last summer", "2022-06-01", "2022-08-31"),
        ("last winter", "2022-12-01", "2023-02-28"),
        ("in the summer of 2021", "2021-06-01", "2021-08-31"),
        ("since 2022-01-01", "2022-01-01", "2023-08-17"),
        ("between 3 May and 9 June", "2023-05-03", "2023-06-09"),
        ("from 2021 to 2022", "2021-01-01", "2022-12-31"),
    ],
)
def test_reads(text: str, first: str, last: str) -> None:
    assert days(text) == [(first, last)]


@pytest.mark.parametrize(
    "text",
    [
        "", "May I ask?", "I may go", "version 2.3.1", "call 0.2023.11", "3/4/2023", "30 February 2023", "2023-13-45",
        "Python 3.11", "order 120231", "the march of time", "second hand", "year zero", "port 5000", "0 days", "🙂🙂",
    ],
)  # fmt: skip
def test_reads_no_time(text: str) -> None:
    assert days(text) == []


def test_several() -> None:
    assert days("on 1 May 2023 or on 3 June 2023") == [("2023-05-01", "2023-05-01"), ("2023-06-03", "2023-06-03")]


def test_before() -> None:
    [(start, end)] = times_in("before May 2023", NOW)
    assert start == -math.inf
    assert dt.datetime.fromtimestamp(end, tz=dt.UTC) == dt.datetime(2023, 5, 1, tzinfo=dt.UTC)
    assert closeness([(start, end)], 0.0) == 1.0
    assert closeness([(start, end)], NOW) == 0.0


def test_before_a_day() -> None:
    [(start, end)] = times_in("the week before August 11, 2023", NOW)
    assert (start, end) == (-math.inf, dt.datetime(2023, 8, 11, tzinfo=dt.UTC).timestamp())


def test_closeness() -> None:
    [span] = times_in("on 7 July", NOW)
    assert closeness([span], span[0] + 10) == 1.0
    assert closeness([span], span[1] + DAY) == pytest.approx(2 / 3)
    assert closeness([span], span[1] + 30 * DAY) == 0.0
    assert closeness([], NOW) == 0.0


@given(st.text(), st.floats())
def test_never_raises(text: str, now: float) -> None:
    assert all(start <= end for start, end in times_in(text, now))


WORDS = (
    "last next past in since before between and from to 2023 1999 May july 30 31st february monday few 999 weeks years ago "
    "0001 summer winter of the couple yesterday - / . 2023-02-30 12.12.2024 99999999"
)


@given(
    st.lists(
        st.sampled_from(WORDS.split()),
        max_size=8,
    ),
    st.floats(min_value=-1e11, max_value=3e11),
)
def test_never_raises_on_its_words(words: list[str], now: float) -> None:
    for start, end in times_in(" ".join(words), now):
        assert start <= end

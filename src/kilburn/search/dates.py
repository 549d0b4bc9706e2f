"""The times that a text names: "next Tuesday", "last May", "on 7 July", "two weeks ago", "in 2023", 2023-07-07.

A text is read by its own time, never by today's date: "next Tuesday" said on 2026-11-22 is 2026-11-24. All days are those
of UTC. A weekday with "next" is that of the next calendar week (Monday to Sunday), one with "this" that of the same week,
one with "last" or "on" the nearest in its direction. What is ambiguous (3/4/2023) is no date here: no time is better than a
wrong one. English only, but for dates in digits.

`dates` and `grounded` read what somebody states, and leave out what is in doubt: a month is written with a capital, a year
stands after "in". `times_in` reads a question to the past, where what is missed costs more than what is read in vain.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

from kilburn.page import Span

DAY = 86_400.0

Interval = tuple[float, float]
"""From the first second to the one after the last, since the epoch."""

MAX_QUESTION_CHARS = 20_000
"""Characters of a question that are looked at."""

LATER, LATEST = 3 * DAY, 30 * DAY
"""People tell what happened some days later."""


@dataclass(frozen=True, slots=True)
class Dated:
    """An expression of time: its span, the interval that it means (seconds since the epoch, half open), and how it is
    written absolutely, such as "2026-11-24", "the week of 2026-11-23", "2026-12" or "2027".

    `relative` says whether its words mean another time on another day.
    """

    span: Span
    start: float
    end: float
    absolute: str
    relative: bool


def dates(text: str, said_at: float, *, past: bool = False) -> list[Dated]:
    """Return the expressions of time in a statement, in order, without those of days that do not exist.

    Args:
        said_at: when the text was said, in seconds since the epoch.
        past: whether a weekday, or a month without a year, is of the time before `said_at`.
    """
    return [dated for dated, _ in _read(text, said_at, past=past)]


def grounded(text: str, said_at: float, *, past: bool = False) -> tuple[str, list[Dated]]:
    """Return the text with its relative expressions made absolute, and all expressions of time in it."""
    expressions = dates(text, said_at, past=past)
    pieces: list[str] = []
    at = 0
    for dated in expressions:
        if dated.relative:
            start = dated.span[0]
            preceding = text[at:start]
            bare = not re.search(r"\b(?i:on|in|by|until|till|from|for|since|before|after|of|at|starting|during)\s+$", preceding)
            pieces += [preceding, _preposition(dated.absolute) if bare else "", dated.absolute]
            at = dated.span[1]
    return "".join([*pieces, text[at:]]), expressions


def _preposition(absolute: str) -> str:
    return "on " if len(absolute) == len("2026-11-24") or absolute.startswith("the weekend") else "in "


def times_in(text: str, now: float) -> list[Interval]:
    """Return the spans of time that a question names, in order of appearance; empty if it names none.

    "since", "after", "before" and "until" make it open to that side, where open means now or for ever; "between" and
    "from ... to" join two. A date without a year is the latest one that is not after now.

    Args:
        now: what "yesterday" is relative to, in seconds since the epoch.
    """
    text = text[:MAX_QUESTION_CHARS]
    intervals: list[Interval] = []
    behind, joins = 0, False
    for dated, preposition in _read(text, now, past=True, is_question=True):
        start, end = dated.start, dated.end
        joined = joins and _JOIN.match(text, behind, dated.span[0])
        behind, joins = dated.span[1], not joined and preposition in ("between", "from")
        if joined:
            intervals[-1] = (intervals[-1][0], max(intervals[-1][1], end))
            continue
        if preposition in ("since", "after"):
            start, end = (start if preposition == "since" else end), max(end, now) + DAY
        elif preposition in ("before", "until", "till", "by"):
            start, end = -math.inf, (start if preposition == "before" else end)
        intervals.append((start, end))
    return intervals


def closeness(times: list[Interval], time: float) -> float:
    """How well a time fits the nearest of these spans: 1 within it, down to 0 outside by half its length, three days at
    least and thirty at most."""
    best = 0.0
    for start, end in times:
        slack = min(LATEST, max(LATER, (end - start) / 2))
        away = max(start - time, time - end, 0.0)
        best = max(best, 1.0 - away / slack)
    return best


@dataclass(frozen=True, slots=True)
class _Place:
    """Where an expression stands: on which day it is said, after which word, in a text about the past, in a question."""

    today: dt.date
    preposition: str
    past: bool
    is_question: bool

    @property
    def monday(self) -> dt.date:
        return self.today - dt.timedelta(self.today.weekday())


_Days = tuple[dt.date, dt.date, str, bool]
"""First day, the day after the last, the absolute form, whether it is relative."""


def _read(text: str, said_at: float, *, past: bool, is_question: bool = False) -> Iterator[tuple[Dated, str]]:
    """Yield each expression of time with the preposition before it ("since"), or ""."""
    try:
        today = dt.datetime.fromtimestamp(said_at, tz=dt.UTC).date()
    except (ValueError, OverflowError, OSError):
        return
    matches = [(match, days) for pattern, days in _patterns(is_question) for match in pattern.finditer(text)]
    matches.sort(key=lambda pair: (pair[0].start(), -pair[0].end()))
    behind = 0
    for match, days in matches:
        if match.start() < behind:
            continue
        word = _PREPOSITION.search(text, max(behind, match.start() - 24), match.start())
        preposition = word[1].lower() if word else ""
        if not is_question and word and word[0].lower().split()[-1] == "the" and match.groupdict().get("which"):
            continue  # "over the past year" names no year
        try:
            interval = days(match, _Place(today, preposition, past, is_question))
        except (ValueError, OverflowError):  # no such day, or beyond the calendar
            behind = match.end()
            continue
        if interval is not None:
            first, last, absolute, relative = interval
            behind = match.end()
            yield Dated(match.span(), _seconds(first), _seconds(last), absolute, relative), preposition


def _seconds(day: dt.date) -> float:
    return (day - dt.date(1970, 1, 1)).days * DAY


def _day(day: dt.date, *, relative: bool) -> _Days:
    return day, day + dt.timedelta(1), day.isoformat(), relative


def _week(day: dt.date) -> _Days:
    monday = day - dt.timedelta(day.weekday())
    return monday, monday + dt.timedelta(7), f"the week of {monday.isoformat()}", True


def _month(year: int, month: int, *, relative: bool) -> _Days:
    """A month of a year; month 0 is the last one of the year before."""
    first, last = (dt.date(year + at // 12, at % 12 + 1, 1) for at in (month - 1, month))
    return first, last, first.isoformat()[:7], relative


def _year(year: int, *, relative: bool) -> _Days:
    return dt.date(year, 1, 1), dt.date(year + 1, 1, 1), str(year), relative


_DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_MONTHS = ["january", "february", "march", "april", "may", "june"]
_MONTHS += ["july", "august", "september", "october", "november", "december"]
_SEASONS = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}
"""The first month of each, north of the equator."""
_STEPS = {"last": -1, "past": -1, "previous": -1, "this": 0, "next": 1, "coming": 1}
_NUMBERS = ["a", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"]
_NEAR = {"before yesterday": -2, "after tomorrow": 2, "yesterday": -1, "tomorrow": 1, "last": -1}
_UNITS = {"day": 1, "week": 7, "month": 30, "year": 365}


def _number(names: list[str], word: str) -> int:
    return next(n for n, name in enumerate(names) if name.startswith(word.lower()[:3]))


def _which(match: re.Match[str]) -> str:
    """ "last", "next" and the like, or "" where there is none."""
    return (match["which"] or "").lower().rpartition(" ")[2]


def _in_digits(match: re.Match[str], place: _Place) -> _Days:
    year, month = int(match["year"]), int(match["month"])
    if match["date"]:
        return _day(dt.date(year, month, int(match["date"])), relative=False)
    return _month(year, month, relative=False)


def _near(match: re.Match[str], place: _Place) -> _Days:
    words = " ".join(match[0].lower().split())
    away = next((days for word, days in _NEAR.items() if word in words), 0)
    return _day(place.today + dt.timedelta(away), relative=True)


def _weekday(match: re.Match[str], place: _Place) -> _Days | None:
    determiner, at = _which(match), _number(_DAYS, match["day"])
    if determiner in ("next", "this"):
        return _day(place.monday + dt.timedelta(at + 7 * (determiner == "next")), relative=True)
    if not determiner and place.preposition not in ("on", "by", "until", "from", "since", "before", "after"):
        return None
    back = _STEPS[determiner] < 0 if determiner else place.past or place.preposition == "since"
    away = at - place.today.weekday()
    return _day(place.today + dt.timedelta(-((-away - 1) % 7) - 1 if back else (away - 1) % 7 + 1), relative=True)


def _period(match: re.Match[str], place: _Place) -> _Days:
    step, unit = _STEPS[_which(match)], match["unit"].lower()
    if unit != "weekend":
        return _moved(place.today, step, unit)
    saturday = place.monday + dt.timedelta(5 + 7 * step)
    return saturday, saturday + dt.timedelta(2), f"the weekend of {saturday.isoformat()}", True


def _away(match: re.Match[str], place: _Place) -> _Days:
    """So long ago, or from now: the longer, the less exact."""
    count = _count(match["count"])
    return _moved(place.today, -count if match["ago"] else count, match["unit"].lower())


def _moved(today: dt.date, count: int, unit: str) -> _Days:
    """So many days, weeks, months or years from a day."""
    if unit == "year":
        return _year(today.year + count, relative=True)
    if unit == "month":
        return _month(today.year, today.month + count, relative=True)
    day = today + dt.timedelta(count * _UNITS[unit])
    return _week(day) if unit == "week" else _day(day, relative=True)


def _until_now(match: re.Match[str], place: _Place) -> _Days | None:
    """ "The past two weeks", "the next three days"."""
    if not place.is_question:
        return None
    length = dt.timedelta(_count(match["count"]) * _UNITS[match["unit"].lower()])
    first, last = (place.today, place.today + length) if _STEPS[_which(match)] > 0 else (place.today - length, place.today)
    return first, last + dt.timedelta(1), f"{first.isoformat()} to {last.isoformat()}", True


def _count(words: str) -> int:
    words = words.lower()
    if words.isdigit():
        return int(words)
    if "few" in words or words == "several":
        return 3
    return 2 if "couple" in words else _NUMBERS.index(words) if words in _NUMBERS[1:] else 1


def _calendar(match: re.Match[str], place: _Place) -> _Days:
    month, date, today = _number(_MONTHS, match["month"]) + 1, int(match["date"]), place.today
    if match["year"]:
        return _day(dt.date(int(match["year"]), month, date), relative=False)
    years = range(today.year - 8, today.year + 2)  # 29 February may be years ago
    days = [day for year in years if (day := _day_in(year, month, date)) and not (place.is_question and day > today)]
    return _day(min(days, key=lambda day: (abs((day - today).days), day)), relative=False)


def _day_in(year: int, month: int, day: int) -> dt.date | None:
    try:
        return dt.date(year, month, day)
    except ValueError:
        return None


def _some_month(match: re.Match[str], place: _Place) -> _Days | None:
    determiner, month, today = _which(match), _number(_MONTHS, match["month"]) + 1, place.today
    if match["year"]:
        return _month(int(match["year"]), month, relative=False)
    if not determiner and place.preposition not in (_WITHIN if place.is_question else ("in", "since", "until")):
        return None
    step = _STEPS[determiner] if determiner else -1 if place.past or place.preposition == "since" else 1
    if step < 0:
        back = month >= today.month if determiner else month > today.month
        return _month(today.year - back, month, relative=True)
    ahead = step > 0 and (month <= today.month if determiner else month < today.month)
    return _month(today.year + ahead, month, relative=True)


def _season(match: re.Match[str], place: _Place) -> _Days | None:
    determiner, today, name = _which(match), place.today, match["season"].lower()
    if not (determiner or match["year"] or (place.is_question and place.preposition)):
        return None  # "in summer" may be every summer
    year = int(match["year"] or today.year)
    first, last = _quarter(year, _SEASONS[name])
    if not match["year"]:
        step = _STEPS[determiner] if determiner else 0
        year += (first <= today) if step > 0 else -(first > today or (step < 0 and last > today))
        first, last = _quarter(year, _SEASONS[name])
    return first, last, f"the {name} of {first.year}", not match["year"]


def _quarter(year: int, month: int) -> tuple[dt.date, dt.date]:
    return _month(year, month, relative=False)[0], _month(year, month + 2, relative=False)[1]


def _some_year(match: re.Match[str], place: _Place) -> _Days | None:
    certain = place.is_question or place.preposition in ("in", "since", "until")
    return _year(int(match[0]), relative=False) if certain else None


_WITHIN = ("in", "during", "since", "before", "after", "until", "till", "early", "late", "mid", "by", "of")
_PREPOSITION = re.compile(
    r"\b(since|after|before|until|till|by|between|from|in|on|during|of|early|late|mid|the)(?:\s+(?:the|early|late|mid))?[\s-]+\Z",
    re.IGNORECASE,
)
_JOIN = re.compile(r"\s*(?:and|to|until|till|-|–|—)\s*\Z", re.IGNORECASE)

_MONTH = (
    r"(?P<month>Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DATE = r"(?P<date>[12]\d|3[01]|0?[1-9])(?:st|nd|rd|th)?\b"
_YEAR = r"(?P<year>(?:19|20)\d\d)\b"
_IN_DIGITS = r"(?P<month>0?[1-9]|1[0-2])"
_DETERMINER = r"(?P<which>(?i:(?:this\s+)?(?:past|coming)|last|previous|this|next))\s+"
_COUNT = (
    r"(?i:(?P<count>\d{1,3}|(?:a\s+)?couple(?:\s+of)?|(?:a\s+)?few|several|an?|one|two|three|four|five|six|seven|eight|nine"
    r"|ten|eleven|twelve)\s+(?P<unit>day|week|month|year)s?)"
)
_SOURCES: list[tuple[str, Callable[[re.Match[str], _Place], _Days | None]]] = [
    (rf"{_YEAR}[-/.]{_IN_DIGITS}(?:[-/.](?P<date>[12]\d|3[01]|0?[1-9]))?(?![\d-])", _in_digits),
    (rf"(?P<date>[12]\d|3[01]|0?[1-9])\.{_IN_DIGITS}\.{_YEAR}", _in_digits),
    (
        r"(?i:(?:the\s+)?day\s+(?:after\s+tomorrow|before\s+yesterday)|(?:yesterday|tomorrow)(?:\s+(?:morning|evening))?"
        r"|last\s+(?:night|evening)|tonight|today|this\s+(?:morning|afternoon|evening))",
        _near,
    ),
    (
        rf"(?:{_DETERMINER})?"
        r"(?P<day>(?i:monday|tuesday|wednesday|thursday|friday|saturday|sunday)|Mon|Tues?|Wed|Thu(?:rs)?|Fri|Sat|Sun)",
        _weekday,
    ),
    (rf"{_DETERMINER}(?P<unit>(?i:weekend|week|month|year))", _period),
    (rf"(?i:in)\s+{_COUNT}(?P<ago>\b\B)?", _away),
    (rf"{_COUNT}\s+(?P<ago>(?i:ago))", _away),
    (rf"{_DETERMINER}{_COUNT}", _until_now),
    (rf"{_MONTH}[\s-]+(?:the\s+)?{_DATE}(?!:\d)(?:,?[\s-]+{_YEAR})?", _calendar),
    (rf"{_DATE}\s+(?:of\s+)?{_MONTH}(?:,?\s+{_YEAR})?", _calendar),
    (rf"(?:{_DETERMINER})?{_MONTH}(?:,?\s+(?:of\s+)?{_YEAR}|(?!\s*\d))", _some_month),
    (rf"(?:{_DETERMINER})?(?P<season>(?i:{'|'.join(_SEASONS)}))(?:\s+(?:of\s+)?{_YEAR})?", _season),
    (rf"{_YEAR}(?![\d-]|\.\d)", _some_year),
]


@cache
def _patterns(is_question: bool) -> list[tuple[re.Pattern[str], Callable[[re.Match[str], _Place], _Days | None]]]:
    """Return the compiled patterns for questions, in any case, or for statements. To compile them takes milliseconds."""
    flags = re.IGNORECASE if is_question else 0
    return [(re.compile(rf"\b(?!(?<=\d[./-])\d)(?:{source})(?!\w)", flags), days) for source, days in _SOURCES]

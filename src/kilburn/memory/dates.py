"""Dates in what somebody says, made absolute by when it was said: "next Tuesday" of 2026-11-22 is 2026-11-24.

A text is grounded by its own time, never by today's date. All days are those of UTC. A weekday with "next" is that of the
next calendar week (Monday to Sunday), one with "this" that of the same week, one with "last" or "on" the nearest in its
direction.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass

from kilburn.page import Span

__all__ = ["Dated", "dates", "grounded"]

_DAYS = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
_MONTHS = ["january", "february", "march", "april", "may", "june"]
_MONTHS += ["july", "august", "september", "october", "november", "december"]
_COUNTS = {"a": 1, "an": 1, "one": 1, "two": 2, "couple of": 2, "three": 3, "four": 4, "five": 5, "six": 6, "seven": 7}
_COUNTS |= {"eight": 8, "nine": 9, "ten": 10, "few": 3}
_UNITS = {"day": 1, "week": 7}


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


_Read = tuple[dt.date, dt.date, str, bool]
"""First day, the day after the last, the absolute form, whether it is relative."""


def dates(text: str, said: float, *, past: bool = False) -> list[Dated]:
    """The expressions of time in a text, in order; those of days that do not exist are left out.

    Args:
        said: when the text was said, in seconds since the epoch.
        past: whether a weekday or a month without a year is more likely before `said` than after.
    """
    try:
        today = dt.datetime.fromtimestamp(said, tz=dt.UTC).date()
    except (ValueError, OverflowError, OSError):
        return []
    matches = [(match, read) for pattern, read in _READERS for match in pattern.finditer(text)]
    matches.sort(key=lambda each: (each[0].start(), -each[0].end()))
    found: list[Dated] = []
    for match, read in matches:
        if found and match.start() < found[-1].span[1]:
            continue
        try:
            first, last, absolute, relative = read(match, today, past)
            found.append(Dated(match.span(), _seconds(first), _seconds(last), absolute, relative))
        except (ValueError, OverflowError):  # no such day, or beyond the calendar
            continue
    return found


def grounded(text: str, said: float, *, past: bool = False) -> tuple[str, list[Dated]]:
    """The text with its relative expressions made absolute, and all expressions of time in it."""
    found = dates(text, said, past=past)
    pieces: list[str] = []
    at = 0
    for dated in found:
        if dated.relative:
            start = dated.span[0]
            before = text[at:start]
            bare = not re.search(r"\b(?i:on|in|by|until|till|from|for|since|before|after|of|at|starting|during)\s+$", before)
            pieces += [before, _preposition(dated.absolute) if bare else "", dated.absolute]
            at = dated.span[1]
    return "".join([*pieces, text[at:]]), found


def _preposition(absolute: str) -> str:
    return "in " if len(absolute) <= 7 or absolute.startswith("the week ") else "on "


def _seconds(day: dt.date) -> float:
    return dt.datetime(day.year, day.month, day.day, tzinfo=dt.UTC).timestamp()


def _one(day: dt.date, relative: bool) -> _Read:
    return day, day + dt.timedelta(1), day.isoformat(), relative


def _near(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    words = match[0].lower()
    away = {"yesterday": -1, "last night": -1, "tomorrow": 1, "the day after tomorrow": 2, "the day before yesterday": -2}
    return _one(today + dt.timedelta(away.get(words.removesuffix(" morning").removesuffix(" evening"), 0)), True)


def _weekday(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    at = next(n for n, day in enumerate(_DAYS) if day.startswith(match["day"].lower()[:3]))
    monday = today - dt.timedelta(today.weekday())
    which = match["which"].lower().strip()
    if which.startswith(("next", "this")):
        return _one(monday + dt.timedelta(at + 7 * which.startswith("next")), True)
    if which == "last" or (past and not which):
        return _one(today - dt.timedelta((today.weekday() - at - 1) % 7 + 1), True)
    return _one(today + dt.timedelta((at - today.weekday() - 1) % 7 + 1), True)


def _period(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    step = {"last": -1, "this": 0, "the": 0, "next": 1}[match["which"].lower().split()[-1]]
    unit = match["unit"].lower()
    if unit == "year":
        return dt.date(today.year + step, 1, 1), dt.date(today.year + step + 1, 1, 1), str(today.year + step), True
    if unit == "month":
        return _month(today.year, today.month + step, True)
    monday = today - dt.timedelta(today.weekday()) + dt.timedelta(7 * step)
    if unit == "weekend":
        saturday = monday + dt.timedelta(5)
        return saturday, saturday + dt.timedelta(2), f"the weekend of {saturday.isoformat()}", True
    return monday, monday + dt.timedelta(7), f"the week of {monday.isoformat()}", True


def _month(year: int, month: int, relative: bool) -> _Read:
    years, at = divmod(month - 1, 12)
    first = dt.date(year + years, at + 1, 1)
    last = dt.date(first.year + (at == 11), (at + 1) % 12 + 1, 1)
    return first, last, f"{first:%Y-%m}", relative


def _away(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    words = match["count"].lower().removeprefix("a ") or "a"
    count = int(words) if words.isdigit() else _COUNTS[words]
    count = -count if match["ago"] else count
    unit = match["unit"].lower()
    if unit == "year":
        year = today.year + count
        return dt.date(year, 1, 1), dt.date(year + 1, 1, 1), str(year), True
    if unit == "month":
        return _month(today.year, today.month + count, True)
    day = today + dt.timedelta(count * _UNITS[unit])
    if unit == "week":
        monday = day - dt.timedelta(day.weekday())
        return monday, monday + dt.timedelta(7), f"the week of {monday.isoformat()}", True
    return _one(day, True)


def _calendar(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    fields = match.groupdict()
    month = next(n for n, name in enumerate(_MONTHS, 1) if name.startswith(fields["month"].lower()[:3]))
    if fields["year"]:
        return _one(dt.date(int(fields["year"]), month, int(fields["date"])), False)
    near = [_day_in(today.year + step, month, int(fields["date"])) for step in (-1, 0, 1)]
    days = [day for day in near if day is not None]
    return _one(min(days, key=lambda day: (abs((day - today).days), day)), False)


def _day_in(year: int, month: int, day: int) -> dt.date | None:
    try:
        return dt.date(year, month, day)
    except ValueError:
        return None


def _some_month(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    month = next(n for n, name in enumerate(_MONTHS, 1) if name.startswith(match["month"].lower()[:3]))
    if match["year"]:
        return _month(int(match["year"]), month, False)
    which = match["which"]
    if which == "last" or (which == "in" and past):
        return _month(today.year - (month >= today.month if which == "last" else month > today.month), month, True)
    return _month(today.year + (month < today.month or (which == "next" and month == today.month)), month, True)


def _iso(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    return _one(dt.date.fromisoformat(match[0]), False)


def _year(match: re.Match[str], today: dt.date, past: bool) -> _Read:
    year = int(match[0])
    return dt.date(year, 1, 1), dt.date(year + 1, 1, 1), match[0], False


_DAY = "(?P<day>(?i:monday|tuesday|wednesday|thursday|friday|saturday|sunday)|Mon|Tues?|Wed|Thu(?:rs)?|Fri|Sat|Sun)"
_MONTH = (
    r"(?P<month>Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)\b\.?"
)
_DATE = r"(?P<date>\d{1,2})(?:st|nd|rd|th)?"
_YEAR = r"(?P<year>(?:19|20)\d\d)"
_COUNT = (
    r"(?i:(?P<count>\d{1,3}|(?:a )?couple of|(?:a )?few|an?|one|two|three|four|five|six|seven|eight|nine|ten) (?P<unit>day|week"
    r"|month|year)s?)"
)
_SOURCES: list[tuple[str, Callable[[re.Match[str], dt.date, bool], _Read]]] = [
    (r"(?:19|20)\d\d-\d\d-\d\d", _iso),
    (
        r"(?i:the day (?:after tomorrow|before yesterday)|(?:yesterday|tomorrow)(?: morning| evening)?|last night|tonight|today"
        r"|this (?:morning|afternoon|evening))",
        _near,
    ),
    (rf"(?P<which>(?i:last|next|this(?: coming)?) |(?<=\bon )|(?<=\bby )|(?<=\buntil )|(?<=\bfrom )){_DAY}", _weekday),
    (r"(?i:(?P<which>last|this past|this|next) (?P<unit>weekend|week|month|year))", _period),
    (rf"(?i:in) {_COUNT}(?P<ago>\b\B)?", _away),
    (rf"{_COUNT} (?P<ago>(?i:ago))", _away),
    (rf"{_MONTH} {_DATE}(?!\d)(?:,? {_YEAR})?", _calendar),
    (rf"{_DATE}(?: of)? {_MONTH}(?:,? {_YEAR})?", _calendar),
    (rf"(?P<which>last|this|next|in) {_MONTH}(?! \d)(?P<year>\b\B)?", _some_month),
    (rf"(?P<which>)?{_MONTH},? {_YEAR}", _some_month),
    (r"(?:(?<=\b[Ii]n )|(?<=\b[Ss]ince )|(?<=\b[Uu]ntil ))(?:19|20)\d\d", _year),
]
_READERS = [(re.compile(rf"\b(?:{source})(?!\w)"), read) for source, read in _SOURCES]

"""Dates and spans of time in a question: "last May", "on 7 July", "two weeks ago", "in 2023", "yesterday", 2023-07-07.

Memories are of the past, so a date without a year is the latest one that is not after now. All dates are UTC. What is
ambiguous (3/4/2023) is not a date here: no time is better than a wrong one. English only, but for dates in digits.
"""

from __future__ import annotations

import datetime as dt
import math
import re

__all__ = ["Interval", "closeness", "times_in"]

Interval = tuple[float, float]
"""From the first second to the one after the last, since the epoch."""

DAY = 86_400.0

_MONTHS = "january jan,february feb,march mar,april apr,may,june jun,july jul,august aug,september sept sep,october oct"
MONTHS = {name: at for at, names in enumerate(f"{_MONTHS},november nov,december dec".split(","), 1) for name in names.split()}
_WEEKDAYS = "monday mon,tuesday tues tue,wednesday wed,thursday thurs thur thu,friday fri,saturday sat,sunday sun"
WEEKDAYS = {name: at for at, names in enumerate(_WEEKDAYS.split(",")) for name in names.split()}
SEASONS = {"spring": 3, "summer": 6, "autumn": 9, "fall": 9, "winter": 12}
"""The first month of each, north of the equator."""
_NUMBERS = ",a an one,two couple,three,four,five,six,seven,eight,nine,ten,eleven,twelve"
NUMBERS = {word: at for at, words in enumerate(_NUMBERS.split(",")) for word in words.split()}
UNITS = {"day": 1, "week": 7, "month": 30, "year": 365}

_MONTH = "|".join(sorted(MONTHS, key=len, reverse=True))
_WEEKDAY = "|".join(name for name in WEEKDAYS if name.endswith("day"))
_SEASON = "|".join(SEASONS)
_COUNT = rf"\d{{1,3}}|(?:a\s+)?couple(?:\s+of)?|{'|'.join(word for word in NUMBERS if word != 'couple')}|a\s+few|several"
_WHICH = "last|past|previous|this|next|coming"
_YEAR = r"(?:19|20)\d\d"

_TIMES = re.compile(
    rf"""\b(?<!\d[./-])(?:
    (?P<iso>(?P<iy>{_YEAR})[-/.](?P<im>0?[1-9]|1[0-2])(?:[-/.](?P<id>[12]\d|3[01]|0?[1-9]))?(?![\d-]))
    |(?P<dotted>(?P<td>[12]\d|3[01]|0?[1-9])\.(?P<tm>0?[1-9]|1[0-2])\.(?P<ty>{_YEAR}))
    |(?P<dmy>(?P<dd>[12]\d|3[01]|0?[1-9])(?:st|nd|rd|th)?\s+(?:of\s+)?(?P<dm>{_MONTH})\b\.?(?:,?\s+(?P<dy>{_YEAR})\b)?)
    |(?P<mdy>(?P<md>{_MONTH})\b\.?[\s-]+(?:the\s+)?(?P<mday>[12]\d|3[01]|0?[1-9])(?:st|nd|rd|th)?\b(?!:)(?:,?[\s-]+(?P<mdyear>{_YEAR})\b)?)
    |(?P<my>(?P<mm>{_MONTH})\b\.?,?\s+(?:of\s+)?(?P<myear>{_YEAR}))
    |(?P<wm>(?P<wmw>in|during|since|before|after|until|till|early|late|mid|by|of|end\s+of|{_WHICH})[\s-]+(?:early\s+|late\s+|mid-?)?(?P<wmm>{_MONTH})\b(?:\.?,?\s+(?:of\s+)?(?P<wmy>{_YEAR})\b)?)
    |(?P<season>(?:(?P<sw>{_WHICH}|in|during|the|of|since|before|after|until)\s+(?:the\s+)?)(?P<ss>{_SEASON})(?:\s+(?:of\s+)?(?P<sy>{_YEAR}))?)
    |(?P<rel>(?P<relw>{_WHICH})\s+(?P<relu>week(?:end)?|month|year|night|evening|{_WEEKDAY}))
    |(?P<span>(?P<spw>last|past|previous|next|coming)\s+(?P<spn>{_COUNT})\s+(?P<spu>day|week|month|year)s?)
    |(?P<ago>(?P<agn>{_COUNT})\s+(?P<agu>day|week|month|year)s?\s+ago)
    |(?P<word>(?:the\s+)?day\s+before\s+yesterday|yesterday|today|tonight|tomorrow)
    |(?P<weekday>(?P<wdw>on|since|before|after|until|by)\s+(?P<wd>{_WEEKDAY}))
    |(?P<year>(?P<y>{_YEAR}))(?![\d-]|\.\d)
    )\b""",
    re.IGNORECASE | re.VERBOSE,
)
_BOUND = re.compile(r"\b(since|after|before|until|till|by|between|from)(?:\s+(?:the|early|late))?\s*\Z", re.IGNORECASE)
_JOIN = re.compile(r"\s*(?:and|to|until|till|-|–|—)\s*\Z", re.IGNORECASE)


def times_in(text: str, now: float) -> list[Interval]:
    """The spans of time that a text names, in order of appearance; empty if it names none.

    "since", "after", "before" and "until" make it open to that side, where open means now or for ever; "between" and
    "from ... to" join two.

    Args:
        now: what "yesterday" is relative to, in seconds since the epoch.
    """
    try:
        today = dt.datetime.fromtimestamp(now, tz=dt.UTC).date()
    except (OverflowError, ValueError, OSError):
        return []
    found: list[Interval] = []
    behind, joins = 0, False
    for match in _TIMES.finditer(text[:LONGEST]):
        days = _days(match, today)
        if days is None:
            continue
        start, end = _seconds(days[0]), _seconds(days[1])
        before = text[behind : match.start()]
        word = _BOUND.search(before)
        bound = (word.group(1) if word else (match["wmw"] or match["sw"] or match["wdw"] or "")).lower()
        if joins and _JOIN.match(before) and found:
            found[-1] = (found[-1][0], max(found[-1][1], end))
            behind, joins = match.end(), False
            continue
        behind, joins = match.end(), bound in ("between", "from")
        if bound == "since" or bound == "after":
            start, end = (start if bound == "since" else end), max(end, now) + DAY
        elif bound in ("before", "until", "till", "by"):
            start, end = -math.inf, (start if bound == "before" else end)
        found.append((start, end))
    return found


LONGEST = 20_000
"""Characters of a text that are looked at."""

LATER, LATEST = 3 * DAY, 30 * DAY
"""People tell what happened some days later."""


def closeness(times: list[Interval], time: float) -> float:
    """How well a time fits the nearest of these spans: 1 within it, down to 0 outside by half its length, three days at
    least and thirty at most."""
    best = 0.0
    for start, end in times:
        slack = min(LATEST, max(LATER, (end - start) / 2))
        away = max(start - time, time - end, 0.0)
        best = max(best, 1.0 - away / slack)
    return best


def _seconds(day: dt.date) -> float:
    return (day - dt.date(1970, 1, 1)).days * DAY


def _days(match: re.Match[str], today: dt.date) -> tuple[dt.date, dt.date] | None:
    """First day, and the day after the last; None where there is no such day, such as 30 February."""
    try:
        return _named(match, today)
    except (ValueError, OverflowError):
        return None


def _named(match: re.Match[str], today: dt.date) -> tuple[dt.date, dt.date]:
    part = match.group
    if part("iso"):
        return _date(int(part("iy")), int(part("im")), part("id"))
    if part("dotted"):
        return _date(int(part("ty")), int(part("tm")), part("td"))
    if part("dmy"):
        return _day_of(MONTHS[part("dm").lower()], int(part("dd")), part("dy"), today)
    if part("mdy"):
        return _day_of(MONTHS[part("md").lower()], int(part("mday")), part("mdyear"), today)
    if part("my"):
        return _date(int(part("myear")), MONTHS[part("mm").lower()], None)
    if part("wm"):
        month = MONTHS[part("wmm").lower()]
        return _date(int(part("wmy")), month, None) if part("wmy") else _month(month, part("wmw").lower(), today)
    if part("season"):
        return _season(SEASONS[part("ss").lower()], (part("sw") or "").lower(), part("sy"), today)
    if part("rel"):
        return _relative(part("relw").lower(), part("relu").lower(), today)
    if part("span"):
        days = _count(part("spn")) * UNITS[part("spu").lower()]
        ahead = part("spw").lower() in ("next", "coming")
        return (today, _plus(today, days + 1)) if ahead else (_plus(today, -days), _plus(today, 1))
    if part("ago"):
        return _ago(_count(part("agn")), part("agu").lower(), today)
    if part("word"):
        word = part("word").lower()
        day = _plus(today, 1 if word == "tomorrow" else 0 if word in ("today", "tonight") else -1 if word == "yesterday" else -2)
        return day, _plus(day, 1)
    if part("weekday"):
        day = _plus(today, -((today.weekday() - WEEKDAYS[part("wd").lower()]) % 7))
        return day, _plus(day, 1)
    year = int(part("y"))
    return dt.date(year, 1, 1), dt.date(year + 1, 1, 1)


def _plus(day: dt.date, days: int) -> dt.date:
    return day + dt.timedelta(days=days)


def _date(year: int, month: int, day: str | None) -> tuple[dt.date, dt.date]:
    if day is not None:
        first = dt.date(year, month, int(day))
        return first, _plus(first, 1)
    return dt.date(year, month, 1), dt.date(year + month // 12, month % 12 + 1, 1)


def _day_of(month: int, day: int, year: str | None, today: dt.date) -> tuple[dt.date, dt.date]:
    if year is not None:
        return _date(int(year), month, str(day))
    # The latest such day that is not after today; 29 February may be years ago.
    for back in range(9):
        try:
            found = dt.date(today.year - back, month, day)
        except ValueError:
            continue
        if found <= today:
            return found, _plus(found, 1)
    raise ValueError(f"no day {day} in month {month}")


def _month(month: int, which: str, today: dt.date) -> tuple[dt.date, dt.date]:
    year = today.year
    if which in ("next", "coming"):
        year += month <= today.month
    elif month > today.month or (which in ("last", "past", "previous") and month == today.month):
        year -= which != "this"
    return _date(year, month, None)


def _season(first: int, which: str, year: str | None, today: dt.date) -> tuple[dt.date, dt.date]:
    at = int(year) if year else today.year
    start = dt.date(at, first, 1)
    if year is None:
        over = _quarter(start)
        if which in ("next", "coming"):
            start = start if start > today else start.replace(year=at + 1)
        elif start > today or (which in ("last", "past", "previous") and over > today):
            start = start.replace(year=at - 1)
    return start, _quarter(start)


def _quarter(start: dt.date) -> dt.date:
    month = start.month + 2
    return dt.date(start.year + month // 12, month % 12 + 1, 1)


def _relative(which: str, unit: str, today: dt.date) -> tuple[dt.date, dt.date]:
    step = 1 if which in ("next", "coming") else 0 if which == "this" else -1
    if unit in ("night", "evening"):
        day = _plus(today, step)
        return day, _plus(day, 1)
    if unit in WEEKDAYS:
        ahead = (WEEKDAYS[unit] - today.weekday()) % 7
        day = _plus(today, (ahead or 7) if step > 0 else ahead - 7 * (step < 0))
        return day, _plus(day, 1)
    monday = _plus(today, -today.weekday())
    if unit == "week":
        first = _plus(monday, 7 * step)
        return first, _plus(first, 7)
    if unit == "weekend":
        saturday = _plus(monday, 5 + 7 * (step if step else 0))
        return saturday, _plus(saturday, 2)
    if unit == "month":
        months = today.year * 12 + today.month - 1 + step
        return _date(months // 12, months % 12 + 1, None)
    return dt.date(today.year + step, 1, 1), dt.date(today.year + step + 1, 1, 1)


def _ago(count: int, unit: str, today: dt.date) -> tuple[dt.date, dt.date]:
    """Roughly so long ago: the longer, the less exact."""
    day = _plus(today, -count * UNITS[unit])
    slack = {"day": 0, "week": 3, "month": 15, "year": 183}[unit]
    return _plus(day, -slack), _plus(day, slack + 1)


def _count(word: str) -> int:
    words = word.lower().split()
    if words[0].isdigit():
        return int(words[0])
    if "few" in words or "several" in words:
        return 3
    return NUMBERS["couple"] if "couple" in words else NUMBERS[words[0]]

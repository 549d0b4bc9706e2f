"""Times on the command line: a date, a date with a time, or a distance from now."""

from __future__ import annotations

import re
from datetime import datetime

from kilburn.errors import SpecError

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}

_LENGTH = re.compile(rf"\s*(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({'|'.join(UNITS)})\s*", re.ASCII)


def seconds(text: str, option: str) -> float:
    """Parse a length of time such as `30d` or `12h`, and return it in seconds.

    Raises:
        SpecError: the text is no length of time.
    """
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise SpecError(f"{option} {text[:40]!r} is no length of time", advice=f"use a number and one of {', '.join(UNITS)}: 30d")
    return float(match[1]) * UNITS[match[2]]


def moment(text: str | None, option: str, base: float, direction: int = -1) -> float | None:
    """Parse a time, and return it in seconds since the epoch. Without a time zone, the machine's applies.

    Args:
        direction: the meaning of a length such as `30d`: 1 for the future, -1 for the past.

    Raises:
        SpecError: the text is no time, or outside the range of calendars.
    """
    if text is None:
        return None
    try:
        if _LENGTH.fullmatch(text):
            moment = datetime.fromtimestamp(base + direction * seconds(text, option))
        else:
            moment = datetime.fromisoformat(text.strip())
        return moment.timestamp()
    except (ValueError, OverflowError, OSError):
        distance = "30d from now" if direction > 0 else "30d ago"
        raise SpecError(
            f"{option} {text[:40]!r} is no time", advice=f"use 2026-05-17, 2026-05-17T12:00, or 30d for {distance}"
        ) from None


def when(time: float | None) -> str:
    """Format a time: the day, and the time of day unless it is midnight; "" for None."""
    if time is None:
        return ""
    try:
        moment = datetime.fromtimestamp(time).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{time:.0f} s"
    return moment.strftime("%Y-%m-%d" if moment.time() == moment.time().min else "%Y-%m-%d %H:%M")

"""Moments on the command line: a date, a date with a time, or how far away."""

from __future__ import annotations

import re
from datetime import datetime

from kilburn.errors import SpecError

UNITS = {"s": 1, "min": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400, "y": 365 * 86_400}

_LENGTH = re.compile(rf"\s*(\d{{1,9}}(?:\.\d{{1,9}})?)\s*({'|'.join(UNITS)})\s*", re.ASCII)


def seconds(text: str, option: str) -> float:
    """A length of time such as `30d` or `12h`, in seconds.

    Raises:
        SpecError: it is none.
    """
    match = _LENGTH.fullmatch(text)
    if match is None:
        raise SpecError(f"{option} {text[:40]!r} is no length of time", advice=f"use a number and one of {', '.join(UNITS)}: 30d")
    return float(match[1]) * UNITS[match[2]]


def moment(text: str | None, option: str, base: float, direction: int = -1) -> float | None:
    """A moment in seconds since the epoch, in the machine's time zone unless it names one; None for None.

    Args:
        direction: where a length such as `30d` leads: 1 into the future, -1 into the past.

    Raises:
        SpecError: it is none, or beyond what a calendar can say.
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
        away = "30d from now" if direction > 0 else "30d ago"
        raise SpecError(
            f"{option} {text[:40]!r} is no moment", advice=f"use 2026-05-17, 2026-05-17T12:00, or 30d for {away}"
        ) from None


def when(time: float | None) -> str:
    """A moment for people: the day, and the time of day unless it is midnight; "" for None."""
    if time is None:
        return ""
    try:
        moment = datetime.fromtimestamp(time).astimezone()
    except (ValueError, OverflowError, OSError):
        return f"{time:.0f} s"
    return moment.strftime("%Y-%m-%d" if moment.time() == moment.time().min else "%Y-%m-%d %H:%M")

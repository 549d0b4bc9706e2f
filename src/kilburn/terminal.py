"""Prints text. Nothing else in Kilburn writes to a terminal.

Text from tools is data. Escape sequences, control characters, and characters that reorder or break a line are made visible and
never sent to the terminal. Markup is not interpreted. Code that must print exact bytes writes to `sys.stdout.buffer`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

INVISIBLE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, break or reorder a line, or cannot be written, except tab and line feed."""


def plain(text: str) -> str:
    """Make control characters, and those that break or reorder a line, visible. Line feeds stay."""
    return INVISIBLE.sub(lambda match: f"\\x{ord(match[0]):02x}" if match[0] <= "\xff" else f"\\u{ord(match[0]):04x}", text)


def line(text: str) -> str:
    """Make the same characters visible, and line feeds and tabs, too, in a text that must stay on one line, such as a name."""
    return plain(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def age(moment: float, now: float | None = None) -> str:
    """Format the time since `moment` in its largest unit: `12 s`, `3 min`, `5 h`, `9 d`."""
    seconds = max(0.0, (time.time() if now is None else now) - moment)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def spelled(json: str) -> str:
    """Write the characters that `plain` makes visible as JSON escapes."""
    return INVISIBLE.sub(lambda match: f"\\u{ord(match[0]):04x}", json)


def tell(text: str = "", end: str = "\n") -> None:
    """Print text on standard output, made plain."""
    sys.stdout.write(plain(text) + end)


STYLES = {"": "", "bold": "\x1b[1m", "dim": "\x1b[2m"}
"""The escape that begins each style."""

Styled = tuple[str, str]
"""A line of text and its style."""


def tell_lines(lines: Iterable[Styled]) -> None:
    """Print lines on standard output, made plain, and styled on a terminal that has styles."""
    styled = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    for text, style in lines:
        sys.stdout.write(f"{STYLES[style]}{plain(text)}\x1b[0m\n" if styled and style else plain(text) + "\n")


def say(text: str) -> None:
    """Print text on standard error, made plain."""
    sys.stderr.write(plain(text) + "\n")
    sys.stderr.flush()


def emit(value: Any) -> None:
    """Print a value as JSON on standard output, with the keys in their order."""
    import msgspec  # takes a third of the time of `kilburn --help`, which does not need it

    sys.stdout.write(spelled(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()) + "\n")


def show(report: Any, json: bool) -> None:
    """Print a report on standard output: its `to_json()` or its `table()`."""
    if json:
        sys.stdout.write(spelled(report.to_json()) + "\n")
    else:
        tell(report.table())


def console(*, stderr: bool = False) -> Any:
    """Return a console of rich that prints texts without markup, made plain, for tables and bars."""
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **style: Any) -> Any:
            return super().render_str(plain(text), **style)

    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)

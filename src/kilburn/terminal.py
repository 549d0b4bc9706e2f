"""The one place that prints.

Text from tools is data here too. Escapes, control characters, and characters that reorder or break a line are made
visible, never sent to the terminal. Markup is not interpreted. Code that has to print exact bytes writes to
`sys.stdout.buffer`.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Iterable
from typing import Any

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that control a terminal, break or reorder a line, or cannot be written, except tab and line feed."""


def plain(text: str) -> str:
    """The text, with control characters and those that break or reorder a line made visible; line feeds stay."""
    return UNSEEN.sub(lambda match: f"\\x{ord(match[0]):02x}" if match[0] <= "\xff" else f"\\u{ord(match[0]):04x}", text)


def line(text: str) -> str:
    """The same for text that has to stay on one line, such as a name: line feeds are made visible too."""
    return plain(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def age(then: float, now: float | None = None) -> str:
    """How long ago, in its largest unit: `12 s`, `3 min`, `5 h`, `9 d`."""
    seconds = max(0.0, (time.time() if now is None else now) - then)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def spelled(json: str) -> str:
    """The same JSON, with the characters that `plain` makes visible written as JSON escapes."""
    return UNSEEN.sub(lambda match: f"\\u{ord(match[0]):04x}", json)


def tell(text: str = "", end: str = "\n") -> None:
    """Text on standard output, made plain."""
    sys.stdout.write(plain(text) + end)


STYLES = {"": "", "bold": "\x1b[1m", "dim": "\x1b[2m"}
"""The escape that begins each style."""

Styled = tuple[str, str]
"""A line of text and its style."""


def tell_lines(lines: Iterable[Styled]) -> None:
    """Write lines to standard output, made plain, in their styles where it is a terminal that has styles."""
    styled = sys.stdout.isatty() and os.environ.get("TERM") != "dumb"
    for text, style in lines:
        sys.stdout.write(f"{STYLES[style]}{plain(text)}\x1b[0m\n" if styled and style else plain(text) + "\n")


def say(text: str) -> None:
    """Text for people on standard error, made plain."""
    sys.stderr.write(plain(text) + "\n")
    sys.stderr.flush()


def emit(value: Any) -> None:
    """A value as JSON on standard output, keys in the order given."""
    import msgspec  # takes a third of the time of `kilburn --help`, which has no use for it

    sys.stdout.write(spelled(msgspec.json.format(msgspec.json.encode(value), indent=2).decode()) + "\n")


def show(report: Any, json: bool) -> None:
    """A report on standard output: its `to_json()` or its `table()`."""
    if json:
        sys.stdout.write(spelled(report.to_json()) + "\n")
    else:
        tell(report.table())


def console(*, stderr: bool = False) -> Any:
    """A console of rich that takes texts as they are, made plain, for tables and bars."""
    from rich.console import Console

    class PlainConsole(Console):
        def render_str(self, text: str, **style: Any) -> Any:
            return super().render_str(plain(text), **style)

    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)

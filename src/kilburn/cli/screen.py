"""What people see: tables, ages, bars, and text that cannot drive their terminal.

Text from tools is data here too: control characters are shown, never sent. It refuses to print JSON.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["Done", "age", "bar", "count", "grid", "line", "many", "plain", "progress", "table"]

UNSEEN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What drives a terminal, breaks or reorders a line, or cannot be written: all but tab and line feed."""


def plain(text: str) -> str:
    """The text with control characters, and those that break or reorder a line, made visible; its lines stay."""
    return UNSEEN.sub(lambda found: f"\\x{ord(found[0]):02x}" if found[0] <= "\xff" else f"\\u{ord(found[0]):04x}", text)


def line(text: str) -> str:
    """The same for what has to stay on one line, such as a name: the ends of lines are made visible too."""
    return plain(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def count(number: int) -> str:
    """A number with its thousands apart."""
    return f"{number:,}"


def many(number: int, what: str) -> str:
    """A number of things: `1 page`, `2,000 pages`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def age(then: float, now: float | None = None) -> str:
    """How long ago, in its largest unit: `12 s`, `3 min`, `5 h`, `9 d`."""
    seconds = max(0.0, (time.time() if now is None else now) - then)
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} s"


def bar(share: float, width: int = 20) -> str:
    """A share, 0 to 1, as a bar of blocks."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = (), title: str = "") -> None:
    """Print a table; columns in `numbers` stand to the right."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    if not console.is_terminal:
        console.width = 10_000
    console.print(grid(heads, rows, numbers=numbers, title=title), soft_wrap=not console.is_terminal)


def grid(heads: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[str] = (), title: str = "") -> Any:
    """The same table as a thing that rich can show."""
    from rich.table import Table
    from rich.text import Text

    right = set(numbers)
    made = Table(box=None, pad_edge=False, header_style="bold", title=title or None, title_justify="left")
    for head in heads:
        made.add_column(head, justify="right" if head in right else "left", no_wrap=True, overflow="ellipsis")
    for row in rows:
        made.add_row(*(Text(plain(cell).replace("\n", " ")) for cell in row))
    return made


class Done(Protocol):
    """Tells a bar how much is done, and of how much where that became known only now."""

    def __call__(self, done: int, total: int | None = None, /) -> None: ...


@contextmanager
def progress(what: str, total: int | None = None, *, unit: str = "") -> Iterator[Done]:
    """A bar on standard error while the block runs; `unit` is "bytes" for a download.

    Nothing is shown where standard error is no terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}"), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as shown:
        task = shown.add_task(what, total=total)
        yield lambda done, total=None: shown.update(task, completed=done, **({"total": total} if total else {}))

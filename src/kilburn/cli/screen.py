"""Output for people: tables, ages, bars. Plain texts go through `kilburn.terminal`."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from kilburn.file import write_file
from kilburn.terminal import console, line, plain, spelled, tell

__all__ = ["Done", "Sink", "age", "bar", "cell", "count", "grid", "many", "progress", "sink", "table"]


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


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> None:
    """Print a table; see `grid`."""
    shown = console()
    if not shown.is_terminal:
        shown.width = 10_000
    shown.print(grid(heads, rows, title=title), soft_wrap=not shown.is_terminal)


def grid(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "") -> Any:
    """A table as a thing that rich can show: whole numbers with their thousands apart, shares as percentages, a dash for
    None; columns that hold nothing else stand to the right."""
    from rich.table import Table
    from rich.text import Text

    rows = list(rows)
    made = Table(box=None, pad_edge=False, header_style="bold", title=Text(line(title)) if title else None, title_justify="left")
    for at, head in enumerate(heads):
        words = any(isinstance(row[at], str) for row in rows)
        made.add_column(head, justify="left" if words else "right", no_wrap=True, overflow="ellipsis")
    for row in rows:
        made.add_row(*(Text(plain(cell(value)).replace("\n", " ")) for value in row))
    return made


def cell(value: str | float | None) -> str:
    """A value as a table shows it."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.1%}" if isinstance(value, float) else count(value)


class Sink(Protocol):
    """Where bytes go."""

    def write(self, data: bytes, /) -> object:
        """Take all of the bytes."""
        ...

    def flush(self) -> object:
        """Pass on what was taken."""
        ...


class _Shown:
    def write(self, data: bytes, /) -> None:
        tell(spelled(data.decode("utf-8")), end="")

    def flush(self) -> None:
        sys.stdout.flush()


@contextmanager
def sink(out: Path | None, force: bool) -> Iterator[Sink]:
    """Where lines of JSON go: to a file, which is written whole or not at all, or to standard output."""
    if out is not None:
        with write_file(out, force=force) as file:
            yield file
        return
    sys.stdout.flush()
    shown: Sink = _Shown() if sys.stdout.isatty() else sys.stdout.buffer
    yield shown
    shown.flush()


class Done(Protocol):
    """Updates a bar: how much is done, and the total if it became known only now."""

    def __call__(self, done: int, total: int | None = None, /) -> None:
        """Show that `done` of `total` is done."""


@contextmanager
def progress(what: str, total: int | None = None, *, unit: str = "") -> Iterator[Done]:
    """A bar on standard error while the block runs; `unit` is "bytes" for a download.

    Nothing is shown if standard error is not a terminal.
    """
    if not sys.stderr.isatty():
        yield lambda done, total=None: None
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as shown:
        task = shown.add_task(line(what), total=total)
        yield lambda done, total=None: shown.update(task, completed=done, **({"total": total} if total else {}))

"""Output for people: tables, bars and progress. Plain texts go through `kilburn.terminal`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from operator import itemgetter
from pathlib import Path
from typing import Any, Protocol

from kilburn.file import write_file
from kilburn.terminal import Styled, console, emit, line, plain, say, spelled, tell, tell_lines


def count(number: int) -> str:
    """Format a number with thousands separators."""
    return f"{number:,}"


def many(number: int, noun: str) -> str:
    """Format a number with its noun: `1 page`, `2,000 pages`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def address_list(addresses: Sequence[str], limit: int = 6) -> str:
    """Return the first addresses of a list, and the number of the others."""
    more = len(addresses) - limit
    return " ".join(addresses[:limit]) + (f" and {more} more" if more > 0 else "")


def bar(share: float, width: int = 20) -> str:
    """Draw a share, 0 to 1, as a bar of block characters."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def terminal_width() -> int | None:
    """Return the columns of the terminal. In a pipe or a file, return $COLUMNS, or None if that is not set."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if bounded else None


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, less: Sequence[str] = ()) -> None:
    """Print a table that fits the terminal; see `grid`."""
    tell_lines(grid(heads, rows, width=terminal_width(), less=less))


def show(value: Any, text: str | Iterable[str], *, json: bool) -> None:
    """Print the result of a command: with --json a value, otherwise a text, or lines of text."""
    if json:
        emit(value)
        return
    for row in [text] if isinstance(text, str) else text:
        tell(row)


Columns = Mapping[str, str | Callable[[dict[str, Any]], Any]]
"""The columns of a table by their heads: the key of a record, or a function that returns the cell."""


def show_records(records: Sequence[dict[str, Any]], columns: Columns, noun: str = "", *, json: bool) -> None:
    """Print records: with --json all of their data, otherwise a table.

    Args:
        noun: print the number of the records below the table, with this noun.
    """
    if json:
        emit(records)
        return
    cells = [key if callable(key) else itemgetter(key) for key in columns.values()]
    table(list(columns), ([cell(record) for cell in cells] for record in records))
    if noun:
        tell(many(len(records), noun))


NUMBER = re.compile(r"[+-]?[\d.,]+[kMG%]?|-")
"""A value of a right-aligned column."""

FIGURE = re.compile(rf"(?:{NUMBER.pattern})(?: \w+)?(?: ago| low)?")
"""A number with a unit. It is never shortened, as that would change its meaning."""

MIN_COLUMN = 12
"""Columns of the terminal to which a text may be shortened; the first column of a table gets 4 more."""

GAP = 2
"""Blanks between two columns."""


def grid(
    heads: Sequence[str],
    rows: Iterable[Sequence[Any]],
    *,
    title: str = "",
    width: int | None = None,
    height: int | None = None,
    less: Sequence[str] = (),
) -> list[Styled]:
    """Return the lines of a table. Integers get thousands separators, shares are percentages, None is a dash. Columns that
    contain only numbers are right-aligned. The heads are bold, and a note on omitted rows and columns is dim.

    If the table is wider than `width`, whole columns are omitted first, and then texts are shortened: the first column in its
    middle, others at their ends. Numbers are never shortened, and no line is wrapped.

    Args:
        height: maximum number of lines, with the title and the note; at least one row is shown.
        less: heads of the columns that are omitted first, in this order; then the other columns, from the last one.
    """
    visible = list(rows)
    total = len(visible)
    if height is not None and total > (room := height - 1 - bool(title)):
        del visible[max(1, room - 1) :]
    body = [[plain(cell(value)).replace("\n", " ") for value in row] for row in visible]
    is_text = [any(isinstance(row[at], str) and not NUMBER.fullmatch(row[at]) for row in visible) for at in range(len(heads))]
    widths = [max(map(measured, (head, *(row[at] for row in body)))) for at, head in enumerate(heads)]
    columns = list(range(len(heads)))
    if width is not None:
        flexible = [is_text[at] and not all(FIGURE.fullmatch(row[at]) for row in body) for at in columns]
        minimum = [min(size, MIN_COLUMN + 4 * (at == 0)) if flexible[at] else size for at, size in enumerate(widths)]
        optional = [heads.index(head) for head in less if head in heads]
        optional += [at for at in reversed(columns[1:]) if at not in optional]
        for at in optional:
            if sum(minimum[column] + GAP for column in columns) - GAP <= width:
                break
            columns.remove(at)
        for _ in range(sum(widths[at] + GAP for at in columns) - GAP - width):
            widest = max(columns, key=lambda at: widths[at] if widths[at] > minimum[at] else 0)
            widths[widest] -= widths[widest] > minimum[widest]

    def aligned(cells: Sequence[str]) -> str:
        padded = []
        for at in columns:
            text = shortened(cells[at], widths[at], middle=at == 0)
            blanks = " " * (widths[at] - measured(text))
            padded.append(text + blanks if is_text[at] else blanks + text)
        return (" " * GAP).join(padded).rstrip()

    lines = [(aligned(heads), "bold"), *((aligned(row), "") for row in body)]
    if title:
        lines.insert(0, (line(title) if width is None else shortened(line(title), width), ""))
    omitted = ((total - len(visible), "row"), (len(heads) - len(columns), "column"))
    if missing := " and ".join(many(number, noun) for number, noun in omitted if number):
        note = f"{missing} more in a larger window, and with --json"
        lines.append((note if width is None else shortened(note, width), "dim"))
    return lines


def measured(text: str) -> int:
    """Return the columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shortened(text: str, width: int, *, middle: bool = False) -> str:
    """Shorten a text to `width` columns, with an ellipsis for its end or its middle."""
    if measured(text) <= width:
        return text
    from rich.cells import chop_cells

    tail = max(0, width - 1) // 3 if middle else 0
    end = chop_cells(text[::-1], tail)[0][::-1] if tail else ""
    begin = chop_cells(text, max(1, width - 1 - measured(end)))[0]
    return f"{begin}…{end}"


def cell(value: str | float | None) -> str:
    """Format a value for a table."""
    if value is None:
        return "-"
    return value if isinstance(value, str) else f"{value:.1%}" if isinstance(value, float) else count(value)


class Sink(Protocol):
    """A target of bytes."""

    def write(self, data: bytes, /) -> object:
        """Write all of the bytes."""
        ...

    def flush(self) -> object:
        """Flush what was written."""
        ...


class _TerminalSink:
    def write(self, data: bytes, /) -> None:
        tell(spelled(data.decode("utf-8")), end="")

    def flush(self) -> None:
        sys.stdout.flush()


@contextmanager
def sink(out: Path | None, force: bool) -> Iterator[Sink]:
    """Open a target for lines of JSON: a file, which is written completely or not at all, or standard output."""
    if out is not None:
        with write_file(out, force=force) as file:
            yield file
        return
    sys.stdout.flush()
    target: Sink = _TerminalSink() if sys.stdout.isatty() else sys.stdout.buffer
    yield target
    target.flush()


class Done(Protocol):
    """Reports progress: the amount done, the total if it has become known, and a description of the current step."""

    def __call__(self, completed: int, total: int | None = None, words: str = "", /) -> None:
        """Report that `completed` of `total` is done."""


BAR_DELAY = 0.5
"""Seconds of work before a bar is drawn."""

BAR_INTERVAL = 0.1
"""Seconds between two updates of a bar."""

FIRST_DELAY, MAX_DELAY = 2.0, 60.0
"""Seconds before the first line of progress, and the maximum between two lines; each delay is twice the previous one."""


@contextmanager
def progress(title: str, total: int | None = None, *, unit: str = "", first: float = FIRST_DELAY) -> Iterator[Done]:
    """Show progress on standard error while the block runs: a bar on a terminal, otherwise a line now and then. With
    $KILBURN_QUIET, show nothing.

    Args:
        unit: the noun of the counted things; "bytes" for a download.
        first: seconds before the first line, so that short work prints nothing.
    """
    if os.environ.get("KILBURN_QUIET"):
        yield lambda completed, total=None, words="": None
        return
    state, over = _ProgressState(title, total, unit), threading.Event()
    report = _print_lines if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb" else _draw_bar
    # A thread, because the work may be one long call without reports.
    thread = threading.Thread(target=report, args=(state, over, first), name="kilburn-progress", daemon=True)
    thread.start()
    try:
        yield state
    finally:
        over.set()
        thread.join()


class _ProgressState:
    """The amount done, the total, and the current step."""

    def __init__(self, title: str, total: int | None, unit: str) -> None:
        self.title, self.unit, self.completed, self.total, self.step = line(title), unit, 0, total, ""

    def __call__(self, completed: int, total: int | None = None, words: str = "", /) -> None:
        self.completed, self.total, self.step = completed, total or self.total, line(words)

    def words(self, seconds: float) -> str:
        """Return a line with the amount done, the current step, and the time."""
        unit = f" {self.unit}" if self.unit else ""
        amount = f" {self.completed:,}{unit}" if self.completed else ""
        if self.total:
            amount = f" {self.completed:,} of {self.total:,}{unit}"
        step = f" {self.step}" if self.step else ""
        return f"{self.title}:{amount}{step}{',' if amount or step else ''} {seconds:.0f} s"


def _draw_bar(state: _ProgressState, over: threading.Event, first: float) -> None:
    """Draw a bar until the work is over. Short work neither draws it nor imports rich."""
    if over.wait(BAR_DELAY):
        return
    from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    amount = DownloadColumn() if state.unit == "bytes" else MofNCompleteColumn()
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
    with Progress(*columns, console=console(stderr=True), transient=True) as bar:
        task = bar.add_task(state.title, total=state.total)
        while not over.wait(BAR_INTERVAL):
            description = f"{state.title} {state.step}" if state.step else state.title
            bar.update(task, completed=state.completed, total=state.total, description=description)


def _print_lines(state: _ProgressState, over: threading.Event, first: float) -> None:
    """Print a line now and then until the work is over."""
    start, delay = time.monotonic(), first
    while not over.wait(delay):
        with suppress(OSError, ValueError):  # standard error is closed; the work continues
            say(state.words(time.monotonic() - start))
        delay = min(2 * delay, MAX_DELAY)

"""Output for people: tables, ages, bars. Plain texts go through `kilburn.terminal`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Protocol

from kilburn.file import write_file
from kilburn.terminal import Styled, console, line, plain, say, spelled, tell, tell_lines


def count(number: int) -> str:
    """A number with its thousands apart."""
    return f"{number:,}"


def many(number: int, what: str) -> str:
    """A number of things: `1 page`, `2,000 pages`."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def bar(share: float, width: int = 20) -> str:
    """A share, 0 to 1, as a bar of blocks."""
    filled = round(min(1.0, max(0.0, share)) * width)
    return "█" * filled + "░" * (width - filled)


def terminal_width() -> int | None:
    """Return the columns of the terminal, or None where nothing bounds a line: in a pipe or a file, unless $COLUMNS says so."""
    bounded = sys.stdout.isatty() or os.environ.get("COLUMNS", "").isdigit()
    return shutil.get_terminal_size().columns if bounded else None


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]], *, title: str = "", less: Sequence[str] = ()) -> None:
    """Print a table that fits the terminal; see `grid`."""
    tell_lines(grid(heads, rows, title=title, width=terminal_width(), less=less))


NUMBER = re.compile(r"[+-]?[\d.,]+[kMG%]?|-")
"""A number as a column that stands to the right may have it."""

FIGURE = re.compile(rf"(?:{NUMBER.pattern})(?: \w+)?(?: ago| low)?")
"""A number with its unit, which says something else where it is cut."""

NARROWEST = 12
"""Columns that a text keeps, where a table has to be narrow; the name in front keeps some more."""

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
    """Return the lines of a table: whole numbers with their thousands apart, shares as percentages, a dash for None; columns
    that hold nothing else stand to the right. The heads are bold, and a note on what is left out is dim.

    In a width that does not hold all of it, whole columns are left out, and then texts are shortened: names, in front, in
    their middle. Numbers are never cut, and no line is wrapped.

    Args:
        height: lines that it may take, its title and what it says of the rest included; at least one row is shown.
        less: heads of columns in the order in which they are left out; then the others, the last first.
    """
    given = list(rows)
    held = len(given)
    if height is not None and held > (room := height - 1 - bool(title)):
        del given[max(1, room - 1) :]
    body = [[plain(cell(value)).replace("\n", " ") for value in row] for row in given]
    words = [any(isinstance(row[at], str) and not NUMBER.fullmatch(row[at]) for row in given) for at in range(len(heads))]
    wide = [max(map(measured, (head, *(row[at] for row in body)))) for at, head in enumerate(heads)]
    kept = list(range(len(heads)))
    if width is not None:
        free = [words[at] and not all(FIGURE.fullmatch(row[at]) for row in body) for at in kept]
        least = [min(each, NARROWEST + 4 * (at == 0)) if free[at] else each for at, each in enumerate(wide)]
        going = [heads.index(head) for head in less if head in heads]
        going += [at for at in reversed(kept[1:]) if at not in going]
        for at in going:
            if sum(least[each] + GAP for each in kept) - GAP <= width:
                break
            kept.remove(at)
        for _ in range(sum(wide[at] + GAP for at in kept) - GAP - width):
            widest = max(kept, key=lambda at: wide[at] if wide[at] > least[at] else 0)
            wide[widest] -= wide[widest] > least[widest]

    def aligned(cells: Sequence[str]) -> str:
        padded = []
        for at in kept:
            text = shortened(cells[at], wide[at], middle=at == 0)
            blanks = " " * (wide[at] - measured(text))
            padded.append(text + blanks if words[at] else blanks + text)
        return (" " * GAP).join(padded).rstrip()

    lines = [(aligned(heads), "bold"), *((aligned(row), "") for row in body)]
    if title:
        lines.insert(0, (line(title) if width is None else shortened(line(title), width), ""))
    counts = ((held - len(given), "row"), (len(heads) - len(kept), "column"))
    if missing := " and ".join(many(number, what) for number, what in counts if number):
        note = f"{missing} more in a larger window, and with --json"
        lines.append((note if width is None else shortened(note, width), "dim"))
    return lines


def measured(text: str) -> int:
    """Columns of a terminal that a text takes."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def shortened(text: str, width: int, *, middle: bool = False) -> str:
    """A text in at most `width` columns, with an ellipsis for what is left out: its end, or its middle."""
    if measured(text) <= width:
        return text
    from rich.cells import chop_cells

    tail = max(0, width - 1) // 3 if middle else 0
    end = chop_cells(text[::-1], tail)[0][::-1] if tail else ""
    begin = chop_cells(text, max(1, width - 1 - measured(end)))[0]
    return f"{begin}…{end}"


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
    """Updates what is shown of some work: how much is done, the total if it became known only now, and what is in hand."""

    def __call__(self, done: int, total: int | None = None, words: str = "", /) -> None:
        """Show that `done` of `total` is done."""


BEFORE_A_BAR = 0.5
"""Seconds of work before a bar is drawn."""

FIRST, LAST = 2.0, 60.0
"""Seconds before the first line of progress, and between two lines at most; each wait is twice the one before."""


@contextmanager
def progress(what: str, total: int | None = None, *, unit: str = "", first: float = FIRST) -> Iterator[Done]:
    """Progress on standard error while the block runs: a bar, or plain lines now and then where that is no terminal.

    Where $KILBURN_QUIET is set, nothing is shown.

    Args:
        unit: what is counted, for the lines; "bytes" for a download.
        first: seconds before the first line, so that short work says nothing; a bar comes after half a second.
    """
    if os.environ.get("KILBURN_QUIET"):
        yield lambda done, total=None, words="": None
        return
    if not sys.stderr.isatty() or os.environ.get("TERM") == "dumb":
        lines = _Lines(what, total, unit)
        with lines.spoken(first):
            yield lines
        return
    bar = _Bar(what, total, unit)
    timer = threading.Timer(BEFORE_A_BAR, bar.show)
    timer.start()
    try:
        yield bar
    finally:
        timer.cancel()
        bar.close()


class _Bar:
    """A bar that a timer shows: short work draws nothing, and does not import what draws."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._unit = what, unit
        self._state: dict[str, Any] = {"completed": 0, "total": total, "description": line(what)}
        self._lock = threading.Lock()
        self._closed = False
        self._shown: Any = None

    def __call__(self, done: int, total: int | None = None, words: str = "", /) -> None:
        with self._lock:
            description = line(f"{self._what} {words}" if words else self._what)
            self._state = {"completed": done, "total": total or self._state["total"], "description": description}
            if self._shown is not None:
                self._shown.update(self._shown.task_ids[0], **self._state)

    def show(self) -> None:
        """Draw the bar from now on."""
        from rich.progress import BarColumn, DownloadColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

        amount = DownloadColumn() if self._unit == "bytes" else MofNCompleteColumn()
        columns = (TextColumn("{task.description}", markup=False), BarColumn(), amount, TimeRemainingColumn())
        with self._lock:
            if not self._closed:
                self._shown = Progress(*columns, console=console(stderr=True), transient=True)
                self._shown.add_task(**self._state)
                self._shown.start()

    def close(self) -> None:
        """Take the bar off the screen."""
        with self._lock:
            self._closed = True
            if self._shown is not None:
                self._shown.stop()


class _Lines:
    """Progress in plain lines. A thread says them, because the work may be one long call that tells nothing."""

    def __init__(self, what: str, total: int | None, unit: str) -> None:
        self._what, self._unit = line(what), unit
        self._now: tuple[int, int | None, str] = (0, total, "")
        self._began = time.monotonic()

    def __call__(self, done: int, total: int | None = None, words: str = "", /) -> None:
        self._now = (done, total or self._now[1], words)

    @contextmanager
    def spoken(self, first: float) -> Iterator[None]:
        over = threading.Event()

        def speak() -> None:
            wait = first
            while not over.wait(wait):
                with suppress(OSError, ValueError):  # nobody reads it any more; the work goes on
                    say(self.words(time.monotonic() - self._began))
                wait = min(2 * wait, LAST)

        voice = threading.Thread(target=speak, name="kilburn-progress", daemon=True)
        voice.start()
        try:
            yield
        finally:
            over.set()
            voice.join()

    def words(self, seconds: float) -> str:
        """A line: what is done, how much of it, what is in hand, and for how long."""
        done, total, hand = self._now
        unit = f" {self._unit}" if self._unit else ""
        much = f" {done:,} of {total:,}{unit}" if total else f" {done:,}{unit}" if done else ""
        return f"{self._what}:{much}{f' {line(hand)}' if hand else ''}{',' if much or hand else ''} {seconds:.0f} s"

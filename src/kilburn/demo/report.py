"""What the demo shows: its progress on standard error, its outcome on standard output.

It computes nothing but shares and sums; the figures are `kilburn.demo.job`'s.
"""

from __future__ import annotations

import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from kilburn.demo.job import Outcome, Told
from kilburn.demo.picture import band, teeth
from kilburn.terminal import console, line, plain, say

__all__ = ["figures", "show", "watching"]

PHASES = {
    "fetch": "the model",
    "work": "the agent works",
    "check": "every page against what the tools said",
    "questions": "questions from the sources",
    "answers": "answers from memory alone",
    "rivals": "truncation and summarisation",
    "model": "the model's part",
}
EVERY = 10.0
"""Seconds between lines where standard error is no terminal."""

WIDTH = 72


def figures(outcome: Outcome) -> dict[str, Any]:
    """The outcome as JSON carries it, with its verdict first."""
    rest: dict[str, Any] = msgspec.to_builtins(outcome)
    return {"ok": outcome.ok, "questions": len(outcome.asked), "exact": outcome.exact, **rest}


@contextmanager
def watching() -> Iterator[Told]:
    """Progress while the block runs: bars on a terminal, else a line a phase and one every ten seconds."""
    if not sys.stderr.isatty():
        yield _lines()
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        TextColumn("{task.description:<40}"),
        BarColumn(bar_width=24),
        TimeElapsedColumn(),
        TextColumn("{task.fields[line]}", markup=False),
    )
    with Progress(*columns, console=console(stderr=True), transient=True) as bars:
        tasks: dict[str, Any] = {}

        def told(phase: str, done: int, total: int | None, line: str) -> None:
            if phase not in tasks:
                for before in tasks.values():
                    bars.update(before, total=1, completed=1, line="")
                    bars.stop_task(before)
                tasks[phase] = bars.add_task(PHASES[phase], total=total, line=line)
            room = max(10, bars.console.width - 80)
            bars.update(tasks[phase], completed=done, total=total, line=plain(line)[:room])

        yield told


def _lines() -> Told:
    began = time.monotonic()
    current, spoken = "", 0.0

    def told(phase: str, done: int, total: int | None, line: str) -> None:
        nonlocal current, spoken
        now = time.monotonic()
        if phase == current and now - spoken < EVERY:
            return
        share = f" {done} of {total}" if total else ""
        what = PHASES[phase] if phase != current else f"  ...{share} {line}".rstrip()
        say(f"{now - began:6.1f} s  {what}")
        current, spoken = phase, now

    return told


def show(outcome: Outcome) -> None:
    """Print the outcome for people."""
    shown = console()
    if not shown.is_terminal:
        shown.width = 110
    seen = outcome.output_tokens
    stopped = f" Its time was up then, with {outcome.stopped:,} steps left on its list." if outcome.stopped else ""
    shown.print()
    shown.print(f"Python {outcome.python}'s library through a window of {outcome.window:,} tokens", style="bold")
    shown.print(outcome.library, style="dim")
    shown.print()
    shown.print(f"An agent made {outcome.calls:,} tool calls and read {outcome.lines:,} lines in {outcome.files:,} files:")
    shown.print(f"{seen:,} tokens of tool output, {seen / outcome.window:,.0f} windows full.{stopped}")
    shown.print(f"Then it was asked {len(outcome.asked)} questions about exact details, and had only its memory to answer from.")
    shown.print(
        "Programs choose the calls and read out the answers, for the rivals too; the rival's summary is an extract.",
        style="dim",
    )
    _show_answers(shown, outcome)
    _show_samples(shown, outcome)
    _show_window(shown, outcome)
    _show_figures(shown, outcome)
    _show_model(shown, outcome)
    _show_end(shown, outcome)


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str] = (), wide: str = "") -> Any:
    from rich.table import Table
    from rich.text import Text

    made = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    for head in heads:
        made.add_column(
            head,
            justify="right" if head in right else "left",
            no_wrap=head != wide,
            overflow="ellipsis",
            ratio=1 if head == wide else None,
        )
    for row in rows:
        made.add_row(*(Text(line(str(cell))) for cell in row))
    return made


def _short(text: str, most: int = 150) -> str:
    """A text on one line, its stretches of blanks as one."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"


def _show_answers(console: Any, outcome: Outcome) -> None:
    number = len(outcome.asked)
    rows = [
        ("Kilburn", f"{outcome.exact} of {number}", f"{number} of {number}" if not outcome.lost else "-", "all of it, exactly")
    ]
    rows += [
        (f"plain {rival.name}", f"{rival.exact} of {number}", f"{rival.evidence} of {number}", f"{rival.tokens:,} tokens")
        for rival in outcome.rivals
    ]
    console.print()
    console.print(
        _table(("same window, same questions", "answered exactly", "source line still there", "can still be reached"), rows)
    )
    missed = [asked for asked in outcome.asked if not asked.exact]
    for asked in missed:
        console.print(
            f"  missed: {line(asked.question)}\n    expected {asked.expected!r}\n    got      {asked.answer!r}", style="red"
        )


def _show_samples(console: Any, outcome: Outcome) -> None:
    samples = {asked.kind: asked for asked in reversed(outcome.asked)}
    rows = [(asked.question, _short(asked.answer), asked.address) for asked in samples.values()]
    console.print()
    table = _table(("for example", "answer, from memory", "page"), rows)
    for column, ratio in zip(table.columns, (5, 5, 0), strict=True):
        column.no_wrap, column.ratio = not ratio, ratio or None
        column.overflow = "fold"
    table.expand = True
    console.print(table)


def _show_window(console: Any, outcome: Outcome) -> None:
    used = [tokens for _, tokens in outcome.curve]
    top = outcome.capacity
    middle = max(0, (len(used) - WIDTH) // 2)
    near = used[middle : middle + WIDTH]
    bottom = min(near, default=0) // 1000 * 1000
    for title, low, rows in (
        (f"tokens in the window, all {len(used):,} prompts (░ between least and most)", 0, band(used, top, width=WIDTH)),
        (f"{len(near)} prompts from the middle, one by one, from {bottom:,} tokens up", bottom, teeth(near, bottom, top)),
    ):
        console.print()
        console.print(title, style="bold")
        for at, row in enumerate(rows):
            label = f"{top:,}" if not at else f"{low:,}" if at == len(rows) - 1 else ""
            console.print(f"{label:>7} {'┤' if label else '│'}{row}")
    console.print(
        f"{top:,} is what {outcome.window:,} leave beside the tools' schemas; the fullest prompt had {outcome.peak:,}.",
        style="dim",
    )


def _show_figures(console: Any, outcome: Outcome) -> None:
    rows = [
        ("prompts", f"{outcome.prompts:,}", "pages", f"{outcome.pages:,}"),
        ("prompts over the window", f"{outcome.overflow}", "evictions", f"{outcome.evictions:,}"),
        ("pages compared, bit by bit", f"{outcome.checked:,}", "folds and excerpts", f"{outcome.folds:,}"),
        ("bytes compared", f"{outcome.checked_bytes:,}", "faults while answering", f"{outcome.faults:,}"),
        ("bytes lost", f"{outcome.lost}", "searches while answering", f"{outcome.searches:,}"),
        ("tokens sent in prompts", f"{outcome.tokens_shipped:,}", "store on disk", f"{outcome.bytes_on_disk / 1e6:,.1f} MB"),
    ]
    table = _table(("", " ", "  ", "   "), rows, right=(" ", "   "))
    table.show_header = False
    console.print()
    console.print(table)
    console.print(f"policy {outcome.policy}; tokens counted as {outcome.tokenizer} does; seed {outcome.seed}", style="dim")


def _show_model(console: Any, outcome: Outcome) -> None:
    if outcome.model_missing:
        console.print(f"\nWithout a model: {outcome.model_missing}", style="yellow")
    if outcome.model_folds:
        rows = [(fold.pages, f"{fold.tokens:,}", fold.outcome, fold.why, f"{fold.seconds:.1f} s") for fold in outcome.model_folds]
        console.print(f"\n{outcome.model} was asked to fold, in a session of its own; a summary that fails its check is not used")
        console.print(_table(("pages", "tokens", "outcome", "the ledger says", "time"), rows, right=("tokens", "time")))
    if outcome.phrases:
        console.print(f"\n{outcome.model} says, given the recalled text; the exact answer is what counts")
        for phrase in outcome.phrases:
            console.print(f"  {line(phrase.question)}")
            console.print(f"    exact  {_short(phrase.exact)}", style="green")
            verdict = "has it" if phrase.holds else "not exact"
            console.print(f"    model  {_short(phrase.said)}  ({verdict}, {phrase.seconds:.1f} s)")


def _program() -> str:
    """How the user calls this program: by its name where the shell finds it, else by its path."""
    called = Path(sys.argv[0])
    if called.name != "kilburn" or not called.exists() or shutil.which("kilburn"):
        return "kilburn"
    return shlex.quote(str(called))


def _show_end(console: Any, outcome: Outcome) -> None:
    spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in outcome.seconds.items() if seconds >= 0.05)
    console.print(f"\n{sum(outcome.seconds.values()):.0f} seconds: {spent}")
    verdict = "Nothing overflowed, nothing was lost, everything was answered." if outcome.ok else "FAILED: see above."
    console.print(verdict, style="bold green" if outcome.ok else "bold red")
    console.print("\nGo on with what the agent remembers:", style="bold")
    example = next((asked.address for asked in outcome.asked if asked.address), "p1")
    for command in (
        f'{_program()} --db {outcome.db} search "JSONDecoder object_hook"',
        f"{_program()} --db {outcome.db} recall {outcome.session} {example}",
        f"{_program()} --db {outcome.db} show {outcome.session}",
    ):
        console.print(f"  {command}", soft_wrap=True)

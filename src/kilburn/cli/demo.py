"""`demo`: runs the demo of `kilburn.demo` on the Python standard library, and prints its results."""

from __future__ import annotations

import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer
from typer import Option

from kilburn.cli.model_loading import closing_model, open_model
from kilburn.cli.screen import Done, progress, table
from kilburn.cli.shell import Json, app
from kilburn.demo.job import ENOUGH, DemoPlan, JobResult, Report, perform
from kilburn.terminal import console, emit, line, say

PHASES = {
    "fetch": "the model",
    "work": "the agent works",
    "check": "every page against the results of the tools",
    "questions": "questions from the sources",
    "answers": "answers from memory alone",
    "rivals": "truncation and summarisation",
    "model": "the model's part",
}
QUESTIONS, FULL_QUESTIONS = 40, 200
WIDTH, HEIGHT = 72, 7
"""Size of the chart, in characters."""


@app.command()
def demo(
    model: str = "none",
    full: bool = False,
    questions: Annotated[int | None, Option(min=1)] = None,
    window: Annotated[int, Option(min=2000)] = 8000,
    db: Path | None = None,
    seed: int = 0,
    policy: str = "hybrid",
    library: Path | None = None,
    json: Json = False,
) -> None:
    """Watch an agent read 1.2 million tokens of the Python standard library in a small window, and answer questions about it.

    The demo takes about a minute on two cores, and downloads nothing. --full reads the whole library in a few minutes. With
    --model smollm2, a language model writes a few summaries and answers, which takes one to three minutes more. The model, 98
    MB, is downloaded once, and needs the extra `local`.

    The exit status is 0 only if no prompt overflowed, no byte was lost, and every question was answered exactly.

    Example:

        kilburn demo

    Args:
        model none|smollm2|qwen|SPEC: Let this language model write some summaries and answers, too.
        full: Read the whole library with its tests and applications, and ask 200 questions.
        questions: Ask this many questions; 40, or 200 with --full.
        window: Give the agent a window of this many tokens.
        db FILE: Keep the store in this file; by default in a temporary folder.

    Advanced:
        seed: Choose the questions with this random seed.
        policy SPEC: Let this policy choose what leaves the window.
        library DIR: Read this folder of Python sources instead.
    """
    plan = DemoPlan(
        db=str(db or Path(tempfile.mkdtemp(prefix="kilburn-demo-")) / "library.db"),
        library=str(library or ""),
        whole=full,
        window=window,
        policy=policy,
        questions=questions or (FULL_QUESTIONS if full else QUESTIONS),
        seed=seed,
        folds=8 if full else 3,
        phrases=12 if full else 4,
        enough=None if full else ENOUGH,
    )
    with _progress() as report:
        writer = open_model(model, lambda name, completed, total: report("fetch", completed, total, f"bytes of {name}"))
        with closing_model(writer):
            results = perform(plan, writer, report)
    if json:
        figures: dict[str, Any] = msgspec.to_builtins(results)
        figures["capacity"] = results.stats.room
        figures = figures.pop("stats") | figures.pop("plan") | figures
        verdict = {"questions": len(results.asked), "exact": results.exact}
        emit({"ok": results.ok} | figures | verdict)
    else:
        _show(results)
    if not results.ok:
        raise typer.Exit(1)


@contextmanager
def _progress() -> Iterator[Report]:
    """Show progress on standard error: a line for each phase, and a bar."""
    start = time.monotonic()
    with ExitStack() as stack:
        current = ""
        update: Done | None = None

        def report(phase: str, completed: int, total: int | None, step: str) -> None:
            nonlocal current, update
            if phase != current or update is None:
                stack.close()
                current = phase
                say(f"{time.monotonic() - start:6.1f} s  {PHASES[phase]}")
                update = stack.enter_context(progress(f"  ... {PHASES[phase]}"))
            update(completed, total, step)

        yield report


def _show(results: JobResult) -> None:
    """Print the results as text."""
    plan, stats, number = results.plan, results.stats, len(results.asked)
    output_tokens = results.output_tokens
    stopped = f" {results.stopped:,} files were left unread: --full reads all." if results.stopped else ""
    _print(f"\nPython {results.python}'s library through a window of {plan.window:,} tokens", "bold")
    _print(f"{line(results.library)}\n")
    _print(f"An agent made {results.calls:,} tool calls and read {results.lines:,} lines in {results.files:,} files:")
    _print(f"{output_tokens:,} tokens of tool output, {output_tokens / plan.window:,.0f} windows full.{stopped}")
    _print(f"Then it answered {number} questions about exact details from its memory alone.")
    _print("A program chooses the calls and extracts the answers, for the rivals, too; the rival's summary is an extract.\n")
    heads = ("same window, same questions", "answered exactly", "source line still there", "can still be reached")
    rows = [("Kilburn", results.exact, "-" if results.lost else f"{number} of {number}", "all of it, exactly")]
    rows += [(f"plain {row.name}", row.exact, f"{row.evidence} of {number}", f"{row.tokens:,} tokens") for row in results.rivals]
    table(heads, ((name, f"{exact} of {number}", *rest) for name, exact, *rest in rows))
    for row in results.asked:
        if not row.exact:
            _print(f"  missed: {line(row.question)}\n    expected {row.expected!r}\n    got      {row.answer!r}", "red")
    _print()
    samples = {row.kind: row for row in reversed(results.asked)}.values()
    table(("for example", "answer, from memory", "page"), ((row.question, _short(row.answer), row.address) for row in samples))
    _draw_window(results.curve, stats.room)
    room = f"{stats.room:,} of {plan.window:,} tokens remain beside the tools' schemas"
    _print(f"{room}; the largest prompt had {stats.peak:,}.\n")
    figures = (
        ("prompts", stats.prompts, "pages", stats.pages),
        ("prompts over the window", stats.overflow, "evictions", stats.evictions),
        ("pages compared, bit by bit", results.checked, "folds and excerpts", stats.folds),
        ("bytes compared", results.checked_bytes, "faults while answering", results.faults),
        ("bytes lost", results.lost, "searches while answering", results.searches),
        ("tokens sent in prompts", stats.tokens_shipped, "kilobytes on disk", results.bytes_on_disk // 1000),
    )
    for title, first, second_title, second in figures:
        _print(f"{title:<26}  {first:>12,}  {second_title:<24}  {second:>8,}")
    _print(f"policy {plan.policy}; tokens counted as {plan.tokenizer} does; seed {plan.seed}")
    _show_model(results)
    _show_end(results)


def _draw_window(curve: Sequence[tuple[int, int]], top: int) -> None:
    """Draw the tokens in the window as a bar chart: a column for each prompt, from the middle of the run."""
    middle = max(0, (len(curve) - WIDTH) // 2)
    sizes = [tokens for _, tokens in curve[middle : middle + WIDTH]]
    bottom = min(sizes, default=0) // 1000 * 1000
    _print(f"\ntokens in the window: {len(sizes)} of {len(curve):,} prompts, from the middle, from {bottom:,} tokens up", "bold")
    for row in reversed(range(HEIGHT)):
        levels = ((tokens - bottom) / max(top - bottom, 1) * HEIGHT - row for tokens in sizes)
        label = f"{top:,}" if row == HEIGHT - 1 else "" if row else f"{bottom:,}"
        _print(f"{label:>7} {'┤' if label else '│'}{''.join(' ▁▂▃▄▅▆▇█'[max(0, min(8, round(8 * level)))] for level in levels)}")


def _show_model(results: JobResult) -> None:
    if results.model_folds:
        _print(f"\n{results.model} wrote summaries in another session; a summary that fails its check is not used")
        rows = [(fold.pages, f"{fold.tokens:,}", fold.outcome, fold.why, f"{fold.seconds:.1f} s") for fold in results.model_folds]
        table(("pages", "tokens", "outcome", "the ledger says", "time"), rows)
    if results.phrases:
        exact, hits = sum(phrase.holds for phrase in results.phrases), sum(phrase.found for phrase in results.phrases)
        _print(f"\n{results.model} answers from one search for the question: {exact} of {len(results.phrases)} exactly;")
        _print(f"the hits contained the answer for {hits}. The figures above count the program's answers.")
    for phrase in results.phrases:
        _print(f"  {line(phrase.question)}\n    exact  {_short(phrase.exact)}")
        _print(f"    model  {_short(phrase.said)}  ({'has it' if phrase.holds else 'not exact'}, {phrase.seconds:.1f} s)")


def _show_end(results: JobResult) -> None:
    phases = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in results.seconds.items())
    _print(f"\n{sum(results.seconds.values()):.0f} seconds: {phases}")
    if results.ok:
        _print("Nothing overflowed, nothing was lost, everything was answered.", "bold green")
    else:
        _print("FAILED: see above.", "bold red")
    # Name the program as it was started if the shell does not find it by its name.
    path = Path(sys.argv[0])
    by_path = path.name == "kilburn" and path.exists() and not shutil.which("kilburn")
    program = f"{shlex.quote(str(path)) if by_path else 'kilburn'} --db {shlex.quote(results.plan.db)}"
    example = next((row.address for row in results.asked if row.address), "p1")
    _print("\nExplore what the agent remembers:", "bold")
    for command in ('search "JSONDecoder object_hook"', f"recall {results.session} {example}", f"show {results.session}"):
        _print(f"  {program} {command}")


def _print(text: str = "", style: str | None = None) -> None:
    console().print(text, style=style, soft_wrap=True)


def _short(text: str) -> str:
    """Return a text on one line, with single blanks, shortened to 150 characters."""
    flat = " ".join(text.split())
    return flat if len(flat) <= 150 else f"{flat[:149]}…"

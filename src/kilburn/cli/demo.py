"""`demo`: the main job on input that every machine has. The work is `kilburn.demo`'s; this is its verb and what it shows."""

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

from kilburn.cli.access import Advanced, closed_after, model_of
from kilburn.cli.screen import Done, progress, table
from kilburn.cli.shell import Json, app
from kilburn.demo.job import ENOUGH, DemoPlan, JobResult, Told, perform
from kilburn.terminal import console, emit, line, say

PHASES = {
    "fetch": "the model",
    "work": "the agent works",
    "check": "every page against what the tools said",
    "questions": "questions from the sources",
    "answers": "answers from memory alone",
    "rivals": "truncation and summarisation",
    "model": "the model's part",
}
FEW, MANY = 40, 200
WIDTH, HEIGHT = 72, 7
"""Of the picture, in characters."""


@app.command()
def demo(
    model: Annotated[
        str, Option(metavar="none|smollm2|qwen|SPEC", help="Also let this language model write some summaries and answers.")
    ] = "none",
    full: Annotated[
        bool, Option("--full", help="Read the whole library with its tests and applications, and ask 200 questions.")
    ] = False,
    questions: Annotated[
        int | None, Option(min=1, help="Ask this many questions; 40, or 200 with --full.", show_default=False)
    ] = None,
    window: Annotated[int, Option(min=2000, help="Give the agent a window of this many tokens.")] = 8000,
    db: Annotated[
        Path | None,
        Option(metavar="FILE", help="Keep the store in this file; by default in a temporary folder.", show_default=False),
    ] = None,
    seed: Annotated[int, Advanced(help="Choose other questions with another seed.")] = 0,
    policy: Annotated[str, Advanced(metavar="SPEC", help="Let this policy choose what leaves the window.")] = "hybrid",
    library: Annotated[
        Path | None, Advanced(metavar="DIR", help="Read this folder of Python sources instead.", show_default=False)
    ] = None,
    json: Json = False,
) -> None:
    """An agent reads 1.2 million tokens of the Python standard library in a small window, and then answers questions about it.

    This takes about a minute on two cores, and downloads nothing. --full reads all of it in some minutes. --model smollm2 adds
    a language model of 98 MB, which is downloaded once and writes a few summaries and answers: one to three minutes more. It
    needs the extra `local`.

    The exit status is 0 only if no prompt overflowed, no byte was lost, and every question was answered exactly.

    Example:

        kilburn demo --window 8000
    """
    plan = DemoPlan(
        db=str(db or Path(tempfile.mkdtemp(prefix="kilburn-demo-")) / "library.db"),
        library=str(library or ""),
        whole=full,
        window=window,
        policy=policy,
        questions=questions or (MANY if full else FEW),
        seed=seed,
        folds=8 if full else 3,
        phrases=12 if full else 4,
        enough=None if full else ENOUGH,
    )
    with _progress() as told:
        writer = model_of(model, lambda name, done, total: told("fetch", done, total, f"bytes of {name}"))
        with closed_after(writer):
            results = perform(plan, writer, told)
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
def _progress() -> Iterator[Told]:
    """Progress on standard error: a line a phase, and how far it is."""
    began = time.monotonic()
    with ExitStack() as shown:
        current = ""
        done_of: Done | None = None

        def told(phase: str, done: int, total: int | None, words: str) -> None:
            nonlocal current, done_of
            if phase != current or done_of is None:
                shown.close()
                current = phase
                say(f"{time.monotonic() - began:6.1f} s  {PHASES[phase]}")
                done_of = shown.enter_context(progress(f"  ... {PHASES[phase]}"))
            done_of(done, total, words)

        yield told


def _show(results: JobResult) -> None:
    """Print the results for people."""
    plan, stats, number = results.plan, results.stats, len(results.asked)
    seen = results.output_tokens
    stopped = f" {results.stopped:,} files were left unread: --full reads all." if results.stopped else ""
    _print(f"\nPython {results.python}'s library through a window of {plan.window:,} tokens", "bold")
    _print(f"{line(results.library)}\n")
    _print(f"An agent made {results.calls:,} tool calls and read {results.lines:,} lines in {results.files:,} files:")
    _print(f"{seen:,} tokens of tool output, {seen / plan.window:,.0f} windows full.{stopped}")
    _print(f"Then it was asked {number} questions about exact details, and had only its memory to answer from.")
    _print("Programs choose the calls and read out the answers, for the rivals too; the rival's summary is an extract.\n")
    heads = ("same window, same questions", "answered exactly", "source line still there", "can still be reached")
    rows = [("Kilburn", results.exact, "-" if results.lost else f"{number} of {number}", "all of it, exactly")]
    rows += [(f"plain {it.name}", it.exact, f"{it.evidence} of {number}", f"{it.tokens:,} tokens") for it in results.rivals]
    table(heads, ((name, f"{exact} of {number}", *rest) for name, exact, *rest in rows))
    for asked in results.asked:
        if not asked.exact:
            _print(f"  missed: {line(asked.question)}\n    expected {asked.expected!r}\n    got      {asked.answer!r}", "red")
    _print()
    samples = {asked.kind: asked for asked in reversed(results.asked)}.values()
    table(("for example", "answer, from memory", "page"), ((it.question, _short(it.answer), it.address) for it in samples))
    _draw_window(results.curve, stats.room)
    room = f"{stats.room:,} is what {plan.window:,} leave beside the tools' schemas"
    _print(f"{room}; the fullest prompt had {stats.peak:,}.\n")
    ledger = (
        ("prompts", stats.prompts, "pages", stats.pages),
        ("prompts over the window", stats.overflow, "evictions", stats.evictions),
        ("pages compared, bit by bit", results.checked, "folds and excerpts", stats.folds),
        ("bytes compared", results.checked_bytes, "faults while answering", results.faults),
        ("bytes lost", results.lost, "searches while answering", results.searches),
        ("tokens sent in prompts", stats.tokens_shipped, "kilobytes on disk", results.bytes_on_disk // 1000),
    )
    for left, first, right, second in ledger:
        _print(f"{left:<26}  {first:>12,}  {right:<24}  {second:>8,}")
    _print(f"policy {plan.policy}; tokens counted as {plan.tokenizer} does; seed {plan.seed}")
    _show_model(results)
    _show_end(results)


def _draw_window(curve: Sequence[tuple[int, int]], top: int) -> None:
    """The window at work, in letters: a column a prompt, as many as fit, from the middle of the run."""
    middle = max(0, (len(curve) - WIDTH) // 2)
    used = [tokens for _, tokens in curve[middle : middle + WIDTH]]
    bottom = min(used, default=0) // 1000 * 1000
    _print(f"\ntokens in the window: {len(used)} of {len(curve):,} prompts, from the middle, from {bottom:,} tokens up", "bold")
    for row in reversed(range(HEIGHT)):
        levels = ((tokens - bottom) / max(top - bottom, 1) * HEIGHT - row for tokens in used)
        label = f"{top:,}" if row == HEIGHT - 1 else "" if row else f"{bottom:,}"
        _print(f"{label:>7} {'┤' if label else '│'}{''.join(' ▁▂▃▄▅▆▇█'[max(0, min(8, round(8 * level)))] for level in levels)}")


def _show_model(results: JobResult) -> None:
    if results.model_folds:
        _print(f"\n{results.model} was asked to fold, in a session of its own; a summary that fails its check is not used")
        rows = [(fold.pages, f"{fold.tokens:,}", fold.outcome, fold.why, f"{fold.seconds:.1f} s") for fold in results.model_folds]
        table(("pages", "tokens", "outcome", "the ledger says", "time"), rows)
    if results.phrases:
        said, found = sum(phrase.holds for phrase in results.phrases), sum(phrase.found for phrase in results.phrases)
        _print(f"\n{results.model} answers from one search for the question: {said} of {len(results.phrases)} exactly;")
        _print(f"the search brought the answer for {found}. The programs' answers above are what counts.")
    for phrase in results.phrases:
        _print(f"  {line(phrase.question)}\n    exact  {_short(phrase.exact)}")
        _print(f"    model  {_short(phrase.said)}  ({'has it' if phrase.holds else 'not exact'}, {phrase.seconds:.1f} s)")


def _show_end(results: JobResult) -> None:
    spent = ", ".join(f"{phase} {seconds:.1f}" for phase, seconds in results.seconds.items())
    _print(f"\n{sum(results.seconds.values()):.0f} seconds: {spent}")
    if results.ok:
        _print("Nothing overflowed, nothing was lost, everything was answered.", "bold green")
    else:
        _print("FAILED: see above.", "bold red")
    # By its name where the shell finds it, else by its path.
    called = Path(sys.argv[0])
    by_path = called.name == "kilburn" and called.exists() and not shutil.which("kilburn")
    program = f"{shlex.quote(str(called)) if by_path else 'kilburn'} --db {shlex.quote(results.plan.db)}"
    example = next((asked.address for asked in results.asked if asked.address), "p1")
    _print("\nGo on with what the agent remembers:", "bold")
    for verb in ('search "JSONDecoder object_hook"', f"recall {results.session} {example}", f"show {results.session}"):
        _print(f"  {program} {verb}")


def _print(text: str = "", style: str | None = None) -> None:
    console().print(text, style=style, soft_wrap=True)


def _short(text: str, most: int = 150) -> str:
    """A text on one line, its stretches of blanks as one."""
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"

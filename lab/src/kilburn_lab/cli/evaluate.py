"""`lab`: measurements, each a verb of its own."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn.file import check_target, write_file
from kilburn.picture import check_picture
from kilburn.terminal import say, show
from kilburn.wire.recording import FORMS
from kilburn_lab.evals.baselines import BASELINES
from kilburn_lab.evals.cost import Rates, rates_of
from kilburn_lab.evals.outcomes import Cell
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.pareto import REFILLED, draw
from kilburn_lab.evals.report import EvalReport
from kilburn_lab.evals.roster import everybody
from kilburn_lab.evals.sample import sample_of
from kilburn_lab.evals.saved import SavedCells

__all__ = ["Axis", "Csv", "Data", "Plot", "PriceTables", "check_axis", "check_outputs", "judged", "lab", "paging", "shown"]

WINDOWS = [1000, 2000, 4000, 8000]
"""What `--all` measures at."""

PriceTables = Annotated[
    list[str] | None,
    typer.Option(metavar="NAME", help="hosted, automatic or local; may be given again. hosted and local by default."),
]

Data = Annotated[
    Path | None,
    typer.Option(metavar="FILE|DIR", help=f"Recorded runs: {FORMS}; or a folder of them. Made-up ones where left out."),
]
Csv = Annotated[Path | None, typer.Option("--csv", metavar="FILE", help="Write the rows of the table there, for programs.")]
Plot = Annotated[Path | None, typer.Option(metavar="FILE", help="Draw worth against cost; .svg, .png or .pdf.")]
Axis = Annotated[str, typer.Option(metavar="NAME", help="The cost that is drawn: refilled, or a price table.")]

lab = typer.Typer(help="Measure policies, memory and caches.", no_args_is_help=True, rich_markup_mode=None)


@lab.callback()
def group() -> None:
    """Measure policies, memory and caches."""


def check_outputs(csv: Path | None, plot: Path | None = None, *, force: bool) -> None:
    """Check before a measurement that what it makes can be written.

    Raises:
        SpecError, MissingExtra: see `kilburn.file.check_target` and `kilburn.picture.check_picture`.
    """
    if csv is not None:
        check_target(csv, force=force)
    if plot is not None:
        check_picture(plot, force=force)


def shown(
    report: EvalReport,
    json: bool,
    csv: Path | None = None,
    plot: Path | None = None,
    picture: Callable[..., None] | None = None,
    *,
    force: bool = False,
) -> None:
    """Print a report; write its rows, and draw it, where that is wanted."""
    show(report, json)
    if csv is not None:
        with write_file(csv, force=force) as file:
            file.write(report.to_csv().encode("utf-8"))
        say(f"written: {csv}")
    if plot is not None and picture is not None:
        picture(plot, report, force=force)
        say(f"written: {plot}")
    judged(report)


def judged(report: EvalReport) -> None:
    """End with status 1 where a policy failed: its figures are the kernel's, which made room in its place."""
    failures = report.failures()
    for policy, count in failures.items():
        say(f"policy {policy} failed {count} times: its figures are not its own")
    if failures:
        raise typer.Exit(1)


def check_axis(plot: Path | None, axis: str, rates: Rates) -> None:
    """Check before a measurement that the cost that its picture shows is known.

    Raises:
        SpecError: no such axis.
    """
    if plot is not None and axis != REFILLED and axis not in rates.tables:
        raise SpecError(f"no cost {axis!r} to draw", advice=f"give {REFILLED}, or one of --prices")


@lab.command()
def paging(
    data: Data = None,
    window: Annotated[
        list[int] | None,
        typer.Option(help="Tokens of four characters; may be given again. 2000 by default; 1000, 2000, 4000, 8000 with --all."),
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help="A policy, a baseline or belady; may be given again. Baselines and hybrid by default."),
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="All baselines and policies, and the offline optimum.")] = False,
    sample: Annotated[int | None, typer.Option(min=1, help="Only the first so many runs.")] = None,
    referring: Annotated[bool, typer.Option("--referring", help="Only runs that have references.")] = False,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Swap each name for another run's: only chance is left.")
    ] = None,
    tools: Annotated[
        bool, typer.Option("--tools", help="Tell actions and outputs as tool calls and results, for policies that act on those.")
    ] = False,
    reply: Annotated[
        bool, typer.Option("--reply", help="Score the prompt before thought and action, which real models write together.")
    ] = False,
    session: Annotated[
        int | None,
        typer.Option(min=1, metavar="TOKENS", help="Braid runs into sessions of about so many tokens, for large windows."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="SPEC", help="Score policies that can ask a model once more, with this one.")
    ] = "",
    prices: PriceTables = None,
    pause: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Between two prompts; longer than a cache lives, nothing is cached.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes to spread the work over.")] = 1,
    seed: Annotated[int, typer.Option(help="For made-up runs and for the intervals.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each policy and window there when done, with all outcomes.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is in the file of --out.")] = False,
    plot: Plot = None,
    axis: Axis = REFILLED,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Score policies by future-reference survival: of the names needed next, how many does the window show?

    Example:

        kilburn lab paging --data runs.jsonl.gz --window 2000 --policy hybrid --policy lru

        kilburn lab paging --data runs.jsonl.gz --all --workers 2 --out cells.jsonl --plot pareto.svg
    """
    rates = rates_of(prices, pause)
    check_outputs(csv, plot, force=force)
    check_axis(plot, axis, rates)
    if resume and out is None:
        raise SpecError("--resume without --out", advice="name the file to go on with")
    runs = sample_of(data, sample, shuffle=shuffle, referring=referring, tools=tools, reply=reply, session=session, seed=seed)
    saved = SavedCells(out, runs.digest, Cell, resume=resume, force=force) if out is not None else None
    with progress("evaluating") as done:
        report = evaluate(
            runs,
            window or (WINDOWS if everything else [2000]),
            [*(everybody() if everything else []), *(policy or ([] if everything else [*BASELINES, "hybrid"]))],
            model=model,
            rates=rates,
            workers=workers,
            progress=done,
            saved=saved,
        )
    if out is not None:
        say(f"written: {out}")
    shown(report, json, csv, plot, partial(draw, worth="survival", axis=axis), force=force)

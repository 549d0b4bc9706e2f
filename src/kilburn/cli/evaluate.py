"""`eval`: measurements on recorded runs, each a verb of its own. It refuses to measure anything itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Json, app, say
from kilburn.evals.paging import evaluate

__all__ = ["evals", "paging"]

evals = typer.Typer(help="Measure policies on recorded runs.", no_args_is_help=True, rich_markup_mode=None)
app.add_typer(evals, name="eval")


@evals.callback()
def group() -> None:
    """Measure policies on recorded runs."""


@evals.command()
def paging(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trajectories, one a line, .gz too; made-up ones where left out.")
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Tokens of four characters; may be given again. 2000 by default.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="A policy or a baseline; may be given again. hybrid by default.")
    ] = None,
    sample: Annotated[int | None, typer.Option(min=1, help="Only the first so many runs.")] = None,
    shuffle: Annotated[
        int | None, typer.Option(metavar="SEED", help="Swap each name for another run's: only chance is left.")
    ] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes to spread the work over.")] = 1,
    seed: Annotated[int, typer.Option(help="For made-up runs and for the intervals.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write all outcomes there, as JSON.")] = None,
    json: Json = False,
) -> None:
    """Score policies by future-reference survival: of the names needed next, how many does the window show?

    Example:

        kilburn eval paging --data runs.jsonl.gz --window 2000 --policy hybrid --policy lru
    """
    with progress("evaluating") as done:
        report = evaluate(
            data,
            window or [2000],
            policy or ["hybrid"],
            sample=sample,
            progress=done,
            shuffle=shuffle,
            workers=workers,
            seed=seed,
        )
    if out is not None:
        out.write_text(report.to_json(outcomes=True) + "\n", encoding="utf-8")
        say(f"written: {out}")
    sys.stdout.write((report.to_json() if json else report.table()) + "\n")

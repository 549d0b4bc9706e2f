"""`lab table`: eviction strategies over many made-up sessions, beside brief 002's figures."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.table import EVERYBODY, evaluate
from kilburn_lab.evals.table_report import draw

__all__ = ["table"]


@lab.command()
def table(
    policy: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="A policy; may be given again. All that ship by default.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many sessions.")] = 200,
    interactions: Annotated[int, typer.Option(min=1, help="Of each session.")] = 50,
    window: Annotated[int, typer.Option(help="Tokens of four characters.")] = 2000,
    workers: Annotated[int, typer.Option(min=1, help="Processes to spread the work over.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the sessions and of the intervals.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw accuracy and utilisation; .svg, .png or .pdf.")] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare eviction strategies: utilisation, latency, accuracy and overflow over many made-up sessions.

    Examples:

        kilburn lab table

        kilburn lab table --sessions 10 --policy lru --policy importance --policy tiered --policy hybrid
    """
    check_outputs(csv, plot, force=force)
    with progress("streaming") as done:
        report = evaluate(
            policy or EVERYBODY,
            count=sessions,
            interactions=interactions,
            window=window,
            seed=seed,
            workers=workers,
            progress=done,
        )
    shown(report, json, csv, plot, draw, force=force)

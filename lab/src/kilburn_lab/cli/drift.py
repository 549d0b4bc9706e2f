"""`lab drift`: what is left of facts and rules after many compactions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.access import model_of
from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn_lab.cli.evaluate import Csv, Data, check_outputs, lab, shown
from kilburn_lab.evals.drift import PASSES, POLICIES, evaluate
from kilburn_lab.evals.drift_report import draw
from kilburn_lab.evals.plants import ARMS

__all__ = ["drift"]


@lab.command()
def drift(
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=f"A policy; may be given again. {', '.join(POLICIES)} by default."),
    ] = None,
    arm: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Where the rules stand: {', '.join(ARMS)}; may be given again. All by default."),
    ] = None,
    window: Annotated[int, typer.Option(help="Tokens of four characters.")] = 2000,
    passes: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Look after so many compactions; may be given again. 1, 5 and 20 by default."),
    ] = None,
    replicates: Annotated[
        int | None, typer.Option(min=1, help="Seeds a policy and arm; 20 by default, 3 where a model answers.")
    ] = None,
    data: Data = None,
    model: Annotated[
        str | None, typer.Option(metavar="SPEC", help="Measure policies that can ask a model once more, with this one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="The first seed; for the intervals too.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves; .svg, .png or .pdf.")] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Plant facts and rules, compact again and again, and look what is left of them, word for word.

    Examples:

        kilburn lab drift

        kilburn lab drift --policy summarize --policy recursive --arm plain --model smollm2
    """
    check_outputs(csv, plot, force=force)
    with progress("compacting") as done:
        report = evaluate(
            policy or POLICIES,
            arms=arm or ARMS,
            window=window,
            passes=passes or PASSES,
            replicates=replicates,
            seed=seed,
            data=data,
            model=model_of(model),
            progress=done,
        )
    shown(report, json, csv, plot, draw, force=force)

"""`lab tasks`: whether agents get their work done, when all they know is what the window shows."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn_lab.cli.evaluate import Axis, Csv, Plot, PriceTables, check_axis, check_outputs, lab, shown
from kilburn_lab.evals.acting import EVERYBODY, evaluate
from kilburn_lab.evals.cost import rates_of
from kilburn_lab.evals.pareto import REFILLED, draw

__all__ = ["tasks"]


@lab.command()
def tasks(
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=f"A policy or a baseline; may be given again. {', '.join(EVERYBODY)} by default."),
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Tokens of four characters; may be given again. 1000, 2000 and 4000 by default.")
    ] = None,
    count: Annotated[int, typer.Option("--tasks", min=1, help="How many tasks.")] = 32,
    search: Annotated[
        bool, typer.Option("--search", help="The agent may search its memory, which the baselines do not have.")
    ] = False,
    tools: Annotated[
        bool, typer.Option("--tools", help="Tell actions and outputs as tool calls and results; the user's words then stay.")
    ] = False,
    patience: Annotated[int, typer.Option(min=0, help="What the agent does again in one task before it gives up.")] = 2,
    model: Annotated[
        str, typer.Option(metavar="SPEC", help="A model that decides in place of the script; it reads the window.")
    ] = "",
    writer: Annotated[
        str,
        typer.Option(metavar="SPEC", help="A model that answers the policies' questions; each that can ask has a second row."),
    ] = "",
    sources: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Make the tasks from C headers, such as those of /usr/include."),
    ] = None,
    prices: PriceTables = None,
    plot: Plot = None,
    axis: Axis = REFILLED,
    seed: Annotated[int, typer.Option(help="Of the tasks and of the intervals.")] = 0,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Let a scripted agent work in real source files, when it knows only what its window shows.

    Examples:

        kilburn lab tasks

        kilburn lab tasks --search --window 2000 --policy hybrid --policy cost

        kilburn lab tasks --tasks 4 --window 1000 --policy cost --model 'local("qwen", context=16384)'
    """
    rates = rates_of(prices)
    check_outputs(csv, plot, force=force)
    check_axis(plot, axis, rates)
    with progress("working") as done:
        report = evaluate(
            count,
            windows=window or (1000, 2000, 4000),
            policies=policy or EVERYBODY,
            search=search,
            tools=tools,
            patience=patience,
            model=model,
            writer=writer,
            sources=sources,
            rates=rates,
            seed=seed,
            progress=done,
        )
    shown(report, json, csv, plot, partial(draw, worth="solved", axis=axis), force=force)

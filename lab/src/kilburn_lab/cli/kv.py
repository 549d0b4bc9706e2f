"""`lab kv`: which order of eviction keeps the right part of the KV cache."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import MissingExtra
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown

__all__ = ["kv"]

MADE = 60
"""Made-up traces where no file is given."""


@lab.command()
def kv(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Traces, one a line, .gz too; made-up ones where left out.")
    ] = None,
    capacity: Annotated[
        list[int] | None, typer.Option(metavar="TOKENS", help="Of the cache; may be given again. 1, 2 and 4 million by default.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="An order of eviction; may be given again. All by default; lru and min always."),
    ] = None,
    traces: Annotated[int | None, typer.Option(metavar="N", min=1, help="Only so many, drawn by the seed.")] = None,
    skip: Annotated[int, typer.Option(metavar="N", min=0, help="Leave out the first so many of the drawing.")] = 0,
    seed: Annotated[
        int, typer.Option(help="For the drawing, for when each session begins, for made-up traces, for intervals.")
    ] = 0,
    hours: Annotated[float, typer.Option(help="All sessions begin within so many hours, evenly.")] = 10.0,
    subs: Annotated[
        bool | None, typer.Option("--sub-agents/--no-sub-agents", help="Only with, or only without; both by default.")
    ] = None,
    hold: Annotated[
        bool, typer.Option("--hold", help="All of a prompt stays until the next, as in an engine; min is lower then.")
    ] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the hit rates; .svg, .png or .pdf.")] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Replay prompts of many sessions through a KV cache: hit rate, and regret to an optimum that knows the future.

    Example:

        kilburn lab kv --traces 20 --capacity 1000000
    """
    try:
        from kilburn_lab.evals.kv import CAPACITIES, POLICIES, evaluate, sample
        from kilburn_lab.evals.kv_report import draw
        from kilburn_lab.evals.kv_traces import read, synthetic
    except ModuleNotFoundError as error:
        raise MissingExtra(error.name or "kilburn_kv", "kv") from error
    check_outputs(csv, plot, force=force)
    every = synthetic(skip + (traces or MADE), seed) if data is None else read(data)
    chosen = sample(list(every), seed, traces, skip)
    with progress("replaying") as done:
        report = evaluate(
            chosen,
            capacities=capacity or CAPACITIES,
            hours=hours,
            seed=seed,
            subs=(True, False) if subs is None else (subs,),
            hold=hold,
            policies=policy or POLICIES,
            progress=done,
        )
    shown(report, json, csv, plot, draw, force=force)

"""`lab scale`: long-term memory with many facts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.scale import PEERS, evaluate
from kilburn_lab.evals.scale_report import draw

__all__ = ["scale"]


@lab.command()
def scale(
    count: Annotated[list[int] | None, typer.Option(min=1, help="Facts; may be given again. 10000 by default.")] = None,
    questions: Annotated[int, typer.Option(min=1, help="Questions to each system.")] = 200,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PYTHON", help=f"Also another system ({', '.join(PEERS)}), by a Python that has it."),
    ] = None,
    most: Annotated[int, typer.Option(min=1, help="Facts that another system gets at most.")] = 10_000,
    seed: Annotated[int, typer.Option(help="Of the facts and questions.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw times against facts; .svg, .png or .pdf.")] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure long-term memory with many facts: stored a second, time of a question, disk and memory.

    Beside Kilburn: SQLite's FTS5 with an exact scan of NumPy, and other systems where you name a Python that has them.

    Examples:

        kilburn lab scale --count 10000 --count 100000 --count 1000000

        kilburn lab scale --peer mem0=/tmp/peers/bin/python --peer langgraph=/tmp/peers/bin/python
    """
    check_outputs(csv, plot, force=force)
    named = [one.partition("=") for one in peer or ()]
    if wrong := [name for name, _, python in named if not python]:
        raise SpecError(f"--peer {wrong[0]}", advice="say which Python has it: NAME=PYTHON")
    with progress("storing and asking") as done:
        report = evaluate(
            count or [10_000],
            many=questions,
            seed=seed,
            peers={name: python for name, _, python in named},
            most=most,
            progress=done,
        )
    shown(report, json, csv, plot, draw, force=force)

"""`lab poisoning`: how often a planted statement comes back as a fact, with which defence, and what the defence costs."""

from __future__ import annotations

from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.poisoning import ATTACKS, DEFENCES, REPEATS, evaluate

__all__ = ["poisoning"]


@lab.command()
def poisoning(
    attack: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(ATTACKS)}; may be given again. All by default.")
    ] = None,
    defence: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(DEFENCES)}; may be given again. All by default.")
    ] = None,
    repeats: Annotated[int, typer.Option(metavar="N", min=1, help="Seeds of each attack.")] = REPEATS,
    seed: Annotated[int, typer.Option(help="The first of them.")] = 0,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Plant statements in pages, tool outputs and other users' queries, and look which come back as facts in force.

    Example:

        kilburn lab poisoning --repeats 5
    """
    check_outputs(csv, force=force)
    with progress("attacking") as done:
        report = evaluate(attack or tuple(ATTACKS), defences=defence or DEFENCES, repeats=repeats, seed=seed, progress=done)
    shown(report, json, csv, force=force)

"""`lab change`: what a memory says is true, now and at a time, after many changes of mind (E5)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import msgspec
import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.file import check_target, write_file
from kilburn.terminal import say
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.change import MODES, STREAMS, TOKENS, evaluate
from kilburn_lab.evals.streams import FAMILIES

__all__ = ["change"]


@lab.command()
def change(
    streams: Annotated[int, typer.Option(metavar="N", min=1, help="Made-up streams of statements.")] = STREAMS,
    mode: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"How the statements come: {', '.join(MODES)}; may be given again. Both by default."),
    ] = None,
    family: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help=f"Whose sentences: {', '.join(FAMILIES)}; may be given again. Both by default."),
    ] = None,
    policy: Annotated[str, typer.Option(metavar="SPEC", help="The memory policy that learns from text.")] = "plain",
    budget: Annotated[int, typer.Option(metavar="TOKENS", min=1, help="Of each answer.")] = TOKENS,
    seed: Annotated[int, typer.Option(help="The first seed of the streams.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write each question with its answer there, one a line.")
    ] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Change, correct, contradict, take back and forget facts, then ask what is true, and what was at a time.

    Example:

        kilburn lab change --streams 5
    """
    check_outputs(csv, force=force)
    if out is not None:
        check_target(out, force=force)
    with progress("telling") as done:
        report = evaluate(
            streams, seed=seed, modes=mode or MODES, families=family or FAMILIES, tokens=budget, policy=policy, progress=done
        )
    if out is not None:
        with write_file(out, force=force) as file:
            file.writelines(msgspec.json.encode(one) + b"\n" for one in report.asked)
        say(f"written: {out}")
    shown(report, json, csv, force=force)

"""`lab vectors`: what compression costs a search by meaning."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.vectors_report import draw

__all__ = ["vectors"]


@lab.command()
def vectors(
    data: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Passages in JSON lines, .gz too, or vectors in .npy; made-up ones where left out."),
    ] = None,
    count: Annotated[
        list[int] | None, typer.Option(help="Vectors; may be given again. 10000 and 100000 by default; 1000000 takes minutes.")
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help="Only this one, such as binary or 'pq(96)'; may be given again.")
    ] = None,
    embedder: Annotated[
        str, typer.Option(metavar="SPEC", help="Embeds passages and facts; minilm for passages by default.")
    ] = "",
    sample: Annotated[int, typer.Option(min=20, help="Passages of the file that are embedded.")] = 2000,
    queries: Annotated[int, typer.Option(min=1, help="Queries for each row.")] = 50,
    seed: Annotated[int, typer.Option(help="Of samples, made-up vectors and codecs.")] = 0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw recall against bytes and time: .svg, .png, .pdf.")
    ] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Compare ways to keep vectors: recall@10 against bytes and milliseconds.

    Examples:

        kilburn lab vectors

        kilburn lab vectors --data talks.jsonl.gz --count 10000 --count 1000000 --plot vectors.svg
    """
    check_outputs(csv, plot, force=force)
    from kilburn_lab.evals import vectors as module  # it needs NumPy, an extra

    with progress("measuring") as done:
        report = module.evaluate(
            data,
            counts=count or module.COUNTS,
            only=codec or (),
            embedder=embedder or None,
            sample=sample,
            queries=queries,
            seed=seed,
            progress=done,
        )
    shown(report, json, csv, plot, draw, force=force)

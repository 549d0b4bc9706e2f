"""`demo`: the main job on input that every machine has. The work is `kilburn.demo`'s; this is its verb."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.sawtooth import FORMATS, draw
from kilburn.cli.shell import Force, Json, app
from kilburn.demo.job import Plan, perform
from kilburn.demo.report import figures, show, watching
from kilburn.evals.picture import check_picture
from kilburn.terminal import emit, say

__all__ = ["demo"]

FEW, MANY = 40, 200


@app.command()
def demo(
    model: Annotated[
        str, typer.Option(metavar="none|smollm2|qwen|SPEC", help="Who folds and phrases a little of it.")
    ] = "smollm2",
    full: Annotated[
        bool, typer.Option("--full", help="The library's tests and applications too, 200 questions, more of the model.")
    ] = False,
    questions: Annotated[
        int | None, typer.Option(min=1, help="How many to ask; 40, or 200 with --full.", show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Which questions.")] = 0,
    window: Annotated[int, typer.Option(min=2000, help="Tokens of the window.")] = 8000,
    policy: Annotated[str, typer.Option(metavar="SPEC", help="What decides what leaves the window.")] = "hybrid",
    db: Annotated[
        Path | None,
        typer.Option("--db", metavar="FILE", help="Where the store is kept; a temporary folder by default.", show_default=False),
    ] = None,
    library: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Another tree of Python sources.", show_default=False)
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw tokens in the window over time: .png or .html.")] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """An agent reads the Python standard library, millions of tokens, in a small window; then it is asked for exact details.

    Exit status 0 only where no prompt overflowed, no byte was lost, and every question was answered exactly.

    Example:

        kilburn demo --model none --plot window.html
    """
    if plot is not None:
        check_picture(plot, force=force, formats=FORMATS)
    plan = Plan(
        db=str(db or Path(tempfile.mkdtemp(prefix="kilburn-demo-")) / "library.db"),
        library=str(library or ""),
        whole=full,
        window=window,
        policy=policy,
        questions=questions or (MANY if full else FEW),
        seed=seed,
        model=model,
        folds=8 if full else 3,
        phrases=12 if full else 4,
        seconds=None if full else 90.0,
    )
    with watching() as told:
        outcome = perform(plan, told)
    if json:
        emit(figures(outcome))
    else:
        show(outcome)
    if plot is not None:
        draw(
            plot,
            outcome.curve,
            window=outcome.capacity,
            title=f"Python {outcome.python}'s library through {window:,} tokens, {policy}",
            force=force,
        )
        say(f"drawn: {plot}")
    if not outcome.ok:
        raise typer.Exit(1)

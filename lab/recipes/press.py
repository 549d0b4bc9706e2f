"""What a model still knows, and how well it goes on, when its KV cache holds a part of the context.

    python lab/recipes/press.py --cases 8

Needs Kilburn with the extra "torch". docs/explanation/kv-press-curves.md has the figures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json, main
from kilburn.errors import MissingExtra, SpecError
from kilburn.models.weights import find
from kilburn.terminal import say, show
from kilburn.wire.recording import FORMS
from kilburn_lab.evals.trajectories import read
from kilburn_lab.picture import check_picture

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


def _listed(given: str, what: str) -> list[str]:
    """The parts of a list with commas; those inside of brackets do not part."""
    parts, depth = [""], 0
    for letter in given:
        depth += (letter == "(") - (letter == ")")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    found = [part.strip() for part in parts if part.strip()]
    if not found:
        raise SpecError(f"--{what} names nothing", advice="separate names or numbers with commas")
    return found


def _share(given: str) -> float:
    try:
        return float(given.removesuffix("%")) / 100
    except ValueError:
        raise SpecError(f"{given!r} is no budget", advice="give percentages: 100,50,25,12.5") from None


@app.command()
def press(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help=f"Recorded runs: {FORMS}; Python's docstrings where left out.")
    ] = None,
    cases: Annotated[int, typer.Option(metavar="N", min=1, help="Contexts, with one question each.")] = 48,
    seed: Annotated[int, typer.Option(help="For what contexts are made of.")] = 0,
    budgets: Annotated[
        str, typer.Option(metavar="LIST", help="Percentages of the tokens that stay, with commas between.")
    ] = "100,50,25,12.5",
    presses: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Presses, with commas; also summary, excerpts, untold (pages, told nothing). All by default.",
        ),
    ] = "",
    tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Of a context, about.")] = 1024,
    model: Annotated[str, typer.Option(metavar="NAME", help="smollm2, a GGUF file, or a folder of transformers.")] = "smollm2",
    threads: Annotated[int, typer.Option(min=0, help="Of torch; what it takes by itself where 0.")] = 0,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the curves; .svg, .png or .pdf.")] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Press the cache of a real model to a budget: which questions it still answers, and how well it goes on.

    Example:

        python lab/recipes/press.py --cases 8
        python lab/recipes/press.py --data runs.jsonl.gz --presses "window,pages" --budgets 50,25 --plot press.svg
    """
    if plot is not None:
        check_picture(plot, force=force)
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", "torch") from error
    from kilburn_kv.weights import load
    from press_curves.measurement import PRESSES, Setting, evaluate
    from press_curves.needles import library, passages_of
    from press_curves.report import draw

    setting = Setting(
        cases=cases,
        seed=seed,
        tokens=tokens,
        budgets=[_share(each) for each in _listed(budgets, "budgets")],
        presses=_listed(presses, "presses") if presses else PRESSES,
    )
    documents = library() if data is None else [found for run in read(data) if (found := passages_of(run))]
    if threads:
        torch.set_num_threads(threads)
    weights = load(model if Path(model).exists() else find(model))
    with progress("pressing", total=cases) as done:
        report = evaluate(weights, documents, setting, name=model, progress=done)
    show(report, json)
    if plot is not None:
        draw(plot, report, force=force)
        say(f"written: {plot}")


if __name__ == "__main__":
    sys.exit(main(commands=app, name="press.py"))

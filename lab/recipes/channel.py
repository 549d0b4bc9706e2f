"""What reaches an answer through a memento's keys and values, though its text says nothing of it.

    python lab/recipes/channel.py --save toys

Needs Kilburn with the extra "torch". docs/explanation/implicit-channel.md has the figures.
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

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.command()
def channel(
    seed: Annotated[int, typer.Option(min=0, help="For the toy's weights, and for all data.")] = 0,
    steps: Annotated[
        list[int] | None,
        typer.Option(metavar="N", help="Of training: once for all three stages, or three times. 200, 200 and 500 by default."),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", help="Questions that each figure is counted on.")] = 1000,
    save: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="Write the trained toys there, as transformers reads them.")
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Train nothing; ask this model (smollm2, or a path) about notes that are evicted.")
    ] = "",
    threads: Annotated[int, typer.Option(min=1, help="Of torch; at this size more of them often wait for each other.")] = 1,
    force: Force = False,
    json: Json = False,
) -> None:
    """Train a toy whose mementos keep what their text does not say, and see what survives eviction and a restart.

    Example:

        python lab/recipes/channel.py --save toys
        python lab/recipes/channel.py --model smollm2
    """
    try:
        import torch
    except ModuleNotFoundError as error:
        raise MissingExtra("torch", "torch") from error
    from implicit_channel.evicted import ask
    from implicit_channel.measurement import Setting, measure
    from kilburn_kv.weights import load

    torch.set_num_threads(threads)
    if model:
        if steps or save is not None:
            raise SpecError("--model trains nothing", advice="leave out --steps and --save")
        weights = load(model if Path(model).exists() else find(model))
        with progress("asking") as done:
            asked = ask(weights.model, weights.tokenizer, name=model, done=done)
        show(asked, json)
        return
    if steps is not None and len(steps) not in (1, 3):
        raise SpecError(f"--steps was given {len(steps)} times", advice="give it once, or once for each of the three stages")
    if save is not None and save.is_dir() and any(save.iterdir()) and not force:
        raise SpecError(f"{save} is not empty", advice="give another folder, or --force to write into this one")
    given = {"steps": tuple(steps * 3 if len(steps) == 1 else steps)} if steps else {}
    report = measure(Setting(seed=seed, samples=samples, **given), folder=save, heard=say)
    if save is not None:
        say(f"written: {save}")
    show(report, json)


if __name__ == "__main__":
    sys.exit(main(commands=app, name="channel.py"))

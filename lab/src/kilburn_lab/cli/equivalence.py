"""`lab equivalence`: how well a model foresees the agent's real next action, given what a policy shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn.terminal import say
from kilburn_lab.cli.evaluate import Csv, Data, check_outputs, lab, shown
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.equivalence import Forecast, evaluate, forecaster_of
from kilburn_lab.evals.sample import HALVES, sample_of
from kilburn_lab.evals.saved import SavedCells

__all__ = ["equivalence"]


@lab.command()
def equivalence(
    data: Data = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Tokens of four characters; may be given again. 1000, 2000 and 4000 by default.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=f"A policy or a baseline; may be given again. {', '.join(EVERYBODY)} by default."),
    ] = None,
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Weights that read: smollm2, qwen, a GGUF file or a folder of transformers.")
    ] = "smollm2",
    dtype: Annotated[str, typer.Option(help="Of the weights: bfloat16, or float32.")] = "bfloat16",
    steps: Annotated[int, typer.Option(min=1, help="Steps to draw among those that refer to older outputs.")] = 30,
    context: Annotated[
        int, typer.Option(min=1, metavar="TOKENS", help="Only steps whose whole history fits, in tokens of the model.")
    ] = 8192,
    half: Annotated[str, typer.Option(metavar="|".join(HALVES), help="Only the runs of this half; all by default.")] = "",
    reply: Annotated[
        bool, typer.Option("--reply", help="Foresee thought and action from what is shown before both, as real models write.")
    ] = False,
    tools: Annotated[
        bool, typer.Option("--tools", help="Tell actions and outputs as tool calls and results, for policies that act on those.")
    ] = False,
    sample: Annotated[int | None, typer.Option(min=1, help="Only the first so many runs.")] = None,
    seed: Annotated[int, typer.Option(help="For made-up runs, for the steps and for the intervals.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each forecast there when done.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Use what is in the file of --out; what a policy shows differently is read anew.")
    ] = False,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Let a model read what policies show: how well does it foresee what the agent really wrote next?

    It takes minutes: on a CPU, a model of 135 million parameters reads some hundred tokens a second. Set OMP_NUM_THREADS=1
    where the machine has other work.

    Examples:

        kilburn lab equivalence --sample 5 --steps 3 --window 500

        kilburn lab equivalence --data runs.jsonl.gz --half tune --reply --out forecasts.jsonl --resume
    """
    check_outputs(csv, force=force)
    if resume and out is None:
        raise SpecError("--resume without --out", advice="name the file to go on with")
    runs = sample_of(data, sample, tools=tools, reply=reply, half=half, seed=seed)
    forecaster = forecaster_of(model, dtype)
    saved = SavedCells(out, forecaster.name, Forecast, resume=resume, force=force) if out is not None else None
    with progress("reading") as done:
        report = evaluate(
            runs,
            forecaster,
            windows=window or (1000, 2000, 4000),
            policies=policy or EVERYBODY,
            steps=steps,
            context=context,
            model=f"{model}, {dtype}",
            progress=done,
            saved=saved,
        )
    if out is not None:
        say(f"written: {out}")
    shown(report, json, csv, force=force)

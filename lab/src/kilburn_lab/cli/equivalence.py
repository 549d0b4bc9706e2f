"""Let a model read what policies show: how well does it foresee what the agent really wrote next?

On a CPU, a model of 135 million parameters reads some hundred tokens a second, so only one step is read by default. Set
OMP_NUM_THREADS=1 where the machine has other work.

Examples:

    kilburn lab equivalence

    kilburn lab equivalence --data runs.jsonl.gz --half tune --reply --out forecasts.jsonl --resume
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kilburn_lab.cli.verbs import DATA, HALF, TOLD, WINDOWS, Option, Work, policies_of, saved_in, verb
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.equivalence import EquivalenceReport, Forecast, evaluate, forecaster_of
from kilburn_lab.evals.sample import sample_of


def _measured(
    *,
    data: Path | None = None,
    model: str = "smollm2",
    dtype: str = "bfloat16",
    half: str = "",
    reply: bool = False,
    tools: bool = False,
    sample: int | None = 20,
    seed: int = 0,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> EquivalenceReport:
    runs = sample_of(data, sample, tools=tools, reply=reply, half=half, seed=seed)
    forecaster = forecaster_of(model, dtype)
    saved = saved_in(out, forecaster.name, Forecast, resume=resume, force=force)
    return evaluate(runs, forecaster, model=f"{model}, {dtype}", saved=saved, **options)


verb(
    "equivalence",
    _measured,
    Work("reading", "forecast", 2.0, {"windows": (1000, 2000, 4000), "steps": 30, "sample": None}),
    __doc__,
    like=evaluate,
    data=DATA,
    windows=WINDOWS._replace(help="Tokens of four characters; may be given again. 1000 by default."),
    policies=policies_of(EVERYBODY),
    model=Option("Weights that read: smollm2, qwen, a GGUF file or a folder of transformers.", "NAME"),
    dtype=Option("Of the weights: bfloat16, or float32."),
    steps=Option("Steps to draw among those that refer to older outputs.", least=1),
    context=Option("Only steps whose whole history fits, in tokens of the model.", "TOKENS", least=1),
    half=HALF,
    reply=Option("Foresee thought and action from what is shown before both, as real models write."),
    tools=TOLD,
    sample=Option("Only the first so many runs.", least=1),
    seed=Option("For made-up runs, for the steps and for the intervals."),
    out=Option("Write each forecast there when done.", "FILE"),
    resume=Option("Use what is in the file of --out; what a policy shows differently is read anew."),
)

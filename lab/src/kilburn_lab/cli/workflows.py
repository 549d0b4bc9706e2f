"""Have an agent do a stream of errands in a small folder with a real shell, with and without workflows from earlier errands.

Examples:

    kilburn lab workflows

    kilburn lab workflows --sample 1 --errands 12 --judge true --json
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.workflows import ARMS, evaluate

verb(
    "workflows",
    evaluate,
    Work("doing errands", "errand", 0.045, {"streams": 10}),
    __doc__,
    arms=Option(f"Who judges: {', '.join(ARMS)}; may be given again. All by default.", "NAME", "--judge"),
    streams=Option("Worlds, each with its own errands.", "N", "--sample", least=1),
    errands=Option("Errands per world: a third simple, a third of two parts, a third of three.", "N", least=3),
    limit=Option("Maximum steps per errand.", "STEPS", least=1),
    lies=Option("Percentage of verdicts that the judge `lying` reverses.", "N", least=0),
    half=Option("Half of the wordings of the errands.", "|".join(HALVES)),
    seed=Option("First random seed."),
)

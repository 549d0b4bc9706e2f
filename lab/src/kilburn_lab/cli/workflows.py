"""Have an agent do a stream of errands in a small folder with a real shell, with and without workflows from those before.

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
    streams=Option("Worlds, each with errands of its own.", "N", "--sample", least=1),
    errands=Option("Of a stream: a third simple, a third of two parts, a third of three.", "N", least=3),
    limit=Option("Steps of an errand, at most.", "STEPS", least=1),
    lies=Option("Of a hundred verdicts, those in which the judge `lying` says the opposite.", "N", least=0),
    half=Option("Whose wordings the errands have.", "|".join(HALVES)),
    seed=Option("The first seed."),
)

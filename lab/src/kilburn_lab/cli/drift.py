"""Plant facts and rules, compact repeatedly, and count those that remain word for word.

Examples:

    kilburn lab drift

    kilburn lab drift --policy summarize --policy recursive --arm plain --model smollm2
"""

from __future__ import annotations

from kilburn.cli.model_loading import open_model
from kilburn_lab.cli.verbs import DATA, Option, Work, verb
from kilburn_lab.evals.drift import POLICIES, evaluate
from kilburn_lab.evals.plants import ARMS

verb(
    "drift",
    evaluate,
    Work("compacting", "trial", 0.34, {"replicates": 20}),
    __doc__,
    policies=Option(f"A policy; may be given again. {', '.join(POLICIES)} by default.", "SPEC", "--policy"),
    arms=Option(f"Where the rules stand: {', '.join(ARMS)}; may be given again. All by default.", "NAME", "--arm"),
    window=Option("Tokens of four characters."),
    passes=Option("Measure after this many compactions; may be repeated. 1, 5 and 20 by default.", "N"),
    replicates=Option("Seeds per policy and arm.", "N", "--sample", least=1),
    data=DATA,
    model=Option("Also measure policies that can ask a model with this model.", "SPEC", kind=str | None, by=open_model),
    seed=Option("First random seed, also of the intervals."),
)

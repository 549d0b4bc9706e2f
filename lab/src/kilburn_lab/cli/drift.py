"""Plant facts and rules, compact again and again, and look what is left of them, word for word.

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
    passes=Option("Look after so many compactions; may be given again. 1, 5 and 20 by default.", "N"),
    replicates=Option("Seeds a policy and arm.", "N", "--sample", least=1),
    data=DATA,
    model=Option("Measure policies that can ask a model once more, with this one.", "SPEC", kind=str | None, by=open_model),
    seed=Option("The first seed; for the intervals too."),
)

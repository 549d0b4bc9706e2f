"""Give an agent feedback on a task with a hidden rule, count its right answers after each so many, and forget the feedback.

Examples:

    kilburn lab guidelines

    kilburn lab guidelines --sample 2 --feedback 4 --tickets 10 --json
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.guidelines import ARMS, evaluate
from kilburn_lab.evals.sample import HALVES

verb(
    "guidelines",
    evaluate,
    Work("giving feedback", "rule", 1.3, {"rules": 10}),
    __doc__,
    arms=Option(f"What stands in the prompt: {', '.join(ARMS)}; may be given again. All by default.", "NAME", "--shown"),
    rules=Option("Hidden rules.", "N", "--sample", least=1),
    feedback=Option("That is given by each rule, at most.", "N", least=1),
    tickets=Option("That are answered each time.", "N", least=1),
    half=Option("Whose wordings tickets and feedback have.", "|".join(HALVES)),
    seed=Option("The first seed."),
)

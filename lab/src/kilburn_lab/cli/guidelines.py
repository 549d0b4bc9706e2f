"""Give an agent feedback on a task with a hidden rule, count its right answers at intervals, and forget the feedback.

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
    rules=Option("Number of hidden rules.", "N", "--sample", least=1),
    feedback=Option("Maximum feedback per rule.", "N", least=1),
    tickets=Option("Tickets per count.", "N", least=1),
    half=Option("Half of the wordings of tickets and feedback.", "|".join(HALVES)),
    seed=Option("First random seed."),
)

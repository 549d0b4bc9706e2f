"""Check the common requests of users of compactors for each policy: orders stay, edits pay, no loops.

Example:

    kilburn lab pleas --policy hybrid --policy fifo
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, policies_of, verb
from kilburn_lab.evals.pleas import POLICIES, WAYS, pleas

verb(
    "pleas",
    pleas,
    Work("working", "trial", 2.0, {"policies": None}),
    __doc__,
    policies=policies_of(POLICIES),
    windows=Option("Tokens of four characters; may be given again. 4000 by default.", name="--window"),
    ways=Option(f"What a model does that is of no use: {', '.join(WAYS)}; may be given again. All by default.", "NAME", "--way"),
    seed=Option("Random seed of the day."),
)

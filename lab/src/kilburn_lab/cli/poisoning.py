"""Plant statements in pages, tool outputs and other users' queries, and look which come back as facts in force.

Example:

    kilburn lab poisoning
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, verb
from kilburn_lab.evals.poisoning import ATTACKS, DEFENCES, evaluate

verb(
    "poisoning",
    evaluate,
    "attacking",
    __doc__,
    unit="attack",
    cost=0.015,
    full={"repeats": 20},
    attacks=Option(f"{', '.join(ATTACKS)}; may be given again. All by default.", "NAME", "--attack"),
    defences=Option(f"{', '.join(DEFENCES)}; may be given again. All by default.", "NAME", "--defence"),
    repeats=Option("Seeds of each attack.", "N", "--sample", least=1),
    seed=Option("The first of them."),
)

"""Plant statements in pages, tool outputs and other users' queries, and count those that become facts in force.

Example:

    kilburn lab poisoning
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.poisoning import ATTACKS, DEFENCES, evaluate

verb(
    "poisoning",
    evaluate,
    Work("attacking", "attack", 0.03, {"repeats": 20}),
    __doc__,
    attacks=Option(f"{', '.join(ATTACKS)}; may be given again. All by default.", "NAME", "--attack"),
    defences=Option(f"{', '.join(DEFENCES)}; may be given again. All by default.", "NAME", "--defence"),
    repeats=Option("Seeds of each attack.", "N", "--sample", least=1),
    seed=Option("First random seed."),
)

"""Ask for sums of earlier statements, with and without a note that is updated between questions (sleep-time compute).

Example:

    kilburn lab sleep
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.sleeping import WAYS, sleeping

verb(
    "sleep",
    sleeping,
    Work("asking", "conversation", 0.2, {"talks": 10}),
    __doc__,
    ways=Option(f"{', '.join(WAYS)}; may be given again. Both by default.", "NAME", "--way"),
    talks=Option("Conversations.", "N", "--sample", least=1),
    bills=Option("Sentences per conversation.", "N", least=1),
    window=Option("Tokens of the window.", "N", least=500),
    seed=Option("Random seed of the sentences."),
)

"""Ask for sums of what was said, with and without a note that was kept while nobody asked (sleep-time compute).

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
    bills=Option("Sentences of each.", "N", least=1),
    window=Option("Tokens.", "N", least=500),
    seed=Option("Of what is said."),
)

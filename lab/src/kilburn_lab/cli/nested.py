"""Ask for values at the end of chains of keys (MemGPT's nested key-value task), with and without memory.

Example:

    kilburn lab nested
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.nested import WAYS, nested

verb(
    "nested",
    nested,
    Work("asking", "order", 0.25, {"orderings": 30}),
    __doc__,
    ways=Option(f"{', '.join(WAYS)}; may be given again. All by default.", "NAME", "--way"),
    hops=Option("How often a value is a key again; may be given again. 0 to 4 by default.", "N"),
    orderings=Option("Orders of the pairs.", "N", "--sample", least=1),
    pairs=Option("Keys with their values.", "N", least=1),
    window=Option("Tokens, for all ways but `whole`.", "N", least=500),
    policy=Option("What decides at the window.", "SPEC"),
    model=Option("Who answers, such as local('smollm2'); a scripted model by default.", "SPEC"),
    seed=Option("Of the keys and their orders."),
)

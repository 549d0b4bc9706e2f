"""Compare eviction strategies: utilisation, latency, accuracy and overflow over many made-up sessions.

Examples:

    kilburn lab table

    kilburn lab table --sample 10 --policy lru --policy importance --policy tiered --policy hybrid
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.table import evaluate

verb(
    "table",
    evaluate,
    Work("streaming", "session", 0.18, {"count": 200}),
    __doc__,
    policies=Option("A policy; may be given again. All that ship by default.", "SPEC", "--policy"),
    count=Option("How many sessions.", name="--sample", least=1),
    interactions=Option("Of each session.", least=1),
    window=Option("Tokens of four characters."),
    seed=Option("Of the sessions and of the intervals."),
)

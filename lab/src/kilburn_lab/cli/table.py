"""Compare eviction strategies: utilisation, latency, accuracy and overflow over many synthetic sessions.

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
    policies=Option("A policy; may be repeated. By default all that ship.", "SPEC", "--policy"),
    count=Option("Number of sessions.", name="--sample", least=1),
    interactions=Option("Interactions per session.", least=1),
    window=Option("Tokens of four characters."),
    seed=Option("Random seed of sessions and intervals."),
)

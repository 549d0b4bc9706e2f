"""Compare eviction strategies: utilisation, latency, accuracy and overflow over many made-up sessions.

Examples:

    kilburn lab table

    kilburn lab table --sample 10 --policy lru --policy importance --policy tiered --policy hybrid
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, verb
from kilburn_lab.evals.table import evaluate
from kilburn_lab.evals.table_report import draw

verb(
    "table",
    evaluate,
    "streaming",
    __doc__,
    draw,
    "accuracy and utilisation",
    unit="session",
    cost=0.18,
    full={"count": 200},
    policies=Option("A policy; may be given again. All that ship by default.", "SPEC", "--policy"),
    count=Option("How many sessions.", name="--sample", least=1),
    interactions=Option("Of each session.", least=1),
    window=Option("Tokens of four characters."),
    workers=Option("Sessions to spread the work over.", least=1),
    seed=Option("Of the sessions and of the intervals."),
)

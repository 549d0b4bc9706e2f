"""Measure long-term memory with many facts: facts stored per second, time of a question, disk and memory.

Compares SQLite's FTS5 with an exact NumPy scan, and other systems for which you name a Python that has them installed.

Examples:

    kilburn lab scale --count 10000 --count 100000 --count 1000000

    kilburn lab scale --peer mem0=/tmp/peers/bin/python --peer langgraph=/tmp/peers/bin/python
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import Option, Work, peers_of, verb
from kilburn_lab.evals.scale import PEERS, evaluate

verb(
    "scale",
    evaluate,
    Work("storing and asking", "fact", 0.0007, {"counts": (1000, 10_000, 100_000, 1_000_000)}),
    __doc__,
    counts=Option("Facts; may be given again. 5000 by default.", name="--count", least=1),
    many=Option("Questions per system.", name="--questions", least=1),
    peers=Option(
        f"Also another system ({', '.join(PEERS)}), by a Python that has it.",
        "NAME=PYTHON",
        "--peer",
        kind=list[str] | None,
        by=peers_of,
    ),
    seed=Option("Random seed of facts and questions."),
)

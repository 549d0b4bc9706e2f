"""Measure recursive models by aggregation and pairs on texts beyond any window, and compare truncation and search.

Labels are an oracle's, and the root is a program: the system is measured, not a model. --model and --sub-model put a
real one in either place. Then each question has limits of calls, tokens and seconds.

Examples:

    kilburn lab recursion

    kilburn lab recursion --tokens 24000 --tokens 1000000 --judged 50 --judged 100
"""

from __future__ import annotations

from typing import Any

import msgspec

from kilburn.agents.loop import UNLIMITED, Limits
from kilburn.cli.model_loading import open_model
from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.aggregation import TASKS
from kilburn_lab.evals.recursion import SYSTEMS, RecursionReport, evaluate


def _measured(
    *,
    model: str = "",
    sub: str = "",
    steps: int = 8,
    reply: int = 1024,
    **options: Any,
) -> RecursionReport:
    # The program and the oracle cost nothing.
    usual = Limits() if model or sub else UNLIMITED
    limits = msgspec.structs.replace(usual, steps=steps, reply=reply)
    return evaluate(model=open_model(model or None), sub=open_model(sub or None), limits=limits, **options)


verb(
    "recursion",
    _measured,
    Work("asking", "question", 0.08, {"tokens": (24_000, 131_000), "count": 3}),
    __doc__,
    like=evaluate,
    tokens=Option("Sizes of the texts; may be given again. 24000 by default.", least=100),
    systems=Option(f"{', '.join(SYSTEMS)}; may be given again. All by default.", "NAME", "--system"),
    tasks=Option(f"{', '.join(TASKS)}; may be given again. All by default.", "NAME", "--task"),
    judged=Option("Also judge all pairs of this many reports, one by one.", "N", least=2),
    window=Option("Tokens of four characters.", least=2000),
    batch=Option("Items per sub-call.", least=1),
    count=Option("Texts of each size.", "N", "--sample", least=1),
    model=Option("Model of the root; by default a program without errors.", "SPEC"),
    sub=Option("Model of sub-calls; by default an oracle.", "SPEC", "--sub-model"),
    steps=Option("Maximum replies of the root per question.", least=0),
    reply=Option("Maximum tokens of a reply.", least=1),
    tools=Option("Offer the root tools.", name="--tools/--no-tools"),
    sandbox=Option("Sandbox of the code.", "NAME"),
    seed=Option("Random seed of texts and questions."),
)

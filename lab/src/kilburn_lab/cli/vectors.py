"""Compare ways to keep vectors: recall@10 against bytes and milliseconds.

Examples:

    kilburn lab vectors

    kilburn lab vectors --data talks.jsonl.gz --count 10000 --count 1000000 --plot vectors.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilburn_lab.cli.verbs import Option, verb
from kilburn_lab.evals.vectors_report import VectorsReport, draw


def _measured(
    data: Path | None = None,
    *,
    counts: Sequence[int] = (10_000,),
    codecs: Sequence[str] = (),
    embedder: str = "",
    sample: int = 2000,
    queries: int = 50,
    seed: int = 0,
    **options: Any,
) -> VectorsReport:
    from kilburn_lab.evals import vectors as module  # it needs NumPy, an extra

    return module.evaluate(
        data,
        counts=counts,
        only=codecs,
        embedder=embedder or None,
        sample=sample,
        queries=queries,
        seed=seed,
        **options,
    )


verb(
    "vectors",
    _measured,
    "measuring",
    __doc__,
    draw,
    "recall against bytes and time",
    unit="codec",
    cost=5.0,
    full={"counts": (10_000, 100_000)},
    data=Option("Passages in JSON lines, .gz too, or vectors in .npy; made-up ones where left out.", "FILE"),
    counts=Option("Vectors; may be given again. 10000 by default; 1000000 takes minutes.", name="--count"),
    codecs=Option("Only this one, such as binary or 'pq(96)'; may be given again.", "NAME", "--codec"),
    embedder=Option("Embeds passages and facts; minilm for passages by default.", "SPEC"),
    sample=Option("Passages of the file that are embedded.", least=20),
    queries=Option("Queries for each row.", least=1),
    seed=Option("Of samples, made-up vectors and codecs."),
)

"""Compare ways to keep vectors: recall@10 against bytes and milliseconds.

Examples:

    kilburn lab vectors

    kilburn lab vectors --data talks.jsonl.gz --count 10000 --count 1000000 --plot vectors.svg
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.vectors_report import VectorsReport, draw


def _measured(data: Path | None = None, *, codecs: Sequence[str] | None, embedder: str, **options: Any) -> VectorsReport:
    from kilburn_lab.evals.vectors import evaluate  # it needs NumPy, an extra

    return evaluate(data, only=codecs or (), embedder=embedder or None, **options)


verb(
    "vectors",
    _measured,
    Work("measuring", "codec", 3.0, {"counts": (10_000, 100_000)}),
    __doc__,
    draw,
    "recall against bytes and time",
    data=Option("Passages in JSON lines, .gz too, or vectors in .npy; made-up ones where left out.", "FILE"),
    counts=Option(
        "Vectors; may be given again. 10000 by default; 1000000 takes minutes.",
        name="--count",
        kind=list[int] | None,
        default=None,
    ),
    codecs=Option(
        "Only this one, such as binary or 'pq(96)'; may be given again.", "NAME", "--codec", kind=list[str] | None, default=None
    ),
    embedder=Option("Embeds passages and facts; minilm for passages by default.", "SPEC", kind=str, default=""),
    sample=Option("Passages of the file that are embedded.", least=20, kind=int, default=2000),
    queries=Option("Queries for each row.", least=1, kind=int, default=50),
    seed=Option("Of samples, made-up vectors and codecs.", kind=int, default=0),
)

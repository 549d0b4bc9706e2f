"""Search old conversations for the messages that answer questions about them.

A line of the file is `{"name", "docs": [{"id", "text", "speaker", "session", "time"}], "queries": [{"id", "text",
"gold", "category"}]}`. The rankings are written before any answer is read. Beside the ranking stand `words` and
`floor` (SQLite's FTS5, and NumPy where there is an embedder), in files of their own beside FILE. Without the extra
`embed`, or without its model (`kilburn models pull minilm`), it is searched by words alone, and said so.

Examples:

    kilburn lab recall --out rankings.jsonl

    kilburn lab recall --data locomo.jsonl.gz --out rankings.jsonl
"""

from __future__ import annotations

from itertools import count, islice
from pathlib import Path
from typing import Any

from kilburn.errors import KilburnError
from kilburn.kernel.resolve import resolve
from kilburn.terminal import line, say
from kilburn_lab.cli.verbs import Option, Work, verb
from kilburn_lab.evals.corpora import answers_of, corpora, renamed, synthetic
from kilburn_lab.evals.measure import Progress, unwatched
from kilburn_lab.evals.recall import FLOOR, rank, written
from kilburn_lab.evals.recall_report import RecallReport, read_rows, report


def _measured(
    *,
    rankings: Path,
    data: Path | None = None,
    budget: int = 4000,
    ranking: str = "blend",
    embedder: str = "auto",
    rename: int | None = None,
    sample: int | None = 5,
    seed: int = 0,
    progress: Progress = unwatched,
) -> RecallReport:
    made = embedder_of(embedder)
    known = list(islice(corpora(data), sample)) if data is not None else synthetic(seed)[0][:sample]
    asked = known if rename is None else [renamed(corpus, rename) for corpus in known]
    names = (ranking, "words", FLOOR)
    paths = {name: rankings if name == ranking else rankings.with_name(f"{rankings.name}.{name}") for name in names}
    finished, total = count(1), len(names) * len(asked)
    progress(0, total)
    for name, path in paths.items():
        lines = rank(asked, ranking=name, embedder=made, budget=budget, finished=lambda: progress(next(finished), total))
        written(lines, path)
    answers = answers_of(data) if data is not None else synthetic(seed)[1]
    return report({name: read_rows(path) for name, path in paths.items()}, answers, seed)


def embedder_of(spec: str) -> Any:
    """Return the embedder of a spec; of "auto" `minilm`, or None if this machine has not got it."""
    if spec != "auto":
        return None if spec == "none" else resolve("search.embedders", spec)
    try:
        return resolve("search.embedders", "minilm")
    except KilburnError as error:
        say(line(f"searched by words alone: {error}"))
        return None


verb(
    "recall",
    _measured,
    Work("searching", "conversation", 0.15, {"sample": None}),
    __doc__,
    rankings=Option("Write the rankings to this file, one JSON line per question.", "FILE", "--out"),
    data=Option("Conversations, one per line, also .gz; by default synthetic.", "FILE"),
    budget=Option("Maximum tokens of the hits, of four characters.", least=100),
    ranking=Option("blend, words, meaning, blend(near=0), ...", "SPEC"),
    embedder=Option("minilm, hashing, ...; none to search by words only.", "SPEC"),
    rename=Option("Rename all people and places; the scores should stay.", "SEED"),
    sample=Option("Only this many conversations, the first ones.", "N", least=1),
    seed=Option("Random seed of synthetic conversations and intervals."),
)

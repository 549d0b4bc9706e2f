"""Ask people's questions about old conversations, and count the answering turns that the window shows.

A line of the file is as for `kilburn lab recall`: LoCoMo and BEAM are public data of this kind. A conversation is told turn by
turn; then each question is asked in a copy of the session. Beside the policies stand the newest text, half of it with a search
by BM25 over all older turns or passages, the full history, and one search of the session alone.

Examples:

    kilburn lab natural --policy hybrid

    kilburn lab natural --data locomo.jsonl.gz --window 2000 --window 8000 --embedder none --plot natural.svg
"""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

from kilburn_lab.cli.retrieval import embedder_of
from kilburn_lab.cli.verbs import WINDOWS, Option, Work, policies_of, verb
from kilburn_lab.evals.corpora import answers_of, corpora, synthetic
from kilburn_lab.evals.natural import POLICIES, NaturalReport, evaluate

CONVERSATIONS, SESSIONS = 3, 100
"""Of made-up data: so many are longer than a window of 4,000 tokens."""


def _measured(
    *,
    data: Path | None = None,
    embedder: str = "auto",
    conversations: int | None = 3,
    sample: int | None = 40,
    seed: int = 0,
    **options: Any,
) -> NaturalReport:
    talks, answers = (list(corpora(data)), answers_of(data)) if data is not None else synthetic(seed, CONVERSATIONS, SESSIONS)
    talks = list(islice(talks, conversations))
    return evaluate(talks, answers, embedder=embedder_of(embedder), sample=sample, seed=seed, **options)


verb(
    "natural",
    _measured,
    Work("asking", "turn", 0.002, {"windows": (2000, 4000, 8000), "conversations": None, "sample": None}),
    __doc__,
    like=evaluate,
    data=Option("Conversations, one per line, also .gz; by default synthetic.", "FILE"),
    policies=policies_of(POLICIES),
    windows=WINDOWS._replace(help="Tokens of four characters; may be given again. 4000 by default."),
    embedder=Option("minilm, hashing, ...; none to search by words only.", "SPEC"),
    conversations=Option("Only this many conversations, the first ones.", "N", least=1),
    sample=Option("Only this many questions per conversation, chosen at random.", "N", least=1),
    worth="shown",
    seed=Option("Random seed of synthetic conversations, chosen questions and intervals."),
)

"""Ask for exact facts at the end of sessions, and count the right answers from what the window shows.

Examples:

    kilburn lab answers --window 2000 --policy hybrid --policy cost

    kilburn lab answers --data runs.jsonl.gz --model qwen --sample 12 --questions 3 --tools --out replies.jsonl --resume
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kilburn_lab.cli.verbs import DATA, HALF, PAUSE, READER, SOURCES, WINDOWS, WRITER, Option, Work, policies_of, saved_in, verb
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.answers import AnswerReport, SavedReply, evaluate
from kilburn_lab.evals.readers import ExactReader, reader_of


def _measured(
    *,
    model: str = ExactReader.name,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> AnswerReport:
    reader = reader_of(model)
    return evaluate(reader=reader, saved=saved_in(out, reader.name, SavedReply, resume=resume, force=force), **options)


verb(
    "answers",
    _measured,
    Work("asking", "question", 0.03, {"sessions": 40}),
    __doc__,
    like=evaluate,
    data=DATA,
    sources=SOURCES,
    logs=Option("Test logs, *.log or *.log.gz; parts of them are planted.", "DIR"),
    policies=policies_of(EVERYBODY),
    windows=WINDOWS,
    sessions=Option("Number of sessions.", name="--sample", least=1),
    questions=Option("Questions per session; each is asked separately.", least=1),
    tokens=Option("Tokens of a session.", least=1),
    half=HALF._replace(help="Only the sessions of this half; all by default."),
    model=READER,
    tools=Option("Let the reader call recall and search_memory, which baselines lack."),
    swap=Option("Ask each session the questions of another: a measure of chance."),
    writer=WRITER,
    pause=PAUSE,
    seed=Option("Random seed of sessions, questions and intervals."),
    out=Option("Write each reply to this file at once.", "FILE"),
    resume=Option("Reuse the replies in the file of --out for equal prompts."),
)

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
    logs=Option("Logs of tests, *.log or *.log.gz, of which parts are planted.", "DIR"),
    policies=policies_of(EVERYBODY),
    windows=WINDOWS,
    sessions=Option("How many sessions.", name="--sample", least=1),
    questions=Option("How many on each; each is asked of the session by itself.", least=1),
    tokens=Option("Of a session.", least=1),
    half=HALF._replace(help="Only the sessions of this half; all by default."),
    model=READER,
    tools=Option("The reader may call recall and search_memory, which baselines do not have."),
    swap=Option("Ask each session the questions of another one: only chance is left."),
    writer=WRITER,
    pause=PAUSE,
    seed=Option("Of sessions, questions and intervals."),
    out=Option("Write each reply there when it is made.", "FILE"),
    resume=Option("Use the replies in the file of --out; what a policy shows differently is read anew."),
)

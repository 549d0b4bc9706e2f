"""Ask for exact facts at the end of sessions, and count the right answers from what the window shows.

Examples:

    kilburn lab answers --window 2000 --policy hybrid --policy cost

    kilburn lab answers --chat 200 --window 2000 --policy hybrid --policy cost

    kilburn lab answers --data runs.jsonl.gz --model qwen --sample 12 --questions 3 --tools --out replies.jsonl --resume
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kilburn.errors import SpecError
from kilburn_lab.cli.verbs import DATA, HALF, PAUSE, SOURCES, WINDOWS, WRITER, Option, Work, policies_of, saved_in, verb
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.answers import SavedReply, evaluate
from kilburn_lab.evals.chat import evaluate as chatting
from kilburn_lab.evals.readers import ExactReader, reader_of
from kilburn_lab.evals.report import EvalReport


def _measured(
    *,
    model: str = ExactReader.name,
    chat: int = 0,
    out: Path | None = None,
    resume: bool = False,
    force: bool = False,
    **options: Any,
) -> EvalReport:
    reader = reader_of(model)
    if chat:
        wrong = [name for name in ("data", "sources", "logs", "half", "tools", "swap", "writer") if options.pop(name, None)]
        if wrong or out is not None:
            raise SpecError(f"--chat with --{(*wrong, 'out')[0]}", advice="a chat is made up, and no reply of it is kept")
        taken = {name: value for name, value in options.items() if name not in ("sessions", "questions", "tokens")}
        return chatting(chat, reader=reader, **taken)
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
    chat=Option("Ask in a chat of so many short questions and answers; the window is 8000 by default.", "LENGTH", least=0),
    sessions=Option("How many sessions.", name="--sample", least=1),
    questions=Option("How many on each; each is asked of the session by itself.", least=1),
    tokens=Option("Of a session.", least=1),
    half=HALF._replace(help="Only the sessions of this half; all by default."),
    model=Option("Who answers: no model, weights that run here, or a model's spec.", "exact|qwen|smollm2|SPEC"),
    tools=Option("The reader may call recall and search_memory, which baselines do not have."),
    swap=Option("Ask each session the questions of another one: only chance is left."),
    writer=WRITER,
    pause=PAUSE,
    seed=Option("Of sessions, questions and intervals."),
    out=Option("Write each reply there when it is made.", "FILE"),
    resume=Option("Use the replies in the file of --out; what a policy shows differently is read anew."),
)

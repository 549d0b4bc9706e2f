"""Let a scripted agent work in real source files, when it knows only what its window shows.

Examples:

    kilburn lab tasks

    kilburn lab tasks --search --window 2000 --policy hybrid --policy cost

    kilburn lab tasks --sample 4 --window 1000 --policy cost --model 'local("qwen", context=16384)'
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import WINDOWS, WRITER, Option, Work, policies_of, verb
from kilburn_lab.evals.acting import EVERYBODY, evaluate

verb(
    "tasks",
    evaluate,
    Work("working", "task", 0.08, {"count": 32}),
    __doc__,
    policies=policies_of(EVERYBODY),
    windows=WINDOWS,
    count=Option("How many tasks.", name="--sample", least=1),
    search=Option("The agent may search its memory, which the baselines do not have."),
    tools=Option("Tell actions and outputs as tool calls and results; the user's words then stay."),
    patience=Option("What the agent does again in one task before it gives up.", least=0),
    model=Option("A model that decides in place of the script; it reads the window.", "SPEC", kind=str, default=""),
    writer=WRITER,
    sources=Option("Make the tasks from C headers, such as those of /usr/include.", "DIR"),
    worth="solved",
    seed=Option("Of the tasks and of the intervals."),
)

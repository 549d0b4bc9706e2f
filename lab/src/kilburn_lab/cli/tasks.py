"""Let a scripted agent that knows only its window work in real source files.

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
    count=Option("Number of tasks.", name="--sample", least=1),
    search=Option("Let the agent search its memory, which baselines lack."),
    tools=Option("Present actions and outputs as tool calls and results; the user's words then stay."),
    patience=Option("Maximum repeated actions per task.", least=0),
    model=Option("Let this model decide in place of the script.", "SPEC", kind=str, default=""),
    writer=WRITER,
    sources=Option("Make the tasks from C headers, such as those of /usr/include.", "DIR"),
    worth="solved",
    seed=Option("Random seed of tasks and intervals."),
)

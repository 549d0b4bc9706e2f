"""Ask about earlier messages in a long chat of short questions and answers, and count the right answers from the window.

Example:

    kilburn lab chat --window 2000 --policy hybrid --policy cost
"""

from __future__ import annotations

from kilburn_lab.cli.verbs import PAUSE, READER, WINDOWS, Option, Work, policies_of, verb
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.chat import LENGTH, evaluate
from kilburn_lab.evals.readers import ExactReader, reader_of

verb(
    "chat",
    evaluate,
    Work("chatting", "exchange", 0.002, {"length": LENGTH}),
    __doc__,
    policies=policies_of(EVERYBODY),
    windows=WINDOWS._replace(help="Tokens of four characters; may be given again. 8000 by default."),
    length=Option("Questions and answers of the chat.", "N", "--sample", least=1),
    reader=READER._replace(name="--model", kind=str, default=ExactReader.name, by=reader_of),
    pause=PAUSE,
    seed=Option("Random seed of the chat and the intervals."),
)

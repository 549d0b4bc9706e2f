"""`lab answers`: whether questions on a session are answered right from what the window shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn.terminal import say
from kilburn_lab.cli.evaluate import Csv, Data, check_outputs, lab, shown
from kilburn_lab.evals.acting import EVERYBODY
from kilburn_lab.evals.answers import SavedReply, evaluate
from kilburn_lab.evals.questions import TOKENS
from kilburn_lab.evals.readers import ExactReader, reader_of
from kilburn_lab.evals.sample import HALVES
from kilburn_lab.evals.saved import SavedCells

__all__ = ["answers"]


@lab.command()
def answers(
    data: Data = None,
    logs: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Logs of tests, *.log or *.log.gz, of which parts are planted.")
    ] = None,
    policy: Annotated[
        list[str] | None,
        typer.Option(metavar="SPEC", help=f"A policy or a baseline; may be given again. {', '.join(EVERYBODY)} by default."),
    ] = None,
    window: Annotated[
        list[int] | None, typer.Option(help="Tokens of four characters; may be given again. 1000, 2000 and 4000 by default.")
    ] = None,
    sessions: Annotated[int, typer.Option(min=1, help="How many sessions.")] = 40,
    questions: Annotated[int, typer.Option(min=1, help="How many on each; each is asked of the session by itself.")] = 6,
    tokens: Annotated[int, typer.Option(min=1, help="Of a session.")] = TOKENS,
    half: Annotated[str, typer.Option(metavar="|".join(HALVES), help="Only the sessions of this half; all by default.")] = "",
    model: Annotated[
        str,
        typer.Option(metavar="exact|qwen|smollm2|SPEC", help="Who answers: no model, weights that run here, or a model's spec."),
    ] = ExactReader.name,
    tools: Annotated[
        bool, typer.Option("--tools", help="The reader may call recall and search_memory, which baselines do not have.")
    ] = False,
    swap: Annotated[
        bool, typer.Option("--swap", help="Ask each session the questions of another one: only chance is left.")
    ] = False,
    writer: Annotated[
        str,
        typer.Option(metavar="SPEC", help="A model that answers the policies' questions; each that can ask has a second row."),
    ] = "",
    seed: Annotated[int, typer.Option(help="Of sessions, questions and intervals.")] = 0,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write each reply there when it is made.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Use the replies in the file of --out; what a policy shows differently is read anew.")
    ] = False,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Ask for exact facts at the end of sessions, and count the right answers from what the window shows.

    Examples:

        kilburn lab answers --window 2000 --policy hybrid --policy cost

        kilburn lab answers --data runs.jsonl.gz --model qwen --sessions 12 --questions 3 --tools --out replies.jsonl --resume
    """
    check_outputs(csv, force=force)
    if resume and out is None:
        raise SpecError("--resume without --out", advice="name the file to go on with")
    reader = reader_of(model)
    saved = SavedCells(out, reader.name, SavedReply, resume=resume, force=force) if out is not None else None
    with progress("asking") as done:
        report = evaluate(
            sessions,
            questions,
            windows=window or (1000, 2000, 4000),
            policies=policy or EVERYBODY,
            reader=reader,
            tools=tools,
            swap=swap,
            writer=writer,
            data=data,
            logs=logs,
            tokens=tokens,
            half=half,
            seed=seed,
            progress=done,
            saved=saved,
        )
    if out is not None:
        say(f"written: {out}")
    shown(report, json, csv, force=force)

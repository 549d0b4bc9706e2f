"""`eval answers`: whether questions on a session are answered right from what the window shows."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.evaluate import evals
from kilburn.cli.screen import progress
from kilburn.cli.shell import Json
from kilburn.evals.acting import EVERYBODY
from kilburn.evals.answers import evaluate
from kilburn.evals.questions import HALVES, TOKENS
from kilburn.terminal import show

__all__ = ["answers"]


@evals.command()
def answers(
    data: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Trajectories, one a line, .gz too; sessions are made up where left out.")
    ] = None,
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
    half: Annotated[
        str, typer.Option(metavar="|".join(HALVES), help="Only this half of the sessions, by a hash of their ids.")
    ] = "",
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
    json: Json = False,
) -> None:
    """Ask for exact facts at the end of sessions, and count the right answers from what the window shows.

    Examples:

        kilburn eval answers --window 2000 --policy hybrid --policy cost

        kilburn eval answers --data runs.jsonl.gz --tools
    """
    with progress("asking") as done:
        report = evaluate(
            sessions,
            questions,
            windows=window or (1000, 2000, 4000),
            policies=policy or EVERYBODY,
            tools=tools,
            swap=swap,
            writer=writer,
            data=data,
            logs=logs,
            tokens=tokens,
            half=half,
            seed=seed,
            progress=done,
        )
    show(report, json)

"""`lab recursion`: recursive models on texts beyond any window."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from kilburn.agents.loop import CALLS, SECONDS, TOKENS, UNLIMITED, Limits
from kilburn.cli.access import model_of
from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn_lab.cli.evaluate import Csv, check_outputs, lab, shown
from kilburn_lab.evals.aggregation import TASKS
from kilburn_lab.evals.recursion import BATCH, SYSTEMS, evaluate

__all__ = ["recursion"]


@lab.command()
def recursion(
    tokens: Annotated[
        list[int] | None, typer.Option(min=100, help="Sizes of the texts; may be given again. 24000 by default.")
    ] = None,
    system: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(SYSTEMS)}; may be given again. All by default.")
    ] = None,
    task: Annotated[
        list[str] | None, typer.Option(metavar="NAME", help=f"{', '.join(TASKS)}; may be given again. All by default.")
    ] = None,
    judged: Annotated[
        list[int] | None, typer.Option(min=2, metavar="N", help="Also judge all pairs of so many reports, one by one.")
    ] = None,
    window: Annotated[int, typer.Option(min=2000, help="Tokens of four characters.")] = 8000,
    batch: Annotated[int, typer.Option(min=1, help="Items that one sub-call labels.")] = BATCH,
    count: Annotated[int, typer.Option(min=1, help="Texts of each size.")] = 1,
    model: Annotated[str, typer.Option(metavar="SPEC", help="The root; a program that makes no mistakes by default.")] = "",
    sub_model: Annotated[str, typer.Option(metavar="SPEC", help="Answers sub-calls; an oracle by default.")] = "",
    steps: Annotated[int, typer.Option(min=0, help="Replies of the root to one question, at most.")] = 8,
    calls: Annotated[
        int | None, typer.Option(min=0, help="Replies to one question, at most.", show_default=f"{CALLS:,} with a model")
    ] = None,
    spent: Annotated[
        int | None, typer.Option(min=0, help="Tokens that one question may take.", show_default=f"{TOKENS:,} with a model")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="For one question, at most.", show_default=f"{SECONDS:,.0f} with a model")
    ] = None,
    reply: Annotated[int, typer.Option(min=1, help="Tokens of one reply, at most.")] = 1024,
    tools: Annotated[bool, typer.Option("--tools/--no-tools", help="Offer the root tools.")] = True,
    sandbox: Annotated[str, typer.Option(metavar="NAME", help="Where the code runs.")] = "auto",
    seed: Annotated[int, typer.Option(help="Of the texts and questions.")] = 0,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure recursive models by aggregation and pairs over texts beyond any window, beside truncation and search.

    Labels are an oracle's, and the root is a program: the system is measured, not a model. --model and --sub-model put a
    real one in either place. Then each question has limits of calls, tokens and seconds.

    Examples:

        kilburn lab recursion

        kilburn lab recursion --tokens 24000 --tokens 1000000 --judged 50 --judged 100
    """
    check_outputs(csv, force=force)
    given = {name: most for name, most in (("calls", calls), ("tokens", spent), ("seconds", seconds)) if most is not None}
    # The program and the oracle cost nothing.
    usual = Limits() if model or sub_model else UNLIMITED
    limits = msgspec.structs.replace(usual, steps=steps, reply=reply, **given)
    with progress("asking") as done:
        report = evaluate(
            tokens or [24_000],
            systems=system or SYSTEMS,
            tasks=task or TASKS,
            judged=judged or (),
            window=window,
            batch=batch,
            count=count,
            seed=seed,
            model=model_of(model) if model else None,
            sub=model_of(sub_model) if sub_model else None,
            tools=tools,
            limits=limits,
            sandbox=sandbox,
            progress=done,
        )
    shown(report, json, csv, force=force)

"""`eval torture`: random sessions with mishaps everywhere, judged from outside. It refuses to judge anything itself."""

from __future__ import annotations

from random import SystemRandom
from typing import Annotated

import msgspec
import typer

from kilburn.cli.evaluate import evals
from kilburn.cli.screen import progress
from kilburn.cli.shell import Json
from kilburn.evals.torture.run import POLICIES, torture
from kilburn.terminal import emit, say, tell

__all__ = ["command"]


@evals.command(name="torture")
def command(
    seconds: Annotated[
        float | None, typer.Option(min=0.0, help="No session begins later; 60 where --sessions is not given.")
    ] = None,
    sessions: Annotated[int | None, typer.Option(min=1, help="So many sessions at most.")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of the first session, the others count up; chosen and printed where left out.")
    ] = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="SPEC", help="A policy; may be given again. All in turn by default.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Mishaps in a session.")] = 30,
    json: Json = False,
) -> None:
    """Torture sessions: exceptions, cancellation, kills, threads, other processes, odd values; exit 1 where a promise breaks.

    A violation is printed with the seed of its session, and `--sessions 1 --seed SEED` brings that session back (with the
    same `--policy`, where one was given).

    Example:

        kilburn eval torture --seconds 600 --seed 1
    """
    chosen = SystemRandom().randrange(10**6) if seed is None else seed
    say(f"seed {chosen}")
    limit = 60.0 if seconds is None and sessions is None else seconds
    with progress("torturing", sessions) as done:
        report = torture(
            seconds=limit,
            sessions=sessions,
            seed=chosen,
            policies=policy or POLICIES,
            steps=steps,
            progress=lambda count: done(count),
        )
    if json:
        emit(msgspec.to_builtins(report))
    else:
        tell(report.table())
    if report.violations:
        raise typer.Exit(1)

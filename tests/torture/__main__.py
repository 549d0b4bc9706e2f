"""Random sessions under every policy, with mishaps at every effect, and a judge who looks from outside.

    python tests/torture --seconds 60 --seed 1

Exceptions and cancellations strike at counts, questions and awaits; threads and processes look on and write meanwhile;
odd values come in everywhere. A violation is one broken promise, with the seed that brings it back.
"""

from __future__ import annotations

import sys
from pathlib import Path
from random import SystemRandom
from typing import Annotated

import msgspec
import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Json, main
from kilburn.terminal import emit, say, tell

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torture.run import POLICIES, torture

app = typer.Typer(add_completion=False, rich_markup_mode=None, context_settings={"help_option_names": ["-h", "--help"]})


@app.command(name="torture")
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

        python tests/torture --seconds 600 --seed 1
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


if __name__ == "__main__":
    sys.exit(main(commands=app, name="torture"))

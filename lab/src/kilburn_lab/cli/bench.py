"""`lab bench`: how fast the parts are on this machine, each a verb of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kilburn.cli.screen import progress
from kilburn.cli.shell import Force, Json
from kilburn.errors import SpecError
from kilburn_lab.cli.evaluate import Csv, Data, check_outputs, lab, shown
from kilburn_lab.evals.gateway_report import draw

__all__ = ["benches", "gateway", "session"]

benches = typer.Typer(help="Measure how fast the parts are on this machine.", no_args_is_help=True, rich_markup_mode=None)
lab.add_typer(benches, name="bench")


@benches.callback()
def group() -> None:
    """Measure how fast the parts are on this machine."""


@benches.command()
def gateway(
    requests: Annotated[int, typer.Option(min=1, help="Requests to each system, 16 at once; memory is read meanwhile.")] = 10_000,
    rounds: Annotated[int, typer.Option(min=1, help="Requests whose first byte is waited for.")] = 100,
    streams: Annotated[int, typer.Option(min=1, help="Streams that run at once.")] = 200,
    window: Annotated[int, typer.Option(min=1, help="Tokens of Kilburn's window.")] = 32_000,
    peer: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=PYTHON", help="Also another system (litellm, headroom), by a Python that has it."),
    ] = None,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw latency and memory; .svg, .png or .pdf.")] = None,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Measure the gateway: time to the first byte, requests a second, memory, and many streams at once.

    A stub on this machine answers. Beside Kilburn: no proxy, a proxy that only passes on, and other systems where you name a
    Python that has them.

    Examples:

        kilburn lab bench gateway

        kilburn lab bench gateway --requests 1000 --peer litellm=/tmp/peers/bin/python --plot gateway.svg
    """
    check_outputs(csv, plot, force=force)
    named = [one.partition("=") for one in peer or ()]
    if wrong := [name for name, _, python in named if not python]:
        raise SpecError(f"--peer {wrong[0]}", advice="say which Python has it: NAME=PYTHON")
    from kilburn_lab.evals.gateway import evaluate  # it needs the gateway, an extra

    with progress("asking") as done:
        report = evaluate(
            rounds=rounds,
            requests=requests,
            streams=streams,
            window=window,
            peers={name: python for name, _, python in named},
            progress=done,
        )
    shown(report, json, csv, plot, draw, force=force)


@benches.command()
def session(
    data: Data = None,
    runs: Annotated[int, typer.Option(min=1, help="Runs that are joined to one session.")] = 10,
    window: Annotated[int, typer.Option(min=1, help="Tokens of four characters.")] = 8000,
    policy: Annotated[str, typer.Option(metavar="SPEC", help="What decides at the gateway's window.")] = "cost",
    seed: Annotated[int, typer.Option(help="Of the made-up runs.")] = 0,
    csv: Csv = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """Replay a long session of a coding assistant through the gateway: what is shipped, cached and lost.

    A client on Anthropic's SDK resends everything. Beside the gateway: the client alone, and one that truncates its history.

    Example:

        kilburn lab bench session --runs 5
    """
    check_outputs(csv, force=force)
    from kilburn_lab.evals.gateway_session import evaluate  # it needs the gateway, an extra

    with progress("replaying") as done:
        report = evaluate(data, runs=runs, window=window, policy=policy, seed=seed, progress=done)
    shown(report, json, csv, force=force)

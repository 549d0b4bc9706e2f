"""`metrics`: a board and alerts for what a gateway's /metrics says. Nothing is read or written."""

from __future__ import annotations

import typer

from kilburn.cli.shell import app
from kilburn.gateway import board as boards
from kilburn.terminal import emit, tell

metrics = typer.Typer(
    help="A board for Grafana, and alerts for Prometheus, of a gateway's /metrics.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(metrics, name="metrics")


@metrics.command("board")
def board() -> None:
    """Print a board, as JSON that Grafana imports: Dashboards, New, Import.

    Examples:

        kilburn metrics board
    """
    emit(boards.board())


@metrics.command("alerts")
def alerts() -> None:
    """Print rules of alerts, as YAML for the `rule_files` of Prometheus; one is for a hit rate under 60%.

    Examples:

        kilburn metrics alerts
    """
    tell(boards.alerts().rstrip())

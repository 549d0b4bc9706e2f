"""`metrics`: a board and alerts for what a gateway's /metrics says. Nothing is read or written."""

from __future__ import annotations

from kilburn.cli.commands import command_group
from kilburn.gateway import board as boards
from kilburn.terminal import emit, tell

metrics = command_group("metrics")


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

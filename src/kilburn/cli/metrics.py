"""`metrics`: prints a Grafana board and Prometheus alerts for a gateway's /metrics."""

from __future__ import annotations

from kilburn.cli.commands import command_group
from kilburn.gateway import board as boards
from kilburn.terminal import emit, tell

metrics = command_group("metrics")


@metrics.command("board")
def board() -> None:
    """Print a Grafana board as JSON. Grafana imports it under Dashboards, New, Import.

    Examples:

        kilburn metrics board
    """
    emit(boards.board())


@metrics.command("alerts")
def alerts() -> None:
    """Print alert rules for Prometheus, as YAML for `rule_files`. One rule is for a hit rate under 60%.

    Examples:

        kilburn metrics alerts
    """
    tell(boards.alerts().rstrip())

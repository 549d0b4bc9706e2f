"""`metrics`: prints a Grafana board and Prometheus alerts for a gateway's /metrics."""

from __future__ import annotations

from importlib.resources import files

from kilburn.cli.commands import command_group
from kilburn.terminal import tell

metrics = command_group("metrics")


@metrics.command("board")
def board() -> None:
    """Print a Grafana board as JSON. Grafana imports it under Dashboards, New, Import.

    Examples:

        kilburn metrics board
    """
    _print("board.json")


@metrics.command("alerts")
def alerts() -> None:
    """Print alert rules for Prometheus, as YAML for `rule_files`. One rule is for a hit rate under 60%.

    Examples:

        kilburn metrics alerts
    """
    _print("alerts.yml")


def _print(file: str) -> None:
    """Print a file of the gateway's package."""
    tell(files("kilburn.gateway").joinpath(file).read_text("utf-8").rstrip())

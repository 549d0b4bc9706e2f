"""Measuring and printing: quantiles of seconds, tables with ratios, or the same as JSON.

A figure is only worth something beside another from the same run, so every table has a baseline
column. No figure here fails anything.
"""

from __future__ import annotations

import argparse
import json
import platform
import resource
import sys
import time
from collections.abc import Callable, Iterable, Sequence

from kilburn_lab.evals.report import grid

Row = dict[str, str | float | int]


def quantile(values: Sequence[float], share: float) -> float:
    """The value that `share` of the others do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return quantile(values, 0.5)


def seconds_of(work: Callable[[], object], times: int) -> list[float]:
    """How long each of `times` runs took."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return found


def peak_megabytes() -> float:
    """The most memory that this session held so far (resident, in MB)."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1_000_000 if sys.platform == "darwin" else 1_000)


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Says what is taken where nothing is given, and leaves lines as they are."""


def parser(text: str) -> argparse.ArgumentParser:
    """A parser with what every benchmark takes.

    Args:
        text: a docstring: its first paragraph, and its examples, are in the help.
    """
    examples = [line for line in text.splitlines() if line.startswith("    python ")]
    made = argparse.ArgumentParser(
        description=text.strip().split("\n\n")[0],
        epilog="\n".join(["examples:", *examples]) if examples else None,
        formatter_class=_Help,
    )
    made.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return made


def emit(name: str, rows: Iterable[Row], as_json: bool, note: str = "") -> None:
    """Print rows under their names."""
    table = list(rows)
    machine = f"Python {platform.python_version()}, {platform.machine()}"
    if as_json:
        print(json.dumps({"benchmark": name, "machine": machine, "note": note, "rows": table}, indent=1))
        return
    print(f"{name} ({machine})")
    columns = list(dict.fromkeys(key for row in table for key in row))
    body = [[_cell(row.get(column, "")) for column in columns] for row in table]
    print(grid(columns, body, columns[:1]))
    if note:
        print(note)
    print()


def _cell(value: str | float | int) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value >= 1000 else f"{value:.3g}"
    return str(value)

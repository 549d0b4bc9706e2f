"""How much work a repeated test does: little in the default run, much in `run.py test --all`.

`run.py test --all` sets `KILBURN_TESTS=all`. Tests that repeat a random experiment (Hypothesis examples, kills, writers)
ask `rounds` for the number of repetitions, and tests of combinations ask `each_value` or `pairwise` for the rows, so one test
serves both runs.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import combinations, product
from typing import Any

FULL = os.environ.get("KILBURN_TESTS") == "all"
"""Whether this is the run of `run.py test --all`."""


def rounds(default: int, full: int) -> int:
    """Return the number of repetitions for this run: `full` under `run.py test --all`, else `default`."""
    return full if FULL else default


def each_value(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis for this run: every row in `--all`, else as few as hold each value."""
    if FULL:
        return list(product(*axes))
    return [tuple(axis[number % len(axis)] for axis in axes) for number in range(max(map(len, axes)))]


def pairwise(*axes: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Return rows with one value of each axis for this run: every row in `--all`, else a few that hold each pair of values."""
    rows = list(product(*axes))
    if FULL:
        return rows
    pairs = {row: set(combinations(enumerate(row), 2)) for row in rows}
    missing, chosen = set[Any]().union(*pairs.values()), list[tuple[Any, ...]]()
    while missing:
        chosen.append(max(rows, key=lambda row: len(pairs[row] & missing)))
        missing -= pairs[chosen[-1]]
    return chosen

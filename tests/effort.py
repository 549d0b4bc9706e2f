"""How much work a repeated test does: little in the default run, much in `run.py test --all`.

`run.py test --all` sets `KILBURN_TESTS=all`. Tests that repeat a random experiment (Hypothesis examples, kills, writers)
ask `rounds` for the number of repetitions, so one test serves both runs.
"""

from __future__ import annotations

import os

FULL = os.environ.get("KILBURN_TESTS") == "all"
"""Whether this is the run of `run.py test --all`."""


def rounds(default: int, full: int) -> int:
    """Return the number of repetitions for this run: `full` under `run.py test --all`, else `default`."""
    return full if FULL else default

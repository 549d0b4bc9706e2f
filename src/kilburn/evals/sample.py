"""The runs that a measurement takes, and the names that it looks for in them.

They are a file's runs, or made-up ones; all of them, or a sample, which is described in words.
"""

from __future__ import annotations

import hashlib
from itertools import islice
from pathlib import Path

import msgspec

from kilburn.errors import SpecError
from kilburn.evals.references import Reference, references, shuffle_names
from kilburn.evals.trajectories import Trajectory, read, synthetic

__all__ = ["MADE", "Sample", "sample_of"]

MADE = 60
"""Runs that are made up where no file is named."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Runs and their references, by the run's id.

    Args:
        words: which runs these are.
        seed: of made-up runs and of the intervals.
        tools: whether actions and outputs are told as tool calls and results.
        digest: names the runs and references exactly.
    """

    runs: tuple[Trajectory, ...]
    wanted: dict[str, list[Reference]]
    words: str
    seed: int = 0
    tools: bool = False
    digest: str = ""

    @property
    def references(self) -> int:
        """How many there are in all runs."""
        return sum(map(len, self.wanted.values()))


def sample_of(
    path: str | Path | None,
    limit: int | None = None,
    *,
    shuffle: int | None = None,
    referring: bool = False,
    tools: bool = False,
    seed: int = 0,
) -> Sample:
    """The sample of a file.

    Args:
        path: JSON lines of runs (see `kilburn.evals.trajectories`); None for made-up ones.
        limit: only the first so many runs; of made-up ones, how many.
        shuffle: a seed; each name is replaced by one of another run, so that only chance is left.
        referring: only runs that have references: fewer prompts, the same names.
        tools: present actions and outputs as tool calls and results, for policies that act on those.
        seed: for made-up runs, and later for the intervals.

    Raises:
        SpecError: no such file, or no runs.
        InvalidMessage: a line that is no run.
    """
    every = synthetic(limit or MADE, seed) if path is None else read(path)
    runs = tuple(islice((run for run in every if not referring or references(run)), limit))
    if not runs:
        raise SpecError(f"{path}: no runs", advice="give a file with one run a line")
    listed = [reference for run in runs for reference in references(run)]
    wanted: dict[str, list[Reference]] = {}
    for reference in listed if shuffle is None else shuffle_names(listed, shuffle):
        wanted.setdefault(reference.run, []).append(reference)
    known = hashlib.sha256(msgspec.json.encode((runs, wanted, tools))).hexdigest()
    words = _words(path, limit, shuffle, referring) + (", told as tool calls" if tools else "")
    return Sample(runs=runs, wanted=wanted, words=words, seed=seed, tools=tools, digest=known)


def _words(path: str | Path | None, limit: int | None, shuffle: int | None, referring: bool) -> str:
    which = f"the first {limit}" if limit is not None else "all"
    those = " of those with references" if referring else ""
    source = "made up" if path is None else f"of {Path(path).name}"
    return f"{which}{those} {source}" + ("" if shuffle is None else ", names shuffled")

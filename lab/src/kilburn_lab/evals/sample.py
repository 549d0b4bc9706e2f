"""The runs that a measurement takes, and the names that it looks for in them.

They are a file's runs, or made-up ones; all of them, or a sample, which is described in words.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import msgspec

from kilburn.errors import SpecError
from kilburn.wire.recording import FORMS
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.references import KINDS, Reference, references, shuffle_names
from kilburn_lab.evals.trajectories import braided, read, sourced, synthetic

MADE = 60
"""Runs that are made up where no file is named."""

HALVES = ("tune", "report")
"""Weights are chosen on the one, figures are told of the other. All runs of one task are in the same half."""


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """Runs and their references, by the run's id.

    Args:
        words: which runs these are.
        seed: of made-up runs and of the intervals.
        tools: whether actions and outputs are told as tool calls and results.
        reply: whether thought and action are one reply, and the prompt before it is scored.
        digest: names the runs and references exactly.
    """

    runs: tuple[Trajectory, ...]
    wanted: dict[str, list[Reference]]
    words: str
    seed: int = 0
    tools: bool = False
    reply: bool = False
    digest: str = ""

    @property
    def references(self) -> int:
        """How many names there are in all runs."""
        return self.count("name")

    def count(self, kind: str) -> int:
        """How many references of a kind there are in all runs."""
        return sum(reference.kind == kind for listed in self.wanted.values() for reference in listed)


def sample_of(
    path: str | Path | None,
    limit: int | None = None,
    *,
    sources: Path | None = None,
    shuffle: int | None = None,
    referring: bool = False,
    tools: bool = False,
    reply: bool = False,
    session: int | None = None,
    half: str = "",
    seed: int = 0,
) -> Sample:
    """The sample of a file.

    Args:
        path: a file of recorded runs, or a folder of some (see `kilburn_lab.evals.trajectories.read`); None for made-up ones.
        limit: only the first so many runs; of made-up ones, how many.
        sources: a folder in whose sources the made-up runs work; None for a code base that does not exist.
        shuffle: a seed; each name is replaced by one of another run, so that only chance is left.
        referring: only runs that have references: fewer prompts, the same names.
        tools: present actions and outputs as tool calls and results, for policies that act on those.
        reply: score the prompt before a reply of thought and action, not the one between them.
        session: braid the runs into sessions of about so many tokens.
        half: one of `HALVES`, by a hash of what the user asked; "" for all runs.
        seed: for made-up runs, for the places where braided runs are cut, and later for the intervals.

    Raises:
        SpecError: no such file, no such half, no sources, both a file and sources, or no runs.
        InvalidMessage: a line that is no run.
    """
    if half not in ("", *HALVES):
        raise SpecError(f"no half {half!r}", advice=f"give {' or '.join(HALVES)}")
    if path is not None and sources is not None:
        raise SpecError("recorded runs and sources", advice="give one of them: runs are made from sources")
    made = sourced(sources, limit or MADE, seed) if sources is not None else synthetic(limit or MADE, seed, copying=True)
    every = made if path is None else read(path)
    every = (run for run in every if half in ("", half_of(run)))
    drawn = (run for run in every if not referring or references(run, reply=reply))
    taken = list(islice(drawn, None if limit is None else limit + 1))
    if path is not None and limit is not None and len(taken) <= limit:
        limit = None  # they are all
    runs = tuple(taken[:limit] if session is None else braided(taken[:limit], session, seed))
    if not runs:
        raise SpecError(f"{path}: no runs", advice=f"give {FORMS}")
    listed = [reference for run in runs for kind in KINDS for reference in references(run, kind, reply=reply)]
    wanted: dict[str, list[Reference]] = {}
    for reference in listed if shuffle is None else shuffle_names(listed, shuffle):
        wanted.setdefault(reference.run, []).append(reference)
    known = hashlib.sha256(msgspec.json.encode((runs, wanted, tools, reply))).hexdigest()
    words = ", ".join(
        [
            _words(path, limit, shuffle, referring)
            + (f" in {_spoken(runs)} of {sources.resolve().name}" if sources is not None else ""),
            *([f"of the half {half}"] if half else []),
            *([f"braided into {len(runs)} sessions of about {session:,} tokens"] if session is not None else []),
            *(["told as tool calls"] if tools else []),
            *(["scored before thought and action"] if reply else []),
        ]
    )
    return Sample(runs=runs, wanted=wanted, words=words, seed=seed, tools=tools, reply=reply, digest=known)


def half_of(run: Trajectory) -> str:
    """One of `HALVES`, by a hash of what the user asked, or of the id where nothing was."""
    return half_by(run.asked or run.id)


def half_by(text: str) -> str:
    """One of `HALVES`, by a hash of a text."""
    return HALVES[hashlib.sha256(text.encode()).digest()[0] % len(HALVES)]


def _spoken(runs: Sequence[Trajectory]) -> str:
    """The languages of runs that are named after theirs, and how many runs each has."""
    counts = Counter(part.partition("-")[0] for run in runs for part in run.id.split("+"))
    return " and ".join(f"{language} ({count} runs)" for language, count in sorted(counts.items()))


def _words(path: str | Path | None, limit: int | None, shuffle: int | None, referring: bool) -> str:
    which = f"the first {limit}" if limit is not None else "all"
    those = " of those with references" if referring else ""
    source = "made up" if path is None else f"of {Path(path).name}"
    return f"{which}{those} {source}" + ("" if shuffle is None else ", names shuffled")

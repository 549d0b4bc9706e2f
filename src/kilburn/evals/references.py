"""Finds the names in an agent's action that it can only know from an older tool output.

At step i the action names identifiers. An identifier is a *reference* if it was in the output of a step before the
last one, and neither in the head, nor in any thought or action before step i, nor in the last output. Then the agent
could name it only because that older output was in its context. The thought of step i belongs to the same reply as
the action, so it does not disqualify a name.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

import msgspec

from kilburn.evals.trajectories import Trajectory

__all__ = ["SHORTEST", "Reference", "names", "references", "shuffle_names"]

_NAME = re.compile(r"/?\w+(?:[./-]\w+)*")

SHORTEST = 5
"""Characters; shorter words match by chance."""


class Reference(msgspec.Struct, frozen=True):
    """The action of step `step` (from 0) of run `run` names `name`, from the outputs of steps `origins`."""

    run: str
    step: int
    name: str
    origins: tuple[int, ...]


def names(text: str) -> set[str]:
    """The identifiers, dotted names and paths of a text, of `SHORTEST` characters or more, whole words only."""
    return {name for name in _NAME.findall(text) if len(name) >= SHORTEST}


def references(run: Trajectory) -> list[Reference]:
    """The references of a run, in the order of its steps and then of the names."""
    outputs = [names(step.observation) for step in run.steps]
    known = {name for turn in run.head for name in names(turn.content)}
    older: set[str] = set()
    found: list[Reference] = []
    for index, step in enumerate(run.steps):
        if index >= 2:
            older |= outputs[index - 2]
            wanted = (names(step.action) & older) - known - outputs[index - 1]
            for name in sorted(wanted):
                origins = tuple(at for at in range(index - 1) if name in outputs[at])
                found.append(Reference(run.id, index, name, origins))
        known |= names(step.thought) | names(step.action)
    return found


def shuffle_names(found: Sequence[Reference], seed: int) -> list[Reference]:
    """The same places with the names of other runs: what is found then is found by chance."""
    chance = random.Random(seed)
    by_run: dict[str, list[str]] = {}
    for reference in found:
        by_run.setdefault(reference.run, []).append(reference.name)
    mixed: list[Reference] = []
    for reference in found:
        own = set(by_run[reference.run])
        foreign = [name for run, listed in by_run.items() if run != reference.run for name in listed if name not in own]
        if foreign:
            mixed.append(msgspec.structs.replace(reference, name=chance.choice(foreign)))
    return mixed

"""Finds what an agent writes that it can only know from an older tool output.

At step i the agent writes an action. What it writes is a *reference* if it was in the output of a step before the last
one, and neither in the head, nor in any thought or action before step i, nor in the last output. Then the agent could
write it only because that older output was in its context. Scored before the action, the thought of step i is shown
to everybody and takes nothing away, since it belongs to the same reply. Scored before the reply, as real agents are
asked, nothing of step i is shown, and what the thought writes counts too.

Two kinds, of which the second shares no pattern with any policy:

- *name*: an identifier, a dotted name or a path.
- *copy*: a whole line that the agent copies (line numbers before it are left out), or a value: a token with at least
  as many digits as letters, such as a number, a version, a line number or a hash.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

import msgspec

from kilburn.wire.trajectory import Trajectory

_NAME = re.compile(r"/?\w+(?:[./-]\w+)*")

SHORTEST = 5
"""Characters of a name; shorter words match by chance."""

SHORTEST_LINE = 16
"""Characters of a line that is copied."""

SHORTEST_VALUE = 3
"""Characters of a value."""

_NUMBERED = re.compile(r"^\s*\d+(?:\s*[:|]|\t|→)")
_BETWEEN = str.maketrans(dict.fromkeys(",;:()[]{}<>=\"'`|+*", " "))


class Reference(msgspec.Struct, frozen=True):
    """The reply of step `step` (from 0) of run `run` writes `name`, from the outputs of steps `origins`."""

    run: str
    step: int
    name: str
    origins: tuple[int, ...]
    kind: str = "name"


def names(text: str) -> set[str]:
    """The identifiers, dotted names and paths of a text, of `SHORTEST` characters or more, whole words only."""
    return {name for name in _NAME.findall(text) if len(name) >= SHORTEST}


def copies(text: str) -> set[str]:
    """The lines of a text, without their indentation and line numbers, and its values."""
    lines = (_NUMBERED.sub("", line).strip() for line in text.split("\n"))
    return {line for line in lines if len(line) >= SHORTEST_LINE} | _values(text)


def _values(text: str) -> set[str]:
    tokens = {token.strip(".-/") for token in text.translate(_BETWEEN).split()}
    return {token for token in tokens if len(token) >= SHORTEST_VALUE and _is_value(token)}


def _is_value(token: str) -> bool:
    digits = sum(map(str.isdigit, token))
    return digits > 0 and digits >= sum(map(str.isalpha, token))


KINDS: dict[str, Callable[[str], set[str]]] = {"name": names, "copy": copies}
"""What is looked for in a text, by the kind of reference."""


def references(run: Trajectory, kind: str = "name", *, reply: bool = False) -> list[Reference]:
    """The references of a run, in the order of its steps and then of the names.

    Args:
        kind: one of `KINDS`.
        reply: whether thought and action are one reply, and both count.
    """
    read = KINDS[kind]
    outputs = [read(step.observation) for step in run.steps]
    known = {name for turn in run.head for name in read(turn.content)}
    found: list[Reference] = []
    for index, step in enumerate(run.steps):
        wanted = read(f"{step.thought}\n{step.action}" if reply else step.action) - known
        if wanted and index:
            wanted -= outputs[index - 1]
        for name in sorted(wanted):
            origins = tuple(at for at in range(index - 1) if name in outputs[at] and run.steps[at].task == step.task)
            if origins:
                found.append(Reference(run.id, index, name, origins, kind))
        known |= read(step.thought) | read(step.action) | (outputs[index] if step.user else set())
    return found


def shuffle_names(found: Sequence[Reference], seed: int) -> list[Reference]:
    """The same places with the names of other runs: what is found then is found by chance."""
    chances = {kind: random.Random(seed) for kind in KINDS}
    by_run: dict[tuple[str, str], list[str]] = {}
    for reference in found:
        by_run.setdefault((reference.run, reference.kind), []).append(reference.name)
    mixed: list[Reference] = []
    for reference in found:
        own = set(by_run[reference.run, reference.kind])
        foreign = [
            name
            for (run, kind), listed in by_run.items()
            if run != reference.run and kind == reference.kind
            for name in listed
            if name not in own
        ]
        if foreign:
            mixed.append(msgspec.structs.replace(reference, name=chances[reference.kind].choice(foreign)))
    return mixed

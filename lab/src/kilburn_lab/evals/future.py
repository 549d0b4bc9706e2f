"""What a recorded run will need, and when: knowledge for the offline optimum only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from kilburn.page import Span
from kilburn.policies.belady import Future
from kilburn.wire.trajectory import Trajectory
from kilburn_lab.evals.references import KINDS, Reference


def future_of(run: Trajectory, references: Sequence[Reference], *, reply: bool = False, tools: bool = False) -> Future:
    """The uses of each older output's page: the turn of the last message before what uses it, and the lines.

    Thought, action and output of a step are a page and a message each, and what the user says is one. With `reply`,
    thought and action are one message; told as a tool call it has two pages. A name
    that several outputs had is taken from the newest of them, which has to be kept for the shortest time. Of its
    lines, the one that another reference needs too is taken, else the shortest. A name without a line (in a shuffled
    measurement) is ignored.
    """
    turns = list(accumulate(1 if step.user else 2 if reply else 3 for step in run.steps))
    pages = turns
    if reply and tools:
        pages = list(accumulate(1 if step.user else 2 + bool(step.thought) for step in run.steps))
    needed: dict[int, set[Span]] = {}
    uses: dict[int, dict[int, set[Span]]] = {}
    for reference in sorted(references, key=lambda one: one.step):
        for origin in reversed(reference.origins):
            lines = _lines_with(reference, run.steps[origin].observation)
            if not lines:
                continue
            # Of the step itself the thought alone is there, unless it belongs to the reply.
            page, turn = pages[origin], turns[reference.step - 1] + (not reply)
            known = needed.setdefault(page, set())
            chosen = min(lines, key=lambda span: (span not in known, span[1] - span[0], span))
            known.add(chosen)
            uses.setdefault(page, {}).setdefault(turn, set()).add(chosen)
            break
    return {page: tuple((turn, tuple(sorted(spans))) for turn, spans in sorted(at.items())) for page, at in uses.items()}


def _lines_with(reference: Reference, text: str) -> list[Span]:
    """The spans of the whole lines that hold a name as a word, without their line ends."""
    name, read = reference.name, KINDS[reference.kind]
    return [span for span in _lines(text) if name in text[slice(*span)] and name in read(text[slice(*span)])]


def _lines(text: str) -> Iterable[Span]:
    start = 0
    for line in text.split("\n"):
        yield start, start + len(line)
        start += len(line) + 1

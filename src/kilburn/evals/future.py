"""What a recorded run will need, and when: knowledge for the offline optimum only."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kilburn.evals.references import Reference, names
from kilburn.evals.trajectories import Trajectory
from kilburn.page import Span
from kilburn.policies.belady import Future

__all__ = ["future_of"]


def future_of(run: Trajectory, references: Sequence[Reference]) -> Future:
    """The uses of each older output's page: the turn of the thought before the action that uses it, and the lines.

    Thought, action and output of a step are one page and one message each, so event k is page k and turn k. A name
    that several outputs had is taken from the newest of them, which has to be kept for the shortest time. Of its
    lines, the one that another reference needs too is taken, else the shortest. A name without a line (in a shuffled
    measurement) is ignored.
    """
    needed: dict[int, set[Span]] = {}
    uses: dict[int, dict[int, set[Span]]] = {}
    for reference in sorted(references, key=lambda one: one.step):
        for origin in reversed(reference.origins):
            lines = _lines_with(reference.name, run.steps[origin].observation)
            if not lines:
                continue
            page, turn = 3 * origin + 3, 3 * reference.step + 1
            known = needed.setdefault(page, set())
            chosen = min(lines, key=lambda span: (span not in known, span[1] - span[0], span))
            known.add(chosen)
            uses.setdefault(page, {}).setdefault(turn, set()).add(chosen)
            break
    return {page: tuple((turn, tuple(sorted(spans))) for turn, spans in sorted(turns.items())) for page, turns in uses.items()}


def _lines_with(name: str, text: str) -> list[Span]:
    """The spans of the whole lines that hold a name as a word, without their line ends."""
    return [span for span in _lines(text) if name in text[slice(*span)] and name in names(text[slice(*span)])]


def _lines(text: str) -> Iterable[Span]:
    start = 0
    for line in text.split("\n"):
        yield start, start + len(line)
        start += len(line) + 1

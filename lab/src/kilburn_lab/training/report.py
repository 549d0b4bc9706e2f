"""What a recipe found: each figure over the seeds, with its interval; and the curves of its ledgers as a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, stdev

import msgspec

from kilburn_lab.evals.report import EvalReport, grid, panel
from kilburn_lab.picture import picture

STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
"""The 97.5th percentile of Student's distribution with 1, 2, ... degrees of freedom."""


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """One figure over the seeds.

    Args:
        arm: what was trained, or how it was used. values: one a seed.
        low, high: the 95% interval of the mean over seeds (Student); None where there is one seed.
    """

    arm: str
    figure: str
    mean: float
    low: float | None
    high: float | None
    values: tuple[float, ...]

    @classmethod
    def of(cls, arm: str, figure: str, values: Sequence[float]) -> Figure:
        """From its value for each seed."""
        middle, low, high = fmean(values), None, None
        if len(values) > 1:
            half = STUDENT[min(len(values) - 1, len(STUDENT)) - 1] * stdev(values) / math.sqrt(len(values))
            low, high = middle - half, middle + half
        return cls(arm=arm, figure=figure, mean=middle, low=low, high=high, values=tuple(values))


class Trained(EvalReport, frozen=True, kw_only=True):
    """All figures of a recipe.

    Args:
        parameters: of its transformer. seconds: of processor time, all seeds, measuring included.
        note: what the table does not say by itself.
    """

    recipe: str
    seeds: int
    parameters: int
    seconds: float
    rows: tuple[Figure, ...]
    note: str = ""

    def figure(self, arm: str, figure: str) -> Figure:
        """One figure.

        Raises:
            KeyError: it was not measured.
        """
        for row in self.rows:
            if (row.arm, row.figure) == (arm, figure):
                return row
        raise KeyError((arm, figure))

    def table(self) -> str:
        """Plain text for people: a row for each arm and figure."""
        body = [[row.arm, row.figure, _said(row.mean), _between(row), "  ".join(map(_said, row.values))] for row in self.rows]
        said = (
            f"{self.recipe}: {self.parameters:,} parameters, {self.seeds} seeds, {self.seconds:.0f} s of processor time; "
            "mean of the seeds, 95% interval (Student), each seed"
        )
        return "\n\n".join(
            [said, grid(["arm", "figure", "mean", "interval", "seeds"], body, ("arm", "figure"))] + [self.note] * bool(self.note)
        )


def _said(value: float) -> str:
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def _between(row: Figure) -> str:
    return "" if row.low is None or row.high is None else f"{_said(row.low)} to {_said(row.high)}"


def draw(path: Path, title: str, curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], figure: str) -> None:
    """Draw a figure of the ledgers over the steps: a colour for each arm, a line for each seed, smoothed over a twentieth."""
    colours = [f"C{number}" for number in range(10)]
    with picture(path, 7.0, 3.6, force=True) as canvas:
        axes = canvas.subplots()
        for number, (arm, seeds) in enumerate(curves.items()):
            for seed, points in enumerate(seeds):
                wide = len(points) // 20
                values = [fmean(value for _, value in points[max(0, at - wide) : at + 1]) for at in range(len(points))]
                axes.plot(
                    [step for step, _ in points],
                    values,
                    color=colours[number % len(colours)],
                    linewidth=1.2,
                    label=arm if not seed else None,
                )
        panel(axes, title, xlabel="step", ylabel=figure)

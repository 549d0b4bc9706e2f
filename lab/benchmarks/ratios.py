"""The one form that every goal's figure has, and what is made of such figures: a table, a picture, and a page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec

from kilburn_lab.evals.report import grid, panel
from kilburn_lab.picture import picture

GROUPS = {
    1: "A prefix that stays",
    2: "Nowhere behind a plain baseline",
    3: "What a provider bills",
    4: "The cache of keys and values",
    5: "A turn",
    6: "The gateway",
    7: "Search",
    8: "The dashboard",
}
"""By the line of the issue that set the goals."""

HEADS = ("what", "measured", "baseline", "ratio", "goal", "met")
BEGIN, END = "<!-- What follows is written by `python lab/benchmarks/all.py --page`. -->", "<!-- Here it ends. -->"


class Ratio(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, what it is compared with, and its goal.

    Args:
        what: in words. unit: of measured and baseline.
        baseline: of the same run; against: what it is. None where a goal stands for itself.
        goal: at most so much, or at least where `least` says so. It is the goal `of` what was measured, of its ratio to the
            baseline, or of its difference to it.
        panel, curve, size: where the picture has it, if it has: a panel, a line in it, and the place on the axis of sizes.
    """

    what: str
    measured: float
    unit: str = ""
    baseline: float | None = None
    against: str = ""
    goal: float
    of: Literal["measured", "ratio", "difference"] = "measured"
    least: bool = False
    panel: str = ""
    curve: str = ""
    size: int | None = None

    @property
    def ratio(self) -> float | None:
        """To the baseline."""
        return self.measured / self.baseline if self.baseline else None

    @property
    def bound(self) -> float:
        """The goal, in the unit of what was measured."""
        base = self.baseline or 0.0
        return {"measured": self.goal, "ratio": self.goal * base, "difference": self.goal + base}[self.of]

    @property
    def met(self) -> bool:
        """Whether the goal is reached."""
        slack = 1e-9 * max(1.0, abs(self.bound))
        return self.measured >= self.bound - slack if self.least else self.measured <= self.bound + slack

    def cells(self) -> list[str]:
        """A line of the table."""
        form = {"measured": "{}", "ratio": "{} ×", "difference": "baseline + {}" if self.goal else "baseline"}[self.of]
        unit = f" {self.unit}" if self.unit and self.of != "ratio" and self.goal else ""
        base = "" if self.baseline is None else f"{_number(self.baseline)} ({self.against})"
        return [
            self.what,
            f"{_number(self.measured)} {self.unit}".strip(),
            base,
            "" if self.ratio is None else f"{self.ratio:.2f}",
            f"{'≥' if self.least else '≤'} {form.format(_number(self.goal))}{unit}",
            "yes" if self.met else "no",
        ]


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What one part found. `missing` says why there is nothing, or not all."""

    part: str
    line: int
    command: str
    machine: str
    seconds: float
    ratios: list[Ratio]
    missing: str = ""


def table(results: Iterable[Result]) -> str:
    """Plain text."""
    parts = []
    for line, some in _grouped(results):
        body = [ratio.cells() for result in some for ratio in result.ratios]
        parts.append("\n".join([GROUPS[line], grid(HEADS, body, HEADS[:1]), *_missing(some)]))
    return "\n\n".join([*parts, _summary(results)])


def as_json(results: Sequence[Result]) -> str:
    """The same as JSON, with what follows from the figures."""
    found = []
    for result in results:
        known = msgspec.to_builtins(result)
        for ratio, made in zip(result.ratios, known["ratios"], strict=True):
            made |= {"ratio": ratio.ratio, "met": ratio.met}
        found.append(known)
    return msgspec.json.format(msgspec.json.encode(found), indent=1).decode()


def written(results: Sequence[Result], drawn: str, left: Sequence[str]) -> str:
    """The part of the page between its markers: `drawn` is the picture's name, `left` are the parts that were not measured."""
    lines = [BEGIN, "", f"{_summary(results)} Measured on: {'; '.join(sorted({each.machine for each in results}))}."]
    lines += [*([f"Not measured yet: {', '.join(left)}."] if left else []), ""]
    lines += [f"![Cost against size, with the goals]({drawn})"]
    for line, some in _grouped(results):
        lines += ["", f"### {GROUPS[line]}", ""]
        if any(result.ratios for result in some):
            lines += [f"| {' | '.join(HEADS)} |", f"|{'---|' * len(HEADS)}"]
            lines += [f"| {' | '.join(ratio.cells())} |" for result in some for ratio in result.ratios]
            lines += [""]
        lines += [f"- {each}" for each in _missing(some)]
        lines += [f"- `{result.command}`: {result.seconds:,.0f} s" for result in some]
    return "\n".join([*lines, "", END])


def rewritten(page: str, results: Sequence[Result], drawn: str, left: Sequence[str]) -> str:
    """A page whose marked part is of these results.

    Raises:
        ValueError: it has no markers.
    """
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return before + written(results, drawn, left) + after


def draw(path: Path, results: Iterable[Result], *, force: bool = False) -> None:
    """Draw what was measured against the size, and its goal dashed beside it.

    Raises:
        SpecError, MissingExtra, OSError: see `kilburn_lab.picture.picture`.
    """
    placed = [ratio for result in results for ratio in result.ratios if ratio.size is not None]
    names = list(dict.fromkeys(ratio.panel for ratio in placed))
    with picture(path, 5 * max(1, len(names)), 4, force=force) as figure:
        for number, name in enumerate(names, 1):
            axes = figure.add_subplot(1, len(names), number)
            here = [ratio for ratio in placed if ratio.panel == name]
            for curve in dict.fromkeys(ratio.curve for ratio in here):
                own = sorted((ratio for ratio in here if ratio.curve == curve), key=lambda ratio: ratio.size or 0)
                sizes = [ratio.size for ratio in own]
                (line,) = axes.plot(sizes, [ratio.measured for ratio in own], marker="o", label=curve)
                axes.plot(sizes, [ratio.bound for ratio in own], "--", color=line.get_color(), label=f"goal, {curve}")
            panel(axes, name, {"fontsize": 8}, xscale="log", yscale="log", xlabel="pages, or facts", ylabel=here[0].unit)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _grouped(results: Iterable[Result]) -> Iterator[tuple[int, list[Result]]]:
    ordered = sorted(results, key=lambda result: result.line)
    return ((line, list(some)) for line, some in groupby(ordered, key=lambda result: result.line))


def _missing(results: Iterable[Result]) -> list[str]:
    return [f"not whole: {result.part}: {result.missing}" for result in results if result.missing]


def _summary(results: Iterable[Result]) -> str:
    every = list(results)
    ratios = [ratio for result in every for ratio in result.ratios]
    met = sum(ratio.met for ratio in ratios)
    missing = len(_missing(every))
    return f"{met} of {len(ratios)} goals are met" + (f"; {missing} measurements are not whole." if missing else ".")

"""The Pareto picture: what each policy is worth against what it costs, one panel for each window.

A policy is on the front if no other is worth more for less.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Any, Protocol

from kilburn_lab.evals.baselines import BASELINES, HISTORY
from kilburn_lab.evals.cost import PER, UNITS, CostRow
from kilburn_lab.evals.roster import BELADY
from kilburn_lab.picture import picture, plain_axes

REFILLED = "refilled"
"""The axis of tokens that were read again because of an edit; else a price table's name."""

_BLUE, _GREY, _GREEN = "#2b6cb0", "#718096", "#2f855a"
_MARKS = {"policy": (_BLUE, "o"), "baseline": (_GREY, "s"), "offline optimum": (_GREEN, "*"), "full history": (_GREY, "D")}
_BOUNDS = {BELADY: "offline optimum", HISTORY: "full history"}
"""What keeps to no window, or knows the future; it is on no front."""
_SIZE = 7.5
"""Font size of a label, in points."""

Box = tuple[float, float, float, float]
"""Left, bottom, right and top, in dots of the picture."""


def front(points: Sequence[tuple[float, float]]) -> list[int]:
    """The indices of those (cost, worth) that no other equals or beats in both, cheapest first."""
    chosen: list[int] = []
    best = float("-inf")
    for at in sorted(range(len(points)), key=lambda at: (points[at][0], -points[at][1], at)):
        if points[at][1] > best:
            best = points[at][1]
            chosen.append(at)
    return chosen


class _Report(Protocol):
    @property
    def rows(self) -> Sequence[CostRow]: ...


def draw(path: Path, report: _Report, worth: str, axis: str = REFILLED, *, force: bool = False) -> None:
    """Draw a report's rows to a file: what they are worth against re-prefilled tokens, or against the cost by a price table.

    Args:
        worth: the rows' field that is drawn upwards, a share: "survival" or "solved".

    Raises:
        SpecError, MissingExtra, OSError: see `kilburn_lab.picture.picture`.
    """
    rows = report.rows
    windows = sorted({row.window for row in rows})
    across = min(2, len(windows))
    down = -(-len(windows) // across)
    with picture(path, 7 * across, 5.2 * down, force=force, layout=None) as figure:
        figure.subplots_adjust(left=0.75 / (7 * across), right=0.985, bottom=0.6 / (5.2 * down), top=1 - 0.6 / (5.2 * down))
        figure.subplots_adjust(wspace=0.13, hspace=0.27)
        for number, window in enumerate(windows, 1):
            axes = figure.add_subplot(down, across, number)
            _panel(axes, [row for row in rows if row.window == window], window, worth, axis)
        _legend(figure, [kind for kind in _MARKS if kind in {_kind(row) for row in rows}])


def _legend(figure: Any, kinds: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    shown = [Line2D([], [], color=_MARKS[kind][0], marker=_MARKS[kind][1], linestyle="", label=kind) for kind in kinds]
    shown.append(Line2D([], [], color=_BLUE, lw=1, label="none is worth more for less"))
    figure.legend(handles=shown, loc="upper right", ncols=len(shown), frameon=False, fontsize=8.5)


def _kind(row: CostRow) -> str:
    return "baseline" if row.policy in BASELINES else _BOUNDS.get(row.policy, "policy")


def _point(row: CostRow, worth: str, axis: str) -> tuple[float, float]:
    cost = row.refilled / max(1, row.calls) if axis == REFILLED else row.costs[axis]
    return cost, getattr(row, worth)


def _panel(axes: Any, rows: Sequence[CostRow], window: int, worth: str, axis: str) -> None:
    """One window: the points, the front without what no policy can be, the names."""
    points = [_point(row, worth, axis) for row in rows]
    costs = [cost for cost, _ in points]
    wide = (max(costs) - min(costs)) or max(costs) or 1.0
    left, right = min(costs) - 0.08 * wide, max(costs) + 0.12 * wide
    fair = [at for at, row in enumerate(rows) if row.policy not in _BOUNDS]
    chosen = [fair[at] for at in front([points[at] for at in fair])]
    axes.set(xlim=(left, right), ylim=(-0.03, 1.17), yticks=[0, 0.2, 0.4, 0.6, 0.8, 1])
    for at, row in enumerate(rows):
        colour, shape = _MARKS[_kind(row)]
        size = 10 if shape == "*" else 5.5
        axes.plot(*points[at], shape, color=colour, markersize=size, zorder=3, alpha=1 if at in chosen else 0.75)
    corners = [*(points[at] for at in chosen), (right, max(points[at][1] for at in chosen))] if chosen else []
    axes.step([x for x, _ in corners], [y for _, y in corners], where="post", color=_BLUE, lw=1)
    ends = [axes.transData.transform(corner) for corner in corners]
    lines: list[Box] = [box for one, two in pairwise(ends) for box in _stroke(one, two)]
    unit = "re-prefilled tokens a prompt" if axis == REFILLED else f"cost of {PER:,} prompts, {axis} ({UNITS.get(axis, '')})"
    axes.set_xlabel(unit, fontsize=9)
    axes.set_ylabel(worth, fontsize=9)
    axes.set_title(f"window of {window:,} tokens", loc="left", fontsize=11)
    axes.tick_params(labelsize=8)
    plain_axes(axes, grid=0.2)
    _label(axes, points, [row.policy for row in rows], set(chosen), lines)


def _stroke(one: Sequence[float], two: Sequence[float]) -> list[Box]:
    """What a step of the front covers: first level, then up."""
    return [(one[0], one[1] - 2, two[0], one[1] + 2), (two[0] - 2, one[1], two[0] + 2, two[1])]


def _label(axes: Any, points: Sequence[tuple[float, float]], texts: Sequence[str], bold: set[int], lines: Sequence[Box]) -> None:
    """Write each name at the nearest place where it covers no point, no line and no other name."""
    scale = axes.figure.dpi / 72
    places = [(float(x), float(y)) for x, y in (axes.transData.transform(point) for point in points)]
    points_taken = [(x - 4 * scale, y - 4 * scale, x + 4 * scale, y + 4 * scale) for x, y in places]
    taken: list[Box] = [*points_taken, *lines]
    groups = _group_points(places, 5 * scale)
    for group in sorted(groups, key=lambda group: (not bold & set(group), -places[group[0]][1])):
        weight = "bold" if bold & set(group) else "normal"
        text = fill(", ".join(texts[at] for at in group), 30)
        rows = text.split("\n")
        wide = (0.66 if weight == "bold" else 0.58) * _SIZE * max(map(len, rows)) * scale
        high = 1.25 * _SIZE * len(rows) * scale
        x, y = places[group[0]]
        boxes: list[Box] = [
            (left, low, left + wide, low + high)
            for reach in (7, 11, 16, 22, 30, 40, 52, 66, 82, 100, 120, 150)
            for dx, dy in ((1, 0), (0.8, 0.8), (0.8, -0.8), (-1, 0), (-0.8, 0.8), (-0.8, -0.8), (0, 1.2), (0, -1.2))
            for left in [x + dx * reach * scale - (wide if dx < 0 else 0 if dx > 0 else wide / 2)]
            for low in [y + dy * reach * scale - (high / 2 if dy == 0 else high if dy < 0 else 0)]
        ]
        free = [box for box in boxes if _is_inside(box, axes.bbox) and not any(_overlap(box, other) for other in taken)]
        chosen = free[0] if free else boxes[0]
        taken.append(chosen)
        left, low = axes.transData.inverted().transform((chosen[0], (chosen[1] + chosen[3]) / 2))
        axes.text(left, low, text, fontsize=_SIZE, weight=weight, va="center", color="#1a202c", zorder=4, linespacing=1.1)
        near = min(max(x, chosen[0]), chosen[2]), min(max(y, chosen[1]), chosen[3])
        if abs(near[0] - x) + abs(near[1] - y) > 9 * scale:
            ends = axes.transData.inverted().transform([(x, y), near])
            axes.plot(ends[:, 0], ends[:, 1], color=_GREY, lw=0.5, zorder=2)


def _group_points(places: Sequence[tuple[float, float]], near: float) -> list[list[int]]:
    """Points at the same place, which share one label."""
    groups: list[list[int]] = []
    for at, (x, y) in enumerate(places):
        for group in groups:
            if abs(places[group[0]][0] - x) + abs(places[group[0]][1] - y) < near:
                group.append(at)
                break
        else:
            groups.append([at])
    return groups


def _is_inside(box: Box, frame: Any) -> bool:
    return bool(box[0] >= frame.x0 and box[2] <= frame.x1 and box[1] >= frame.y0 and box[3] <= frame.y1)


def _overlap(one: Box, two: Box) -> bool:
    return one[0] < two[2] and two[0] < one[2] and one[1] < two[3] and two[1] < one[3]

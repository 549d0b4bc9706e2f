"""The picture of a window over time: the tokens in it, and its capacity as a line.

`.png` is drawn by matplotlib. `.html` is one file with its own SVG, which loads nothing.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kilburn.file import write_file
from kilburn.picture import check_picture, picture, plain_axes

FORMATS = (".png", ".html")

WIDTH, HEIGHT = 960, 440
POINTS = 4000
LEFT, RIGHT, TOP, BOTTOM = 76, 24, 64, 64
BLUE, RED, GREY, PALE = "#2b6cb0", "#c53030", "#718096", "#e2e8f0"


def draw(path: Path, curve: Sequence[tuple[int, int]], *, window: int, title: str, force: bool = False) -> None:
    """Draw a curve of (tokens seen, tokens in the window) to a file.

    Raises:
        SpecError, MissingExtra: see `check_picture`. OSError: the file cannot be written.
    """
    check_picture(path, force=force, formats=FORMATS)
    points = thin(curve)
    if path.suffix == ".png":
        with picture(path, 10, 4.6, force=force) as figure:
            _draw(figure, points, window, title)
    else:
        with write_file(path, force=force) as file:
            file.write(page(points, window, title).encode("utf-8"))


def thin(curve: Sequence[tuple[int, int]], most: int = POINTS) -> list[tuple[int, int]]:
    """At most about `most` points of a curve: the lowest and the highest of each stretch, so that every tooth stays
    visible."""
    if len(curve) <= most:
        return list(curve)
    size = -(-2 * len(curve) // most)
    kept: list[tuple[int, int]] = []
    for start in range(0, len(curve), size):
        stretch = curve[start : start + size]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept if kept[-1] == curve[-1] else [*kept, curve[-1]]


def _draw(figure: Any, curve: Sequence[tuple[int, int]], window: int, title: str) -> None:
    axes = figure.add_subplot()
    seen, used = [0, *(point[0] for point in curve)], [0, *(point[1] for point in curve)]
    axes.plot(seen, seen, color=GREY, linewidth=1, linestyle=":", label="without paging")
    axes.plot(seen, used, color=BLUE, linewidth=1.6, label="in the window")
    axes.fill_between(seen, used, color=BLUE, alpha=0.12)
    axes.axhline(window, color=RED, linewidth=1.4, linestyle="--", label=f"window, {window:,} tokens")
    axes.set(xlim=(0, max(seen[-1], 1)), ylim=(0, window * 1.25), xlabel="tokens seen so far", ylabel="tokens in the window")
    axes.set_title(title, loc="left", fontsize=12)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter("{x:,.0f}")
    plain_axes(axes)
    axes.legend(loc="upper right", frameon=False, ncols=3, fontsize=9)


STYLE = """\
body { margin: 2rem auto; max-width: 1000px; padding: 0 1rem; background: #fff }
svg { width: 100%; height: auto }
text { font: 13px system-ui, sans-serif; fill: #4a5568 }
.title { font-size: 17px; font-weight: 600; fill: #1a202c }
"""


def page(curve: Sequence[tuple[int, int]], window: int, title: str) -> str:
    """The whole HTML page."""
    name = html.escape(title)
    head = f'<meta charset="utf-8">\n<meta name="viewport" content="width=device-width">\n<title>{name}</title>'
    return f'<!doctype html>\n<html lang="en">\n{head}\n<style>\n{STYLE}</style>\n{_svg(curve, window, name)}\n</html>\n'


class _Plane:
    """Maps values to places in the drawing."""

    def __init__(self, most: float, top: float) -> None:
        self.most, self.top = most, top

    def x(self, value: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * value / self.most, 1)

    def y(self, value: float) -> float:
        return round(TOP + (HEIGHT - TOP - BOTTOM) * (1 - min(value, self.top) / self.top), 1)


def _svg(curve: Sequence[tuple[int, int]], window: int, name: str) -> str:
    points = [(0, 0), *curve]
    plane = _Plane(max(points[-1][0], 1), window * 1.25)
    line = " ".join(f"{plane.x(seen)},{plane.y(used)}" for seen, used in points)
    floor, limit, corner = plane.y(0), plane.y(window), min(plane.most, plane.top)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{name}">',
        f'<text class="title" x="{LEFT}" y="24">{name}</text>',
        *_axes(plane),
        _line(LEFT, floor, plane.x(corner), plane.y(corner), GREY, "2 4"),
        f'<polygon points="{LEFT},{floor} {line} {WIDTH - RIGHT},{floor}" fill="{BLUE}" fill-opacity=".12"/>',
        f'<polyline points="{line}" fill="none" stroke="{BLUE}" stroke-width="1.8" stroke-linejoin="round"/>',
        _line(LEFT, limit, WIDTH - RIGHT, limit, RED, "7 5"),
        *_legend(window),
        "</svg>",
    ]
    return "\n".join(parts)


def _line(x1: float, y1: float, x2: float, y2: float, colour: str, dashes: str = "none") -> str:
    ends = f'x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"'
    return f'<line {ends} stroke="{colour}" stroke-width="1.5" stroke-dasharray="{dashes}"/>'


def _text(x: float, y: float, text: str, anchor: str = "middle", more: str = "") -> str:
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}"{more}>{text}</text>'


def _axes(plane: _Plane) -> list[str]:
    floor, middle = plane.y(0), (TOP + HEIGHT - BOTTOM) / 2
    parts = []
    for value in ticks(plane.top):
        parts.append(_line(LEFT, plane.y(value), WIDTH - RIGHT, plane.y(value), PALE))
        parts.append(_text(LEFT - 8, plane.y(value) + 4, f"{value:,.0f}", "end"))
    for value in ticks(plane.most):
        parts.append(_line(plane.x(value), floor, plane.x(value), floor + 5, GREY))
        parts.append(_text(plane.x(value), floor + 20, f"{value:,.0f}"))
    parts.append(_line(LEFT, floor, WIDTH - RIGHT, floor, GREY))
    parts.append(_text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 14, "tokens seen so far"))
    parts.append(_text(16, middle, "tokens in the window", more=f' transform="rotate(-90 16 {middle})"'))
    return parts


def _legend(window: int) -> list[str]:
    entries = ((BLUE, "none", "in the window"), (RED, "7 5", f"window, {window:,} tokens"), (GREY, "2 4", "without paging"))
    parts = []
    for number, (colour, dashes, text) in enumerate(entries):
        left = LEFT + number * 210
        parts += [_line(left, 44, left + 28, 44, colour, dashes), _text(left + 36, 48, text, "start")]
    return parts


def ticks(most: float) -> list[float]:
    """Round values from 0 to `most`, four to nine of them."""
    if most <= 0:
        return [0.0]
    size = 10.0 ** math.floor(math.log10(most))
    step = next(step for step in (size / 5, size / 2, size, size * 2) if most / step <= 8)
    return [step * number for number in range(int(most / step) + 1)]

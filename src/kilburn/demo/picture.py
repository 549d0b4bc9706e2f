"""The sawtooth in letters: tokens in the window over time, for a terminal.

It refuses to be a plotting library: `kilburn.cli.sawtooth` draws files.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["band", "teeth"]

EIGHTHS = " ▁▂▃▄▅▆▇█"


def teeth(values: Sequence[int], bottom: int, top: int, *, height: int = 7) -> list[str]:
    """A column a value, `height` lines for `bottom` to `top`; first line first."""
    rows = []
    for row in reversed(range(height)):
        levels = ((value - bottom) / max(top - bottom, 1) * height - row for value in values)
        rows.append("".join(EIGHTHS[max(0, min(8, round(level * 8)))] for level in levels))
    return rows


def band(values: Sequence[int], top: int, *, width: int = 72, height: int = 7) -> list[str]:
    """Many values in few columns: full up to each stretch's least, shaded up to its most."""
    if not values:
        return [""] * height
    width = min(width, len(values))
    stretches = [values[at * len(values) // width : (at + 1) * len(values) // width] for at in range(width)]
    rows = []
    for row in reversed(range(height)):
        line = ""
        for stretch in stretches:
            low, high = (end / max(top, 1) * height - row for end in (min(stretch), max(stretch)))
            line += "█" if low >= 0.5 else "░" if high >= 0.5 else " "
        rows.append(line)
    return rows

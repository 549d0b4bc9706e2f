"""What was measured: an outcome a reference, a cell a policy and window, a report of all of them.

Counting only; it refuses to know how an outcome came about.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from kilburn.evals.baselines import CHARACTERS

__all__ = ["Cell", "Outcome", "Report", "Row", "cells", "interval"]

RESAMPLES = 1000

_HEAD = ("window", "policy", "survival", "95%", "to tail", "95%", "lines", "search", "reach", "over", "shipped", "again", "s")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one reference: shown at all, shown in a whole line of an older output, found by
    one search, found by one search or one fault by address (None where there is no store to ask)."""

    run: str
    step: int
    name: str
    policy: str
    window: int
    shown: bool
    line: bool
    searched: bool | None = None
    reachable: bool | None = None


@dataclass
class Cell:
    """What is added up while one policy is measured at one window. Tokens are of four characters."""

    policy: str
    window: int
    outcomes: list[Outcome] = field(default_factory=list)
    calls: int = 0
    overflow: int = 0
    shipped: int = 0
    refilled: int = 0
    seconds: float = 0.0

    def ship(self, before: str, shown: str, fresh: int, seams: int = 0) -> None:
        """Count one prompt: `before` is the last one, `fresh` the characters of the events since then,
        `seams` those line breaks in `shown` that only stand between messages."""
        tokens = -(-(len(shown) - seams) // CHARACTERS)
        same = _common(before, shown)
        self.calls += 1
        self.overflow += tokens > self.window
        self.shipped += tokens
        self.refilled += max(0, len(shown) - same - fresh) // CHARACTERS


def _common(one: str, other: str) -> int:
    """Characters that both begin with, found by halving."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Shares are of `references`; intervals are of 95%, resampled by run.

    Args:
        gain: survival minus that of the tail on the same references; `gain_low` and `gain_high` bound it.
        searched, reachable: None where there is no store to ask.
        overflow: prompts that were longer than the window.
        shipped: tokens of all prompts. refilled: those of them that had to be read again only because
            the prompt had changed before them.
    """

    policy: str
    window: int
    references: int
    survival: float
    low: float
    high: float
    gain: float
    gain_low: float
    gain_high: float
    line: float
    searched: float | None
    reachable: float | None
    overflow: int
    calls: int
    shipped: int
    refilled: int
    seconds: float


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All rows of one measurement, and each outcome behind them."""

    runs: int
    references: int
    rows: list[Row]
    outcomes: list[Outcome]

    def row(self, policy: str, window: int) -> Row:
        """The row of a policy at a window; KeyError where it was not measured."""
        for row in self.rows:
            if (row.policy, row.window) == (policy, window):
                return row
        raise KeyError((policy, window))

    def table(self) -> str:
        """Plain text, a line a policy and window."""
        body = [_written(row) for row in self.rows]
        widths = [max(len(line[at]) for line in (_HEAD, *body)) for at in range(len(_HEAD))]
        shown = [f"{self.references} references in {self.runs} runs; one token is {CHARACTERS} characters"]
        for line in (_HEAD, *body):
            padded = [cell.rjust(width) for cell, width in zip(line, widths, strict=True)]
            padded[1] = line[1].ljust(widths[1])
            shown.append("  ".join(padded))
        return "\n".join(shown)

    def to_json(self, *, outcomes: bool = False) -> str:
        """The rows as one JSON object; the outcomes too where asked for."""
        kept = self if outcomes else msgspec.structs.replace(self, outcomes=[])
        return msgspec.json.encode(kept).decode()


def _written(row: Row) -> tuple[str, ...]:
    return (
        str(row.window),
        row.policy,
        f"{row.survival:.3f}",
        f"{row.low:.3f}-{row.high:.3f}",
        f"{row.gain:+.3f}",
        f"{row.gain_low:+.3f} {row.gain_high:+.3f}",
        f"{row.line:.3f}",
        "" if row.searched is None else f"{row.searched:.3f}",
        "" if row.reachable is None else f"{row.reachable:.3f}",
        str(row.overflow),
        str(row.shipped),
        str(row.refilled),
        f"{row.seconds:.1f}",
    )


def cells(done: Sequence[Cell], seed: int) -> list[Row]:
    """The rows of the cells, each paired with the cell of "tail" at its window."""
    tails = {cell.window: cell for cell in done if cell.policy == "tail"}
    return [_row(cell, tails[cell.window], seed) for cell in done]


def _row(cell: Cell, tail: Cell, seed: int) -> Row:
    groups: dict[str, list[tuple[float, float]]] = {}
    for own, other in zip(cell.outcomes, tail.outcomes, strict=True):
        groups.setdefault(own.run, []).append((float(own.shown), float(own.shown) - float(other.shown)))
    low, high = interval([[shown for shown, _ in group] for group in groups.values()], seed)
    gain_low, gain_high = interval([[gain for _, gain in group] for group in groups.values()], seed)
    return Row(
        policy=cell.policy,
        window=cell.window,
        references=len(cell.outcomes),
        survival=_share([o.shown for o in cell.outcomes]),
        low=low,
        high=high,
        gain=_share([o.shown for o in cell.outcomes]) - _share([o.shown for o in tail.outcomes]),
        gain_low=gain_low,
        gain_high=gain_high,
        line=_share([o.line for o in cell.outcomes]),
        searched=_asked([o.searched for o in cell.outcomes]),
        reachable=_asked([o.reachable for o in cell.outcomes]),
        overflow=cell.overflow,
        calls=cell.calls,
        shipped=cell.shipped,
        refilled=cell.refilled,
        seconds=cell.seconds,
    )


def _share(found: Sequence[bool]) -> float:
    return sum(found) / len(found) if found else 0.0


def _asked(found: Sequence[bool | None]) -> float | None:
    answers = [one for one in found if one is not None]
    return _share(answers) if answers else None


def interval(groups: Sequence[Sequence[float]], seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """The middle 95% of the mean of all values when whole groups are drawn with replacement (Efron's bootstrap)."""
    sums = [(sum(group), len(group)) for group in groups if group]
    if not sums:
        return 0.0, 0.0
    chance = random.Random(seed)
    means = []
    for _ in range(resamples):
        drawn = chance.choices(sums, k=len(sums))
        means.append(sum(total for total, _ in drawn) / sum(count for _, count in drawn))
    means.sort()
    return means[int(0.025 * resamples)], means[int(0.975 * resamples)]

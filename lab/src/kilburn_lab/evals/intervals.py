"""The intervals of 95% that all measurements give: a bootstrap, and Wilson's for a share of right answers; and the 95th
percentile of waiting times."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from statistics import fmean, quantiles
from typing import TypeVar

from kilburn.errors import SpecError

RESAMPLES = 1000

T = TypeVar("T")


def mean(values: Iterable[float]) -> float:
    """Their mean; 0 of none."""
    known = list(values)
    return fmean(known) if known else 0.0


def percentile_95(values: Sequence[float]) -> float:
    """The value that 95% of some values are under; the value itself of one.

    Raises:
        IndexError: of none.
    """
    return quantiles(values, n=20, method="inclusive")[-1] if len(values) > 1 else values[0]


def grouped(values: Iterable[tuple[Hashable, T]]) -> list[list[T]]:
    """The values of each key, in the order in which the keys came."""
    groups: dict[Hashable, list[T]] = {}
    for key, value in values:
        groups.setdefault(key, []).append(value)
    return list(groups.values())


def resampled(figure: Callable[[Sequence[T]], float | None], items: Sequence[T], seed: int) -> tuple[float, float] | None:
    """The middle 95% of a figure when items are drawn with replacement (Efron's bootstrap).

    None if fewer than half of the resamples have the figure.
    """
    chance = random.Random(seed)
    drawn = (figure(chance.choices(items, k=len(items))) for _ in range(RESAMPLES))
    values = sorted(value for value in drawn if value is not None)
    if len(values) < RESAMPLES // 2:
        return None
    return values[int(0.025 * len(values))], values[int(0.975 * len(values))]


def interval(groups: Sequence[Sequence[float]], seed: int) -> tuple[float, float]:
    """The middle 95% of the mean of all values when whole groups are drawn with replacement; zeros without a value."""
    sums = [(sum(group), len(group)) for group in groups if group]
    if not sums:
        return 0.0, 0.0

    def pooled(drawn: Sequence[tuple[float, int]]) -> float:
        return sum(total for total, _ in drawn) / sum(count for _, count in drawn)

    return resampled(pooled, sums, seed) or (0.0, 0.0)


def wilson(right: int, asked: int) -> tuple[float, float]:
    """The 95% interval of a share (Wilson 1927).

    Raises:
        SpecError: no questions, or more right answers than questions.
    """
    if asked < 1 or not 0 <= right <= asked:
        raise SpecError(f"{right} right of {asked} asked", advice="count one answer or more")
    z = 1.959964
    share, norm = right / asked, 1 + z * z / asked
    middle = (share + z * z / (2 * asked)) / norm
    half = z / norm * math.sqrt(share * (1 - share) / asked + z * z / (4 * asked * asked))
    return max(0.0, middle - half), min(1.0, middle + half)

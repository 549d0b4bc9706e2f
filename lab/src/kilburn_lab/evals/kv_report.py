"""The report of `kilburn_lab.evals.kv`: hit rates, the regret to the optimum, and how much of the gap is closed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from kilburn.picture import picture
from kilburn_lab.evals.intervals import resampled
from kilburn_lab.evals.report import EvalReport, panel, row_of, table_of

LRU, MIN, OURS, INFINITE = "lru", "min", "returning", "infinite"


class HitTally(msgspec.Struct, frozen=True, kw_only=True):
    """Units that were found and wanted, by trace. `capacity` in tokens, 0 where there is no bound."""

    policy: str = ""
    capacity: int = 0
    subs: bool = True
    hits: dict[int, int]
    units: dict[int, int]
    seconds: float


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Intervals are of 95%, resampled by trace: of these traces in this weaving, not of others.

    Args:
        hit: share of the tokens that were in the cache.
        regret: the optimum's share less this one. closed: of the gap from LRU to the optimum, how much. Both
            None where there is no bound; closed also where there is no gap.
        speed: units a second, with what the replay itself takes.
    """

    policy: str
    capacity: int
    subs: bool
    hit: float
    low: float
    high: float
    regret: float | None
    closed: float | None
    closed_low: float | None
    closed_high: float | None
    speed: float


class CacheReport(EvalReport, frozen=True, kw_only=True):
    """All rates of one measurement.

    Args:
        hours: over which the sessions began. hold: whether a prompt's units had to stay until the next.
        units: of all prompts, with sub-agents where those were measured.
    """

    traces: int
    seed: int
    hours: float
    hold: bool
    units: int
    rates: list[Rate]

    def records(self) -> list[Rate]:
        """All rates."""
        return self.rates

    @classmethod
    def of(cls, tallies: Sequence[HitTally], *, traces: int, seed: int, hours: float, hold: bool) -> CacheReport:
        """The rates of what was counted; LRU and the optimum must be among it at each capacity."""
        known = {(tally.policy, tally.capacity, tally.subs): tally for tally in tallies}
        rates = []
        for tally in tallies:
            lru, best = (known.get((name, tally.capacity, tally.subs)) for name in (LRU, MIN))
            rates.append(_rate(tally, lru, best, seed))
        units = max(sum(tally.units.values()) for tally in tallies)
        return cls(traces=traces, seed=seed, hours=hours, hold=hold, units=units, rates=rates)

    def rate(self, policy: str, capacity: int = 0, subs: bool = True) -> Rate:
        """The rate of a policy; KeyError where it was not measured."""
        return row_of(self.rates, policy=policy, capacity=capacity, subs=subs)

    def table(self) -> str:
        """Plain text, a part for each arm."""
        parts = [
            f"{self.traces} traces (seed {self.seed}) begin within {self.hours:g} hours; {self.units:,} units of 1,024 tokens"
            + ("; a prompt stays until the next" if self.hold else "")
        ]
        for subs in dict.fromkeys(rate.subs for rate in self.rates):
            parts += [f"{'With' if subs else 'Without'} sub-agents: share of the tokens that were cached", self._arm(subs)]
        parts.append("closed: of the gap from lru to min; min knows the future, the rows without a capacity have no bound")
        return "\n\n".join(parts)

    def _arm(self, subs: bool) -> str:
        columns = (
            "capacity={bound} | policy={policy} | hit={hit:.3f} | 95%={low:.3f}-{high:.3f} | regret={regret:.3f} | "
            "closed={closed:+.0%} | 95%={closed_low:+.0%} {closed_high:+.0%} | units/s={speed:,.0f}"
        )
        rows = [rate for rate in self.rates if rate.subs == subs]
        return table_of(rows, columns, bound=lambda rate: f"{rate.capacity:,}" if rate.capacity else "-")


def _rate(tally: HitTally, lru: HitTally | None, best: HitTally | None, seed: int) -> Rate:
    def hit(drawn: Sequence[int]) -> float:
        return _share(tally, drawn)

    def closed(drawn: Sequence[int]) -> float | None:
        if lru is None or best is None or tally is lru:
            return None
        low, high = _share(lru, drawn), _share(best, drawn)
        return (_share(tally, drawn) - low) / (high - low) if high > low else None

    every = list(tally.units)
    bounds = resampled(hit, every, seed) or (0.0, 0.0)
    gap = closed(every)
    gaps = None if gap is None or tally is best else resampled(closed, every, seed)
    return Rate(
        policy=tally.policy,
        capacity=tally.capacity,
        subs=tally.subs,
        hit=hit(every),
        low=bounds[0],
        high=bounds[1],
        regret=None if best is None else _share(best, every) - hit(every),
        closed=gap,
        closed_low=gaps[0] if gaps else None,
        closed_high=gaps[1] if gaps else None,
        speed=sum(tally.units.values()) / max(1e-9, tally.seconds),
    )


def _share(tally: HitTally, drawn: Sequence[int]) -> float:
    return sum(tally.hits[trace] for trace in drawn) / max(1, sum(tally.units[trace] for trace in drawn))


def draw(path: Path, report: CacheReport, *, force: bool = False) -> None:
    """Draw hit rates over capacities, to the format that the file's name says.

    Raises:
        SpecError, MissingExtra, OSError: see `kilburn.picture.picture`.
    """
    arms = list(dict.fromkeys(rate.subs for rate in report.rates))
    with picture(path, 6.5 * len(arms), 4.8, force=force) as figure:
        for number, subs in enumerate(arms, 1):
            axes = figure.add_subplot(1, len(arms), number)
            mine = [rate for rate in report.rates if rate.subs == subs]
            for policy in dict.fromkeys(rate.policy for rate in mine if rate.capacity):
                line = sorted((rate.capacity / 1e6, rate.hit) for rate in mine if rate.policy == policy and rate.capacity)
                strong = policy in (OURS, MIN, LRU)
                axes.plot(*zip(*line, strict=True), marker="o", markersize=3.5, linewidth=2 if strong else 1, label=policy)
            for rate in mine:
                if rate.policy == INFINITE:
                    axes.axhline(rate.hit, color="#718096", linewidth=0.8, linestyle="--", label=INFINITE)
            labels = {"xlabel": "capacity, million tokens", "ylabel": "share of tokens cached"}
            panel(axes, f"{'with' if subs else 'without'} sub-agents", {"fontsize": 8}, ylim=(0, 1), **labels)

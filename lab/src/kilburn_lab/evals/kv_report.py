"""The report of `kilburn_lab.evals.kv`: hit rates, the regret to the optimum, and how much of the gap is closed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from kilburn_lab.evals.intervals import resampled
from kilburn_lab.evals.report import EvalReport, row_of, table_of

LRU, MIN, OURS, FORETOLD, INFINITE = "lru", "min", "returning", "foretold", "infinite"

GOAL_CLOSED, GOAL_MICROS = 0.45, 5.0
"""Of `OURS`: the share of the gap that is to be closed, and the microseconds in which a unit is to be chosen."""


class HitTally(msgspec.Struct, frozen=True, kw_only=True):
    """Units that were found and wanted, by trace. `capacity` in tokens, 0 where there is no bound.

    Args:
        told, chose: seconds of processor time in which the order was told of uses, and chose the `evicted` units.
    """

    policy: str = ""
    capacity: int = 0
    subs: bool = True
    hits: Mapping[int, int]
    units: Mapping[int, int]
    told: float = 0.0
    chose: float = 0.0
    evicted: int = 0

    def plus(self, other: HitTally) -> HitTally:
        """Both together, of the same traces."""
        return msgspec.structs.replace(
            self,
            hits={trace: hits + other.hits[trace] for trace, hits in self.hits.items()},
            units={trace: units + other.units[trace] for trace, units in self.units.items()},
            told=self.told + other.told,
            chose=self.chose + other.chose,
            evicted=self.evicted + other.evicted,
        )


class Rate(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the table. Intervals are of 95%, resampled by trace: of these traces in this weaving, not of others.

    Args:
        hit: share of the tokens that were in the cache.
        regret: the optimum's share less this one. closed: of the gap from LRU to the optimum, how much. Both
            None where there is no bound; closed also where there is no gap.
        used: microseconds of processor time for each unit of a prompt, in which the order was told of it and chose others.
        chosen: of these, the microseconds in which it chose, for each unit that it chose. Both None without an order.
        goal: what is to be reached, "" for the rows that are only compared.
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
    used: float | None
    chosen: float | None
    goal: str


class CacheReport(EvalReport, frozen=True, kw_only=True):
    """All rates of one measurement.

    Args:
        hours: over which the sessions began. hold: whether a prompt's units had to stay until its reply was complete.
        weavings: how often they were merged anew, with this seed and the next ones.
        units: of all prompts of all weavings, with sub-agents where those were measured.
    """

    traces: int
    seed: int
    weavings: int
    hours: float
    hold: bool
    units: int
    rates: list[Rate]

    def records(self) -> list[Rate]:
        """All rates."""
        return self.rates

    @classmethod
    def of(cls, tallies: Sequence[HitTally], *, traces: int, seed: int, weavings: int, hours: float, hold: bool) -> CacheReport:
        """The rates of what was counted; LRU and the optimum must be among it at each capacity."""
        known = {(tally.policy, tally.capacity, tally.subs): tally for tally in tallies}
        rates = []
        for tally in tallies:
            lru, best = (known.get((name, tally.capacity, tally.subs)) for name in (LRU, MIN))
            rates.append(_rate(tally, lru, best, seed))
        units = max(sum(tally.units.values()) for tally in tallies)
        return cls(traces=traces, seed=seed, weavings=weavings, hours=hours, hold=hold, units=units, rates=rates)

    def rate(self, policy: str, capacity: int = 0, subs: bool = True) -> Rate:
        """The rate of a policy; KeyError where it was not measured."""
        return row_of(self.rates, policy=policy, capacity=capacity, subs=subs)

    def table(self) -> str:
        """Plain text, a part for each arm."""
        parts = [
            f"{self.traces} traces ({self._seeds()}) begin within {self.hours:g} hours; {self.units:,} units of 1,024 tokens"
            + ("; a prompt stays until its reply is complete" if self.hold else "")
        ]
        for subs in dict.fromkeys(rate.subs for rate in self.rates):
            parts += [f"{'With' if subs else 'Without'} sub-agents: share of the tokens that were cached", self._arm(subs)]
        parts.append(
            "closed: of the gap from lru to min; min knows the future, the rows without a capacity have no bound\n"
            "us/unit: of the order's processor time, for each unit of a prompt; us/choice: of an eviction, for each unit chosen"
        )
        return "\n\n".join(parts)

    def _seeds(self) -> str:
        return f"seed {self.seed}" if self.weavings == 1 else f"{self.weavings} weavings, seeds from {self.seed} on"

    def _arm(self, subs: bool) -> str:
        columns = (
            "capacity={bound} | policy={policy} | hit={hit:.3f} | 95%={low:.3f}-{high:.3f} | regret={regret:.3f} | "
            "closed={closed:+.0%} | 95%={closed_low:+.0%} {closed_high:+.0%} | "
            "us/unit={used:.2f} | us/choice={chosen:.2f} | goal={goal}"
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
        used=(tally.told + tally.chose) / sum(tally.units.values()) * 1e6 if tally.evicted else None,
        chosen=tally.chose / tally.evicted * 1e6 if tally.evicted else None,
        goal=f">= {GOAL_CLOSED:.0%}, <= {GOAL_MICROS:g} us" if tally.policy == OURS else "",
    )


def _share(tally: HitTally, drawn: Sequence[int]) -> float:
    return sum(tally.hits[trace] for trace in drawn) / max(1, sum(tally.units[trace] for trace in drawn))

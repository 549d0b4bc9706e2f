"""KV regret: which orders of eviction keep the tokens that the next prompts begin with, and what perfect foresight would keep.

Traces of many sessions are merged into one stream, which a cache of so many tokens serves. A unit of 1,024 tokens is
a hit if it and all units before it are cached, as in an engine's prefix cache. Every prompt is computed. The order
decides which of its units are kept afterwards; with `hold`, all of them are kept until the next prompt, as in an
engine. Time is not modelled: a prompt takes no time, and what replies add is not cached before a prompt repeats it.

    report = evaluate(list(read("traces.jsonl.gz")), capacities=[1_000_000])
    print(report.table())
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Sequence

import msgspec

from kilburn.errors import SpecError
from kilburn_kv.eviction import EvictionOrder, PromptUse, RankedOrder
from kilburn_kv.return_odds import ReturnOdds
from kilburn_lab.evals.kv_orders import ORDERS
from kilburn_lab.evals.kv_report import INFINITE, LRU, MIN, OURS, CacheReport, HitTally
from kilburn_lab.evals.kv_traces import UNIT, Moment, Trace, weave
from kilburn_lab.evals.measure import Progress, check_known, unwatched

CAPACITIES = (1_000_000, 2_000_000, 4_000_000)
HOURS = 10.0
"""Hours over which the sessions begin. With this number, LRU and the optimum come closest to earlier figures."""

TTLS = {"ttl 5 min": 300.0, "ttl 60 min": 3600.0, INFINITE: math.inf}
"""Unlimited caches that forget what was not used for so many seconds."""

ONLINE: dict[str, Callable[[int], EvictionOrder]] = {**ORDERS, OURS: lambda _: ReturnOdds()}
POLICIES = (*ONLINE, MIN, *TTLS)

_NEVER = 1 << 60


def sample(traces: Sequence[Trace], seed: int, many: int | None = None, skip: int = 0) -> list[Trace]:
    """`many` of the traces (None for all), drawn by the seed, after `skip` others of the same drawing.

    Raises:
        SpecError: nothing is left to draw, or fewer than `many`.
    """
    drawn = list(traces)
    if many is not None or skip:
        random.Random(f"{seed}/sample").shuffle(drawn)
    chosen = drawn[skip : None if many is None else skip + many]
    if not chosen or (many is not None and len(chosen) < many):
        raise SpecError(f"{len(traces)} traces, {many} wanted after {skip}", advice="ask for fewer")
    return chosen


def evaluate(
    traces: Sequence[Trace],
    *,
    capacities: Sequence[int] = CAPACITIES,
    hours: float = HOURS,
    seed: int = 0,
    subs: Sequence[bool] = (True, False),
    hold: bool = False,
    policies: Sequence[str] = POLICIES,
    progress: Progress = unwatched,
) -> CacheReport:
    """Replay the traces through each policy at each capacity.

    Args:
        capacities: of the cache, in tokens.
        hours: over which the sessions begin, at times drawn evenly.
        seed: for those times, and for the intervals.
        subs: with sub-agents (True), without (False), in turn.
        hold: whether a prompt's units stay until the next prompt, whatever the order says. An engine needs them while
            it computes. Without it, MIN may drop at once what it will not need.
        policies: of `POLICIES`; LRU and the optimum are always measured.
        progress: called with the number of finished replays and of all replays.

    Raises:
        SpecError: an impossible number, no such policy, no traces with a whole unit, or a capacity below the longest
            prompt.
    """
    if not capacities or min(capacities) < UNIT or not 0 <= hours < math.inf or not subs:
        raise SpecError(
            f"capacities {list(capacities)}, {hours} hours",
            advice=f"give capacities of {UNIT} tokens or more, and hours of 0 or more",
        )
    check_known("policy", policies, POLICIES)
    names = [name for name in POLICIES if name in {*policies, LRU, MIN}]
    endless = [name for name in names if name in TTLS]
    bounded = [(capacity, name) for capacity in sorted(set(capacities)) for name in names if name not in TTLS]
    total = len(set(subs)) * (len(endless) + len(bounded))
    tallies: list[HitTally] = []

    def add(tally: HitTally) -> None:
        tallies.append(tally)
        progress(len(tallies), total)

    for arm in dict.fromkeys(subs):
        events = weave(traces, seed, hours, subs=arm)
        if not events:
            raise SpecError("no prompt has a whole unit", advice=f"give traces with prompts of {UNIT} tokens or more")
        for name in endless:
            add(expire(events, TTLS[name], name, arm))
        for capacity, name in bounded:
            order = Optimum(events) if name == MIN else ONLINE[name](capacity // UNIT)
            counted = replay(events, capacity // UNIT, order, hold=hold)
            add(msgspec.structs.replace(counted, policy=name, capacity=capacity, subs=arm))
    return CacheReport.of(tallies, traces=len(traces), seed=seed, hours=hours, hold=hold)


def replay(events: Sequence[Moment], capacity: int, order: EvictionOrder, *, hold: bool = False) -> HitTally:
    """Serve the events from a cache of `capacity` units with an order of eviction.

    Raises:
        SpecError: a prompt that is longer than the cache.
    """
    resident: set[int] = set()
    hits: dict[int, int] = {}
    units: dict[int, int] = {}
    began = time.perf_counter()
    for event in events:
        wanted = event.units
        if wanted is None:
            order.ended(event.use, event.time, event.why)
            continue
        if len(wanted) > capacity:
            raise SpecError(
                f"a prompt of {len(wanted) * UNIT:,} tokens, a cache of {capacity * UNIT:,}",
                advice="give a capacity that holds the longest prompt",
            )
        found = 0
        for unit in wanted:
            if unit not in resident:
                break
            found += 1
        hits[event.trace] = hits.get(event.trace, 0) + found
        units[event.trace] = units.get(event.trace, 0) + len(wanted)
        order.used(wanted, event.use)
        resident.update(wanted)
        over = len(resident) - capacity
        if over > 0:
            resident.difference_update(order.evict(over, frozenset(wanted if hold else ())))
    return HitTally(hits=hits, units=units, seconds=time.perf_counter() - began)


def expire(events: Sequence[Moment], seconds: float, name: str = "", subs: bool = True) -> HitTally:
    """Serve the events from an unlimited cache that forgets what was not used for so many seconds."""
    last: dict[int, float] = {}
    hits: dict[int, int] = {}
    units: dict[int, int] = {}
    began = time.perf_counter()
    for event in events:
        if event.units is None:
            continue
        now, found, whole = event.time, 0, True
        for unit in event.units:
            whole = whole and now - last.get(unit, -math.inf) <= seconds and unit in last
            found += whole
            last[unit] = now
        hits[event.trace] = hits.get(event.trace, 0) + found
        units[event.trace] = units.get(event.trace, 0) + len(event.units)
    return HitTally(policy=name, subs=subs, hits=hits, units=units, seconds=time.perf_counter() - began)


class Optimum(RankedOrder):
    """The offline optimum, MIN (Belady 1966): evicts first what is used again last; of one prompt its tail.

    A unit's prefix is used whenever the unit is, so MIN keeps whole prefixes, and no order of eviction has more hits.
    """

    def __init__(self, events: Sequence[Moment]) -> None:
        super().__init__()
        self._next: dict[int, list[int]] = {}
        soon: dict[int, int] = {}
        for at in range(len(events) - 1, -1, -1):
            units = events[at].units
            if units is not None:
                self._next[events[at].use.request] = [soon.get(unit, _NEVER) for unit in units]
                for unit in units:
                    soon[unit] = at

    def used(self, units: Sequence[int], use: PromptUse) -> None:
        """See `kilburn_kv.eviction.EvictionOrder`."""
        for depth, (unit, later) in enumerate(zip(units, self._next[use.request], strict=True)):
            self.put(unit, -later, -depth)

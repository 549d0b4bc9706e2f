"""KV regret: which orders of eviction keep the tokens that the next prompts begin with, and what perfect foresight would keep.

Traces of many sessions are merged into one stream, which a cache of so many tokens serves. A unit of 1,024 tokens is
a hit if it and all units before it are cached, as in an engine's prefix cache. Every prompt is computed. The order
decides which of its units are kept afterwards; with `hold`, all of them are kept until the reply is complete, as in an
engine. What replies add is not cached before a prompt repeats it.

    report = evaluate(list(read("traces.jsonl.gz")), capacities=[1_000_000])
    print(report.table())
"""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from collections.abc import Callable, Sequence

import msgspec

from kilburn.errors import SpecError
from kilburn_kv.blocks import Pool
from kilburn_kv.eviction import EvictionOrder, PromptUse, RankedOrder
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.table import Table
from kilburn_kv.tables import Tables
from kilburn_lab.evals.kv_orders import ORDERS
from kilburn_lab.evals.kv_report import FORETOLD, INFINITE, LRU, MIN, OURS, CacheReport, HitTally
from kilburn_lab.evals.kv_traces import UNIT, Moment, Trace, weave
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.return_odds import FOREVER, ReturnOdds, order_of
from kilburn_lab.evals.sample import HALVES, half_by

CAPACITIES = (1_000_000, 2_000_000, 4_000_000)
HOURS = 10.0
"""Hours over which the sessions begin. With this number, LRU and the optimum come closest to earlier figures."""

TTLS = {"ttl 5 min": 300.0, "ttl 60 min": 3600.0, INFINITE: math.inf}
"""Unlimited caches that forget what was not used for so many seconds."""

ONLINE: dict[str, Callable[[int], EvictionOrder]] = {**ORDERS, OURS: lambda _: ReturnOdds()}
POOLS = {"pool lru": LRU, "pool returning": OURS}
"""The engine's own pool, with an order: it is told no session, and what a running reply needs stays."""

POLICIES = (*ONLINE, FORETOLD, MIN, *POOLS, *TTLS)

_NEVER = 1 << 60


def sample(traces: Sequence[Trace], seed: int, many: int | None = None, half: str = "") -> list[Trace]:
    """Return at most `many` of the traces (None for all), drawn by the seed.

    Args:
        half: one of `HALVES`, by a hash of the trace's id; "" for all traces.

    Raises:
        SpecError: no such half, or no traces in it.
    """
    check_known("half", [half] if half else [], HALVES)
    drawn = [trace for trace in traces if half in ("", half_by(trace.id))]
    if not drawn:
        raise SpecError(f"no traces of the half {half!r}" if half else "no traces", advice="give more traces")
    if many is not None:
        random.Random(f"{seed}/sample").shuffle(drawn)
    return drawn[:many]


def evaluate(
    traces: Sequence[Trace],
    *,
    capacities: Sequence[int] = CAPACITIES,
    hours: float = HOURS,
    seed: int = 0,
    subs: Sequence[bool] = (True, False),
    hold: bool = False,
    policies: Sequence[str] = POLICIES,
    weavings: int = 1,
    progress: Progress = unwatched,
) -> CacheReport:
    """Replay the traces through each policy at each capacity.

    Args:
        capacities: of the cache, in tokens.
        hours: over which the sessions begin, at times drawn evenly.
        seed: for those times, and for the intervals.
        subs: with sub-agents (True), without (False), in turn.
        hold: whether a prompt's units stay until its reply is complete, whatever the order says, as in an engine. Where
            they leave no room, the newest other prompt gives way. Without it, MIN may drop at once what it will not need.
        policies: of `POLICIES`; LRU and the optimum are always measured.
        weavings: how often the traces are merged anew, with the next seeds; hits are summed.
        progress: called with the number of finished replays and of all replays.

    Raises:
        SpecError: an impossible number, no such policy, no traces with a whole unit, or a capacity below the longest
            prompt.
    """
    if not capacities or min(capacities) < UNIT or not 0 <= hours < math.inf or not subs or weavings < 1:
        raise SpecError(
            f"capacities {list(capacities)}, {hours} hours, {weavings} weavings",
            advice=f"give capacities of {UNIT} tokens or more, hours of 0 or more, and a weaving",
        )
    check_known("policy", policies, POLICIES)
    names = [name for name in POLICIES if name in {*policies, LRU, MIN}]
    endless = [name for name in names if name in TTLS]
    bounded = [(capacity, name) for capacity in sorted(set(capacities)) for name in names if name not in TTLS]
    total = len(set(subs)) * weavings * (len(endless) + len(bounded))
    tallies: dict[tuple[str, int, bool], HitTally] = {}
    done = 0

    def add(counted: HitTally, name: str, capacity: int, arm: bool) -> None:
        nonlocal done
        tally = msgspec.structs.replace(counted, policy=name, capacity=capacity, subs=arm)
        known = tallies.get((name, capacity, arm))
        tallies[name, capacity, arm] = tally if known is None else known.plus(tally)
        done += 1
        progress(done, total)

    progress(0, total)
    for arm in dict.fromkeys(subs):
        for weaving in range(seed, seed + weavings):
            events = weave(traces, weaving, hours, subs=arm)
            if not events:
                raise SpecError("no prompt has a whole unit", advice=f"give traces with prompts of {UNIT} tokens or more")
            for name in endless:
                add(expire(events, TTLS[name]), name, 0, arm)
            for capacity, name in bounded:
                add(_bounded(events, capacity // UNIT, name, hold), name, capacity, arm)
    return CacheReport.of(list(tallies.values()), traces=len(traces), seed=seed, weavings=weavings, hours=hours, hold=hold)


def _bounded(events: Sequence[Moment], capacity: int, name: str, hold: bool) -> HitTally:
    if name in POOLS:
        return serve(events, capacity, POOLS[name])
    if name == MIN:
        return replay(events, capacity, Optimum(events), hold=hold)
    order = Foretold(events) if name == FORETOLD else ONLINE[name](capacity)
    return replay(events, capacity, order, hold=hold)


def replay(events: Sequence[Moment], capacity: int, order: EvictionOrder, *, hold: bool = False) -> HitTally:
    """Serve the events from a cache of `capacity` units with an order of eviction.

    Raises:
        SpecError: a prompt that is longer than the cache.
    """
    resident: set[int] = set()
    running: dict[int, Sequence[int]] = {}
    pinned = _Pinned()
    hits, units = Counter[int](), Counter[int]()
    told = chose = 0.0
    evicted = 0
    for event in events:
        wanted, request = event.units, event.use.request
        if wanted is None:
            pinned.less(running.pop(request, ()))
            began = time.process_time()
            order.ended(event.use, event.time, event.why)
            told += time.process_time() - began
            continue
        _check_fits(wanted, capacity)
        found = 0
        for unit in wanted:
            if unit not in resident:
                break
            found += 1
        hits[event.trace] += found
        units[event.trace] += len(wanted)
        began = time.process_time()
        order.used(wanted, event.use)
        told += time.process_time() - began
        resident.update(wanted)
        if hold:
            running[request] = wanted
            pinned.more(wanted)
        while (over := len(resident) - capacity) > 0:
            began = time.process_time()
            victims = order.evict(over, pinned)
            chose += time.process_time() - began
            evicted += len(victims)
            resident.difference_update(victims)
            if len(victims) < over:  # the newest other gives way, as in an engine
                pinned.less(running.pop([other for other in running if other != request][-1]))
    return HitTally(hits=hits, units=units, told=told, chose=chose, evicted=evicted)


class _Pinned(dict[int, int]):
    """The units of running prompts, and how many of them have each."""

    def more(self, units: Sequence[int]) -> None:
        for unit in units:
            self[unit] = self.get(unit, 0) + 1

    def less(self, units: Sequence[int]) -> None:
        for unit in units:
            self[unit] -= 1
            if not self[unit]:
                del self[unit]


def serve(events: Sequence[Moment], capacity: int, order: str) -> HitTally:
    """Serve the events from the pool of an engine with `capacity` blocks, each of them one unit.

    A prompt's sequence is open until its reply is complete; if blocks run out, the newest others are preempted. Nobody
    tells the pool which session a prompt belongs to.

    Raises:
        SpecError: a prompt that is longer than the pool; no such order.
    """
    now = 0.0
    tables = Tables(Pool(capacity, 1, order_of(order), lambda: now))
    key = PrefixKey("traces", "none")
    tokens: dict[int, int] = {}
    running: dict[int, Table] = {}
    hits, units = Counter[int](), Counter[int]()
    for event in events:
        now = event.time
        if event.units is None:
            table = running.pop(event.use.request, None)
            if table is not None and table in tables:
                tables.free(table, event.why)
            continue
        _check_fits(event.units, capacity)
        prompt = [tokens.setdefault(unit, len(tokens)) for unit in event.units]
        table = running[event.use.request] = tables.open(key, [*prompt, 0])  # the last token is always computed
        hits[event.trace] += len(table)
        units[event.trace] += len(prompt)
        missed = prompt[len(table) :]
        tables.reserve(table.need(len(missed)), [table.number])
        table.append(missed)
        table.publish()
    return HitTally(hits=hits, units=units)


def _check_fits(wanted: Sequence[int], capacity: int) -> None:
    if len(wanted) > capacity:
        raise SpecError(
            f"a prompt of {len(wanted) * UNIT:,} tokens, a cache of {capacity * UNIT:,}",
            advice="give a capacity that holds the longest prompt",
        )


def expire(events: Sequence[Moment], seconds: float) -> HitTally:
    """Serve the events from an unlimited cache that forgets what was not used for so many seconds."""
    last: dict[int, float] = {}
    hits, units = Counter[int](), Counter[int]()
    for event in events:
        if event.units is None:
            continue
        now, found, whole = event.time, 0, True
        for unit in event.units:
            whole = whole and now - last.get(unit, -math.inf) <= seconds and unit in last
            found += whole
            last[unit] = now
        hits[event.trace] += found
        units[event.trace] += len(event.units)
    return HitTally(hits=hits, units=units)


class Foretold(ReturnOdds):
    """The same estimate, whose rates are those of the very events that it will see, counted beforehand.

    It says how far the estimate's information carries: stop reasons, ages of waits, paces, sizes.
    """

    def __init__(self, events: Sequence[Moment]) -> None:
        super().__init__()
        for event in events:
            if event.units is None:
                self.ended(event.use, event.time, event.why)
            else:
                self.used(event.units, event.use)
        for session in self._sessions.values():
            if session.prompt is not None:
                self._note(session.prompt, session.prompt.since + FOREVER, False)
        counted = self._kinds, self._cuts
        super().__init__()
        self._kinds, self._cuts = counted


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

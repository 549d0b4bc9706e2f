"""`eval kv`: each order evicts whom its definition says, MIN is never beaten, and the figures are those of the trace."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cli.terminal import kilburn
from kilburn.errors import InvalidMessage, SpecError
from kilburn_kv.blocks import Pool
from kilburn_kv.eviction import LruOrder, PromptUse
from kilburn_kv.prefixes import PrefixKey
from kilburn_kv.tables import Tables
from kilburn_lab.evals.kv import ONLINE, TTLS, Optimum, evaluate, expire, replay, sample, serve
from kilburn_lab.evals.kv_orders import FifoOrder, GreedyDual, LfuOrder, S3Fifo
from kilburn_lab.evals.kv_report import MIN, OURS
from kilburn_lab.evals.kv_traces import Moment, RecordedPrompt, Trace, read, synthetic, weave
from kilburn_lab.evals.return_odds import ReturnOdds, order_of

CAPACITY = 6


@st.composite
def streams(draw: st.DrawFn) -> list[Moment]:
    """Prompts of a few sessions over a small tree of prefixes, none longer than the cache; some replies end."""
    events: list[Moment] = []
    now = 0.0
    for request in range(draw(st.integers(1, 30))):
        path = draw(st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY))
        # The number of a node of the tree: what stands before it is part of it.
        units = tuple(int("1" + "".join(map(str, path[: depth + 1]))) for depth in range(len(path)))
        now += draw(st.sampled_from([0.0, 1.0, 7.0, 400.0, 10_000.0]))
        use = PromptUse(now, request, session=draw(st.integers(0, 3)), sub=draw(st.booleans()))
        events.append(Moment(now, use, path[0], units))
        if draw(st.booleans()):
            events.append(Moment(now, use, path[0], None, draw(st.sampled_from(["tool_use", "end_turn", ""]))))
    return events


def hits(events: Sequence[Moment], order: object, *, hold: bool = False, capacity: int = CAPACITY) -> int:
    return sum(replay(events, capacity, order, hold=hold).hits.values())  # type: ignore[arg-type]


def leading(units: Sequence[int], resident: object) -> int:
    found = 0
    while found < len(units) and units[found] in resident:  # type: ignore[operator]
        found += 1
    return found


def by_definition(events: Sequence[Moment], name: str, hold: bool) -> int:
    """Hits of a cache that looks at everything each time: the worst is found by its definition, one at a time."""
    resident: dict[int, dict[str, float]] = {}
    clock = total = 0
    age = 0.0
    running: dict[int, tuple[int, ...]] = {}
    for event in events:
        if event.units is None:
            running.pop(event.use.request, None)
            continue
        total += leading(event.units, resident)
        running[event.use.request] = event.units if hold else ()
        for unit in event.units if name == "lru head first" else reversed(event.units):
            clock += 1
            facts = resident.setdefault(unit, {"in": clock, "uses": 0.0})
            facts["last"] = clock
            facts["uses"] += 1
            facts["rank"] = age + facts["uses"]
        while len(resident) > CAPACITY:
            free = [unit for unit in resident if not any(unit in units for units in running.values())]
            if not free:
                del running[[other for other in running if other != event.use.request][-1]]
                continue
            keys = {
                "fifo": lambda unit: (resident[unit]["in"],),
                "lru": lambda unit: (resident[unit]["last"],),
                "lru head first": lambda unit: (resident[unit]["last"],),
                "lfu": lambda unit: (resident[unit]["uses"], resident[unit]["last"]),
                "gdsf": lambda unit: (resident[unit]["rank"], resident[unit]["last"]),
            }
            worst = min(free, key=keys[name])
            age = max(age, resident[worst]["rank"])
            del resident[worst]
    return total


@pytest.mark.parametrize("name", ["fifo", "lru", "lru head first", "lfu", "gdsf"])
@given(events=streams(), hold=st.booleans())
@settings(deadline=None, max_examples=30)
def test_an_order_evicts_whom_its_definition_says(name: str, events: list[Moment], hold: bool) -> None:
    assert hits(events, ONLINE[name](CAPACITY), hold=hold) == by_definition(events, name, hold)


@given(events=streams(), hold=st.booleans())
@settings(deadline=None, max_examples=30)
def test_no_order_beats_min_and_nothing_beats_a_cache_without_a_bound(events: list[Moment], hold: bool) -> None:
    best = hits(events, Optimum(events), hold=hold)
    for make in ONLINE.values():
        assert hits(events, make(CAPACITY), hold=hold) <= best
    endless = sum(expire(events, TTLS["infinite"]).hits.values())
    assert best <= endless
    assert hits(events, LruOrder(), capacity=10_000) == endless
    shorter = [sum(expire(events, seconds).hits.values()) for seconds in (0.0, 300.0, 3600.0)]
    assert shorter == sorted(shorter)
    assert shorter[-1] <= endless


@given(events=streams())
@settings(deadline=None, max_examples=25)
def test_min_is_what_trying_every_choice_finds(events: list[Moment]) -> None:
    prompts = [event.units[:3] for event in events if event.units is not None][:8]
    few = [Moment(float(at), PromptUse(float(at), at), 0, units) for at, units in enumerate(prompts)]
    reached = {frozenset[int](): 0}
    for units in prompts:
        after: dict[frozenset[int], int] = {}
        for kept, found in reached.items():
            whole = kept | set(units)
            for choice in combinations(sorted(whole), min(3, len(whole))):
                best = found + leading(units, kept)
                after[frozenset(choice)] = max(after.get(frozenset(choice), 0), best)
        reached = after
    assert hits(few, Optimum(few), capacity=3) == max(reached.values())


@pytest.mark.parametrize("name", [*ONLINE, MIN])
@given(events=streams(), hold=st.booleans())
@settings(deadline=None, max_examples=30)
def test_victims_are_resident_not_busy_and_as_many_as_were_asked_for(name: str, events: list[Moment], hold: bool) -> None:
    order = Optimum(events) if name == MIN else ONLINE[name](CAPACITY)
    resident: set[int] = set()
    for event in events:
        if event.units is None:
            order.ended(event.use, event.time, event.why)
            continue
        order.used(event.units, event.use)
        resident |= set(event.units)
        busy = set(event.units) if hold else set()
        victims = order.evict(max(0, len(resident) - CAPACITY), busy)
        assert len(victims) == len(set(victims)) == max(0, len(resident) - CAPACITY)
        assert set(victims) <= resident - busy
        resident -= set(victims)
    rest = order.evict(1000, ())
    assert set(rest) == resident
    assert order.evict(1, ()) == []


@pytest.mark.parametrize("name", [*ONLINE])
@given(events=streams(), chance=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=25)
def test_what_is_forgotten_is_not_evicted_until_it_is_used_again(name: str, events: list[Moment], chance: random.Random) -> None:
    order = ONLINE[name](CAPACITY)
    resident: set[int] = set()
    for event in events:
        if event.units is None:
            order.ended(event.use, event.time, event.why)
            continue
        order.used(event.units, event.use)
        resident |= set(event.units)
        gone = set(chance.sample(sorted(resident), chance.randint(0, len(resident))))
        order.forget(gone)
        resident -= gone
        victims = order.evict(chance.randint(0, 3), ())
        assert set(victims) <= resident
        resident -= set(victims)
    assert set(order.evict(1000, ())) == resident


@pytest.mark.parametrize("sessions", [20, 2000])
def test_a_decision_looks_at_as_few_sessions_among_many_as_among_few(sessions: int) -> None:
    order = ReturnOdds()
    evicted = prompts = 0
    fresh = iter(range(10**9))
    for turn in range(3 * sessions):
        use = PromptUse(float(turn), turn, session=turn % sessions)
        order.used([next(fresh) for _ in range(4)], use)
        order.ended(use, turn + 0.5, "stop")
        prompts += 1
        # As a pool does: a block at a time.
        for _ in range(4 if turn >= sessions else 0):
            evicted += len(order.evict(1, ()))
    assert evicted == 8 * sessions
    assert order.looked <= 2 * prompts + 2 * evicted + sessions


@pytest.mark.parametrize("order", ["returning", "lru"])
@given(events=streams())
@settings(deadline=None, max_examples=25)
def test_the_pool_of_an_engine_finds_what_its_order_kept_and_no_more(order: str, events: list[Moment]) -> None:
    endless = sum(expire(events, TTLS["infinite"]).hits.values())
    assert sum(serve(events, CAPACITY, order).hits.values()) <= endless
    assert sum(serve(events, 10_000, order).hits.values()) == endless


def test_the_pool_knows_who_comes_back_though_nobody_tells_it() -> None:
    def kept(order: str) -> int:
        now = 0.0
        tables = Tables(Pool(40, 1, order_of(order), lambda: now))
        key = PrefixKey("m", "d")

        def run(tokens: list[int], why: str) -> int:
            table = tables.open(key, [*tokens, 0])
            found = len(table)
            table.append(tokens[found:])
            table.publish()
            tables.free(table, why)
            return found

        again = found = 0
        for turn in range(200):
            now += 10.0
            found = run(list(range(1, 11)), "tool_use")
            again += found
            for stranger in range(4):  # each of them comes once
                now += 1.0
                run([1000 + 100 * turn + 10 * stranger + place for place in range(10)], "end_turn")
        return again

    # When it comes back, four strangers have been here, who fill the pool: LRU has given it up.
    assert kept("lru") == 0
    assert kept("returning") > 150 * 10


def test_s3_fifo_lets_a_scan_pass_and_keeps_what_was_used_before() -> None:
    order = S3Fifo(10)
    for number in range(3):
        order.used([1], PromptUse(float(number), number))
    resident = {1}
    for unit in range(100, 130):
        order.used([unit], PromptUse(float(unit), unit))
        resident.add(unit)
        resident -= set(order.evict(max(0, len(resident) - 10), ()))
    assert 1 in resident
    assert hits_of_a_scan(LruOrder()) == 0 < hits_of_a_scan(S3Fifo(10))


def hits_of_a_scan(order: LruOrder | S3Fifo) -> int:
    """A unit that is used three times, twenty others once each, and that unit again."""
    wanted = [1, 1, 1, *range(100, 120), 1]
    events = [Moment(float(at), PromptUse(float(at), at), at, (unit,)) for at, unit in enumerate(wanted)]
    return replay(events, 10, order).hits[len(wanted) - 1]


def test_s3_fifo_takes_a_ghost_to_the_main_queue() -> None:
    order = S3Fifo(4)
    order.used([7], PromptUse(0.0))
    assert order.evict(1, ()) == [7]
    order.used([7, 8, 9], PromptUse(1.0))
    # 7 came back and is no newcomer any more: 9 and 8 are, tail first.
    assert order.evict(1, ()) == [9]


def test_returning_learns_who_comes_back() -> None:
    order, now, request = ReturnOdds(), 0.0, 0
    for _ in range(100):
        now += 5.0
        quick = PromptUse(now, request, session=1)
        order.used([1, 2], quick)
        order.ended(quick, now + 1, "tool_use")
        once = PromptUse(now, request + 1, session=1000 + request)
        order.used([1000 + request], once)
        order.ended(once, now + 1, "end_turn")
        request += 2
    # The one that waits longest is the tool's, and yet it is the one that will come back.
    order.used([5], late := PromptUse(now + 2, request, session=2))
    order.ended(late, now + 2, "end_turn")
    victims = order.evict(101, ())
    assert 5 in victims
    assert not {1, 2} & set(victims)


def test_returning_tells_slow_sessions_from_quick_ones() -> None:
    order, request = ReturnOdds(), 0
    for now in range(0, 20_000, 10):
        for session, every in ((1, 10), (2, 1000)):
            if now % every == 0:
                order.used([session], PromptUse(float(now), request, session=session))
                request += 1
    # Both have just been here; the slow one, though it came last, is the one that will not be back soon.
    order.used([1], PromptUse(20_000.0, request, session=1))
    order.used([2], PromptUse(20_000.0, request + 1, session=2))
    assert order.evict(1, ()) == [2]


def test_returning_gives_up_first_what_a_session_left_behind_and_tails_before_heads() -> None:
    order = ReturnOdds()
    order.used([1, 2, 3, 4], PromptUse(0.0, 0, session=1))
    order.used([9, 10], PromptUse(1.0, 1, session=2))
    order.used([1, 2, 5], PromptUse(2.0, 2, session=1))
    assert order.evict(2, ()) == [4, 3]
    rest = order.evict(10, ())
    assert rest.index(10) < rest.index(9)
    assert rest.index(5) < rest.index(2) < rest.index(1)


def test_orders_forget_what_left() -> None:
    for order in (LruOrder(), FifoOrder(), LfuOrder(), GreedyDual(), ReturnOdds()):
        for number in range(2000):
            order.used([number], PromptUse(200_000.0 * number, number, session=number))
            order.evict(1 if number else 0, ())
        held = max(len(part) for part in vars(order).values() if isinstance(part, dict | list))
        assert held < 600, type(order).__name__


@pytest.fixture(scope="module")
def traces() -> list[Trace]:
    return list(synthetic(12, 3))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_figures_and_another_gives_others(traces: list[Trace]) -> None:
    def figures(seed: int) -> list[float]:
        report = evaluate(traces, capacities=[300_000], hours=1, seed=seed)
        return [rate.hit for rate in report.rates]

    assert figures(1) == figures(1)
    assert figures(1) != figures(2)
    assert list(synthetic(2, 5)) == list(synthetic(2, 5)) != list(synthetic(2, 6))


def test_regret_and_the_closed_share_follow_from_the_hits(traces: list[Trace]) -> None:
    report = evaluate(traces, capacities=[300_000, 900_000], hours=1, policies=["fifo", OURS, "infinite"])
    for capacity in (300_000, 900_000):
        lru, ours, best = (report.rate(name, capacity) for name in ("lru", OURS, MIN))
        assert best.regret == 0
        assert lru.closed is None
        assert ours.closed == pytest.approx((ours.hit - lru.hit) / (best.hit - lru.hit))
        assert ours.regret == pytest.approx(best.hit - ours.hit)
        assert lru.low <= lru.hit <= lru.high
        assert best.hit <= report.rate("infinite").hit
    assert {rate.subs for rate in report.rates} == {True, False}
    assert report.rate("infinite", subs=True).hit != report.rate("infinite", subs=False).hit


def line(**changes: object) -> str:
    request = {"t": 5.0, "hash_ranges": [[1, 30], [100, 10]], "api_time": 2.0, "stop": "tool_use"}
    child = {"t": 1.0, "hash_ranges": [[500, 16]]}
    return json.dumps({"id": "a", "block_size": 64, "requests": [request, {"t": 9.0, "requests": [child]}]} | changes)


def test_a_trace_is_read_in_whole_units_with_sub_agents_at_their_own_times(tmp_path: Path) -> None:
    path = tmp_path / "traces.jsonl.gz"
    path.write_bytes(gzip.compress(f"{line()}\n\n".encode()))
    (trace,) = read(path)
    # 40 blocks are two whole units of 16; the second ends in the second stretch.
    assert trace.prompts == (RecordedPrompt(5.0, 0, (16, 101), 2.0, "tool_use"), RecordedPrompt(10.0, 1, (515,), 0.0, ""))
    events = weave([trace], 0, 0.0)
    assert [(event.time, event.units is None, event.use.sub) for event in events] == [
        (5.0, False, False),
        (7.0, True, False),
        (10.0, False, True),
        (10.0, True, True),
    ]
    assert len({event.use.session for event in events}) == 2
    assert not any(event.use.sub for event in weave([trace], 0, 0.0, subs=False))


@pytest.mark.parametrize("text", ["{", "[]", line(block_size=16), line(requests=[{"t": 0, "hash_ranges": [[1, -5]]}])])
def test_a_line_that_is_no_trace_is_named(tmp_path: Path, text: str) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(f"{line()}\n{text}\n", encoding="utf-8")
    with pytest.raises(InvalidMessage, match=":2: "):
        list(read(path))


def test_what_cannot_be_measured_is_refused(traces: list[Trace], tmp_path: Path) -> None:
    with pytest.raises(InvalidMessage, match="absent"):
        list(read(tmp_path / "absent"))
    (tmp_path / "broken.gz").write_bytes(gzip.compress(line().encode())[:-9])
    with pytest.raises(InvalidMessage, match="broken gzip"):
        list(read(tmp_path / "broken.gz"))
    for wrong in ({"capacities": [10]}, {"hours": -1.0}, {"policies": ["clairvoyant"]}, {"subs": []}):
        with pytest.raises(SpecError):
            evaluate(traces, **wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="longest prompt"):
        evaluate(traces, capacities=[2048])
    with pytest.raises(SpecError, match="whole unit"):
        evaluate([Trace("empty", ())])
    with pytest.raises(SpecError, match="give more traces"):
        sample([], 0)
    with pytest.raises(SpecError, match="known: tune, report"):
        sample(traces, 0, half="other")
    with pytest.raises(SpecError, match="known: lru, returning"):
        order_of("clairvoyant")


def test_a_sample_is_drawn_by_the_seed(traces: list[Trace]) -> None:
    one, other, whole = sample(traces, 4, 6), sample(traces, 5, 6), sample(traces, 4, 13)
    assert len(one) == 6
    assert one == sample(traces, 4, 6) == whole[:6] != other
    assert {trace.id for trace in whole} == {trace.id for trace in traces}


def test_the_halves_share_no_trace_and_are_all(traces: list[Trace]) -> None:
    tune, report = (sample(traces, 0, half=half) for half in ("tune", "report"))
    assert {trace.id for trace in tune}.isdisjoint(trace.id for trace in report)
    assert len(tune) + len(report) == len(traces)


def test_weavings_are_summed(traces: list[Trace]) -> None:
    def hit(seed: int, weavings: int) -> float:
        report = evaluate(traces, capacities=[300_000], hours=1, seed=seed, weavings=weavings, subs=[True], policies=[OURS])
        return report.rate(OURS, 300_000).hit

    assert hit(4, 2) == pytest.approx((hit(4, 1) + hit(5, 1)) / 2)


def test_the_command_prints_json_or_a_table_and_refuses_what_it_does_not_know() -> None:
    words = ("lab", "kv", "--sample", "6", "--capacity", "400000", "--hours", "1", "--policy", OURS)
    done = kilburn(*words, "--json")
    assert done.status == 0
    assert {row["policy"] for row in done.json["rates"]} == {"lru", OURS, MIN}
    assert done.json["traces"] == 6
    ours = next(row for row in done.json["rates"] if row["policy"] == OURS)
    assert ours["goal"]
    assert ours["used"] > 0 < ours["chosen"]
    assert not done.json["hold"]
    shown = kilburn(*words, "--hold", "--no-sub-agents")
    assert "a prompt stays until its reply is complete" in shown.out
    assert "With sub-agents" not in shown.out
    refused = kilburn("lab", "kv", "--policy", "clairvoyant")
    assert refused.status == 2
    assert "known: fifo" in refused.err

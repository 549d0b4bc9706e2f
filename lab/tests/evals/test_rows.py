from __future__ import annotations

import msgspec
import pytest

from kilburn_lab.evals.baselines import BASELINES
from kilburn_lab.evals.cost import rates_of
from kilburn_lab.evals.outcomes import PolicyCounts, ReferenceOutcome
from kilburn_lab.evals.pareto import front
from kilburn_lab.evals.rows import PagingRow, model_differences_of, rows_of, verdicts_of


def cell(policy: str, shown: str, window: int = 100, *, refilled: int = 0, **more: str) -> PolicyCounts:
    """`shown` has a letter a reference: + where it was shown, . where not."""
    outcomes = [
        ReferenceOutcome(run=str(at), step=0, name="n", policy=policy, window=window, shown=mark == "+", line=mark == "+")
        for at, mark in enumerate(shown)
    ]
    made = PolicyCounts(
        policy=policy, window=window, spec=more.get("spec", policy), model=more.get("model", ""), outcomes=outcomes
    )
    made.calls, made.shipped, made.cached, made.refilled = 10, 1000, 500 - refilled, refilled
    return made


def baselines(shown: str, window: int = 100) -> list[PolicyCounts]:
    return [cell(name, shown, window) for name in BASELINES]


def rows(*cells: PolicyCounts) -> list[PagingRow]:
    return rows_of(cells, rates_of(), seed=0)


def test_regret_is_the_distance_to_the_optimum_at_the_same_window() -> None:
    found = rows(cell("tail", "+..."), cell("best", "+++.", spec="belady", refilled=100), cell("tail", "....", 200))
    tail, best, other = found
    assert (tail.regret, best.regret, other.regret) == (0.5, 0.0, None)
    assert tail.cost_regret["hosted"] == pytest.approx(tail.costs["hosted"] / best.costs["hosted"] - 1)
    assert (best.cost_regret["local"], other.cost_regret) == (0.0, {})


def test_each_row_is_paired_with_the_best_baseline_of_its_window() -> None:
    small = rows(cell("tail", "+..."), cell("last3", ".++."), cell("good", "+++."))
    large = rows(cell("tail", "++..", 200), cell("good", "+...", 200))
    assert [(row.best, row.gain) for row in small] == [("last3", -0.25), ("last3", 0), ("last3", 0.25)]
    assert [(row.best, row.gain) for row in large] == [("tail", 0), ("tail", -0.25)]
    assert rows(*baselines("+..."), cell("tail", "++..", 200))[-1].best == "tail"
    assert (small[1].gain_low, small[1].gain_high) == (0, 0)
    assert small[2].gain_low <= 0.25 <= small[2].gain_high


def test_times_of_plans_are_a_median_and_a_95th_percentile() -> None:
    slow, idle = cell("tail", "+"), cell("none", "+")
    slow.plans = [float(time) for time in range(1, 102)]
    one = cell("one", "+")
    one.plans = [4.0]
    found = rows(slow, idle, one)
    assert [(row.plan_p50, row.plan_p95) for row in found] == [(51, 96), (None, None), (4, 4)]


def test_a_verdict_is_about_all_windows() -> None:
    found = verdicts_of(
        rows(
            *baselines("+..."),
            *baselines("++..", 200),
            cell("good", "++..", refilled=5),
            cell("good", "+++.", 200, refilled=5),
            cell("half", "++..", refilled=5),
            cell("half", "++..", 200, refilled=50),
            cell("summarize", "....", refilled=10),
            cell("summarize", "....", 200, refilled=10),
        )
    )
    said = {one.policy: one for one in found}
    assert (said["good"].above, said["good"].fewer, said["good"].margins) == (True, True, {100: 0.25, 200: 0.25})
    assert (said["half"].above, said["half"].fewer, said["half"].refills) == (False, False, {100: 0.5, 200: 5.0})


def test_there_is_nothing_above_everything() -> None:
    [found] = verdicts_of(rows(*baselines("++++"), cell("good", "++++")))
    assert (found.above, found.fewer) == (True, None)


def test_without_all_baselines_there_is_no_verdict() -> None:
    assert verdicts_of(rows(*baselines("+...")[:-1], cell("good", "++++"))) == []


def test_what_a_model_lost_is_paired_with_what_there_was_without_it() -> None:
    plain, asked = cell("summarize", "++.."), cell("summarize +model", "+...", spec="summarize", model="local")
    [loss] = model_differences_of([cell("tail", "...."), plain, asked], seed=0)
    assert (loss.policy, loss.survival, loss.line) == ("summarize", -0.25, -0.25)
    assert loss.low <= loss.survival <= loss.high


def test_the_front_holds_what_nothing_beats() -> None:
    points = [(3.0, 0.9), (1.0, 0.2), (2.0, 0.2), (2.0, 0.5), (4.0, 0.9), (0.5, 0.1)]
    assert front(points) == [5, 1, 3, 0]
    assert front([]) == []


def test_rows_are_json() -> None:
    for row in rows(cell("tail", "+.")):
        assert msgspec.json.decode(msgspec.json.encode(row), type=PagingRow) == row


def copies(policy: str, *actions: str) -> PolicyCounts:
    """`actions` have a letter for each line that they copy: + where it was shown; each action is of a run of its own."""
    made = cell(policy, "")
    made.outcomes = [
        ReferenceOutcome(
            run=str(run), step=3, name=str(at), policy=policy, window=100, shown=mark == "+", line=False, kind="copy"
        )
        for run, shown in enumerate(actions)
        for at, mark in enumerate(shown)
    ]
    return made


def test_an_action_counts_once_however_much_it_copies() -> None:
    tail, good = rows(copies("tail", "+" * 26, ".", "."), copies("good", "+............" * 2, "+", "+"))
    assert (tail.copied, good.copied) == (26 / 28, 4 / 28)
    one, two = tail.by_action["copy"], good.by_action["copy"]
    assert (one.actions, one.share, two.share) == (3, pytest.approx(1 / 3), pytest.approx((2 / 26 + 2) / 3))
    assert (two.best, two.gain) == ("tail", pytest.approx(two.share - one.share))
    assert two.gain_low <= two.gain <= two.gain_high
    assert (one.gain_low, one.gain_high) == (0, 0)
    assert "name" not in tail.by_action

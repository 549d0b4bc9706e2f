"""The resumable task: the horizon grows with the rounds while the context stays, and a slip is not hidden."""

from __future__ import annotations

import pytest

from kilburn.errors import Overlong
from kilburn.testing import check_model
from kilburn_lab.reasoning_cache import Schedule
from recurrences import Recurrence, Stepper, recurrences, solve

TASK = Recurrence(start=7, factor=3, term=5, modulus=97, steps=300)


def test_what_one_context_cannot_hold_many_rounds_can() -> None:
    reached, peaks = [], []
    for rounds in (1, 2, 4, 8, 16):
        model = Stepper(context=220)
        made = solve(TASK, model, Schedule(rounds=rounds, reason=64, summary=16))
        reached.append(made.reached)
        peaks.append(made.reasoning.peak)
        assert made.reasoning.peak == model.peak <= 220
        assert all(one.summary_outcome == "done" for one in made.reasoning.rounds)
        assert made.right == (rounds == 16)
    assert reached == sorted(reached)
    assert reached[-1] == 300
    assert max(peaks) - min(peaks) <= 3, "the context is constant"
    assert made.reasoning.horizon > 4 * 220 - 220


def test_one_reply_that_takes_all_of_the_context_falls_short() -> None:
    made = solve(TASK, Stepper(context=220), Schedule(rounds=1, reason=150, summary=1))
    assert not made.right
    assert 0 < made.reached < 100


def test_a_slip_is_carried_on_and_not_called_right() -> None:
    made = solve(TASK, Stepper(slips=40), Schedule(rounds=20, reason=64, summary=16))
    assert not made.right
    assert made.reached < 300


def test_tasks_are_seeded_and_additions_need_no_modulus() -> None:
    assert recurrences(4, (10, 20), seed=3) == recurrences(4, (10, 20), seed=3)
    assert [task.steps for task in recurrences(4, (10, 20))] == [10, 20, 10, 20]
    task = recurrences(1, (40,), factor=1)[0]
    assert task.after(40) == task.start + 40 * task.term
    assert solve(task, Stepper(), Schedule(rounds=9, reason=64, summary=16)).right


def test_the_solver_is_a_model_with_a_window() -> None:
    check_model(Stepper)
    with pytest.raises(Overlong):
        solve(TASK, Stepper(context=100), Schedule(rounds=1, reason=64, summary=16))

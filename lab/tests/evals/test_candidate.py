from __future__ import annotations

from contextlib import closing

import pytest

from kilburn.errors import SpecError
from kilburn.kernel.resolve import names, resolve
from kilburn.policies.fifo import Fifo
from kilburn_lab.evals.candidate import KilburnCandidate
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.roster import Entrant, entries, everybody
from kilburn_lab.evals.sample import sample_of


def test_a_policy_may_be_given_as_an_object() -> None:
    shown = []
    for policy in ("fifo", Fifo()):
        with closing(KilburnCandidate(50, policy)) as candidate:
            for number in range(20):
                candidate.thought(f"thought {number} " + "x" * 30)
            shown.append(candidate.prompt_text())
    assert shown[0] == shown[1]
    assert "thought 19" in shown[0]
    assert "thought 2 " not in shown[0]


@pytest.mark.parametrize("tools", [False, True])
def test_each_event_is_a_message_and_all_of_it_is_shown(tools: bool) -> None:
    with closing(KilburnCandidate(1000, "fifo", tools=tools)) as candidate:
        for text in ("one", "two"):
            candidate.thought(f"thought {text}")
            candidate.action(f'say "{text}"\nin two lines')
            candidate.observation(f"output {text}")
        shown = candidate.prompt_text()
        for text in ("one", "two"):
            assert f"thought {text}" in shown
            assert f'say "{text}"\nin two lines' in shown
            assert f"output {text}" in shown
        assert candidate.stats().turns == 6


def test_a_model_makes_a_second_row_of_policies_that_can_ask() -> None:
    report = evaluate(sample_of(None, 3), [400], ["fifo", "last3", "summarize"], model="echo")
    assert [row.policy for row in report.rows] == ["tail", "fifo", "last3", "summarize", "summarize +model", "history"]
    plain, asked = report.row("summarize", 400), report.row("summarize +model", 400)
    assert (plain.model, asked.model, asked.spec) == ("", "echo", "summarize")
    assert asked.asks > 0
    assert (asked.reachable, asked.overflow) == (1.0, 0)
    [loss] = report.losses
    assert (loss.policy, loss.survival) == ("summarize", asked.survival - plain.survival)
    assert "With a model" in report.table()


def test_a_share_of_the_window_may_stand_in_a_spec() -> None:
    assert Entrant("x", "mask(keep=1, trigger={75%})").at(2000) == "mask(keep=1, trigger=1500)"
    row = evaluate(sample_of(None, 2), [400], ["summarize(trigger={50%})"]).row("summarize(trigger={50%})", 400)
    assert row.spec == "summarize(trigger=200)"


def test_everybody_takes_part_and_fits_every_window() -> None:
    listed = everybody()
    assert set(names("policies")) < set(listed)
    assert listed[0] == "tail"
    for window in (500, 8000):
        for entry in entries(listed, "", window):
            if entry.label in names("policies") and entry.label != "belady":
                assert resolve("policies", entry.at(window)) is not None


def test_nobody_shows_more_than_the_optimum_that_knows_the_future() -> None:
    report = evaluate(sample_of(None, 6), [400], ["hybrid", "fifo", "belady"])
    assert all(row.regret is not None and row.regret >= 0 for row in report.rows)
    assert report.row("belady", 400).regret == 0.0
    assert report.row("belady", 400).overflow == 0
    assert "regret" in report.table()


def test_an_optimum_with_arguments_is_refused() -> None:
    with pytest.raises(SpecError):
        evaluate(sample_of(None, 1), [400], ["belady(3)"])

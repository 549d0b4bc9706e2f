"""Excerpts keep a share for the beginning of a session, and show what the next action needs: measured by the laboratory."""

from __future__ import annotations

import pytest

from kilburn_lab.evals.drift import measure
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.sample import sample_of


@pytest.mark.parametrize(("policy", "least"), [("hybrid", 0.35), ("cost", 0.35)])
def test_after_twenty_compactions_the_window_still_shows_how_the_session_began(policy: str, least: float) -> None:
    trials = [measure(policy, "plain", seed, window=2000, passes=(20,)) for seed in range(3)]
    shown = [probe.shown for trial in trials for probe in trial.probes if probe.kind == "fact"]
    assert sum(shown) / len(shown) >= least, [trial.replicate for trial in trials]
    assert not any(trial.lost or trial.overflow for trial in trials)


def test_the_choice_of_passages_shows_what_the_next_action_needs() -> None:
    """The floor: an eighth of the excerpt, or the worst passages first, fail it."""
    report = evaluate(sample_of(None, limit=8, referring=True), windows=[700], policies=["hybrid", "cost", "fifo"])
    survival = {row.policy: row.survival for row in report.rows}
    assert survival["hybrid"] >= survival["tail"] + 0.2, survival
    assert survival["cost"] >= survival["tail"] + 0.03, survival
    assert min(survival["hybrid"], survival["cost"]) >= survival["fifo"] + 0.2, survival

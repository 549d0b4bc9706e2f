"""`eval equivalence`: what a forecaster makes of the views. The forecaster here knows a word if its prompt has it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kilburn.errors import SpecError
from kilburn.wire.trajectory import HeadMessage, Step, Trajectory
from kilburn_lab.evals.equivalence import Forecast, evaluate
from kilburn_lab.evals.references import references
from kilburn_lab.evals.sample import HALVES, Sample, sample_of
from kilburn_lab.evals.saved import SavedCells

KNOWN, UNKNOWN = 0.5, 4.5


class Copyist:
    """Foresees the words that its prompt has, and no others."""

    name = "copyist"
    context = 100_000

    def __init__(self, *, blind: bool = False) -> None:
        self.blind = blind
        self.prompts: list[str] = []

    def count(self, text: str) -> int:
        return len(re.findall(r"\w+", text))

    def losses(self, prompt: str, text: str) -> list[tuple[int, int, float]]:
        self.prompts.append(prompt)
        known = set() if self.blind else set(re.findall(r"\w+", prompt))
        return [(*found.span(), KNOWN if found[0] in known else UNKNOWN) for found in re.finditer(r"\w+", text)]


def made(runs: int = 12, **options: object) -> Sample:
    return sample_of(None, runs, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("reply", [False, True])
def test_the_task_alone_is_the_floor_and_full_history_the_ceiling(reply: bool) -> None:
    report = evaluate(made(reply=reply), Copyist(), windows=[300, 600], policies=["hybrid"], steps=10)
    assert report.separates
    for window in (300, 600):
        task, full = report.row("task", window), report.row("full", window)
        # Every dependent token is in the history.
        assert (full.dependent, task.closed, full.closed) == (KNOWN, 0.0, 1.0)
        for row in report.rows:
            assert row.dependent >= full.dependent
            assert row.window != window or row.policy == "stranger" or row.steps == task.steps
    tail, hybrid = report.row("tail", 300), report.row("hybrid", 300)
    task_only = report.row("task", 300).dependent
    assert (tail.best, tail.gain, tail.to_tail, tail.gap) == (True, 0.0, 0.0, 0.0)
    assert hybrid.to_tail == pytest.approx(tail.dependent - hybrid.dependent)
    assert hybrid.gap == pytest.approx(hybrid.gain / (tail.dependent - full.dependent))
    assert hybrid.closed == pytest.approx((task_only - hybrid.dependent) / (task_only - KNOWN))


def test_the_prefix_of_what_a_policy_showed_before_a_step_is_counted() -> None:
    report = evaluate(made(), Copyist(), windows=[300, 600], policies=["fifo"], steps=6)
    for window in (300, 600):
        tail, fifo, full = (report.row(policy, window) for policy in ("tail", "fifo", "full"))
        assert (full.kept, full.again) == (None, None)
        assert tail.kept is not None
        assert fifo.kept is not None
        assert tail.kept < fifo.kept
        assert tail.again is not None
        assert tail.again > 0


def test_a_reader_that_ignores_its_prompt_separates_nothing_and_the_report_says_so() -> None:
    report = evaluate(made(), Copyist(blind=True), windows=[300], policies=[], steps=5)
    assert not report.separates
    assert report.table().startswith("separates: NO")
    assert report.row("tail", 300).closed is None


def test_only_the_first_writing_of_a_reference_depends() -> None:
    report = evaluate(made(), Copyist(), windows=[300], policies=[], steps=50)
    runs = {run.id: run for run in made().runs}
    assert 0 < report.dependents < report.tokens
    for one in report.outcomes:
        words = re.findall(r"\w+", runs[one.run].steps[one.step].action)
        assert len(words) > 1 or one.dependent == one.all


def test_a_step_is_judged_where_its_history_is_longer_than_the_window() -> None:
    report = evaluate(made(), Copyist(), windows=[300, 1500], policies=["fifo"], steps=20)
    assert 0 < report.row("fifo", 1500).steps < report.row("fifo", 300).steps == report.steps
    with pytest.raises(SpecError, match="no step fits"):
        evaluate(made(), Copyist(), windows=[1_000_000])
    with pytest.raises(SpecError, match="no step fits"):
        evaluate(made(), Copyist(), windows=[300], context=10)


def test_a_stranger_is_the_window_of_another_task() -> None:
    forecaster, sample = Copyist(), made(2)
    report = evaluate(sample, forecaster, windows=[600], policies=[], steps=20)
    functions = [set(re.findall(r"def (\w+)", "".join(step.observation for step in run.steps))) for run in sample.runs]
    foreign = 0
    for prompt in forecaster.prompts:
        own = 0 if sample.runs[0].asked in prompt else 1
        shown = set(re.findall(r"def (\w+)", prompt))
        foreign += bool(shown & functions[1 - own]) and not shown & functions[own]
    assert foreign == report.row("stranger", 600).steps > 1
    assert all(one.policy != "stranger" for one in evaluate(made(1), forecaster, windows=[300], policies=[]).outcomes)


def test_what_was_read_is_not_read_again_and_a_new_policy_is(tmp_path: Path) -> None:
    file = tmp_path / "forecasts.jsonl"

    def measured(policies: list[str], *, resume: bool) -> tuple[object, int]:
        forecaster = Copyist()
        saved = SavedCells(file, forecaster.name, Forecast, resume=resume)
        report = evaluate(made(), forecaster, windows=[300], policies=policies, steps=4, saved=saved)
        return report, len(forecaster.prompts)

    first, read = measured(["fifo"], resume=False)
    assert read >= 4 * 4
    assert measured(["fifo"], resume=True) == (first, 0)
    assert 0 < measured(["fifo", "hybrid"], resume=True)[1] <= 4


def test_the_same_seed_draws_the_same_steps_and_more_steps_keep_the_first_ones() -> None:
    one, two, more = (evaluate(made(), Copyist(), windows=[300], policies=[], steps=steps) for steps in (4, 4, 8))
    assert one == two
    assert {(each.run, each.step) for each in one.outcomes} < {(each.run, each.step) for each in more.outcomes}


def test_bad_arguments_are_named() -> None:
    for wrong in ({"steps": 0}, {"windows": []}, {"windows": [0]}, {"policies": ["nobody"]}):
        with pytest.raises(SpecError):
            evaluate(made(2), Copyist(), **wrong)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="no half"):
        sample_of(None, 2, half="both")


def test_each_run_is_in_one_half_and_runs_of_a_task_in_the_same_one() -> None:
    tune, report = ({run.id for run in sample_of(None, 60, half=half).runs} for half in HALVES)
    assert not tune & report
    assert tune | report == {run.id for run in sample_of(None, 60).runs}
    assert min(len(tune), len(report)) > 15


def test_a_name_that_may_be_a_plain_word_does_not_depend() -> None:
    step = Step("Look.", "ls", "parser.config together BasicSet well-known")
    quiet = Step("Next.", "ls", "x" * 200)
    last = Step("Well-known together.", "open parser.config", "")
    run = Trajectory("one", (HeadMessage("user", "Repair it."),), (step, quiet, last))
    wanted = {"one": references(run, reply=True)}
    assert {one.name for one in wanted["one"]} == {"parser.config", "together"}
    sample = Sample(runs=(run,), wanted=wanted, words="", reply=True)
    report = evaluate(sample, Copyist(), windows=[10], policies=[])
    assert (report.steps, report.dependents) == (1, 2)

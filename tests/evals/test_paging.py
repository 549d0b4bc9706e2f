from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kilburn.errors import SpecError
from kilburn.evals.baselines import BASELINES, bm25
from kilburn.evals.outcomes import Cell, interval
from kilburn.evals.paging import evaluate
from kilburn.evals.trajectories import Run, Step


@pytest.mark.parametrize("policy", BASELINES)
def test_a_baseline_never_overflows_and_shows_all_that_fits(policy: str) -> None:
    report = evaluate(None, [200, 100_000], [policy], sample=6)
    assert all(row.overflow == 0 for row in report.rows)
    assert report.row(policy, 200).survival < 0.9
    assert report.row("tail", 100_000).survival == 1.0


@pytest.mark.parametrize("policy", ["tail", "tail+bm25", "fifo"])
def test_foreign_names_fall_to_chance(policy: str) -> None:
    true = evaluate(None, [1000], [policy], sample=8).row(policy, 1000)
    leak = evaluate(None, [1000], [policy], sample=8, shuffle=3).row(policy, 1000)
    assert leak.references == true.references > 20
    assert leak.survival == 0.0 < true.survival


def test_a_process_of_kilburn_loses_nothing() -> None:
    report = evaluate(None, [400], ["fifo"], sample=4)
    row = report.row("fifo", 400)
    assert row.survival < 1.0
    assert row.reachable == 1.0
    assert row.searched is not None
    assert row.overflow == 0


def test_outcomes_add_up_to_the_rows_and_the_report_is_json() -> None:
    report = evaluate(None, [300], ["truncated"], sample=5)
    for row in report.rows:
        own = [outcome for outcome in report.outcomes if outcome.policy == row.policy]
        assert len(own) == row.references == report.references
        assert row.survival == sum(outcome.shown for outcome in own) / len(own)
        assert row.line <= row.survival
        assert row.low <= row.survival <= row.high
    decoded = msgspec.json.decode(report.to_json())
    assert [row["policy"] for row in decoded["rows"]] == ["tail", "truncated"]
    assert decoded["outcomes"] == []
    assert len(msgspec.json.decode(report.to_json(outcomes=True))["outcomes"]) == len(report.outcomes)
    assert "truncated" in report.table()


def test_a_line_counts_only_where_it_is_whole(tmp_path: Path) -> None:
    long = "first_name " + "x" * 100
    steps = (Step("", "", f"{long}\nsecond_name"), Step("", "", "."), Step("", "use first_name second_name", ""))
    file = tmp_path / "runs.jsonl"
    file.write_bytes(msgspec.json.encode(Run("r", (), steps)))
    whole = evaluate(file, [100], ["tail"])
    assert [(o.name, o.shown, o.line) for o in whole.outcomes] == [("first_name", True, True), ("second_name", True, True)]
    cut = evaluate(file, [5], ["tail"])
    assert [(o.name, o.shown, o.line) for o in cut.outcomes] == [("first_name", False, False), ("second_name", True, True)]


def test_what_is_read_again_is_what_stands_behind_an_edit() -> None:
    cell = Cell(policy="p", window=10)
    cell.ship("", "aaaabbbb", 8)
    assert (cell.shipped, cell.refilled) == (2, 0)
    cell.ship("aaaabbbb", "aaaabbbbcccc", 4)
    assert (cell.shipped, cell.refilled) == (5, 0)
    cell.ship("aaaabbbbcccc", "aaaaccccdddd", 4)
    assert (cell.shipped, cell.refilled, cell.overflow) == (8, 1, 0)
    cell.ship("", "x" * 41, 41)
    assert cell.overflow == 1


def test_two_workers_find_what_one_finds() -> None:
    one, two = (evaluate(None, [200], ["last3"], sample=3, workers=workers) for workers in (1, 2))
    assert [msgspec.structs.replace(row, seconds=0.0) for row in one.rows] == [
        msgspec.structs.replace(row, seconds=0.0) for row in two.rows
    ]


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    evaluate(None, [200], ["last3"], sample=3, progress=lambda done, all_: seen.append((done, all_)))
    assert seen[-1] == (6, 6)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="windows"):
        evaluate(None, [], ["tail"])
    with pytest.raises(SpecError, match="windows"):
        evaluate(None, [0], ["tail"])
    with pytest.raises(SpecError):
        evaluate(None, [100], ["no-such-policy"], sample=1)
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(SpecError, match="no runs"):
        evaluate(empty, [100], ["tail"])


def test_bm25_prefers_the_rare_word() -> None:
    scores = bm25("common rare", ["common", "common rare", "common", "other"])
    assert max(range(4), key=scores.__getitem__) == 1
    assert scores[3] == 0.0


def test_the_interval_holds_the_mean_and_has_no_width_without_spread() -> None:
    assert interval([[1.0, 1.0], [1.0]], seed=0) == (1.0, 1.0)
    low, high = interval([[1.0], [0.0]] * 20, seed=0)
    assert low < 0.5 < high
    assert interval([], seed=0) == (0.0, 0.0)

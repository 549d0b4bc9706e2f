from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from kilburn.errors import SpecError
from kilburn.wire.trajectory import Step, Trajectory
from kilburn_lab.evals.baselines import BASELINES, HISTORY, bm25
from kilburn_lab.evals.intervals import interval
from kilburn_lab.evals.outcomes import PolicyCounts, join_cells
from kilburn_lab.evals.paging import evaluate
from kilburn_lab.evals.paging_report import PagingReport
from kilburn_lab.evals.rows import PagingRow
from kilburn_lab.evals.sample import Sample, sample_of
from kilburn_lab.evals.saved import SavedCells


def made(runs: int, shuffle: int | None = None) -> Sample:
    return sample_of(None, runs, shuffle=shuffle)


def timeless(report: PagingReport) -> list[PagingRow]:
    return [msgspec.structs.replace(row, seconds=0.0, plan_p50=None, plan_p95=None) for row in report.rows]


@pytest.mark.parametrize("policy", BASELINES)
def test_a_baseline_never_overflows_and_shows_all_that_fits(policy: str) -> None:
    report = evaluate(made(6), [200, 100_000], [policy])
    assert all(row.overflow == 0 for row in report.rows if row.policy != HISTORY)
    assert report.row(policy, 200).survival < 0.9
    whole = report.row(HISTORY, 200)
    assert (whole.survival, whole.refilled) == (1.0, 0)
    assert whole.overflow > 0
    assert report.row("tail", 100_000).survival == 1.0


@pytest.mark.parametrize("policy", ["tail", "tail+turns", "fifo"])
def test_foreign_names_fall_to_chance(policy: str) -> None:
    true = evaluate(made(8), [1000], [policy]).row(policy, 1000)
    leak = evaluate(made(8, shuffle=3), [1000], [policy]).row(policy, 1000)
    assert leak.references == true.references > 20
    assert leak.survival == 0.0 < true.survival


def test_a_process_of_kilburn_loses_nothing() -> None:
    report = evaluate(made(4), [400], ["fifo"])
    row = report.row("fifo", 400)
    assert row.survival < 1.0
    assert row.reachable == 1.0
    assert row.searched is not None
    assert row.overflow == 0


def test_outcomes_add_up_to_the_rows_and_the_report_is_json() -> None:
    report = evaluate(made(5), [300], ["truncated"])
    for row in report.rows:
        own = [outcome for outcome in report.outcomes if outcome.policy == row.policy]
        names, copies = ([outcome.shown for outcome in own if outcome.kind == kind] for kind in ("name", "copy"))
        assert len(names) == row.references == report.references
        assert row.survival == sum(names) / len(names)
        assert len(copies) == report.copies
        assert row.copied == sum(copies) / len(copies)
        assert row.line <= row.survival
        assert row.low <= row.survival <= row.high
    decoded = msgspec.json.decode(report.to_json())
    assert [row["policy"] for row in decoded["rows"]] == ["tail", "truncated", HISTORY]
    assert decoded["outcomes"] == []
    assert len(msgspec.json.decode(report.to_json(outcomes=True))["outcomes"]) == len(report.outcomes)
    assert "truncated" in report.table()


def test_a_line_counts_only_where_it_is_whole(tmp_path: Path) -> None:
    long = "first_name " + "x" * 100
    steps = (Step("", "", f"{long}\nsecond_name"), Step("", "", "."), Step("", "use first_name second_name", ""))
    file = tmp_path / "runs.jsonl"
    file.write_bytes(msgspec.json.encode(Trajectory("r", (), steps)))
    whole = evaluate(sample_of(file), [100], ["tail"])
    seen = [(o.name, o.shown, o.line) for o in whole.outcomes if o.policy == "tail"]
    assert seen == [
        ("first_name", True, True),
        ("second_name", True, True),
    ]
    cut = evaluate(sample_of(file), [5], ["tail"])
    seen = [(o.name, o.shown, o.line) for o in cut.outcomes if o.policy == "tail"]
    assert seen == [
        ("first_name", False, False),
        ("second_name", True, True),
    ]


def test_two_workers_find_what_one_finds() -> None:
    one, two = (evaluate(made(7), [200], ["last3", "fifo"], workers=workers) for workers in (1, 2))
    assert timeless(one) == timeless(two)
    assert one.outcomes == two.outcomes


def test_parts_of_a_cell_join_to_the_whole() -> None:
    one, two = (
        PolicyCounts(policy="p", window=10, calls=2, shipped=5, read={"openai": 2}),
        PolicyCounts(policy="p", window=10, calls=1, shipped=4, asks=3, read={"openai": 1, "anthropic": 4}),
    )
    whole = join_cells([one, two])
    assert (whole.calls, whole.shipped, whole.asks, one.calls) == (3, 9, 3, 2)
    assert whole.read == {"openai": 3, "anthropic": 4}


def test_what_was_measured_is_not_measured_again(tmp_path: Path) -> None:
    file, runs = tmp_path / "cells.jsonl", made(3)
    first = evaluate(runs, [200], ["fifo"], saved=SavedCells(file, runs.digest, PolicyCounts, resume=False))
    seen: list[tuple[int, int]] = []
    again = evaluate(
        runs,
        [200],
        ["fifo", "last3"],
        saved=SavedCells(file, runs.digest, PolicyCounts, resume=True),
        progress=lambda done, all_: seen.append((done, all_)),
    )
    assert seen[0] == (9, 12)
    assert seen[-1] == (12, 12)
    assert again.row("fifo", 200) == first.row("fifo", 200)
    assert len(file.read_bytes().splitlines()) == 4


def test_a_line_that_was_broken_off_is_measured_again(tmp_path: Path) -> None:
    file, runs = tmp_path / "cells.jsonl", made(2)
    evaluate(runs, [200], ["last3"], saved=SavedCells(file, runs.digest, PolicyCounts, resume=False))
    file.write_bytes(file.read_bytes()[:-20])
    saved = SavedCells(file, runs.digest, PolicyCounts, resume=True)
    assert (saved.find("tail", "tail", "", 200) is None) != (saved.find("last3", "last3", "", 200) is None)
    whole = timeless(evaluate(runs, [200], ["last3"], saved=saved))
    reopened = SavedCells(file, runs.digest, PolicyCounts, resume=True)
    assert whole == timeless(evaluate(runs, [200], ["last3"], saved=reopened))
    assert reopened.find("last3", "last3", "", 200) is not None


def test_cells_of_other_runs_or_other_names_do_not_count(tmp_path: Path) -> None:
    file, runs = tmp_path / "cells.jsonl", made(2)
    evaluate(runs, [200], [], saved=SavedCells(file, runs.digest, PolicyCounts, resume=False))
    for other in (made(3), made(2, shuffle=1), sample_of(None, 2, seed=1), sample_of(None, 2, tools=True)):
        assert SavedCells(file, other.digest, PolicyCounts, resume=True).find("tail", "tail", "", 200) is None
    assert SavedCells(file, runs.digest, PolicyCounts, resume=True).find("tail", "tail", "", 200) is not None
    with pytest.raises(SpecError, match="is no file"):
        SavedCells(tmp_path, runs.digest, PolicyCounts, resume=False)


def test_outputs_of_tool_calls_are_measured_like_messages() -> None:
    plain, told = (evaluate(sample_of(None, 3, tools=tools), [100_000], ["fifo"]) for tools in (False, True))
    assert told.row("fifo", 100_000).survival == plain.row("fifo", 100_000).survival == 1.0
    assert told.row("fifo", 100_000).calls == plain.row("fifo", 100_000).calls
    small = evaluate(sample_of(None, 3, tools=True), [400], ["mask"]).row("mask", 400)
    assert (small.reachable, small.overflow) == (1.0, 0)


def test_only_runs_that_refer_are_taken() -> None:
    lonely = made(60)
    chosen = sample_of(None, 60, referring=True)
    assert chosen.references == lonely.references
    assert {run.id for run in chosen.runs} == set(lonely.wanted)
    assert "with references" in chosen.words


def test_progress_reaches_its_end() -> None:
    seen: list[tuple[int, int]] = []
    evaluate(made(3), [200], ["last3"], progress=lambda done, all_: seen.append((done, all_)))
    assert seen[-1] == (9, 9)


def test_bad_arguments_are_named(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="windows"):
        evaluate(made(1), [], ["tail"])
    with pytest.raises(SpecError, match="windows"):
        evaluate(made(1), [0], ["tail"])
    with pytest.raises(SpecError):
        evaluate(made(1), [100], ["no-such-policy"])
    empty = tmp_path / "empty.jsonl"
    empty.touch()
    with pytest.raises(SpecError, match="no runs"):
        sample_of(empty)


def test_bm25_prefers_the_rare_word() -> None:
    scores = bm25("common rare", ["common", "common rare", "common", "other"])
    assert max(range(4), key=scores.__getitem__) == 1
    assert scores[3] == 0.0


def test_the_interval_holds_the_mean_and_has_no_width_without_spread() -> None:
    assert interval([[1.0, 1.0], [1.0]], seed=0) == (1.0, 1.0)
    low, high = interval([[1.0], [0.0]] * 20, seed=0)
    assert low < 0.5 < high
    assert interval([], seed=0) == (0.0, 0.0)


def test_runs_that_share_an_id_are_runs_of_their_own(tmp_path: Path) -> None:
    file = tmp_path / "runs.jsonl"
    runs = [msgspec.structs.replace(run, id="task") for run in sample_of(None, 4, referring=True).runs]
    file.write_bytes(b"\n".join(map(msgspec.json.encode, runs)))
    sample = sample_of(file)
    assert [run.id for run in sample.runs] == ["task", "task#2", "task#3", "task#4"]
    assert evaluate(sample, [1_000_000], ["tail"]).row("tail", 1_000_000).survival == 1.0


@pytest.mark.parametrize("tools", [False, True])
@pytest.mark.parametrize("session", [None, 3000])
def test_before_a_reply_a_large_window_shows_everything(tools: bool, session: int | None) -> None:
    sample = sample_of(None, 6, reply=True, tools=tools, session=session)
    report = evaluate(sample, [1_000_000, 700], ["tail", "tail+chunks", "hybrid", "belady"])
    for policy in ("tail", "tail+chunks", "hybrid", "belady"):
        large = report.row(policy, 1_000_000)
        assert (large.survival, large.copied, large.overflow) == (1.0, 1.0, 0)
    assert report.row("belady", 700).survival > report.row("hybrid", 700).survival > report.row("tail", 700).survival
    assert report.row("hybrid", 700).reachable == 1.0


def test_before_a_reply_nothing_of_it_is_shown(tmp_path: Path) -> None:
    """The thought quotes what the action names: shown before the action, and not before the reply."""
    file = tmp_path / "runs.jsonl"
    steps = (
        Step("look", "ls", "alpha_file.py " + "x" * 400),
        Step("hm", "pwd", "no"),
        Step("alpha_file.py", "cat alpha_file.py", ""),
    )
    file.write_bytes(msgspec.json.encode(Trajectory("r", (), steps)))
    assert evaluate(sample_of(file), [20], ["tail"]).row("tail", 20).survival == 1.0
    assert evaluate(sample_of(file, reply=True), [20], ["tail"]).row("tail", 20).survival == 0.0

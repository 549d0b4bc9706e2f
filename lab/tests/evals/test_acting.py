"""`eval tasks`: real files, real checks, and an agent that knows only its window."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn as command
from kilburn.errors import SpecError
from kilburn.model import Request
from kilburn.models.scripted import Scripted
from kilburn_lab.evals.acting import ActingRow, evaluate
from kilburn_lab.evals.baselines import HISTORY
from kilburn_lab.evals.cost import rates_of
from kilburn_lab.evals.tasks import FILES, KINDS, LINES, Edit, Look, Say, Workshop, tasks

LARGE = 1_000_000


def timeless(row: ActingRow) -> ActingRow:
    return msgspec.structs.replace(row, plan_p50=None, plan_p95=None)


def test_a_task_fails_before_the_work_and_is_solved_by_its_plan(tmp_path: Path) -> None:
    for task in tasks(len(KINDS), seed=5):
        workshop = Workshop(tmp_path / task.id, task)
        assert not workshop.check()[0]
        told = ""
        for step in task.plan:
            if isinstance(step, Say):
                told += step.text + "\n"
            elif isinstance(step, Look):
                told += workshop.do(step.command) + "\n"
            else:
                found = step.fact.search(told)
                assert found is not None, f"{task.id}: {step.fact.pattern}"
                workshop.do(step.make(found))
        assert workshop.check() == (True, "all is well\n")


@pytest.fixture
def headers(tmp_path: Path) -> Path:
    """C headers that do not exist: functions of several arguments, constants, and names that several files share."""
    folder = tmp_path / "include"
    folder.mkdir()
    for file in range(FILES):
        lines = [f"/* File {file}. */"] * 2 * LINES
        lines += [f"extern int open_{chr(97 + file)}{number} (int one, char *two);" for number in range(4)]
        lines += [f"# define LIMIT_{file}_{number}  {10 * number + file + 1}" for number in range(4)]
        lines += ["typedef int shared_name;"] if file < 6 else []
        (folder / f"file{file}.h").write_text("\n".join([*lines, ""]))
    (folder / "latin.h").write_bytes(b"/* \xe9 */\n" * 3 * LINES)
    return folder


def test_tasks_may_be_made_from_c_headers(headers: Path) -> None:
    report = evaluate(4, windows=[LARGE], policies=["hybrid"], sources=headers)
    assert all((row.solved, row.steps) == (1.0, 1.0) for row in report.rows)
    assert f"C headers of {headers}" in report.table()
    files = {path for task in tasks(4, 0, headers) for path in task.files}
    assert files <= {f"file{number}.h" for number in range(FILES)}
    small = evaluate(4, windows=[600], policies=["fifo"], sources=headers)
    assert all((row.solved < 1) == (row.policy != HISTORY) for row in small.rows)


def test_a_folder_that_does_not_do_is_named(headers: Path, tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="too few sources"):
        evaluate(1, sources=tmp_path / "nothing")
    for path in headers.glob("*.h"):
        path.write_bytes(path.read_bytes().replace(b"shared_name", b"name"))
    with pytest.raises(SpecError, match="no task of kind rename"):
        evaluate(1, sources=headers)


def test_no_fact_stands_in_what_the_agent_says_itself() -> None:
    for task in tasks(2 * len(KINDS), seed=6):
        said = "\n".join([task.ask, *(step.thought for step in task.plan if isinstance(step, Look | Edit))])
        said += "".join(f"\n{step.form}" for step in task.plan if isinstance(step, Edit))
        assert not any(step.fact.search(said) for step in task.plan if isinstance(step, Edit))


def test_a_window_that_holds_everything_solves_everything_in_the_planned_steps() -> None:
    report = evaluate(4, windows=[LARGE], policies=["tail+chunks", "hybrid"])
    for policy in ("tail", "tail+chunks", "hybrid"):
        row = report.row(policy, LARGE)
        assert (row.solved, row.shown, row.steps, row.overflow) == (1.0, 1.0, 1.0, 0)


def test_what_a_provider_is_paid_is_told_for_each_solved_task() -> None:
    report = evaluate(4, windows=[2000], policies=["fifo", "cost"])
    bills = {(one.policy, one.provider): one for one in report.bills}
    for row in report.rows:
        bill = bills[row.policy, "anthropic"]
        assert (bill.right, bill.shipped, bill.read) == (round(4 * row.solved), row.shipped, row.read["anthropic"])
        assert bill.read + bill.written <= bill.shipped
        assert row.kept is not None
    assert bills["tail", "openai"].read < bills["fifo", "openai"].read
    solved = bills["cost", "deepseek"]
    assert solved.each == (pytest.approx(1000 * solved.dollars / solved.right) if solved.right else None)
    assert "What a provider has to process" in report.table()


def test_what_the_user_said_last_stays_where_outputs_are_told_as_results_of_tools() -> None:
    values = {}
    for tools in (False, True):
        report = evaluate(2, windows=[1000], policies=["fifo"], tools=tools)
        assert ("told as tool calls" in report.table()) is tools
        values[tools] = {one.policy: one.solved for one in report.outcomes if one.kind == "values" and one.policy != HISTORY}
    assert values == {False: {"tail": False, "fifo": False}, True: {"tail": False, "fifo": True}}


def test_what_the_window_does_not_show_costs_steps_or_the_task() -> None:
    small = evaluate(4, windows=[600], policies=["fifo"])
    assert all(row.solved < 1 and row.shown < 1 and row.overflow == 0 for row in small.rows if row.policy != HISTORY)
    # What the user said cannot be done again, but it can be searched for.
    values = {one.policy: one.solved for one in small.outcomes if one.kind == "values" and one.policy != HISTORY}
    assert values == {"tail": False, "fifo": False}
    searched = evaluate(4, windows=[600], policies=["fifo"], search=True)
    values = {one.policy: one.solved for one in searched.outcomes if one.kind == "values"}
    assert values == {"tail": False, "fifo": True, HISTORY: True}
    stubborn = evaluate(4, windows=[600], policies=["fifo"], patience=50)
    again = {one.policy: one for one in stubborn.outcomes if one.kind == "failures"}["fifo"]
    assert again.solved
    assert again.steps == again.plan + again.again > again.plan


def test_no_fact_is_found_by_chance() -> None:
    """What all tasks but one are about says nothing about that one, so no row is needed for chance."""
    made = list(tasks(2 * len(KINDS), seed=7))
    words = {task.id: "\n".join([task.ask, task.check, *task.files.values()]) for task in made}
    for task in made:
        others = "\n".join(text for id, text in words.items() if id != task.id)
        assert not any(step.fact.search(others) for step in task.plan if isinstance(step, Edit))


def test_what_the_work_costs_stands_in_the_rows() -> None:
    report = evaluate(4, windows=[800, LARGE], policies=["hybrid", "tail+chunks"], rates=rates_of(["automatic"]))
    for row in report.rows:
        own = [one for one in report.outcomes if (one.policy, one.window) == (row.policy, row.window)]
        assert row.shipped == sum(one.shipped for one in own)
        assert row.refilled == sum(one.refilled for one in own)
        assert row.calls >= sum(one.steps for one in own)
        assert list(row.costs) == ["automatic"]
        if row.window == LARGE or row.policy == HISTORY:
            assert row.refilled < row.calls  # the line breaks between new messages
            assert row.policy == HISTORY or (row.sections, row.plan_p50) == (None, None)
        else:
            assert row.refilled > row.calls
            assert row.plan_p50 is not None
            assert row.plan_p95 is not None
            assert 0 <= row.plan_p50 <= row.plan_p95


def test_each_policy_is_paired_with_the_best_baseline() -> None:
    report = evaluate(4, windows=[800, LARGE], policies=["tail+chunks", "fifo"])
    for window in (800, LARGE):
        rows = [row for row in report.rows if row.window == window]
        [best] = {row.best for row in rows}
        assert report.row(best, window).solved == max(report.row(name, window).solved for name in ("tail", "tail+chunks"))
        assert all(row.gain == pytest.approx(row.solved - report.row(best, window).solved) for row in rows)
        assert all(row.gain_low <= row.gain <= row.gain_high for row in rows)
        assert best in report.table().split("\n\n")[1]


def test_the_same_seed_gives_the_same_report() -> None:
    one, two = (evaluate(4, windows=[800], policies=["hybrid"], seed=3) for _ in range(2))
    assert one.outcomes == two.outcomes
    assert [timeless(row) for row in one.rows] == [timeless(row) for row in two.rows]


def test_the_verb_prints_json_and_draws_a_picture(tmp_path: Path) -> None:
    plot = tmp_path / "pareto.svg"
    said = command("lab", "tasks", "--sample", "2", "--window", "1000", "--policy", "hybrid", "--json", "--plot", plot)
    assert said.status == 0
    assert plot.read_bytes().startswith(b"<?xml")
    assert {row["policy"] for row in said.json["rows"]} == {"tail", "hybrid", HISTORY}
    assert command("lab", "tasks", "--window", "0").status == 2


def read_figure(request: Request) -> str:
    """Writes the figure that was agreed if the prompt shows it, else looks once more where it may; does no other task."""
    window, now = request.messages[-1]["content"].rsplit("\n\nNow: ", 1)
    wanted = re.search(r"Write (\w+) = its figure as line (\d+) of agreed.py", now)
    if wanted is None:
        return '{"verb": "wri'
    line = re.search(rf"^{wanted[1]} = \d+$", window, re.M)
    if line is not None:
        return json.dumps({"verb": "write", "path": "agreed.py", "line": int(wanted[2]), "text": line[0]})
    assert request.schema is not None
    return json.dumps({"verb": request.schema.get("anyOf", [request.schema])[-1]["properties"]["verb"]["const"]})


def test_a_model_decides_from_the_window_alone_and_the_check_judges_it() -> None:
    def solved(window: int, search: bool, *replies: object) -> dict[tuple[str, str], bool]:
        model = Scripted([*replies] * 200)  # type: ignore[list-item]
        report = evaluate(2, windows=[window], policies=["fifo"], search=search, model=model)
        assert sum(row.agent.asks for row in report.rows) == len(model.requests) > 0
        return {(one.policy, one.kind): one.solved for one in report.outcomes}

    known = solved(LARGE, False, read_figure)
    assert known == {(policy, kind): kind == "values" for policy in ("tail", "fifo", HISTORY) for kind in ("rename", "values")}
    assert [key for key, done in solved(600, False, read_figure).items() if done] == [(HISTORY, "values")]
    assert [key for key, done in solved(600, True, read_figure).items() if done] == [("fifo", "values"), (HISTORY, "values")]
    elsewhere = json.dumps({"verb": "write", "path": "/etc/passwd", "line": 1, "text": ""})
    assert not any(solved(LARGE, False, elsewhere).values())


def test_a_writer_answers_the_policies_questions_in_rows_of_their_own() -> None:
    report = evaluate(4, windows=[1000], policies=["summarize"], writer=Scripted(["They agreed on some figures."] * 500))
    asked = {row.policy: row.writer.asks for row in report.rows}
    assert asked.pop("summarize +model") > 0
    assert asked == {"tail": 0, "summarize": 0, HISTORY: 0}
    assert "writer" in report.table()


def test_bad_arguments_are_named() -> None:
    for wrong in ({"count": 0}, {"windows": []}, {"windows": [0]}, {"policies": ["nobody"]}):
        with pytest.raises(SpecError):
            evaluate(**{"count": 1, **wrong})  # type: ignore[arg-type]


def test_a_command_reads_as_it_is_typed() -> None:
    looks = [step for task in tasks(1, seed=1) for step in task.plan if isinstance(step, Look)]
    assert str(looks[0].command).startswith("search ")
    assert "\n" not in str(msgspec.structs.replace(looks[0].command, text="x"))

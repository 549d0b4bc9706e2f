"""`eval tasks`: real files, real checks, and an agent that knows only its window."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn as command
from kilburn.errors import SpecError
from kilburn.evals.acting import evaluate
from kilburn.evals.tasks import KINDS, Edit, Look, Say, Workshop, tasks
from kilburn.model import Request
from kilburn.models.scripted import Scripted

LARGE = 1_000_000


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


def test_no_fact_stands_in_what_the_agent_says_itself() -> None:
    for task in tasks(2 * len(KINDS), seed=6):
        said = "\n".join([task.ask, *(step.thought for step in task.plan if isinstance(step, Look | Edit))])
        said += "".join(f"\n{step.form}" for step in task.plan if isinstance(step, Edit))
        assert not any(step.fact.search(said) for step in task.plan if isinstance(step, Edit))


def test_a_window_that_holds_everything_solves_everything_in_the_planned_steps() -> None:
    report = evaluate(4, windows=[LARGE], policies=["tail+bm25-older", "hybrid"])
    for policy in ("tail", "tail+bm25-older", "hybrid"):
        row = report.row(policy, LARGE)
        assert (row.solved, row.shown, row.steps, row.overflow) == (1.0, 1.0, 1.0, 0)


def test_what_the_window_does_not_show_costs_steps_or_the_task() -> None:
    small = evaluate(4, windows=[600], policies=["fifo"])
    assert all(row.solved < 1 and row.shown < 1 and row.overflow == 0 for row in small.rows)
    # What the user said cannot be done again, but it can be searched for.
    values = {one.policy: one.solved for one in small.outcomes if one.kind == "values"}
    assert values == {"tail": False, "fifo": False}
    searched = evaluate(4, windows=[600], policies=["fifo"], search=True)
    assert {one.policy: one.solved for one in searched.outcomes if one.kind == "values"} == {"tail": False, "fifo": True}
    stubborn = evaluate(4, windows=[600], policies=["fifo"], patience=50)
    again = {one.policy: one for one in stubborn.outcomes if one.kind == "failures"}["fifo"]
    assert again.solved
    assert again.steps == again.plan + again.again > again.plan


def test_the_same_seed_gives_the_same_report() -> None:
    one, two = (evaluate(4, windows=[800], policies=["hybrid"], seed=3) for _ in range(2))
    assert one == two


def test_the_verb_prints_a_table_or_json() -> None:
    said = command("eval", "tasks", "--tasks", "2", "--window", "1000", "--policy", "hybrid", "--json")
    assert said.status == 0
    assert {row["policy"] for row in said.json["rows"]} == {"tail", "hybrid"}
    assert command("eval", "tasks", "--window", "0").status == 2


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
    return json.dumps({"verb": request.schema["anyOf"][-1]["properties"]["verb"]["const"]})


def test_a_model_decides_from_the_window_alone_and_the_check_judges_it() -> None:
    def solved(window: int, search: bool, *replies: object) -> dict[tuple[str, str], bool]:
        model = Scripted([*replies] * 200)  # type: ignore[list-item]
        report = evaluate(2, windows=[window], policies=["fifo"], search=search, model=model)
        assert sum(row.agent.asks for row in report.rows) == len(model.requests) > 0
        return {(one.policy, one.kind): one.solved for one in report.outcomes}

    known = solved(LARGE, False, read_figure)
    assert known == {("tail", "rename"): False, ("tail", "values"): True, ("fifo", "rename"): False, ("fifo", "values"): True}
    assert not any(solved(600, False, read_figure).values())
    assert [key for key, done in solved(600, True, read_figure).items() if done] == [("fifo", "values")]
    elsewhere = json.dumps({"verb": "write", "path": "/etc/passwd", "line": 1, "text": ""})
    assert not any(solved(LARGE, False, elsewhere).values())


def test_a_writer_answers_the_policies_questions_in_rows_of_their_own() -> None:
    report = evaluate(4, windows=[1000], policies=["summarize"], writer=Scripted(["They agreed on some figures."] * 500))
    asked = {row.policy: row.writer.asks for row in report.rows}
    assert asked.pop("summarize +model") > 0
    assert asked == {"tail": 0, "summarize": 0}
    assert "writer" in report.table()


def test_bad_arguments_are_named() -> None:
    for wrong in ({"count": 0}, {"windows": []}, {"windows": [0]}, {"policies": ["nobody"]}):
        with pytest.raises(SpecError):
            evaluate(**{"count": 1, **wrong})  # type: ignore[arg-type]


def test_a_command_reads_as_it_is_typed() -> None:
    looks = [step for task in tasks(1, seed=1) for step in task.plan if isinstance(step, Look)]
    assert str(looks[0].command).startswith("search ")
    assert "\n" not in str(msgspec.structs.replace(looks[0].command, text="x"))

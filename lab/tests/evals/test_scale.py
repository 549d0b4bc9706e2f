"""`eval scale`: each made-up fact is one of its kind, its question is answered, and each system is measured apart."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from cli.terminal import kilburn
from kilburn.errors import SpecError
from kilburn_lab.evals.scale import evaluate
from kilburn_lab.evals.scale_facts import fact, facts, questions

pytest.importorskip("numpy")


def test_facts_are_all_different_and_questions_are_about_them() -> None:
    every = list(facts(5000, 3))
    assert len(set(every)) == 5000
    assert every[123] == fact(123, 3) != fact(123, 4)
    asked = questions(5000, 40, 3)
    assert asked == questions(5000, 40, 3)
    for question, wanted in asked:
        assert wanted in every
        person = question.split()[2]
        assert sum(person in one for one in every) == 20


def test_both_store_all_facts_and_find_them() -> None:
    done: list[int] = []
    report = evaluate([300], many=20, progress=lambda at, total: done.append(at))
    assert done == sorted(done)
    for system in ("kilburn", "floor"):
        row = report.row(system, 300)
        assert row.hits >= 0.9
        assert row.words_hits == 1.0
        assert row.rate_vectors is not None
        assert row.rate > row.rate_vectors > 0
        assert row.single is not None
        assert row.single > 0
        assert 0 < row.p50 <= row.p95
        assert row.disk > 300 * 384
        assert row.rss > 1 << 20
    assert "300" in report.table()
    (goal,) = [line.split() for line in report.table().splitlines() if "stored in a second, in batches" in line]
    assert float(goal[-2]) == pytest.approx(report.row("kilburn", 300).rate / 5000, abs=0.01)
    with pytest.raises(KeyError):
        report.row("kilburn", 301)


@pytest.mark.parametrize("wrong", [{"counts": []}, {"counts": [0]}, {"many": 0}, {"peers": {"nobody": "python"}}])
def test_numbers_and_names_that_mean_nothing_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(SpecError):
        evaluate(**{"counts": [10], **wrong})  # type: ignore[arg-type]


def test_a_python_without_the_other_system_is_an_error_with_advice() -> None:
    with pytest.raises(SpecError, match="langgraph failed"):
        evaluate([20], many=2, peers={"langgraph": sys.executable})


@pytest.mark.slow
def test_the_command_wants_a_python_for_each_other_system(tmp_path: Path) -> None:
    assert kilburn("lab", "scale", "--peer", "mem0").status == 2
    said = kilburn("lab", "scale", "--count", "40", "--questions", "3", "--json")
    assert said.status == 0
    assert {row["system"] for row in json.loads(said.out)["rows"]} == {"kilburn", "floor"}

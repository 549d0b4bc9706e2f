from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest
import typer
import typer.main

from kilburn.cli.shell import main
from kilburn.errors import SpecError
from kilburn_lab.cli import lab
from kilburn_lab.cli.verbs import EstimatedProgress, Option, Work, peers_of, verb
from kilburn_lab.evals.measure import Progress, check_known, unwatched
from kilburn_lab.evals.report import EvalReport, table_of


class Weighed(msgspec.Struct, frozen=True, kw_only=True):
    policy: str
    weight: float
    failed: int = 0


class Weights(EvalReport, frozen=True, kw_only=True):
    seed: int
    rows: list[Weighed]

    def table(self) -> str:
        return table_of(self.rows, "policy={policy} | weight={weight:.1f}")


def weigh(
    policies: Sequence[str] = ("fifo", "lru"),
    *,
    factor: float = 1.0,
    heavy: bool = False,
    seed: int = 0,
    progress: Progress = unwatched,
) -> Weights:
    check_known("policy", policies, ["fifo", "lru", "bad"])
    rows = []
    progress(0, len(policies))
    for policy in policies:
        rows.append(Weighed(policy=policy, weight=factor * (10 if heavy else 1), failed=int(policy == "bad")))
        progress(len(rows), len(policies))
    return Weights(seed=seed, rows=rows)


@pytest.fixture
def scales() -> typer.Typer:
    made = typer.Typer(rich_markup_mode=None)
    made.callback()(lambda: None)
    verb(
        "weigh",
        weigh,
        Work("weighing", "scale", 7.0, {"policies": ("lru",), "seed": 3}),
        "Weigh policies.",
        among=made,
        policies=Option("A policy; may be given again.", "SPEC", "--policy"),
        factor=Option("A factor in words.", kind=str, default="one", by={"one": 1.0, "two": 2.0}.__getitem__),
        heavy=Option("Ten times as much."),
        seed=Option("Of nothing.", least=0),
    )
    return made


def test_an_argument_is_an_option(scales: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weigh", "--help"], commands=scales) == 0
    words = " ".join(capsys.readouterr().out.split())
    assert "Weigh policies." in words
    assert all(
        name in words
        for name in ("--policy SPEC", "--heavy", "[default: one]", "Of nothing; 0 by default.", "--csv FILE", "--json")
    )
    assert "Measure what the documentation reports: --policy lru, --seed 3." in words
    assert "--plot" not in words
    assert "--progress" not in words


def test_what_is_not_given_is_the_measures_own(scales: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weigh"], commands=scales) == 0
    assert capsys.readouterr().out == "policy  weight\nfifo       1.0\nlru        1.0\n"
    assert main(["weigh", "--policy", "lru", "--heavy", "--factor", "two", "--seed", "7", "--json"], commands=scales) == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 7, "rows": [{"policy": "lru", "weight": 20.0, "failed": 0}]}


def test_full_is_the_default_of_what_is_not_given(scales: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weigh", "--full", "--json"], commands=scales) == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 3, "rows": [{"policy": "lru", "weight": 1.0, "failed": 0}]}
    assert main(["weigh", "--full", "--seed", "0", "--policy", "fifo", "--json"], commands=scales) == 0
    assert json.loads(capsys.readouterr().out) == {"seed": 0, "rows": [{"policy": "fifo", "weight": 1.0, "failed": 0}]}


def test_every_measurement_has_a_sample_and_the_whole() -> None:
    commands = typer.main.get_command(lab).commands  # type: ignore[attr-defined]
    measures = {**commands, **commands["bench"].commands}
    assert measures.keys() > {"paging", "recall", "load"}
    without = {name for name, each in measures.items() if not any("--full" in option.opts for option in each.params)}
    assert without == {"bench", "trajectories"}


def test_the_size_and_the_time_are_told_first(
    scales: typer.Typer, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["weigh"], commands=scales) == 0
    assert capsys.readouterr().err == "", "KILBURN_QUIET is set for all tests"
    monkeypatch.delenv("KILBURN_QUIET")
    assert main(["weigh"], commands=scales) == 0
    assert capsys.readouterr().err == "2 scales, about 14 s\n"
    times = iter([0.0, 0.0, 55.0, 80.0, 900.0])
    watched: list[tuple[int, int]] = []
    estimate = EstimatedProgress(
        lambda done, total: watched.append((done, total)), Work("going", "run", 6.0, {}), clock=lambda: next(times)
    )
    for done in (20, 24, 25, 30):
        estimate(done, 120)
    assert watched == [(20, 120), (24, 120), (25, 120), (30, 120)]
    assert capsys.readouterr().err == "100 runs, about 10 min\nslower than usual: about 25 min more\n"


def test_rows_are_written_and_no_file_is_replaced(
    scales: typer.Typer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "rows.csv"
    assert main(["weigh", "--csv", str(file)], commands=scales) == 0
    assert file.read_text("utf-8").split() == ["policy,weight,failed", "fifo,1.0,0", "lru,1.0,0"]
    assert main(["weigh", "--policy", "lru", "--csv", str(file)], commands=scales) == 2
    assert "fifo" in file.read_text("utf-8")
    assert main(["weigh", "--policy", "lru", "--csv", str(file), "--force"], commands=scales) == 0
    assert "fifo" not in file.read_text("utf-8")
    capsys.readouterr()


def test_a_policy_that_failed_is_no_success(scales: typer.Typer, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weigh", "--policy", "bad"], commands=scales) == 1
    assert "policy bad failed 1 times" in capsys.readouterr().err
    assert main(["weigh", "--policy", "none"], commands=scales) == 2
    assert "known: fifo, lru, bad" in capsys.readouterr().err


def test_a_system_is_named_with_its_python() -> None:
    assert peers_of(["a=/usr/bin/python", "b=x=y"]) == {"a": "/usr/bin/python", "b": "x=y"}
    assert peers_of(None) == {}
    with pytest.raises(SpecError, match="NAME=PYTHON"):
        peers_of(["a"])

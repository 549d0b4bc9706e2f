"""`eval paging` from the shell; what it measures is tested with the measurement itself."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.terminal import kilburn
from kilburn_lab.evals.report import EvalReport

WORDS = ("lab", "paging", "--sample", 2, "--window", 500, "--policy", "lru", "--policy", "fifo")


def test_a_table_for_people_and_json_for_programs(tmp_path: Path) -> None:
    table = kilburn(*WORDS)
    assert table.status == 0, table.err
    assert {"tail", "lru", "fifo", "hosted", "local"} <= set(table.out.split())
    out = tmp_path / "cells.jsonl"
    found = kilburn(*WORDS, "--json", "--out", out, "--prices", "automatic").json
    assert {(row["policy"], row["window"]) for row in found["rows"]} == {
        (policy, 500) for policy in ("tail", "lru", "fifo", "history")
    }
    assert all(list(row["costs"]) == ["automatic"] for row in found["rows"])
    assert found["outcomes"] == []
    cells = [json.loads(line)["cell"] for line in out.read_text().splitlines()]
    assert {cell["policy"] for cell in cells} == {"tail", "lru", "fifo", "history"}
    assert all(cell["outcomes"] for cell in cells)


def test_a_measurement_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    first = kilburn(*WORDS, "--json", "--out", out).json
    before = out.read_bytes()
    again = kilburn(*WORDS, "--json", "--out", out, "--resume").json
    assert again == first
    assert out.read_bytes() == before


def test_everybody_is_measured_and_lines_fit_the_screen() -> None:
    said = kilburn("lab", "paging", "--all", "--sample", 1, "--window", 500, "--window", 700)
    assert said.status == 0, said.err
    for policy in ("tail+turns", "hybrid", "chain", "tiered", "clear_tool_uses"):
        assert policy in said.out.split()
    assert "above" in said.out
    assert max(map(len, said.out.splitlines())) <= 120


def test_lines_of_tasks_fit_the_screen_and_the_best_baseline_is_named() -> None:
    said = kilburn("lab", "tasks", "--sample", 4, "--window", 1000, "--window", 700, "--policy", "last3", "--prices", "automatic")
    assert said.status == 0, said.err
    assert max(map(len, said.out.splitlines())) <= 120
    assert {"again", "p95", "automatic", "whole"} <= set(said.out.split())
    assert "to best: share solved less that of the best baseline (" in said.out


@pytest.mark.parametrize(("name", "begins"), [("p.svg", b"<?xml"), ("p.png", b"\x89PNG")])
def test_a_picture_is_drawn(tmp_path: Path, name: str, begins: bytes) -> None:
    file = tmp_path / name
    said = kilburn(*WORDS, "--plot", file, "--axis", "hosted")
    assert said.status == 0, said.err
    assert file.read_bytes().startswith(begins)


def test_wrong_input_exits_2(tmp_path: Path) -> None:
    for words in (
        ("--data", tmp_path / "nothing.jsonl"),
        ("--window", 0),
        ("--policy", "no_such_policy"),
        ("--prices", "gratis"),
        ("--pause", -1),
        ("--plot", tmp_path / "p.gif"),
        ("--plot", tmp_path / "p.svg", "--axis", "automatic"),
        ("--resume",),
        ("--model", "no_such_model", "--policy", "summarize"),
    ):
        said = kilburn("lab", "paging", "--sample", 1, *words)
        assert (said.status, said.out) == (2, ""), words
        assert "Traceback" not in said.err


def flat(told: dict[str, Any], before: str = "") -> dict[str, Any]:
    """The fields of a row, those of a field under its name and a point."""
    found: dict[str, Any] = {}
    for name, value in told.items():
        found |= flat(value, f"{before}{name}.") if isinstance(value, dict) else {before + name: value}
    return found


def test_rows_are_written_as_csv_with_the_fields_of_the_json(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    said = kilburn(*WORDS, "--json", "--csv", file)
    assert said.status == 0, said.err
    assert file.read_bytes().startswith(b"policy,window,")
    assert file.read_bytes().count(b"\r\n") == 5
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    for row, told in zip(rows, said.json["rows"], strict=True):
        plain = flat(told)
        assert row == {name: "" if value is None else str(value) for name, value in plain.items()} | dict.fromkeys(
            row.keys() - plain.keys(), ""
        )
    again = kilburn(*WORDS, "--csv", file)
    assert (again.status, again.out) == (2, "")
    assert "--force" in again.err
    assert kilburn(*WORDS, "--csv", file, "--force").status == 0


class _Tried(msgspec.Struct, frozen=True):
    name: str
    right: bool
    parts: tuple[int, ...]
    costs: dict[int, float | None]


class _Report(EvalReport, frozen=True, kw_only=True):
    rows: list[_Tried]


def test_csv_quotes_what_has_to_be_quoted_and_takes_rows_of_other_fields() -> None:
    report = _Report(rows=[_Tried('a "b", c\nd', True, (1, 2), {1: 0.5}), _Tried("é", False, (), {2: None})])
    heads, *rows = csv.reader(io.StringIO(report.to_csv(), newline=""))
    assert heads == ["name", "right", "parts", "costs.1", "costs.2"]
    assert rows == [['a "b", c\nd', "true", "[1,2]", "0.5", ""], ["é", "false", "[]", "", ""]]
    assert list(csv.reader(io.StringIO(_Report(rows=[]).to_csv()))) == [[]]


@pytest.mark.parametrize(
    "words",
    [
        ("lab", "drift", "--policy", "fifo", "--arm", "plain", "--sample", 1, "--passes", 1),
        ("lab", "kv", "--sample", 2, "--capacity", 1_000_000),
        ("lab", "table", "--sample", 1, "--interactions", 3, "--policy", "lru"),
        ("lab", "tasks", "--sample", 1, "--window", 1000, "--policy", "fifo"),
        ("lab", "answers", "--sample", 1, "--questions", 1, "--tokens", 2000, "--window", 1000, "--policy", "fifo"),
        ("lab", "change", "--sample", 1, "--mode", "claims"),
        ("lab", "poisoning", "--sample", 1, "--attack", "query"),
    ],
)
def test_every_measurement_writes_its_rows(tmp_path: Path, words: tuple[object, ...]) -> None:
    said = kilburn(*words, "--json", "--csv", tmp_path / "rows.csv")
    assert said.status == 0, said.err
    listed = next(said.json[name] for name in ("rows", "shares", "rates") if name in said.json)
    with (tmp_path / "rows.csv").open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    assert len(rows) == len(listed) > 0
    assert {name.partition(".")[0] for name in rows[0]} <= set(listed[0])

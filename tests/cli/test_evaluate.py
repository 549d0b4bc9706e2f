"""`eval paging` from the shell; what it measures is tested with the measurement itself."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.terminal import kilburn

WORDS = ("eval", "paging", "--sample", 2, "--window", 500, "--policy", "lru", "--policy", "fifo")


def test_a_table_for_people_and_json_for_programs(tmp_path: Path) -> None:
    table = kilburn(*WORDS)
    assert table.status == 0, table.err
    assert {"tail", "lru", "fifo", "hosted", "local"} <= set(table.out.split())
    out = tmp_path / "cells.jsonl"
    found = kilburn(*WORDS, "--json", "--out", out, "--prices", "automatic").json
    assert {(row["policy"], row["window"]) for row in found["rows"]} == {("tail", 500), ("lru", 500), ("fifo", 500)}
    assert all(list(row["costs"]) == ["automatic"] for row in found["rows"])
    assert found["outcomes"] == []
    cells = [json.loads(line)["cell"] for line in out.read_text().splitlines()]
    assert {cell["policy"] for cell in cells} == {"tail", "lru", "fifo"}
    assert all(cell["outcomes"] for cell in cells)


def test_a_measurement_goes_on_where_it_was_stopped(tmp_path: Path) -> None:
    out = tmp_path / "cells.jsonl"
    first = kilburn(*WORDS, "--json", "--out", out).json
    before = out.read_bytes()
    again = kilburn(*WORDS, "--json", "--out", out, "--resume").json
    assert again == first
    assert out.read_bytes() == before


def test_everybody_is_measured_and_lines_fit_the_screen() -> None:
    said = kilburn("eval", "paging", "--all", "--sample", 1, "--window", 500, "--window", 700)
    assert said.status == 0, said.err
    for policy in ("tail+bm25", "hybrid", "chain", "tiered", "clear_tool_uses"):
        assert policy in said.out.split()
    assert "above" in said.out
    assert max(map(len, said.out.splitlines())) <= 120


def test_lines_of_tasks_fit_the_screen_and_the_best_baseline_is_named() -> None:
    said = kilburn("eval", "tasks", "--tasks", 4, "--window", 1000, "--window", 700, "--policy", "last3", "--prices", "automatic")
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
        said = kilburn("eval", "paging", "--sample", 1, *words)
        assert (said.status, said.out) == (2, ""), words
        assert "Traceback" not in said.err

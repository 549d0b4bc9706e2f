"""`eval paging` from the shell; what it measures is tested with the measurement itself."""

from __future__ import annotations

import json
from pathlib import Path

from cli.terminal import kilburn


def test_a_table_for_people_and_json_for_programs(tmp_path: Path) -> None:
    words = ("eval", "paging", "--sample", 2, "--window", 500, "--policy", "lru", "--policy", "fifo")
    table = kilburn(*words)
    assert table.status == 0, table.err
    assert {"tail", "lru", "fifo"} <= set(table.out.split())
    out = tmp_path / "outcomes.json"
    found = kilburn(*words, "--json", "--out", out).json
    assert {(row["policy"], row["window"]) for row in found["rows"]} == {("tail", 500), ("lru", 500), ("fifo", 500)}
    assert found["outcomes"] == []
    assert json.loads(out.read_text())["outcomes"] != []


def test_wrong_input_exits_2(tmp_path: Path) -> None:
    for words in (("--data", tmp_path / "nothing.jsonl"), ("--window", 0), ("--policy", "no_such_policy")):
        said = kilburn("eval", "paging", "--sample", 1, *words)
        assert (said.status, said.out) == (2, "")
        assert "Traceback" not in said.err

"""`mementos`: a trace in, training data out, nothing of it changed; what is no trace is refused whole."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.terminal import Said, kilburn
from kilburn.wire.mementos import BLOCK_START, parse
from mementos import app

STEP = (
    "Now step {0}. By the product rule we get f({0}) = {0} + 12, and that is more than the bound before it. "
    "I check it again: {0} + 12 - 12 = {0} holds. Therefore f({0}) = {0} + 12.\n\n"
)
TRACE = "".join(STEP.format(number) for number in range(40, 60))


def mementos(*words: object) -> Said:
    """Run the recipe in this process."""
    return kilburn(*words, commands=app, name="mementos.py")


def test_a_text_becomes_one_record(tmp_path: Path) -> None:
    source = tmp_path / "trace.txt"
    source.write_text(TRACE, encoding="utf-8")
    done = mementos(source, "--tokenizer", "chars/4", "--least", 100)
    assert done.status == 0, done.err
    record = json.loads(done.out)
    assert "".join(block["text"] for block in record["blocks"]) == TRACE
    assert len(record["blocks"]) >= 2
    assert len(parse(record["completion"]).blocks) == len(record["blocks"])
    assert "1 trace" in done.err
    assert "of 10 in the mean" in done.err


def test_line_ends_of_windows_stay(tmp_path: Path) -> None:
    source, trace = tmp_path / "trace.txt", TRACE.replace("\n", "\r\n")
    source.write_bytes(trace.encode())
    done = mementos(source, "--tokenizer", "chars/4", "--least", 100)
    assert "".join(block["text"] for block in json.loads(done.out)["blocks"]) == trace


def test_lines_keep_their_problem_and_go_to_a_file(tmp_path: Path) -> None:
    source, out = tmp_path / "runs.jsonl", tmp_path / "out.jsonl"
    lines = [{"problem": f"P{number}", "reasoning": TRACE, "other": 1} for number in range(3)]
    source.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    done = mementos(source, "--out", out, "--tokenizer", "chars/4")
    assert (done.status, done.out) == (0, ""), done.err
    records = [json.loads(line) for line in out.read_text(encoding="utf-8").splitlines()]
    assert [record["problem"] for record in records] == ["P0", "P1", "P2"]
    assert [record["source"] for record in records] == ["runs.jsonl:1", "runs.jsonl:2", "runs.jsonl:3"]
    assert "other" not in records[0]
    assert [path.name for path in tmp_path.iterdir() if path.name.endswith(".part")] == []


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.jsonl", '{"note": "x"}', ()),
        ("a.jsonl", '{"text": "x"}', ("--key", "trace")),
        ("a.jsonl", '{"text": "x"}\nnot json', ()),
        ("a.jsonl", json.dumps({"text": TRACE}) + "\n" + json.dumps({"text": BLOCK_START}), ()),
        ("a.txt", " \n", ()),
    ],
)
def test_what_is_no_trace_is_refused_and_nothing_is_written(tmp_path: Path, name: str, text: str, words: tuple[str, ...]) -> None:
    source, out = tmp_path / name, tmp_path / "out.jsonl"
    source.write_text(text, encoding="utf-8")
    done = mementos(source, "--out", out, *words)
    assert done.status == 2
    assert done.err.startswith("mementos.py: ")
    assert not out.exists()


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xff\xfe\x00")
    for name in ("a.txt", "missing.txt"):
        done = mementos(tmp_path / name)
        assert done.status == 2
        assert done.err.count("\n") == 1
        assert name in done.err

"""`kilburn demo` as people and programs call it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import kilburn.cli.demo
from kilburn.cli.shell import main

assert kilburn.cli.demo.demo


def test_programs_get_json(shared_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = [
        "--library",
        str(shared_tree),
        "--db",
        str(tmp_path / "d.db"),
        "--questions",
        "15",
        "--seed",
        "4",
    ]
    assert main(["demo", "--window", "2500", "--json", *given]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] is True
    assert (said["questions"], said["exact"], said["overflow"], said["lost"]) == (15, 15, 0, 0)
    assert said["seed"] == 4
    assert said["output_tokens"] > 10 * said["window"] == 25_000
    assert {"kind", "question", "expected", "answer", "exact", "address", "where"} <= said["asked"][0].keys()
    assert [rival["name"] for rival in said["rivals"]] == ["truncation", "summarisation"]
    assert {"work", "check", "questions", "answers", "rivals"} <= said["seconds"].keys()
    assert len(said["curve"]) == said["prompts"]


def test_people_get_tables_and_a_way_on(shared_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    db = tmp_path / "d.db"
    assert main(["demo", "--library", str(shared_tree), "--db", str(db), "--questions", "10"]) == 0
    said = capsys.readouterr()
    assert "10 of 10" in said.out
    assert "plain truncation" in said.out
    assert "Nothing overflowed, nothing was lost, everything was answered." in said.out
    assert f"kilburn --db {db} recall library p" in said.out
    assert "answers from memory alone" in said.err
    assert "\x1b" not in said.out


def test_without_anything_to_ask_about_it_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("# nothing\n")
    assert main(["demo", "--library", str(tmp_path / "lib"), "--db", str(tmp_path / "d.db")]) == 1
    assert "FAILED" in capsys.readouterr().out


def test_what_cannot_be_used_is_refused_at_once(shared_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--library", str(tmp_path / "nowhere"), "--db", str(tmp_path / "d.db")]) == 2
    assert main(["demo", "--library", str(shared_tree), "--db", str(tmp_path / "e.db"), "--model", "no_such_model"]) == 2
    assert "Traceback" not in capsys.readouterr().err


def test_a_model_that_cannot_be_loaded_is_an_error_before_the_work(
    shared_tree: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(64))
    db = tmp_path / "d.db"
    assert main(["demo", "--db", str(db), "--library", str(shared_tree), "--model", str(broken)]) == 1
    assert not db.exists()
    shown = capsys.readouterr()
    assert shown.out == ""
    assert any(reason in shown.err for reason in ("broken.gguf", "xllamacpp is not installed"))

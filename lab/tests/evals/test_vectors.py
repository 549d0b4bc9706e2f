"""The measurement of codecs."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from kilburn.cli import main
from kilburn.errors import InvalidMessage, SpecError
from kilburn.search.embedders.hashing import Hashing
from kilburn_lab.evals.vectors import evaluate, read


def test_rows_facts_and_the_same_figures_again(tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = evaluate(counts=[300], embedder="hashing", queries=10, progress=lambda *now: seen.append(now))
    assert seen == [(number, 6) for number in range(7)]
    assert report.row("int8", 300).rescored == 1
    assert report.row("int8", 300).bytes == 388
    assert "int8 instead" in report.row("pq(96)", 300).note
    assert report.facts.words == 1
    assert report.facts.meaning is not None
    assert "pca(96)" in report.table()
    again = evaluate(counts=[300], embedder="hashing", queries=10)
    assert [(row.alone, row.rescored) for row in again.rows] == [(row.alone, row.rescored) for row in report.rows]


def test_passages_and_vectors_of_a_file(tmp_path: Path) -> None:
    lines = tmp_path / "a.jsonl"
    docs = [{"id": str(number), "text": f"passage number{number} of something"} for number in range(60)]
    lines.write_text(json.dumps({"name": "a", "docs": docs, "queries": [{"text": "number7"}]}) + "\n")
    source = read(lines, Hashing(32), 50, 5, 0)
    assert (source.vectors.shape, source.queries.shape) == ((50, 32), (1, 32))
    np.save(tmp_path / "a.npy", source.vectors)
    report = evaluate(tmp_path / "a.npy", counts=[40, 400], queries=5)
    assert "mixtures" in report.data
    assert report.row("scan", 400).rescored > 0.8


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("a.jsonl", b""),
        ("a.jsonl", b"{}\n"),
        ("a.jsonl", b"[1]\n"),
        ("a.jsonl", b'{"text": 1}\n' * 30),
        ("a.jsonl", b"\xff\xfe"),
        ("a.jsonl.gz", b"no gzip"),
        ("a.npy", b"\x93NUMPY"),
        ("a.npy", b"(lp0\n."),
    ],
)
def test_a_file_that_is_something_else_is_named(tmp_path: Path, name: str, data: bytes) -> None:
    (tmp_path / name).write_bytes(data)
    with pytest.raises((SpecError, InvalidMessage), match=name):
        evaluate(tmp_path / name, counts=[40], embedder="hashing")


def test_rows_without_a_direction_and_senseless_counts_are_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "zeros.npy", np.zeros((50, 8)))
    np.save(tmp_path / "line.npy", np.zeros(50))
    for name in ("zeros.npy", "line.npy", "missing.npy"):
        with pytest.raises(SpecError):
            evaluate(tmp_path / name, counts=[40])
    with pytest.raises(SpecError, match="known: scan, int8"):
        evaluate(counts=[40], only=["zip"])
    for counts in ([], [5]):
        with pytest.raises(SpecError, match="counts"):
            evaluate(counts=counts)


def test_the_verb_draws_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "vectors.svg"
    assert (
        main(["lab", "vectors", "--count", "200", "--queries", "5", "--codec", "binary", "--plot", str(picture), "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out.splitlines()[0])["queries"] == 5
    assert picture.read_bytes().startswith(b"<?xml")

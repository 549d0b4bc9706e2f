"""`eval recall`: rankings before answers, scores from the file, and what must not leak."""

import json
import random
from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn as command
from kilburn.errors import InvalidMessage
from kilburn_lab.evals.corpora import CorpusQuery, answers_of, corpora, renamed, seconds, synthetic
from kilburn_lab.evals.recall import FLOOR, RankedTurn, RecallLine, rank, written
from kilburn_lab.evals.recall_report import read_rows, report

MADE, ANSWERS = synthetic(0, conversations=3)


def figure(rows: list[RecallLine], answers: object = ANSWERS) -> float:
    return report({"blend": rows}, answers).rows[0].at[5]


def test_a_question_has_no_field_for_its_answer(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    line = {
        "name": "n",
        "docs": [{"id": "1", "text": "t"}],
        "queries": [{"id": "q", "text": "t", "gold": ["1"], "category": "c"}],
    }
    path.write_bytes(msgspec.json.encode(line))
    [corpus] = corpora(path)
    assert corpus.queries == [CorpusQuery("q", "t")]
    assert answers_of(path) == {("n", "q"): (frozenset({"1"}), "c")}
    path.write_bytes(msgspec.json.encode({**line, "queries": [{"id": "q", "text": "t", "gold": [], "category": 3}]}))
    assert answers_of(path) == {("n", "q"): (frozenset(), "3")}
    path.write_text("{}")
    with pytest.raises(InvalidMessage, match=":1: "):
        list(corpora(path))


def test_blend_finds_and_shuffled_answers_are_chance(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    written(rank(MADE), path)
    rows = read_rows(path)
    assert {(row.name, row.query) for row in rows} == set(ANSWERS)
    assert figure(rows) > 0.9
    chance = random.Random(1)
    docs = {corpus.name: [said.id for said in corpus.docs] for corpus in MADE}
    shuffled = {key: (frozenset(chance.sample(docs[key[0]], len(gold))), about) for key, (gold, about) in ANSWERS.items()}
    assert figure(rows, shuffled) < 0.25


def test_other_names_do_not_matter() -> None:
    rows = list(rank([renamed(corpus, 7) for corpus in MADE]))
    assert figure(rows) > 0.9


def test_the_floor_and_words() -> None:
    rankings = {name: list(rank(MADE, ranking=name)) for name in ("blend", "words", FLOOR)}
    told = report(rankings, ANSWERS)
    blend, words, _ = told.rows
    assert blend.at[5] >= words.at[5]
    assert blend.gain["R@10"][1] <= blend.gain["R@10"][0] <= blend.gain["R@10"][2]
    assert "floor" in told.table()


def test_a_budget_takes_whole_messages() -> None:
    row = RecallLine("n", "q", [RankedTurn("long", 3.0, 600), RankedTurn("a", 2.0, 300), RankedTurn("b", 1.0, 300)], 1.0)
    one = report({"blend": [row]}, {("n", "q"): (frozenset({"long", "a", "b"}), "")}).rows[0]
    assert one.within == {500: pytest.approx(1 / 3), 1000: pytest.approx(2 / 3), 2000: 1.0, 4000: 1.0}


def test_times_of_files() -> None:
    assert seconds("1:56 pm on 8 May, 2023") == 1683554160.0
    assert seconds("March-15-2024") == 1710460800.0
    assert seconds("2024-03-15T00:00:00+00:00") == 1710460800.0
    assert seconds("soon") is None
    assert seconds(None) is None


def test_the_verb_writes_rankings_and_says_when_it_searches_by_words_alone(tmp_path: Path) -> None:
    """No model is on this machine, and none can be fetched."""
    for name, more in (("words", ["--embedder", "none"]), ("auto", [])):
        out = tmp_path / f"{name}.jsonl"
        said = command("lab", "recall", "--out", str(out), *more, "--json")
        assert said.status == 0, said.err
        assert ("searched by words alone" in said.err) is (name == "auto")
        rows = [json.loads(line) for line in out.read_text().splitlines()]
        assert rows
        assert all({"name", "query", "ranked", "ms"} <= row.keys() and "gold" not in row for row in rows)
    assert command("lab", "recall", "--out", str(tmp_path / "x"), "--embedder", "nobody").status == 2

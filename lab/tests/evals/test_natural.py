"""`lab natural`: turns that answer questions about an old conversation, in the prompt at the question."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from cli.terminal import kilburn as command
from kilburn.errors import SpecError
from kilburn_lab.evals.baselines import HISTORY
from kilburn_lab.evals.corpora import synthetic
from kilburn_lab.evals.natural import evaluate, score

WINDOW = 500
TALKS, ANSWERS = synthetic(0, 2, 20)


def test_a_turn_counts_whole_or_by_passages_and_white_space_does_not_matter() -> None:
    turn = "a" * 150 + "b" * 100
    assert score(f"before\n{turn}\nafter", [turn]) == (1.0, 1.0)
    assert score(turn[:200], [turn]) == (0.0, 0.5)
    assert score("It was  in\nLisbon.", ["It was in Lisbon.", "Never."]) == (0.5, 0.5)


def test_a_search_shows_more_than_the_newest_text_and_the_full_history_shows_all() -> None:
    report = evaluate(TALKS, ANSWERS, windows=[WINDOW], policies=["tail+turns", "tail+chunks", "hybrid"])
    shown = {row.policy: row.shown for row in report.rows}
    assert shown["tail"] < 0.5 < shown["tail+chunks"] <= shown[HISTORY] == 1.0
    assert shown["tail"] < shown["hybrid"]
    assert {row.overflow for row in report.rows if row.policy != HISTORY} == {0}
    whole, turns = report.row(HISTORY, WINDOW), report.row("tail+turns", WINDOW)
    assert (whole.prefix, whole.brought, whole.reread_question, whole.reread_session) == (1.0, 0.0, 0.0, 0)
    assert turns.brought > 0
    assert turns.reread_each == pytest.approx(turns.reread_question * turns.questions / turns.right)
    assert turns.best in ("tail+turns", "tail+chunks")
    assert [search.tokens for search in report.searches] == [400, 1000]
    assert "full history" in report.table()


def test_a_question_is_asked_in_a_copy_and_the_next_one_sees_nothing_of_it() -> None:
    backwards = [msgspec.structs.replace(talk, queries=talk.queries[::-1]) for talk in TALKS]
    rows = [evaluate(talks, ANSWERS, windows=[WINDOW], policies=["hybrid"]).row("hybrid", WINDOW) for talks in (TALKS, backwards)]
    assert rows[0].categories == rows[1].categories
    assert (rows[0].brought, rows[0].reread_question) == (rows[1].brought, rows[1].reread_question)


def test_answers_of_other_questions_are_shown_by_chance_only() -> None:
    golds = [gold for gold, _ in ANSWERS.values()]
    talk = TALKS[0].name
    own = [key for key in ANSWERS if key[0] == talk]
    swapped = {key: (golds[(at + 1) % len(own)], "") for at, key in enumerate(own)}
    true = evaluate(TALKS[:1], ANSWERS, windows=[WINDOW], policies=["hybrid"]).row("hybrid", WINDOW)
    report = evaluate(TALKS[:1], swapped, windows=[WINDOW], policies=["hybrid"])
    leak, whole = report.row("hybrid", WINDOW), report.row(HISTORY, WINDOW)
    # A prompt that shows a quarter of the history shows a quarter of any turns by chance, to within one question.
    chance = leak.prompt / whole.prompt
    assert leak.shown <= chance + 1 / leak.questions < true.shown


def test_the_verb_reads_a_file_and_what_means_nothing_is_refused(tmp_path: Path) -> None:
    talk = msgspec.to_builtins(TALKS[0])
    talk["queries"] = [{**query, "gold": sorted(ANSWERS[TALKS[0].name, query["id"]][0])} for query in talk["queries"]]
    (tmp_path / "talks.jsonl").write_bytes(msgspec.json.encode(talk))
    small = ("lab", "natural", "--sample", "2", "--window", str(WINDOW), "--policy", "tail+turns", "--embedder", "none")
    done = command(*small, "--data", str(tmp_path / "talks.jsonl"), "--json")
    assert done.status == 0
    assert {row["policy"]: row["questions"] for row in done.json["rows"]} == {"tail": 2, "tail+turns": 2, HISTORY: 2}
    assert {bill["provider"] for bill in done.json["bills"]} >= {"anthropic", "openai"}
    assert command("lab", "natural", "--window", "0").status == 2
    with pytest.raises(SpecError, match="no question"):
        evaluate(TALKS, {})
